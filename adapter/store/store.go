// Package store keeps the newest few minutes of samples in memory, for Prometheus' engine to query.
//
// It is no database: nothing is written anywhere, a restart begins empty, and what does not fit is dropped and counted.
// It does not decide which of two exporters to believe, nor which families are worth keeping: the collector does.
//
// A sample costs 16 bytes, in a ring per series that grows to what the retention needs. A series costs its labels (one
// string) and about 150 bytes.
package store

import (
	"math"
	"sync"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/storage"
)

// Sample is one value of one series.
type Sample struct {
	Labels labels.Labels // with __name__; copied when the series is new, so the scrape's buffer is not kept alive
	Value  float64
	At     time.Time // kept to the millisecond
}

// Config of a Store.
type Config struct {
	// Retention is how far back a series reaches from its own newest sample, and from now at each Prune. Rules that look
	// back further see less than they ask for: take the longest rules.Rule.Lookback and a few scrapes. 0 = 5 min.
	Retention time.Duration
	// MaxSeries bounds the memory. A sample that would begin one more series is dropped and counted. 0 = 1,000,000.
	MaxSeries int
}

// Stats of a Store.
type Stats struct {
	Series, Samples int    // held now
	OverLimit       uint64 // samples dropped because their series would have been more than MaxSeries
	Duplicates      uint64 // samples dropped because their series has one of that time
	OutOfOrder      uint64 // samples dropped because their series has a newer one
}

// Store is the window. It is a [storage.Queryable], safe for concurrent use; queriers see what was there when they
// selected, and hold up nobody.
type Store struct {
	maxSeries int

	mu        sync.RWMutex // protects all following fields
	retention int64        // ms
	byHash    map[uint64][]*series
	byName    map[string][]*series
	targets   map[string]*target
	stats     Stats
}

var _ storage.Queryable = (*Store)(nil)

type sample struct {
	t int64 // ms
	v float64
}

type series struct {
	labels labels.Labels
	hash   uint64

	target *target // whose page it was last on; nil where it came by Append
	scrape uint64  // the target's scrape that it was last on

	// The samples are ring[(head+i) % len(ring)] for i < n, times strictly rising.
	ring    []sample
	head, n int32
}

type target struct {
	scrape uint64    // number of its newest scrape
	series []*series // those that were on its page then, and perhaps some that another target took over since
}

// New returns an empty store.
func New(cfg Config) *Store {
	if cfg.Retention <= 0 {
		cfg.Retention = 5 * time.Minute
	}
	if cfg.MaxSeries <= 0 {
		cfg.MaxSeries = 1_000_000
	}
	return &Store{
		retention: cfg.Retention.Milliseconds(),
		maxSeries: cfg.MaxSeries,
		byHash:    map[uint64][]*series{},
		byName:    map[string][]*series{},
		targets:   map[string]*target{},
	}
}

// Retain changes the retention, from the next sample of a series on.
func (s *Store) Retain(retention time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.retention = retention.Milliseconds()
}

// Append adds samples of any series. A sample that is not newer than its series' newest is dropped and counted.
func (s *Store) Append(batch []Sample) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range batch {
		s.add(&batch[i], nil)
	}
}

// Scrape adds one target's page, complete: a series that was on the target's page before and is no longer gets a
// staleness marker at the time given, so that an instant selector finds it no more. A series that another target has
// taken over in the meantime is left alone.
func (s *Store) Scrape(name string, at time.Time, batch []Sample) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.targets[name]
	if t == nil {
		t = &target{}
		s.targets[name] = t
	}
	t.scrape++
	for i := range batch {
		s.add(&batch[i], t)
	}
	s.sweep(t, at)
}

// Vanish puts a staleness marker on all series of a target that is gone, and forgets the target.
func (s *Store) Vanish(name string, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t := s.targets[name]; t != nil {
		t.scrape++
		s.sweep(t, at)
		delete(s.targets, name)
	}
}

