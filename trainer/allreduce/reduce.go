package allreduce

import (
	"errors"
	"fmt"
	"math/bits"
)

// operation is what a collective does. It travels in each of its frames.
type operation byte

const (
	sumFloat32 operation = iota + 1
	sumInt64
	maxInt64
	barrier
	broadcast
)

func (op operation) String() string {
	names := [...]string{sumFloat32: "sum of float32", sumInt64: "sum of int64", maxInt64: "maximum of int64", barrier: "barrier", broadcast: "broadcast"}
	if op == 0 || int(op) >= len(names) {
		return fmt.Sprintf("unknown operation %d", byte(op))
	}
	return names[op]
}

// SumFloat32 replaces v by the sum of all ranks' v, element by element, in the order that the package comment says. All ranks get the
// same bits. v has the same length everywhere, and is not to be touched until it returns; after an error it holds nothing of use.
func (g *Group) SumFloat32(v []float32) error { return g.reduce(sumFloat32, bytesOf(v), 4) }

// SumInt64 replaces v by the sum of all ranks' v, as SumFloat32 does. It wraps, and depends on neither order nor world.
func (g *Group) SumInt64(v []int64) error { return g.reduce(sumInt64, bytesOf(v), 8) }

// MaxInt64 replaces v by the maximum of all ranks' v, as SumFloat32 does.
func (g *Group) MaxInt64(v []int64) error { return g.reduce(maxInt64, bytesOf(v), 8) }

// Barrier returns when all ranks have called it.
func (g *Group) Barrier() error { return g.reduce(barrier, nil, 1) }

// errBusy is a mistake of the caller's that the group outlives.
var errBusy = errors.New("another collective of this group is under way: call them one after the other")

// begin takes the group for a collective.
func (g *Group) begin() error {
	if !g.busy.TryLock() {
		return errBusy
	}
	err := g.Err()
	if err == nil && g.isClosing() {
		err = ErrClosed
	}
	if err != nil {
		g.busy.Unlock()
		return err
	}
	g.sequence++
	return nil
}

func (g *Group) reduce(op operation, data []byte, size int) error {
	if err := g.begin(); err != nil {
		return err
	}
	defer g.busy.Unlock()
	var err error
	switch {
	case g.world == 1:
	case len(data) <= smallBytes:
		err = g.double(op, data)
	default:
		err = g.aroundTheRing(op, data, size)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// powerOfTwo is the largest one that is at most n ≥ 1.
func powerOfTwo(n int) int { return 1 << (bits.Len(uint(n)) - 1) }

// double is recursive doubling: in round k, ranks that differ in bit k alone exchange what they have. Ranks beyond the largest power of
// two give theirs to one below it before, and get the result after.
func (g *Group) double(op operation, data []byte) error {
	power := powerOfTwo(g.world)
	if g.rank >= power {
		other := g.conns[partner(g.rank-power)]
		if err := other.send(op, g.sequence, data); err != nil {
			return err
		}
		return other.receive(op, g.sequence, data)
	}
	received := g.scratch[:len(data)]
	var extra *conn
	if g.rank+power < g.world {
		extra = g.conns[partner(g.rank+power)]
	}
	if extra != nil {
		if err := extra.receive(op, g.sequence, received); err != nil {
			return err
		}
		op.apply(data, received)
	}
	for mask := 1; mask < power; mask *= 2 {
		other := g.conns[partner(g.rank^mask)]
		if err := other.send(op, g.sequence, data); err != nil {
			return err
		}
		if err := other.receive(op, g.sequence, received); err != nil {
			return err
		}
		op.apply(data, received)
	}
	if extra != nil {
		return extra.send(op, g.sequence, data)
	}
	return nil
}

// vector is what goes round the ring, cut into one segment for each rank.
type vector struct {
	op       operation
	sequence uint64
	data     []byte
	size     int // of an element
}

// segment is where segment i, modulo world, lies in data.
func (v vector) segment(i, world int) (low, high int) {
	i = (i%world + world) % world
	n := len(v.data) / v.size
	return n * i / world * v.size, n * (i + 1) / world * v.size
}

// aroundTheRing is a reduce-scatter and an all-gather in one go: in step s of 2(N−1), a rank sends segment rank−s and receives segment
// rank−s−1, which it sends in the next step. Up to step N−2 what comes is added to, from then on it is complete and replaces. A chunk
// is sent on as soon as it is received, so a step waits for no step.
func (g *Group) aroundTheRing(op operation, data []byte, size int) (err error) {
	g.vec = vector{op, g.sequence, data, size}
	low, high := g.vec.segment(g.rank, g.world)
	g.ready.Store(int64((high - low + chunkBytes - 1) / chunkBytes))
	select {
	case g.turn <- struct{}{}:
	case <-g.done:
		return g.err
	}
	// The sender reads data, so this does not return before it is done; when the group has failed, that is at once.
	defer func() {
		if sent := <-g.sent; err == nil {
			err = sent
		}
		g.vec = vector{}
	}()
	steps := 2 * (g.world - 1)
	for s := range steps {
		low, high := g.vec.segment(g.rank-s-1, g.world)
		for ; low < high; low += chunkBytes {
			chunk := data[low:min(low+chunkBytes, high)]
			if s < g.world-1 {
				received := g.scratch[:len(chunk)]
				if err := g.prev.receive(op, g.sequence, received); err != nil {
					return err
				}
				op.apply(chunk, received)
			} else if err := g.prev.receive(op, g.sequence, chunk); err != nil {
				return err
			}
			if s < steps-1 {
				g.ready.Add(1)
				select {
				case g.more <- struct{}{}:
				default: // it is told already
				}
			}
		}
	}
	return nil
}

// sender is the goroutine that sends what aroundTheRing has ready, so that no rank has to receive before it can send: else, with every
// buffer full, all would wait for each other.
func (g *Group) sender() {
	for {
		select {
		case <-g.turn:
			g.sent <- g.sendVector()
		case <-g.done:
			return
		}
	}
}

func (g *Group) sendVector() error {
	v, count := g.vec, int64(0)
	for s := range 2 * (g.world - 1) {
		low, high := v.segment(g.rank-s, g.world)
		for ; low < high; low += chunkBytes {
			for count >= g.ready.Load() {
				select {
				case <-g.more:
				case <-g.done:
					return g.err
				}
			}
			if err := g.next.send(v.op, v.sequence, v.data[low:min(low+chunkBytes, high)]); err != nil {
				return err
			}
			count++
		}
	}
	return nil
}
