package document

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Node is a value of the document, or the place where one is missing.
type Node struct {
	Field   string // its path, such as rules[2].window
	Missing bool   // it is not there; its place is that of what it is missing from

	file    *file
	content *yaml.Node // never an alias
	at      *yaml.Node // where it stands; the alias if it is one
}

// Fail notes that the node is wrong. The text says value, bound and fix.
func (n Node) Fail(format string, args ...any) {
	n.file.add(n.at.Line, n.at.Column, n.Field, false, format, args...)
}

// FailAt is Fail, columns to the right of where the node begins.
func (n Node) FailAt(columns int, format string, args ...any) {
	n.file.add(n.at.Line, n.at.Column+columns, n.Field, false, format, args...)
}

// Warn notes that the node is doubtful.
func (n Node) Warn(format string, args ...any) {
	n.file.add(n.at.Line, n.at.Column, n.Field, true, format, args...)
}

// IsScalar says that the node is one value, no list or mapping.
func (n Node) IsScalar() bool { return !n.Missing && n.content.Kind == yaml.ScalarNode }

// Line is where the node stands, from 1.
func (n Node) Line() int { return max(n.at.Line, 1) }

// Column is where the node stands, from 1.
func (n Node) Column() int { return max(n.at.Column, 1) }

// Verbatim says that the node is a scalar whose text stands in the file as it is, on one line and without quotes.
func (n Node) Verbatim() bool {
	if n.Missing || n.content != n.at || n.content.Kind != yaml.ScalarNode || n.content.Value == "" || n.Line() > len(n.file.lines) {
		return false
	}
	line := []rune(n.file.lines[n.Line()-1])
	return n.Column() <= len(line) && strings.HasPrefix(string(line[n.Column()-1:]), n.content.Value)
}

// child is a part of n. An alias stands for what it names.
func (n Node) child(field string, v *yaml.Node) Node {
	c := Node{Field: field, file: n.file, content: v, at: v}
	if v.Kind == yaml.AliasNode {
		c.content = v.Alias
	}
	return c
}

// Fields are the values of a mapping by name, one for every known name: those that the file does not have are Missing. A name that is
// not known, or there twice, is a problem; so is something that is no mapping, for which ok is false.
func (n Node) Fields(known ...string) (fields map[string]Node, ok bool) {
	fields = make(map[string]Node, len(known))
	for _, name := range known {
		fields[name] = Node{Field: n.join(name), Missing: true, file: n.file, content: n.content, at: n.at}
	}
	if n.Missing {
		return fields, false
	}
	if n.content.Kind != yaml.MappingNode {
		n.Fail("it is %s: write a mapping of %s", kindOf(n.content), strings.Join(known, ", "))
		return fields, false
	}
	for i := 0; i+1 < len(n.content.Content); i += 2 {
		key := n.child(n.join(n.content.Content[i].Value), n.content.Content[i])
		switch have, is := fields[key.content.Value]; {
		case key.content.Kind != yaml.ScalarNode:
			n.Fail("a name is %s: the names are %s", kindOf(key.content), strings.Join(known, ", "))
		case !is:
			key.Fail("there is no such field: %s", didYouMean(key.content.Value, known))
		case !have.Missing:
			key.Fail("it is there twice, first in line %d: leave one out", have.Line())
		default:
			fields[key.content.Value] = n.child(n.join(key.content.Value), n.content.Content[i+1])
		}
	}
	return fields, true
}

// Entries are the values of a mapping with names of the file's own, in the order of the file. A name that is there twice is a problem.
func (n Node) Entries() (names []string, values []Node) {
	if n.Missing {
		return nil, nil
	}
	if n.content.Kind != yaml.MappingNode {
		n.Fail("it is %s: write a mapping", kindOf(n.content))
		return nil, nil
	}
	for i := 0; i+1 < len(n.content.Content); i += 2 {
		key := n.child(n.join(n.content.Content[i].Value), n.content.Content[i])
		switch {
		case key.content.Kind != yaml.ScalarNode:
			n.Fail("a name is %s: write a text", kindOf(key.content))
		case slices.Contains(names, key.content.Value):
			key.Fail("it is there twice: leave one out")
		default:
			names = append(names, key.content.Value)
			values = append(values, n.child(n.join(key.content.Value), n.content.Content[i+1]))
		}
	}
	return names, values
}

// AtLeastOne are the values of a list that must not be empty. What is missing or empty is a problem, which says what to write.
func (n Node) AtLeastOne(write string) []Node {
	items := n.Items()
	switch {
	case n.Missing:
		n.Fail("it is missing: write %s", write)
	case n.content.Kind == yaml.SequenceNode && len(items) == 0:
		n.Fail("it is empty: write %s", write)
	}
	return items
}

