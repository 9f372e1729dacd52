package exporter

import (
	"fmt"
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/capstan-gpu/capstan/exporter/gpu"
	"github.com/capstan-gpu/capstan/exporter/podmap"
)

func at[T any](v T) *T { return &v }

// moment is one reading with who held what then.
type moment struct {
	reading     gpu.Reading
	allocations []podmap.Allocation
}

func device(uuid string, busy, observed float64) gpu.Device {
	return gpu.Device{UUID: uuid, Up: true, Load: gpu.Load{UtilizationSource: "samples", Busy: busy, Observed: observed}, Memory: gpu.Memory{MemoryUsed: at(uint64(10))}}
}

func held(uid, uuid string) podmap.Allocation {
	return podmap.Allocation{DeviceID: uuid, UUID: uuid, Namespace: "a", Pod: "pod-of-" + uid, PodUID: uid}
}

func reading(devices ...gpu.Device) gpu.Reading { return gpu.Reading{Devices: devices} }

// play advances through moments, and returns what is said of each pod after the last.
func play(moments ...moment) map[string]PodUsage {
	var u usage
	var pods []PodUsage
	for _, m := range moments {
		u, pods = u.advance(m.reading, m.allocations)
	}
	byUID := map[string]PodUsage{}
	for _, p := range pods {
		byUID[p.PodUID] = p
	}
	return byUID
}

// A pod can hold a MIG instance; activity counts for it as busy time does, and is absent where the GPU has no counters.
func TestUsageOfAnInstance(t *testing.T) {
	at := func(busy, sm float64) gpu.Reading {
		return reading(gpu.Device{UUID: "g0", Up: true, MIG: true, Instances: []gpu.Instance{{UUID: "MIG-1",
			Load: gpu.Load{UtilizationSource: "gpm", Busy: busy, Observed: 2 * busy, Activity: &gpu.Activity{Observed: 2 * busy, SM: &sm}}}}})
	}
	one := []podmap.Allocation{held("u1", "MIG-1")}
	p := play(moment{at(1, 1), one}, moment{at(2, 1.5), one})["u1"]
	if p.GPUs != 1 || *p.Busy != 1 || *p.Observed != 2 || *p.SMActive != 0.5 || *p.ActivityObserved != 2 {
		t.Errorf("%+v; want busy 1 of 2, sm 0.5 of 2", p)
	}
	if p := play(moment{reading(device("g0", 1, 1)), []podmap.Allocation{held("u1", "g0")}})["u1"]; p.SMActive != nil || p.ActivityObserved != nil {
		t.Errorf("%+v; want no activity without counters", p)
	}
}

// dcgm-exporter#587: pods that share a GPU all show its utilization. Their own processes' shares add up, and a process on another GPU
// than its pod was given (dcgm-exporter#568) counts for the pod all the same.
func TestUsageOfProcesses(t *testing.T) {
	on := func(uuid string, observed float64, processes ...gpu.Process) gpu.Device {
		d := device(uuid, observed, observed)
		d.Processes, d.ProcessesObserved = append([]gpu.Process{}, processes...), observed
		return d
	}
	of := func(uid string, pid uint32, busy float64, memory uint64) gpu.Process {
		return gpu.Process{PID: pid, PodUID: uid, Busy: busy, Memory: &memory}
	}
	both := []podmap.Allocation{held("u1", "g0"), held("u2", "g0"), held("u3", "g1")}
	pods := play(
		moment{reading(on("g0", 10, of("u1", 1, 0, 5), of("", 9, 0, 1)), on("g1", 10)), both},
		moment{reading(on("g0", 20, of("u1", 1, 3, 5), of("u1", 2, 2, 6), of("u2", 3, 4, 7), of("", 9, 1, 1)), on("g1", 20, of("u2", 4, 1, 8))), both},
		moment{reading(on("g0", 30, of("u1", 2, 2.5, 6), of("u2", 3, 4, 7)), on("g1", 30)), both}, // 1 and 4 have ended
	)
	for uid, want := range map[string]struct {
		busy, observed float64
		memory         uint64
	}{"u1": {5.5, 20, 6}, "u2": {5, 30, 7}, "u3": {0, 20, 0}} {
		if p := pods[uid].Process; p == nil || p.Busy != want.busy || p.Observed != want.observed || *p.MemoryUsed != want.memory {
			t.Errorf("%s: %+v, want %+v", uid, p, want)
		}
	}
	if p := play(moment{reading(device("g0", 1, 1)), []podmap.Allocation{held("u1", "g0")}})["u1"]; p.Process != nil {
		t.Errorf("%+v; want nothing where processes are not read", p.Process)
	}
}

