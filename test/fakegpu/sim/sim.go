// Package sim turns how busy the workers of a GPU are into what its driver would show. It is pure: time and shares come in, values go
// out, and no file is read.
package sim

import (
	"time"

	"github.com/capstan-gpu/capstan/test/fakegpu/state"
)

// What a driver does, and what an H100 takes.
const (
	samplePeriod = time.Second / 6 // between two entries of the ring
	ratePeriod   = time.Second     // that nvmlDeviceGetUtilizationRates looks back
	dryAfter     = 2 * time.Second // the ring of an idle GPU gets nothing new
	idlePower    = 0.1             // of the limit
	idleCelsius  = 32
	fullCelsius  = 78
	usedMemory   = 24 << 30 // bytes, while somebody holds the GPU and works
)

// Model is what is remembered of one GPU between steps. The zero value is a GPU that was never looked at.
type Model struct {
	last, lastSample, lastBusy time.Time
	since                      time.Duration // busy time since the last entry of the ring
	recent                     []stretch     // of the last second
	energy                     float64       // joules beyond those in the state file
}

// stretch is a time for which the GPU was busy to a share.
type stretch struct {
	length time.Duration
	share  float64
}

// Step brings a GPU to now. shares says how busy (0..1) it, or each of its MIG instances, was since the last step, by UUID. What is
// pinned stays as it is, and the ring gets it.
func (m *Model) Step(g *state.GPU, shares map[string]float64, now time.Time) {
	share := min(max(shares[g.UUID()], 0), 1)
	elapsed := now.Sub(m.last)
	if m.last.IsZero() || elapsed < 0 {
		elapsed = 0
	}
	if g.MIG != 0 {
		share = stepInstances(g, shares, elapsed)
	}
	if g.Pinned&state.PinUtilization != 0 {
		share = float64(g.Utilization) / 100
	}
	if m.last.IsZero() || now.Before(m.last) {
		m.last, m.lastSample = now, now
		return
	}
	m.last = now
	if share > 0 {
		m.lastBusy = now
	}
	m.since += time.Duration(share * float64(elapsed))
	m.recent = append(m.recent, stretch{elapsed, share})
	rate := m.rate()

	if whole := now.Sub(m.lastSample); whole >= samplePeriod {
		if idle := m.lastBusy.IsZero() || now.Sub(m.lastBusy) > dryAfter; !idle || g.Pinned&state.PinUtilization != 0 {
			g.Push(now, percent(m.since.Seconds()/whole.Seconds()))
		}
		m.since, m.lastSample = 0, now
	}
	if g.Pinned&state.PinUtilization == 0 {
		g.Utilization = percent(rate)
	}
	g.MemoryUtilization = g.Utilization / 2
	if g.Pinned&state.PinPower == 0 {
		limit := float64(g.PowerLimit)
		g.PowerMilliwatts = uint32(limit * (idlePower + rate*(1-idlePower)))
	}
	if g.Pinned&state.PinTemperature == 0 {
		g.Temperature = uint32(idleCelsius + rate*(fullCelsius-idleCelsius))
	}
	if g.Pinned&state.PinMemory == 0 {
		g.MemoryUsed = 0
		if !m.lastBusy.IsZero() && now.Sub(m.lastBusy) < 10*time.Second {
			g.MemoryUsed = usedMemory
		}
	}
	g.ClockMegahertz = [4]uint32{345, 345, 2619, 765}
	if rate > 0 {
		g.ClockMegahertz = [4]uint32{1980, 1980, 2619, 1545}
	}
	g.Activity.Advance(elapsed, share)
	stepFields(g, share, elapsed)
	m.energy += float64(g.PowerMilliwatts) * elapsed.Seconds()
	g.EnergyMillijoules += uint64(m.energy)
	m.energy -= float64(uint64(m.energy))
}

// stepInstances brings the instances of a GPU forward, and says how busy they made the whole.
func stepInstances(g *state.GPU, shares map[string]float64, elapsed time.Duration) (whole float64) {
	n := 0
	for i := range g.Instances {
		in := &g.Instances[i]
		if in.UUID() == "" {
			continue
		}
		n++
		share := min(max(shares[in.UUID()], 0), 1)
		whole += share
		in.Activity.Advance(elapsed, share)
		in.MemoryUsed = 0
		if share > 0 {
			in.MemoryUsed = in.MemoryTotal / 3
		}
	}
	return whole / float64(max(n, 1))
}

// What a busy GPU moves: bytes a second over PCIe and, in each direction, over NVLink.
const (
	pciePerSecond   = 4 << 30
	nvlinkPerSecond = 90 << 30
)

func stepFields(g *state.GPU, share float64, elapsed time.Duration) {
	part := share * elapsed.Seconds()
	g.AddField(state.FieldPCIeTransmit, uint64(part*pciePerSecond))
	g.AddField(state.FieldPCIeReceive, uint64(part*pciePerSecond/2))
	g.AddField(state.FieldNVLinkTransmit, uint64(part*nvlinkPerSecond/1024))
	g.AddField(state.FieldNVLinkReceive, uint64(part*nvlinkPerSecond/1024))
	if g.PowerMilliwatts > g.PowerLimit {
		g.AddField(state.FieldThrottlePower, uint64(elapsed.Nanoseconds()))
	}
	for i := range g.Fields {
		switch f := &g.Fields[i]; f.ID {
		case state.FieldPowerInstant:
			f.Value = uint64(g.PowerMilliwatts)
		case state.FieldMemoryTemp:
			f.Value = uint64(g.Temperature) + 4
		}
	}
}

// rate is the busy share of the last second, and forgets what is older.
func (m *Model) rate() float64 {
	var length time.Duration
	var busy float64
	for i := len(m.recent) - 1; i >= 0; i-- {
		s := m.recent[i]
		use := min(s.length, ratePeriod-length)
		length += use
		busy += s.share * float64(use)
		if length == ratePeriod {
			m.recent = m.recent[i:]
			break
		}
	}
	if length == 0 {
		return 0
	}
	return busy / float64(length)
}

func percent(share float64) uint32 { return uint32(100*min(max(share, 0), 1) + 0.5) }
