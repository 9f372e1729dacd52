package rules

import (
	_ "embed"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v3"
)

// What a rule has where its file says nothing.
const (
	defaultWindow  = 60 * time.Second
	defaultMaxAge  = 15 * time.Second // three scrapes of 5 s
	defaultJoinFor = 120 * time.Second
	scrapesToHold  = 15 * time.Second // holdFor is at least the window and three scrapes
)

// apiVersion and kind of a rule file.
const (
	apiVersion = "capstan.dev/v1alpha1"
	kind       = "Rules"
)

//go:embed default.yaml
var defaultYAML []byte

// Default returns the shipped rules, a fresh copy each time.
func Default() []Rule {
	list, err := Parse("default.yaml", defaultYAML)
	if err != nil {
		panic(err) // a test parses it
	}
	return list
}

// promDuration writes d as PromQL wants it.
func promDuration(d time.Duration) string {
	if d%time.Second == 0 {
		return strconv.FormatInt(int64(d/time.Second), 10) + "s"
	}
	return strconv.FormatInt(d.Milliseconds(), 10) + "ms"
}

// Parse reads a rule file. Unknown fields are errors, and every error says file, line, field, value and what would do. All errors of
// the file are reported at once.
func Parse(name string, data []byte) ([]Rule, error) {
	var document yaml.Node
	if err := yaml.Unmarshal(data, &document); err != nil {
		return nil, fmt.Errorf("%s: %s", name, strings.TrimPrefix(err.Error(), "yaml: "))
	}
	p := &fileParser{name: name}
	if len(document.Content) == 0 {
		return nil, fmt.Errorf("%s: line 1: the file is empty; it needs apiVersion: %s, kind: %s and rules", name, apiVersion, kind)
	}
	list := p.file(document.Content[0])
	if err := errors.Join(p.errs...); err != nil {
		return nil, err
	}
	return list, nil
}

// fileParser collects the errors of one file.
type fileParser struct {
	name string
	errs []error
}

func (p *fileParser) fail(n *yaml.Node, format string, args ...any) {
	p.errs = append(p.errs, fmt.Errorf("%s: line %d: %s", p.name, max(n.Line, 1), fmt.Sprintf(format, args...)))
}

// fields walks a mapping; each field is known, and there once.
func (p *fileParser) fields(n *yaml.Node, what string, known ...string) map[string]*yaml.Node {
	if n.Kind == yaml.AliasNode && n.Alias != nil {
		n = n.Alias
	}
	if n.Kind != yaml.MappingNode {
		p.fail(n, "%s must be a mapping of %s", what, strings.Join(known, ", "))
		return nil
	}
	fields := map[string]*yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		switch {
		case !slices.Contains(known, key.Value):
			p.fail(key, "%s has no field %q; there are %s", what, key.Value, strings.Join(known, ", "))
		case fields[key.Value] != nil:
			p.fail(key, "%s has the field %s twice", what, key.Value)
		default:
			fields[key.Value] = value
		}
	}
	return fields
}

func (p *fileParser) file(n *yaml.Node) (list []Rule) {
	fields := p.fields(n, "the file", "apiVersion", "kind", "rules")
	if fields == nil {
		return nil
	}
	for field, want := range map[string]string{"apiVersion": apiVersion, "kind": kind} {
		if v := fields[field]; v == nil {
			p.fail(n, "%s is missing; write %s: %s", field, field, want)
		} else if v.Value != want {
			p.fail(v, "%s is %q; this version reads %s", field, v.Value, want)
		}
	}
	rules := fields["rules"]
	if rules == nil || rules.Kind != yaml.SequenceNode || len(rules.Content) == 0 {
		p.fail(n, "rules must be a list of at least one rule")
		return nil
	}
	seen := map[string]int{}
	for _, item := range rules.Content {
		r, ok := p.rule(item)
		if !ok {
			continue
		}
		if line, twice := seen[r.Metric]; twice {
			p.fail(item, "metric %q is there already, at line %d; give one of them another name", r.Metric, line)
		}
		seen[r.Metric] = item.Line
		list = append(list, r)
	}
	return list
}

// metricName is what the HPA can ask for: its client lower-cases the name and puts it into a path.
var metricName = regexp.MustCompile(`^[a-z0-9]([a-z0-9_.-]*[a-z0-9])?$`)

var units = []string{Percent, "ratio", "bytes", "seconds", "per second", "watts", "count"}

