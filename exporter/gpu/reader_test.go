package gpu

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// script is a driver by hand: what each GPU's calls answer, and what opening does.
type script struct {
	openErr error
	opens   int
	gpus    []*scripted
}

// scripted is one GPU; codes overrides what a call answers, calls counts what was asked.
type scripted struct {
	id      string
	percent uint32
	codes   map[string]code
	calls   map[string]int
}

func newScripted(id string, percent uint32) *scripted {
	return &scripted{id: id, percent: percent, codes: map[string]code{"samples": notSupported}, calls: map[string]int{}}
}

func (s *script) open() error                 { s.opens++; return s.openErr }
func (s *script) close()                      {}
func (s *script) version() (string, code)     { return "580", success }
func (s *script) count() (int, code)          { return len(s.gpus), success }
func (s *script) device(i int) (device, code) { return s.gpus[i], s.gpus[i].code("handle") }

func (g *scripted) code(call string) code {
	g.calls[call]++
	return g.codes[call]
}
func (g *scripted) uuid() (string, code)             { return g.id, g.code("uuid") }
func (g *scripted) name() (string, code)             { return "model", g.code("name") }
func (g *scripted) minor() (int, code)               { return 0, g.code("minor") }
func (g *scripted) busID() (string, code)            { return "bus", g.code("busID") }
func (g *scripted) samples(uint64) ([]sample, code)  { return nil, g.code("samples") }
func (g *scripted) rates() (uint32, code)            { return g.percent, g.code("rates") }
func (g *scripted) memory() (u, r, t uint64, c code) { return 1, 2, 10, g.code("memory") }
func (g *scripted) memoryOld() (u, t uint64, c code) { return 3, 10, g.code("memoryOld") }
func (g *scripted) power() (uint32, code)            { return 250_000, g.code("power") }
func (g *scripted) energy() (uint64, code)           { return 5_000, g.code("energy") }
func (g *scripted) temperature() (uint32, code)      { return 40, g.code("temperature") }
func (g *scripted) clock(int) (uint32, code)         { return 1000, g.code("clock") }

// after makes readings a second apart and returns the last one, and the time of the next.
func after(r *Reader, from, seconds int) (last Reading) {
	for i := range seconds {
		last = r.Read(noon.Add(time.Duration(from+i) * time.Second))
	}
	return last
}

func TestReadsUnits(t *testing.T) {
	r := newReader(&script{gpus: []*scripted{newScripted("GPU-a", 50)}}, nil)
	d := after(r, 0, 11).Devices[0]
	if !d.Up || d.UtilizationSource != "rates" || *d.Utilization != 0.5 || !near(d.Busy, 5) || !near(d.Observed, 10) {
		t.Errorf("up %v by %q: %v, busy %g of %g; want rates, 0.5, 5 of 10", d.Up, d.UtilizationSource, *d.Utilization, d.Busy, d.Observed)
	}
	if *d.PowerWatts != 250 || *d.EnergyJoules != 5 || *d.TemperatureCelsius != 40 || d.ClockHertz["sm"] != 1e9 || *d.MemoryReserved != 2 {
		t.Errorf("power %v W, energy %v J, %v °C, sm %v Hz, reserved %v", *d.PowerWatts, *d.EnergyJoules, *d.TemperatureCelsius, d.ClockHertz["sm"], *d.MemoryReserved)
	}
}

func TestALostGPUCostsOnlyItself(t *testing.T) {
	a, b := newScripted("GPU-a", 100), newScripted("GPU-b", 100)
	r := newReader(&script{gpus: []*scripted{a, b}}, nil)
	after(r, 0, 5)
	b.codes["rates"] = gpuIsLost
	reading := after(r, 5, 10)
	if reading.Err != nil || len(reading.Devices) != 2 || !reading.Devices[0].Up || !near(reading.Devices[0].Busy, 14) {
		t.Fatalf("the healthy GPU: %+v, %v", reading.Devices[0], reading.Err)
	}
	if d := reading.Devices[1]; d.Up || d.Reason != "GPU_IS_LOST" || d.Utilization != nil || d.PowerWatts != nil || !near(d.Observed, 4) {
		t.Errorf("the lost GPU: %+v; want down, nothing known, 4 s observed", d)
	}
	if n := b.calls["power"]; n != 5 {
		t.Errorf("power of the lost GPU was asked %d times, want only the 5 before", n)
	}
	if want := (CallErrors{"GPU-b", "nvmlDeviceGetUtilizationRates", "GPU_IS_LOST", 2}); !slices.Contains(reading.Errors, want) {
		t.Errorf("errors %v lack %v: it is probed every 5 s", reading.Errors, want)
	}
	delete(b.codes, "rates")
	if d := after(r, 15, 10).Devices[1]; !d.Up || d.Reason != "" || *d.Utilization != 1 {
		t.Errorf("the GPU that is back: %+v", d)
	}
}

