package allreduce

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// culprit is the rank that an error names, -1 if it names none.
func culprit(err error) int {
	if lost, ok := errors.AsType[*PeerError](err); ok {
		return lost.Rank
	}
	return -1
}

// soon is what "at once" must be below on a machine that others use, too. Nothing here waits for a timeout of its own.
const soon = time.Second

// kill ends a rank as kill -9 does: its sockets are closed by the kernel, and it says nothing.
func kill(g *Group) {
	g.failing.Do(func() {
		g.err = errors.New("killed")
		close(g.done)
		for _, c := range g.conns {
			c.Close()
		}
	})
}

// A rank that dies in the middle of a large vector is named by all others, at once.
func TestPeerKilled(t *testing.T) {
	for _, n := range []int{2, 3, 4, 8} {
		groups := world(t, n)
		dead := n / 2
		errs, after := make([]error, n), make([]error, n)
		var killed time.Time
		each(n, func(r int) {
			g := groups[r]
			if r == dead {
				// It has taken part in the beginning: its neighbour waits for the rest.
				g.prev.take(sumFloat32, 1, make([]byte, chunkBytes), false)
				killed = time.Now()
				kill(g)
				return
			}
			errs[r] = g.SumFloat32(make([]float32, 16<<20/4))
			after[r] = g.Barrier()
		})
		if d := time.Since(killed); d > soon {
			t.Errorf("world %d: the last rank hears of it after %s", n, d)
		}
		for r, err := range errs {
			if r != dead && (culprit(err) != dead || culprit(after[r]) != dead) {
				t.Errorf("world %d: rank %d gets %v, then %v, want both to name rank %d", n, r, err, after[r], dead)
			}
		}
	}
}

// A rank that dies while all others compute is seen by its neighbours then, not at the next collective.
func TestPeerKilledWhileComputing(t *testing.T) {
	groups := world(t, 3)
	kill(groups[2])
	for _, g := range groups[:2] {
		select {
		case <-g.Done():
			if culprit(g.Err()) != 2 {
				t.Errorf("rank %d: %v, want one that names rank 2", g.Rank(), g.Err())
			}
		case <-time.After(soon):
			t.Errorf("rank %d has not seen it", g.Rank())
		}
	}
}

// Abort from another goroutine ends a collective at all ranks within milliseconds, and says who gave up, or because of whom.
func TestAbort(t *testing.T) {
	for _, c := range []struct {
		name  string
		cause error
		here  string // rank 1's error
		named int    // by the others
	}{
		{"of its own", nil, "the group is closed", 1},
		{"with a cause", errors.New("told to stop by the coordinator"), "told to stop by the coordinator", 1},
		{"because of another", &PeerError{2, errors.New("is gone, says the coordinator")}, "rank 2: is gone, says the coordinator", 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			groups := world(t, 4)
			// Rank 3 does not come, so the others wait for it for ever.
			errs := make([]error, 3)
			var took time.Duration
			each(4, func(r int) {
				if r < 3 {
					errs[r] = groups[r].SumFloat32(make([]float32, 4<<20/4))
					return
				}
				for groups[1].ready.Load() == 0 {
					time.Sleep(time.Millisecond) // until rank 1 is in it
				}
				began := time.Now()
				groups[1].Abort(c.cause)
				took = time.Since(began)
			})
			if took > soon {
				t.Errorf("Abort takes %s", took)
			}
			if !strings.HasSuffix(errs[1].Error(), c.here) {
				t.Errorf("rank 1 gets %v, want %s", errs[1], c.here)
			}
			for _, r := range []int{0, 2} {
				if r != c.named && culprit(errs[r]) != c.named {
					t.Errorf("rank %d gets %v, want one that names rank %d", r, errs[r], c.named)
				}
			}
			if by := culprit(errs[2]); c.named == 2 && (by < 0 || by == 2) {
				t.Errorf("rank 2, which was given up, gets %v, want one that names who did", errs[2])
			}
		})
	}
}

// A rank may close when its own last collective is done: nobody loses what it sent before.
func TestCloseAfterLastCollective(t *testing.T) {
	for round := range 20 {
		groups := world(t, 2+round%4)
		length := []int{1, 100_000, 1_000_000}[round%3]
		together(t, groups, func(g *Group) error {
			v := make([]int64, length)
			for i := range v {
				v[i] = 1
			}
			err := g.SumInt64(v)
			if err == nil && slices.ContainsFunc(v, func(x int64) bool { return x != int64(g.World()) }) {
				t.Error("wrong sum")
			}
			return errors.Join(err, g.Close())
		})
	}
}

