// Package reference is the reference trainer: data-parallel training of a small model that re-rings in place, and whose result does not
// depend on how often it was resized.
//
// A step is a batch of a fixed size, of consecutive samples by number. The members of the ring share it in fixed pieces, sum their
// gradients as integers, and take the same step of descent. So the model after a number of steps is the same, bit for bit, for one worker
// as for four, or for any history of comings, goings and losses; and the [Ledger] shows that every sample was trained on once.
//
// [Trainer] is an agent.Trainer, to be linked with an agent. It does not decide who is in the ring.
package reference

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/capstan-gpu/capstan/trainer/agent"
	"github.com/capstan-gpu/capstan/trainer/allreduce"
	"github.com/capstan-gpu/capstan/trainer/ring"
	"github.com/capstan-gpu/capstan/trainer/stats"
)

// Config of a Trainer.
type Config struct {
	Job      string // UID of the StatefulSet
	Listener allreduce.Listener
	Dial     func(ctx context.Context, address string) (net.Conn, error) // nil = TCP
	Timeout  time.Duration                                               // a peer that is silent for so long is lost; 0 = 5 s

	Batch int     // samples of a step, of all workers together
	Steps int64   // of the job
	Rate  float64 // of descent
	// StepTakes is how long a worker that has the whole batch to itself computes at least; shared by n it is an n-th. 0 = no longer than needed.
	StepTakes time.Duration
	Folder    string // of the checkpoint, which all workers see; "" = none is kept

	Done func(Result) // told when this worker has done the job's last step, before anybody else knows that the job is done; nil = nobody
}

// Validate says which field has which value, and what it may be.
func (c Config) Validate() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Listener == nil {
		wrong("Listener is nil: want one, for the other workers call here")
	}
	if c.Batch < piece || c.Batch > 1<<20 || c.Batch%piece != 0 {
		wrong("Batch %d: want a multiple of %d up to %d", c.Batch, piece, 1<<20)
	}
	if c.Steps < 1 || c.Steps > 1<<40 {
		wrong("Steps %d: want 1 to %d", c.Steps, int64(1)<<40)
	}
	if !(c.Rate > 0 && c.Rate <= 100) {
		wrong("Rate %g: want more than 0, up to 100", c.Rate)
	}
	return errors.Join(errs...)
}

// piece is how many samples of a batch go together to one worker: piece i to rank i modulo the world's size.
const piece = 16

// Trainer trains. Its methods are called as agent.Trainer says.
type Trainer struct {
	cfg     Config
	state   *state // nil = none
	torn    bool   // a copy into it was begun and not ended
	members []agent.Peer
	rank    int
	group   *allreduce.Group // nil = outside a generation
	mine    int64            // samples of this worker in the step
	sum     []int64          // the gradient, and the ledger's three numbers

	done    atomic.Pointer[state] // in the end; for all
	samples atomic.Int64          // that this worker has trained on, in steps that were applied; for all
}

var _ agent.Trainer = (*Trainer)(nil)

// New checks the configuration.
func New(cfg Config) (*Trainer, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Trainer{cfg: cfg, sum: make([]int64, weights+3)}, nil
}

// Warm reads the checkpoint.
func (t *Trainer) Warm(context.Context) (int64, error) {
	t.state, t.torn = &state{}, false
	if t.cfg.Folder != "" {
		s, err := load(t.cfg.Folder)
		if err != nil {
			return 0, err
		}
		t.state = s
	}
	return t.state.Step, nil
}

