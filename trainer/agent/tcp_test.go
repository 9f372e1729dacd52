package agent

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// node is one end of a network on loopback.
type node struct {
	tcp  *TCP
	self Peer
	book *Book
	got  chan notice
	died chan ring.ID
	stop func()
	log  *buffer
}

// buffer is a log that may be read while it is written.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// await waits until the log says something.
func (b *buffer) await(t *testing.T, want string) {
	t.Helper()
	for begun := time.Now(); !strings.Contains(b.String(), want); time.Sleep(10 * time.Millisecond) {
		if time.Since(begun) > 10*time.Second {
			t.Errorf("the log says %q, want %q", b.String(), want)
			return
		}
	}
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func startNode(t *testing.T, job string, ordinal int, auth Authenticator) *node {
	t.Helper()
	identity, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	l := listen(t)
	n := &node{book: &Book{}, got: make(chan notice, 100), died: make(chan ring.ID, 100), log: &buffer{}}
	n.self = Peer{ID: ring.ID{Ordinal: ordinal, Pod: fmt.Sprintf("u%d", ordinal), Boot: 1}, Address: l.Addr().String(), Key: identity.Key()}
	n.tcp = NewTCP(TCPConfig{Job: job, Self: n.self, Identity: identity, Auth: auth, Book: n.book, Listener: l, Logger: slog.New(slog.NewTextHandler(n.log, nil))})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- n.tcp.Run(ctx, func(e ring.Event, with ...Attached) {
			if e == nil {
				n.died <- with[0].Died
			} else {
				n.got <- notice{e, with}
			}
		})
	}()
	n.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(n.stop)
	return n
}

func (n *node) send(to ring.ID, step int64, peers ...Peer) {
	n.tcp.Send(ring.Message{Job: "job-1", From: n.self.ID, To: to, Report: &ring.Report{Seq: uint64(step), Position: ring.Position{Step: step}}}, Attached{Peers: peers})
}

// receive returns the next message, or none within ten seconds.
func (n *node) receive() (ring.Message, []Peer, bool) { return n.within(10 * time.Second) }

// silence is how long nothing comes where nothing is to come.
const silence = 500 * time.Millisecond

func (n *node) within(d time.Duration) (ring.Message, []Peer, bool) {
	select {
	case got := <-n.got:
		return got.event.(ring.Message), got.with[0].Peers, true
	case <-time.After(d):
		return ring.Message{}, nil, false
	}
}

