package exporter

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/capstan-gpu/capstan/exporter/gpu"
	"github.com/capstan-gpu/capstan/exporter/podmap"
	"github.com/capstan-gpu/capstan/exporter/trainer"
)

// Snapshot is all that the exporter knows at one moment. Immutable: the next moment is another Snapshot. Data and health are
// apart; neither is to be guessed from the other.
type Snapshot struct {
	GPUs     gpu.Reading         // counters in seconds, bytes, watts, joules, degrees Celsius, hertz; Device says which
	Usage    []PodUsage          // by pod, made from GPUs and from the mapping that was known when they were read
	Mapping  podmap.Mapping      // who holds what, by the names that the kubelet has for devices
	Held     []podmap.Allocation // the same by UUIDs, as far as the driver knows the names
	Training trainer.Result      // what stats pages said

	Stages [stages]Stage // health, by stage
}

// PodUsage is what a pod's GPUs did while the pod held them.
type PodUsage struct {
	Namespace, Pod, PodUID string
	GPUs                   int           // distinct GPUs, or MIG instances, that the pod holds and the driver knows
	Shared                 bool          // at least one of them was ever handed to more than this pod: its busy share is the device's
	Busy, Observed         *float64      // GPU-seconds since the pod was first seen, monotone; nil = no GPU of the pod has a utilization
	SMActive               *float64      // of those of its GPUs that have performance counters: GPU-seconds, weighed by the share; nil = none has
	ActivityObserved       *float64      // GPU-seconds for which these were read
	MemoryUsed             *uint64       // bytes, of all the pod's GPUs; nil = not known of at least one
	MemoryTotal            *uint64       // likewise
	Process                *ProcessUsage // nil = processes are not read
}

// ProcessUsage is what a pod's own processes did, on whichever GPUs. Unlike its GPUs' share it can be summed over the pods of a GPU.
type ProcessUsage struct {
	Busy       float64 // GPU-seconds, weighed by the processes' share of the multiprocessors
	Observed   float64 // GPU-seconds for which these shares are known
	MemoryUsed *uint64 // bytes; nil = not known of at least one process
}

// The stages, each on its own clock.
const (
	stageGPU = iota
	stagePods
	stageStats
	stages
)

var stageNames = [stages]string{"gpu", "pods", "stats"}

// Stage is how a stage is doing.
type Stage struct {
	Began time.Time     // of the newest round; zero = none began
	Ended time.Time     // of the newest round that came to an end; zero = none did
	Took  time.Duration // that round
}

// Age is how old the newest result is at now, or how long the first one is being waited for.
func (s Stage) Age(now time.Time) time.Duration {
	switch {
	case !s.Ended.IsZero():
		return now.Sub(s.Ended)
	case !s.Began.IsZero():
		return now.Sub(s.Began)
	default:
		return 0
	}
}

// board takes what the stages know and publishes it. Safe for concurrent use; readers never wait.
type board struct {
	newest  atomic.Pointer[Snapshot]
	wasRead chan struct{} // has a token when the GPUs were read since it was last taken
	mu      sync.Mutex    // guards usage, and that one Snapshot grows out of the one before
	usage   usage
}

func newBoard() *board {
	b := &board{wasRead: make(chan struct{}, 1)}
	b.newest.Store(&Snapshot{})
	return b
}

// snapshot is the newest one, never nil.
func (b *board) snapshot() *Snapshot { return b.newest.Load() }

// change publishes a copy of the newest Snapshot with f's changes.
func (b *board) change(f func(s *Snapshot)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := *b.newest.Load()
	f(&next)
	b.newest.Store(&next)
}

func (b *board) begin(stage int, now time.Time) {
	b.change(func(s *Snapshot) { s.Stages[stage].Began = now })
}

func (b *board) end(stage int, now time.Time) {
	b.change(func(s *Snapshot) { s.end(stage, now) })
}

func (s *Snapshot) end(stage int, now time.Time) {
	s.Stages[stage].Ended = now
	s.Stages[stage].Took = now.Sub(s.Stages[stage].Began)
}

// read takes a reading of the GPUs. It counts for the pods that hold them by the mapping of this moment.
func (b *board) read(now time.Time, reading gpu.Reading) {
	b.change(func(s *Snapshot) {
		s.end(stageGPU, now)
		s.GPUs = reading
		s.Held = resolve(reading, s.Mapping.Allocations)
		b.usage, s.Usage = b.usage.advance(reading, s.Held)
	})
	select {
	case b.wasRead <- struct{}{}:
	default:
	}
}

