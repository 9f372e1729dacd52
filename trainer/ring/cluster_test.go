package ring

import (
	"cmp"
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// cluster is a job in the small: pods that a StatefulSet makes and takes away, processes in them that each have a Node and a trainer, a
// network, a lease and a record. It is what the transcripts move and what the random histories break. Nothing in it is real, time
// included, and nothing in it knows how the core decides.
type cluster struct {
	cfg   Config
	now   time.Time
	queue queue
	seq   int
	rng   *rand.Rand // nil = everything takes its usual time and nothing is lost

	replicas  int
	pods      map[int]*pod // by ordinal
	processes []*process   // those that live, in the order of their start
	byID      map[ID]*process
	uids      int
	noGPU     map[int]bool
	sides     map[*process]int // of a split; those on side 0 reach the API server
	version   string           // of new pods
	slowness  map[int]float64
	skew      map[int]time.Duration
	lateBy    map[int]time.Duration    // that an ordinal applies a step after the others
	crashAt   map[int]map[int64]string // step and error that a child of this ordinal dies of, every time
	lastStep  int64                    // of the job; 0 = it has none
	grace     time.Duration
	copying   time.Duration // takes so long

	holder   *process
	term     uint32
	record   Record
	revision int // of the record
	leaseTTL time.Duration
	unlucky  float64 // share of messages lost, and of those doubled
	late     float64 // share of messages that take up to 3 s

	checkpoint []Generation           // the newest durable state
	saved      map[int64][]Generation // all that ever were, by step
	rings      map[Generation]*reduction
	model      *model
	log        []string
	start      time.Time
}

type pod struct {
	ordinal     int
	uid         string
	process     *process // nil = none runs now
	boots       int64
	terminating bool
	gone        bool
	version     string
}

// process is one agent with its child.
type process struct {
	id       ID
	pod      *pod
	node     *Node
	alive    bool
	frozen   bool // SIGSTOP
	backlog  []Event
	read     int // revision of the record that its coordinator has read
	child    child
	leaderAt uint32
}

// child is a trainer. Its state is the list of the generations in which its steps were computed: state[i] computed step i+1.
type child struct {
	warmth   int // rises with each start, so that events of the child before are not taken for this one's
	up       bool
	state    []Generation
	torn     bool
	in       Generation // whose connections it has
	open     bool
	running  bool
	aborting bool
	wish     int64
	pending  int64      // step that it has contributed to and not applied; 0 = none
	from     *ID        // whom it copies from
	serves   Generation // whom it gives its state to
	synced   bool
}

// reduction is the data plane of one generation.
type reduction struct {
	generation Generation
	members    []ID
	step       int64 // being reduced
	wishes     map[ID]int64
	torn       map[ID]bool // has closed its connections before the step was done
}

func newCluster(cfg Config, rng *rand.Rand) *cluster {
	start := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	c := &cluster{
		cfg: cfg, now: start, start: start, rng: rng, pods: map[int]*pod{}, byID: map[ID]*process{}, saved: map[int64][]Generation{}, noGPU: map[int]bool{}, sides: map[*process]int{}, slowness: map[int]float64{}, skew: map[int]time.Duration{}, lateBy: map[int]time.Duration{},
		crashAt: map[int]map[int64]string{}, grace: 30 * time.Second, leaseTTL: 15 * time.Second, rings: map[Generation]*reduction{}, model: newModel(), version: cfg.Version,
	}
	c.every(100*time.Millisecond, func() {
		c.processes = slices.DeleteFunc(c.processes, func(p *process) bool { return !p.alive })
		for _, p := range c.processes {
			if p.alive && !p.frozen {
				c.apply(p, p.node.Tick(c.clock(p)))
			}
		}
	})
	c.every(500*time.Millisecond, c.informers)
	if cfg.FixedCoordinator {
		c.leaseTTL = 0
	} else {
		c.every(200*time.Millisecond, c.lease)
	}
	return c
}

// --- time

type item struct {
	at  time.Time
	seq int
	do  func()
}
type queue []item

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return cmp.Or(q[i].at.Compare(q[j].at), q[i].seq-q[j].seq) < 0 }
func (q queue) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)        { *q = append(*q, x.(item)) }
func (q *queue) Pop() any {
	old := *q
	x := old[len(old)-1]
	*q = old[:len(old)-1]
	return x
}

