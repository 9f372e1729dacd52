// Package check finds what is wrong with a dashboard without a Grafana: its form by a few rules, its queries by evaluating them with
// Prometheus' own engine on samples that were really exposed.
package check

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"

	"github.com/capstan-gpu/capstan/adapter/store"
)

// Parse reads a dashboard by Grafana's own strict schema: no unknown field, no missing one.
func Parse(raw []byte) (d dashboard.Dashboard, err error) {
	var strict dashboard.Dashboard
	err = strict.UnmarshalJSONStrict(raw)
	if list, ok := errors.AsType[cog.BuildErrors](err); err != nil && !(ok && len(list) == 0) {
		return d, err
	}
	if err := json.Unmarshal(raw, &d); err != nil {
		return d, err
	}
	// The SDK's strict reading stops at panels, with an empty list of errors: there, a field is known if it is still there when the
	// dashboard is written again.
	again, err := json.Marshal(d)
	if err != nil {
		return d, err
	}
	before, err := paths(raw)
	if err != nil {
		return d, err
	}
	after, err := paths(again)
	if err != nil {
		return d, err
	}
	for p := range before {
		if !after[p] {
			return d, fmt.Errorf("%s: the schema has no such field", p)
		}
	}
	return d, d.Validate()
}

// paths are the places of all fields of a JSON text; fields that hold nothing are left out.
func paths(raw []byte) (map[string]bool, error) {
	var value any
	if err := json.Unmarshal(raw, &value); err != nil {
		return nil, err
	}
	found := map[string]bool{}
	var walk func(at string, v any)
	walk = func(at string, v any) {
		switch v := v.(type) {
		case map[string]any:
			for key, inner := range v {
				walk(at+"."+key, inner)
			}
		case []any:
			for i, inner := range v {
				walk(fmt.Sprintf("%s[%d]", at, i), inner)
			}
		case nil:
		default:
			found[at] = true
		}
	}
	walk("", value)
	return found, nil
}

// panels are those with queries, rows opened.
func panels(d dashboard.Dashboard) (all []dashboard.Panel) {
	for _, p := range d.Panels {
		switch {
		case p.Panel != nil:
			all = append(all, *p.Panel)
		case p.RowPanel != nil:
			all = append(all, p.RowPanel.Panels...)
		}
	}
	return all
}

func title(p dashboard.Panel) string {
	if p.Title == nil {
		return "(a panel without a title)"
	}
	return *p.Title
}

// expressions are a panel's queries. A target is of whatever type the dashboard was made or read with; as JSON they are all alike.
func expressions(p dashboard.Panel) (all []string) {
	for _, t := range p.Targets {
		raw, err := json.Marshal(t)
		var query struct{ Expr string }
		if err == nil && json.Unmarshal(raw, &query) == nil && query.Expr != "" {
			all = append(all, query.Expr)
		}
	}
	return all
}

var (
	variable  = regexp.MustCompile(`\$\{?([a-zA-Z_]+)\}?`)
	rangeOf   = regexp.MustCompile(`\[([^\]]*)\]`)
	validUnit = []string{"short", "percent", "percentunit", "s", "bytes", "ops", "watt", "celsius", "hertz"}
)

