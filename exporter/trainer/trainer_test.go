package trainer

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/capstan-gpu/capstan/trainer/stats"
)

func TestBreaker(t *testing.T) {
	now := time.Unix(1000, 0)
	f := func(took time.Duration, failures int, want time.Duration) {
		t.Helper()
		got := breaker(now, took, failures, 5*time.Second)
		if want == 0 && !got.IsZero() || want != 0 && got.Sub(now) != want {
			t.Errorf("breaker(took %s, %d failures) = %s, want %s", took, failures, got.Sub(now), want)
		}
	}
	f(time.Second, 1, 0)
	f(time.Second, 2, 10*time.Second)
	f(time.Second, 3, 20*time.Second)
	f(time.Second, 100, time.Minute)
	f(time.Millisecond, 2, 10*time.Second)
	f(time.Millisecond, 100, 15*time.Second)
}

// The pod is gone and another has its address by the time its page was read: nobody's page.
func TestAddressMovesOn(t *testing.T) {
	where := serve(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, goodPage) })
	var last Result
	r := newReader(Config{Interval: time.Second, Pods: func() []Pod { return nil }, Families: stats.Families(),
		Ended: func(_ time.Time, result Result) { last = result }, Logger: slog.New(slog.DiscardHandler)})
	asked := 0
	r.targets = func([]Pod) ([]target, map[string]string) {
		asked++
		if asked > 1 {
			where.uid = "the next one"
		}
		return []target{where}, nil
	}
	r.cycle(context.Background())
	if len(last.Pages) != 0 || last.Reads[ReasonMoved] != 1 {
		t.Errorf("pages %v, reads %v", last.Pages, last.Reads)
	}
	r.cycle(context.Background())
	if len(last.Pages) != 1 || last.Pages[0].UID != "the next one" {
		t.Errorf("pages %v, reads %v", last.Pages, last.Reads)
	}
	// Its counters have been followed since the first read, also across one that fails.
	first := last.Pages[0].At
	targets := r.targets
	r.targets = func([]Pod) ([]target, map[string]string) { return nil, map[string]string{"the next one": ReasonTarget} }
	r.cycle(context.Background())
	r.targets = targets
	r.cycle(context.Background())
	if len(last.Pages) != 1 || !last.Pages[0].First.Equal(first) || !last.Pages[0].At.After(first) {
		t.Errorf("pages %+v, want one that is followed since %s", last.Pages, first)
	}
	// A pod that is gone takes its page with it.
	r.targets = func([]Pod) ([]target, map[string]string) { return nil, nil }
	r.cycle(context.Background())
	if len(last.Pages) != 0 || len(r.pods) != 0 {
		t.Errorf("pages %v, %d pods remembered", last.Pages, len(r.pods))
	}
}
