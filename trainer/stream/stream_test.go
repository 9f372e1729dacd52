package stream

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// twin is the same account, kept number by number.
type twin struct {
	done   map[int64]int    // how often each number was completed
	holder map[int64]uint64 // which lease has it
}

// one draws a key of a map, the same for the same draw.
func one[V any](t *rapid.T, of map[uint64]V) uint64 {
	return rapid.SampledFrom(slices.Sorted(maps.Keys(of))).Draw(t, "which")
}

// Over any history of pulls, completions, hand-backs, vanished and late workers and changing rates, each sample is completed exactly
// once and none is lost; the account agrees with one kept number by number.
func TestExactlyOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(1000, 0)
		s, err := New(Config{Rate: rapid.Float64Range(0, 500).Draw(t, "rate")}, now)
		if err != nil {
			t.Fatal(err)
		}
		w := twin{done: map[int64]int{}, holder: map[int64]uint64{}}
		held := map[uint64]Lease{}      // what workers believe to have, rightly or not
		until := map[uint64]time.Time{} // when a lease runs out
		tickets := map[uint64]bool{}
		expire := func() {
			for n, id := range w.holder {
				if !now.Before(until[id]) {
					delete(w.holder, n)
				}
			}
		}
		tick := func() {
			expire()
			for _, g := range s.Tick(now) {
				if !tickets[g.Ticket] {
					t.Fatalf("grant for ticket %d, which does not wait", g.Ticket)
				}
				delete(tickets, g.Ticket)
				if g.Lease.Count < 1 {
					t.Fatalf("grant of nothing: %+v", g)
				}
				held[g.Lease.ID], until[g.Lease.ID] = g.Lease, now.Add(5*time.Second)
				for n := g.Lease.First; n < g.Lease.First+g.Lease.Count; n++ {
					if w.done[n] > 0 || w.holder[n] != 0 {
						t.Fatalf("sample %d was granted again: completed %d times, held by lease %d", n, w.done[n], w.holder[n])
					}
					w.holder[n] = g.Lease.ID
				}
			}
		}
		settle := func(l Lease, n int64) {
			expire()
			right := until[l.ID].After(now)
			err := s.Settle(l.ID, l.Worker, n, now)
			if right != (err == nil) || err != nil && !errors.Is(err, ErrLate) {
				t.Fatalf("Settle(%+v, %d) = %v; the lease runs out at %v, now is %v", l, n, err, until[l.ID], now)
			}
			if right {
				for i := l.First; i < l.First+l.Count; i++ {
					delete(w.holder, i)
					if i < l.First+n {
						w.done[i]++
					}
				}
			}
			delete(held, l.ID)
		}
		same := func() {
			expire()
			got := s.Status(now)
			want := got
			want.Completed, want.Leased = int64(len(w.done)), int64(len(w.holder))
			want.Backlog = got.Offered - want.Completed - want.Leased
			want.Duplicates, want.Lost = 0, 0
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("account (-twin +got):\n%s", diff)
			}
			var byWorker int64
			for _, of := range got.Workers {
				byWorker += of.Completed
			}
			if byWorker != got.Completed {
				t.Fatalf("the workers completed %d samples in all, the account says %d", byWorker, got.Completed)
			}
		}
		for range rapid.IntRange(1, 80).Draw(t, "events") {
			switch rapid.IntRange(0, 6).Draw(t, "event") {
			case 0, 1:
				ticket, err := s.Pull(fmt.Sprintf("worker-%d", rapid.IntRange(0, 4).Draw(t, "worker")), rapid.Int64Range(1, 50).Draw(t, "max"), now)
				if err != nil {
					t.Fatal(err)
				}
				tickets[ticket] = true
			case 2:
				now = now.Add(rapid.SampledFrom([]time.Duration{0, time.Millisecond, 100 * time.Millisecond, time.Second, 5 * time.Second}).Draw(t, "wait"))
			case 3: // completed, in part, not at all, in time or late
				if len(held) > 0 {
					l := held[one(t, held)]
					settle(l, rapid.Int64Range(0, l.Count).Draw(t, "completed"))
				}
			case 4: // the worker vanishes
				if len(held) > 0 {
					delete(held, one(t, held))
				}
			case 5:
				if err := s.SetRate(rapid.Float64Range(0, 500).Draw(t, "rate"), now); err != nil {
					t.Fatal(err)
				}
			case 6: // the worker gives up waiting
				if len(tickets) > 0 {
					ticket := one(t, tickets)
					s.Cancel(ticket)
					delete(tickets, ticket)
				}
			}
			tick()
			same()
		}
		// One diligent worker then does all that is left.
		if err := s.SetRate(0, now); err != nil {
			t.Fatal(err)
		}
		offered := s.Status(now).Offered
		for ticket := range tickets {
			s.Cancel(ticket)
		}
		clear(tickets)
		for i := 0; s.Status(now).Completed < offered; i++ {
			if i > 10_000 {
				t.Fatalf("still not all completed: %+v", s.Status(now))
			}
			ticket, err := s.Pull("diligent", 50, now)
			if err != nil {
				t.Fatal(err)
			}
			tickets[ticket] = true
			now = now.Add(time.Second)
			tick()
			for _, l := range held {
				if l.Worker == "diligent" {
					settle(l, l.Count)
				}
			}
			s.Cancel(ticket)
			delete(tickets, ticket)
		}
		same()
		for n := range offered {
			if w.done[n] != 1 {
				t.Fatalf("sample %d was completed %d times", n, w.done[n])
			}
		}
	})
}

