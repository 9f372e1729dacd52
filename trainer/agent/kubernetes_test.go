package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// apiServer is the API server in the small: objects with versions, and ways to be away.
type apiServer struct {
	mu       sync.Mutex
	version  int
	lease    Lease
	record   Stored
	replicas int
	pods     []ring.Pod
	leases   map[any]func() // watchers
	changes  map[any]func()
	away     map[int]bool // ordinals that do not reach it
	lost     int          // so many answers to writes of the record get lost, though the writes are done
	listed   []time.Time
}

func newAPIServer() *apiServer {
	return &apiServer{leases: map[any]func(){}, changes: map[any]func(){}, away: map[int]bool{}}
}

// seenBy is the server as one ordinal sees it.
type seenBy struct {
	*apiServer
	ordinal int
}

func (s seenBy) call(ctx context.Context) (unlock func(), err error) {
	s.mu.Lock()
	if s.away[s.ordinal] {
		s.mu.Unlock()
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return s.mu.Unlock, nil
}

func (s *apiServer) next() string {
	s.version++
	return fmt.Sprint(s.version)
}

func wake(watchers map[any]func()) {
	for _, w := range watchers {
		w()
	}
}

func (s seenBy) Lease(ctx context.Context) (Lease, error) {
	unlock, err := s.call(ctx)
	if err != nil {
		return Lease{}, err
	}
	defer unlock()
	if s.lease.Version == "" {
		return Lease{}, ErrNotFound
	}
	return s.lease, nil
}

func (s seenBy) PutLease(ctx context.Context, l Lease) (Lease, error) {
	unlock, err := s.call(ctx)
	if err != nil {
		return Lease{}, err
	}
	defer unlock()
	if l.Version != s.lease.Version {
		return Lease{}, ErrConflict
	}
	s.lease = l
	s.lease.Version = s.next()
	wake(s.leases)
	return s.lease, nil
}

func (s seenBy) WatchLease(ctx context.Context) (<-chan Lease, error) {
	unlock, err := s.call(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	out := make(chan Lease, 100)
	key := new(int)
	s.leases[key] = func() {
		if !s.away[s.ordinal] && len(out) < cap(out) {
			out <- s.lease
		}
	}
	context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.leases, key)
	})
	return out, nil
}

func (s seenBy) Record(ctx context.Context) (Stored, error) {
	unlock, err := s.call(ctx)
	if err != nil {
		return Stored{}, err
	}
	defer unlock()
	if s.record.Version == "" {
		return Stored{}, ErrNotFound
	}
	return s.record, nil
}

func (s seenBy) PutRecord(ctx context.Context, r Stored) (Stored, error) {
	unlock, err := s.call(ctx)
	if err != nil {
		return Stored{}, err
	}
	defer unlock()
	if r.Version != s.record.Version {
		return Stored{}, ErrConflict
	}
	s.record = r
	s.record.Version = s.next()
	if s.lost > 0 {
		s.lost--
		return Stored{}, errors.New("http2: client connection lost")
	}
	return s.record, nil
}

func (s seenBy) Pods(ctx context.Context) (ring.Pods, error) {
	unlock, err := s.call(ctx)
	if err != nil {
		return ring.Pods{}, err
	}
	defer unlock()
	s.listed = append(s.listed, time.Now())
	return ring.Pods{Replicas: s.replicas, Pods: s.pods}, nil
}