func TestUnsupportedIsAbsentAndAskedRarely(t *testing.T) {
	g := newScripted("GPU-a", 50)
	g.codes["rates"], g.codes["energy"], g.codes["memory"] = notSupported, functionMissing, notSupported
	r := newReader(&script{gpus: []*scripted{g}}, nil)
	reading := after(r, 0, 60)
	d := reading.Devices[0]
	if d.UtilizationSource != "" || d.Utilization != nil || d.Observed != 0 || d.EnergyJoules != nil || d.MemoryReserved != nil || *d.MemoryUsed != 3 {
		t.Errorf("%+v; want no utilization, no energy, memory by the old call", d)
	}
	if g.calls["rates"] != 1 || g.calls["energy"] != 1 || len(reading.Errors) != 0 {
		t.Errorf("asked %v, errors %v; want one time each and no error", g.calls, reading.Errors)
	}
	delete(g.codes, "rates") // MIG was switched off
	if d := after(r, 301, 3).Devices[0]; d.UtilizationSource != "rates" || d.Utilization == nil {
		t.Errorf("%+v; want rates again after %s", d, askAgain)
	}
}

func TestGarbageIsDroppedAndCounted(t *testing.T) {
	g := newScripted("GPU-a", 4294967295)
	r := newReader(&script{gpus: []*scripted{g}}, nil)
	d := after(r, 0, 5).Devices[0]
	if d.Utilization != nil || d.Observed != 0 || d.Discarded != 5 {
		t.Errorf("%+v; want nothing known and 5 discarded", d)
	}
}

func TestOpening(t *testing.T) {
	s := &script{openErr: ErrNoLibrary}
	r := newReader(s, nil)
	reading := after(r, 0, 60)
	if !errors.Is(reading.Err, ErrNoLibrary) || errors.Is(reading.Err, ErrRestart) || len(reading.Devices) != 0 {
		t.Errorf("without a library: %+v", reading)
	}
	if s.opens < 6 || s.opens > 12 {
		t.Errorf("tried %d times in a minute, want with back-off up to %s", s.opens, openAgainAtMost)
	}
	s.openErr, s.gpus = nil, []*scripted{newScripted("GPU-a", 50)}
	if reading = after(r, 60, 12); reading.Err != nil || len(reading.Devices) != 1 || reading.DriverVersion != "580" {
		t.Errorf("once the library is there: %+v", reading)
	}
}

func TestTheDriverGoes(t *testing.T) {
	for _, c := range []code{uninitialized, driverNotLoaded, versionMismatch} {
		g := newScripted("GPU-a", 50)
		s := &script{gpus: []*scripted{g}}
		r := newReader(s, nil)
		after(r, 0, 3)
		g.codes["rates"] = c
		reading := after(r, 3, 1)
		if !errors.Is(reading.Err, ErrRestart) || !strings.Contains(reading.Err.Error(), c.String()) {
			t.Errorf("%s in the middle: %v; want ErrRestart that names it", c, reading.Err)
		}
	}
}

func TestEveryCallFailsForLong(t *testing.T) {
	g := newScripted("GPU-a", 50)
	r := newReader(&script{gpus: []*scripted{g}}, nil)
	after(r, 0, 3)
	for _, call := range strings.Fields("samples rates memory power energy temperature clock") {
		g.codes[call] = unknown
	}
	if reading := after(r, 3, blindAtMost-1); reading.Err != nil {
		t.Fatalf("too early: %v", reading.Err)
	}
	if reading := after(r, 2+blindAtMost, 1); !errors.Is(reading.Err, ErrRestart) {
		t.Errorf("after %d blind readings: %v; want ErrRestart", blindAtMost, reading.Err)
	}
}

func TestCodes(t *testing.T) {
	for c, want := range map[code]string{success: "SUCCESS", gpuIsLost: "GPU_IS_LOST", 12345: "CODE_12345"} {
		if got := fmt.Sprint(c); got != want {
			t.Errorf("code %d is %s, want %s", int(c), got, want)
		}
	}
}
