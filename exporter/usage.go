package exporter

import (
	"cmp"
	"slices"

	"github.com/capstan-gpu/capstan/exporter/gpu"
	"github.com/capstan-gpu/capstan/exporter/podmap"
)

// usage is what must be remembered from one reading to the next to count for pods. A value: advance makes a new one.
type usage struct {
	devices   map[string]counters     // by UUID, of the newest reading
	pods      map[string]podCount     // by UID, of pods that hold a device now
	processes map[processName]float64 // busy seconds in the newest reading
}

// processName is a process on a device.
type processName struct {
	uuid string
	pid  uint32
}

// counters are GPU-seconds.
type counters struct{ busy, observed, sm, activity, processesObserved float64 }

func countersOf(l *gpu.Load) counters {
	c := counters{busy: l.Busy, observed: l.Observed, processesObserved: l.ProcessesObserved}
	if l.Activity != nil && l.Activity.SM != nil {
		c.sm, c.activity = *l.Activity.SM, l.Activity.Observed
	}
	return c
}

// add adds what happened between two readings of a device.
func (c *counters) add(was, is counters) {
	c.busy += max(0, is.busy-was.busy)
	c.observed += max(0, is.observed-was.observed)
	c.sm += max(0, is.sm-was.sm)
	c.activity += max(0, is.activity-was.activity)
}

// ofProcesses is what one reading says of a pod's processes, on whichever devices they are: a pod may use another than it was given.
type ofProcesses struct {
	busy        float64
	memory      uint64
	memoryKnown bool
	devices     []string
}

// processed adds what a pod's processes did since the reading before. It is nil where processes are not read. A pod that has none uses
// nothing, which is known.
func (c *podCount) processed(was, is usage, held []string, of *ofProcesses, byUUID map[string]holdable) *ProcessUsage {
	if of == nil {
		of = &ofProcesses{memoryKnown: true}
	}
	devices := append(slices.Clone(held), of.devices...)
	slices.Sort(devices)
	read := false
	for _, uuid := range slices.Compact(devices) {
		if l := byUUID[uuid].load; l != nil && l.Processes != nil {
			read = true
			if before, ok := was.devices[uuid]; ok {
				c.process.observed += max(0, is.devices[uuid].processesObserved-before.processesObserved)
			}
		}
	}
	if !read {
		return nil
	}
	c.process.busy += of.busy
	usage := &ProcessUsage{Busy: c.process.busy, Observed: c.process.observed}
	if of.memoryKnown {
		usage.MemoryUsed = &of.memory
	}
	return usage
}

// holdable is what a pod can hold: a GPU, or an instance of one.
type holdable struct {
	load   *gpu.Load
	memory *gpu.Memory
}

func holdables(r gpu.Reading) map[string]holdable {
	all := make(map[string]holdable, len(r.Devices))
	for i := range r.Devices {
		d := &r.Devices[i]
		all[d.UUID] = holdable{&d.Load, &d.Memory}
		for k := range d.Instances {
			in := &d.Instances[k]
			all[in.UUID] = holdable{&in.Load, &in.Memory}
		}
	}
	return all
}

type podCount struct {
	counters
	process counters // of the pod's processes: busy and observed alone
	held    []string // UUIDs at the newest reading, sorted
	shared  bool     // was true once, stays true: a series does not change its labels while its pod lives
}

// sum adds numbers of which each may not be known, and then the sum is not.
type sum struct {
	n       uint64
	unknown bool
}

func (s *sum) add(v *uint64) {
	if v == nil {
		s.unknown = true
		return
	}
	s.n += *v
}

func (s *sum) known() *uint64 {
	if s.unknown {
		return nil
	}
	return &s.n
}

// advance counts what happened between the reading before and this one. A device's increment counts for a pod if the pod held
// the device at both; so the moment of taking over counts for nobody, and busy and observed always speak of the same time.
// A pod starts at 0 when it is first seen, and is forgotten once it holds nothing. Pure.
func (u usage) advance(reading gpu.Reading, allocations []podmap.Allocation) (usage, []PodUsage) {
	next := usage{devices: make(map[string]counters, len(reading.Devices)), pods: map[string]podCount{}, processes: map[processName]float64{}}
	byUUID := holdables(reading)
	processes := map[string]*ofProcesses{} // by pod's UID
	for uuid, h := range byUUID {
		next.devices[uuid] = countersOf(h.load)
		for _, p := range h.load.Processes {
			name := processName{uuid, p.PID}
			next.processes[name] = p.Busy
			if p.PodUID == "" {
				continue
			}
			of := processes[p.PodUID]
			if of == nil {
				of = &ofProcesses{memoryKnown: true}
				processes[p.PodUID] = of
			}
			of.busy += max(0, p.Busy-u.processes[name])
			of.devices = append(of.devices, uuid)
			if p.Memory != nil {
				of.memory += *p.Memory
			} else {
				of.memoryKnown = false
			}
		}
	}

	type holder struct {
		who     PodUsage
		devices []string
	}
	holders := map[string]*holder{}
	var order []string
	for _, a := range allocations {
		if _, known := byUUID[a.UUID]; !known {
			continue
		}
		h := holders[a.PodUID]
		if h == nil {
			h = &holder{who: PodUsage{Namespace: a.Namespace, Pod: a.Pod, PodUID: a.PodUID}}
			holders[a.PodUID] = h
			order = append(order, a.PodUID)
		}
		h.who.Shared = h.who.Shared || a.Shared
		h.devices = append(h.devices, a.UUID)
	}

	pods := make([]PodUsage, 0, len(order))
	for _, uid := range order {
		h := holders[uid]
		slices.Sort(h.devices)
		h.devices = slices.Compact(h.devices) // two replicas of one GPU are one GPU
		before, now := u.pods[uid], podCount{held: h.devices}
		now.counters, now.process, now.shared = before.counters, before.process, before.shared || h.who.Shared
		measured, counted := false, false
		var used, total sum
		for _, uuid := range h.devices {
			d := byUUID[uuid]
			measured = measured || d.load.UtilizationSource != ""
			counted = counted || d.load.Activity != nil && d.load.Activity.SM != nil
			_, had := slices.BinarySearch(before.held, uuid)
			if was, ok := u.devices[uuid]; had && ok {
				now.add(was, next.devices[uuid])
			}
			used.add(d.memory.MemoryUsed)
			total.add(d.memory.MemoryTotal)
		}
		process := now.processed(u, next, h.devices, processes[uid], byUUID)
		next.pods[uid] = now
		out := h.who
		out.GPUs, out.Shared = len(h.devices), now.shared
		if measured {
			out.Busy, out.Observed = &now.busy, &now.observed
		}
		if counted {
			out.SMActive, out.ActivityObserved = &now.sm, &now.activity
		}
		out.MemoryUsed, out.MemoryTotal = used.known(), total.known()
		out.Process = process
		pods = append(pods, out)
	}
	slices.SortFunc(pods, func(a, b PodUsage) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.PodUID, b.PodUID))
	})
	return next, pods
}
