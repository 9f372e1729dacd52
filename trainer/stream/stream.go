// Package stream is a training job whose load can be turned up and down: one source offers numbered samples at a rate, workers
// pull their share, and each sample is counted once, whatever becomes of the workers.
//
// [Stream] is the account and decides everything: no goroutine, clock or socket, `now` is an argument. [Source] serves it over HTTP;
// [Worker] is a stand-in for a trainer: it computes nothing, it is busy for as long as computing would take.
// Nothing is kept on disk: a source that starts anew counts from 0, and refuses what workers still hold of the old one.
package stream

import (
	"errors"
	"fmt"
	"math"
	"sort"
	"time"
)

// Bounds of what a source takes.
const (
	MaxRate    = 1e6 // samples/s
	MaxBatch   = 100_000
	MaxWorkers = 1000
	MaxName    = 128 // bytes, of a worker's name
)

// ErrLate is the answer to a worker whose lease is no longer its own: it ran out and its samples went, or will go, to another worker.
var ErrLate = errors.New("the lease ran out and its samples are another worker's")

// Config is what a [Stream] needs. The zero value works.
type Config struct {
	Rate  float64       // samples/s offered at first
	Lease time.Duration // how long a worker may keep samples; 0 = 5 s
	Fill  time.Duration // how long a batch may wait to become full; 0 = 250 ms
}

// Lease is a run of samples, First to First+Count-1, that one worker has.
type Lease struct {
	ID     uint64
	Worker string
	First  int64
	Count  int64
}

// Grant is the answer to a pull.
type Grant struct {
	Ticket uint64
	Lease  Lease
}

// Status is the account at one moment. Offered = Completed + Backlog + Leased + Lost, always.
type Status struct {
	Rate       float64                 `json:"rate"`       // samples/s
	Offered    int64                   `json:"offered"`    // samples
	Completed  int64                   `json:"completed"`  // samples, each counted once
	Backlog    int64                   `json:"backlog"`    // samples that no worker has
	Leased     int64                   `json:"leased"`     // samples that some worker has
	Returned   int64                   `json:"returned"`   // samples that came back from a worker, so far
	Late       int64                   `json:"late"`       // samples whose completion was refused, so far: another worker does them
	Duplicates int64                   `json:"duplicates"` // samples completed twice
	Lost       int64                   `json:"lost"`       // samples that are nowhere
	Waiting    int                     `json:"waiting"`    // pulls that wait for samples
	Workers    map[string]WorkerStatus `json:"workers"`
}

// WorkerStatus is the part of the account that one worker's name has.
type WorkerStatus struct {
	Completed int64 `json:"completed"` // samples
	Leased    int64 `json:"leased"`    // samples
}

// Stream is the account. Its methods must not run at once; times must not go back (an earlier one counts as the newest seen).
type Stream struct {
	cfg Config
	now time.Time // newest seen

	rate  float64
	since time.Time // when rate was set
	base  int64     // samples offered until then

	offered   int64
	fresh     int64  // samples below were leased at least once
	returned  ranges // samples that came back, below fresh
	completed ranges
	leases    map[uint64]lease
	waiting   []wait // pulls, oldest first
	granted   time.Time
	workers   map[string]*worker

	ids                              uint64
	returnedCount, lateCount, double int64
}

type lease struct {
	Lease
	until time.Time
}

type wait struct {
	ticket uint64
	worker string
	max    int64
	since  time.Time
}

type worker struct {
	completed int64
	settled   [4]uint64 // leases that this name settled last, so that saying it again is no mistake
	next      int
}

// New returns a stream that begins to offer now.
func New(cfg Config, now time.Time) (*Stream, error) {
	if cfg.Lease == 0 {
		cfg.Lease = 5 * time.Second
	}
	if cfg.Fill == 0 {
		cfg.Fill = 250 * time.Millisecond
	}
	if cfg.Lease < 0 || cfg.Fill < 0 {
		return nil, fmt.Errorf("lease %s, fill %s: want more than 0", cfg.Lease, cfg.Fill)
	}
	if err := checkRate(cfg.Rate); err != nil {
		return nil, err
	}
	return &Stream{cfg: cfg, now: now, rate: cfg.Rate, since: now, granted: now, leases: map[uint64]lease{}, workers: map[string]*worker{}}, nil
}

func checkRate(rate float64) error {
	if math.IsNaN(rate) || rate < 0 || rate > MaxRate {
		return fmt.Errorf("rate %v: want 0 to %g samples/s", rate, float64(MaxRate))
	}
	return nil
}

// SetRate changes the rate, in samples/s, from now on.
func (s *Stream) SetRate(rate float64, now time.Time) error {
	if err := checkRate(rate); err != nil {
		return err
	}
	s.advance(now)
	s.rate, s.since, s.base = rate, s.now, s.offered
	return nil
}

// Pull asks for at most max samples for a worker. [Stream.Tick] answers, by the ticket. Pulls are served in their order, so that
// workers that wait get equal shares; a worker may have several.
func (s *Stream) Pull(name string, max int64, now time.Time) (ticket uint64, err error) {
	s.advance(now)
	switch {
	case name == "" || len(name) > MaxName:
		return 0, fmt.Errorf("worker name of %d bytes: want 1 to %d", len(name), MaxName)
	case max < 1 || max > MaxBatch:
		return 0, fmt.Errorf("pull of %d samples: want 1 to %d", max, MaxBatch)
	}
	if s.workers[name] == nil {
		if len(s.workers) >= MaxWorkers {
			return 0, fmt.Errorf("worker %q: there were %d workers already", name, MaxWorkers)
		}
		s.workers[name] = &worker{}
	}
	s.ids++
	s.waiting = append(s.waiting, wait{s.ids, name, max, s.now})
	return s.ids, nil
}

