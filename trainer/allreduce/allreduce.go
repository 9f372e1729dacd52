// Package allreduce moves bytes inside one generation of a ring: sums and maxima over all ranks, a barrier, and a broadcast that copies
// the state to joiners, over TCP.
//
// A [Group] is the connections of one generation. [Open] makes them, each with a handshake that proves the generation's key and says
// which job, generation and ranks it is for; [Group.Close] ends them. A group never mends itself: when a peer is lost, every collective
// that is under way or comes later fails with the same [PeerError], at every rank, and a new generation has its own group. So who is
// still in an old generation is not heard by a new one.
//
// A vector above 32 KiB goes round the ring in chunks: reduce-scatter, then all-gather, each rank sending 2(N−1)/N of it, which is the
// least possible (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009). A
// smaller one is exchanged whole by recursive doubling, in log2 N rounds rather than 2(N−1).
//
// # Determinism
//
// All ranks get the same bits, and the same inputs give the same bits, whatever the timing. Sums of int64 wrap as two's complement does,
// so they do not depend on order or world at all: what must be the same for every size of the world is to be summed as int64. Sums of
// float32 are rounded in an order that depends on rank, world and length alone. On the ring, where segment i of the vector is the
// elements [i·n/N, (i+1)·n/N):
//
//	((x[i] + x[i+1]) + x[i+2]) + …, ranks modulo N
//
// and in recursive doubling, where P is the largest power of two that is ≤ N, first x[r] + x[r+P] for the ranks r+P < N, then neighbours,
// pairs of neighbours and so on: ((x[0] + x[1]) + (x[2] + x[3])) + …. Which of several NaNs comes out is not said.
//
// # Failures
//
// On every connection each side says that it lives, four times per timeout, whether it computes or waits. A rank that is silent for
// longer, or whose connection breaks, is lost; the rank that sees it tells the others whom. One that lives but does not come to the collective is waited for without end: how long a
// step may take is not known here. Who knows calls [Group.Abort].
//
// It does not decide who is a member, never retries a collective, and neither encrypts nor signs what follows the handshake: it keeps out
// who does not have the key, not who can alter the packets of the cluster's network.
package allreduce

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"
)

// Config is one rank's view of a group. All ranks must agree on Job, Generation, Channel, Key and Addresses.
type Config struct {
	Job        string // UID of the StatefulSet, 1 to 200 bytes
	Generation uint64 // never used twice in a job; of two the higher one is newer

	// Channel tells groups of one generation apart: "" is the ring, and a copy of the state between two who need not both be in the ring
	// is a group of two with a channel of its own. A connection for a channel that its listener does not open yet is tried again.
	// Up to 40 bytes.
	Channel string

	Key       []byte   // the generation's secret, 16 to 64 bytes of a random source
	Rank      int      // of this process
	Addresses []string // of all ranks' listeners, by rank; the world's size is their number, up to MaxWorld

	// Listener is where higher ranks call. It stays the caller's, who gives the same one to the next generation: a connection that comes
	// between two Opens waits in its backlog. Open uses it alone until it returns. nil for the highest rank, whom nobody calls.
	Listener Listener
	Dial     func(ctx context.Context, address string) (net.Conn, error) // nil = TCP

	Timeout time.Duration // a rank that is silent for so long is lost; 0 = 5 s
	// Refused is told of every connection that Open refuses, with what it said and what was expected. Called from several goroutines.
	// nil = not at all.
	Refused func(from net.Addr, err error)
}

// Listener is a net.Listener whose Accept can be ended without closing it, such as *net.TCPListener.
type Listener interface {
	Accept() (net.Conn, error)
	SetDeadline(time.Time) error
}

// MaxWorld bounds a group.
const MaxWorld = 4096

// DefaultTimeout is that of a Config without one.
const DefaultTimeout = 5 * time.Second

func (c Config) world() int { return len(c.Addresses) }

// Validate says which field has which value, what it may be, and what to do.
func (c Config) Validate() error {
	for _, f := range []struct {
		name      string
		value     int
		low, high int
		fix       string
	}{
		{"Job", len(c.Job), 1, maxJob, "set it to the UID of the StatefulSet"},
		{"Channel", len(c.Channel), 0, maxChannel, "leave it empty for the ring"},
		{"Key", len(c.Key), 16, 64, "make 32 with crypto/rand, for each generation anew"},
	} {
		if f.name == "Key" && c.world() == 1 {
			continue // there is nobody to prove anything to
		}
		if f.value < f.low || f.value > f.high {
			return fmt.Errorf("%s has %d bytes: want %d to %d; %s", f.name, f.value, f.low, f.high, f.fix)
		}
	}
	if c.world() < 1 || c.world() > MaxWorld {
		//lint:ignore ST1005 it begins with a field's name
		return fmt.Errorf("Addresses has %d: want 1 to %d, one for each rank; give those of all members", c.world(), MaxWorld)
	}
	if c.Rank < 0 || c.Rank >= c.world() {
		return fmt.Errorf("Rank %d: want 0 to %d; give the index of this process in Addresses", c.Rank, c.world()-1)
	}
	if c.Timeout != 0 && (c.Timeout < 10*time.Millisecond || c.Timeout > time.Hour) {
		//lint:ignore ST1005 it begins with a field's name
		return fmt.Errorf("Timeout %s: want 10ms to 1h; leave it out for %s", c.Timeout, DefaultTimeout)
	}
	if _, callers := c.ends(); c.Listener == nil && len(callers) > 0 {
		return fmt.Errorf("Listener is nil: want one, for rank %d calls here; listen at %s", callers[0].peer, c.Addresses[c.Rank])
	}
	return nil
}

// Why a group fails. All but ErrClosed come wrapped in a [PeerError].
var (
	ErrClosed  = errors.New("the group is closed")
	ErrLeft    = errors.New("has closed its group")
	ErrAborted = errors.New("has aborted its group")
	ErrSilent  = errors.New("is silent")
	ErrGivenUp = errors.New("holds this rank for lost")
	errDiffers = errors.New("does something else")
	errCopy    = errors.New("has failed to copy")
)

// PeerError is a failure that a peer is the cause of: it is lost, it left, or it does something else than this rank.
type PeerError struct {
	Rank int
	Err  error
}

func (e *PeerError) Error() string { return fmt.Sprintf("rank %d: %v", e.Rank, e.Err) }

// Unwrap is for errors.Is.
func (e *PeerError) Unwrap() error { return e.Err }

// Bandwidth is how nccl-tests counts an all-reduce of so many bytes, in bytes/s: algorithm is bytes/took, and bus is what each rank's
// link carried if the algorithm was bandwidth-optimal, 2(N−1)/N times as much, which does not depend on the world (nccl-tests,
// doc/PERFORMANCE.md). Both are 0 if took is.
func Bandwidth(bytes int64, world int, took time.Duration) (algorithm, bus float64) {
	if took <= 0 || world < 1 {
		return 0, 0
	}
	algorithm = float64(bytes) / took.Seconds()
	return algorithm, algorithm * 2 * float64(world-1) / float64(world)
}
