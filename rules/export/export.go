// Package export writes rules as recording rules of a Prometheus, for dashboards, for alerts, and for an adapter that lets a Prometheus
// evaluate: as a rule file, or as the PrometheusRule object of the Prometheus operator.
//
// A recorded series is what the rule's expression gives, one element for each pod. What the policy makes of it (what is held, what is an
// error, one item for a workload) is not in it, and cannot be: no recording rule knows which pods should have reported.
package export

import (
	"bytes"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v3"

	"github.com/capstan-gpu/capstan/rules"
)

// Formats that [Rules] writes.
const (
	Prometheus     = "prometheus"     // a rule file, for rule_files
	PrometheusRule = "prometheusrule" // an object of monitoring.coreos.com/v1
)

// Name of the group and of the PrometheusRule.
const Name = "capstan-external-metrics"

// Rules writes the rules in a format, to be evaluated once an interval. The windows stand in place of $window. Two metrics of which
// Prometheus would record the same name are an error.
func Rules(list []rules.Rule, format string, interval time.Duration) ([]byte, error) {
	group := mapping("name", text(Name), "interval", text(model.Duration(interval).String()))
	recorded := map[string]string{}
	items := &yaml.Node{Kind: yaml.SequenceNode}
	for _, r := range list {
		record, err := Record(r)
		if err != nil {
			return nil, err
		}
		if other, twice := recorded[record]; twice {
			return nil, fmt.Errorf("metrics %s and %s would both be recorded as %s: give one of them another name", other, r.Metric, record)
		}
		recorded[record] = r.Metric
		item := mapping("record", text(record), "expr", text(r.Query()))
		item.HeadComment = comment(r)
		items.Content = append(items.Content, item)
	}
	add(group, "rules", items)
	groups := &yaml.Node{Kind: yaml.SequenceNode, Content: []*yaml.Node{group}}

	var document *yaml.Node
	switch format {
	case Prometheus:
		document = mapping("groups", groups)
	case PrometheusRule:
		document = mapping("apiVersion", text("monitoring.coreos.com/v1"), "kind", text("PrometheusRule"),
			"metadata", mapping("name", text(Name), "labels", mapping("app.kubernetes.io/name", text("capstan"))), "spec", mapping("groups", groups))
	default:
		return nil, fmt.Errorf("there is no format %q: use %s or %s", format, Prometheus, PrometheusRule)
	}
	document.HeadComment = "# Capstan's external metrics, pod by pod, as the adapter evaluates them. Made by: capstan-adapter rules export\n\n"
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	if err := encoder.Encode(document); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// comment is what a person should know of a recorded series.
func comment(r rules.Rule) string {
	lines := []string{strings.Join(strings.Fields(r.Help), " "), "Unit: " + r.Unit + "."}
	if r.Per == rules.PerWorkload {
		lines = append(lines, "The HPA gets one item for a workload, the "+string(r.Aggregate)+" of its pods'.")
	}
	return "# " + strings.Join(lines, "\n# ")
}

// Record is the name under which a rule is recorded, level:metric:operations by Prometheus' convention: what the elements are of, the
// metric, and what was done to it, such as namespace_pod:gpu_utilization:percent_rate1m.
func Record(r rules.Rule) (string, error) {
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(r.Query())
	if err != nil {
		return "", fmt.Errorf("metric %s: %w", r.Metric, err)
	}
	operations := []string{}
	if r.Unit == rules.Percent || r.Unit == "ratio" {
		operations = append(operations, r.Unit)
	}
	if over := overTime(expr); over != "" {
		operations = append(operations, over)
	}
	if len(operations) == 0 {
		operations = append(operations, "value")
	}
	return "namespace_pod:" + inNames.ReplaceAllString(r.Metric, "_") + ":" + strings.Join(operations, "_"), nil
}

// inNames are the characters of the HPA's metric names that Prometheus' names do not have.
var inNames = regexp.MustCompile(`[^a-z0-9_]`)

// overTime is the first function over a range in an expression, with the range: rate1m. "" = there is none.
func overTime(expr parser.Expr) (name string) {
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		call, ok := n.(*parser.Call)
		if !ok || name != "" {
			return nil
		}
		for _, arg := range call.Args {
			switch over := arg.(type) {
			case *parser.MatrixSelector:
				name = call.Func.Name + model.Duration(over.Range).String()
			case *parser.SubqueryExpr:
				name = call.Func.Name + model.Duration(over.Range).String()
			}
		}
		return nil
	})
	return name
}

func text(value string) *yaml.Node {
	n := &yaml.Node{}
	n.SetString(value)
	return n
}

// mapping makes a mapping of names and values, in their order.
func mapping(pairs ...any) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode}
	for pair := range slices.Chunk(pairs, 2) {
		add(n, pair[0].(string), pair[1].(*yaml.Node))
	}
	return n
}

func add(n *yaml.Node, name string, value *yaml.Node) {
	n.Content = append(n.Content, text(name), value)
}
