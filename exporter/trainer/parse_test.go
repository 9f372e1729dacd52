package trainer

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capstan-gpu/capstan/trainer/stats"
)

func known() map[string]*stats.Family {
	m := map[string]*stats.Family{}
	for _, f := range stats.Families() {
		m[f.Name] = &f
	}
	return m
}

func TestParse(t *testing.T) {
	f := func(page, want string) {
		t.Helper()
		samples, refused, err := parse([]byte(page), known())
		var got strings.Builder
		for _, s := range samples {
			fmt.Fprintf(&got, "%s%q=%g ", s.Family.Name, s.Labels, s.Value)
		}
		for _, reason := range []string{ReasonLabels, ReasonValue, ReasonType, ReasonDuplicate} {
			if refused[reason] > 0 {
				fmt.Fprintf(&got, "%s:%d ", reason, refused[reason])
			}
		}
		if err != nil {
			got.WriteString("refused " + reasonOf(err))
		}
		if diff := cmp.Diff(want, strings.TrimSpace(got.String())); diff != "" {
			t.Errorf("parse(%.80q) (-want +got)\n%s", page, diff)
		}
	}
	f("", "")
	f("# HELP training_steps_total x\n# TYPE training_steps_total counter\ntraining_steps_total 12\n", "training_steps_total[]=12")
	f("training_steps_total 12", "training_steps_total[]=12") // no newline at the end
	f("training_world_size 3 1700000000000\n", "training_world_size[]=3")
	f("go_goroutines 7\npython_info{version=\"3\"} 1\n", "")
	f("training_ring_changes_total{reason=\"join\"} 1\ntraining_ring_changes_total 2\n", `training_ring_changes_total["join"]=1 training_ring_changes_total[""]=2`)
	// OpenMetrics' end is a comment.
	f("training_world_size 3\n# EOF\n", "training_world_size[]=3")

	// Forged identity: nothing of that sample is used.
	f("training_steps_total{namespace=\"victim\",pod=\"x\"} 9\ntraining_world_size 2\n", "training_world_size[]=2 labels:1")
	f("training_steps_total{pod_uid=\"x\"} 9\n", "labels:1")
	for _, v := range []string{"NaN", "+Inf", "-Inf", "-1", "1e308", "1e16"} {
		f("training_world_size "+v+"\n", "value:1")
	}
	f("# TYPE training_world_size histogram\ntraining_world_size_bucket{le=\"+Inf\"} 1\ntraining_world_size_sum 1\ntraining_world_size_count 1\n", "type:1")
	f("training_world_size 1\ntraining_world_size 2\n", "training_world_size[]=1 duplicate:1")

	f("training_world_size{\n", "refused parse")
	f("training_world_size 1\r\n", "refused parse")
	f("\x00\xff\n", "refused parse")
	f("training_world_size 1\n# TYPE training_world_size counter\n", "refused parse")
	f("training_world_size 1\n"+strings.Repeat("x 1\n", 200), "refused limits")
	f(strings.Repeat("# x\n", 1025), "refused limits")
	f(strings.Repeat("# TYPE x gauge\n", 2000), "refused limits")
	f("a"+strings.Repeat("a", 64)+" 1\n", "refused limits")
	f(`x{a="`+strings.Repeat("v", 129)+"\"} 1\n", "refused limits")
	f(`x{`+strings.Repeat("a", 65)+"=\"v\"} 1\n", "refused limits")
	var many strings.Builder
	for i := range 17 {
		fmt.Fprintf(&many, "l%d=\"\",", i)
	}
	f("x{"+many.String()+"} 1\n", "refused limits")
	f("x{a=\""+strings.Repeat("v", 9000)+"\"} 1\n", "refused limits")
}

// Whatever a page says, what comes out is known, bounded, finite, without identity, and no series twice.
func FuzzTrainerExposition(f *testing.F) {
	f.Add([]byte("# TYPE training_steps_total counter\ntraining_steps_total 12\n"))
	f.Add([]byte("training_ring_changes_total{reason=\"join\"} 1\ntraining_world_size NaN\n"))
	f.Add([]byte("{\"training.x\",a=\"b\"} 1 2\n"))
	f.Fuzz(func(t *testing.T, page []byte) {
		if len(page) > stats.MaxBody {
			return
		}
		samples, _, err := parse(page, known())
		if err != nil && len(samples) > 0 {
			t.Fatal("samples beside an error")
		}
		if len(samples) > stats.MaxSamples {
			t.Fatalf("%d samples", len(samples))
		}
		seen := map[string]bool{}
		for _, s := range samples {
			if _, ok := known()[s.Family.Name]; !ok {
				t.Fatalf("unknown name %q", s.Family.Name)
			}
			if math.IsNaN(s.Value) || s.Value < 0 || s.Value > stats.MaxNumber {
				t.Fatalf("value %g", s.Value)
			}
			if len(s.Labels) != len(s.Family.Labels) {
				t.Fatalf("labels %v", s.Labels)
			}
			for _, l := range s.Labels {
				if len(l) > stats.MaxValueBytes {
					t.Fatalf("label %q", l)
				}
			}
			if k := s.Family.Name + "\x00" + key(s); seen[k] {
				t.Fatalf("%q twice", k)
			} else {
				seen[k] = true
			}
		}
	})
}
