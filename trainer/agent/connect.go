package agent

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// dial keeps a connection to everybody for whom there is a message.
func (t *TCP) dial(ctx context.Context, group *sync.WaitGroup, deliver Deliver) {
	timer := time.NewTicker(dialRetry)
	defer timer.Stop()
	for {
		t.mu.Lock()
		for id, b := range t.boxes {
			for len(b.queue) > 0 && time.Since(b.queue[0].at) > deadAfter {
				b.queue = b.queue[1:]
			}
			if len(b.queue) > 0 && b.conn == nil && !b.dialing {
				b.dialing = true
				group.Go(func() { t.connect(ctx, id, b, deliver) })
			}
			if len(b.queue) == 0 && b.conn == nil && !b.dialing {
				delete(t.boxes, id)
			}
		}
		t.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-t.wake:
		case <-timer.C:
		}
	}
}

// connect dials one process and serves the connection.
func (t *TCP) connect(ctx context.Context, id ring.ID, b *outbox, deliver Deliver) {
	conn, peer, err := t.call(ctx, id, b)
	if err != nil {
		if ctx.Err() == nil {
			t.warn(id.String(), "no connection to a peer; trying again", "ordinal", id.Ordinal, "error", err)
			sleep(ctx, dialRetry)
		}
		t.mu.Lock()
		b.dialing = false
		t.mu.Unlock()
		nudge(t.wake)
		return
	}
	t.mu.Lock()
	b.dialing = false
	t.mu.Unlock()
	t.serve(ctx, conn, id, peer, deliver)
}

func (t *TCP) call(ctx context.Context, id ring.ID, b *outbox) (conn net.Conn, peer Peer, err error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	want := t.cfg.Book.Peer(id)
	if want.Address == "" {
		return nil, peer, errors.New("its address is not known yet")
	}
	if t.cfg.Auth.Bearer() && want.Key == "" {
		return nil, peer, errors.New("its key is not known yet, and a token goes to nobody whose key is not known")
	}
	raw, err := t.dialIP(ctx, want.Address, b)
	if err != nil {
		return nil, peer, err
	}
	defer func() {
		if err != nil {
			raw.Close()
		}
	}()
	var key string
	secure := tls.Client(raw, t.cfg.Identity.config(func(k string) error {
		if key = k; want.Key != "" && k != want.Key {
			return fmt.Errorf("%s has another key than %s: another process is there now", want.Address, id)
		}
		return nil
	}))
	if err = handshake(ctx, secure); err != nil {
		return nil, peer, err
	}
	channel, err := channel(secure)
	if err != nil {
		return nil, peer, err
	}
	proof, err := t.cfg.Auth.Prove(Claim{Job: t.cfg.Job, ID: t.cfg.Self.ID, Channel: channel})
	if err != nil {
		return nil, peer, fmt.Errorf("prove who this is: %w", err)
	}
	if err = writeFrame(secure, hello{Protocol: protocol, Job: t.cfg.Job, Peer: t.cfg.Self, Proof: proof}); err != nil {
		return nil, peer, err
	}
	var h hello
	if err = readFrame(secure, maxHello, &h); err != nil {
		return nil, peer, fmt.Errorf("read its hello: %w", err)
	}
	h.Peer.Key = key
	switch {
	case h.Refused != "":
		return nil, peer, fmt.Errorf("it refuses: %.200q", h.Refused)
	case h.Protocol != protocol || h.Job != t.cfg.Job:
		return nil, peer, fmt.Errorf("it is of job %.60q, protocol %d; want %q, %d", h.Job, h.Protocol, t.cfg.Job, protocol)
	case h.Peer.ID != id && (id.Pod != "" || h.Peer.ID.Ordinal != id.Ordinal):
		return nil, peer, fmt.Errorf("%s is %s there", want.Address, h.Peer.ID)
	}
	if !t.cfg.Auth.Bearer() { // else its key, which was given by one to trust, has shown who it is
		if err = t.cfg.Auth.Verify(ctx, Claim{Job: t.cfg.Job, ID: h.Peer.ID, Listens: true, Channel: channel}, h.Proof); err != nil {
			return nil, peer, fmt.Errorf("%s at %s: %w", h.Peer.ID, want.Address, err)
		}
	}
	return secure, h.Peer, secure.SetDeadline(time.Time{})
}

