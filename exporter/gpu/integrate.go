package gpu

import "time"

// sample is one reading of the driver's ring. Its clock is the driver's own and is only compared with itself: some drivers count from
// the machine's start, some from the epoch.
type sample struct {
	timestamp uint64 // microseconds
	percent   uint32
}

// How long a reading speaks for. Time beyond that is not observed: nobody knows what the GPU did.
const (
	sampleReach = 10 * time.Second // the ring holds at least that much
	rateReach   = 3 * time.Second  // a rate is that of the last second, or less
	countReach  = time.Minute      // performance counters miss nothing between two readings
)

// meter integrates a GPU's utilization into busy and observed time. The zero value has seen nothing.
// Invariant: 0 <= busy <= observed, both monotone, and observed grows by no more than the time between two readings.
type meter struct {
	busy, observed float64   // seconds
	last           time.Time // of the newest valid reading
	newest         uint64    // timestamp of the newest sample that was seen
	discarded      uint64    // readings above 100 %
}

// samples accounts for the time since the last reading by the ring's new samples: their mean, each weighing as long as it stands.
// It returns that mean (0..1), or false when there is no valid new sample; then nothing has changed but what was discarded.
func (m *meter) samples(now time.Time, ring []sample) (share float64, ok bool) {
	var sum, weights float64
	previous, newest := m.newest, m.newest
	for _, s := range ring {
		// go-nvml may return a tail of empty entries; the driver may repeat what it gave before.
		if s.timestamp == 0 || s.timestamp <= newest {
			continue
		}
		newest = s.timestamp
		if s.percent > 100 {
			m.discarded++
			continue
		}
		weight := 1.0 // the first one ever: nobody knows how long it stood
		if previous != 0 {
			weight = min(float64(s.timestamp-previous), float64(sampleReach.Microseconds()))
		}
		previous = s.timestamp
		sum += weight * float64(s.percent) / 100
		weights += weight
	}
	m.newest = newest
	if weights == 0 {
		return 0, false
	}
	share = sum / weights
	m.advance(now, share, sampleReach)
	return share, true
}

// rate accounts for the time since the last reading by one percentage. It returns the share, or false for one above 100.
func (m *meter) rate(now time.Time, percent uint32) (share float64, ok bool) {
	if percent > 100 {
		m.discarded++
		return 0, false
	}
	share = float64(percent) / 100
	m.advance(now, share, rateReach)
	return share, true
}

// counted accounts for the time since the last reading by the performance counters' percentage.
func (m *meter) counted(now time.Time, percent float64) (share float64, ok bool) {
	share, ok = clamped(percent)
	if !ok {
		m.discarded++
		return 0, false
	}
	m.advance(now, share, countReach)
	return share, true
}

// clamped is a percentage as a share. Counters may overshoot by a rounding; more than that, NaN and what is negative are garbage.
func clamped(percent float64) (share float64, ok bool) {
	if !(percent >= 0 && percent <= 101) {
		return 0, false
	}
	return min(percent/100, 1), true
}

func (m *meter) advance(now time.Time, share float64, reach time.Duration) {
	if elapsed := now.Sub(m.last); !m.last.IsZero() && elapsed > 0 && elapsed <= reach {
		m.observed += elapsed.Seconds()
		m.busy += min(share, 1) * elapsed.Seconds()
	}
	m.last = now
}

// activityMeter integrates the performance counters. The zero value has seen nothing. Its invariants are those of meter, for each metric.
type activityMeter struct {
	last     time.Time
	observed float64
	seconds  map[metric]float64 // of the metrics that this GPU has
	newest   map[metric]float64 // shares of the newest answer
	missed   int                // answers in a row that lacked one of them
}

// forgetAfter answers without a metric that was there before, it is taken to be gone for good.
const forgetAfter = 30

// add accounts for the time since the last reading. An answer that lacks a metric which was there before counts for none: all of them
// share one observed time. It returns false for garbage, which changes nothing.
func (m *activityMeter) add(now time.Time, s shares) bool {
	for id := range m.seconds {
		if _, ok := s[id]; !ok {
			if m.missed++; m.missed < forgetAfter {
				return true
			}
			delete(m.seconds, id)
		}
	}
	m.missed = 0
	for _, id := range metrics[1:] { // the first is no activity but the utilization itself
		if percent, ok := s[id]; ok {
			if _, ok := clamped(percent); !ok {
				return false
			}
		}
	}
	m.newest = map[metric]float64{}
	for id, percent := range s {
		if share, ok := clamped(percent); ok {
			m.newest[id] = share
		}
	}
	elapsed := now.Sub(m.last)
	counts := !m.last.IsZero() && elapsed > 0 && elapsed <= countReach
	m.last = now
	if m.seconds == nil {
		m.seconds = map[metric]float64{}
	}
	if counts {
		m.observed += elapsed.Seconds()
	}
	for _, id := range metrics[1:] {
		percent, ok := s[id]
		if !ok {
			continue
		}
		share, _ := clamped(percent)
		seconds := 0.0
		if counts {
			seconds = share * elapsed.Seconds()
		}
		m.seconds[id] += seconds
	}
	return true
}

// published is nil before the first answer.
func (m *activityMeter) published() *Activity {
	if m.last.IsZero() {
		return nil
	}
	at := func(of map[metric]float64, id metric) *float64 {
		if v, ok := of[id]; ok {
			return &v
		}
		return nil
	}
	return &Activity{Observed: m.observed, SM: at(m.seconds, smUtil), Tensor: at(m.seconds, tensorUtil), DRAM: at(m.seconds, dramUtil),
		Graphics: at(m.newest, graphicsUtil), SMRatio: at(m.newest, smUtil), TensorRatio: at(m.newest, tensorUtil), DRAMRatio: at(m.newest, dramUtil)}
}