func secret(t *testing.T, s string) Authenticator {
	t.Helper()
	a, err := NewSecret([]byte(s))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

const good = "a secret of the job"

// A member knows the coordinator's name and ordinal only; the answer comes the same way back.
func TestTCP(t *testing.T) {
	coordinator, member := startNode(t, "job-1", 0, secret(t, good)), startNode(t, "job-1", 3, secret(t, good))
	_, port, _ := net.SplitHostPort(coordinator.self.Address)
	member.book.Learn(Peer{ID: ring.ID{Ordinal: 0}, Address: "localhost:" + port})
	for step := range int64(3) {
		member.send(ring.ID{Ordinal: 0}, step)
		m, _, ok := coordinator.receive()
		if !ok || m.From != member.self.ID || m.Report.Position.Step != step {
			t.Fatalf("report %d came as %+v, %t", step, m, ok)
		}
	}
	if got := coordinator.book.Peer(member.self.ID); got != member.self {
		t.Errorf("the coordinator knows %+v, want %+v", got, member.self)
	}
	member.book = nil // it is not dialed
	other := Peer{ID: ring.ID{Ordinal: 7, Pod: "u7", Boot: 1}, Address: "10.0.0.7:29400", Key: "k"}
	coordinator.send(member.self.ID, 42, other)
	m, peers, ok := member.receive()
	if !ok || m.From != coordinator.self.ID || m.Report.Position.Step != 42 || len(peers) != 1 || peers[0] != other {
		t.Errorf("the answer came as %+v, %v, %t", m, peers, ok)
	}
}

// A process that is dialed by its full name must be that one.
func TestTCPRefuses(t *testing.T) {
	ours := startNode(t, "job-1", 0, secret(t, good))
	for _, c := range []struct {
		name, job, secret string
		address           Peer
		ours, theirs      string // in the logs
	}{
		{"another secret", "job-1", "a secret of another", ours.self, "does not hold the job's secret", "it refuses"},
		{"another job", "job-2", good, ours.self, "this is another", "it refuses"},
		{"another process there", "job-1", good, Peer{ID: ring.ID{Ordinal: 0, Pod: "u0", Boot: 9}, Address: ours.self.Address}, "", "is 0 (pod u0, start 1) there"},
		{"another key there", "job-1", good, Peer{ID: ours.self.ID, Address: ours.self.Address, Key: "0123"}, "", "another key"},
		{"nowhere", "job-1", good, Peer{ID: ours.self.ID}, "", "not known yet"},
	} {
		t.Run(c.name, func(t *testing.T) {
			stray := startNode(t, c.job, 1, secret(t, c.secret))
			stray.book.Learn(c.address)
			stray.send(c.address.ID, 1)
			if m, _, ok := ours.within(silence); ok {
				t.Errorf("it is heard: %+v", m)
			}
			stray.log.await(t, c.theirs)
			ours.log.await(t, c.ours)
		})
		ours.log.mu.Lock()
		ours.log.b.Reset()
		ours.log.mu.Unlock()
		ours.tcp.mu.Lock()
		clear(ours.tcp.warns)
		ours.tcp.mu.Unlock()
	}
}

// Whoever is let in speaks for itself only; and what is no hello at all does no harm.
func TestTCPForged(t *testing.T) {
	ours, member := startNode(t, "job-1", 0, secret(t, good)), startNode(t, "job-1", 1, secret(t, good))
	member.book.Learn(ours.self)
	member.tcp.Send(ring.Message{Job: "job-1", From: ring.ID{Ordinal: 2, Pod: "u2", Boot: 1}, To: ours.self.ID, Report: &ring.Report{}}, Attached{})
	if m, _, ok := ours.within(silence); ok {
		t.Errorf("a member speaks for another: %+v", m)
	}
	ours.log.await(t, "not from its sender")
	for _, garbage := range []string{"", "GET / HTTP/1.1\r\n\r\n", "\x00\x00\x00\x02{}", strings.Repeat("\xff", 100)} {
		plain, err := net.Dial("tcp", ours.self.Address)
		if err != nil {
			t.Fatal(err)
		}
		plain.Write([]byte(garbage))
		plain.Close()
		identity, _ := NewIdentity()
		secure, err := tls.Dial("tcp", ours.self.Address, identity.config(func(string) error { return nil }))
		if err != nil {
			t.Fatal(err)
		}
		secure.Write([]byte(garbage))
		secure.Close()
	}
	member.send(ours.self.ID, 5)
	if m, _, ok := ours.receive(); !ok || m.Report.Position.Step != 5 {
		t.Errorf("after garbage, a report came as %+v, %t", m, ok)
	}
}

// A token goes only to one whose key was given by somebody to trust; with it, a member is let in, and its key is known from then on.
func TestTCPToken(t *testing.T) {
	cluster := newTokens(t)
	auth := cluster.authenticator(t) // of pod training-3, u3
	coordinator, member, stray := startNode(t, "job-1", 0, auth), startNode(t, "job-1", 3, auth), startNode(t, "job-1", 4, auth)
	unknown := coordinator.self
	unknown.Key = ""
	member.book.Learn(unknown)
	member.send(coordinator.self.ID, 1)
	if m, _, ok := coordinator.within(silence); ok {
		t.Errorf("a token was shown to an unknown key: %+v", m)
	}
	member.book.Learn(coordinator.self)
	member.send(coordinator.self.ID, 2)
	if m, _, ok := coordinator.receive(); !ok || m.From != member.self.ID {
		t.Fatalf("the member came as %+v, %t", m, ok)
	}
	stray.book.Learn(coordinator.self)
	stray.send(coordinator.self.ID, 3)
	if m, _, ok := coordinator.within(silence); ok && m.From == stray.self.ID {
		t.Errorf("a pod with another's token is heard: %+v", m)
	}
	// The coordinator passes the member's key on, and the member is let in by it where the API server is away.
	other := startNode(t, "job-1", 5, NewToken(TokenConfig{File: "/does/not/exist"}))
	other.book.Learn(coordinator.book.Peer(member.self.ID))
	member.book.Learn(other.self)
	member.send(other.self.ID, 4)
	if m, _, ok := other.receive(); !ok || m.From != member.self.ID {
		t.Errorf("the member came as %+v, %t", m, ok)
	}
}

// DNS that fails, as it does for a while after a pod starts again, does not hide a peer that was found once.
func TestTCPRemembersAddress(t *testing.T) {
	coordinator, member := startNode(t, "job-1", 0, secret(t, good)), startNode(t, "job-1", 1, secret(t, good))
	_, port, _ := net.SplitHostPort(coordinator.self.Address)
	member.book.Learn(Peer{ID: ring.ID{Ordinal: 0}, Address: "training-0.training:" + port})
	var down atomic.Bool
	lookups := make(chan bool, 100)
	member.tcp.lookup = func(context.Context, string) ([]string, error) {
		lookups <- down.Load()
		if down.Load() {
			return nil, errors.New("no such host")
		}
		return []string{"127.0.0.1"}, nil
	}
	member.send(ring.ID{Ordinal: 0}, 1)
	if _, _, ok := coordinator.receive(); !ok {
		t.Fatal("it is not found by its name")
	}
	down.Store(true)
	member.tcp.mu.Lock()
	member.tcp.boxes[ring.ID{Ordinal: 0}].conn.Close()
	member.tcp.mu.Unlock()
	for step := int64(2); ; step++ {
		member.send(ring.ID{Ordinal: 0}, step)
		if _, _, ok := coordinator.within(100 * time.Millisecond); ok {
			break
		}
		if step > 100 {
			t.Fatal("it is not found again while DNS fails")
		}
	}
	<-lookups
	if again := <-lookups; !again {
		t.Error("the second connection was not made while DNS failed")
	}
}

// The kernel tells at once that a process is dead; a connection that breaks says nothing.
func TestTCPDied(t *testing.T) {
	coordinator, member := startNode(t, "job-1", 0, secret(t, good)), startNode(t, "job-1", 1, secret(t, good))
	member.book.Learn(coordinator.self)
	member.send(coordinator.self.ID, 1)
	if _, _, ok := coordinator.receive(); !ok {
		t.Fatal("the member is not heard")
	}
	member.tcp.mu.Lock()
	member.tcp.boxes[coordinator.self.ID].conn.Close()
	member.tcp.mu.Unlock()
	select {
	case id := <-coordinator.died:
		t.Fatalf("%v is said to have died, and only a connection broke", id)
	case <-time.After(silence):
	}
	member.send(coordinator.self.ID, 2)
	if _, _, ok := coordinator.receive(); !ok {
		t.Fatal("the member is not heard again")
	}
	member.stop()
	select {
	case id := <-coordinator.died:
		if id != member.self.ID {
			t.Errorf("%v is said to have died, want %v", id, member.self.ID)
		}
	case <-time.After(5 * time.Second):
		t.Error("the death of the member was not told within 5 s")
	}
}

// A peer that dies and comes back at the same address is found again, and nothing waits for what was meant for the dead one.
func TestTCPReconnects(t *testing.T) {
	member := startNode(t, "job-1", 1, secret(t, good))
	l := listen(t)
	address := l.Addr().String()
	start := func(boot int64, l net.Listener) (got chan ring.Message, stop func()) {
		identity, err := NewIdentity()
		if err != nil {
			t.Fatal(err)
		}
		tcp := NewTCP(TCPConfig{Job: "job-1", Self: Peer{ID: ring.ID{Ordinal: 0, Pod: "u0", Boot: boot}, Address: address, Key: identity.Key()},
			Identity: identity, Auth: secret(t, good), Book: &Book{}, Listener: l, Logger: slog.New(slog.DiscardHandler)})
		got = make(chan ring.Message, 100)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			tcp.Run(ctx, func(e ring.Event, _ ...Attached) {
				if e != nil {
					got <- e.(ring.Message)
				}
			})
		}()
		return got, func() { cancel(); <-done }
	}
	member.book.Learn(Peer{ID: ring.ID{Ordinal: 0}, Address: address})
	got, stop := start(1, l)
	member.send(ring.ID{Ordinal: 0}, 1)
	<-got
	stop()
	for step := int64(2); ; step++ {
		member.send(ring.ID{Ordinal: 0}, step)
		if step == 5 {
			l, err := net.Listen("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			got, stop = start(2, l)
			defer stop()
		}
		select {
		case m := <-got:
			if step < 5 || m.From != member.self.ID {
				t.Errorf("at step %d came %+v", step, m)
			}
			return
		case <-time.After(50 * time.Millisecond):
		}
		if step > 200 {
			t.Fatal("the new process was not found within 10 s")
		}
	}
}

func FuzzFrame(f *testing.F) {
	var b bytes.Buffer
	writeFrame(&b, hello{Protocol: 1, Job: "job-1"})
	f.Add(b.Bytes())
	f.Add([]byte("\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, data []byte) {
		var h hello
		if err := readFrame(bytes.NewReader(data), 1000, &h); err == nil && (len(data) < 6 || data[0] != 0 || data[1] != 0) {
			t.Errorf("%q is taken for a frame", data)
		}
	})
}
