package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// world is a job in one process: a network with a latency, a cluster with a lease, a record and pods, and a data plane whose all-reduce
// needs every member. Nothing in it is real but the agents.
type world struct {
	t       *testing.T
	latency time.Duration
	compute time.Duration // of one step
	cfg     ring.Config
	ctx     context.Context

	mu       sync.Mutex
	replicas int
	workers  map[int]*worker
	sinks    map[ring.ID]Deliver
	clusters map[ring.ID]*worldCluster
	holder   ring.ID
	term     uint32
	record   ring.Record
	rings    map[ring.Generation]*reduction
	lastStep int64

	wrap func(*listTrainer) Trainer // what the agent gets instead; nil = the trainer itself
	api  *apiServer                 // where the agents have a real Kubernetes cluster; nil = a worldCluster

	committed map[int64]ring.Generation // by step: the generation in which all summed it up, last
	redone    int
	all       []*worker
	writes    int
}

// worker is one process of the job.
type worker struct {
	id      ring.ID
	agent   *Agent
	trainer *listTrainer
	kill    context.CancelFunc
	exit    ring.Exit
	err     error
	done    chan struct{}
}

func newWorld(t *testing.T, cfg ring.Config) *world {
	cfg.Job = "job-1"
	ctx, cancel := context.WithCancel(t.Context())
	w := &world{
		t: t, latency: time.Millisecond, compute: 10 * time.Millisecond, cfg: cfg, ctx: ctx, workers: map[int]*worker{},
		sinks: map[ring.ID]Deliver{}, clusters: map[ring.ID]*worldCluster{}, rings: map[ring.Generation]*reduction{}, committed: map[int64]ring.Generation{},
	}
	t.Cleanup(func() {
		cancel()
		for _, k := range w.all {
			<-k.done
		}
	})
	return w
}

// start starts a worker of that ordinal.
func (w *world) start(ordinal int) *worker {
	w.t.Helper()
	ctx, kill := context.WithCancel(w.ctx)
	id := ring.ID{Ordinal: ordinal, Pod: fmt.Sprintf("pod-%d-%d", ordinal, len(w.all)), Boot: 1}
	k := &worker{id: id, trainer: &listTrainer{world: w, id: id}, kill: kill, done: make(chan struct{})}
	var cluster Cluster
	if w.api != nil {
		see := seenBy{w.api, ordinal}
		cluster = NewKubernetes(KubernetesConfig{
			Self: Peer{ID: id, Address: fmt.Sprintf("worker-%d:1", ordinal)}, StatefulSet: "training",
			Leases: see, Records: see, Workload: see, Logger: slog.New(slog.DiscardHandler),
		})
	} else {
		c := &worldCluster{world: w, id: id, resigns: make(chan struct{}, 1)}
		w.mu.Lock()
		w.clusters[id] = c
		w.mu.Unlock()
		cluster = c
	}
	var trainer Trainer = k.trainer
	if w.wrap != nil {
		trainer = w.wrap(k.trainer)
	}
	agent, err := New(Config{
		Ring: w.cfg, Self: Peer{ID: id, Address: fmt.Sprintf("worker-%d:1", ordinal)}, Trainer: trainer,
		Transport: &worldTransport{w, id}, Cluster: cluster, Book: &Book{}, Grace: 30 * time.Second, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		w.t.Fatal(err)
	}
	k.agent = agent
	w.mu.Lock()
	w.workers[ordinal] = k
	w.all = append(w.all, k)
	w.mu.Unlock()
	go func() {
		defer close(k.done)
		k.exit, k.err = agent.Run(ctx)
		w.mu.Lock()
		if w.workers[ordinal] == k {
			delete(w.workers, ordinal)
		}
		w.mu.Unlock()
		w.tellPods()
	}()
	return k
}

// scale is what the StatefulSet controller does.
func (w *world) scale(n int) {
	w.mu.Lock()
	w.replicas = n
	var leave []*worker
	for ordinal, k := range w.workers {
		if ordinal >= n {
			leave = append(leave, k)
		}
	}
	var come []int
	for ordinal := range n {
		if w.workers[ordinal] == nil {
			come = append(come, ordinal)
		}
	}
	w.mu.Unlock()
	for _, ordinal := range come {
		w.start(ordinal)
	}
	w.tellPods()
	for _, k := range leave {
		k.agent.Drain()
	}
}

func (w *world) tellPods() {
	w.mu.Lock()
	c := w.clusters[w.holder]
	if w.api != nil {
		w.api.mu.Lock()
		w.api.replicas, w.api.pods = w.replicas, nil
		for _, ordinal := range slices.Sorted(maps.Keys(w.workers)) {
			w.api.pods = append(w.api.pods, ring.Pod{Ordinal: ordinal, UID: w.workers[ordinal].id.Pod, Running: true})
		}
		wake(w.api.changes)
		w.api.mu.Unlock()
	}
	w.mu.Unlock()
	if c != nil {
		c.tellPods()
	}
}

// until lets time pass until ok, in steps of a millisecond.
func (w *world) until(limit time.Duration, what string, ok func() bool) time.Duration {
	w.t.Helper()
	began := time.Now()
	for !ok() {
		if time.Since(began) > limit {
			for _, k := range w.all {
				w.t.Logf("%v: %+v", k.id, k.agent.Status())
			}
			w.t.Fatalf("after %s not yet: %s", limit, what)
		}
		time.Sleep(time.Millisecond)
	}
	return time.Since(began)
}

// running says that a ring of n steps in a generation after the given one.
func (w *world) running(n int, after ring.Generation) func() bool {
	return func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		if len(w.workers) < n {
			return false
		}
		in := 0
		for _, k := range w.workers {
			if s := k.agent.Status(); s.Phase == ring.Running && s.World == n && s.member.Generation.Compare(after) > 0 {
				in++
			}
		}
		return in == n
	}
}