// Form says what breaks the rules that every dashboard keeps.
func Form(d dashboard.Dashboard) (problems []string) {
	problem := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	if d.Uid == nil || *d.Uid == "" || d.Description == nil || *d.Description == "" {
		problem("the dashboard has no uid or no description")
	}
	defined := map[string]bool{}
	var queries strings.Builder
	for _, v := range d.Templating.List {
		defined[v.Name] = true
		if v.Query != nil && v.Query.String != nil {
			queries.WriteString(*v.Query.String + "\n")
		}
	}
	if !defined["datasource"] {
		problem("there is no variable datasource")
	}
	ids := map[uint32]string{}
	var places []dashboard.GridPos
	for _, p := range panels(d) {
		name := title(p)
		problem := func(format string, args ...any) { problem("panel %q: %s", name, fmt.Sprintf(format, args...)) }
		if p.Description == nil || len(*p.Description) < 40 {
			problem("its description does not say what to do")
		}
		if p.Id != nil {
			if other, twice := ids[*p.Id]; twice {
				problem("has the id of %q", other)
			}
			ids[*p.Id] = name
		}
		if p.FieldConfig == nil || p.FieldConfig.Defaults.Unit == nil || !slices.Contains(validUnit, *p.FieldConfig.Defaults.Unit) {
			problem("its unit is none of %v", validUnit)
		}
		if p.Datasource == nil || p.Datasource.Uid == nil || *p.Datasource.Uid != "${datasource}" {
			problem("its data source is not ${datasource}")
		}
		if custom, ok := custom(p); ok && (custom.SpanNulls == nil || custom.SpanNulls.Bool == nil || *custom.SpanNulls.Bool) {
			problem("it draws lines over gaps; what is not known must be seen")
		}
		if len(expressions(p)) == 0 {
			problem("it has no query")
		}
		for _, expr := range expressions(p) {
			queries.WriteString(expr + "\n")
			for _, r := range rangeOf.FindAllStringSubmatch(expr, -1) {
				if !strings.ContainsAny(r[1], "0123456789-") && r[1] != "$__rate_interval" {
					problem("range [%s]; write [$__rate_interval]", r[1])
				}
			}
		}
		if p.GridPos != nil {
			g := *p.GridPos
			if g.X+g.W > 24 {
				problem("it is wider than the page")
			}
			for _, o := range places {
				if g.X < o.X+o.W && o.X < g.X+g.W && g.Y < o.Y+o.H && o.Y < g.Y+g.H {
					problem("it lies over another")
				}
			}
			places = append(places, g)
		}
	}
	used := map[string]bool{"datasource": true}
	for _, m := range variable.FindAllStringSubmatch(queries.String(), -1) {
		if strings.HasPrefix(m[1], "__") {
			continue
		}
		used[m[1]] = true
		if !defined[m[1]] {
			problem("the variable %s is used and not defined", m[1])
		}
	}
	for v := range defined {
		if !used[v] {
			problem("the variable %s is defined and not used", v)
		}
	}
	return problems
}

func custom(p dashboard.Panel) (*timeseries.FieldConfig, bool) {
	if p.FieldConfig == nil {
		return nil, false
	}
	switch c := p.FieldConfig.Defaults.Custom.(type) {
	case timeseries.FieldConfig:
		return &c, true
	case *timeseries.FieldConfig:
		return c, true
	}
	return nil, false
}

// Metrics are the names of the families that a dashboard's panels ask for, each once.
func Metrics(d dashboard.Dashboard) (names []string, err error) {
	seen := map[string]bool{}
	for _, p := range panels(d) {
		for _, expr := range expressions(p) {
			found, err := MetricsOf(interpolate(expr, nil))
			if err != nil {
				return nil, fmt.Errorf("panel %q: %s: %w", title(p), expr, err)
			}
			for _, n := range found {
				seen[n] = true
			}
		}
	}
	for n := range seen {
		names = append(names, n)
	}
	slices.Sort(names)
	return names, nil
}

// MetricsOf are the names of the families that an expression asks for.
func MetricsOf(expr string) (names []string, err error) {
	parsed, err := parser.NewParser(parser.Options{}).ParseExpr(expr)
	if err != nil {
		return nil, err
	}
	parser.Inspect(parsed, func(n parser.Node, _ []parser.Node) error {
		if v, ok := n.(*parser.VectorSelector); ok {
			names = append(names, v.Name)
		}
		return nil
	})
	return names, nil
}

// interpolate puts values in the place of variables, as Grafana does. The rate interval is four scrapes.
func interpolate(expr string, values map[string]string) string {
	return variable.ReplaceAllStringFunc(expr, func(v string) string {
		name := strings.Trim(v, "${}")
		if name == "__rate_interval" || name == "__interval" {
			return "20s"
		}
		if value, ok := values[name]; ok {
			return value
		}
		return "x"
	})
}

// Page is an exporter's page as it was at a time.
type Page struct {
	At   time.Time
	Text string
	Node string // becomes the label node
}