// Cancel takes a pull back that was not answered yet.
func (s *Stream) Cancel(ticket uint64) {
	for i, w := range s.waiting {
		if w.ticket == ticket {
			s.waiting = append(s.waiting[:i], s.waiting[i+1:]...)
			return
		}
	}
}

// Settle ends a lease: its first n samples are completed, the rest goes back. Settling the same again changes nothing. The error
// is [ErrLate] when the worker does not have the lease any more; then nothing is counted as completed.
func (s *Stream) Settle(id uint64, name string, n int64, now time.Time) error {
	s.advance(now)
	l, ok := s.leases[id]
	if !ok || l.Worker != name {
		if w := s.workers[name]; w != nil && id != 0 {
			for _, settled := range w.settled {
				if settled == id {
					return nil
				}
			}
		}
		s.lateCount += max(0, min(n, MaxBatch))
		return ErrLate
	}
	if n < 0 || n > l.Count {
		return fmt.Errorf("lease %d has %d samples; %d of them completed cannot be", id, l.Count, n)
	}
	delete(s.leases, id)
	s.double += s.completed.add(span{l.First, l.First + n})
	s.giveBack(span{l.First + n, l.First + l.Count})
	w := s.workers[name]
	w.completed += n
	w.settled[w.next] = id
	w.next = (w.next + 1) % len(w.settled)
	return nil
}

// Tick hands out what there is, and takes back what was kept too long. Call it often; 50 times a second is plenty.
func (s *Stream) Tick(now time.Time) (grants []Grant) {
	s.advance(now)
	for len(s.waiting) > 0 {
		w := s.waiting[0]
		backlog := s.offered - s.fresh + s.returned.total()
		begun := w.since // a batch begins to fill when its pull is the first, with nothing handed out since
		if s.granted.After(begun) {
			begun = s.granted
		}
		if backlog == 0 || backlog < w.max && s.now.Sub(begun) < s.cfg.Fill {
			break
		}
		s.waiting = s.waiting[1:]
		s.granted = s.now
		s.ids++
		l := Lease{ID: s.ids, Worker: w.worker}
		// What came back goes first: it has waited longest.
		if back, ok := s.returned.take(w.max); ok {
			l.First, l.Count = back.from, back.to-back.from
		} else {
			l.First, l.Count = s.fresh, min(w.max, s.offered-s.fresh)
			s.fresh += l.Count
		}
		s.leases[l.ID] = lease{l, s.now.Add(s.cfg.Lease)}
		grants = append(grants, Grant{w.ticket, l})
	}
	return grants
}

// Status is the account now.
func (s *Stream) Status(now time.Time) Status {
	s.advance(now)
	status := Status{Rate: s.rate, Offered: s.offered, Completed: s.completed.total(), Backlog: s.offered - s.fresh + s.returned.total(),
		Returned: s.returnedCount, Late: s.lateCount, Duplicates: s.double, Waiting: len(s.waiting), Workers: map[string]WorkerStatus{}}
	for name, w := range s.workers {
		status.Workers[name] = WorkerStatus{Completed: w.completed}
	}
	for _, l := range s.leases {
		status.Leased += l.Count
		w := status.Workers[l.Worker]
		w.Leased += l.Count
		status.Workers[l.Worker] = w
	}
	status.Lost = status.Offered - status.Completed - status.Backlog - status.Leased
	return status
}

// advance moves the clock: samples are offered, leases run out.
func (s *Stream) advance(now time.Time) {
	if now.After(s.now) {
		s.now = now
	}
	s.offered = max(s.offered, s.base+int64(s.rate*s.now.Sub(s.since).Seconds()))
	for id, l := range s.leases {
		if !s.now.Before(l.until) {
			delete(s.leases, id)
			s.giveBack(span{l.First, l.First + l.Count})
		}
	}
}

func (s *Stream) giveBack(r span) {
	s.returned.add(r)
	s.returnedCount += r.to - r.from
}

// span is the numbers from to to-1.
type span struct{ from, to int64 }

// ranges is a set of numbers: spans in order that do not touch each other.
type ranges []span

func (r ranges) total() (n int64) {
	for _, s := range r {
		n += s.to - s.from
	}
	return n
}

// add puts the numbers in and returns how many were there already.
func (r *ranges) add(s span) (already int64) {
	if s.from >= s.to {
		return 0
	}
	old := *r
	first := sort.Search(len(old), func(i int) bool { return old[i].to >= s.from })
	last, merged := first, s
	for ; last < len(old) && old[last].from <= s.to; last++ {
		already += max(0, min(old[last].to, s.to)-max(old[last].from, s.from))
		merged.from, merged.to = min(merged.from, old[last].from), max(merged.to, old[last].to)
	}
	rest := append(ranges{merged}, old[last:]...)
	*r = append(old[:first], rest...)
	return already
}

// take removes the lowest numbers, at most n of them and all in one span.
func (r *ranges) take(n int64) (span, bool) {
	if len(*r) == 0 {
		return span{}, false
	}
	s := (*r)[0]
	if s.to-s.from > n {
		(*r)[0].from = s.from + n
		return span{s.from, s.from + n}, true
	}
	*r = (*r)[1:]
	return s, true
}
