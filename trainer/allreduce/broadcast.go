package allreduce

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/cespare/xxhash/v2"
)

// Copied is what a broadcast copied.
type Copied struct {
	Bytes int64
	Hash  uint64 // xxHash64 of them, with seed 0
}

// Broadcast copies from, up to its end, from rank root to every other rank's to, along the ring: each rank passes on what it receives, so
// that the time hardly depends on how many there are. from is read at the root only, to written at the others only, where nil does for
// a rank that needs no copy. progress, if not nil, is told the bytes after each chunk.
//
// It succeeds at all ranks or at none (but for one that loses a peer at the very end): when every rank has written as many bytes as the
// root has read, with the same hash. After an error, what to got is to be thrown away. One of from or to leaves the group usable.
//
// Between two ranks that are not in one group it is a group of two with a channel of its own. There the source is best rank 1, which
// calls and needs no listener, and so can serve several at a time.
func (g *Group) Broadcast(root int, from io.Reader, to io.Writer, progress func(bytes int64)) (Copied, error) {
	if root < 0 || root >= g.world {
		return Copied{}, fmt.Errorf("broadcast from rank %d: want 0 to %d; give the rank that has the state", root, g.world-1)
	}
	if err := g.begin(); err != nil {
		return Copied{}, err
	}
	defer g.busy.Unlock()
	b := broadcasting{group: g, hash: xxhash.New(), progress: progress}
	if (g.rank+1)%g.world != root {
		b.next = g.next
	}
	var failure, lost error // of this rank's copy, and of a connection
	if g.rank == root {
		failure, lost = b.read(from)
	} else {
		failure, lost = b.pass(to)
	}
	if lost == nil {
		failure, lost = b.agree(failure)
	}
	if err := lost; err != nil || failure != nil {
		if err == nil {
			err = failure
		}
		return Copied{}, fmt.Errorf("broadcast from rank %d: %w", root, err)
	}
	return b.copied(), nil
}

type broadcasting struct {
	group    *Group
	next     *conn // nil = the last one
	hash     *xxhash.Digest
	bytes    int64
	progress func(int64)
}

// trailerBytes is the length and the hash, which come after an empty frame.
const trailerBytes = 16

func (b *broadcasting) copied() Copied { return Copied{b.bytes, b.hash.Sum64()} }

func (b *broadcasting) send(p []byte) error {
	if b.next == nil {
		return nil
	}
	return b.next.send(broadcast, b.group.sequence, p)
}

func (b *broadcasting) count(p []byte) {
	b.hash.Write(p)
	b.bytes += int64(len(p))
	if b.progress != nil {
		b.progress(b.bytes)
	}
}

// read is the root's part. Whatever failure the reader has, the others get an end.
func (b *broadcasting) read(from io.Reader) (failure, lost error) {
	chunk := make([]byte, chunkBytes)
	for failure == nil {
		n, err := io.ReadFull(from, chunk)
		if n > 0 {
			if lost := b.send(chunk[:n]); lost != nil {
				return nil, lost
			}
			b.count(chunk[:n])
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			break
		}
		if err != nil {
			failure = fmt.Errorf("read what is to be copied, at byte %d: %w", b.bytes, err)
		}
	}
	if lost := b.send(nil); lost != nil {
		return failure, lost
	}
	trailer := binary.LittleEndian.AppendUint64(nil, uint64(b.bytes))
	return failure, b.send(binary.LittleEndian.AppendUint64(trailer, b.hash.Sum64()))
}

// pass is another rank's part. Whatever failure the writer has, the ranks behind this one get all.
func (b *broadcasting) pass(to io.Writer) (failure, lost error) {
	g := b.group
	chunk := make([]byte, chunkBytes)
	for {
		n, lost := g.prev.take(broadcast, g.sequence, chunk, false)
		if lost == nil {
			lost = b.send(chunk[:n])
		}
		if lost != nil {
			return failure, lost
		}
		if n == 0 {
			break
		}
		if to != nil && failure == nil {
			if _, err := to.Write(chunk[:n]); err != nil {
				failure = fmt.Errorf("write the copy, at byte %d: %w", b.bytes, err)
			}
		}
		b.count(chunk[:n])
	}
	trailer := chunk[:trailerBytes]
	lost = g.prev.receive(broadcast, g.sequence, trailer)
	if lost == nil {
		lost = b.send(trailer)
	}
	if lost != nil {
		return failure, lost
	}
	want := Copied{int64(binary.LittleEndian.Uint64(trailer)), binary.LittleEndian.Uint64(trailer[8:])}
	if got := b.copied(); failure == nil && got != want {
		failure = fmt.Errorf("the copy has %d bytes with hash %016x: want %d with %016x; it was altered on its way", got.Bytes, got.Hash, want.Bytes, want.Hash)
	}
	return failure, nil
}

// agree makes the failure of one the failure of all.
func (b *broadcasting) agree(failure error) (common, lost error) {
	g := b.group
	if g.world == 1 {
		return failure, nil
	}
	worst := []int64{0}
	if failure != nil {
		worst[0] = int64(g.rank) + 1
	}
	if err := g.double(maxInt64, bytesOf(worst)); err != nil {
		return failure, err
	}
	if failure == nil && worst[0] != 0 {
		failure = &PeerError{int(worst[0] - 1), errCopy}
	}
	return failure, nil
}
