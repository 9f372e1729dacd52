package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// training has a [Trainer] do what the node says, one thing after the other, and tells the node what came of it. An abort does not wait
// for its turn.
type training struct {
	trainer Trainer
	timeout time.Duration // a canceled operation that has not returned by then never will
	log     *slog.Logger
	deliver Deliver
	saved   func(took time.Duration)

	wake chan struct{} // the queue has changed

	mu      sync.Mutex
	queue   []*operation
	current *operation
	closed  bool

	warmups time.Duration // wait before the next Warm; 0 after one that was well
}

// operation is one call of the trainer.
type operation struct {
	name       string
	generation ring.Generation
	do         func(ctx context.Context) error
	lasts      bool // an abort does not supersede it

	cancel     context.CancelFunc
	superseded bool
	session    *Session
}

// ErrStuck says that a trainer did not stop when it was told to. Only the end of its process helps.
var ErrStuck = errors.New("the trainer does not stop")

func newTraining(t Trainer, timeout time.Duration, log *slog.Logger, deliver Deliver) *training {
	return &training{trainer: t, timeout: timeout, log: log, deliver: deliver, wake: make(chan struct{}, 1)}
}

// run does what is queued until close was called and obeyed, or ctx is done.
func (t *training) run(ctx context.Context) error {
	// The trainer is closed in any case, and its operations end by close, which ctx leads to.
	calls := context.WithoutCancel(ctx)
	for {
		op, closed := t.next()
		if op == nil {
			if closed {
				t.trainer.Close()
				return nil
			}
			<-t.wake
			continue
		}
		if err := t.call(calls, op); err != nil {
			return err
		}
	}
}

func (t *training) next() (op *operation, closed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.current = nil
	if len(t.queue) == 0 {
		return nil, t.closed
	}
	op, t.queue = t.queue[0], t.queue[1:]
	t.current = op
	return op, false
}

// call runs one operation, and gives up on one that does not return though it should.
func (t *training) call(ctx context.Context, op *operation) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	t.mu.Lock()
	op.cancel = cancel
	if op.superseded {
		cancel()
	}
	t.mu.Unlock()
	returned := make(chan error, 1)
	go func() { returned <- op.do(ctx) }()
	var err error
	select {
	case err = <-returned:
	case <-ctx.Done():
		select {
		case err = <-returned:
		case <-time.After(t.timeout):
			return fmt.Errorf("%w: %s was canceled %s ago", ErrStuck, op.name, t.timeout)
		}
	}
	if err == nil || t.isSuperseded(op) {
		return nil
	}
	if p, ok := errors.AsType[*PeerError](err); ok {
		t.deliver(ring.PeerLost{Generation: op.generation, Peer: p.Peer})
		return nil
	}
	t.deliver(ring.Crashed{Error: err.Error()})
	return nil
}

func (t *training) isSuperseded(op *operation) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return op.superseded
}

// push queues an operation; supersede says that nothing before it is wanted any more.
func (t *training) push(op *operation, supersede bool) {
	t.mu.Lock()
	if supersede {
		t.supersede()
	}
	t.queue = append(t.queue, op)
	t.mu.Unlock()
	nudge(t.wake)
}

func (t *training) supersede() {
	kept := t.queue[:0:0]
	for _, op := range t.queue {
		if op.lasts {
			kept = append(kept, op)
		}
	}
	t.queue = kept
	if c := t.current; c != nil && !c.lasts {
		c.superseded = true
		if c.cancel != nil {
			c.cancel()
		}
	}
}

func (t *training) warm() {
	op := &operation{name: "Warm"}
	op.do = func(ctx context.Context) error {
		if !sleep(ctx, t.warmups) {
			return nil
		}
		step, err := t.trainer.Warm(ctx)
		switch {
		case t.isSuperseded(op):
			return nil
		case err != nil:
			t.warmups = min(30*time.Second, max(time.Second, 2*t.warmups))
			return fmt.Errorf("warm up: %w", err)
		}
		t.warmups = 0
		t.deliver(ring.Warmed{Step: step})
		return nil
	}
	t.push(op, true)
}

func (t *training) enter(e Entry) {
	op := &operation{name: "Enter", generation: e.Generation}
	op.do = func(ctx context.Context) error {
		hash, err := t.trainer.Enter(ctx, e)
		if err == nil && e.Rank >= 0 && !t.isSuperseded(op) {
			t.deliver(ring.Synced{Generation: e.Generation, Hash: hash})
		}
		return err
	}
	t.push(op, false)
}

func (t *training) runGeneration(g ring.Generation, step int64) {
	op := &operation{name: "Run", generation: g, session: &Session{Generation: g, Step: step, deliver: t.deliver, saved: t.saved}}
	op.do = func(ctx context.Context) error {
		finished, err := t.trainer.Run(ctx, op.session)
		switch {
		case err != nil || t.isSuperseded(op):
			return err
		case finished:
			t.deliver(ring.Finished{Generation: g})
		case !op.session.boundary.Load():
			return errors.New("the trainer stopped and was not told to")
		}
		return nil
	}
	t.push(op, false)
}

// quiesce has the running session wish to stop.
func (t *training) quiesce(g ring.Generation, step int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, op := range append([]*operation{t.current}, t.queue...) {
		if op != nil && op.session != nil && op.generation == g {
			op.session.wish.Store(step)
		}
	}
}

func (t *training) park(g ring.Generation) {
	t.push(&operation{name: "Park", generation: g, do: t.trainer.Park}, false)
}

func (t *training) abort(g ring.Generation) {
	t.push(&operation{name: "Abort", generation: g, lasts: true, do: func(ctx context.Context) error {
		step, err := t.trainer.Abort(ctx)
		if err == nil {
			t.deliver(ring.Aborted{Generation: g, Step: step})
		}
		return err
	}}, true)
}

// save tries until it is done or something else is wanted.
func (t *training) save(step int64) {
	op := &operation{name: "Save"}
	op.do = func(ctx context.Context) error {
		for ctx.Err() == nil {
			began := time.Now()
			at, err := t.trainer.Save(ctx)
			switch {
			case t.isSuperseded(op):
			case err == nil:
				took := time.Since(began)
				t.log.Info("saved a checkpoint", "step", at, "took", took.Round(time.Millisecond))
				t.saved(took)
				t.deliver(ring.Saved{Step: at})
				return nil
			default:
				t.log.Error("no checkpoint; trying again", "step", step, "error", err)
				sleep(ctx, time.Second)
			}
		}
		return nil
	}
	t.push(op, false)
}

// close has run end, after what must not be left undone.
func (t *training) close() {
	t.mu.Lock()
	t.supersede()
	t.closed = true
	t.mu.Unlock()
	nudge(t.wake)
}

// sleep waits; false when ctx was done before.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return ctx.Err() == nil
	}
}