func (c *cluster) after(d time.Duration, do func()) {
	c.seq++
	heap.Push(&c.queue, item{c.now.Add(d), c.seq, do})
}

func (c *cluster) every(d time.Duration, do func()) {
	var again func()
	again = func() { do(); c.after(d, again) }
	c.after(d, again)
}

// run lets time pass; it stops at a broken invariant.
func (c *cluster) run(d time.Duration) {
	end := c.now.Add(d)
	for len(c.queue) > 0 && !c.queue[0].at.After(end) && c.model.broken == "" {
		x := heap.Pop(&c.queue).(item)
		c.now = x.at
		x.do()
	}
	c.now = end
}

// about is a duration, exact without chance, else up to four times as long.
func (c *cluster) about(d time.Duration) time.Duration {
	if c.rng == nil {
		return d
	}
	return d/4 + time.Duration(c.rng.Int64N(int64(d)*4))
}

func (c *cluster) chance(p float64) bool { return c.rng != nil && c.rng.Float64() < p }

func (c *cluster) say(format string, args ...any) {
	c.log = append(c.log, fmt.Sprintf("%7.3fs  ", c.now.Sub(c.start).Seconds())+fmt.Sprintf(format, args...))
	if c.rng != nil && len(c.log) > 4000 {
		c.log = slices.Clone(c.log[2000:])
	}
}

// --- StatefulSet, kubelet, API server

func (c *cluster) scale(n int) {
	c.replicas = n
	c.reconcile()
	c.after(c.about(10*time.Millisecond), c.informers)
}

func (c *cluster) reconcile() {
	var taken []int
	for ordinal, p := range c.pods {
		if ordinal >= c.replicas && !p.terminating {
			taken = append(taken, ordinal)
		}
	}
	slices.Sort(taken)
	for _, ordinal := range taken {
		c.terminate(c.pods[ordinal])
	}
	for ordinal := range c.replicas {
		if c.pods[ordinal] == nil {
			c.uids++
			p := &pod{ordinal: ordinal, uid: fmt.Sprintf("u%d", c.uids), version: c.version}
			c.pods[ordinal] = p
			if !c.noGPU[ordinal] {
				c.after(c.about(500*time.Millisecond), func() { c.boot(p) })
			}
		}
	}
}

func (c *cluster) boot(p *pod) {
	if p.process != nil || p.gone || p.terminating {
		return
	}
	p.boots++
	cfg := c.cfg
	cfg.Version = p.version
	id := ID{p.ordinal, p.uid, p.boots}
	node, err := New(cfg, id)
	if err != nil {
		panic(err)
	}
	q := &process{id: id, pod: p, node: node, alive: true}
	p.process = q
	c.processes = append(c.processes, q)
	c.byID[id] = q
	if c.cfg.FixedCoordinator && p.ordinal == c.cfg.FirstOrdinal {
		c.apply(q, node.Step(Leader{Term: uint32(c.now.Sub(c.start).Seconds()) + 1, Holder: id}, c.clock(q)))
	}
	c.apply(q, node.Tick(c.clock(q)))
}

// terminate is a deletion of the pod: SIGTERM, and SIGKILL after the grace.
func (c *cluster) terminate(p *pod) {
	p.terminating = true
	q := p.process
	if q == nil {
		c.remove(p)
		return
	}
	c.after(c.about(20*time.Millisecond), func() { c.tell(q, Leave{Deadline: c.clock(q).Add(c.grace - 5*time.Second)}) })
	c.after(c.grace, func() {
		if q.alive {
			c.kill(q)
		}
	})
}

