// Package agent brings the ring to the world: it gives a [ring.Node] its messages, its lease, its record, its pods and its clock, and
// does with the trainer what the node says.
//
// The node decides, the agent does. One goroutine owns the node; whatever may take time (the network, the API server, the trainer) is
// behind a small interface, answers later with an event, and is never waited for. [Trainer] is the training itself: linked into the same
// process, where it re-rings in place, or a [Process], which is any command. [Transport] is the network: [TCP]. [Cluster] is who leads
// and what is recorded: [Kubernetes], or [Fixed] where the agent has no right in the API server.
//
// It does not decide who is in the ring (the node does), how many workers there are (the HPA does), or how a step is computed.
package agent

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/capstan-gpu/capstan/trainer/ring"
	"github.com/capstan-gpu/capstan/trainer/stats"
)

// Deliver takes an event, with what came with it; nil = there is nothing but that. It may block for a moment, and is safe for concurrent
// use.
type Deliver func(e ring.Event, with ...Attached)

// Attached is what the agents need to know beside what the ring decides by.
type Attached struct {
	Peers  []Peer `json:"peers,omitempty"`
	Secret []byte `json:"secret,omitempty"` // with a commit: see [Entry.Secret]

	// Died is a process that the transport knows to be dead, for the kernel of its machine has said so; zero = none. Where the trainer's
	// own connections cannot be seen, this tells of a loss seconds before the heart-beats do.
	Died ring.ID `json:"-"`
}

// Transport carries messages to other agents.
type Transport interface {
	// Run delivers what comes, each message from the process that it names as its sender, until ctx is done. Then it sends what is left,
	// for half a second at most, and returns nil.
	Run(ctx context.Context, deliver Deliver) error
	// Send does not block. A message may get lost.
	Send(m ring.Message, with Attached)
}

// Cluster is who leads, who is there, and what is recorded. None of its methods but Run blocks.
type Cluster interface {
	// Run delivers [ring.Leader] and [ring.Pods], and the answers to the methods, until ctx is done. Then it gives up what it holds.
	Run(ctx context.Context, deliver Deliver) error
	// WriteRecord is answered by [ring.Recorded] or [ring.NotRecorded], once it is certain which.
	WriteRecord(ring.Record)
	// Resign gives the lease up.
	Resign()
	// ScaleToZero sets the StatefulSet's replicas to 0.
	ScaleToZero()
}

// Config is what an [Agent] needs. All but the fields with a default are to be given.
type Config struct {
	Ring      ring.Config
	Self      Peer
	Trainer   Trainer
	Transport Transport
	Cluster   Cluster
	Book      *Book // shared with the Transport
	Logger    *slog.Logger

	Grace       time.Duration         // the pod's terminationGracePeriodSeconds; 0 = 30 s, as of Kubernetes
	Linger      time.Duration         // so long after the job's end Run returns; 0 = it does not, for a StatefulSet starts again what exits
	StopTimeout time.Duration         // a trainer that is told to stop and has not by then ends the process; 0 = 30 s
	Stats       func() []stats.Sample // what the trainer adds to the stats page, such as its samples; nil = nothing
}

// reserve is what a drain keeps of the grace for its own end: a leaver is out of the ring before the kubelet kills it.
const reserve = 5 * time.Second

// Agent drives one worker. [Agent.Run] starts it; the other methods are safe for concurrent use.
type Agent struct {
	cfg      Config
	node     *ring.Node
	training *training
	page     *page
	notices  chan notice
	ended    chan struct{} // closed when nobody reads notices any more
	secrets  map[ring.Generation][]byte
	current  ring.StartGeneration // the newest generation that this worker was to enter
	exits    *ring.Exit
	over     time.Time // since when the job has ended; zero = it has not
	status   atomic.Pointer[Status]
	drain    sync.Once
}

type notice struct {
	event ring.Event
	with  []Attached
}

// New checks the configuration.
func New(cfg Config) (*Agent, error) {
	if cfg.Grace == 0 {
		cfg.Grace = 30 * time.Second
	}
	if cfg.StopTimeout == 0 {
		cfg.StopTimeout = 30 * time.Second
	}
	if cfg.Grace < 2*reserve {
		return nil, fmt.Errorf("grace %s: want at least %s, to leave the ring before the kubelet kills; raise terminationGracePeriodSeconds", cfg.Grace, 2*reserve)
	}
	node, err := ring.New(cfg.Ring, cfg.Self.ID)
	if err != nil {
		return nil, err
	}
	a := &Agent{cfg: cfg, node: node, page: newPage(), notices: make(chan notice, 256), ended: make(chan struct{}), secrets: map[ring.Generation][]byte{}}
	a.training = newTraining(cfg.Trainer, cfg.StopTimeout, cfg.Logger, a.deliver)
	a.training.saved = a.checkGrace
	cfg.Book.Learn(cfg.Self)
	a.publish(time.Now())
	return a, nil
}

