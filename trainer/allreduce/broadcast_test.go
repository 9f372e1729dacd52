package allreduce

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/cespare/xxhash/v2"
)

func noise(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(n)}).Read(b)
	return b
}

// Every rank gets what the root has, whichever that is and however long it is, and all know the same hash.
func TestBroadcast(t *testing.T) {
	for n := 1; n <= 5; n++ {
		groups := world(t, n)
		for i, length := range []int{0, 1, trailerBytes, chunkBytes, chunkBytes + 1, 5*chunkBytes + 77} {
			root, state := i%n, noise(length)
			together(t, groups, func(g *Group) error {
				var to bytes.Buffer
				var told []int64
				copied, err := g.Broadcast(root, iotest.HalfReader(bytes.NewReader(state)), &to, func(done int64) { told = append(told, done) })
				if err != nil {
					return err
				}
				if want := (Copied{int64(length), xxhash.Sum64(state)}); copied != want {
					t.Errorf("world %d, %d bytes: rank %d gets %+v, want %+v", n, length, g.Rank(), copied, want)
				}
				if g.Rank() != root && !bytes.Equal(to.Bytes(), state) {
					t.Errorf("world %d, %d bytes: rank %d gets another state", n, length, g.Rank())
				}
				if chunks := (length + chunkBytes - 1) / chunkBytes; len(told) != chunks || chunks > 0 && told[chunks-1] != int64(length) {
					t.Errorf("%d bytes: progress was %d", length, told)
				}
				return nil
			})
		}
		// A rank that needs no copy takes part without a writer.
		together(t, groups, func(g *Group) error {
			_, err := g.Broadcast(0, strings.NewReader("state"), nil, nil)
			return err
		})
	}
}

// broken is a writer that is full after so many bytes.
type broken int

func (b *broken) Write(p []byte) (int, error) {
	if *b -= broken(len(p)); *b < 0 {
		return 0, errors.New("no space left on device")
	}
	return len(p), nil
}

// When one rank cannot read or write, all know that the copy failed, and the group goes on.
func TestBroadcastFails(t *testing.T) {
	state := noise(3*chunkBytes + 5)
	for _, c := range []struct {
		name string
		at   int
		own  string
	}{
		{"the root cannot read", 0, "read what is to be copied, at byte 262144: input/output error"},
		{"a rank cannot write", 2, "write the copy, at byte 262144: no space left on device"},
	} {
		groups := world(t, 4)
		errs := make([]error, 4)
		each(4, func(r int) {
			from, to := io.Reader(bytes.NewReader(state)), io.Writer(io.Discard)
			if r == c.at {
				from = io.MultiReader(bytes.NewReader(state[:chunkBytes]), iotest.ErrReader(errors.New("input/output error")))
				full := broken(chunkBytes + 1)
				to = &full
			}
			_, errs[r] = groups[r].Broadcast(0, from, to, nil)
		})
		for r, err := range errs {
			if r == c.at && (err == nil || !strings.HasSuffix(err.Error(), c.own)) || r != c.at && (culprit(err) != c.at || !errors.Is(err, errCopy)) {
				t.Errorf("%s: rank %d gets %v", c.name, r, err)
			}
		}
		together(t, groups, func(g *Group) error { return g.Barrier() })
	}
	if _, err := world(t, 1)[0].Broadcast(1, nil, nil, nil); err == nil || !strings.Contains(err.Error(), "from rank 1: want 0 to 0") {
		t.Errorf("a root beyond the world: %v", err)
	}
}

// altering is a network that changes one bit of what passes after so many bytes.
type altering struct {
	net.Conn
	after int
}

func (a *altering) Write(p []byte) (int, error) {
	at := a.after
	a.after -= len(p)
	if at >= 0 && at < len(p) {
		p = bytes.Clone(p)
		p[at] ^= 4
	}
	return a.Conn.Write(p)
}

// A bit that changes on its way is found by who gets it, and all know.
func TestBroadcastIsVerified(t *testing.T) {
	all := configs(t, 3)
	// What rank 2 writes to rank 0, which it calls.
	all[2].Dial = func(ctx context.Context, address string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if address == all[0].Addresses[0] {
			c = &altering{c, 100_000}
		}
		return c, err
	}
	groups := open(t, all)
	errs := make([]error, 3)
	each(3, func(r int) { _, errs[r] = groups[r].Broadcast(2, bytes.NewReader(noise(200_000)), io.Discard, nil) })
	// Rank 1 gets what rank 0 got, and finds it as well.
	for r, err := range errs {
		if altered := err != nil && strings.Contains(err.Error(), "it was altered on its way"); altered != (r != 2) || err == nil {
			t.Errorf("rank %d gets %v", r, err)
		}
	}
}

// A copy between two who are not in one ring is a group of its own, in the same generation and at the same listener, whose source needs
// none. It waits until the ring of that listener is open.
func TestCopyBesideTheRing(t *testing.T) {
	ring := configs(t, 2)
	state := noise(chunkBytes + 3)
	copies := make([]Config, 2)
	for r := range copies {
		copies[r] = Config{Job: "job-1", Generation: 7, Key: key, Channel: "state", Rank: r, Addresses: []string{ring[0].Addresses[0], ""}}
	}
	copies[0].Listener = ring[0].Listener
	var got bytes.Buffer
	each(3, func(i int) {
		if i < 2 {
			g, err := Open(t.Context(), ring[i])
			if err == nil {
				err = errors.Join(g.Barrier(), g.Close())
			}
			if err != nil {
				t.Error(err)
			}
			if i == 1 {
				return
			}
		}
		// Rank 0 of the ring copies from somebody who is not in it, and who has called all the time.
		rank := i / 2
		g, err := Open(t.Context(), copies[rank])
		if err != nil {
			t.Error(err)
			return
		}
		defer g.Close()
		if _, err := g.Broadcast(1, bytes.NewReader(state), &got, nil); err != nil {
			t.Error(err)
		}
	})
	if !bytes.Equal(got.Bytes(), state) {
		t.Error("the copy differs")
	}
}