// Items are the values of a list, none where it is missing. Something that is no list is a problem.
func (n Node) Items() (items []Node) {
	if n.Missing {
		return nil
	}
	if n.content.Kind != yaml.SequenceNode {
		n.Fail("it is %s: write a list", kindOf(n.content))
		return nil
	}
	for i, v := range n.content.Content {
		items = append(items, n.child(n.Field+"["+strconv.Itoa(i)+"]", v))
	}
	return items
}

// scalar is the text of a scalar; ok is false for what is missing, and with a problem for what is empty or no scalar.
func (n Node) scalar() (text string, ok bool) {
	switch {
	case n.Missing:
		return "", false
	case n.content.Kind != yaml.ScalarNode:
		n.Fail("it is %s: write one value", kindOf(n.content))
		return "", false
	case n.content.Tag == "!!null":
		n.Fail("it has no value: write one, or leave the field out")
		return "", false
	}
	return n.content.Value, true
}

// Text is a text without space around it. What is missing or empty is a problem, which says what to write.
func (n Node) Text(write string) string {
	text, ok := n.scalar()
	text = strings.TrimSpace(text)
	switch {
	case n.Missing:
		n.Fail("it is missing: write %s", write)
	case ok && text == "":
		n.Fail("it is empty: write %s", write)
	}
	return text
}

// Duration is from least to most. Where it is wrong, it is what was probably meant, so that the rest can be checked; fallback where
// it is missing, or says nothing.
func (n Node) Duration(fallback, least, most time.Duration) time.Duration {
	text, ok := n.scalar()
	if !ok {
		return fallback
	}
	d, err := time.ParseDuration(text)
	if seconds, numberErr := time.ParseDuration(text + "s"); err != nil && numberErr == nil {
		d = min(max(seconds.Round(time.Millisecond), least), most)
		n.Fail("%q has no unit: write %s", text, Short(d))
		return d
	}
	switch {
	case err != nil:
		n.Fail("%q is no duration: write one like 90s, 2m or 1h30m", text)
		return fallback
	case d < least:
		n.Fail("%s is too short: write %s to %s", text, Short(least), Short(most))
	case d > most:
		n.Fail("%s is too long: write %s to %s", text, Short(least), Short(most))
	case d%time.Millisecond != 0:
		n.Fail("%s is finer than a millisecond: write %s", text, Short(max(d.Round(time.Millisecond), time.Millisecond)))
	}
	return min(max(d.Round(time.Millisecond), least), most)
}

// OneOf is one of some words; fallback if it is missing or wrong.
func (n Node) OneOf(fallback string, words ...string) string {
	text, ok := n.scalar()
	if !ok {
		return fallback
	}
	if !slices.Contains(words, text) {
		n.Fail("%q is unknown: %s", text, didYouMean(text, words))
		return fallback
	}
	return text
}

// Is demands one certain text.
func (n Node) Is(want string) {
	if text := n.Text(want); text != "" && text != want {
		n.Fail("%q is not what this version reads: write %s", text, want)
	}
}

// Bool is true or false; fallback if it is missing or wrong.
func (n Node) Bool(fallback bool) bool {
	text := n.OneOf(strconv.FormatBool(fallback), "true", "false")
	return text == "true"
}

// Int is from least to most; fallback if it is missing or wrong.
func (n Node) Int(fallback, least, most int) int {
	text, ok := n.scalar()
	if !ok {
		return fallback
	}
	i, err := strconv.Atoi(text)
	if err != nil || i < least || i > most {
		n.Fail("%q is no number from %d to %d: write one", text, least, most)
		return fallback
	}
	return i
}

func (n Node) join(name string) string {
	if n.Field == "" {
		return name
	}
	return n.Field + "." + name
}

func kindOf(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	if n.Tag == "!!null" {
		return "empty"
	}
	return strconv.Quote(n.Value)
}

// Short writes a duration without the zeros that String puts at its end: 1h, not 1h0m0s.
func Short(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// didYouMean names the word that a wrong one is likely to stand for, or all of them.
func didYouMean(wrong string, words []string) string {
	best, nearest := "", 0
	for _, w := range words {
		if d := distance(strings.ToLower(wrong), strings.ToLower(w)); d <= 1+len(w)/4 && (best == "" || d < nearest) {
			best, nearest = w, d
		}
	}
	if best != "" {
		return "write " + best
	}
	return "write one of " + strings.Join(words, ", ")
}

// distance is how many letters must be put in, left out or changed to make b of a (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}
