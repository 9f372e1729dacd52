package agent

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// election is what one candidate knows of the lease. It decides; the loop below asks the API server. Only this process's clock counts:
// a lease is over when it has not changed for its duration before our own eyes.
type election struct {
	self  ring.ID
	name  string
	delay time.Duration // this candidate's turn, after a lease is free

	seen    Lease
	since   time.Time // when it was first seen so; zero = it was never read
	renewed time.Time // when our newest renewal that went through was begun; zero = we do not lead
}

// step is what is to be done with the lease.
type step int

const (
	wait step = iota
	read
	acquire
	renew
	depose // ourselves: we cannot renew, and another may believe that it can take over
)

// observe takes a lease in. A watch may tell late what was read already.
func (e *election) observe(l Lease, now time.Time) {
	switch {
	case l.Version == "" && e.seen.Version != "": // somebody has deleted it; terms go on rising
		e.seen, e.since = Lease{Transitions: e.seen.Transitions}, now
	case e.since.IsZero() || newer(l.Version, e.seen.Version):
		e.seen, e.since = l, now
	}
	if e.seen.Holder != e.name {
		e.renewed = time.Time{}
	}
}

// newer compares versions of one object: decimal numbers that rise (KEP-5504).
func newer(a, b string) bool { return len(a) > len(b) || len(a) == len(b) && a > b }

// next says what to do now, and when to ask again.
func (e *election) next(now time.Time) (step, time.Time) {
	due := func(s step, at time.Time) (step, time.Time) {
		if now.Before(at) {
			return wait, at
		}
		return s, now
	}
	switch {
	case e.since.IsZero():
		return read, now
	case e.seen.Holder == e.name && !e.renewed.IsZero() && !now.Before(e.renewed.Add(renewDeadline)):
		return depose, now
	case e.seen.Holder == e.name && e.renewed.IsZero():
		return renew, now
	case e.seen.Holder == e.name:
		return due(renew, e.renewed.Add(renewEvery))
	case e.predecessor():
		return acquire, now
	case e.seen.Holder == "":
		return due(acquire, e.since.Add(e.delay))
	}
	return due(acquire, e.since.Add(leaseDuration+e.delay))
}

// predecessor says that the holder is the process that was in this pod before, which is dead for certain.
func (e *election) predecessor() bool {
	holder := parseHolder(e.seen.Holder)
	return holder.Pod != "" && holder.Ordinal == e.self.Ordinal && holder.Pod == e.self.Pod && holder.Boot < e.self.Boot
}

// taken is the lease as this candidate would hold it.
func (e *election) taken(self Peer) Lease {
	l := Lease{Holder: e.name, Address: self.Address, Key: self.Key, Transitions: e.seen.Transitions, Version: e.seen.Version}
	if e.seen.Holder != e.name && (e.seen.Version != "" || e.seen.Transitions > 0) {
		l.Transitions++
	}
	return l
}

// term is the term of a lease's holder.
func (l Lease) term() uint32 { return uint32(l.Transitions) + 1 }