// Who wants more of a rank that closed is told that it left. What is called on a closed group is refused.
func TestCloseEarly(t *testing.T) {
	groups := world(t, 3)
	together(t, groups, func(g *Group) error { return g.Barrier() })
	each(3, func(r int) {
		if r == 1 {
			groups[r].Close()
			groups[r].Close()
			if err := groups[r].Barrier(); !errors.Is(err, ErrClosed) {
				t.Errorf("Barrier on a closed group: %v, want ErrClosed", err)
			}
			return
		}
		err := groups[r].SumInt64(make([]int64, 100_000))
		if culprit(err) != 1 {
			t.Errorf("rank %d: %v, want one that names rank 1", r, err)
		}
	})
}

// Close under a collective is Abort.
func TestCloseWithinCollective(t *testing.T) {
	groups := world(t, 2)
	each(2, func(r int) {
		if r == 0 {
			if err := groups[0].Barrier(); !errors.Is(err, ErrClosed) {
				t.Errorf("Barrier under Close: %v, want ErrClosed", err)
			}
			return
		}
		for groups[0].busy.TryLock() {
			groups[0].busy.Unlock()
			time.Sleep(time.Millisecond)
		}
		groups[0].Close()
	})
	groups[1].Barrier() // may pass: rank 0 had come to it
	if err := groups[1].Barrier(); culprit(err) != 0 || !errors.Is(err, ErrAborted) {
		t.Errorf("the other rank: %v, want that rank 0 has aborted", err)
	}
}

// Ranks that do not call the same collective are told so, instead of adding what does not belong together.
func TestCollectivesDiffer(t *testing.T) {
	small, large := 10, 100_000
	for _, c := range []struct {
		name string
		one  func(g *Group) error
		two  func(g *Group) error
		want string
	}{
		{"operation", func(g *Group) error { return g.SumInt64(make([]int64, small)) }, func(g *Group) error { return g.MaxInt64(make([]int64, small)) }, "maximum of int64"},
		{"shorter", func(g *Group) error { return g.SumInt64(make([]int64, small)) }, func(g *Group) error { return g.SumInt64(make([]int64, small-1)) }, "bytes for collective 1"},
		{"shorter on the ring", func(g *Group) error { return g.SumInt64(make([]int64, large)) }, func(g *Group) error { return g.SumInt64(make([]int64, large-10)) }, "bytes for collective 1"},
		{"small and large", func(g *Group) error { return g.SumInt64(make([]int64, small)) }, func(g *Group) error { return g.SumInt64(make([]int64, large)) }, "does something else"},
		{"order", func(g *Group) error { return g.Barrier() }, func(g *Group) error { return g.SumInt64(nil) }, "sum of int64"},
	} {
		t.Run(c.name, func(t *testing.T) {
			groups := world(t, 2)
			errs := make([]error, 2)
			each(2, func(r int) {
				if r == 0 {
					errs[0] = c.one(groups[0])
				} else {
					errs[1] = c.two(groups[1])
				}
			})
			said := errors.Join(errs...).Error()
			if errs[0] == nil || errs[1] == nil || !strings.Contains(said, c.want) {
				t.Errorf("%v, want both to fail, and one to say %q", errs, c.want)
			}
		})
	}
}

// A second collective at the same time is refused, and the first goes on.
func TestBusy(t *testing.T) {
	groups := world(t, 2)
	each(2, func(r int) {
		if r == 0 {
			if err := groups[0].Barrier(); err != nil {
				t.Error(err)
			}
			return
		}
		for groups[0].busy.TryLock() {
			groups[0].busy.Unlock()
			time.Sleep(time.Millisecond)
		}
		if err := groups[0].SumInt64(nil); !errors.Is(err, errBusy) {
			t.Errorf("%v, want errBusy", err)
		}
		if err := groups[1].Barrier(); err != nil {
			t.Error(err)
		}
	})
}

// pipes is a network of net.Pipes: no kernel, so that the time can be a fake one, and no buffer, so that whatever waits for a peer to
// read does wait.
type pipes struct {
	calls  chan net.Conn
	mu     sync.Mutex
	ending chan struct{} // closed by a deadline that has passed
}