// Run works until this worker has left the ring, and says how; or until ctx is done, which ends it at once, without a drain.
func (a *Agent) Run(ctx context.Context) (ring.Exit, error) {
	// The trainer stops first, while the others can still be told; then the network and the lease are let go.
	outer, stopOuter := context.WithCancel(context.WithoutCancel(ctx))
	defer stopOuter()
	adapters, outer := errgroup.WithContext(outer)
	adapters.Go(func() error { return a.cfg.Transport.Run(outer, a.deliver) })
	adapters.Go(func() error { return a.cfg.Cluster.Run(outer, a.deliver) })

	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(outer, cancel)() // an adapter that fails ends all
	work, inner := errgroup.WithContext(inner)
	work.Go(func() error { return a.training.run(inner) })
	work.Go(func() error { return a.loop(inner) })
	err := work.Wait()
	stopOuter()
	err = errors.Join(err, adapters.Wait())
	switch {
	case err != nil:
		return ring.Exit{}, err
	case a.exits == nil:
		return ring.Exit{}, context.Cause(ctx)
	}
	return *a.exits, nil
}

// Drain has this worker leave: at the next step boundary if that comes in time, else 5 s before the grace is over. It counts from the
// first time.
func (a *Agent) Drain() {
	a.drain.Do(func() { a.deliver(ring.Leave{Deadline: time.Now().Add(a.cfg.Grace - reserve)}) })
}

// Status says how it is, as of a tenth of a second ago at most.
func (a *Agent) Status() Status { return *a.status.Load() }

func (a *Agent) deliver(e ring.Event, with ...Attached) {
	select {
	case a.notices <- notice{e, with}:
	case <-a.ended:
	}
}

// loop owns the node.
func (a *Agent) loop(ctx context.Context) error {
	defer close(a.ended)
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		var actions []ring.Action
		var tick bool
		select {
		case <-ctx.Done():
			a.training.close()
			return nil
		case n := <-a.notices:
			a.learn(&n)
			if n.event == nil {
				continue
			}
			now := time.Now()
			if e, ok := n.event.(ring.StepDone); ok {
				a.page.stepDone(e, now)
			}
			a.log(n.event)
			actions = a.node.Step(n.event, now)
		case now := <-ticker.C:
			tick = true
			actions = a.node.Tick(now)
		}
		left := a.act(actions)
		if len(actions) > 0 || tick {
			a.publish(time.Now())
		}
		if !left && a.cfg.Linger > 0 && !a.over.IsZero() && time.Since(a.over) >= a.cfg.Linger {
			left, a.exits = true, &ring.Exit{Reason: "the job has ended"}
		}
		if left {
			a.training.close()
			return nil
		}
	}
}

// act does what the node says. It says true when that was to leave.
func (a *Agent) act(actions []ring.Action) bool {
	now := time.Now()
	for len(actions) > 0 {
		action := actions[0]
		actions = actions[1:]
		a.page.acted(action, now)
		log := a.cfg.Logger
		switch x := action.(type) {
		case ring.Send:
			a.send(x.Message)
		case ring.Warm:
			a.training.warm()
		case ring.StartGeneration:
			// The copies of the generation come right behind it.
			n := 0
			for n < len(actions) && isCopy(actions[n], x.Generation) {
				n++
			}
			a.current = x
			e := a.entry(x, actions[:n])
			actions = actions[n:]
			log.Info("starting a generation", "generation", x.Generation, "rank", x.Rank, "world", len(x.Members), "step", x.Step, "reason", x.Reason, "copy", e.From != nil)
			a.training.enter(e)
		case ring.SyncState: // for a generation that this worker is not in
			n := 0
			for n < len(actions) && isCopy(actions[n], x.Generation) {
				n++
			}
			log.Info("giving the state to a generation that is without this worker", "generation", x.Generation, "step", x.Step)
			a.training.enter(a.entry(ring.StartGeneration{Generation: x.Generation, Rank: -1, Step: x.Step}, append([]ring.Action{x}, actions[:n]...)))
			actions = actions[n:]
		case ring.RunGeneration:
			log.Info("running", "generation", x.Generation, "step", x.Step, "pause", a.page.pause.Round(100*time.Microsecond))
			a.training.runGeneration(x.Generation, x.Step)
		case ring.Quiesce:
			a.training.quiesce(x.Generation, x.Step)
		case ring.Park:
			log.Info("parked", "generation", x.Generation, "step", x.Step)
			a.training.park(x.Generation)
		case ring.AbortStep:
			log.Info("aborting a step", "generation", x.Generation, "step", x.Step)
			a.training.abort(x.Generation)
		case ring.SaveState:
			a.training.save(x.Step)
		case ring.Exit:
			log.Info("leaving", "reason", x.Reason, "generation", x.Generation, "step", x.Step)
			a.exits = &x
			return true
		case ring.Done:
			log.Info("the job is done; staying up, for a process that exits would be started again", "generation", x.Generation, "step", x.Step)
			a.rest(now)
		case ring.Fail:
			log.Error("the job has failed; staying up, for a process that exits would be started again", "reason", x.Reason)
			a.rest(now)
		case ring.WriteRecord:
			a.cfg.Cluster.WriteRecord(x.Record)
		case ring.Resign:
			a.cfg.Cluster.Resign()
		case ring.ScaleToZero:
			a.cfg.Cluster.ScaleToZero()
		}
	}
	return false
}

