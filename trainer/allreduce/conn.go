package allreduce

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

const (
	// chunkBytes is how much of a vector travels in one frame: small enough that it is added while it is still in the cache, large enough
	// that a frame's system calls do not count. A multiple of every element's size.
	chunkBytes = 256 << 10
	// smallBytes is the largest vector that recursive doubling exchanges: in worlds of 2 to 8 on one host it takes a quarter to two thirds
	// of the ring's time for 1 to 32 KiB, and comes close to it at 64 KiB. Two who exchange write first and read then, which is safe for
	// what the other one's reader takes with the header, even if the network buffers nothing.
	smallBytes = 32 << 10
	// bufferBytes is what is read ahead with a header: a small message with one system call. Of a chunk it is copied once more.
	bufferBytes = headerBytes + smallBytes
)

// The kinds of frames.
const (
	kindBeat  byte = iota + 1 // this rank lives
	kindData                  // a payload for a collective
	kindBye                   // this rank has left in good order; nothing follows
	kindAbort                 // this rank has given up because of Rank; nothing follows
)

// frame is the header of what travels on a connection; the payload follows.
type frame struct {
	kind     byte
	op       operation // of the collective
	rank     uint16    // kindAbort: who was lost
	length   uint32    // of the payload in bytes
	sequence uint64    // of the collective
}

const headerBytes = 16

func (f frame) put(b []byte) {
	b[0], b[1] = f.kind, byte(f.op)
	binary.LittleEndian.PutUint16(b[2:], f.rank)
	binary.LittleEndian.PutUint32(b[4:], f.length)
	binary.LittleEndian.PutUint64(b[8:], f.sequence)
}

func parseFrame(b []byte) frame {
	return frame{
		kind: b[0], op: operation(b[1]), rank: binary.LittleEndian.Uint16(b[2:]),
		length: binary.LittleEndian.Uint32(b[4:]), sequence: binary.LittleEndian.Uint64(b[8:]),
	}
}

// conn is a connection to a peer after the handshake. Its reader goroutine takes every header, so that a loss is seen while nobody waits
// for data, too; a payload is read by the collective that wants it, to where it belongs.
//
// Writes have no deadline: a peer that computes does not read. What says that it lives is what it sends.
type conn struct {
	net.Conn
	group *Group
	peer  int

	in     *bufio.Reader // the reader's, and the collective's between frames and taken
	frames chan frame    // data that has come
	taken  chan struct{} // its payload has been read
	over   chan struct{} // closed when the reader has ended
	left   chan struct{} // closed before that if the peer said bye

	write  sync.Mutex // guards all below, and the order of frames
	ended  bool       // no frame may follow: bye or abort is said, or a frame was cut
	out    []byte     // a header, and a small payload
	pieces net.Buffers
	vector [2][]byte // what pieces is made of
}

func newConn(g *Group, peer int, nc net.Conn) *conn {
	return &conn{
		Conn: nc, group: g, peer: peer, in: bufio.NewReaderSize(nc, bufferBytes),
		frames: make(chan frame), taken: make(chan struct{}, 1), over: make(chan struct{}), left: make(chan struct{}),
		out: make([]byte, headerBytes+smallBytes),
	}
}

// lost fails the group because of the peer. A connection that just ends is not its peer's fault for sure: that one may have gone because
// of another rank, and could not say so, for it was in the midst of a frame. Somebody else will in a moment.
func (c *conn) lost(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("%w for %s", ErrSilent, c.group.timeout)
	}
	for _, known := range []error{ErrSilent, ErrAborted, ErrGivenUp, errDiffers} {
		if errors.Is(err, known) {
			return c.group.fail(&PeerError{c.peer, err})
		}
	}
	wait := time.NewTimer(patience)
	defer wait.Stop()
	select {
	case <-c.left:
		err = ErrLeft
	case <-c.group.done:
	case <-wait.C:
	}
	return c.group.fail(&PeerError{c.peer, err})
}

// unwritable is lost for an error of writing. The peer may have said why before, which the reader comes to, unless it stands before a
// frame that nobody takes any more.
func (c *conn) unwritable(err error) error {
	wait := time.NewTimer(c.group.timeout)
	defer wait.Stop()
	select {
	case <-c.over:
	case <-c.group.done:
	case <-wait.C:
	}
	return c.lost(fmt.Errorf("write: %w", err))
}

// read is the reader goroutine.
func (c *conn) read() {
	defer close(c.over)
	header := make([]byte, headerBytes)
	for {
		err := c.SetReadDeadline(time.Now().Add(c.group.timeout))
		if err == nil {
			_, err = io.ReadFull(c.in, header)
		}
		if err != nil {
			if !c.group.isClosing() {
				c.lost(fmt.Errorf("read: %w", err))
			}
			return
		}
		switch f := parseFrame(header); f.kind {
		case kindBeat:
		case kindData:
			if !c.hand(f) {
				return
			}
		case kindBye:
			// The peer has all that it needs from here, and nothing follows: closing tells it that it can go. It is missed only by who
			// wants more of it.
			close(c.left)
			c.Close()
			return
		case kindAbort:
			c.aborted(int(f.rank))
			return
		default:
			c.lost(fmt.Errorf("%w: it sends a frame of kind %d, want 1 to %d", errDiffers, f.kind, kindAbort))
			return
		}
	}
}

