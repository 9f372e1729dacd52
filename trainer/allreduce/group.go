package allreduce

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Group is the connections of one rank in one generation. Its collectives are to be called by all ranks in the same order with the same
// lengths, and one at a time: another one meanwhile is refused. Abort and Close may be called at any time from any goroutine.
type Group struct {
	rank, world int
	timeout     time.Duration
	mu          sync.Mutex     // guards conns while Open runs, and against fail
	conns       map[link]*conn // complete and not changed any more once Open has returned
	next, prev  *conn          // on the ring; nil in a world of one

	busy     sync.Mutex // held by a collective
	sequence uint64     // of the newest collective; guarded by busy
	scratch  []byte     // what was received of a vector to be reduced, aligned for any element; guarded by busy

	turn  chan struct{} // wakes the sender for a vector
	vec   vector        // that the sender sends; changes only while it sleeps
	ready atomic.Int64  // chunks of vec that may be sent, in the order of sending
	more  chan struct{} // says that ready has grown
	sent  chan error    // how the sender got on with vec, which it is done with

	failing sync.Once
	err     error         // why it failed; written before done is closed
	done    chan struct{} // closed on the first failure
	closing chan struct{} // closed by Close
	closed  sync.Once
	running sync.WaitGroup // readers, beats, the sender
}

func newGroup(cfg Config) *Group {
	timeout := cfg.Timeout
	if timeout == 0 {
		timeout = DefaultTimeout
	}
	return &Group{
		rank: cfg.Rank, world: cfg.world(), timeout: timeout, conns: map[link]*conn{},
		turn: make(chan struct{}), more: make(chan struct{}, 1), sent: make(chan error, 1),
		done: make(chan struct{}), closing: make(chan struct{}),
	}
}

// start is called when all connections are there.
func (g *Group) start() {
	if g.world == 1 {
		return
	}
	next, prev := besides(g.rank, g.world)
	g.next, g.prev = g.conns[next], g.conns[prev]
	g.scratch = aligned(chunkBytes)
	g.running.Go(g.sender)
}

// Rank is this process's.
func (g *Group) Rank() int { return g.rank }

// World is the number of ranks.
func (g *Group) World() int { return g.world }

// Done is closed when the group has failed, was aborted or closed: also while this rank computes.
func (g *Group) Done() <-chan struct{} { return g.done }

// Err says why Done is closed, nil while it is not.
func (g *Group) Err() error {
	select {
	case <-g.done:
		return g.err
	default:
		return nil
	}
}

// fail ends the group: the first cause counts. The peers are told who was lost, as far as that can be done at once.
func (g *Group) fail(err error) error {
	g.failing.Do(func() {
		g.err = err
		close(g.done)
		culprit := g.rank
		if lost, ok := errors.AsType[*PeerError](err); ok && !errors.Is(err, ErrGivenUp) {
			culprit = lost.Rank
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		var told sync.WaitGroup
		for _, c := range g.conns {
			told.Go(func() {
				c.tell(frame{kind: kindAbort, rank: uint16(culprit)}, farewell)
				c.Close()
			})
		}
		told.Wait()
	})
	return g.err
}

const (
	farewell = 10 * time.Millisecond // how long a peer that takes nothing is waited for when the group ends
	patience = 50 * time.Millisecond // how long somebody is waited for who knows why a connection ended
)

// Abort ends the group at once: whoever is in a collective, here or at another rank, gets an error within milliseconds. cause is what
// they get here; nil = ErrClosed. The peers are told the rank that it names, if it is a PeerError, and this one otherwise.
func (g *Group) Abort(cause error) {
	if cause == nil {
		cause = ErrClosed
	}
	g.fail(cause)
}

// Close ends the group and returns when nothing of it runs any more. What was sent before still arrives, so a rank may close as soon as
// its own last collective is done, while others are in it; a rank that does not take it within the timeout is not waited for. With a
// collective under way it is Abort. It always returns nil, and can be called again.
func (g *Group) Close() error {
	g.closed.Do(func() {
		if g.busy.TryLock() {
			close(g.closing)
			g.busy.Unlock()
			end := time.Now().Add(g.timeout)
			for _, c := range g.conns {
				c.tell(frame{kind: kindBye}, g.timeout)
			}
			for _, c := range g.conns {
				select {
				case <-c.over:
				case <-time.After(time.Until(end)):
				case <-g.done:
				}
			}
		}
		g.fail(ErrClosed)
	})
	g.running.Wait()
	return nil
}

// Open connects this rank with those that it talks to, and returns when that is done. It blocks until then, until ctx ends, or until
// one of them refuses for good or is lost. A rank whose listener is not there yet, or is still in an older generation, is tried again.
// The caller has to close the group.
func Open(ctx context.Context, cfg Config) (*Group, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	g := newGroup(cfg)
	if err := g.connect(ctx, cfg); err != nil {
		g.fail(err)
		g.Close()
		return nil, fmt.Errorf("open generation %d as rank %d of %d: %w", cfg.Generation, cfg.Rank, cfg.world(), err)
	}
	g.start()
	return g, nil
}

// link names a connection. There is one to each rank that is needed, but two where one rank is both neighbours: the two directions of one
// TCP connection would wait for each other's copying.
type link struct {
	peer int
	lane int // 0 or 1; on 0, the lower one of two ranks sends round the ring
}

// partner is the link for recursive doubling with a rank.
func partner(rank int) link { return link{rank, 0} }

// besides are the links along the ring.
func besides(rank, world int) (next, prev link) {
	next, prev = link{(rank + 1) % world, 0}, link{(rank - 1 + world) % world, 0}
	if world == 2 {
		next.lane, prev.lane = rank, 1-rank
	}
	return next, prev
}

// links are all those of a rank: along the ring, and with its partners in recursive doubling. The other end has the same.
func links(rank, world int) (all []link) {
	if world == 1 {
		return nil
	}
	next, prev := besides(rank, world)
	all = append(all, next, prev)
	power := powerOfTwo(world)
	switch {
	case rank >= power:
		all = append(all, partner(rank-power))
	case rank+power < world:
		all = append(all, partner(rank+power))
	}
	for mask := 1; rank < power && mask < power; mask *= 2 {
		all = append(all, partner(rank^mask))
	}
	slices.SortFunc(all, func(a, b link) int { return cmp.Or(cmp.Compare(a.peer, b.peer), cmp.Compare(a.lane, b.lane)) })
	return slices.Compact(all)
}

// ends are the links that this rank makes, which are to lower ranks, and those that it waits for. Joiners have the higher ordinals and
// come last, so it is they who call, and who was there before listens already.
func (c Config) ends() (called, callers []link) {
	for _, l := range links(c.Rank, c.world()) {
		if l.peer < c.Rank {
			called = append(called, l)
		} else {
			callers = append(callers, l)
		}
	}
	return called, callers
}

// add makes a connection part of the group. From then on it says that this rank lives, and is watched.
func (g *Group) add(l link, nc net.Conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.Err() != nil {
		nc.Close()
		return
	}
	c := newConn(g, l.peer, nc)
	g.conns[l] = c
	g.running.Go(c.read)
	g.running.Go(c.beat)
}