// rest stops the trainer for good, when the job has ended.
func (a *Agent) rest(now time.Time) {
	a.over = now
	a.training.close()
}

func isCopy(a ring.Action, g ring.Generation) bool {
	s, ok := a.(ring.SyncState)
	return ok && s.Generation == g
}

// entry is one way into a generation, for the trainer.
func (a *Agent) entry(s ring.StartGeneration, copies []ring.Action) Entry {
	e := Entry{Generation: s.Generation, Rank: s.Rank, Step: s.Step, Reason: s.Reason, Secret: a.secret(s.Generation)}
	for _, id := range s.Members {
		e.Members = append(e.Members, a.cfg.Book.Peer(id))
	}
	for _, c := range copies {
		switch c := c.(ring.SyncState); a.cfg.Self.ID {
		case c.To:
			from := a.cfg.Book.Peer(c.From)
			e.From = &from
		case c.From:
			e.To = append(e.To, a.cfg.Book.Peer(c.To))
		}
	}
	return e
}

// learn takes in what came with an event. The death of a member of this generation is one.
func (a *Agent) learn(n *notice) {
	for _, w := range n.with {
		a.cfg.Book.Learn(w.Peers...)
		if n.event == nil && slices.Contains(a.current.Members, w.Died) {
			n.event = ring.PeerLost{Generation: a.current.Generation, Peer: w.Died}
		}
		if m, ok := n.event.(ring.Message); ok && m.Order != nil && m.Order.Kind == ring.Commit && len(w.Secret) == secretSize {
			a.secrets[m.Order.Generation] = w.Secret
		}
	}
}

// secret is the secret of a generation. Its coordinator makes it, when it first needs it.
func (a *Agent) secret(g ring.Generation) []byte {
	if s, ok := a.secrets[g]; ok {
		return s
	}
	for old := range a.secrets {
		if old.Compare(g) < 0 {
			delete(a.secrets, old)
		}
	}
	s := make([]byte, secretSize)
	rand.Read(s)
	a.secrets[g] = s
	return s
}

// secretSize is the size of a generation's secret in bytes.
const secretSize = 32

// send sends a message. Who is to be a member of a generation is told where the others are, so that nobody needs DNS for that.
func (a *Agent) send(m ring.Message) {
	var with Attached
	if m.Order != nil && m.Order.Kind == ring.Commit {
		ids := m.Order.Record.Members
		if !slices.Contains(ids, m.Order.Source) {
			ids = append(slices.Clone(ids), m.Order.Source)
		}
		for _, id := range ids {
			with.Peers = append(with.Peers, a.cfg.Book.Peer(id))
		}
		with.Secret = a.secret(m.Order.Generation)
	}
	a.cfg.Transport.Send(m, with)
}

// log tells people what came that they may have to know.
func (a *Agent) log(e ring.Event) {
	switch e := e.(type) {
	case ring.Leader:
		if before := a.node.Status().Leader; before != e.Holder && e.Holder != (ring.ID{}) {
			a.cfg.Logger.Info("there is a coordinator", "ordinal", e.Holder.Ordinal, "term", e.Term)
		}
	case ring.PeerLost:
		a.cfg.Logger.Warn("lost the connection to a peer", "ordinal", e.Peer.Ordinal, "generation", e.Generation)
	case ring.Crashed:
		a.cfg.Logger.Error("the trainer has died", "error", e.Error)
	case ring.Leave:
		a.cfg.Logger.Info("told to leave", "deadline", time.Until(e.Deadline).Round(time.Second))
	}
}

// checkGrace warns of a grace that does not hold what a leaver may have to do.
func (a *Agent) checkGrace(took time.Duration) {
	a.page.checkpoint(took)
	if need := reserve + 10*time.Second + took; a.cfg.Grace < need {
		a.cfg.Logger.Warn("the grace is too short for a checkpoint: a drain may cut it off; raise terminationGracePeriodSeconds",
			"terminationGracePeriodSeconds", int(a.cfg.Grace.Seconds()), "want", int(need.Seconds()+1), "checkpoint", took.Round(time.Millisecond))
	}
}
