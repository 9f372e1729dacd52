package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// TCPConfig is what a [TCP] needs. All fields are to be given.
type TCPConfig struct {
	Job      string
	Self     Peer
	Identity *Identity
	Auth     Authenticator
	Book     *Book
	Listener net.Listener // closed by Run
	Logger   *slog.Logger
}

// TCP carries messages over TLS 1.3, each as its length in four bytes and JSON. Whoever has a message for another process dials it, and
// answers come back the same way, so a member needs to find the coordinator only. A connection begins with one hello from each end, in
// which it says who it is and proves it; all messages on it must be from that one.
//
// The keys are made at the start of each process. What a proof is worth depends on the other's key: a token, which anybody who sees it
// could use, goes to a peer only if its key is the one that the lease or the coordinator gave.
type TCP struct {
	cfg    TCPConfig
	lookup func(ctx context.Context, host string) ([]string, error) // DNS
	wake   chan struct{}                                            // there is somebody to dial, perhaps

	mu    sync.Mutex
	boxes map[ring.ID]*outbox
	warns map[string]time.Time // when a problem was logged last
}

const (
	protocol     = 1
	maxHello     = 32 << 10
	maxFrame     = 8 << 20 // a commit of 4,096 members is a quarter of it
	maxPending   = 64      // connections that have not said who they are
	maxQueue     = 16      // messages for one process; the state is in each of them, so the oldest go
	dialTimeout  = 5 * time.Second
	dialRetry    = 250 * time.Millisecond
	deadAfter    = 5 * time.Second        // unacknowledged for so long, a connection is broken
	flushTimeout = 500 * time.Millisecond // at the end
)

// outbox is what waits for one process.
type outbox struct {
	queue   []queued
	wake    chan struct{}
	conn    net.Conn // takes from the queue; nil = none does
	dialing bool
	lastIP  string // that answered
}

type queued struct {
	data []byte
	at   time.Time
}

// NewTCP returns a transport. [TCP.Run] starts it.
func NewTCP(cfg TCPConfig) *TCP {
	return &TCP{cfg: cfg, lookup: net.DefaultResolver.LookupHost, wake: make(chan struct{}, 1), boxes: map[ring.ID]*outbox{}, warns: map[string]time.Time{}}
}

// Run accepts and dials connections until ctx is done.
func (t *TCP) Run(ctx context.Context, deliver Deliver) (err error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	// Connections outlive ctx by what it takes to send what is left.
	live, hangUp := context.WithCancel(context.WithoutCancel(ctx))
	defer hangUp()
	var group sync.WaitGroup
	group.Go(func() { t.dial(live, &group, deliver) })
	group.Go(func() {
		<-ctx.Done()
		t.cfg.Listener.Close()
		t.flush()
		hangUp()
	})
	pending := make(chan struct{}, maxPending)
	for ctx.Err() == nil {
		conn, failed := t.cfg.Listener.Accept()
		switch {
		case ctx.Err() != nil:
		case errors.Is(failed, net.ErrClosed):
			err = fmt.Errorf("listen %s: %w", t.cfg.Listener.Addr(), failed)
			stop()
		case failed != nil:
			t.warn("accept", "accepting a connection", "error", failed)
			sleep(ctx, 100*time.Millisecond)
		default:
			select {
			case pending <- struct{}{}:
				group.Go(func() { t.accept(live, conn, deliver, func() { <-pending }) })
			default:
				conn.Close() // whoever is meant to come tries again
			}
		}
	}
	group.Wait()
	return err
}

// Send queues a message.
func (t *TCP) Send(m ring.Message, with Attached) {
	data, err := json.Marshal(envelope{m, with})
	if err != nil {
		t.warn("encode", "a message that cannot be encoded", "error", err)
		return
	}
	if len(data) > maxFrame {
		t.warn("large", "a message is too large", "bytes", len(data), "bound", maxFrame)
		return
	}
	t.mu.Lock()
	b := t.box(m.To)
	b.queue = append(b.queue, queued{data, time.Now()})
	if n := len(b.queue) - maxQueue; n > 0 {
		b.queue = append(b.queue[:0:0], b.queue[n:]...)
	}
	t.mu.Unlock()
	nudge(b.wake)
	nudge(t.wake)
}