func TestUsage(t *testing.T) {
	f := func(name string, want map[string][2]float64, moments ...moment) {
		t.Helper()
		got := play(moments...)
		if len(got) != len(want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
		for uid, w := range want {
			p := got[uid]
			if p.Busy == nil || p.Observed == nil || *p.Busy != w[0] || *p.Observed != w[1] {
				t.Errorf("%s: pod %s has %+v, want busy %g of %g", name, uid, p, w[0], w[1])
			}
		}
	}
	one := []podmap.Allocation{held("u1", "g0")}
	f("first seen: from 0", map[string][2]float64{"u1": {0, 0}}, moment{reading(device("g0", 50, 100)), one})
	f("what the device did since", map[string][2]float64{"u1": {3, 4}},
		moment{reading(device("g0", 50, 100)), one}, moment{reading(device("g0", 53, 104)), one})
	two := []podmap.Allocation{held("u1", "g0"), held("u1", "g1")}
	f("two GPUs: both sum, so the quotient is the mean", map[string][2]float64{"u1": {5, 8}},
		moment{reading(device("g0", 0, 0), device("g1", 0, 0)), two}, moment{reading(device("g0", 4, 4), device("g1", 1, 4)), two})
	f("a pod that left is gone", map[string][2]float64{},
		moment{reading(device("g0", 0, 0)), one}, moment{reading(device("g0", 1, 1)), nil})
	f("its successor starts at 0, and the moment between is nobody's", map[string][2]float64{"u2": {1, 1}},
		moment{reading(device("g0", 0, 0)), one}, moment{reading(device("g0", 1, 1)), one},
		moment{reading(device("g0", 2, 2)), []podmap.Allocation{held("u2", "g0")}}, moment{reading(device("g0", 3, 3)), []podmap.Allocation{held("u2", "g0")}})
	f("a frozen driver adds nothing to either", map[string][2]float64{"u1": {0, 0}},
		moment{reading(device("g0", 5, 5)), one}, moment{reading(device("g0", 5, 5)), one}, moment{reading(device("g0", 5, 5)), one})
	f("a device that starts anew", map[string][2]float64{"u1": {2, 2}},
		moment{reading(device("g0", 5, 5)), one}, moment{reading(device("g0", 0, 0)), one}, moment{reading(device("g0", 2, 2)), one})
	f("a device that the driver does not know is nobody's", map[string][2]float64{},
		moment{reading(device("g0", 0, 0)), []podmap.Allocation{held("u1", "MIG-7")}})

	replicas := []podmap.Allocation{{DeviceID: "g0::0", UUID: "g0", PodUID: "u1", Shared: true}, {DeviceID: "g0::1", UUID: "g0", PodUID: "u1", Shared: true},
		{DeviceID: "g0::2", UUID: "g0", PodUID: "u2", Shared: true}}
	f("shared: each feels the device, two replicas are one GPU", map[string][2]float64{"u1": {1, 2}, "u2": {1, 2}},
		moment{reading(device("g0", 0, 0)), replicas}, moment{reading(device("g0", 1, 2)), replicas})
	if p := play(moment{reading(device("g0", 0, 0)), replicas})["u1"]; p.GPUs != 1 || !p.Shared || *p.MemoryUsed != 10 {
		t.Errorf("replicas: %+v", p)
	}

	// What is not known is absent.
	blind := gpu.Device{UUID: "g0", Up: true}
	if p := play(moment{reading(blind), one}, moment{reading(blind), one})["u1"]; p.Busy != nil || p.Observed != nil || p.MemoryUsed != nil || p.GPUs != 1 {
		t.Errorf("a device without utilization: %+v", p)
	}
	// Shared once, shared for life: a series does not change its labels.
	p := play(moment{reading(device("g0", 0, 0)), []podmap.Allocation{{UUID: "g0", PodUID: "u1", Shared: true}}}, moment{reading(device("g0", 1, 1)), one})["u1"]
	if !p.Shared || *p.Busy != 1 {
		t.Errorf("not shared any more: %+v", p)
	}
}

// Over random histories of readings and hands, what advance remembers step by step is what a look at the whole history says,
// no pod's counter ever falls while it lives, and no pod is busier than it was observed.
func TestUsageIsWhatHistorySays(t *testing.T) {
	uuids, uids := []string{"g0", "g1", "g2"}, []string{"u0", "u1", "u2"}
	rapid.Check(t, func(t *rapid.T) {
		var history []moment
		counters := map[string][2]float64{}
		var u usage
		last := map[string]PodUsage{}
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			var m moment
			for _, g := range uuids {
				if rapid.IntRange(0, 9).Draw(t, "lost") == 0 {
					continue
				}
				c := counters[g]
				if rapid.IntRange(0, 19).Draw(t, "anew") == 0 {
					c = [2]float64{}
				} else {
					observed := float64(rapid.IntRange(0, 8).Draw(t, "observed")) / 8
					c = [2]float64{c[0] + observed*float64(rapid.IntRange(0, 4).Draw(t, "busy"))/4, c[1] + observed}
				}
				counters[g] = c
				m.reading.Devices = append(m.reading.Devices, device(g, c[0], c[1]))
			}
			for _, uid := range uids {
				for _, g := range uuids {
					if rapid.IntRange(0, 2).Draw(t, "holds "+uid+g) == 0 {
						m.allocations = append(m.allocations, held(uid, g))
					}
				}
			}
			history = append(history, m)
			var pods []PodUsage
			u, pods = u.advance(m.reading, m.allocations)
			now := map[string]PodUsage{}
			for _, p := range pods {
				now[p.PodUID] = p
			}
			if fmt.Sprint(len(now)) != fmt.Sprint(len(u.pods)) {
				t.Fatalf("remembers %d pods, says %d", len(u.pods), len(now))
			}
			for _, uid := range uids {
				busy, observed, holds := naive(history, uid)
				p, said := now[uid]
				if said != holds {
					t.Fatalf("%s: said %t, holds %t", uid, said, holds)
				}
				if !said {
					continue
				}
				if math.Abs(*p.Busy-busy) > 1e-9 || math.Abs(*p.Observed-observed) > 1e-9 {
					t.Fatalf("%s: busy %g of %g, history says %g of %g", uid, *p.Busy, *p.Observed, busy, observed)
				}
				if *p.Busy > *p.Observed+1e-9 {
					t.Fatalf("%s: busy %g of %g", uid, *p.Busy, *p.Observed)
				}
				if before, ok := last[uid]; ok && (*p.Busy < *before.Busy || *p.Observed < *before.Observed) {
					t.Fatalf("%s: falls from %g of %g to %g of %g", uid, *before.Busy, *before.Observed, *p.Busy, *p.Observed)
				}
			}
			last = now
		}
	})
}

