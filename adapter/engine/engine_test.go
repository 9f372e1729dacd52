package engine

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"

	"github.com/capstan-gpu/capstan/adapter/store"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules"
)

var noon = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

// scrape is what one scrape of one worker's exporter said, and when it arrived.
type scrape struct{ at, busy, observed float64 }

// utilization evaluates the shipped rule with a window of 60 s on a history of scrapes; NaN when there is no value.
func utilization(t *testing.T, now float64, history ...scrape) float64 {
	t.Helper()
	s := store.New(store.Config{})
	for _, x := range history {
		at := noon.Add(time.Duration(x.at * float64(time.Second)))
		for name, v := range map[string]float64{metricname.PodGPUBusySeconds: x.busy, metricname.PodGPUObservedSeconds: x.observed} {
			s.Append([]store.Sample{{Labels: labels.FromStrings(model.MetricNameLabel, name, metricname.Namespace, "training", metricname.Pod, "web-0", metricname.PodUID, "u", metricname.Shared, "false"), Value: v, At: at}})
		}
	}
	rule := rules.Default()[0]
	points, err := Embedded(s, Config{Lookback: rule.MaxAge})(t.Context(), rule.Query(), noon.Add(time.Duration(now*float64(time.Second))))
	if err != nil {
		t.Fatal(err)
	}
	if len(points) == 0 {
		return math.NaN()
	}
	if len(points) != 1 || points[0].Labels.Get(metricname.PodUID) != "u" {
		t.Fatalf("%v", points)
	}
	return points[0].Value
}

// busy is a history of scrapes every 5 s of a worker that is busy to a share.
func busy(share, from, to float64) (history []scrape) {
	for s := from; s <= to; s += 5 {
		history = append(history, scrape{s, share * (s - from), s - from})
	}
	return history
}

// Decision 3: busy over observed, from one snapshot.
func TestBusyOverObserved(t *testing.T) {
	check := func(what string, got, want float64) {
		t.Helper()
		if math.IsNaN(want) != math.IsNaN(got) || math.Abs(got-want) > 1e-6 {
			t.Errorf("%s: %g, want %g", what, got, want)
		}
	}
	check("steady", utilization(t, 120, busy(0.95, 0, 120)...), 95)

	frozen := busy(0.95, 0, 60)
	for s := 65.0; s <= 125; s += 5 {
		frozen = append(frozen, scrape{s, 0.95 * 60, 60})
	}
	check("frozen for a window: 0/0, which is missing", utilization(t, 125, frozen...), math.NaN())
	check("frozen for half a window: what was observed", utilization(t, 90, frozen[:19]...), 95)

	skewed := busy(1, 0, 120)
	for i := range skewed {
		skewed[i].at += float64(i%3-1) * 1.0 // a second early, a second late
	}
	if got := utilization(t, 122, skewed...); got > 100.0000001 || got < 99 {
		t.Errorf("scrapes skewed by a second read %g, want 100", got)
	}
	check("a pod of ten seconds", utilization(t, 110, busy(1, 100, 110)...), 100)
	check("a pod of one scrape has no rate", utilization(t, 100, busy(1, 100, 100)...), math.NaN())

	reset := append(busy(0.5, 0, 60), scrape{65, 0.5, 1}, scrape{70, 3, 6}, scrape{75, 5.5, 11})
	if got := utilization(t, 75, reset...); math.Abs(got-50) > 0.5 {
		t.Errorf("over a restart of the exporter it reads %g, want 50", got)
	}
	idle := utilization(t, 120, busy(0, 0, 120)...)
	check("idle is a measured zero", idle, 0)
}

func TestWhatIsNoVectorIsAnError(t *testing.T) {
	f := Embedded(store.New(store.Config{}), Config{})
	for expr, want := range map[string]string{"1": "not an instant vector", "x[5m]": "not an instant vector", "sum(": "query sum("} {
		if _, err := f(t.Context(), expr, noon); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", expr, err, want)
		}
	}
}

func TestLookbackAndStaleness(t *testing.T) {
	s := store.New(store.Config{})
	page := func(at time.Time) []store.Sample {
		return []store.Sample{{Labels: labels.FromStrings(model.MetricNameLabel, "x"), Value: 1, At: at}}
	}
	s.Scrape("node-1", noon, page(noon))
	f := Embedded(s, Config{Lookback: 10 * time.Second})
	count := func(at time.Time) int {
		points, err := f(t.Context(), "x", at)
		if err != nil {
			t.Fatal(err)
		}
		return len(points)
	}
	if a, b := count(noon.Add(9*time.Second)), count(noon.Add(11*time.Second)); a != 1 || b != 0 {
		t.Errorf("after 9 s %d points, after 11 s %d; want 1 and 0", a, b)
	}
	s.Scrape("node-1", noon.Add(2*time.Second), nil)
	if n := count(noon.Add(3 * time.Second)); n != 0 {
		t.Errorf("a series that left the page is still there: %d", n)
	}
}

func TestEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Embedded(store.New(store.Config{}), Config{})(ctx, "x", noon); err == nil {
		t.Error("a cancelled query answers")
	}
}

func TestWarningsAreTold(t *testing.T) {
	s := store.New(store.Config{})
	for i := range 3 {
		s.Append([]store.Sample{{Labels: labels.FromStrings(model.MetricNameLabel, "gauge"), Value: 1, At: noon.Add(time.Duration(i) * time.Second)}})
	}
	var told []string
	f := Embedded(s, Config{Annotated: func(expr string, warnings []string) { told = append(told, fmt.Sprint(expr, warnings)) }})
	if _, err := f(t.Context(), "rate(gauge[1m])", noon.Add(2*time.Second)); err != nil || len(told) != 1 || !strings.Contains(told[0], "might not be a counter") {
		t.Errorf("%v, %v; want the engine's word that gauge might not be a counter", told, err)
	}
}
