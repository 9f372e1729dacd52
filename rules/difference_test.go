package rules

import (
	"reflect"
	"testing"
	"time"
)

func TestCompare(t *testing.T) {
	one := func(change func(*Rule)) []Rule {
		list := Default()
		change(&list[0])
		return list
	}
	const metric = "gpu_utilization"
	for what, c := range map[string]struct {
		fresh []Rule
		want  Difference
	}{
		"the same":   {Default(), Difference{}},
		"none left":  {nil, Difference{Removed: []string{metric, "gpu_sm_utilization", "gpu_memory_used", "training_steps_per_second", "training_samples_per_second"}}},
		"a new name": {one(func(r *Rule) { r.Metric = "busy" }), Difference{Added: []string{"busy"}, Removed: []string{metric}}},
		"holdFor":    {one(func(r *Rule) { r.HoldFor += time.Second }), Difference{Retuned: []string{metric}}},
		"maxAge":     {one(func(r *Rule) { r.MaxAge += time.Second }), Difference{Retuned: []string{metric}}},
		"joinFor":    {one(func(r *Rule) { r.JoinFor += time.Second }), Difference{Retuned: []string{metric}}},
		"missing":    {one(func(r *Rule) { r.Missing = Fail }), Difference{Retuned: []string{metric}}},
		"help":       {one(func(r *Rule) { r.Help = "" }), Difference{Retuned: []string{metric}}},
		"collect":    {one(func(r *Rule) { r.Collect = Asked }), Difference{Retuned: []string{metric}}},
		"window":     {one(func(r *Rule) { r.Window += time.Second }), Difference{Revalued: []string{metric}}},
		"expr":       {one(func(r *Rule) { r.Expr = "a" }), Difference{Revalued: []string{metric}}},
		"unit":       {one(func(r *Rule) { r.Unit = "ratio" }), Difference{Revalued: []string{metric}}},
		"freshness":  {one(func(r *Rule) { r.Freshness = "a" }), Difference{Revalued: []string{metric}}},
		"per":        {one(func(r *Rule) { r.Per, r.Aggregate, r.HoldFor = PerWorkload, Sum, 0 }), Difference{Revalued: []string{metric}}},
	} {
		if got := Compare(Default(), c.fresh); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, want %+v", what, got, c.want)
		}
	}
	if got := Compare(nil, Default()[:1]); !reflect.DeepEqual(got, Difference{Added: []string{metric}}) {
		t.Errorf("%+v", got)
	}
}