// naive adds up, over the pod's last unbroken presence, what each device did between two moments at which the pod held it.
func naive(history []moment, uid string) (busy, observed float64, holds bool) {
	holdsAt := func(i int, uuid string) bool {
		for _, a := range history[i].allocations {
			if a.PodUID == uid && a.UUID == uuid {
				return deviceAt(history[i], uuid) != nil
			}
		}
		return false
	}
	present := func(i int) bool {
		for _, g := range []string{"g0", "g1", "g2"} {
			if holdsAt(i, g) {
				return true
			}
		}
		return false
	}
	end := len(history) - 1
	if !present(end) {
		return 0, 0, false
	}
	start := end
	for start > 0 && present(start-1) {
		start--
	}
	for i := start + 1; i <= end; i++ {
		for _, g := range []string{"g0", "g1", "g2"} {
			if holdsAt(i-1, g) && holdsAt(i, g) {
				before, now := deviceAt(history[i-1], g), deviceAt(history[i], g)
				busy += max(0, now.Busy-before.Busy)
				observed += max(0, now.Observed-before.Observed)
			}
		}
	}
	return busy, observed, true
}

func deviceAt(m moment, uuid string) *gpu.Device {
	for i := range m.reading.Devices {
		if m.reading.Devices[i].UUID == uuid {
			return &m.reading.Devices[i]
		}
	}
	return nil
}
