package store

import (
	"context"
	"slices"
	"sort"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/util/annotations"
)

// Querier implements [storage.Queryable]: samples from mint to maxt, both included, in Unix milliseconds.
func (s *Store) Querier(mint, maxt int64) (storage.Querier, error) {
	return &querier{s, mint, maxt}, nil
}

type querier struct {
	store      *Store
	mint, maxt int64
}

// Select copies what matches, so that nothing is locked while the engine computes.
func (q *querier) Select(ctx context.Context, sorted bool, hints *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	mint, maxt := q.mint, q.maxt
	if hints != nil && !hints.DisableTrimming {
		mint, maxt = max(mint, hints.Start), min(maxt, hints.End)
	}

	q.store.mu.RLock()
	type found struct {
		labels   labels.Labels
		from, to int // in slab
	}
	var hits []found
	var slab []sample
	q.store.match(matchers, func(x *series) {
		from := len(slab)
		for i := range x.n {
			if v := x.at(i); mint <= v.t && v.t <= maxt {
				slab = append(slab, v)
			}
		}
		if len(slab) > from {
			hits = append(hits, found{x.labels, from, len(slab)})
		}
	})
	q.store.mu.RUnlock()

	if err := ctx.Err(); err != nil {
		return storage.ErrSeriesSet(err)
	}
	if sorted {
		slices.SortFunc(hits, func(a, b found) int { return labels.Compare(a.labels, b.labels) })
	}
	set := &seriesSet{at: -1, list: make([]seriesView, len(hits))}
	for i, h := range hits {
		set.list[i] = seriesView{h.labels, slab[h.from:h.to:h.to]}
	}
	return set
}

// match calls f for each series that all matchers match. The caller holds mu.
func (s *Store) match(matchers []*labels.Matcher, f func(*series)) {
	each := func(list []*series) {
	series:
		for _, x := range list {
			for _, m := range matchers {
				if !m.Matches(x.labels.Get(m.Name)) {
					continue series
				}
			}
			f(x)
		}
	}
	for i, m := range matchers {
		if m.Name == model.MetricNameLabel && m.Type == labels.MatchEqual {
			list := s.byName[m.Value]
			matchers = append(slices.Clone(matchers[:i]), matchers[i+1:]...)
			each(list)
			return
		}
	}
	for _, list := range s.byName {
		each(list)
	}
}

func (q *querier) LabelValues(_ context.Context, name string, hints *storage.LabelHints, matchers ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return q.collect(hints, matchers, func(l labels.Labels, add func(string)) {
		if v := l.Get(name); v != "" {
			add(v)
		}
	})
}

func (q *querier) LabelNames(_ context.Context, hints *storage.LabelHints, matchers ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return q.collect(hints, matchers, func(l labels.Labels, add func(string)) {
		l.Range(func(l labels.Label) { add(l.Name) })
	})
}

// collect gathers strings of the series that have a sample between mint and maxt.
func (q *querier) collect(hints *storage.LabelHints, matchers []*labels.Matcher, of func(labels.Labels, func(string))) ([]string, annotations.Annotations, error) {
	seen := map[string]struct{}{}
	q.store.mu.RLock()
	q.store.match(matchers, func(x *series) {
		for i := range x.n {
			if t := x.at(i).t; q.mint <= t && t <= q.maxt {
				of(x.labels, func(v string) { seen[v] = struct{}{} })
				return
			}
		}
	})
	q.store.mu.RUnlock()
	out := make([]string, 0, len(seen))
	for v := range seen {
		out = append(out, v)
	}
	sort.Strings(out)
	if hints != nil && hints.Limit > 0 && len(out) > hints.Limit {
		out = out[:hints.Limit]
	}
	return out, nil, nil
}

func (q *querier) Close() error { return nil }

type seriesSet struct {
	list []seriesView
	at   int
}

func (s *seriesSet) Next() bool                        { s.at++; return s.at < len(s.list) }
func (s *seriesSet) At() storage.Series                { return &s.list[s.at] }
func (s *seriesSet) Err() error                        { return nil }
func (s *seriesSet) Warnings() annotations.Annotations { return nil }

type seriesView struct {
	labels  labels.Labels
	samples []sample
}

func (s *seriesView) Labels() labels.Labels { return s.labels }

func (s *seriesView) Iterator(it chunkenc.Iterator) chunkenc.Iterator {
	if it, ok := it.(*iterator); ok {
		*it = iterator{samples: s.samples, at: -1}
		return it
	}
	return &iterator{samples: s.samples, at: -1}
}

// iterator walks floats; this store has no histograms.
type iterator struct {
	samples []sample
	at      int
}

func (it *iterator) Next() chunkenc.ValueType {
	it.at++
	return it.here()
}

func (it *iterator) Seek(t int64) chunkenc.ValueType {
	it.at = max(it.at, 0)
	if it.at < len(it.samples) && it.samples[it.at].t < t {
		rest := it.samples[it.at:]
		it.at += sort.Search(len(rest), func(i int) bool { return rest[i].t >= t })
	}
	return it.here()
}

func (it *iterator) here() chunkenc.ValueType {
	if it.at < len(it.samples) {
		return chunkenc.ValFloat
	}
	it.at = len(it.samples)
	return chunkenc.ValNone
}

func (it *iterator) At() (int64, float64) { return it.samples[it.at].t, it.samples[it.at].v }
func (it *iterator) AtT() int64           { return it.samples[it.at].t }
func (it *iterator) AtST() int64          { return 0 }
func (it *iterator) Err() error           { return nil }

func (it *iterator) AtHistogram(*histogram.Histogram) (int64, *histogram.Histogram) {
	panic("store: a histogram was asked for, there are only floats")
}

func (it *iterator) AtFloatHistogram(*histogram.FloatHistogram) (int64, *histogram.FloatHistogram) {
	panic("store: a histogram was asked for, there are only floats")
}
