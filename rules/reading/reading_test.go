package reading

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/promql/parser"

	"github.com/capstan-gpu/capstan/adapter/store"
	"github.com/capstan-gpu/capstan/rules"
)

var noon = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

// samples is a store with series in promtool's notation, a value every five seconds from noon on.
func samples(t *testing.T, series ...string) *store.Store {
	t.Helper()
	s := store.New(store.Config{})
	for _, line := range series {
		metric, values, err := parser.NewParser(parser.Options{}).ParseSeriesDesc(line)
		if err != nil {
			t.Fatal(err)
		}
		for i, v := range values {
			s.Append([]store.Sample{{Labels: metric, Value: v.Value, At: noon.Add(time.Duration(i) * 5 * time.Second)}})
		}
	}
	return s
}

func rule(expr string) rules.Rule {
	return rules.Rule{Metric: "m", Expr: expr, Freshness: "a", Window: 30 * time.Second, MaxAge: 15 * time.Second, HoldFor: 60 * time.Second, JoinFor: time.Minute, Missing: rules.Hold, Per: rules.PerPod}
}

// fleet has, of each namespace, one workload w with pods of these UIDs on node-1.
func fleet(byNamespace map[string][]string) (list []rules.Workload) {
	for _, namespace := range slices.Sorted(maps.Keys(byNamespace)) {
		w := rules.Workload{Namespace: namespace, Name: "w", UID: namespace}
		for _, uid := range byNamespace[namespace] {
			w.Pods = append(w.Pods, rules.Pod{UID: uid, Name: "w-" + uid, Node: "node-1", Phase: "Running", Ready: true, ReadySince: noon.Add(-time.Hour), GPUs: 1})
		}
		list = append(list, w)
	}
	return list
}

func text(f Found) string {
	var out []string
	for _, uid := range slices.Sorted(maps.Keys(f.Readings)) {
		r := f.Readings[uid]
		out = append(out, fmt.Sprintf("%s=%g@%gs%s", uid, r.Value, r.At.Sub(noon).Seconds(), r.Labels["gpu_model"]))
	}
	return strings.Join(out, " ")
}

func TestRead(t *testing.T) {
	for _, c := range []struct {
		what, expr string
		series     []string
		want       string
		found      Found // the counts
	}{
		{"values and their ages", "a", []string{`a{pod_uid="u1"} 1x3`, `a{pod_uid="u2"} 2x4`}, "u1=1@15s u2=2@20s", Found{}},
		{"a pod that is nobody's", "a", []string{`a{pod_uid="u1"} 1x4`, `a{pod_uid="u9"} 2x4`, `a 3x4`}, "u1=1@20s", Found{}},
		{"a sample that is too old", "a", []string{`a{pod_uid="u1"} 1x0`, `a{pod_uid="u2"} 2x4`}, "u2=2@20s", Found{}},
		{"an age without a value", "b", []string{`a{pod_uid="u1"} 1x4`}, "", Found{}},
		{"a value without an age", "b", []string{`b{pod_uid="u1"} 1x4`}, fmt.Sprintf("u1=1@%gs", time.Time{}.Sub(noon).Seconds()), Found{}},
		{"an exporter of another node", "a", []string{`a{pod_uid="u1", node="node-1"} 1x4`, `a{pod_uid="u2", node="node-9"} 2x4`, `a{pod_uid="u1", node="node-9"} 2x4`}, "u1=1@20s", Found{OtherNode: 2}},
		{"two values of a pod", "a", []string{`a{pod_uid="u1", x="1"} 1x4`, `a{pod_uid="u1", x="2"} 1x4`, `a{pod_uid="u1", x="3"} 1x4`, `a{pod_uid="u2"} 2x4`}, "u2=2@20s", Found{Duplicates: 1}},
	} {
		got := Embedded(rule(c.expr), samples(t, c.series...)).Read(t.Context(), NewFleet(fleet(map[string][]string{"n": {"u1", "u2"}}), nil), noon.Add(20*time.Second))
		if text(got) != c.want || got.OtherNode != c.found.OtherNode || got.Duplicates != c.found.Duplicates || got.Err != nil {
			t.Errorf("%s: got %s %+v\nwant %s %+v", c.what, text(got), got, c.want, c.found)
		}
	}
}

// One tenant's duplicate fails the query for the fleet, and then costs only its own namespace the signal.
func TestReadByNamespace(t *testing.T) {
	s := samples(t, `a{namespace="n", pod_uid="u1"} 4x4`, `b{namespace="n", pod_uid="u1"} 2x4`,
		`a{namespace="bad", pod_uid="u2"} 4x4`, `b{namespace="bad", pod_uid="u2", x="1"} 2x4`, `b{namespace="bad", pod_uid="u2", x="2"} 2x4`)
	list := fleet(map[string][]string{"n": {"u1"}, "bad": {"u2"}})
	r := rule("a / on (pod_uid) group_left b")
	now := noon.Add(20 * time.Second)
	found := Embedded(r, s).Read(t.Context(), NewFleet(list, func(rules.Pod) string { return "H200" }), now)
	if text(found) != "u1=2@20sH200" || found.Err == nil || len(found.Failed) != 1 {
		t.Fatalf("%s, %+v", text(found), found)
	}
	for _, w := range list {
		_, m := found.Decide(r, w, rules.Memory{}, now.Add(-r.Window))
		a, _ := found.Decide(r, w, m, now)
		switch w.Namespace {
		case "n":
			if a.Err != nil || len(a.Items) != 1 {
				t.Errorf("n: %+v", a)
			}
		default:
			if a.Err == nil || !strings.Contains(a.Err.Error(), "the rule's query fails") {
				t.Errorf("bad: %+v", a)
			}
		}
	}
}

func TestInNamespace(t *testing.T) {
	for expr, want := range map[string]string{
		`sum by (pod_uid) (a{x="y"}) / rate(b[1m])`:    `sum by (pod_uid) (a{namespace="n\"s",x="y"}) / rate(b{namespace="n\"s"}[1m])`,
		`max_over_time(rate(a[30s] offset 5s)[1m:5s])`: `max_over_time(rate(a{namespace="n\"s"}[30s] offset 5s)[1m:5s])`,
	} {
		if got, err := InNamespace(expr, `n"s`); err != nil || got != want {
			t.Errorf("got  %s, %v\nwant %s", got, err, want)
		}
	}
	if _, err := InNamespace("sum(", "n"); err == nil {
		t.Error("sum( is taken")
	}
}

func TestWait(t *testing.T) {
	r := Reader{Rule: rule("a")}
	if err := r.Wait(29 * time.Second); !errors.Is(err, rules.ErrCollecting) || err.Error() != "collecting: measured for 29s; a vector needs 30s" {
		t.Error(err)
	}
	if err := r.Wait(30 * time.Second); err != nil {
		t.Error(err)
	}
}

func TestRetention(t *testing.T) {
	if got := Retention([]rules.Rule{rule("a"), {Window: 10 * time.Minute}}, 5*time.Second); got != 10*time.Minute+25*time.Second {
		t.Error(got)
	}
}