func (w *world) generation() ring.Generation {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.api != nil {
		w.api.mu.Lock()
		defer w.api.mu.Unlock()
		return w.api.record.Record.Generation
	}
	return w.record.Generation
}

// --- the network

type worldTransport struct {
	world *world
	id    ring.ID
}

func (t *worldTransport) Run(ctx context.Context, deliver Deliver) error {
	t.world.mu.Lock()
	t.world.sinks[t.id] = deliver
	t.world.mu.Unlock()
	<-ctx.Done()
	t.world.mu.Lock()
	delete(t.world.sinks, t.id)
	t.world.mu.Unlock()
	return nil
}

func (t *worldTransport) Send(m ring.Message, with Attached) {
	time.AfterFunc(t.world.latency, func() {
		t.world.mu.Lock()
		deliver := t.world.sinks[m.To]
		t.world.mu.Unlock()
		if deliver != nil {
			with.Peers = append(with.Peers, Peer{ID: m.From, Address: fmt.Sprintf("worker-%d:1", m.From.Ordinal)})
			deliver(m, with)
		}
	})
}

// --- the cluster

type worldCluster struct {
	world   *world
	id      ring.ID
	deliver Deliver
	resigns chan struct{}
}

// Run is a leader election in the small: whoever is there takes a free lease, and a dead holder's lease is free after 15 s.
func (c *worldCluster) Run(ctx context.Context, deliver Deliver) error {
	w := c.world
	w.mu.Lock()
	c.deliver = deliver
	w.mu.Unlock()
	known := ring.ID{}
	sleep(ctx, time.Duration(c.id.Ordinal)*10*time.Millisecond) // the lowest takes it
	for {
		w.mu.Lock()
		if w.holder == (ring.ID{}) {
			w.holder, w.term = c.id, w.term+1
		}
		e := ring.Leader{Term: w.term, Holder: w.holder}
		if e.Holder == c.id || w.record.End != "" {
			e.Record = w.record
		}
		w.mu.Unlock()
		if e.Holder != known {
			known = e.Holder
			deliver(e)
			c.tellPods()
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-c.resigns:
			w.mu.Lock()
			if w.holder == c.id {
				w.holder = ring.ID{}
			}
			w.mu.Unlock()
			deliver(ring.Leader{Term: e.Term})
			sleep(ctx, time.Second)
		case <-ctx.Done():
			time.AfterFunc(15*time.Second, func() {
				w.mu.Lock()
				defer w.mu.Unlock()
				if w.holder == c.id {
					w.holder = ring.ID{}
				}
			})
			return nil
		}
	}
}