// dialIP dials a name's addresses, and the one that answered last if the name cannot be looked up just now: DNS lags behind pods.
func (t *TCP) dialIP(ctx context.Context, address string, b *outbox) (net.Conn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	last := b.lastIP
	t.mu.Unlock()
	lookup, cancel := context.WithTimeout(ctx, dialTimeout/2)
	ips, err := t.lookup(lookup, host)
	cancel()
	if last != "" {
		ips = append(ips, last)
	}
	if len(ips) == 0 {
		return nil, err
	}
	dialer := net.Dialer{Timeout: dialTimeout / 2, KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 5}}
	for _, ip := range ips {
		var conn net.Conn
		if conn, err = dialer.DialContext(ctx, "tcp", net.JoinHostPort(ip, port)); err == nil {
			limitSilence(conn)
			t.mu.Lock()
			b.lastIP = ip
			t.mu.Unlock()
			return conn, nil
		}
	}
	return nil, err
}

// accept finds out who called, and serves the connection.
func (t *TCP) accept(ctx context.Context, raw net.Conn, deliver Deliver, known func()) {
	limitSilence(raw)
	conn, peer, err := t.answer(ctx, raw)
	known()
	if err != nil {
		raw.Close()
		t.cfg.Logger.Debug("a connection came to nothing", "from", raw.RemoteAddr().String(), "error", err)
		return
	}
	t.serve(ctx, conn, peer.ID, peer, deliver)
}

func (t *TCP) answer(ctx context.Context, raw net.Conn) (conn net.Conn, peer Peer, err error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	var key string
	secure := tls.Server(raw, t.cfg.Identity.config(func(k string) error { key = k; return nil }))
	if err := handshake(ctx, secure); err != nil {
		return nil, peer, err
	}
	channel, err := channel(secure)
	if err != nil {
		return nil, peer, err
	}
	var h hello
	if err := readFrame(secure, maxHello, &h); err != nil {
		return nil, peer, err
	}
	h.Peer.Key = key
	if err := t.admit(ctx, h, channel); err != nil {
		host, _, _ := net.SplitHostPort(raw.RemoteAddr().String())
		t.warn("refused "+host, "refused a connection", "from", host, "error", err)
		writeFrame(secure, hello{Protocol: protocol, Refused: err.Error()})
		return nil, peer, err
	}
	reply := hello{Protocol: protocol, Job: t.cfg.Job, Peer: t.cfg.Self}
	if !t.cfg.Auth.Bearer() {
		if reply.Proof, err = t.cfg.Auth.Prove(Claim{Job: t.cfg.Job, ID: t.cfg.Self.ID, Listens: true, Channel: channel}); err != nil {
			return nil, peer, err
		}
	}
	if err := writeFrame(secure, reply); err != nil {
		return nil, peer, err
	}
	return secure, h.Peer, secure.SetDeadline(time.Time{})
}

// admit says why one who called is not let in.
func (t *TCP) admit(ctx context.Context, h hello, channel []byte) error {
	switch {
	case h.Protocol != protocol:
		return fmt.Errorf("protocol %d: this is %d", h.Protocol, protocol)
	case h.Job != t.cfg.Job:
		return fmt.Errorf("job %.60q: this is another", h.Job)
	case h.Peer.ID.Ordinal < 0 || h.Peer.ID.Pod == "" || h.Peer.ID.Boot < 1:
		return errors.New("it does not say which process it is")
	case t.cfg.Book.Peer(h.Peer.ID).Key == h.Peer.Key:
		return nil // one to trust has said that this is its key
	}
	return t.cfg.Auth.Verify(ctx, Claim{Job: t.cfg.Job, ID: h.Peer.ID, Channel: channel}, h.Proof)
}
