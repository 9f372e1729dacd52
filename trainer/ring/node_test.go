package ring

import (
	"testing"
	"time"
)

// bench drives one node by hand, where a history would not come by for long.
type bench struct {
	t    *testing.T
	node *Node
	now  time.Time
	last Report // that it sent to somebody else
	recs []Record
}

func newBench(t *testing.T, self ID) *bench {
	t.Helper()
	n, err := New(hasty(), self)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, node: n, now: time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)}
	b.take(n.Tick(b.now))
	return b
}

func (b *bench) take(actions []Action) {
	for _, a := range actions {
		switch a := a.(type) {
		case Send:
			if a.Message.Report != nil {
				b.last = *a.Message.Report
			}
		case WriteRecord:
			b.recs = append(b.recs, a.Record)
		}
	}
}

func (b *bench) event(e Event) { b.take(b.node.Step(e, b.now)) }

func (b *bench) order(from ID, o Order) {
	b.event(Message{Job: "job-1", From: from, To: b.node.Status().ID, Order: &o})
}

func (b *bench) wait(d time.Duration) {
	for end := b.now.Add(d); b.now.Before(end); {
		b.now = b.now.Add(50 * time.Millisecond)
		b.take(b.node.Tick(b.now))
	}
}

// What an aborted child has done counts, though nobody said so while it did: else its state would have one step more than it is taken for.
func TestAbortedStepCounts(t *testing.T) {
	for _, test := range []struct {
		aborted, want int64
	}{{7, 7}, {8, 8}, {9, -1}, {6, -1}, {-1, -1}} {
		leader, self := ID{0, "a", 1}, ID{1, "b", 1}
		b := newBench(t, self)
		g := Generation{1, 1}
		rec := Record{Job: "job-1", Generation: g, Members: []ID{leader, self}, Step: 7}
		b.event(Leader{Term: 1, Holder: leader})
		b.event(Warmed{Step: 7})
		b.order(leader, Order{Kind: Propose, Term: 1, Generation: g, Abort: true})
		b.order(leader, Order{Kind: Commit, Term: 1, Generation: g, Record: &rec, Source: leader})
		b.event(Synced{Generation: g})
		b.order(leader, Order{Kind: Run, Term: 1, Generation: g})
		if s := b.node.Status(); s.Phase != Running || s.Rank != 1 || s.World != 2 || s.Step != 7 {
			t.Fatalf("Status() = %+v, want it running", s)
		}
		b.event(StepDone{Generation: Generation{1, 9}, Step: 8})
		b.event(PeerLost{Generation{0, 9}, leader})
		if s := b.node.Status(); s.Phase != Running || s.Step != 7 || s.Refused != 2 {
			t.Fatalf("Status() = %+v, want nothing heard of other generations", s)
		}
		b.event(PeerLost{g, leader})
		if b.last.Phase != Aborting || len(b.last.Lost) != 1 {
			t.Fatalf("after PeerLost it reports %+v", b.last)
		}
		b.event(Aborted{g, test.aborted})
		if b.last.Phase != Stopped || b.last.Position.Step != test.want {
			t.Errorf("Aborted at %d: it reports %s with %d steps, want stopped with %d", test.aborted, b.last.Phase, b.last.Position.Step, test.want)
		}
	}
}

// A coordinator whose record was refused goes on in the same term, and must not number two generations alike.
func TestNumbersAreNeverUsedAgain(t *testing.T) {
	self := ID{0, "a", 1}
	b := newBench(t, self)
	b.event(Leader{Term: 4, Holder: self})
	b.event(Warmed{})
	for i := range 3 {
		b.wait(2 * time.Second)
		if len(b.recs) != i+1 {
			t.Fatalf("%d records to write, want %d", len(b.recs), i+1)
		}
		if i > 0 && b.recs[i].Generation.Compare(b.recs[i-1].Generation) <= 0 {
			t.Errorf("generation %s after %s", b.recs[i].Generation, b.recs[i-1].Generation)
		}
		b.event(NotRecorded{Generation: b.recs[i].Generation})
		b.event(Leader{Term: 4, Holder: self})
	}
}

// A record of another StatefulSet with the same name is none, its end included.
func TestEndIsOfThisJob(t *testing.T) {
	self := ID{0, "a", 1}
	b := newBench(t, self)
	b.event(Leader{Term: 1, Holder: self, Record: Record{Job: "job-0", Generation: Generation{9, 9}, Members: []ID{{3, "x", 1}}, End: Succeeded}})
	if s := b.node.Status(); s.Phase != Joining || s.Coordinator == nil || !s.Coordinator.Record.Generation.IsZero() {
		t.Errorf("Status() = %+v, want a coordinator of a job that has not begun", s)
	}
	b.event(Leader{Term: 2, Holder: ID{1, "b", 1}, Record: Record{Job: "job-1", End: Succeeded}})
	if s := b.node.Status(); s.Phase != Over || s.End != Succeeded {
		t.Errorf("Status() = %+v, want over", s)
	}
}