func (s seenBy) Changes(ctx context.Context) (<-chan struct{}, error) {
	unlock, err := s.call(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	out := make(chan struct{}, 1)
	key := new(int)
	s.changes[key] = func() { nudge(out) }
	return out, nil
}

func (s seenBy) ScaleToZero(ctx context.Context) error {
	unlock, err := s.call(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	s.replicas = 0
	wake(s.changes)
	return nil
}

// candidate is one agent's cluster, and what it told its node.
type candidate struct {
	*Kubernetes
	stop   context.CancelFunc
	done   chan struct{}
	mu     sync.Mutex
	events []string
	leader ring.Leader
	peers  []Peer
	server seenBy
}

func (s *apiServer) start(t *testing.T, ordinal int) *candidate { return s.restart(t, ordinal, 1) }

// restart starts an agent in a pod that had one before.
func (s *apiServer) restart(t *testing.T, ordinal int, boot int64) *candidate {
	t.Helper()
	id := ring.ID{Ordinal: ordinal, Pod: fmt.Sprintf("u%d", ordinal), Boot: boot}
	see := seenBy{s, ordinal}
	c := &candidate{done: make(chan struct{}), server: see, Kubernetes: NewKubernetes(KubernetesConfig{
		Self: Peer{ID: id, Address: fmt.Sprintf("10.0.0.%d:29400", ordinal), Key: fmt.Sprintf("key-%d", ordinal)}, StatefulSet: "training",
		Leases: see, Records: see, Workload: see, Logger: slog.New(slog.DiscardHandler),
	})}
	var ctx context.Context
	ctx, c.stop = context.WithCancel(t.Context())
	go func() {
		defer close(c.done)
		c.Run(ctx, c.take)
	}()
	t.Cleanup(func() { c.stop(); <-c.done })
	return c
}

func (c *candidate) take(e ring.Event, with ...Attached) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range with {
		c.peers = append(c.peers, w.Peers...)
	}
	switch e := e.(type) {
	case ring.Leader:
		c.leader = e
		who := "nobody"
		if e.Holder != (ring.ID{}) {
			who = fmt.Sprint(e.Holder.Ordinal)
		}
		c.events = append(c.events, fmt.Sprintf("leader %s term %d record %s%s", who, e.Term, e.Record.Generation, e.Record.End))
	case ring.Pods:
		c.events = append(c.events, fmt.Sprintf("pods %d of %d", len(e.Pods), e.Replicas))
	case ring.Recorded:
		c.events = append(c.events, "recorded "+e.Generation.String())
	case ring.NotRecorded:
		c.events = append(c.events, "not recorded "+e.Generation.String())
	}
}

// told returns what was told since it was asked last.
func (c *candidate) told() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := strings.Join(c.events, ", ")
	c.events = nil
	return s
}

func (c *candidate) leads() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leader.Holder == c.cfg.Self.ID
}

func generation(term, count uint32) ring.Generation { return ring.Generation{Term: term, Count: count} }

// want compares what was told, but for pods that were read again and are the same.
func want(t *testing.T, c *candidate, want string) {
	t.Helper()
	var told []string
	for e := range strings.SplitSeq(c.told(), ", ") {
		if n := len(told); n == 0 || told[n-1] != e {
			told = append(told, e)
		}
	}
	if len(told) > 0 && strings.HasPrefix(told[0], "pods") {
		told = told[1:]
	}
	if got := strings.Join(told, ", "); got != want {
		t.Errorf("ordinal %d was told %q, want %q", c.server.ordinal, got, want)
	}
}