func (c *cluster) remove(p *pod) {
	p.gone = true
	if c.pods[p.ordinal] == p {
		delete(c.pods, p.ordinal)
		c.after(c.about(50*time.Millisecond), c.reconcile)
	}
	c.after(c.about(10*time.Millisecond), c.informers)
}

// kill ends a process. Its container starts again, unless the pod is to go.
func (c *cluster) kill(q *process) {
	if !q.alive {
		return
	}
	q.alive = false
	c.stopChild(q, true)
	p := q.pod
	if p.process != q {
		return
	}
	p.process = nil
	if p.terminating {
		c.remove(p)
	} else if !p.gone {
		c.after(c.about(time.Second), func() { c.boot(p) })
	}
}

// forget is a forced deletion: the API server forgets a pod whose process may run on.
func (c *cluster) forceDelete(p *pod) { p.terminating = true; c.remove(p) }

func (c *cluster) informers() {
	if c.holder == nil || !c.holder.alive || !c.reachesAPI(c.holder) || c.cfg.FixedCoordinator {
		return
	}
	e := Pods{Replicas: c.replicas}
	for _, p := range c.pods {
		pod := Pod{Ordinal: p.ordinal, UID: p.uid, Running: p.process != nil}
		if c.noGPU[p.ordinal] && p.process == nil {
			pod.Waiting = "no node has a free GPU"
		}
		e.Pods = append(e.Pods, pod)
	}
	slices.SortFunc(e.Pods, func(a, b Pod) int { return a.Ordinal - b.Ordinal })
	c.tell(c.holder, e)
}

func (c *cluster) reachesAPI(p *process) bool { return c.sides[p] == 0 }

// lease is what leader election does: the holder renews, and when it cannot, another takes over. Each agent learns of it in its time.
func (c *cluster) lease() {
	if h := c.holder; h != nil {
		if !h.alive || !c.reachesAPI(h) || h.frozen {
			if h.leaderAt == c.term {
				h.leaderAt = 0
				c.after(c.leaseTTL, func() {
					if c.holder != h {
						return
					}
					if h.alive && c.reachesAPI(h) && !h.frozen {
						h.leaderAt = c.term // it renewed in time
						return
					}
					c.vacate(h)
				})
			}
		}
	}
	if c.holder == nil {
		for _, ordinal := range slices.Sorted(mapsKeys(c.pods)) {
			if q := c.pods[ordinal].process; q != nil && q.alive && !q.frozen && c.reachesAPI(q) && q.node.Status().Phase != Left {
				c.elect(q)
				break
			}
		}
	}
	// Watches come and go: everybody hears again now and then.
	if c.rng == nil || c.chance(0.2) {
		for _, q := range c.processes {
			if q.alive && q != c.holder && c.reachesAPI(q) && c.holder != nil {
				term, holder, record := c.term, c.holder.id, Record{}
				if c.record.End != "" {
					record = c.record
				}
				c.after(c.about(5*time.Millisecond), func() { c.tell(q, Leader{Term: term, Holder: holder, Record: record}) })
			}
		}
	}
}

