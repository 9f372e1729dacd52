package store

import (
	"context"
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/storage"
	"pgregory.net/rapid"
)

var noon = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

func at(seconds float64) time.Time { return noon.Add(time.Duration(seconds * float64(time.Second))) }

func one(name, pod string, v, seconds float64) Sample {
	return Sample{labels.FromStrings(model.MetricNameLabel, name, "pod", pod), v, at(seconds)}
}

// contents is what a query for everything gives: series by their text, values by second; "stale" for a staleness marker.
func contents(t interface{ Fatal(...any) }, s storage.Queryable, from, to time.Time, matchers ...*labels.Matcher) map[string][]string {
	q, err := s.Querier(from.UnixMilli(), to.UnixMilli())
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	got := map[string][]string{}
	set := q.Select(context.Background(), true, nil, matchers...)
	for set.Next() {
		series := set.At()
		it := series.Iterator(nil)
		for it.Next() != 0 {
			at, v := it.At()
			text := fmt.Sprint(v)
			if value.IsStaleNaN(v) {
				text = "stale"
			}
			key := series.Labels().String()
			got[key] = append(got[key], fmt.Sprintf("%g@%s", float64(at-noon.UnixMilli())/1000, text))
		}
	}
	if err := set.Err(); err != nil {
		t.Fatal(err)
	}
	return got
}

func everything(t *testing.T, s *Store) map[string][]string {
	t.Helper()
	return contents(t, s, noon.Add(-time.Hour), noon.Add(time.Hour))
}

func equal(t *testing.T, got, want map[string][]string) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

const x0, x1 = `{__name__="x", pod="web-0"}`, `{__name__="x", pod="web-1"}`

func TestDropsWhatIsOldTwiceOrLate(t *testing.T) {
	s := New(Config{Retention: 10 * time.Second})
	s.Append([]Sample{one("x", "web-0", 1, 0), one("x", "web-0", 2, 5), one("x", "web-0", 9, 5), one("x", "web-0", 9, 3), one("x", "web-0", 3, 14)})
	equal(t, everything(t, s), map[string][]string{x0: {"5@2", "14@3"}})
	if st := s.Stats(); st.Series != 1 || st.Samples != 2 || st.Duplicates != 1 || st.OutOfOrder != 1 {
		t.Errorf("%+v", st)
	}
	s.Prune(at(100))
	if st := s.Stats(); st.Series != 0 || st.Samples != 0 {
		t.Errorf("after everything is old: %+v", st)
	}
}

func TestBoundsItsMemory(t *testing.T) {
	s := New(Config{MaxSeries: 2})
	for i := range 5 {
		s.Append([]Sample{one("x", fmt.Sprint(i), 1, 0)})
	}
	if st := s.Stats(); st.Series != 2 || st.OverLimit != 3 {
		t.Errorf("%+v; want 2 series and 3 dropped", st)
	}
	s.Append([]Sample{one("x", "0", 2, 1)})
	if st := s.Stats(); st.Samples != 3 {
		t.Errorf("%+v; the series that are there go on", st)
	}
}

func TestASeriesThatLeavesThePageIsStale(t *testing.T) {
	s := New(Config{})
	s.Scrape("node-1", at(0), []Sample{one("x", "web-0", 1, 0), one("x", "web-1", 1, 0)})
	s.Scrape("node-1", at(5), []Sample{one("x", "web-0", 2, 5)})
	equal(t, everything(t, s), map[string][]string{x0: {"0@1", "5@2"}, x1: {"0@1", "5@stale"}})
	s.Scrape("node-2", at(6), []Sample{one("x", "web-0", 3, 6)}) // another target has it now
	s.Vanish("node-1", at(7))
	equal(t, everything(t, s), map[string][]string{x0: {"0@1", "5@2", "6@3"}, x1: {"0@1", "5@stale"}})
	s.Vanish("node-2", at(8))
	equal(t, everything(t, s), map[string][]string{x0: {"0@1", "5@2", "6@3", "8@stale"}, x1: {"0@1", "5@stale"}})
}

