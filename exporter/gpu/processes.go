package gpu

import (
	"math"
	"slices"
	"time"
)

// Process is one process on a GPU or an instance, as the driver knows it.
type Process struct {
	PID    uint32  // of the host
	PodUID string  // as Config.PodOf says; "" = of no pod
	Memory *uint64 // bytes; nil = the driver does not say
	Busy   float64 // seconds, weighed by its share of the multiprocessors; monotone while it lives. The processes of a GPU add up to the GPU.
}

// processesEvery is how often processes are read: the list is the dearest call of all, thousands of times that of a utilization.
const processesEvery = 10 * time.Second

// processReach is how long a reading of processes may lie back for the time since to count.
const processReach = time.Minute

// process and processSample are NVML's answers.
type process struct {
	pid    uint32
	memory uint64 // all bits set = not known
}

type processSample struct {
	pid       uint32
	timestamp uint64 // microseconds, of the driver's clock
	percent   uint32
}

// processMeter is what is remembered of the processes of a GPU. The zero value has seen nothing.
type processMeter struct {
	last     time.Time
	newest   uint64 // timestamp of the newest sample
	observed float64
	alive    map[uint32]*Process
}

// take brings the processes to now: who is there, and what the samples since the reading before say of each. A process that is in the
// samples and not on the list is dead, or garbage of the driver's (nvtop#110): it counts for nobody. sampled says whether the samples
// are known at all.
func (m *processMeter) take(now time.Time, list []process, samples []processSample, sampled bool, podOf func(uint32) string) {
	elapsed := now.Sub(m.last)
	counts := sampled && !m.last.IsZero() && elapsed > 0 && elapsed <= processReach
	m.last = now
	if counts {
		m.observed += elapsed.Seconds()
	}
	sums, numbers := map[uint32]float64{}, map[uint32]int{}
	for _, s := range samples {
		if s.timestamp <= m.newest || s.percent > 100 {
			continue
		}
		sums[s.pid] += float64(s.percent) / 100
		numbers[s.pid]++
	}
	for _, s := range samples {
		m.newest = max(m.newest, s.timestamp)
	}
	alive := map[uint32]*Process{}
	for _, p := range list {
		known := m.alive[p.pid]
		if known == nil {
			known = &Process{PID: p.pid, PodUID: podOf(p.pid)}
		}
		if already := alive[p.pid]; already != nil { // on both lists
			continue
		}
		if known.Memory = nil; p.memory != math.MaxUint64 {
			memory := p.memory
			known.Memory = &memory
		}
		if n := numbers[p.pid]; counts && n > 0 {
			known.Busy += sums[p.pid] / float64(n) * elapsed.Seconds()
		}
		alive[p.pid] = known
	}
	m.alive = alive
}

// published lists the processes by their number.
func (m *processMeter) published() []Process {
	all := []Process{} // not nil: that there is none is known
	for _, p := range m.alive {
		all = append(all, *p)
	}
	slices.SortFunc(all, func(a, b Process) int { return int(a.PID) - int(b.PID) })
	return all
}

// processes reads the processes of a GPU or an instance.
func (a *asking) processes(m *processMeter, known asked, uuid string, h device) {
	var list []process
	readable := false
	for _, call := range []struct {
		name string
		mps  bool
	}{{"nvmlDeviceGetComputeRunningProcesses", false}, {"nvmlDeviceGetMPSComputeRunningProcesses", true}} {
		c := a.about(known, uuid, call.name, func() code {
			some, c := h.processes(call.mps)
			if c == success {
				list = append(list, some...)
			}
			return c
		})
		readable = readable || c == success
	}
	if !readable {
		return
	}
	var samples []processSample
	c := a.about(known, uuid, "nvmlDeviceGetProcessUtilization", func() (c code) { samples, c = h.processSamples(m.newest); return c })
	m.take(a.now, list, samples, c == success || c.verdict() == empty && c != notAsked, a.reader.podOf)
}