// Enter copies the state where it is wanted, and then opens the ring.
func (t *Trainer) Enter(ctx context.Context, e agent.Entry) (uint64, error) {
	if e.From != nil {
		if err := t.receive(ctx, e); err != nil {
			return 0, err
		}
	}
	for _, to := range e.To {
		if err := t.send(ctx, e, to); err != nil {
			return 0, err
		}
	}
	if t.state == nil || t.torn || t.state.Step != e.Step {
		return 0, fmt.Errorf("enter generation %s: the state is not that of step %d", e.Generation, e.Step)
	}
	if e.Rank < 0 {
		return t.state.hash(), nil
	}
	t.members, t.rank = e.Members, e.Rank
	cfg := t.groupConfig(e, "")
	cfg.Rank = e.Rank
	for _, m := range e.Members {
		cfg.Addresses = append(cfg.Addresses, m.Data)
	}
	group, err := allreduce.Open(ctx, cfg)
	if err != nil {
		return 0, t.of(err, e.Members)
	}
	t.group = group
	return t.state.hash(), nil
}

func (t *Trainer) groupConfig(e agent.Entry, channel string) allreduce.Config {
	return allreduce.Config{Job: t.cfg.Job, Generation: e.Generation.Number(), Channel: channel, Key: e.Secret, Listener: t.cfg.Listener, Dial: t.cfg.Dial, Timeout: t.cfg.Timeout}
}

// channel names the copy to a worker.
func channel(to ring.ID) string { return fmt.Sprintf("state of %d", to.Ordinal) }

// receive takes the state from a peer, who calls here.
func (t *Trainer) receive(ctx context.Context, e agent.Entry) error {
	t.torn = true
	var self agent.Peer
	if e.Rank >= 0 {
		self = e.Members[e.Rank]
	}
	cfg := t.groupConfig(e, channel(self.ID))
	cfg.Addresses = []string{self.Data, e.From.Data}
	var data bytes.Buffer
	if err := copied(ctx, cfg, 0, nil, &data); err != nil {
		return t.of(err, []agent.Peer{self, *e.From})
	}
	s, err := decodeState(data.Bytes())
	if err != nil {
		return err
	}
	t.state, t.torn = s, false
	return nil
}

// send gives the state to a peer that waits for it.
func (t *Trainer) send(ctx context.Context, e agent.Entry, to agent.Peer) error {
	cfg := t.groupConfig(e, channel(to.ID))
	cfg.Addresses = []string{to.Data, "nobody calls"}
	if err := copied(ctx, cfg, 1, bytes.NewReader(t.state.encode()), nil); err != nil {
		return t.of(err, []agent.Peer{to, {}})
	}
	return nil
}

// copied makes one copy in a group of two, of which the source is rank 1: it calls.
func copied(ctx context.Context, cfg allreduce.Config, rank int, from *bytes.Reader, to *bytes.Buffer) error {
	cfg.Rank = rank
	group, err := allreduce.Open(ctx, cfg)
	if err != nil {
		return err
	}
	defer group.Close()
	defer context.AfterFunc(ctx, func() { group.Abort(ctx.Err()) })()
	if rank == 1 {
		_, err = group.Broadcast(1, from, nil, nil)
	} else {
		_, err = group.Broadcast(1, nil, to, nil)
	}
	return err
}

// of names the worker whose connection broke, by its rank in a list.
func (t *Trainer) of(err error, members []agent.Peer) error {
	if lost, ok := errors.AsType[*allreduce.PeerError](err); ok && lost.Rank < len(members) {
		return &agent.PeerError{Peer: members[lost.Rank].ID, Err: lost.Err}
	}
	return err
}

// Run trains until the generation or the job ends.
func (t *Trainer) Run(ctx context.Context, s *agent.Session) (finished bool, err error) {
	group := t.group
	defer context.AfterFunc(ctx, func() { group.Abort(ctx.Err()) })()
	for t.state.Step < t.cfg.Steps {
		began := time.Now()
		t.compute()
		if err := sleep(ctx, t.share()-time.Since(began)); err != nil {
			return false, err
		}
		compute := time.Since(began)
		wish := []int64{s.Wish()}
		if err := errors.Join(group.MaxInt64(wish), group.SumInt64(t.sum)); err != nil {
			if ctx.Err() != nil {
				return false, ctx.Err()
			}
			return false, t.of(err, t.members)
		}
		t.apply()
		if !s.Done(t.state.Step, wish[0], compute) {
			return false, nil
		}
	}
	t.done.Store(t.state)
	if t.cfg.Done != nil {
		t.cfg.Done(t.state.result(t.cfg.Batch))
	}
	return true, nil
}