func TestEqualShares(t *testing.T) {
	now := time.Unix(1000, 0)
	s, _ := New(Config{Rate: 100}, now)
	for _, w := range []string{"a", "b", "c"} {
		s.Pull(w, 10, now)
	}
	got := map[string]int64{}
	for end := now.Add(30 * time.Second); now.Before(end); now = now.Add(20 * time.Millisecond) {
		for _, g := range s.Tick(now) {
			got[g.Lease.Worker] += g.Lease.Count
			s.Settle(g.Lease.ID, g.Lease.Worker, g.Lease.Count, now)
			s.Pull(g.Lease.Worker, 10, now)
		}
	}
	for w, n := range got {
		if n < 980 || n > 1020 {
			t.Errorf("worker %s got %d of 3000 samples, want a third", w, n)
		}
	}
	if len(got) != 3 {
		t.Errorf("shares %v, want three", got)
	}
}

func TestPartialBatchWaits(t *testing.T) {
	now := time.Unix(1000, 0)
	at := func(d time.Duration) time.Time { return now.Add(d) }
	s, _ := New(Config{Rate: 10}, now)
	s.Pull("a", 10, at(0))
	if got := s.Tick(at(200 * time.Millisecond)); len(got) != 0 {
		t.Errorf("after 200 ms: %+v, want to wait for a fuller batch", got)
	}
	if got := s.Tick(at(250 * time.Millisecond)); len(got) != 1 || got[0].Lease.Count != 2 {
		t.Errorf("after 250 ms: %+v, want the two samples that are there", got)
	}
}

// A worker that vanishes keeps its samples for five seconds; its late word is refused and counted.
func TestLate(t *testing.T) {
	now := time.Unix(1000, 0)
	at := func(d time.Duration) time.Time { return now.Add(d) }
	s, _ := New(Config{Rate: 10}, now)
	s.Pull("gone", 10, at(time.Second))
	lost := s.Tick(at(time.Second))[0].Lease
	if err := s.SetRate(0, at(time.Second)); err != nil {
		t.Fatal(err)
	}
	s.Pull("other", 10, at(time.Second))
	if got := s.Tick(at(5900 * time.Millisecond)); len(got) != 0 {
		t.Fatalf("before the lease ran out: %+v", got)
	}
	again := s.Tick(at(6 * time.Second))
	if len(again) != 1 || again[0].Lease.First != lost.First || again[0].Lease.Count != lost.Count {
		t.Fatalf("after the lease ran out: %+v, want %+v again", again, lost)
	}
	if err := s.Settle(lost.ID, "gone", 10, at(7*time.Second)); !errors.Is(err, ErrLate) {
		t.Errorf("late Settle = %v, want ErrLate", err)
	}
	for range 2 { // the answer got lost, so it is said twice
		if err := s.Settle(again[0].Lease.ID, "other", 10, at(7*time.Second)); err != nil {
			t.Errorf("Settle = %v", err)
		}
	}
	want := Status{Rate: 0, Offered: 10, Completed: 10, Returned: 10, Late: 10, Workers: map[string]WorkerStatus{"gone": {}, "other": {Completed: 10}}}
	if diff := cmp.Diff(want, s.Status(at(7*time.Second))); diff != "" {
		t.Errorf("account (-want +got):\n%s", diff)
	}
}

func TestRefuses(t *testing.T) {
	now := time.Unix(1000, 0)
	if _, err := New(Config{Rate: -1}, now); err == nil {
		t.Error("a negative rate was taken")
	}
	s, _ := New(Config{Rate: 10}, now)
	s.Pull("a", 5, now)
	l := s.Tick(now.Add(time.Second))[0].Lease
	for what, err := range map[string]error{
		"rate too high":     s.SetRate(2e6, now),
		"more than it has":  s.Settle(l.ID, "a", 6, now),
		"less than nothing": s.Settle(l.ID, "a", -1, now),
		"another's":         s.Settle(l.ID, "b", 5, now),
		"never granted":     s.Settle(77, "a", 5, now),
	} {
		if err == nil {
			t.Errorf("%s was taken", what)
		}
	}
	if _, err := s.Pull("", 5, now); err == nil {
		t.Error("a worker without a name was taken")
	}
	if _, err := s.Pull("a", 0, now); err == nil {
		t.Error("a pull of nothing was taken")
	}
	if got := s.Status(now.Add(time.Second)); got.Leased != 5 || got.Completed != 0 {
		t.Errorf("account %+v, want the lease untouched", got)
	}
}

func TestRanges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var r ranges
		want := map[int64]bool{}
		for range rapid.IntRange(1, 30).Draw(t, "operations") {
			if rapid.Bool().Draw(t, "take") {
				got, ok := r.take(rapid.Int64Range(1, 10).Draw(t, "n"))
				if ok != (len(want) > 0) {
					t.Fatalf("take = %v %v of %v", got, ok, want)
				}
				for n := got.from; n < got.to; n++ {
					if !want[n] {
						t.Fatalf("took %d, which is not there", n)
					}
					delete(want, n)
				}
				continue
			}
			from := rapid.Int64Range(0, 50).Draw(t, "from")
			s := span{from, from + rapid.Int64Range(0, 10).Draw(t, "n")}
			var already int64
			for n := s.from; n < s.to; n++ {
				if want[n] {
					already++
				}
				want[n] = true
			}
			if got := r.add(s); got != already {
				t.Fatalf("add(%v) = %d, want %d", s, got, already)
			}
			for i := 1; i < len(r); i++ {
				if r[i-1].to >= r[i].from {
					t.Fatalf("spans touch: %v", r)
				}
			}
			if r.total() != int64(len(want)) {
				t.Fatalf("total %d, want %d", r.total(), len(want))
			}
		}
	})
}