// The lowest ordinal leads, the others learn its name, address and key; when it dies the next takes over after the lease's end, with a
// higher term; when it resigns, at once.
func TestElection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer()
		s.replicas = 3
		zero, one, two := s.start(t, 0), s.start(t, 1), s.start(t, 2)
		time.Sleep(time.Second)
		want(t, zero, "leader 0 term 1 record 0.0, pods 0 of 3")
		want(t, one, "leader 0 term 1 record 0.0")
		want(t, two, "leader 0 term 1 record 0.0")
		if got, want := two.peers, (Peer{ID: zero.cfg.Self.ID, Address: "10.0.0.0:29400", Key: "key-0"}); len(got) != 1 || got[0] != want {
			t.Errorf("the others learn %v, want %v", got, want)
		}
		s.mu.Lock()
		if s.lease.Holder != "training-0/u0/1" {
			t.Errorf("the lease names %q", s.lease.Holder)
		}
		s.mu.Unlock()

		time.Sleep(5 * time.Minute)
		want(t, one, "")

		s.mu.Lock()
		s.away[0] = true // it lives, and does not reach the API server
		s.mu.Unlock()
		zero.told()
		began := time.Now()
		for !one.leads() {
			time.Sleep(10 * time.Millisecond)
			if zero.leads() && one.leads() {
				t.Error("two lead at once")
			}
			if time.Since(began) > 20*time.Second {
				t.Fatal("nobody took over within 20 s")
			}
		}
		if took := time.Since(began); took < 13*time.Second || took > 16*time.Second {
			t.Errorf("another took over after %s, want some 15 s", took)
		}
		want(t, zero, "leader nobody term 1 record 0.0")
		time.Sleep(time.Second)
		want(t, one, "leader 1 term 2 record 0.0, pods 0 of 3")
		want(t, two, "leader 1 term 2 record 0.0")

		s.mu.Lock()
		s.away[0] = false
		s.mu.Unlock()
		time.Sleep(20 * time.Second)
		want(t, zero, "leader 1 term 2 record 0.0")
		one.told()
		one.Resign()
		time.Sleep(time.Second)
		want(t, zero, "leader 0 term 3 record 0.0, pods 0 of 3")
		want(t, one, "leader nobody term 2 record 0.0, leader 0 term 3 record 0.0")

		time.Sleep(leaseDuration) // one who has resigned lets others go first for a while
		zero.stop()               // and its lease is free at once
		time.Sleep(time.Second)
		want(t, one, "leader nobody term 3 record 0.0, leader 1 term 4 record 0.0, pods 0 of 3")
	})
}

// An API server that is away for a moment deposes nobody; one that is away for longer does, and the same one goes on in the same term.
func TestElectionSurvivesAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer()
		zero, one := s.start(t, 0), s.start(t, 1)
		time.Sleep(time.Second)
		zero.told()
		one.told()
		outage := func(d time.Duration) {
			s.mu.Lock()
			s.away[0], s.away[1] = true, true
			s.mu.Unlock()
			time.Sleep(d)
			s.mu.Lock()
			s.away[0], s.away[1] = false, false
			s.mu.Unlock()
			time.Sleep(5 * time.Second)
		}
		outage(6 * time.Second)
		if got := zero.told(); strings.Contains(got, "leader") {
			t.Errorf("a short outage: %q, want that it leads on", got)
		}
		want(t, one, "")
		outage(12 * time.Second)
		want(t, zero, "leader nobody term 1 record 0.0, leader 0 term 1 record 0.0, pods 0 of 0")
		want(t, one, "")
	})
}

// An agent that starts again in the pod whose process led need not wait for the end of the lease: that process is dead.
func TestElectionAfterRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer()
		zero, one := s.start(t, 0), s.start(t, 1)
		time.Sleep(time.Second)
		s.mu.Lock()
		s.away[0] = true // it is killed, and releases nothing
		s.mu.Unlock()
		zero.stop()
		<-zero.done
		one.told()
		s.mu.Lock()
		s.away[0] = false
		s.mu.Unlock()
		again := s.restart(t, 0, 2)
		time.Sleep(100 * time.Millisecond)
		want(t, again, "leader 0 term 2 record 0.0, pods 0 of 0")
		want(t, one, "leader 0 term 2 record 0.0")
	})
}

// A deleted lease does not let terms fall back.
func TestElectionAfterDeletion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer()
		s.record = Stored{Record: ring.Record{Job: "job-1", Generation: generation(7, 3)}, Version: s.next()}
		zero := s.start(t, 0)
		time.Sleep(time.Second)
		want(t, zero, "leader 0 term 8 record 7.3, pods 0 of 0")
		s.mu.Lock()
		s.lease = Lease{}
		s.mu.Unlock()
		time.Sleep(15 * time.Second)
		if got := zero.told(); !strings.Contains(got, "leader 0 term 9 record 7.3") {
			t.Errorf("after the lease was deleted: %q, want term 9", got)
		}
	})
}

