// Package ring decides who trains together: it turns what happens to the workers of a job (they start, warm up, leave, die, come
// back, are cut off) into generations of a ring, and tells each worker what to do about it.
//
// It is a state machine. [Node] is one worker's: [Node.Step] takes what happened, [Node.Tick] takes the time, both return what to do.
// There is no goroutine, clock, socket or disk here, and the same inputs give the same outputs; the agent brings the rest.
//
// Each node is a member, and one of them is the coordinator as well: the one that holds the job's lease, or the first ordinal where
// there is no lease. A member says one thing only, a [Report], which is its whole state; the coordinator answers with the one [Order]
// that this state calls for. So a message that is lost, doubled or late does no harm: the next report brings the order again.
//
// How a generation comes to be:
//
//	propose   The coordinator takes a number that never was, and asks all to stop for it. Who stops promises to hear no lower number.
//	          In a planned change all stop after the same step, and joiners have warmed up before; after a loss, all stop at once.
//	record    Of those who promised it picks the members and the newest state, and has that written where only one can write
//	          (compare and set): of two who both believe to be the coordinator, one fails here.
//	commit    The members open their connections, and those who are behind copy the state of one who is not.
//	run       When every member has the state, they step.
//
// What makes it safe: a step needs every member of its generation. A generation follows another only if one of the other's members
// has promised (so that one can step no more), or if all of them are known to be gone. The state is taken from those who promised, so
// at most the step in flight is done again, and the cursor over the samples, being part of the state, goes back with it.
//
// It does not judge whether a pod should exist (the HPA does), never guesses that a silent pod is gone (the API server says so), and
// knows nothing of what a state or a step is.
package ring

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// ID names one process of the job. A worker that starts again is another one, which knows nothing of what the first had promised.
type ID struct {
	Ordinal int    // of the pod in its StatefulSet; ranks follow it
	Pod     string // the pod's UID
	Boot    int64  // rises with every start of the agent in this pod, from 1; compared within one pod only, so a start time will do
}

// Compare orders by ordinal, as a number.
func (a ID) Compare(b ID) int {
	return cmp.Or(cmp.Compare(a.Ordinal, b.Ordinal), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Boot, b.Boot))
}

func (a ID) String() string { return fmt.Sprintf("%d (pod %s, start %d)", a.Ordinal, a.Pod, a.Boot) }

// ordinals are the ordinals of ids, for people.
func ordinals(ids []ID) string {
	words := make([]string, len(ids))
	for i, id := range ids {
		words[i] = fmt.Sprint(id.Ordinal)
	}
	return strings.Join(words, " ")
}

// Generation numbers a membership of the ring. It stamps every message, connection and checkpoint, grows with every change, and is
// never used twice: each coordinator counts within its own term. The zero value is before all others.
type Generation struct {
	Term  uint32 // of the coordinator that proposed it
	Count uint32 // from 1 within the term
}

// Compare orders by term, then by count.
func (g Generation) Compare(h Generation) int {
	return cmp.Or(cmp.Compare(g.Term, h.Term), cmp.Compare(g.Count, h.Count))
}

// IsZero says that it is none.
func (g Generation) IsZero() bool { return g == Generation{} }

// Number is the generation as one number that grows with it, for the stats page. It stays below the page's bound of 1e15 while Term
// is below 3.8e9 (a time in Unix seconds fits) and Count below 262,144.
func (g Generation) Number() uint64 { return uint64(g.Term)<<18 | uint64(g.Count) }

func (g Generation) String() string { return fmt.Sprintf("%d.%d", g.Term, g.Count) }

// Position says which state a member holds.
type Position struct {
	Generation Generation // in which it was computed or copied; zero = read from a checkpoint, or fresh
	Step       int64      // steps in it; -1 = no state
}

// compare orders by age: of two generations the higher one's state counts, even if it has fewer steps, for what the other had beyond
// them was done again.
func (p Position) compare(q Position) int {
	return cmp.Or(p.Generation.Compare(q.Generation), cmp.Compare(p.Step, q.Step))
}

// Outcome is how a job ended.
type Outcome string

// The outcomes. "" is a job that has not ended.
const (
	Succeeded Outcome = "succeeded"
	Failed    Outcome = "failed"
)

// Reason is why a generation came to be; the label of training_ring_changes_total.
type Reason string

// The reasons.
const (
	Start     Reason = "start"
	ScaleUp   Reason = "scale_up"
	ScaleDown Reason = "scale_down"
	Loss      Reason = "loss"
	Restart   Reason = "restart" // the members' processes go on, but none holds the ring's state: it is read from a checkpoint
)

// Record is what must outlive every process: the newest generation, and how the job ended. The agent keeps it in an object of the API
// server and writes it under the condition that nobody else has since it was read.
type Record struct {
	Job        string // UID of the StatefulSet; a record of another one counts as none
	Generation Generation
	Members    []ID       // by ordinal: the rank is the index
	Step       int64      // steps in the state that it began with
	Base       Generation // whose state it began with; zero = a checkpoint's, or a fresh one
	Reason     Reason
	Version    string // of the members' code and configuration
	Restarts   int    // processes of the whole job that were started again after a crash
	Crash      Crash  // the newest one
	End        Outcome
	EndReason  string // for Failed
	EndStep    int64
}

// Crash is an end of a training process that nobody asked for.
type Crash struct {
	Generation  Generation
	Step        int64 // that was being done
	Error       string
	Generations int // in a row that had this error at this step
}

func (r Record) has(id ID) bool { return slices.Contains(r.Members, id) }

// Phase is what a member is doing.
type Phase string

// The phases.
const (
	Joining   Phase = "joining"   // its child warms up
	Standby   Phase = "standby"   // warm, in no generation
	Syncing   Phase = "syncing"   // in a generation that does not step yet: connections and state are on their way
	Running   Phase = "running"   // steps
	Quiescing Phase = "quiescing" // steps until the step after which all stop
	Aborting  Phase = "aborting"  // its child is being stopped in the midst of a step
	Stopped   Phase = "stopped"   // holds its state, and waits for the next generation
	Paused    Phase = "paused"    // as Stopped, and there cannot be a next generation yet
	AtEnd     Phase = "at end"    // has done the last step, and waits until all have
	Left      Phase = "left"
	Over      Phase = "over" // the job has ended; the process stays up and idle, for one that exits would be started again
)

// stopped says that a member in this phase has no step under way and begins none of its own accord.
func (p Phase) stopped() bool { return p == Joining || p == Standby || p == Stopped || p == Paused }

// active says that a member in this phase has connections of a generation.
func (p Phase) active() bool {
	return p == Syncing || p == Running || p == Quiescing || p == AtEnd
}