func (c *worldCluster) tellPods() {
	w := c.world
	w.mu.Lock()
	deliver := c.deliver
	e := ring.Pods{Replicas: w.replicas}
	for _, ordinal := range slices.Sorted(maps.Keys(w.workers)) {
		e.Pods = append(e.Pods, ring.Pod{Ordinal: ordinal, UID: w.workers[ordinal].id.Pod, Running: true})
	}
	mine := w.holder == c.id
	w.mu.Unlock()
	if mine && deliver != nil {
		deliver(e)
	}
}

func (c *worldCluster) WriteRecord(r ring.Record) {
	w := c.world
	time.AfterFunc(5*time.Millisecond, func() {
		w.mu.Lock()
		ok := w.holder == c.id
		if ok {
			w.record, w.writes = r, w.writes+1
		}
		w.mu.Unlock()
		if ok {
			c.deliver(ring.Recorded{Generation: r.Generation, End: r.End})
		} else {
			c.deliver(ring.NotRecorded{Generation: r.Generation, End: r.End})
		}
	})
}

func (c *worldCluster) Resign() { c.resigns <- struct{}{} }

func (c *worldCluster) ScaleToZero() {
	time.AfterFunc(10*time.Millisecond, func() { c.world.scale(0) })
}

// --- the data plane

// reduction is the all-reduce of one generation.
type reduction struct {
	members []Peer
	entered map[ring.ID]*listTrainer
	open    map[ring.ID]bool
	broken  ring.ID // who closed its connections
	torn    chan struct{}
	secret  []byte
	wishes  map[ring.ID]int64
	summed  map[int64]chan struct{}
	maximum map[int64]int64
}

// listTrainer is a trainer whose state is the list of the generations in which its steps were computed.
type listTrainer struct {
	world *world
	id    ring.ID

	mu    sync.Mutex
	state []ring.Generation
	in    ring.Generation
	warms int
	fails func(step int64) string // why it dies before this step; nil or "" = it does not
}

func (l *listTrainer) Warm(ctx context.Context) (int64, error) {
	if !sleep(ctx, time.Second) {
		return 0, ctx.Err()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state = nil
	l.warms++
	return 0, nil
}

func (l *listTrainer) ring(g ring.Generation, members []Peer) *reduction {
	r := l.world.rings[g]
	if r == nil {
		r = &reduction{members: members, entered: map[ring.ID]*listTrainer{}, open: map[ring.ID]bool{}, torn: make(chan struct{}),
			wishes: map[ring.ID]int64{}, summed: map[int64]chan struct{}{}, maximum: map[int64]int64{}}
		l.world.rings[g] = r
	}
	return r
}

func (l *listTrainer) Enter(ctx context.Context, e Entry) (uint64, error) {
	w := l.world
	w.mu.Lock()
	r := l.ring(e.Generation, e.Members)
	if r.secret == nil {
		r.secret = e.Secret
	}
	if len(e.Secret) != secretSize || !bytes.Equal(r.secret, e.Secret) {
		w.t.Errorf("the members of generation %s have different secrets, or none", e.Generation)
	}
	r.entered[l.id], r.open[l.id] = l, true
	w.mu.Unlock()
	l.mu.Lock()
	l.in = e.Generation
	l.mu.Unlock()
	for {
		w.mu.Lock()
		all := true
		for _, p := range e.Members {
			all = all && r.open[p.ID]
		}
		var source *listTrainer
		if e.From != nil {
			source = r.entered[e.From.ID]
		}
		w.mu.Unlock()
		if all && (e.From == nil || source != nil) {
			if source != nil {
				source.mu.Lock()
				state := slices.Clone(source.state)
				source.mu.Unlock()
				if int64(len(state)) != e.Step {
					return 0, fmt.Errorf("the source has step %d, want %d", len(state), e.Step)
				}
				l.mu.Lock()
				l.state = state
				l.mu.Unlock()
			}
			break
		}
		if !sleep(ctx, w.latency) {
			return 0, ctx.Err()
		}
	}
	return l.hash(), nil
}

func (l *listTrainer) hash() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := uint64(14695981039346656037)
	for _, g := range l.state {
		h = (h ^ g.Number()) * 1099511628211
	}
	return h
}

