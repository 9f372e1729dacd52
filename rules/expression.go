package rules

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"

	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules/document"
)

// windowVariable stands for the rule's window in its expression.
const windowVariable = "$window"

func parseExpr(text string) (parser.Expr, error) {
	return parser.NewParser(parser.Options{}).ParseExpr(text)
}

// expressions reads what the engine will be asked, and says what of it cannot give a value for each pod.
func expressions(fields map[string]document.Node, r *Rule) {
	r.Expr = fields["expr"].Text("PromQL that gives one element for each pod_uid")
	r.Freshness = fields["freshness"].Text("the selector of the series whose newest sample is a value's age, such as " + metricname.PodGPUObservedSeconds)
	var expr parser.Expr
	if r.Expr != "" {
		expr = expression(fields["expr"], *r)
	}
	if r.Freshness == "" {
		return
	}
	fresh := freshness(fields["freshness"], *r)
	if expr == nil || fresh == nil {
		return
	}
	if names, of := families(expr), families(fresh)[0]; of != "" && !slices.Contains(names, "") && !slices.Contains(names, of) {
		fields["freshness"].Warn("expr does not use %s: an old value could pass for a fresh one: select a series of expr, such as %s", of, strings.Join(names, " or "))
	}
}

// expression checks the value's expression. nil = it is no PromQL.
func expression(n document.Node, r Rule) parser.Expr {
	expr, err := parseExpr(r.Query())
	if err != nil {
		syntax(n, r, err)
		return nil
	}
	if t := expr.Type(); t != parser.ValueTypeVector {
		n.Fail("it gives a %s: write an expression that gives an instant vector with one element for each pod_uid", parser.DocumentedType(t))
		return expr
	}
	if !keepsPod(expr) {
		n.Fail("its elements lose the label %s, by which the adapter finds their pods: add %[1]s to by or on, or take it out of without or ignoring", metricname.PodUID)
	}
	parser.Inspect(expr, func(node parser.Node, path []parser.Node) error {
		switch node := node.(type) {
		case *parser.BinaryExpr:
			if joins(node) {
				n.Warn("a join (%s): one duplicate among the series of its unique side fails the query for every workload of the namespace; do without, or make that side unique with max by (%s)",
					matching(node), strings.Join(node.VectorMatching.MatchingLabels, ", "))
			}
		case *parser.SubqueryExpr:
			if node.Step == 0 {
				n.Fail("the subquery %s has no step: write one, such as [%s:5s]", node, windowVariable)
			}
			moment(n, node.OriginalOffset, node.Timestamp != nil || node.StartOrEnd != 0)
		case *parser.VectorSelector:
			moment(n, node.OriginalOffset, node.Timestamp != nil || node.StartOrEnd != 0)
			if back := lookBack(node, path); back > r.Window {
				n.Fail("it looks back %s at %s, further than the window of %s: write [%s], or a longer window", document.Short(back), node, document.Short(r.Window), windowVariable)
			}
		}
		return nil
	})
	observed(n, expr)
	return expr
}

// freshness checks the selector of the age. nil = it is none.
func freshness(n document.Node, r Rule) *parser.VectorSelector {
	expr, err := parseExpr(r.Freshness)
	if err != nil {
		n.Fail("it is no PromQL (%v): write a plain selector, like %s", err, metricname.PodGPUObservedSeconds)
		return nil
	}
	fresh, ok := expr.(*parser.VectorSelector)
	if _, err := parseExpr(r.FreshnessQuery()); !ok || err != nil || fresh.OriginalOffset != 0 || fresh.Timestamp != nil || fresh.StartOrEnd != 0 {
		n.Fail("%q is no plain selector: write one, like %s, without a function, offset, @ or comment", r.Freshness, metricname.PodGPUObservedSeconds)
		return nil
	}
	return fresh
}

// syntax says what PromQL's parser says, at the very place if the expression stands in the file as it is.
func syntax(n document.Node, r Rule, err error) {
	const fix = "write PromQL, with $window for the window"
	first := parser.ParseErr{Err: err}
	if all, ok := errors.AsType[parser.ParseErrors](err); ok && len(all) > 0 {
		first = all[0]
	} else if one, ok := errors.AsType[*parser.ParseErr](err); ok {
		first = *one
	}
	if !n.Verbatim() || first.Query == "" {
		n.Fail("it is no PromQL (%v): %s", err, fix)
		return
	}
	// The position is that in the query, where the window has taken its variable's place.
	at, window := int(first.PositionRange.Start), promDuration(r.Window)
	for from := 0; ; {
		i := strings.Index(r.Expr[from:], windowVariable)
		if i < 0 || from+i >= at {
			break
		}
		from += i + len(windowVariable)
		at = max(at+len(windowVariable)-len(window), from)
	}
	n.FailAt(min(at, len(r.Expr)), "it is no PromQL (%v): %s", first.Err, fix)
}

// moment refuses selectors of another time than now.
func moment(n document.Node, offset time.Duration, fixed bool) {
	switch {
	case fixed:
		n.Fail("it selects by @: a rule speaks of now, leave it out")
	case offset < 0:
		n.Fail("it has an offset of %s, which is in the future: leave it out", document.Short(offset))
	}
}

