package gpu

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var noon = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

func near(a, b float64) bool { return math.Abs(a-b) < 1e-6 }

func TestMeter(t *testing.T) {
	at := func(s float64) time.Time { return noon.Add(time.Duration(s * float64(time.Second))) }
	us := func(s float64) uint64 { return uint64(s*1e6) + 1 }
	for name, c := range map[string]struct {
		run            func(m *meter)
		busy, observed float64
		discarded      uint64
	}{
		"the first reading spans no time": {func(m *meter) { m.rate(at(0), 100) }, 0, 0, 0},
		"a rate speaks for the time since the reading before": {func(m *meter) {
			m.rate(at(0), 0)
			m.rate(at(1), 50)
			m.rate(at(2), 100)
		}, 1.5, 2, 0},
		"samples weigh by how long they stand": {func(m *meter) {
			m.samples(at(0), []sample{{us(0), 0}})
			m.samples(at(1), []sample{{us(0.9), 100}, {us(1), 0}})
		}, 0.9, 1, 0},
		"samples seen before, and empty ones, count nothing": {func(m *meter) {
			m.samples(at(0), []sample{{us(0), 0}})
			m.samples(at(1), []sample{{us(0), 100}, {us(1), 50}, {0, 0}, {0, 99}})
		}, 0.5, 1, 0},
		"garbage is dropped": {func(m *meter) {
			m.samples(at(0), []sample{{us(0), 0}})
			m.samples(at(1), []sample{{us(0.5), 4294967295}, {us(1), 40}})
			m.rate(at(2), 101)
		}, 0.4, 1, 2},
		"a gap is not observed": {func(m *meter) {
			m.rate(at(0), 100)
			m.rate(at(60), 100)
			m.rate(at(61), 100)
		}, 1, 1, 0},
		"a frozen ring is no reading": {func(m *meter) {
			m.samples(at(0), []sample{{us(0), 100}})
			m.samples(at(1), []sample{{us(0), 100}})
			m.samples(at(2), []sample{{us(0), 100}})
		}, 0, 0, 0},
		"a clock that goes back counts nothing": {func(m *meter) {
			m.rate(at(5), 100)
			m.rate(at(4), 100)
			m.rate(at(5), 100)
		}, 1, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var m meter
			c.run(&m)
			if !near(m.busy, c.busy) || !near(m.observed, c.observed) || m.discarded != c.discarded {
				t.Errorf("busy %g, observed %g, discarded %d; want %g, %g, %d", m.busy, m.observed, m.discarded, c.busy, c.observed, c.discarded)
			}
		})
	}
}

// A GPU that follows a random step function, sampled without error at a steady rate, is integrated to what a naive sum of those
// steps gives; and whatever comes in, busy never exceeds observed, nor observed the time that went by.
func TestMeterAgainstANaiveSum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const step = 100 * time.Millisecond
		perRead := rapid.IntRange(1, 20).Draw(t, "samples between two readings")
		loads := rapid.SliceOfN(rapid.Uint32Range(0, 100), 2*perRead, 20*perRead).Draw(t, "loads")
		var m meter
		m.samples(noon, []sample{{1, 0}}) // the ring's clock starts at 1 µs
		var ring []sample
		naive, covered := 0.0, 0.0
		for i, load := range loads {
			ring = append(ring, sample{1 + uint64(i+1)*uint64(step.Microseconds()), load})
			if len(ring) == perRead {
				m.samples(noon.Add(time.Duration(i+1)*step), ring)
				for _, s := range ring {
					naive += float64(s.percent) / 100 * step.Seconds()
					covered += step.Seconds()
				}
				ring = nil
			}
		}
		if !near(m.busy, naive) || !near(m.observed, covered) {
			t.Fatalf("busy %g, observed %g; the sum is %g of %g", m.busy, m.observed, naive, covered)
		}
	})
	rapid.Check(t, func(t *rapid.T) {
		var m meter
		now, elapsed := noon, 0.0
		for range rapid.IntRange(1, 50).Draw(t, "readings") {
			before := m
			d := time.Duration(rapid.IntRange(-5000, 30000).Draw(t, "milliseconds")) * time.Millisecond
			now = now.Add(d)
			elapsed += max(d.Seconds(), 0)
			if rapid.Bool().Draw(t, "samples") {
				m.samples(now, rapid.SliceOf(rapid.Custom(func(t *rapid.T) sample {
					return sample{rapid.Uint64().Draw(t, "timestamp"), rapid.Uint32().Draw(t, "percent")}
				})).Draw(t, "ring"))
			} else {
				m.rate(now, rapid.Uint32Range(0, 200).Draw(t, "percent"))
			}
			if m.busy < before.busy || m.observed < before.observed || m.busy > m.observed+1e-9 || m.observed > elapsed+1e-9 {
				t.Fatalf("%+v after %+v in %g s", m, before, elapsed)
			}
		}
	})
}