// A record is written once, whatever happens to the answers; and not over another's.
func TestRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer()
		zero := s.start(t, 0)
		time.Sleep(time.Second)
		zero.told()
		write := func(count uint32) {
			zero.WriteRecord(ring.Record{Job: "job-1", Generation: generation(1, count), Members: []ring.ID{zero.cfg.Self.ID}})
			time.Sleep(5 * time.Second)
		}
		recorded := func(want string) {
			t.Helper()
			var got []string
			for e := range strings.SplitSeq(zero.told(), ", ") {
				if !strings.HasPrefix(e, "pods") {
					got = append(got, e)
				}
			}
			if strings.Join(got, ", ") != want {
				t.Errorf("told %q, want %q", got, want)
			}
		}
		write(1)
		recorded("recorded 1.1")
		s.mu.Lock()
		s.lost = 1 // it is done, and the answer is lost
		s.mu.Unlock()
		write(2)
		recorded("recorded 1.2")
		if s.record.Record.Generation != generation(1, 2) || s.record.Writer != "training-0/u0/1" {
			t.Errorf("recorded is %+v", s.record)
		}
		s.mu.Lock()
		s.record.Record.Generation, s.record.Writer, s.record.Version = generation(2, 1), "training-1/u1/1", s.next()
		s.mu.Unlock()
		write(3)
		recorded("not recorded 1.3, leader 0 term 1 record 2.1")
		write(4)
		recorded("recorded 1.4")

		s.mu.Lock()
		s.away[0] = true
		s.mu.Unlock()
		write(5)
		if got := zero.told(); strings.Contains(got, "recorded") {
			t.Errorf("while the API server is away: %q, want no answer", got)
		}
		s.mu.Lock()
		s.away[0] = false
		s.mu.Unlock()
		time.Sleep(5 * time.Second)
		recorded("recorded 1.5")
	})
}

// Pods are read again when something changes, after the lease was got, and no more when it is gone. The end is seen without a leader.
func TestPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer()
		s.replicas = 1
		s.record = Stored{Record: ring.Record{Job: "job-1", Generation: generation(1, 1), End: ring.Succeeded}, Version: s.next()}
		zero := s.start(t, 0)
		time.Sleep(300 * time.Millisecond)
		if got := zero.told(); !strings.HasPrefix(got, "leader nobody term 0 record 1.1succeeded, leader 0 term 2 record 1.1succeeded, pods 0 of 1") {
			t.Errorf("told %q, want the end first", got)
		}
		s.mu.Lock()
		s.pods, s.replicas = []ring.Pod{{Ordinal: 0, UID: "u0", Running: true}}, 2
		wake(s.changes)
		s.mu.Unlock()
		time.Sleep(300 * time.Millisecond)
		if got := zero.told(); !strings.Contains(got, "pods 1 of 2") {
			t.Errorf("told %q, want the new pod", got)
		}
		zero.ScaleToZero()
		time.Sleep(300 * time.Millisecond)
		s.mu.Lock()
		replicas := s.replicas
		s.mu.Unlock()
		if got := zero.told(); replicas != 0 || !strings.Contains(got, "pods 1 of 0") {
			t.Errorf("replicas %d, told %q", replicas, got)
		}
		s.mu.Lock()
		before := len(s.listed)
		s.mu.Unlock()
		for range 1000 { // of which the pods' kubelets write a lot
			s.mu.Lock()
			wake(s.changes)
			s.mu.Unlock()
			time.Sleep(time.Millisecond)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if n := len(s.listed) - before; n < 2 || n > 12 {
			t.Errorf("the pods were read %d times for 1,000 changes in a second, want some 10", n)
		}
	})
}

func TestHolderName(t *testing.T) {
	id := ring.ID{Ordinal: 12, Pod: "6f1c-a", Boot: 1789}
	if got := parseHolder(holderName("my-training", id)); got != id {
		t.Errorf("it comes back as %v, want %v", got, id)
	}
	for _, name := range []string{"", "a", "training-0", "training-x/u/1", "training-0/u/x", "a/b/c/d"} {
		if got := parseHolder(name); got != (ring.ID{}) {
			t.Errorf("%q is taken for %v", name, got)
		}
	}
}
