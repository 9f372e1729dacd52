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
	events  []event

	forgotten []string
}

// scripted is one GPU; codes overrides what a call answers, calls counts what was asked.
type scripted struct {
	id      string
	percent uint32
	codes   map[string]code
	calls   map[string]int

	given    map[uint32]value // by field
	counters map[string]shares
	parts    []instance
	running  []process
	worked   []processSample
}

func newScripted(id string, percent uint32) *scripted {
	return &scripted{id: id, percent: percent, codes: map[string]code{"samples": notSupported}, calls: map[string]int{}}
}

func (s *script) open() error                      { s.opens++; return s.openErr }
func (s *script) close()                           {}
func (s *script) version() (string, code)          { return "580", success }
func (s *script) count() (int, code)               { return len(s.gpus), success }
func (s *script) device(i int) (device, code)      { return s.gpus[i], s.gpus[i].code("handle") }
func (s *script) watch(d device, uuid string) code { return d.(*scripted).code("watch") }
func (s *script) forget(key string)                { s.forgotten = append(s.forgotten, key) }
func (s *script) event() (event, code) {
	if len(s.events) == 0 {
		return event{}, timeout
	}
	e := s.events[0]
	s.events = s.events[1:]
	return e, success
}

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
func (g *scripted) powerLimit() (uint32, code)       { return 700_000, g.code("powerLimit") }
func (g *scripted) processes(mps bool) ([]process, code) {
	if mps {
		return nil, g.code("processesMPS")
	}
	return g.running, g.code("processes")
}
func (g *scripted) processSamples(uint64) ([]processSample, code) {
	return g.worked, g.code("processSamples")
}
func (g *scripted) encoder() (uint32, code)       { return 5, g.code("encoder") }
func (g *scripted) decoder() (uint32, code)       { return 6, g.code("decoder") }
func (g *scripted) controller() (uint32, code)    { return 7, g.code("controller") }
func (g *scripted) replays() (uint32, code)       { return 8, g.code("replays") }
func (g *scripted) instances() ([]instance, code) { return g.parts, g.code("instances") }
func (g *scripted) fields(ask []field) (all []value, c code) {
	for _, f := range ask {
		v, ok := g.given[f.id]
		if !ok {
			v.code = notSupported
		}
		all = append(all, v)
	}
	return all, g.code("fields")
}
func (g *scripted) activity(key string, _ int) (shares, code) {
	s, ok := g.counters[key]
	if !ok {
		g.calls["activity"]++
		return nil, notSupported
	}
	return s, g.code("activity")
}

// after makes readings a second apart and returns the last one, and the time of the next.
func after(r *Reader, from, seconds int) (last Reading) {
	for i := range seconds {
		last = r.Read(noon.Add(time.Duration(from+i) * time.Second))
	}
	return last
}

func TestReadsUnits(t *testing.T) {
	r := newReader(&script{gpus: []*scripted{newScripted("GPU-a", 50)}}, Config{Detail: true})
	d := after(r, 0, 11).Devices[0]
	if !d.Up || d.UtilizationSource != "rates" || *d.Utilization != 0.5 || !near(d.Busy, 5) || !near(d.Observed, 10) {
		t.Errorf("up %v by %q: %v, busy %g of %g; want rates, 0.5, 5 of 10", d.Up, d.UtilizationSource, *d.Utilization, d.Busy, d.Observed)
	}
	if *d.PowerWatts != 250 || *d.EnergyJoules != 5 || *d.TemperatureCelsius != 40 || d.ClockHertz["sm"] != 1e9 || *d.PowerLimitWatts != 700 || fmt.Sprint(d.EngineUtilization) != "map[decoder:0.06 encoder:0.05 memory:0.07]" || *d.PCIeReplays != 8 || *d.MemoryReserved != 2 {
		t.Errorf("power %v W, energy %v J, %v °C, sm %v Hz, reserved %v", *d.PowerWatts, *d.EnergyJoules, *d.TemperatureCelsius, d.ClockHertz["sm"], *d.MemoryReserved)
	}
}