func TestSelects(t *testing.T) {
	s := New(Config{})
	s.Append([]Sample{one("x", "web-0", 1, 0), one("x", "web-1", 2, 0), one("y", "web-0", 3, 0), one("x", "web-0", 4, 9)})
	match := func(kind labels.MatchType, name, v string) *labels.Matcher {
		return labels.MustNewMatcher(kind, name, v)
	}
	equal(t, contents(t, s, at(0), at(5), match(labels.MatchEqual, "__name__", "x"), match(labels.MatchNotEqual, "pod", "web-1")), map[string][]string{x0: {"0@1"}})
	equal(t, contents(t, s, at(0), at(9), match(labels.MatchRegexp, "__name__", "x|y"), match(labels.MatchEqual, "pod", "web-1")), map[string][]string{x1: {"0@2"}})
	equal(t, contents(t, s, at(20), at(30)), map[string][]string{})
	q, err := s.Querier(at(0).UnixMilli(), at(5).UnixMilli())
	if err != nil {
		t.Fatal(err)
	}
	names, _, err := q.LabelValues(t.Context(), "pod", nil, match(labels.MatchEqual, "__name__", "x"))
	if err != nil || !slices.Equal(names, []string{"web-0", "web-1"}) {
		t.Errorf("values of pod: %v, %v", names, err)
	}
	labelNames, _, err := q.LabelNames(t.Context(), nil)
	if err != nil || !slices.Equal(labelNames, []string{"__name__", "pod"}) {
		t.Errorf("label names: %v, %v", labelNames, err)
	}
}

// A naive twin: a map of slices, cut by the same rules.
func TestAgainstANaiveTwin(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const retention = 20
		s := New(Config{Retention: retention * time.Second})
		twin := map[string][]Sample{}
		cut := func(key string, oldest time.Time) {
			twin[key] = slices.DeleteFunc(twin[key], func(x Sample) bool { return x.At.Before(oldest) })
		}
		add := func(x Sample) {
			key := x.Labels.String()
			if n := len(twin[key]); n > 0 && !x.At.After(twin[key][n-1].At) {
				return
			}
			twin[key] = append(twin[key], x)
			cut(key, x.At.Add(-retention*time.Second))
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now := float64(rapid.IntRange(0, 100).Draw(t, "second"))
			if rapid.IntRange(0, 9).Draw(t, "prune") == 0 {
				s.Prune(at(now))
				for key := range twin {
					cut(key, at(now-retention))
				}
				continue
			}
			x := one(rapid.SampledFrom([]string{"x", "y"}).Draw(t, "name"), fmt.Sprint(rapid.IntRange(0, 2).Draw(t, "pod")), float64(rapid.IntRange(0, 9).Draw(t, "value")), now)
			s.Append([]Sample{x})
			add(x)
		}
		want := map[string][]string{}
		samples := 0
		for key, list := range twin {
			for _, x := range list {
				want[key] = append(want[key], fmt.Sprintf("%g@%g", x.At.Sub(noon).Seconds(), x.Value))
				samples++
			}
		}
		got := contents(t, s, noon.Add(-time.Hour), noon.Add(time.Hour))
		if !reflect.DeepEqual(got, want) || s.Stats().Samples != samples || s.Stats().Series < len(want) {
			t.Fatalf("got %v (%+v)\nwant %v", got, s.Stats(), want)
		}
	})
}

func TestSeekAndStaleMarker(t *testing.T) {
	it := &iterator{samples: []sample{{1000, 1}, {2000, 2}, {3000, math.Float64frombits(value.StaleNaN)}}, at: -1}
	if it.Seek(1500) == 0 || it.AtT() != 2000 || it.Seek(1000) == 0 || it.AtT() != 2000 {
		t.Errorf("Seek goes back, or to the wrong place: %d", it.AtT())
	}
	if it.Seek(9000) != 0 || it.Next() != 0 {
		t.Error("there is something after the end")
	}
}

// 1,000 nodes of 8 GPUs: one tick's samples in, one range query of the fleet out.
func BenchmarkFleet(b *testing.B) {
	s := New(Config{Retention: 2 * time.Minute})
	series := make([]labels.Labels, 8000)
	for i := range series {
		series[i] = labels.FromStrings(model.MetricNameLabel, "capstan_pod_gpu_busy_seconds_total", "namespace", "training", "pod", fmt.Sprintf("web-%d", i), "pod_uid", fmt.Sprintf("uid-%d", i), "shared", "false")
	}
	batch := make([]Sample, len(series))
	matcher := labels.MustNewMatcher(labels.MatchEqual, model.MetricNameLabel, "capstan_pod_gpu_busy_seconds_total")
	b.ReportAllocs()
	for tick := 0; b.Loop(); tick++ {
		for i := range batch {
			batch[i] = Sample{series[i], float64(tick), at(float64(5 * tick))}
		}
		s.Append(batch)
		q, err := s.Querier(at(float64(5*tick-60)).UnixMilli(), at(float64(5*tick)).UnixMilli())
		if err != nil {
			b.Fatal(err)
		}
		n := 0
		for set := q.Select(b.Context(), false, nil, matcher); set.Next(); n++ {
		}
		if n != len(series) {
			b.Fatalf("%d series", n)
		}
	}
}