// mapped takes a mapping. A pod that it does not name any more is gone from the page at once, also while the driver or the
// trainers are silent.
func (b *board) mapped(m podmap.Mapping) {
	b.change(func(s *Snapshot) {
		s.Mapping = m
		s.Held = resolve(s.GPUs, m.Allocations)
		holding, alive := map[string]bool{}, map[string]bool{}
		for _, a := range m.Allocations {
			holding[a.PodUID] = true
		}
		for _, p := range m.Pods {
			alive[p.UID] = true
		}
		s.Usage = keep(s.Usage, func(u PodUsage) bool { return holding[u.PodUID] })
		s.Training.Pages = keep(s.Training.Pages, func(p trainer.Page) bool { return alive[p.UID] })
	})
}

// keep copies what is wanted of all: a published slice is not to be changed.
func keep[T any](all []T, wanted func(T) bool) []T {
	if !slices.ContainsFunc(all, func(t T) bool { return !wanted(t) }) {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(t T) bool { return !wanted(t) })
}

func (b *board) trained(now time.Time, r trainer.Result) {
	b.change(func(s *Snapshot) {
		s.end(stageStats, now)
		s.Training = r
	})
}

// trainers lists the pods that may have a stats page: those that run.
func (b *board) trainers() (pods []trainer.Pod) {
	for _, p := range b.snapshot().Mapping.Pods {
		if p.StatsPort == "" || p.Phase != "Running" {
			// Still in the list if it has an address: nobody else's page may be read there.
			if p.IP != "" && p.Phase == "Running" {
				pods = append(pods, trainer.Pod{UID: p.UID, IP: p.IP, HostNetwork: p.HostNetwork})
			}
			continue
		}
		pods = append(pods, trainer.Pod{Namespace: p.Namespace, Name: p.Name, UID: p.UID, IP: p.IP, HostNetwork: p.HostNetwork,
			Port: p.StatsPort, Path: p.StatsPath})
	}
	return pods
}

// gpuProblem says in words what is missing of the GPUs, "" when nothing is.
func gpuProblem(r gpu.Reading) string {
	if r.Err != nil {
		return r.Err.Error()
	}
	var lost []string
	for _, d := range r.Devices {
		if !d.Up {
			lost = append(lost, fmt.Sprintf("GPU %d (%s) does not answer: %s", d.Index, d.UUID, d.Reason))
		}
	}
	if len(r.Devices) == 0 {
		return "the driver knows no GPU"
	}
	return strings.Join(lost, "; ")
}

// Missing lists in words what a reader of the page will not find there, and why.
func (s *Snapshot) Missing(now time.Time) (words []string) {
	if s.Stages[stageGPU].Ended.IsZero() {
		words = append(words, fmt.Sprintf("gpu: the first reading has not ended; it began %s ago", s.Stages[stageGPU].Age(now).Round(time.Second)))
	} else if p := gpuProblem(s.GPUs); p != "" {
		words = append(words, "gpu: "+p)
	}
	if !s.Mapping.Resources.Up {
		words = append(words, "pods: "+orElse(s.Mapping.Resources.Problem, "the kubelet was not asked yet"))
	}
	if !s.Mapping.PodsAPI.Up {
		words = append(words, "pods: "+orElse(s.Mapping.PodsAPI.Problem, "the kubelet was not asked yet"))
	}
	if len(s.Mapping.Unbound) > 0 {
		words = append(words, "pods: no certain UID for "+strings.Join(s.Mapping.Unbound, ", ")+": another pod of the same name lives or lived a moment ago")
	}
	if ids := s.unknownDevices(); len(ids) > 0 {
		words = append(words, fmt.Sprintf("pods: %d device ids that are no GPU of this node's driver, like %q: nothing is exported for them", len(ids), ids[0]))
	}
	return words
}

// unknownDevices lists the device ids in pods' hands that the driver does not know, sorted, each once; nil when the driver itself is
// not known.
func (s *Snapshot) unknownDevices() (ids []string) {
	if s.GPUs.Err != nil || s.Stages[stageGPU].Ended.IsZero() {
		return nil
	}
	known := holdables(s.GPUs)
	for _, a := range s.Held {
		if _, ok := known[a.UUID]; !ok && (len(ids) == 0 || ids[len(ids)-1] != a.DeviceID) {
			ids = append(ids, a.DeviceID)
		}
	}
	return ids
}

func orElse(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}