// compute sums what this worker's pieces of the batch give.
func (t *Trainer) compute() {
	clear(t.sum)
	first := uint64(t.state.Step) * uint64(t.cfg.Batch)
	var ledger Ledger
	for i := t.rank; i < t.cfg.Batch/piece; i += len(t.members) {
		for n := first + uint64(i*piece); n < first+uint64((i+1)*piece); n++ {
			t.state.Model.gradient(n, t.sum[:weights])
			ledger.add(ledgerOf(n))
		}
	}
	t.mine = ledger.Count
	t.sum[weights], t.sum[weights+1], t.sum[weights+2] = ledger.Count, ledger.Sum, ledger.Squares
}

// apply takes the step that all have summed. It is one change of the state, which is whole before and after.
func (t *Trainer) apply() {
	next := *t.state
	next.Step++
	next.Ledger.add(Ledger{t.sum[weights], t.sum[weights+1], t.sum[weights+2]})
	next.Model.descend(t.sum[:weights], t.cfg.Batch, t.cfg.Rate)
	t.state = &next
	t.samples.Add(t.mine)
}

// share is how long this worker's part of a step takes at least.
func (t *Trainer) share() time.Duration { return t.cfg.StepTakes / time.Duration(len(t.members)) }

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Park leaves the ring and keeps the state.
func (t *Trainer) Park(context.Context) error {
	if t.group != nil {
		t.group.Close()
		t.group = nil
	}
	return nil
}

// Abort tears the connections down. A step is applied whole or not at all, so the state is torn by half a copy only.
func (t *Trainer) Abort(context.Context) (int64, error) {
	if t.group != nil {
		t.group.Abort(nil)
		t.group.Close()
		t.group = nil
	}
	if t.state == nil || t.torn {
		return -1, nil
	}
	return t.state.Step, nil
}

// Save writes the checkpoint.
func (t *Trainer) Save(context.Context) (int64, error) {
	if t.cfg.Folder == "" {
		return t.state.Step, nil // nobody wants one
	}
	return t.state.Step, t.state.save(t.cfg.Folder)
}

// Close ends it.
func (t *Trainer) Close() { t.Park(context.Background()) }

// Result is what a worker has in the end.
type Result struct {
	Step     int64
	Samples  int64   // that the ledger counts
	Once     bool    // each of them once
	Hash     uint64  // of the whole state
	Accuracy float64 // on samples that were not trained on
}

// Result judges the state of a job that has ended; false if it has not, here.
func (t *Trainer) Result() (Result, bool) {
	s := t.done.Load()
	if s == nil {
		return Result{}, false
	}
	return s.result(t.cfg.Batch), true
}

func (s *state) result(batch int) Result {
	return Result{s.Step, s.Ledger.Count, s.Ledger.Each(s.Step * int64(batch)), s.hash(), s.Model.accuracy(1<<50, 5000)}
}

// Stats is what the stats page says of the training itself. Safe for concurrent use.
func (t *Trainer) Stats() []stats.Sample {
	return []stats.Sample{{Name: stats.Samples, Value: float64(t.samples.Load())}}
}

// Alone is what a job of one worker ends with.
func Alone(batch int, steps int64, rate float64) Result {
	t := &Trainer{cfg: Config{Batch: batch, Rate: rate}, state: &state{}, members: make([]agent.Peer, 1), sum: make([]int64, weights+3)}
	for t.state.Step < steps {
		t.compute()
		t.apply()
	}
	return t.state.result(batch)
}
