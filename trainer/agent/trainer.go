package agent

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// Trainer is the training of one worker: a Go program that is linked into the agent and re-rings in place, or a [Process].
//
// The agent calls one method at a time, and cancels ctx when what the method does is not wanted any more; the method then returns
// soon, whatever it waits for. An error of a peer's connection is a [*PeerError]: the state is still good. Any other error means that
// the state is lost, counts as a crash, and is followed by Abort and Warm.
type Trainer interface {
	// Warm gives up whatever state there was, and gets ready to be admitted: all is loaded, and the newest checkpoint read. It returns
	// the steps in that, 0 if there is none.
	Warm(ctx context.Context) (step int64, err error)
	// Enter opens the connections of a generation and has the state that it begins with brought to whoever lacks it. It returns when all
	// that is done, with a hash of the state; 0 = not computed. A peer may enter a little later: wait for it.
	Enter(ctx context.Context, e Entry) (hash uint64, err error)
	// Run does one step after the other, and tells s of each. In each step's all-reduce goes s.Wish, of which all take the maximum. It
	// returns after the step with which s.Done says that it was the last one of the generation; or, with finished, after the last of the job.
	Run(ctx context.Context, s *Session) (finished bool, err error)
	// Park closes the connections of the generation and keeps the state.
	Park(ctx context.Context) error
	// Abort closes the connections of the generation, whatever they are in the midst of. It returns the steps in the state, or -1 if that
	// is torn, as by half a copy.
	Abort(ctx context.Context) (step int64, err error)
	// Save writes a checkpoint of the state, and returns its step when it is durable.
	Save(ctx context.Context) (step int64, err error)
	// Close ends it. Nothing follows.
	Close()
}

// Entry is a worker's way into a generation.
type Entry struct {
	Generation ring.Generation
	Rank       int    // -1 = it is not in the generation, but those in To have its state copied
	Members    []Peer // by rank
	Step       int64  // steps in the state that all begin with
	Reason     ring.Reason
	Secret     []byte // 32 bytes that only the members have: whoever proves it on a connection is of this generation
	From       *Peer  // copy the state from there, and do not use the one here any more; nil = the state here is the one
	To         []Peer // have the state from here
}

// PeerError is a connection that broke.
type PeerError struct {
	Peer ring.ID
	Err  error
}

func (e *PeerError) Error() string {
	return fmt.Sprintf("connection to ordinal %d: %v", e.Peer.Ordinal, e.Err)
}
func (e *PeerError) Unwrap() error { return e.Err }

// Session is the running of one generation, as [Trainer.Run] sees it. Its methods are safe for concurrent use.
type Session struct {
	Generation ring.Generation
	Step       int64 // that it goes on from

	wish     atomic.Int64
	boundary atomic.Bool
	deliver  Deliver
	saved    func(took time.Duration)
}

// Saved says how long a checkpoint took that nobody has asked for: the agent warns of a grace that is too short for one.
func (s *Session) Saved(took time.Duration) {
	if s.saved != nil {
		s.saved(took)
	}
}

// Wish is what this worker puts into the next step's all-reduce: the step after which it wishes to stop, 0 = it does not.
func (s *Session) Wish() int64 { return s.wish.Load() }

// Done says that the step has been applied. quiesceAt is the maximum of all members' wishes in its all-reduce; compute is the time that
// this worker spent on it without waiting for others, 0 = not known. It returns false if this was the generation's last step.
func (s *Session) Done(step, quiesceAt int64, compute time.Duration) bool {
	last := quiesceAt > 0 && step >= quiesceAt
	if last {
		s.boundary.Store(true)
	}
	s.deliver(ring.StepDone{Generation: s.Generation, Step: step, QuiesceAt: quiesceAt, Compute: compute})
	return !last
}
