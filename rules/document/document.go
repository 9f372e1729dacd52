// Package document walks one strict YAML document and collects everything that is wrong with it, each with its place, field, value,
// bound and what to write instead.
//
// It knows no schema: whoever reads a kind of file asks for the fields that the file may have. It does no I/O.
package document

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// Problem is one thing that is wrong, or doubtful, in a file.
type Problem struct {
	File    string `json:"file"`
	Line    int    `json:"line"`            // from 1
	Column  int    `json:"column"`          // from 1
	Field   string `json:"field,omitempty"` // such as rules[2].window; "" = the file as a whole
	Message string `json:"message"`         // value, bound and fix
	Warning bool   `json:"warning"`         // the file is taken nevertheless
}

// Error is FILE:LINE:COLUMN: FIELD: MESSAGE, which editors can follow.
func (p Problem) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s:%d:%d: ", p.File, p.Line, p.Column)
	if p.Warning {
		b.WriteString("warning: ")
	}
	if p.Field != "" {
		b.WriteString(p.Field + ": ")
	}
	return b.String() + p.Message
}

// Refused joins the problems that are no warnings, in the order of the file. nil = the file is taken.
func Refused(problems []Problem) error {
	var errs []error
	for _, p := range problems {
		if !p.Warning {
			errs = append(errs, p)
		}
	}
	return errors.Join(errs...)
}

// file collects the problems of one file.
type file struct {
	name     string
	lines    []string
	problems []Problem
}

func (f *file) add(line, column int, field string, warning bool, format string, args ...any) {
	f.problems = append(f.problems, Problem{f.name, max(line, 1), max(column, 1), field, fmt.Sprintf(format, args...), warning})
}

// Read hands the root of the document to read and returns all problems in the order of the file: its own (no YAML, more than one
// document) and those that read found. read is not called when there is no document.
func Read(name string, data []byte, read func(root Node)) []Problem {
	f := &file{name: name, lines: linesOf(data)}
	if root, ok := f.root(data); ok {
		read(Node{file: f, content: root, at: root})
	}
	slices.SortStableFunc(f.problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return f.problems
}

// yamlLine is where yaml.v3 puts the line in its errors.
var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?(?s:(.*))$`)

func (f *file) root(data []byte) (*yaml.Node, bool) {
	if line, column, ok := unreadable(data); ok {
		f.add(line, column, "", false, "there is a byte that is no text: write the file in UTF-8")
		return nil, false
	}
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var first, second yaml.Node
	if err := decoder.Decode(&first); errors.Is(err, io.EOF) {
		f.add(1, 1, "", false, "the file is empty")
		return nil, false
	} else if err != nil {
		f.syntax(err)
		return nil, false
	}
	if err := decoder.Decode(&second); err == nil {
		f.add(second.Line, second.Column, "", false, "a second document begins here: put it into a file of its own")
	} else if !errors.Is(err, io.EOF) {
		f.syntax(err)
	}
	if len(first.Content) == 0 {
		f.add(1, 1, "", false, "the file is empty")
		return nil, false
	}
	return first.Content[0], true
}

func (f *file) syntax(err error) {
	line, text := 1, err.Error()
	if m := yamlLine.FindStringSubmatch(text); m != nil {
		text = m[2]
		if n, err := strconv.Atoi(m[1]); err == nil {
			line = min(n, len(f.lines)) // it may be one too high
		}
	}
	f.add(line, 1, "", false, "it is no YAML: %s", text)
}

// unreadable finds the first byte that is not printable UTF-8.
func unreadable(data []byte) (line, column int, found bool) {
	for i := 0; i < len(data); {
		r, size := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && size == 1 || r < ' ' && !strings.ContainsRune("\t\r\n", r) || r == 0x7f || r == 0xfffe || r == 0xffff {
			before := linesOf(data[:i])
			return len(before), utf8.RuneCountInString(before[len(before)-1]) + 1, true
		}
		i += size
	}
	return 0, 0, false
}

// breaks are what YAML counts as the end of a line.
var breaks = strings.NewReplacer("\r\n", "\n", "\r", "\n", "\u0085", "\n", "\u2028", "\n", "\u2029", "\n")

func linesOf(data []byte) []string { return strings.Split(breaks.Replace(string(data)), "\n") }