func (t *TCP) box(id ring.ID) *outbox {
	b := t.boxes[id]
	if b == nil {
		b = &outbox{wake: make(chan struct{}, 1)}
		t.boxes[id] = b
	}
	return b
}

func nudge(wake chan struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

// flush waits until what is queued for live connections is sent.
func (t *TCP) flush() {
	for end := time.Now().Add(flushTimeout); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		left := 0
		t.mu.Lock()
		for _, b := range t.boxes {
			if b.conn != nil {
				left += len(b.queue)
			}
		}
		t.mu.Unlock()
		if left == 0 {
			return
		}
	}
}

// serve reads and writes until the connection ends. box is whom the messages that it sends are for: the peer, or its ordinal.
func (t *TCP) serve(ctx context.Context, conn net.Conn, box ring.ID, peer Peer, deliver Deliver) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	t.cfg.Book.Learn(peer)
	t.mu.Lock()
	b := t.box(box)
	b.conn = conn // the newest connection is the one that is surely alive
	t.mu.Unlock()
	nudge(b.wake)
	reading := make(chan struct{})
	go func() {
		defer close(reading)
		t.read(conn, peer, deliver)
	}()
	t.write(conn, b, reading)
	conn.Close()
	<-reading
	t.mu.Lock()
	newest := b.conn == conn
	if newest {
		b.conn = nil
	}
	t.mu.Unlock()
	if newest && refuses(ctx, peer.Address) {
		deliver(nil, Attached{Died: peer.ID})
	}
}

// refuses says that nobody listens at an address though the machine is there: an agent listens as long as it lives. One that is being
// killed may close its listener a little after its connections.
func refuses(ctx context.Context, address string) bool {
	dialer := net.Dialer{Timeout: time.Second}
	for _, wait := range []time.Duration{0, 10 * time.Millisecond, 100 * time.Millisecond} {
		if !sleep(ctx, wait) {
			return false
		}
		conn, err := dialer.DialContext(ctx, "tcp", address)
		if err == nil {
			conn.Close()
		}
		if errors.Is(err, syscall.ECONNREFUSED) {
			return true
		}
	}
	return false
}

// read delivers what the peer says, until the connection ends.
func (t *TCP) read(conn net.Conn, peer Peer, deliver Deliver) {
	buffered := bufio.NewReader(conn)
	for {
		var e envelope
		if err := readFrame(buffered, maxFrame, &e); err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				t.cfg.Logger.Debug("a connection ended", "ordinal", peer.ID.Ordinal, "error", err)
			}
			return
		}
		if e.Message.From != peer.ID {
			t.warn("forged", "a message that is not from its sender", "sender", peer.ID.String(), "from", e.Message.From.String())
			return
		}
		deliver(e.Message, e.Attached)
	}
}

// write sends what is queued, until reading ends. When there is a newer connection, that one does.
func (t *TCP) write(conn net.Conn, b *outbox, reading <-chan struct{}) {
	for {
		t.mu.Lock()
		mine := b.conn == conn
		var data []byte
		if mine && len(b.queue) > 0 {
			data, b.queue = b.queue[0].data, b.queue[1:]
		}
		t.mu.Unlock()
		switch {
		case !mine:
			nudge(b.wake)
			<-reading
			return
		case data != nil:
			conn.SetWriteDeadline(time.Now().Add(deadAfter))
			if _, err := conn.Write(frame(data)); err != nil {
				return
			}
		default:
			select {
			case <-reading:
				return
			case <-b.wake:
			}
		}
	}
}

// warn logs a problem, the same one once a minute.
func (t *TCP) warn(key, message string, args ...any) {
	t.mu.Lock()
	now := time.Now()
	again := now.Sub(t.warns[key]) < time.Minute
	if !again {
		if len(t.warns) > 1000 {
			clear(t.warns)
		}
		t.warns[key] = now
	}
	t.mu.Unlock()
	if !again {
		t.cfg.Logger.Warn(message, args...)
	}
}
