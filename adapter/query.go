package adapter

import (
	"fmt"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"

	"github.com/capstan-gpu/capstan/adapter/collect"
	"github.com/capstan-gpu/capstan/rules"
)

// Families are those that the rules' queries name. A query that selects by anything but a plain name needs all of them:
// nil.
func Families(list []rules.Rule) (collect.Families, error) {
	out := collect.Families{}
	for _, r := range list {
		for _, expr := range []string{r.Query(), r.FreshnessQuery()} {
			parsed, err := parser.NewParser(parser.Options{}).ParseExpr(expr)
			if err != nil {
				return nil, fmt.Errorf("rule %s: %s: %w", r.Metric, expr, err)
			}
			for _, v := range selectors(parsed) {
				name := ""
				for _, m := range v.LabelMatchers {
					if m.Name == model.MetricNameLabel && m.Type == labels.MatchEqual {
						name = m.Value
					}
				}
				if name == "" {
					return nil, nil
				}
				out[name] = true
			}
		}
	}
	return out, nil
}

func selectors(expr parser.Expr) []*parser.VectorSelector {
	var out []*parser.VectorSelector
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		if v, ok := n.(*parser.VectorSelector); ok {
			out = append(out, v)
		}
		return nil
	})
	return out
}