func newPipes() *pipes { return &pipes{calls: make(chan net.Conn), ending: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	p.mu.Lock()
	ending := p.ending
	p.mu.Unlock()
	select {
	case c := <-p.calls:
		return c, nil
	case <-ending:
		return nil, os.ErrDeadlineExceeded
	}
}

func (p *pipes) SetDeadline(end time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if end.IsZero() {
		p.ending = make(chan struct{})
	} else {
		close(p.ending)
	}
	return nil
}

func (p *pipes) call(ctx context.Context) (net.Conn, error) {
	here, there := net.Pipe()
	select {
	case p.calls <- there:
		return here, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// piped are the configs of a world on pipes.
func piped(world int) (all []Config) {
	listeners, addresses := map[string]*pipes{}, make([]string, world)
	for r := range addresses {
		addresses[r] = string(rune('a' + r))
		listeners[addresses[r]] = newPipes()
	}
	for r := range world {
		all = append(all, Config{Job: "job-1", Generation: 7, Key: key, Rank: r, Addresses: addresses, Listener: listeners[addresses[r]],
			Dial: func(ctx context.Context, address string) (net.Conn, error) { return listeners[address].call(ctx) }})
	}
	return all
}

// Nothing relies on a buffer in the network.
func TestWithoutBuffers(t *testing.T) {
	for _, n := range []int{2, 3, 5} {
		groups := open(t, piped(n))
		for _, length := range []int{0, 1, smallBytes / 8, 1 + smallBytes/8, 500_000} {
			together(t, groups, func(g *Group) error {
				v := slices.Repeat([]int64{int64(g.Rank())}, length)
				err := g.SumInt64(v)
				if want := int64(n * (n - 1) / 2); err == nil && slices.ContainsFunc(v, func(x int64) bool { return x != want }) {
					t.Errorf("world %d, %d elements: wrong sum", n, length)
				}
				return err
			})
		}
	}
}

// stalled is rank 2 of 3, whose connections stand and who reads, but says nothing: a process that was stopped, or a cut network.
func stalled(t *testing.T, all []Config) (groups []*Group, end func()) {
	t.Helper()
	var conns [2]net.Conn
	groups = make([]*Group, 2)
	each(4, func(i int) {
		var err error
		if i < 2 {
			groups[i], err = Open(t.Context(), all[i])
		} else {
			peer := i - 2
			if conns[peer], err = all[2].Dial(t.Context(), all[2].Addresses[peer]); err == nil {
				err = call(conns[peer], all[2], link{peer, 0}, time.Now().Add(time.Second))
			}
		}
		if err != nil {
			t.Error(err)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	var reading sync.WaitGroup
	for _, c := range conns {
		reading.Go(func() { io.Copy(io.Discard, c) })
	}
	return groups, func() {
		for _, c := range conns {
			c.Close()
		}
		reading.Wait()
		for _, g := range groups {
			g.Close()
		}
	}
}

// A rank that is silent is lost after the timeout, and all name it: not those who, waiting for it, bring nothing either.
func TestSilentPeer(t *testing.T) {
	for _, length := range []int{1, 1_000_000} {
		synctest.Test(t, func(t *testing.T) {
			groups, end := stalled(t, piped(3))
			defer end()
			began := time.Now()
			each(2, func(r int) {
				err := groups[r].SumInt64(make([]int64, length))
				if culprit(err) != 2 {
					t.Errorf("%d elements: rank %d gets %v, want one that names rank 2", length, r, err)
				}
			})
			if d := time.Since(began); d < DefaultTimeout || d > DefaultTimeout+farewell {
				t.Errorf("%d elements: lost after %s, want %s", length, d, DefaultTimeout)
			}
			if err := errors.Join(groups[0].Err(), groups[1].Err()); !errors.Is(err, ErrSilent) {
				t.Errorf("%v, want ErrSilent", err)
			}
		})
	}
}

// A rank that computes for long is waited for, however large what the others have for it is.
func TestSlowPeer(t *testing.T) {
	for _, length := range []int{1, 1_000_000} {
		synctest.Test(t, func(t *testing.T) {
			all := piped(3)
			groups := make([]*Group, 3)
			each(3, func(r int) {
				var err error
				if groups[r], err = Open(t.Context(), all[r]); err != nil {
					t.Error(err)
					return
				}
				v := slices.Repeat([]int64{1}, length)
				if r == 1 {
					time.Sleep(10 * time.Minute)
				}
				if err := groups[r].SumInt64(v); err != nil || v[0] != 3 {
					t.Errorf("%d elements: rank %d gets %d, %v, want 3", length, r, v[0], err)
				}
				groups[r].Close()
			})
		})
	}
}