// hand gives a data frame to the collective that wants it, and returns when its payload has been read; false = nobody ever will.
func (c *conn) hand(f frame) bool {
	select {
	case c.frames <- f:
	case <-c.group.closing:
		return false
	case <-c.group.done:
		return false
	}
	select {
	case <-c.taken:
		return true
	case <-c.group.done:
		return false
	}
}

// aborted is what a peer said before it went: because of whom.
func (c *conn) aborted(culprit int) {
	switch {
	case culprit == c.peer:
		c.lost(ErrAborted)
	case culprit == c.group.rank:
		c.lost(ErrGivenUp)
	case culprit < 0 || culprit >= c.group.world:
		c.lost(fmt.Errorf("%w because of rank %d, in a world of %d", ErrAborted, culprit, c.group.world))
	default:
		c.group.fail(&PeerError{culprit, fmt.Errorf("is lost, says rank %d", c.peer)})
	}
}

// beat says that this rank lives, as long as the group does.
func (c *conn) beat() {
	ticks := time.NewTicker(c.group.timeout / 4)
	defer ticks.Stop()
	for {
		select {
		case <-ticks.C:
		case <-c.over:
			return
		case <-c.group.done:
			return
		}
		if !c.write.TryLock() {
			continue // something else is being said
		}
		if !c.ended {
			frame{kind: kindBeat}.put(c.out)
			// A failure is the reader's to see.
			if n, err := c.Write(c.out[:headerBytes]); err != nil && n > 0 {
				c.ended = true
			}
		}
		c.write.Unlock()
	}
}

// tell writes the last frame of this side. A frame that is half written gets the moment to be completed, for nothing could follow a part
// of one; where none is, there is room for a header in nearly every case.
func (c *conn) tell(f frame, moment time.Duration) {
	if !c.write.TryLock() {
		c.SetWriteDeadline(time.Now().Add(moment))
		c.write.Lock()
	}
	defer c.write.Unlock()
	if c.ended {
		return
	}
	c.ended = true
	f.put(c.out)
	c.SetWriteDeadline(time.Now().Add(max(moment, 10*farewell)))
	c.Write(c.out[:headerBytes]) // a peer that cannot be told sees the connection end
}

// send sends a data frame of a collective.
func (c *conn) send(op operation, sequence uint64, payload []byte) error {
	if err := c.put(op, sequence, payload); err != nil {
		return c.unwritable(err)
	}
	return nil
}

func (c *conn) put(op operation, sequence uint64, payload []byte) (err error) {
	c.write.Lock()
	defer c.write.Unlock()
	if c.ended {
		return net.ErrClosed
	}
	frame{kind: kindData, op: op, length: uint32(len(payload)), sequence: sequence}.put(c.out)
	if len(payload) <= smallBytes {
		n := copy(c.out[headerBytes:], payload)
		_, err = c.Write(c.out[:headerBytes+n])
	} else {
		c.vector = [2][]byte{c.out[:headerBytes], payload}
		c.pieces = c.vector[:]
		_, err = c.pieces.WriteTo(c.Conn)
		c.vector[1] = nil
	}
	c.ended = err != nil
	return err
}

// receive waits for a data frame of the collective, and reads its payload, of exactly len(into) bytes, to where it belongs.
func (c *conn) receive(op operation, sequence uint64, into []byte) error {
	_, err := c.take(op, sequence, into, true)
	return err
}

// take is receive of any length up to len(into), unless it is to be exact.
func (c *conn) take(op operation, sequence uint64, into []byte, exact bool) (n int, err error) {
	var f frame
	select {
	case f = <-c.frames:
	case <-c.over:
		return 0, c.lost(net.ErrClosed) // unless it has said more
	case <-c.group.done:
		return 0, c.group.err
	}
	n = int(f.length)
	if f.op != op || f.sequence != sequence || n > len(into) || exact && n < len(into) {
		return 0, c.lost(fmt.Errorf("%w: it sends %d bytes for collective %d, %s, want %d for collective %d, %s; call the same ones with the same lengths in the same order",
			errDiffers, n, f.sequence, f.op, len(into), sequence, op))
	}
	if c.in.Buffered() < n {
		err = c.SetReadDeadline(time.Now().Add(c.group.timeout))
	}
	if err == nil {
		_, err = io.ReadFull(c.in, into[:n])
	}
	if err != nil {
		return 0, c.lost(fmt.Errorf("read: %w", err))
	}
	c.taken <- struct{}{}
	return n, nil
}

func (g *Group) isClosing() bool {
	select {
	case <-g.closing:
		return true
	default:
		return false
	}
}