func (p *fileParser) rule(n *yaml.Node) (r Rule, ok bool) {
	before := len(p.errs)
	fields := p.fields(n, "a rule", "metric", "help", "unit", "expr", "window", "freshness", "maxAge", "missing", "holdFor", "joinFor", "per", "aggregate")
	if fields == nil {
		return r, false
	}
	text := func(field string, required bool) string {
		v := fields[field]
		if v == nil || strings.TrimSpace(v.Value) == "" {
			if required {
				p.fail(n, "%s is missing", field)
			}
			return ""
		}
		if v.Kind != yaml.ScalarNode {
			p.fail(v, "%s must be a text", field)
			return ""
		}
		return strings.TrimSpace(v.Value)
	}
	duration := func(field string, fallback, least, most time.Duration) time.Duration {
		v := fields[field]
		if v == nil {
			return fallback
		}
		d, err := time.ParseDuration(v.Value)
		if err != nil {
			p.fail(v, "%s is %q; write a duration like 60s or 2m", field, v.Value)
			return fallback
		}
		if d < least || d > most {
			p.fail(v, "%s is %s; it must be %s to %s", field, v.Value, least, most)
			return fallback
		}
		if d%time.Millisecond != 0 {
			p.fail(v, "%s is %s; nothing is finer than a millisecond", field, v.Value)
		}
		return d
	}
	oneOf := func(field, fallback string, of ...string) string {
		v := fields[field]
		if v == nil {
			return fallback
		}
		if !slices.Contains(of, v.Value) {
			p.fail(v, "%s is %q; it must be one of %s", field, v.Value, strings.Join(of, ", "))
			return fallback
		}
		return v.Value
	}

	r.Metric = text("metric", true)
	if v := fields["metric"]; r.Metric != "" && !metricName.MatchString(r.Metric) {
		fix := "use lower-case letters, digits, '_', '-' and '.'"
		if lower := strings.ToLower(r.Metric); metricName.MatchString(lower) {
			fix = "write " + lower + ": the HPA asks in lower case"
		}
		p.fail(v, "metric is %q; %s", r.Metric, fix)
	}
	r.Help = text("help", true)
	r.Unit = oneOf("unit", "count", units...)
	r.Expr = text("expr", true)
	r.Window = duration("window", defaultWindow, time.Second, time.Hour)
	r.MaxAge = duration("maxAge", defaultMaxAge, time.Second, 10*time.Minute)
	r.Missing = Missing(oneOf("missing", string(Hold), string(Hold), string(Fail)))
	r.HoldFor = duration("holdFor", max(60*time.Second, r.Window+scrapesToHold), 0, time.Hour)
	r.JoinFor = duration("joinFor", defaultJoinFor, 0, time.Hour)
	r.Per = Per(oneOf("per", string(PerPod), string(PerPod), string(PerWorkload)))
	r.Freshness = text("freshness", true)

	switch v := fields["aggregate"]; {
	case r.Per == PerWorkload:
		r.Aggregate = Aggregate(oneOf("aggregate", string(Max), string(Max), string(Sum)))
	case v != nil:
		p.fail(v, "aggregate is for per: workload; a rule that is per pod serves every pod's own value")
	}
	if v := fields["holdFor"]; v != nil && r.HoldFor < r.MaxAge {
		p.fail(v, "holdFor is %s, less than maxAge %s: a value would be given up while it is still fresh; raise holdFor", v.Value, r.MaxAge)
	}
	if len(p.errs) == before {
		p.expressions(n, fields, r)
	}
	return r, len(p.errs) == before
}

// expressions checks what the engine will be asked.
func (p *fileParser) expressions(n *yaml.Node, fields map[string]*yaml.Node, r Rule) {
	parse := parser.NewParser(parser.Options{}).ParseExpr
	expr, err := parse(r.Query())
	if err != nil {
		p.fail(fields["expr"], "expr is no PromQL: %v", err)
		return
	}
	if t := expr.Type(); t != parser.ValueTypeVector {
		p.fail(fields["expr"], "expr gives a %s; it must give an instant vector with one element for each pod_uid", parser.DocumentedType(t))
	}
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		if b, ok := node.(*parser.BinaryExpr); ok && b.VectorMatching != nil && b.VectorMatching.Card != parser.CardOneToOne {
			p.fail(fields["expr"], "expr joins (group_left, group_right): one duplicate in the joined series fails the query for every workload; do without")
		}
		if m, ok := node.(*parser.MatrixSelector); ok && m.Range > r.Window {
			p.fail(fields["expr"], "expr looks back %s, further than the window of %s; write [$window]", m.Range, r.Window)
		}
		return nil
	})
	fresh, err := parse(r.Freshness)
	if err != nil {
		p.fail(fields["freshness"], "freshness is no PromQL: %v", err)
		return
	}
	if _, ok := fresh.(*parser.VectorSelector); !ok {
		p.fail(fields["freshness"], "freshness is %q; it must be a plain selector, like the observed counter of the expression", r.Freshness)
	}
}

// valid says whether a value may be served at all, and clamps what rounding made of 100 %.
func (r Rule) valid(v float64) (float64, bool) {
	if math.IsNaN(v) || math.IsInf(v, 0) || v < 0 {
		return 0, false
	}
	if r.Unit == Percent && v > 100 {
		// Busy can exceed observed by the rounding of two counters, never by more.
		return 100, v <= 100.5
	}
	return v, true
}