// elect takes part in the election until ctx is done, and then gives up what it holds.
func (k *Kubernetes) elect(ctx context.Context, deliver Deliver) {
	e := &election{self: k.cfg.Self.ID, name: k.name, delay: min(turns, max(0, time.Duration(k.cfg.Self.ID.Ordinal-k.cfg.FirstOrdinal))) * turn}
	leads := func() {} // ends this agent's term
	defer func() { leads() }()
	var known Lease // that was told
	var changes <-chan Lease
	watched := time.Time{}
	polled := time.Now()
	resigned := time.Time{} // not a candidate again before

	for {
		now := time.Now()
		what, again := e.next(now)
		if what == acquire && now.Before(resigned) {
			what, again = wait, resigned
		}
		var err error
		switch what {
		case read:
			err = k.readLease(ctx, e)
		case acquire, renew:
			err = k.takeLease(ctx, e, now)
			if errors.Is(err, ErrConflict) || errors.Is(err, ErrNotFound) {
				err = cmp.Or(k.readLease(ctx, e), err)
			}
		case depose:
			k.cfg.Logger.Warn("the lease could not be renewed in time: this agent coordinates no more")
			leads()
			k.held.set(0)
			e.renewed = time.Time{}
			known = Lease{}
			deliver(ring.Leader{Term: e.seen.term()})
		case wait:
			if now.Sub(polled) >= pollEvery {
				polled = now
				err = k.readLease(ctx, e)
			}
			again = earlier(again, polled.Add(pollEvery))
		}
		if err != nil {
			again = time.Now().Add(renewEvery / 4)
			k.complain(ctx, err)
		}
		if mine := e.seen.Holder == e.name; e.seen.Holder != known.Holder || mine && e.seen.Transitions != known.Transitions {
			switch {
			case mine && e.renewed.IsZero(): // the answer to our own write got lost: the next renewal makes it certain
			case e.predecessor(): // there is nobody to report to
			case mine:
				leads()
				var lead context.Context
				lead, leads = context.WithCancel(ctx)
				known = e.seen
				k.held.set(known.term())
				k.tasks <- task{term: known.term(), lead: lead}
			default:
				leads()
				k.held.set(0)
				known = e.seen
				id := parseHolder(known.Holder)
				deliver(ring.Leader{Term: known.term(), Holder: id}, Attached{Peers: []Peer{{ID: id, Address: known.Address, Key: known.Key}}})
			}
		}
		if changes == nil && time.Since(watched) >= renewEvery {
			watched = time.Now()
			if changes, err = k.cfg.Leases.WatchLease(ctx); err != nil {
				changes = nil
			}
		}
		if changes == nil { // then poll as client-go does
			again = earlier(again, time.Now().Add(renewEvery))
			polled = earlier(polled, time.Now().Add(renewEvery-pollEvery))
		}
		timer := time.NewTimer(time.Until(again))
		select {
		case l, open := <-changes:
			if !open {
				changes = nil
			} else {
				e.observe(l, time.Now())
			}
		case <-k.resigns:
			if !e.renewed.IsZero() {
				leads()
				k.release(ctx, e)
			}
			resigned = time.Now().Add(leaseDuration / 3) // let another one have it
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			leads()
			// Whoever left resigned before; the node has said so by now.
			if !e.renewed.IsZero() {
				k.release(context.WithoutCancel(ctx), e)
			}
			return
		}
		timer.Stop()
	}
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func (k *Kubernetes) readLease(ctx context.Context, e *election) error {
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	l, err := k.cfg.Leases.Lease(call)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	e.observe(l, time.Now())
	return nil
}

// takeLease gets or renews the lease, as of now.
func (k *Kubernetes) takeLease(ctx context.Context, e *election, now time.Time) error {
	l := e.taken(k.cfg.Self)
	if l.Version == "" {
		// Where the lease was deleted and the record was not, terms go on from the record's.
		s, err := k.readRecord(ctx)
		if err != nil {
			return err
		}
		l.Transitions = max(l.Transitions, int(s.Record.Generation.Term))
	}
	end := now.Add(callTimeout)
	if !e.renewed.IsZero() { // a call that hangs must not keep this agent from seeing that its time is over
		end = earlier(end, e.renewed.Add(renewDeadline))
	}
	call, cancel := context.WithDeadline(ctx, end)
	defer cancel()
	l, err := k.cfg.Leases.PutLease(call, l)
	if err != nil {
		return err
	}
	e.observe(l, now)
	e.renewed = now
	return nil
}

// complain logs that the lease cannot be had, unless another one was just faster.
func (k *Kubernetes) complain(ctx context.Context, err error) {
	if ctx.Err() == nil && !errors.Is(err, ErrConflict) {
		k.cfg.Logger.Warn("cannot read or write the lease; trying again", "error", err)
	}
}

// release frees the lease at once, so that nobody has to wait for its end.
func (k *Kubernetes) release(ctx context.Context, e *election) {
	free := e.seen
	free.Holder, free.Address, free.Key = "", "", ""
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if l, err := k.cfg.Leases.PutLease(call, free); err == nil {
		free = l
	} else {
		k.cfg.Logger.Warn("cannot release the lease; it will end by itself", "error", err)
	}
	e.seen, e.since, e.renewed = free, time.Now(), time.Time{}
}