func TestALostGPUCostsOnlyItself(t *testing.T) {
	a, b := newScripted("GPU-a", 100), newScripted("GPU-b", 100)
	r := newReader(&script{gpus: []*scripted{a, b}}, Config{Detail: true})
	after(r, 0, 5)
	b.codes["rates"] = gpuIsLost
	reading := after(r, 5, 10)
	if reading.Err != nil || len(reading.Devices) != 2 || !reading.Devices[0].Up || !near(reading.Devices[0].Busy, 14) {
		t.Fatalf("the healthy GPU: %+v, %v", reading.Devices[0], reading.Err)
	}
	if d := reading.Devices[1]; d.Up || d.Reason != "GPU_IS_LOST" || d.Utilization != nil || d.PowerWatts != nil || !near(d.Observed, 4) {
		t.Errorf("the lost GPU: %+v; want down, nothing known, 4 s observed", d)
	}
	if n := b.calls["memory"]; n != 5 {
		t.Errorf("memory of the lost GPU was asked %d times, want only the 5 before", n)
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
	r := newReader(&script{gpus: []*scripted{g}}, Config{Detail: true})
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

// A GPU that is added is found within half a minute, and the others go on.
func TestAddedGPU(t *testing.T) {
	s := &script{gpus: []*scripted{newScripted("GPU-a", 100)}}
	r := newReader(s, Config{})
	after(r, 0, 10)
	s.gpus = append(s.gpus, newScripted("GPU-b", 50))
	d := after(r, 10, 31).Devices
	if len(d) != 2 || !near(d[0].Busy, 40) || d[1].UUID != "GPU-b" || d[1].Observed < 9 || !near(d[1].Busy, d[1].Observed/2) {
		t.Errorf("%+v; want GPU-a busy for 40 s, and GPU-b half busy since it was found", d)
	}
}

// polarsignals/gpu-metrics-agent#37: the ring of an idle GPU runs dry, which is no gap: the rate of the last second speaks.
func TestADryRingIsNoGap(t *testing.T) {
	g := newScripted("GPU-a", 0)
	g.codes["samples"] = notFound
	reading := after(newReader(&script{gpus: []*scripted{g}}, Config{}), 0, 11)
	if d := reading.Devices[0]; d.UtilizationSource != "samples" || !near(d.Observed, 10) || d.Busy != 0 || *d.Utilization != 0 || len(reading.Errors) != 0 {
		t.Errorf("%+v, errors %v; want 10 s observed and idle", d, reading.Errors)
	}
}

// HAMi#1089, gpud#1170: a GPU that shares the machine's memory (GB10) has none of its own to tell of. That costs the GPU nothing else.
func TestUnifiedMemory(t *testing.T) {
	g := newScripted("GPU-a", 50)
	g.codes["memory"], g.codes["memoryOld"] = notSupported, notSupported
	reading := after(newReader(&script{gpus: []*scripted{g}}, Config{}), 0, 11)
	if d := reading.Devices[0]; d.MemoryUsed != nil || d.MemoryTotal != nil || !d.Up || !near(d.Busy, 5) || d.PowerWatts == nil || len(reading.Errors) != 0 {
		t.Errorf("%+v, errors %v; want all but memory", d, reading.Errors)
	}
}

// dcgm-exporter#599: eight H200 in 56 instances took ten cores. What a pass costs is counted here: four calls an instance and no more,
// and the inventory twice a minute.
func TestFiftySixInstances(t *testing.T) {
	s := &script{}
	for i := range 8 {
		g := newScripted(fmt.Sprint("GPU-", i), 0)
		g.codes["rates"] = notSupported
		g.counters = map[string]shares{g.id: {graphicsUtil: 50, smUtil: 50}}
		for k := range 7 {
			id := fmt.Sprintf("MIG-%d-%d", i, k)
			g.counters[id] = shares{graphicsUtil: float64(10 * k), smUtil: 5}
			g.parts = append(g.parts, instance{device: g, id: id, profile: "1g.18gb", gpuInstance: k})
		}
		s.gpus = append(s.gpus, g)
	}
	r := newReader(s, Config{})
	reading := after(r, 0, 60)
	for i, d := range reading.Devices {
		for k, in := range d.Instances {
			if want := 59 * float64(k) / 10; !near(in.Busy, want) || !near(in.Observed, 59) {
				t.Errorf("GPU %d, instance %d: busy %g of %g, want %g of 59", i, k, in.Busy, in.Observed, want)
			}
		}
		if calls := s.gpus[i].calls; calls["activity"] != 8*60 || calls["memory"] != 8*60 || calls["instances"] != 2 {
			t.Errorf("GPU %d: %v; want 480 of the counters and of the memory, 2 inventories", i, calls)
		}
	}
}

func TestGarbageIsDroppedAndCounted(t *testing.T) {
	g := newScripted("GPU-a", 4294967295)
	r := newReader(&script{gpus: []*scripted{g}}, Config{Detail: true})
	reading := after(r, 0, 5)
	want := []CallErrors{{"GPU-a", "nvmlDeviceGetUtilizationRates", "OUT_OF_RANGE", 5}}
	if d := reading.Devices[0]; d.Utilization != nil || d.Observed != 0 || !slices.Equal(reading.Errors, want) {
		t.Errorf("%+v, errors %v; want nothing known and %v", d, reading.Errors, want)
	}
}

func TestFieldsHaveCodesAndUnitsOfTheirOwn(t *testing.T) {
	g := newScripted("GPU-a", 50)
	g.given = map[uint32]value{
		74:  {number: 2.5e9},               // throttled, ns
		138: {number: 3}, 139: {number: 4}, // NVLink, KiB
		197: {number: 5, narrow: true},           // a PCIe counter that wraps ten times a second
		186: {number: 300_000}, 82: {number: 41}, // mW, °C
		4: {number: 1}, 3: {code: unknown}, // ECC: one is good, the other is not
		145: {number: 1}, 230: {number: 2}, // no spare row, reboot the node
	}
	r := newReader(&script{gpus: []*scripted{g}}, Config{Detail: true})
	reading := after(r, 0, 2)
	d := reading.Devices[0]
	if d.ThrottledSeconds["power_cap"] != 2.5 || len(d.ThrottledSeconds) != 1 || d.NVLinkBytes["transmit"] != 3072 || d.NVLinkBytes["receive"] != 4096 {
		t.Errorf("throttled %v s, NVLink %v bytes", d.ThrottledSeconds, d.NVLinkBytes)
	}
	if d.PCIeBytes != nil {
		t.Errorf("PCIe %v of a counter of 32 bits, want nothing", d.PCIeBytes)
	}
	if *d.PowerInstantWatts != 300 || *d.MemoryTemperatureCelsius != 41 || !*d.RowRemapFailed || d.RowRemapPending != nil || *d.RecoveryAction != 2 {
		t.Errorf("%+v %+v", d.Gauges, d.Health)
	}
	if d.ECCErrors["uncorrected"] != 1 || len(d.ECCErrors) != 1 {
		t.Errorf("ECC %v, want only what is known", d.ECCErrors)
	}
	if want := []CallErrors{{"GPU-a", "nvmlDeviceGetFieldValues(3)", "UNKNOWN", 1}}; !slices.Equal(reading.Errors, want) {
		t.Errorf("errors %v, want %v", reading.Errors, want)
	}
}

func TestDearCallsRarely(t *testing.T) {
	g := newScripted("GPU-a", 50)
	g.given = map[uint32]value{4: {}, 74: {}, 82: {}, 186: {}}
	r := newReader(&script{gpus: []*scripted{g}}, Config{Detail: true})
	reading := after(r, 0, 60)
	// Fields: counters and detail every 5 s, health every 30 s.
	for call, want := range map[string]int{"rates": 60, "memory": 60, "power": 12, "clock": 24, "fields": 2*12 + 2, "uuid": 2, "instances": 2} {
		if g.calls[call] != want {
			t.Errorf("%s was called %d times in a minute, want %d", call, g.calls[call], want)
		}
	}
	for _, c := range reading.Costs {
		if c.Call == "nvmlDeviceGetMemoryInfo_v2" && c.Count == 60 {
			return
		}
	}
	t.Errorf("costs %v lack 60 nvmlDeviceGetMemoryInfo_v2", reading.Costs)
}

func TestDetailOnRequestOnly(t *testing.T) {
	g := newScripted("GPU-a", 50)
	g.given = map[uint32]value{186: {number: 1}, 142: {}}
	d := after(newReader(&script{gpus: []*scripted{g}}, Config{}), 0, 5).Devices[0]
	if d.PowerInstantWatts != nil || d.PowerLimitWatts != nil || d.EngineUtilization != nil || d.PCIeReplays != nil || d.RemappedRows != nil {
		t.Errorf("%+v; want no detail", d.Detail)
	}
	for _, call := range []string{"encoder", "decoder", "controller", "replays", "powerLimit"} {
		if g.calls[call] != 0 {
			t.Errorf("%s was called %d times, want never", call, g.calls[call])
		}
	}
}

func TestPerformanceCounters(t *testing.T) {
	g := newScripted("GPU-a", 50)
	g.counters = map[string]shares{"GPU-a": {graphicsUtil: 90, smUtil: 60, dramUtil: 30}}
	r := newReader(&script{gpus: []*scripted{g}}, Config{Detail: true})
	d := after(r, 0, 11).Devices[0]
	if d.UtilizationSource != "rates" || !near(d.Busy, 5) {
		t.Errorf("busy %g by %q; want 5 by rates: the counters only add to them", d.Busy, d.UtilizationSource)
	}
	if a := d.Activity; !near(a.Observed, 10) || !near(*a.SM, 6) || !near(*a.DRAM, 3) || a.Tensor != nil {
		t.Errorf("activity %+v; want 10 s, 6 s, 3 s, no tensor", a)
	}
	g.counters["GPU-a"] = shares{graphicsUtil: 90, smUtil: 6000, dramUtil: 30}
	reading := after(r, 11, 5)
	if d = reading.Devices[0]; !near(d.Activity.Observed, 10) || !near(*d.Activity.SM, 6) || !slices.Equal(reading.Errors, []CallErrors{{"GPU-a", "nvmlGpmMetricsGet", "OUT_OF_RANGE", 1}}) {
		t.Errorf("garbage: %+v, %v; want nothing counted but the errors", d.Activity, reading.Errors)
	}
	g.counters["GPU-a"] = shares{graphicsUtil: 90, dramUtil: 30}
	if d = after(r, 16, 5).Devices[0]; !near(d.Activity.Observed, 10) {
		t.Errorf("without one of the metrics: %+v; want nothing counted", d.Activity)
	}
}

func TestMIG(t *testing.T) {
	g := newScripted("GPU-a", 0)
	s := &script{gpus: []*scripted{g}}
	r := newReader(s, Config{Detail: true})
	after(r, 0, 3)
	// MIG is switched on: the whole has no utilization but by the counters, and each instance has its own.
	g.codes["rates"] = notSupported
	g.counters = map[string]shares{"GPU-a": {graphicsUtil: 40}, "MIG-1": {graphicsUtil: 100, smUtil: 50}, "MIG-2": {graphicsUtil: 0, smUtil: 0}}
	g.parts = []instance{{device: g, id: "MIG-1", profile: "1g.10gb", gpuInstance: 7}, {device: g, id: "MIG-2", profile: "1g.10gb", gpuInstance: 8}}
	d := after(r, 30, 12).Devices[0] // the inventory is taken at 30 s
	if !d.MIG || d.UtilizationSource != "gpm" || *d.Utilization != 0.4 || len(d.Instances) != 2 {
		t.Fatalf("%+v; want MIG, 0.4 by gpm, 2 instances", d)
	}
	if in := d.Instances[0]; in.UUID != "MIG-1" || in.Profile != "1g.10gb" || in.UtilizationSource != "gpm" || !near(in.Busy, 11) || !near(in.Observed, 11) || *in.MemoryUsed != 1 {
		t.Errorf("the busy instance: %+v", in)
	}
	if in := d.Instances[1]; !near(in.Busy, 0) || !near(in.Observed, 11) {
		t.Errorf("the idle instance: %+v; 0 is known of it", in)
	}
	// One is taken away: its handle is no argument any more, and the inventory is taken at once, not in half a minute.
	g.codes["memory"] = invalidArgument
	after(r, 42, 1)
	delete(g.codes, "memory")
	g.parts = g.parts[:1]
	if d = after(r, 43, 1).Devices[0]; len(d.Instances) != 1 || !slices.Equal(s.forgotten, []string{"MIG-2"}) {
		t.Errorf("%d instances, forgotten %v; want MIG-2 gone", len(d.Instances), s.forgotten)
	}
}

// A divided GPU that is lost when it is first seen: its instances are known as soon as it answers, not half a minute later.
func TestInstancesOfAGPUThatComesBack(t *testing.T) {
	g := newScripted("GPU-a", 0)
	g.codes["rates"], g.codes["instances"], g.codes["memory"] = gpuIsLost, gpuIsLost, gpuIsLost
	g.counters = map[string]shares{"MIG-1": {graphicsUtil: 100}}
	g.parts = []instance{{device: g, id: "MIG-1", profile: "3g.40gb", gpuInstance: 1}}
	r := newReader(&script{gpus: []*scripted{g}}, Config{})
	if d := after(r, 0, 3).Devices[0]; d.Up || len(d.Instances) != 0 {
		t.Fatalf("%+v; want it lost", d)
	}
	g.codes["rates"] = notSupported
	delete(g.codes, "instances")
	delete(g.codes, "memory")
	if d := after(r, 3, 5).Devices[0]; !d.Up || len(d.Instances) != 1 {
		t.Errorf("%+v; want it back with its instance", d)
	}
}

// On an A100 nothing tells how busy a MIG instance is: that is absent, not 0.
func TestMIGWithoutCounters(t *testing.T) {
	g := newScripted("GPU-a", 0)
	g.codes["rates"] = notSupported
	g.parts = []instance{{device: g, id: "MIG-1", profile: "3g.40gb", gpuInstance: 1}}
	d := after(newReader(&script{gpus: []*scripted{g}}, Config{Detail: true}), 0, 5).Devices[0]
	if in := d.Instances[0]; d.UtilizationSource != "" || in.UtilizationSource != "" || in.Utilization != nil || in.Observed != 0 || in.MemoryTotal == nil {
		t.Errorf("%+v, %+v; want no utilization, but memory", d, in)
	}
}

func TestProcesses(t *testing.T) {
	g := newScripted("GPU-a", 50)
	g.running = []process{{10, 1 << 30}, {20, 1<<64 - 1}, {30, 5}}
	asked := 0
	r := newReader(&script{gpus: []*scripted{g}}, Config{PodOf: func(pid uint32) string { asked++; return map[uint32]string{10: "u1", 20: "u2"}[pid] }})
	after(r, 0, 10)
	// Ten seconds later: 10 was busy to a half, 20 not at all, 40 is a dead process that the driver still reports.
	g.worked = []processSample{{10, 1000, 40}, {10, 2000, 60}, {40, 1500, 90}, {10, 1500, 4_000_000_000}}
	d := after(r, 10, 9).Devices[0]
	if len(d.Processes) != 3 || d.ProcessesObserved != 10 {
		t.Fatalf("%+v, observed %g; want 3 processes, 10 s", d.Processes, d.ProcessesObserved)
	}
	p, q, s := d.Processes[0], d.Processes[1], d.Processes[2]
	if p.PID != 10 || p.PodUID != "u1" || !near(p.Busy, 5) || *p.Memory != 1<<30 {
		t.Errorf("%+v; want 5 s busy of u1, 1 GiB", p)
	}
	if q.PodUID != "u2" || q.Busy != 0 || q.Memory != nil {
		t.Errorf("%+v; want nothing known of its memory", q)
	}
	if s.PodUID != "" {
		t.Errorf("%+v; want a process of no pod", s)
	}
	// The same samples again say nothing new, and who it is is asked once.
	if d = after(r, 20, 5).Devices[0]; !near(d.Processes[0].Busy, 5) || d.ProcessesObserved != 20 || asked != 3 {
		t.Errorf("%+v, observed %g, asked %d times", d.Processes[0], d.ProcessesObserved, asked)
	}
	g.running, g.codes["processSamples"] = g.running[1:], notFound // nobody was busy
	if d = after(r, 30, 5).Devices[0]; len(d.Processes) != 2 || d.ProcessesObserved != 30 {
		t.Errorf("%+v, observed %g; want 2 processes, and that they were idle", d.Processes, d.ProcessesObserved)
	}
	if g.calls["processes"] != 4 {
		t.Errorf("the list was read %d times in 35 s, want 4", g.calls["processes"])
	}
	quiet := newScripted("GPU-a", 50)
	if d := after(newReader(&script{gpus: []*scripted{quiet}}, Config{}), 0, 20).Devices[0]; d.Processes != nil || quiet.calls["processes"] != 0 {
		t.Error("processes are read although nobody asked for them")
	}
}

func TestXIDs(t *testing.T) {
	g := newScripted("GPU-a", 50)
	s := &script{gpus: []*scripted{g}, events: []event{{"GPU-a", 79}, {"GPU-a", 79}, {"GPU-gone", 13}, {"GPU-a", 48}}}
	r := newReader(s, Config{Detail: true})
	if d := after(r, 0, 1).Devices[0]; fmt.Sprint(d.XIDErrors) != "map[48:1 79:2]" {
		t.Errorf("%v; want 79 twice, 48 once, and nothing of a GPU that is not known", d.XIDErrors)
	}
	s.events = append(s.events, event{"GPU-a", 79})
	if d := after(r, 2, 2).Devices[0]; fmt.Sprint(d.XIDErrors) != "map[48:1 79:3]" {
		t.Errorf("%v; want 79 three times, 48 once", d.XIDErrors)
	}
	for range 2 * eventsAtMost {
		s.events = append(s.events, event{"GPU-a", 94})
	}
	after(r, 4, 1)
	if len(s.events) != eventsAtMost {
		t.Errorf("%d events are left after one pass, want %d: a storm must not hold up the readings", len(s.events), eventsAtMost)
	}
}

// What was let go of is taken up where it was; the time between is not observed.
func TestReleaseAndResume(t *testing.T) {
	g := newScripted("GPU-a", 100)
	s := &script{gpus: []*scripted{g}}
	r := newReader(s, Config{Detail: true})
	after(r, 0, 5)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	reading := after(r, 100, 5)
	if d := reading.Devices[0]; s.opens != 2 || len(reading.Devices) != 1 || !near(d.Busy, 8) || !near(d.Observed, 8) || !d.Up {
		t.Errorf("opened %d times, %+v; want 8 s busy of 8", s.opens, reading.Devices)
	}
	if g.calls["watch"] != 2 {
		t.Errorf("its events were registered %d times, want again after the release", g.calls["watch"])
	}
}

func TestOpening(t *testing.T) {
	s := &script{openErr: ErrNoLibrary}
	r := newReader(s, Config{Detail: true})
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
		r := newReader(s, Config{Detail: true})
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
	r := newReader(&script{gpus: []*scripted{g}}, Config{Detail: true})
	after(r, 0, 3)
	for _, call := range strings.Fields("samples rates memory power powerLimit energy temperature clock fields encoder decoder controller replays") {
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