// sweep marks the series of t that were not on its newest scrape, and lets go of them.
func (s *Store) sweep(t *target, at time.Time) {
	keep := t.series[:0]
	for _, x := range t.series {
		switch {
		case x.target != t: // taken over
		case x.scrape == t.scrape:
			keep = append(keep, x)
		default:
			s.stale(x, at)
			x.target = nil
		}
	}
	clear(t.series[len(keep):])
	t.series = keep
}

// MarkStale puts a staleness marker on the series for which match says yes. It looks at every series.
func (s *Store) MarkStale(match func(labels.Labels) bool, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, list := range s.byName {
		for _, x := range list {
			if match(x.labels) {
				s.stale(x, at)
			}
		}
	}
}

func (s *Store) stale(x *series, at time.Time) {
	if x.n == 0 || value.IsStaleNaN(x.newest().v) {
		return
	}
	s.push(x, sample{max(at.UnixMilli(), x.newest().t+1), math.Float64frombits(value.StaleNaN)})
}

// Prune drops samples older than the retention, and series that have none.
func (s *Store) Prune(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	oldest := now.UnixMilli() - s.retention
	for name, list := range s.byName {
		keep := list[:0]
		for _, x := range list {
			s.drop(x, oldest)
			if x.n > 0 {
				keep = append(keep, x)
				continue
			}
			s.stats.Series--
			s.unhash(x)
			x.target = nil // its target's list lets go of it with the next sweep
		}
		clear(list[len(keep):])
		if len(keep) == 0 {
			delete(s.byName, name)
		} else {
			s.byName[name] = keep
		}
	}
}

// Stats returns counts.
func (s *Store) Stats() Stats {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.stats
}

func (s *Store) add(in *Sample, t *target) {
	at := in.At.UnixMilli()
	hash := in.Labels.Hash()
	var x *series
	for _, y := range s.byHash[hash] {
		if labels.Equal(y.labels, in.Labels) {
			x = y
			break
		}
	}
	if x == nil {
		if s.stats.Series >= s.maxSeries {
			s.stats.OverLimit++
			return
		}
		x = &series{labels: in.Labels.Copy(), hash: hash}
		s.byHash[hash] = append(s.byHash[hash], x)
		name := x.labels.Get(model.MetricNameLabel)
		s.byName[name] = append(s.byName[name], x)
		s.stats.Series++
	}
	if t != nil {
		if x.target != t {
			x.target = t
			t.series = append(t.series, x)
		}
		x.scrape = t.scrape
	}
	if x.n > 0 {
		switch newest := x.newest().t; {
		case at == newest:
			s.stats.Duplicates++
			return
		case at < newest:
			s.stats.OutOfOrder++
			return
		}
	}
	s.push(x, sample{at, in.Value})
}

// push adds a sample that is newer than all of x, and drops those that are out of the retention thereby.
func (s *Store) push(x *series, new sample) {
	s.drop(x, new.t-s.retention)
	if int(x.n) == len(x.ring) {
		ring := make([]sample, max(4, len(x.ring)+(len(x.ring)+1)/2)) // by half: a ring settles after few growths, with little to spare
		for i := range x.n {
			ring[i] = x.at(i)
		}
		x.ring, x.head = ring, 0
	}
	x.ring[(int(x.head)+int(x.n))%len(x.ring)] = new
	x.n++
	s.stats.Samples++
}

// drop drops x's samples older than oldest.
func (s *Store) drop(x *series, oldest int64) {
	for x.n > 0 && x.at(0).t < oldest {
		x.head = (x.head + 1) % int32(len(x.ring))
		x.n--
		s.stats.Samples--
	}
}

func (s *Store) unhash(x *series) {
	list := s.byHash[x.hash]
	for i, y := range list {
		if y == x {
			list[i] = list[len(list)-1]
			list = list[:len(list)-1]
			break
		}
	}
	if len(list) == 0 {
		delete(s.byHash, x.hash)
	} else {
		s.byHash[x.hash] = list
	}
}

func (x *series) at(i int32) sample { return x.ring[(int(x.head)+int(i))%len(x.ring)] }
func (x *series) newest() sample    { return x.at(x.n - 1) }
