package allreduce

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	handshakeLimit = 5 * time.Second
	firstRetry     = 5 * time.Millisecond
	lastRetry      = 250 * time.Millisecond
	// strangers is how many connections that have not proved anything yet are listened to at a time, besides one for each rank.
	strangers = 64
)

// opening is an Open under way.
type opening struct {
	cfg     Config
	group   *Group
	stop    context.CancelCauseFunc
	working sync.WaitGroup

	mu      sync.Mutex
	lacking map[link]error // those that are not connected yet, with why
	refused error          // why the newest of those who spoke the protocol was, or else of all
	all     chan struct{}  // closed when none is lacking
}

func (g *Group) connect(ctx context.Context, cfg Config) error {
	called, callers := cfg.ends()
	o := &opening{cfg: cfg, group: g, lacking: map[link]error{}, all: make(chan struct{})}
	for _, l := range called {
		o.lacking[l] = errors.New("was not called yet")
	}
	for _, l := range callers {
		o.lacking[l] = errors.New("has not called")
	}
	if len(o.lacking) == 0 {
		return nil
	}
	ctx, o.stop = context.WithCancelCause(ctx)
	defer o.stop(nil)
	for _, l := range called {
		o.working.Go(func() { o.dial(ctx, l) })
	}
	if len(callers) > 0 {
		if err := cfg.Listener.SetDeadline(time.Time{}); err != nil {
			return fmt.Errorf("listen: %w", err)
		}
		o.working.Go(func() { o.accept(ctx, len(callers)) })
	}
	var err error
	select {
	case <-o.all:
	case <-g.done:
		err = g.err
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	o.stop(nil)
	if len(callers) > 0 {
		cfg.Listener.SetDeadline(time.Unix(1, 0)) // ends Accept, and leaves what comes from now on to the next Open
	}
	o.working.Wait()
	if err != nil {
		return o.explain(err)
	}
	return nil
}

// explain adds to why Open ended what was lacking then.
func (o *opening) explain(err error) error {
	var lacking []string
	for l, why := range o.lacking {
		lacking = append(lacking, fmt.Sprintf("rank %d %v", l.peer, why))
	}
	slices.Sort(lacking)
	lacking = slices.Compact(lacking)
	if o.refused != nil {
		lacking = append(lacking, fmt.Sprintf("of who called, the newest was refused: %v", o.refused))
	}
	return fmt.Errorf("%w; %s", err, strings.Join(lacking, "; "))
}

// dial calls a lower rank until it answers.
func (o *opening) dial(ctx context.Context, l link) {
	dial := o.cfg.Dial
	if dial == nil {
		dial = func(ctx context.Context, address string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", address)
		}
	}
	for wait := firstRetry; ctx.Err() == nil; wait = min(2*wait, lastRetry) {
		c, err := dial(ctx, o.cfg.Addresses[l.peer])
		if err == nil {
			end := context.AfterFunc(ctx, func() { c.Close() })
			err = call(c, o.cfg, l, time.Now().Add(handshakeLimit))
			if err == nil && !end() {
				err = context.Cause(ctx)
			}
			if err == nil {
				o.connected(l, c)
				return
			}
			end()
			c.Close()
			// Who differs for good ends the opening. A connection that breaks, or a listener that says nothing, may be one that is only
			// beginning, or one that has other things to do.
			if !errors.Is(err, errNotYet) && (errors.Is(err, ErrMismatch) || errors.Is(err, ErrKey) || errors.Is(err, errForeign)) {
				o.stop(&PeerError{l.peer, fmt.Errorf("at %s: %w", o.cfg.Addresses[l.peer], err)})
				return
			}
		}
		if ctx.Err() != nil {
			return
		}
		o.mu.Lock()
		o.lacking[l] = err
		o.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// accept hears who calls, until the listener's deadline.
func (o *opening) accept(ctx context.Context, callers int) {
	places := make(chan struct{}, callers+strangers)
	for {
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			return
		}
		c, err := o.cfg.Listener.Accept()
		if err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				o.stop(fmt.Errorf("listen: %w", err))
			}
			return
		}
		o.working.Go(func() {
			defer func() { <-places }()
			end := context.AfterFunc(ctx, func() { c.Close() })
			defer end()
			if err := o.hear(c, end); err != nil {
				c.Close()
				o.refuse(c.RemoteAddr(), err)
			}
		})
	}
}

func (o *opening) refuse(from net.Addr, err error) {
	err = fmt.Errorf("from %s: %w", from, err)
	o.mu.Lock()
	if o.refused == nil || errors.Is(err, ErrMismatch) || errors.Is(err, ErrKey) {
		o.refused = err
	}
	o.mu.Unlock()
	if o.cfg.Refused != nil {
		o.cfg.Refused(from, err)
	}
}

// hear admits a connection if it is one that is lacking. keep takes it out of what ends with the opening, false if it has ended.
func (o *opening) hear(c net.Conn, keep func() bool) error {
	lacking := func(l link) bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return l.peer > o.cfg.Rank && o.lacking[l] != nil
	}
	l, err := answer(c, o.cfg, lacking, time.Now().Add(handshakeLimit))
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.lacking[l] == nil {
		admit(c, notYet)
		return fmt.Errorf("%w: rank %d has called already", ErrMismatch, l.peer)
	}
	if err := admit(c, welcome); err != nil {
		return err
	}
	if !keep() {
		return errors.New("this rank has ended its opening")
	}
	o.have(l, c)
	return nil
}

func (o *opening) connected(l link, c net.Conn) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.have(l, c)
}

// have makes the connection part of the group; the caller holds the lock.
func (o *opening) have(l link, c net.Conn) {
	delete(o.lacking, l)
	o.group.add(l, c)
	if len(o.lacking) == 0 {
		close(o.all)
	}
}
