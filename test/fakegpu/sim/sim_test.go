package sim

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/capstan-gpu/capstan/test/fakegpu/state"
)

var noon = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

// whole is how busy a GPU without a name was.
func whole(share float64) map[string]float64 { return map[string]float64{"": share} }

// run steps a GPU ten times a second with each of the shares.
func run(g *state.GPU, shares ...float64) {
	var m Model
	for i, s := range append([]float64{0}, shares...) {
		m.Step(g, whole(s), noon.Add(time.Duration(i)*100*time.Millisecond))
	}
}

func repeat(n int, share float64) (all []float64) {
	for range n {
		all = append(all, share)
	}
	return all
}

func TestRateIsOfTheLastSecond(t *testing.T) {
	g := state.GPU{PowerLimit: 700_000}
	run(&g, append(repeat(50, 1), repeat(5, 0)...)...)
	if g.Utilization != 50 || g.PowerMilliwatts != 385_000 {
		t.Errorf("half a second after the load ended: %d %%, %d mW; want 50, 385000", g.Utilization, g.PowerMilliwatts)
	}
	run(&g, append(repeat(50, 1), repeat(20, 0)...)...)
	if g.Utilization != 0 || g.PowerMilliwatts != 70_000 {
		t.Errorf("two seconds after: %d %%, %d mW; want 0, 70000", g.Utilization, g.PowerMilliwatts)
	}
}

func TestTheRingOfAnIdleGPURunsDry(t *testing.T) {
	g := state.GPU{PowerLimit: 700_000}
	run(&g, repeat(100, 0)...)
	if g.SampleCount != 0 {
		t.Errorf("%d samples on a GPU that was never busy, want none", g.SampleCount)
	}
	run(&g, repeat(100, 0.3)...)
	if g.SampleCount < 45 || g.SampleCount > 65 {
		t.Errorf("%d samples in ten busy seconds, want about 50: one every second step", g.SampleCount)
	}
}

func TestPinnedStaysAndFillsTheRing(t *testing.T) {
	g := state.GPU{PowerLimit: 700_000, Utilization: 95, Pinned: state.PinUtilization}
	run(&g, repeat(100, 0)...)
	if g.Utilization != 95 || g.SampleCount == 0 {
		t.Errorf("%d %%, %d samples; want 95, and samples", g.Utilization, g.SampleCount)
	}
}

// Each instance has counters of its own, and the whole GPU is as busy as they are on average.
func TestInstances(t *testing.T) {
	g := state.GPU{PowerLimit: 700_000, MemoryTotal: 80 << 30}
	g.SetInstances("1g.10gb", "1g.10gb")
	var m Model
	for i := range 11 {
		m.Step(&g, map[string]float64{g.Instances[0].UUID(): 0.5}, noon.Add(time.Duration(i)*100*time.Millisecond))
	}
	if a, b, all := g.Instances[0].Activity, g.Instances[1].Activity, g.Activity; a.Graphics != 500_000 || a.SM != 400_000 || b != (state.Activity{}) || all.Graphics != 250_000 {
		t.Errorf("half a second of one of two instances: %+v, %+v, of the whole %+v", a, b, all)
	}
	if g.Instances[0].MemoryUsed == 0 || g.Instances[1].MemoryUsed != 0 {
		t.Errorf("memory used %d and %d; want the busy one's only", g.Instances[0].MemoryUsed, g.Instances[1].MemoryUsed)
	}
}

// Whatever the workers do, values stay in their ranges and energy is power over time.
func TestRangesAndEnergy(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := state.GPU{PowerLimit: 700_000}
		var m Model
		now, joules := noon, 0.0
		m.Step(&g, nil, now)
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			d := time.Duration(rapid.IntRange(1, 3000).Draw(t, "milliseconds")) * time.Millisecond
			now = now.Add(d)
			before := g.EnergyMillijoules
			m.Step(&g, whole(rapid.Float64Range(-1, 3).Draw(t, "share")), now)
			joules += float64(g.PowerMilliwatts) / 1000 * d.Seconds()
			if g.Utilization > 100 || g.PowerMilliwatts < 70_000 || g.PowerMilliwatts > 700_000 || g.Temperature > 78 || g.EnergyMillijoules < before {
				t.Fatalf("%d %%, %d mW, %d °C, energy %d → %d", g.Utilization, g.PowerMilliwatts, g.Temperature, before, g.EnergyMillijoules)
			}
		}
		if math.Abs(float64(g.EnergyMillijoules)/1000-joules) > 0.01 {
			t.Fatalf("energy %d mJ, power over time is %g J", g.EnergyMillijoules, joules)
		}
	})
}