func (l *listTrainer) Run(ctx context.Context, s *Session) (bool, error) {
	w := l.world
	for step := s.Step + 1; ; step++ {
		began := time.Now()
		if !sleep(ctx, w.compute) {
			return false, ctx.Err()
		}
		l.mu.Lock()
		fails := l.fails
		l.mu.Unlock()
		if fails != nil && fails(step) != "" {
			l.close(s.Generation)
			return false, errors.New(fails(step))
		}
		at, err := l.reduce(ctx, s.Generation, step, s.Wish())
		if err != nil {
			return false, err
		}
		l.mu.Lock()
		l.state = append(l.state, s.Generation)
		if int64(len(l.state)) != step {
			w.t.Errorf("worker %d applies step %d to a state of %d steps", l.id.Ordinal, step, len(l.state)-1)
		}
		l.mu.Unlock()
		if !s.Done(step, at, time.Since(began)) {
			return false, nil
		}
		if step == w.lastStep {
			return true, nil
		}
	}
}

// reduce returns when all members have given their part, with the maximum of their wishes.
func (l *listTrainer) reduce(ctx context.Context, g ring.Generation, step, wish int64) (int64, error) {
	w := l.world
	w.mu.Lock()
	r := w.rings[g]
	if r.summed[step] == nil {
		r.summed[step] = make(chan struct{})
		clear(r.wishes)
		delete(r.summed, step-2)
	}
	summed := r.summed[step]
	r.wishes[l.id] = wish
	r.maximum[step] = max(r.maximum[step], wish)
	if len(r.wishes) == len(r.members) {
		if before, ok := w.committed[step]; ok && before != g {
			w.redone++
		}
		w.committed[step] = g
		close(summed)
	}
	at := func() int64 {
		w.mu.Lock()
		defer w.mu.Unlock()
		return r.maximum[step]
	}
	w.mu.Unlock()
	select {
	case <-summed:
		sleep(context.WithoutCancel(ctx), w.latency)
		return at(), nil
	case <-r.torn:
		sleep(ctx, w.latency)
		return 0, &PeerError{r.broken, errors.New("connection reset by peer")}
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// close closes the connections, which the others see.
func (l *listTrainer) close(g ring.Generation) {
	w := l.world
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.rings[g]
	if r == nil || !r.open[l.id] {
		return
	}
	r.open[l.id] = false
	if r.broken == (ring.ID{}) {
		r.broken = l.id
		close(r.torn)
	}
}

func (l *listTrainer) Park(context.Context) error {
	l.world.mu.Lock()
	defer l.world.mu.Unlock()
	if r := l.world.rings[l.in]; r != nil {
		r.open[l.id] = false
	}
	return nil
}

func (l *listTrainer) Abort(context.Context) (int64, error) {
	l.close(l.in)
	l.mu.Lock()
	defer l.mu.Unlock()
	return int64(len(l.state)), nil
}

func (l *listTrainer) Save(ctx context.Context) (int64, error) {
	sleep(ctx, 50*time.Millisecond)
	l.mu.Lock()
	defer l.mu.Unlock()
	return int64(len(l.state)), nil
}

func (l *listTrainer) Close() { l.close(l.in) }

// check looks at all states: those of one generation are one and the same, and each is what all summed up.
func (w *world) check() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, k := range w.workers {
		k.trainer.mu.Lock()
		for i, g := range k.trainer.state {
			// The newest step may have been summed up, but not yet by this one applied, in a generation after.
			if c := w.committed[int64(i+1)]; c != g && i < len(k.trainer.state)-1 {
				w.t.Errorf("worker %d has step %d of generation %s, the ring has it of %s", k.id.Ordinal, i+1, g, c)
				break
			}
		}
		k.trainer.mu.Unlock()
	}
}