// Samples reads pages into a store that can be queried.
func Samples(pages []Page) (*store.Store, error) {
	s := store.New(store.Config{Retention: 24 * time.Hour})
	for _, page := range pages {
		p := expfmt.NewTextParser(model.UTF8Validation)
		families, err := p.TextToMetricFamilies(strings.NewReader(page.Text))
		if err != nil {
			return nil, fmt.Errorf("read the page of %s: %w", page.Node, err)
		}
		var batch []store.Sample
		vector, err := expfmt.ExtractSamples(&expfmt.DecodeOptions{Timestamp: model.TimeFromUnixNano(page.At.UnixNano())}, slices.Collect(maps.Values(families))...)
		if err != nil {
			return nil, err
		}
		for _, v := range vector {
			b := labels.NewBuilder(labels.EmptyLabels())
			for name, value := range v.Metric {
				b.Set(string(name), string(value))
			}
			if page.Node != "" {
				b.Set("node", page.Node)
			}
			batch = append(batch, store.Sample{Labels: b.Labels(), Value: float64(v.Value), At: page.At})
		}
		s.Append(batch)
	}
	return s, nil
}

// Evaluate runs every query of a dashboard over a range, and says which fail, give nothing, give no number, leave the panel's
// bounds, or are met with a warning of the engine. skip names families (by prefix) whose absence is no problem.
func Evaluate(ctx context.Context, d dashboard.Dashboard, q storage.Queryable, from, to time.Time, variables map[string]string, skip ...string) (problems []string) {
	engine := promql.NewEngine(promql.EngineOpts{MaxSamples: 10_000_000, Timeout: 10 * time.Second, LookbackDelta: 15 * time.Second, Parser: parser.NewParser(parser.Options{})})
	for _, p := range panels(d) {
		if len(expressions(p)) == 0 {
			problems = append(problems, fmt.Sprintf("panel %q: it has no query", title(p)))
		}
		for _, expr := range expressions(p) {
			problem := func(format string, args ...any) {
				problems = append(problems, fmt.Sprintf("panel %q: %s: %s", title(p), expr, fmt.Sprintf(format, args...)))
			}
			text := interpolate(expr, variables)
			names, err := MetricsOf(text)
			if err != nil {
				problem("%v", err)
				continue
			}
			query, err := engine.NewRangeQuery(ctx, q, nil, text, from, to, 5*time.Second)
			if err != nil {
				problem("%v", err)
				continue
			}
			result := query.Exec(ctx)
			warnings, infos := result.Warnings.AsStrings(text, 3, 3)
			for _, w := range append(warnings, infos...) {
				problem("the engine warns: %s", w)
			}
			matrix, ok := result.Value.(promql.Matrix)
			switch {
			case result.Err != nil:
				problem("%v", result.Err)
			case !ok:
				problem("it gives a %s", result.Value.Type())
			case len(matrix) == 0:
				if !slices.ContainsFunc(names, func(n string) bool {
					return slices.ContainsFunc(skip, func(s string) bool { return strings.HasPrefix(n, s) })
				}) {
					problem("it gives nothing")
				}
			case len(matrix) > 30:
				problem("it gives %d series: no legend holds them", len(matrix))
			}
			for _, series := range matrix {
				if bad := outside(p, series); bad != "" {
					problem("%s: %s", series.Metric, bad)
				}
			}
			query.Close()
		}
	}
	return problems
}

// outside says what is wrong with a series' values: no number at all, or one beyond the panel's bounds.
func outside(p dashboard.Panel, series promql.Series) string {
	var least, most *float64
	if p.FieldConfig != nil {
		least, most = p.FieldConfig.Defaults.Min, p.FieldConfig.Defaults.Max
	}
	numbers := 0
	for _, point := range series.Floats {
		switch v := point.F; {
		case math.IsNaN(v):
			continue
		case math.IsInf(v, 0), least != nil && v < *least-1e-6, most != nil && v > *most*(1+1e-6):
			return fmt.Sprintf("%g is outside of the panel", v)
		}
		numbers++
	}
	if numbers == 0 {
		return "no value is a number"
	}
	return ""
}