func mapsKeys[K cmp.Ordered, V any](m map[K]V) func(func(K) bool) {
	return func(yield func(K) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

func (c *cluster) vacate(h *process) {
	term := c.term
	c.holder = nil
	// The one deposed may be late to notice.
	c.after(c.about(100*time.Millisecond), func() {
		if h.alive {
			c.tell(h, Leader{Term: term})
		}
	})
}

func (c *cluster) elect(q *process) {
	c.holder = q
	c.term++
	q.leaderAt = c.term
	q.read = c.revision
	c.say("worker-%d  is the coordinator, term %d", q.id.Ordinal, c.term)
	c.tell(q, Leader{Term: c.term, Holder: q.id, Record: c.record})
	c.informers()
}

// --- the network between nodes

func (c *cluster) connected(a, b *process) bool { return c.sides[a] == c.sides[b] }

func (c *cluster) process(id ID) *process {
	if p := c.byID[id]; p != nil {
		return p
	}
	if p := c.pods[id.Ordinal]; p != nil && id == (ID{Ordinal: id.Ordinal}) {
		return p.process
	}
	return nil
}

func (c *cluster) send(from *process, m Message) {
	c.model.sent(c, m)
	n := 1
	if c.chance(c.unlucky) {
		n = 0
	} else if c.chance(c.unlucky) {
		n = 2
	}
	for range n {
		d := c.about(time.Millisecond)
		if c.chance(c.late) {
			d = c.about(2 * time.Second)
		}
		c.after(d, func() {
			// A message that is on its way arrives even if its sender has died.
			if to := c.process(m.To); to != nil && to.alive && c.connected(from, to) {
				c.tell(to, m)
			}
		})
	}
}

// clock is what the process believes the time to be.
func (c *cluster) clock(p *process) time.Time { return c.now.Add(c.skew[p.id.Ordinal]) }

func (c *cluster) tell(p *process, e Event) {
	switch e.(type) {
	case StepDone, Synced, Aborted, PeerLost: // an agent may be late to hand on what it knows, and may do so twice
		if c.chance(c.unlucky / 10) {
			c.after(c.about(time.Second), func() {
				if p.alive && !p.frozen {
					c.apply(p, p.node.Step(e, c.clock(p)))
				}
			})
		}
	}
	switch {
	case !p.alive:
	case p.frozen:
		p.backlog = append(p.backlog, e)
	default:
		c.apply(p, p.node.Step(e, c.clock(p)))
	}
}

// --- trainers

func (c *cluster) apply(p *process, actions []Action) {
	for _, a := range actions {
		if !p.alive {
			return
		}
		c.model.acted(c, p, a)
		c.act(p, a)
	}
}

func (c *cluster) act(p *process, a Action) {
	ch := &p.child
	warmth := ch.warmth
	who := fmt.Sprintf("worker-%d", p.id.Ordinal)
	var later func(d time.Duration, do func())
	later = func(d time.Duration, do func()) {
		c.after(d, func() {
			switch {
			case !p.alive || p.child.warmth != warmth:
			case p.frozen: // it goes on when it is thawed
				later(time.Second, do)
			default:
				do()
			}
		})
	}
	switch a := a.(type) {
	case Send:
		c.send(p, a.Message)
	case Warm:
		c.stopChild(p, true)
		warmth = ch.warmth
		later(c.about(time.Second), func() {
			ch.up, ch.torn = true, false
			ch.state = slices.Clip(slices.Clone(c.checkpoint))
			c.say("%s  is warm", who)
			c.tell(p, Warmed{Step: int64(len(ch.state))})
		})
	case StartGeneration:
		c.say("%s  start generation %s, rank %d of %d, step %d, %s", who, a.Generation, a.Rank, len(a.Members), a.Step, a.Reason)
		ch.in, ch.open, ch.running, ch.synced, ch.wish, ch.pending, ch.from, ch.aborting = a.Generation, true, false, false, 0, 0, nil, false
		if c.rings[a.Generation] == nil {
			c.rings[a.Generation] = &reduction{generation: a.Generation, members: a.Members, step: a.Step + 1, wishes: map[ID]int64{}, torn: map[ID]bool{}}
		}
		c.opened(a.Generation)
	case SyncState:
		if a.To == p.id {
			c.say("%s  copy step %d from worker-%d", who, a.Step, a.From.Ordinal)
			ch.from, ch.torn = &a.From, false
		} else {
			ch.serves = a.Generation
		}
		c.opened(a.Generation)
	case RunGeneration:
		c.say("%s  run generation %s from step %d", who, a.Generation, a.Step)
		if ch.in == a.Generation && ch.open {
			ch.running = true
			c.compute(p)
		}
	case Quiesce:
		c.say("%s  quiesce at step %d", who, a.Step)
		ch.wish = a.Step
	case Park:
		c.say("%s  park after step %d", who, a.Step)
		ch.running, ch.open = false, false
	case AbortStep:
		c.say("%s  abort step %d of generation %s", who, a.Step, a.Generation)
		if r := c.rings[a.Generation]; r != nil {
			r.torn[p.id] = true
		}
		c.breakConnections(p)
		if !ch.up {
			return
		}
		ch.aborting = true
		takes := c.about(2 * time.Millisecond)
		if c.chance(0.3) {
			takes = c.about(100 * time.Millisecond)
		}
		later(takes, func() {
			if ch.in != a.Generation {
				return
			}
			ch.running, ch.open, ch.aborting, ch.pending = false, false, false, 0
			step := int64(len(ch.state))
			if ch.torn {
				step = -1
			}
			ch.from = nil
			c.tell(p, Aborted{a.Generation, step})
		})
	case SaveState:
		c.say("%s  save step %d", who, a.Step)
		later(c.about(50*time.Millisecond), func() {
			c.save(ch.state)
			c.tell(p, Saved{Step: int64(len(ch.state))})
		})
	case Exit:
		c.say("%s  exit: %s", who, a.Reason)
		c.kill(p)
	case Done:
		c.say("%s  done, step %d", who, a.Step)
		c.stopChild(p, false)
	case Fail:
		c.say("%s  fail: %s", who, a.Reason)
		c.stopChild(p, false)
	case WriteRecord:
		c.write(p, a.Record, p.read)
	case Resign:
		c.say("%s  resign", who)
		if c.holder == p {
			c.vacate(p)
		}
	case ScaleToZero:
		c.say("%s  scale to zero", who)
		c.after(c.about(10*time.Millisecond), func() { c.scale(0) })
	default:
		panic(fmt.Sprintf("%T", a))
	}
}

// save makes a state durable. A checkpoint is newer than another if its last step is of a higher generation, then by its steps.
func (c *cluster) save(state []Generation) {
	last := func(s []Generation) Position {
		if len(s) == 0 {
			return Position{}
		}
		return Position{s[len(s)-1], int64(len(s))}
	}
	if last(state).compare(last(c.checkpoint)) > 0 {
		c.checkpoint = slices.Clone(state)
		c.saved[int64(len(state))] = c.checkpoint
	}
}

// thaw lets a frozen process go on, with all that has come for it.
func (c *cluster) thaw(p *process) {
	p.frozen = false
	backlog := p.backlog
	p.backlog = nil
	for _, e := range backlog {
		c.tell(p, e)
	}
}

func (c *cluster) write(p *process, rec Record, read int) {
	takes := c.about(5 * time.Millisecond)
	if c.chance(c.late) {
		takes = c.about(2 * time.Second)
	}
	c.after(takes, func() {
		switch {
		case !p.alive:
		case c.cfg.FixedCoordinator:
			c.recorded(p, rec)
			c.tell(p, Recorded{rec.Generation, rec.End})
		case !c.reachesAPI(p):
			c.write(p, rec, read)
		case read != c.revision:
			c.model.conflicts++
			c.say("worker-%d  could not record generation %s: somebody else wrote", p.id.Ordinal, rec.Generation)
			c.tell(p, NotRecorded{rec.Generation, rec.End})
			if c.holder == p {
				p.read = c.revision
				c.tell(p, Leader{Term: c.term, Holder: p.id, Record: c.record})
				c.informers()
			}
		default:
			c.revision++
			p.read = c.revision
			c.recorded(p, rec)
			// It is written; whether the writer hears of it in time is another matter.
			c.after(c.about(2*time.Millisecond), func() { c.tell(p, Recorded{rec.Generation, rec.End}) })
		}
	})
}

func (c *cluster) recorded(p *process, rec Record) {
	if rec.End != "" {
		c.say("worker-%d  record the end: the job has %s", p.id.Ordinal, rec.End)
	} else {
		c.say("worker-%d  record generation %s: members %s, step %d, %s", p.id.Ordinal, rec.Generation, ordinals(rec.Members), rec.Step, rec.Reason)
	}
	c.model.recorded(c, rec)
	c.record = rec
}

// opened sees whether all connections of a generation are open, and copies states.
func (c *cluster) opened(g Generation) {
	r := c.rings[g]
	if r == nil {
		return
	}
	var members []*process
	for _, id := range r.members {
		p := c.process(id)
		if p == nil || !p.alive || p.child.in != g || !p.child.open || !c.connected(p, c.process(r.members[0])) {
			return
		}
		members = append(members, p)
	}
	for _, p := range members {
		ch := &p.child
		if ch.synced {
			continue
		}
		ch.synced = true
		warmth := ch.warmth
		if ch.from != nil {
			ch.torn = true
		}
		takes := c.about(20 * time.Millisecond)
		if ch.from != nil {
			takes += c.copying
		}
		c.after(takes, func() {
			if !p.alive || ch.warmth != warmth || ch.in != g || !ch.open || ch.aborting {
				return
			}
			if ch.from != nil {
				from := c.process(*ch.from)
				if from == nil || !from.alive || !from.child.up || from.child.torn || from.child.serves != g || !c.connected(from, p) {
					ch.synced = false
					c.after(time.Second, func() { c.opened(g) })
					return
				}
				ch.state, ch.torn = slices.Clip(slices.Clone(from.child.state)), false
			}
			c.tell(p, Synced{Generation: g, Hash: hash(ch.state)})
		})
	}
}

func hash(state []Generation) uint64 {
	h := uint64(14695981039346656037)
	for _, g := range state {
		h = (h ^ g.Number()) * 1099511628211
	}
	return h
}

// compute is one member's part of a step, then its contribution to the all-reduce.
func (c *cluster) compute(p *process) {
	ch := &p.child
	warmth, g := ch.warmth, ch.in
	step := int64(len(ch.state)) + 1
	d := c.about(100 * time.Millisecond)
	if s := c.slowness[p.id.Ordinal]; s > 0 {
		d = time.Duration(float64(d) * s)
	}
	var done func()
	done = func() {
		if !p.alive || p.child.warmth != warmth || ch.in != g || !ch.running || ch.aborting {
			return
		}
		if p.frozen {
			c.after(time.Second, done)
			return
		}
		if why := c.crashAt[p.id.Ordinal][step]; why != "" {
			c.crash(p, why)
			return
		}
		ch.pending = step
		c.model.contributed(c, p, g, step)
		c.reduce(g, p, step, d)
	}
	c.after(d, done)
}

func (c *cluster) reduce(g Generation, p *process, step int64, d time.Duration) {
	r := c.rings[g]
	if r.step == step {
		r.wishes[p.id] = p.child.wish
	}
	if len(r.wishes) < len(r.members) {
		return
	}
	at := int64(0)
	for _, id := range r.members {
		at = max(at, r.wishes[id])
		q := c.process(id)
		if !q.alive && !r.torn[id] && c.chance(0.5) {
			continue // it had sent all of its part before it died
		}
		if !q.alive || !c.connected(q, p) || q.child.in != g || !q.child.open || q.child.pending != step {
			// A connection is broken: it never completes, unless a split heals.
			c.after(time.Second, func() {
				if p.alive && p.child.in == g && p.child.pending == step && r.step == step {
					c.reduce(g, p, step, d)
				}
			})
			return
		}
	}
	r.step, r.wishes = step+1, map[ID]int64{}
	c.model.completed(c, g, step)
	for _, id := range r.members {
		q := c.process(id)
		warmth := q.child.warmth
		wait := c.about(time.Millisecond) + c.lateBy[id.Ordinal]
		if c.chance(0.05) { // this one is slow to apply what all have summed up
			wait = c.about(300 * time.Millisecond)
		}
		c.after(wait, func() { c.applyStep(q, warmth, g, step, at, d) })
	}
}

func (c *cluster) applyStep(q *process, warmth int, g Generation, step, at int64, d time.Duration) {
	ch := &q.child
	if !q.alive || ch.warmth != warmth || ch.in != g || ch.pending != step {
		return
	}
	if q.frozen {
		c.after(time.Second, func() { c.applyStep(q, warmth, g, step, at, d) })
		return
	}
	ch.pending = 0
	ch.state = append(ch.state, g)
	c.model.applied(c, q, g, step)
	stop := at > 0 && step >= at
	if stop {
		ch.running = false
	}
	if ch.aborting && c.chance(0.3) {
		return // only Aborted will tell
	}
	if s := c.slowness[q.id.Ordinal]; s > 0 && c.rng == nil {
		d = time.Duration(float64(100*time.Millisecond) * s)
	} else if c.rng == nil {
		d = 100 * time.Millisecond
	}
	c.tell(q, StepDone{Generation: g, Step: step, QuiesceAt: at, Compute: d})
	if c.lastStep > 0 && step >= c.lastStep {
		ch.running = false
		c.tell(q, Finished{g})
		return
	}
	if !stop && !ch.aborting && ch.running {
		c.compute(q)
	}
}

// crash is the death of a child whose agent lives.
func (c *cluster) crash(p *process, why string) {
	c.say("worker-%d  its child dies: %s", p.id.Ordinal, why)
	c.stopChild(p, true)
	c.tell(p, Crashed{Error: why})
}

func (c *cluster) stopChild(p *process, noticed bool) {
	if noticed {
		c.breakConnections(p)
	}
	p.child = child{warmth: p.child.warmth + 1}
}

// breakConnections lets the others in the generation see that this one's connections are closed.
func (c *cluster) breakConnections(p *process) {
	ch := &p.child
	if !ch.open {
		return
	}
	g := ch.in
	for _, id := range c.rings[g].members {
		q := c.process(id)
		if q == p || q == nil || !c.connected(p, q) || c.chance(0.2) {
			continue
		}
		c.after(c.about(2*time.Millisecond), func() {
			if q.alive && q.child.in == g && q.child.open {
				c.tell(q, PeerLost{g, p.id})
			}
		})
	}
}

// state says how everybody is, for a transcript.
func (c *cluster) state() []string {
	var lines []string
	for _, p := range c.processes {
		if !p.alive {
			continue
		}
		s := p.node.Status()
		words := []string{fmt.Sprintf("worker-%d", p.id.Ordinal), string(s.Phase)}
		if !s.Generation.IsZero() {
			words = append(words, "generation "+s.Generation.String())
		}
		if s.Rank >= 0 {
			words = append(words, fmt.Sprintf("rank %d of %d", s.Rank, s.World))
		}
		if s.Step >= 0 {
			words = append(words, fmt.Sprintf("step %d", s.Step))
		}
		if s.Why != "" && (s.Phase == Paused || s.Phase == Over) {
			words = append(words, s.Why)
		}
		lines = append(lines, strings.Join(words, ", "))
		if cs := s.Coordinator; cs != nil && (c.holder == p || c.cfg.FixedCoordinator) {
			line := fmt.Sprintf("  coordinator, term %d: members [%s]", cs.Term, ordinals(cs.Record.Members))
			if cs.Desired >= 0 {
				line += fmt.Sprintf(", desired %d", cs.Desired)
			}
			if len(cs.Ready) > 0 {
				line += ", standing by [" + ordinals(cs.Ready) + "]"
			}
			for _, w := range cs.Waiting {
				line += fmt.Sprintf(", %d does not run: %s", w.Ordinal, cmp.Or(w.Waiting, "not started"))
			}
			if len(cs.Stragglers) > 0 {
				line += ", stragglers [" + ordinals(cs.Stragglers) + "]"
			}
			if cs.Paused != "" {
				line += ", paused: " + cs.Paused
			}
			lines = append(lines, line)
		}
	}
	return lines
}