// lookBack is how much older than now a sample may be that a selector gives, but for an instant selector's own maxAge.
func lookBack(v *parser.VectorSelector, path []parser.Node) time.Duration {
	back := v.OriginalOffset
	for _, n := range path {
		switch n := n.(type) {
		case *parser.MatrixSelector:
			back += n.Range
		case *parser.SubqueryExpr:
			back += n.Range + n.OriginalOffset
		}
	}
	return back
}

// keepsPod says whether the elements of a vector carry the label pod_uid: false is certain, true is not.
func keepsPod(expr parser.Expr) bool {
	has := func(list []string) bool { return slices.Contains(list, metricname.PodUID) }
	switch e := expr.(type) {
	case *parser.VectorSelector, *parser.MatrixSelector:
		return true
	case *parser.SubqueryExpr:
		return keepsPod(e.Expr)
	case *parser.ParenExpr:
		return keepsPod(e.Expr)
	case *parser.UnaryExpr:
		return keepsPod(e.Expr)
	case *parser.AggregateExpr:
		switch {
		case slices.Contains([]parser.ItemType{parser.TOPK, parser.BOTTOMK, parser.LIMITK, parser.LIMIT_RATIO}, e.Op):
			return keepsPod(e.Expr) // they choose elements, and leave them as they are
		case e.Without:
			return !has(e.Grouping) && keepsPod(e.Expr)
		}
		return has(e.Grouping) && keepsPod(e.Expr)
	case *parser.BinaryExpr:
		left, right := keepsPod(e.LHS), keepsPod(e.RHS)
		switch m := e.VectorMatching; {
		case m == nil: // one side is a number
			return left || right
		case e.Op == parser.LOR:
			return left || right
		case m.Card == parser.CardManyToMany: // and, unless
			return left
		case m.Card == parser.CardManyToOne:
			return left || right && has(m.Include)
		case m.Card == parser.CardOneToMany:
			return right || left && has(m.Include)
		case m.On:
			return has(m.MatchingLabels) && left && right
		default:
			return !has(m.MatchingLabels) && left
		}
	case *parser.Call:
		switch e.Func.Name {
		case "absent", "absent_over_time":
			return false
		case "label_replace", "label_join":
			if to, ok := e.Args[1].(*parser.StringLiteral); ok && to.Val == metricname.PodUID {
				return true
			}
		}
		return slices.ContainsFunc(e.Args, func(arg parser.Expr) bool {
			t := arg.Type()
			return (t == parser.ValueTypeVector || t == parser.ValueTypeMatrix) && keepsPod(arg)
		}) && e.Type() == parser.ValueTypeVector
	}
	return false
}

// joins says that an operator fails when a series appears twice on a side that must be unique. By all labels, as without on and
// ignoring, no series can; nor can it on a side that is aggregated by no more than the labels of the match.
func joins(e *parser.BinaryExpr) bool {
	m := e.VectorMatching
	if m == nil || m.Card == parser.CardManyToMany || !m.On && len(m.MatchingLabels) == 0 && m.Card == parser.CardOneToOne {
		return false
	}
	unique := func(side parser.Expr) bool {
		for {
			p, ok := side.(*parser.ParenExpr)
			if !ok {
				break
			}
			side = p.Expr
		}
		a, ok := side.(*parser.AggregateExpr)
		return ok && m.On && !a.Without && !slices.Contains([]parser.ItemType{parser.TOPK, parser.BOTTOMK, parser.LIMITK, parser.LIMIT_RATIO, parser.COUNT_VALUES}, a.Op) &&
			!slices.ContainsFunc(a.Grouping, func(label string) bool { return !slices.Contains(m.MatchingLabels, label) })
	}
	switch m.Card {
	case parser.CardManyToOne:
		return !unique(e.RHS)
	case parser.CardOneToMany:
		return !unique(e.LHS)
	}
	return !unique(e.LHS) || !unique(e.RHS)
}

// matching words how an operator matches.
func matching(e *parser.BinaryExpr) string {
	word := "ignoring"
	if e.VectorMatching.On {
		word = "on"
	}
	word += " (" + strings.Join(e.VectorMatching.MatchingLabels, ", ") + ")"
	switch e.VectorMatching.Card {
	case parser.CardManyToOne:
		word += " group_left"
	case parser.CardOneToMany:
		word += " group_right"
	}
	return word
}

// twins are the counters of busy time and those of the time for which that is known.
var twins = map[string]string{
	metricname.PodGPUBusySeconds:     metricname.PodGPUObservedSeconds,
	metricname.PodSMActive:           metricname.PodActivityObserved,
	metricname.PodProcessBusySeconds: metricname.PodProcessObserved,
}

// observed warns of busy time that is not divided by its twin: an exporter that freezes would read 0.
func observed(n document.Node, expr parser.Expr) {
	names := families(expr)
	for _, busy := range names {
		if twin := twins[busy]; twin != "" && !slices.Contains(names, twin) {
			n.Warn("%s without its twin: an exporter that freezes reads 0 instead of missing: divide its rate by that of %s", busy, twin)
		}
	}
}

// families are the names of the series that an expression selects, each once; "" for a selector by anything but a plain name.
func families(expr parser.Expr) (names []string) {
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		v, ok := n.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		name := ""
		for _, m := range v.LabelMatchers {
			if m.Name == model.MetricNameLabel && m.Type == labels.MatchEqual {
				name = m.Value
			}
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
		return nil
	})
	return names
}
