// Package store keeps the newest few minutes of samples in memory, for Prometheus' engine to query.
//
// It is no database: nothing is written anywhere, a restart begins empty, and what does not fit is dropped and counted.
package store

import (
	"sync"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/storage"
)

// Sample is one value of one series.
type Sample struct {
	Labels labels.Labels // with __name__
	Value  float64
	At     time.Time
}

// Config of a Store.
type Config struct {
	Retention time.Duration // samples older than this are dropped; 0 = 5 min
	MaxSeries int           // samples of more series than this are dropped and counted; 0 = 1,000,000
}

// Store is the window. It is a [storage.Queryable], safe for concurrent use.
type Store struct {
	cfg Config
	mu  sync.RWMutex
}

var _ storage.Queryable = (*Store)(nil)

// Stats of a Store.
type Stats struct {
	Series, Samples int    // held now
	OverLimit       uint64 // samples dropped because their series would have been more than MaxSeries
	Duplicates      uint64 // samples dropped because their series has one of that time
	OutOfOrder      uint64 // samples dropped because their series has a newer one
}

// New returns an empty store.
func New(cfg Config) *Store { return &Store{cfg: cfg} }

// Append adds samples of any series.
func (s *Store) Append(batch []Sample) {}

// Scrape adds one target's page, complete: series that the target had on its page before and has no longer get a
// staleness marker at the time given.
func (s *Store) Scrape(target string, at time.Time, batch []Sample) {}

// Vanish puts a staleness marker on all series of a target that is gone.
func (s *Store) Vanish(target string, at time.Time) {}

// MarkStale puts a staleness marker on the series for which match says yes.
func (s *Store) MarkStale(match func(labels.Labels) bool, at time.Time) {}

// Prune drops samples older than the retention, and series that have none.
func (s *Store) Prune(now time.Time) {}

// Stats returns counts.
func (s *Store) Stats() Stats { return Stats{} }

// Querier implements [storage.Queryable].
func (s *Store) Querier(mint, maxt int64) (storage.Querier, error) { return storage.NoopQuerier(), nil }
