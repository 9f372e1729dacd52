package exporter

import (
	"encoding/json"
	"net/http"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/capstan-gpu/capstan/exporter/gpu"
	"github.com/capstan-gpu/capstan/exporter/podmap"
	"github.com/capstan-gpu/capstan/exporter/trainer"
)

// state is everything that is known, for a bug report. It holds names of GPUs, pods and namespaces, and nothing that is secret: the web
// configuration is there by its path alone, and of pods only what [podmap.Pod] keeps.
type state struct {
	At      time.Time
	Version string // of Go and of the modules
	Flags   struct {
		Listen, KubeletDir, WebConfig, ProbeListen, NodeName                string
		Interval, MappingInterval, MappingMaxAge, StatsInterval, StuckAfter string
		PodLabels                                                           []string
		CompatDCGM                                                          bool
	}
	Missing  []string
	GPUs     gpuState
	Held     []podmap.Allocation
	Mapping  podmap.Mapping
	Usage    []PodUsage
	Training trainer.Result
	Stages   map[string]Stage
	Process  struct {
		Goroutines int
		HeapBytes  uint64
	}
}

type gpuState struct {
	At            time.Time
	Error         string `json:",omitempty"`
	DriverVersion string
	Devices       []gpu.Device
	Errors        []gpu.CallErrors
	Costs         []gpu.CallCost
}

// stateHandler serves the state as JSON.
func stateHandler(cfg Config, b *board) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		s, now := b.snapshot(), time.Now()
		out := state{At: now, Missing: s.Missing(now), Held: s.Held, Mapping: s.Mapping, Usage: s.Usage, Training: s.Training, Stages: map[string]Stage{},
			GPUs: gpuState{At: s.GPUs.At, DriverVersion: s.GPUs.DriverVersion, Devices: s.GPUs.Devices, Errors: s.GPUs.Errors, Costs: s.GPUs.Costs}}
		if s.GPUs.Err != nil {
			out.GPUs.Error = s.GPUs.Err.Error()
		}
		for i, stage := range s.Stages {
			out.Stages[stageNames[i]] = stage
		}
		if info, ok := debug.ReadBuildInfo(); ok {
			out.Version = info.GoVersion + " " + info.Main.Path + " " + info.Main.Version
		}
		f := &out.Flags
		f.Listen, f.KubeletDir, f.WebConfig, f.ProbeListen, f.NodeName = cfg.Listen, cfg.KubeletDir, cfg.WebConfig, cfg.ProbeListen, cfg.NodeName
		f.Interval, f.MappingInterval, f.MappingMaxAge = cfg.Interval.String(), cfg.MappingInterval.String(), cfg.MappingMaxAge.String()
		f.StatsInterval, f.StuckAfter, f.PodLabels, f.CompatDCGM = cfg.StatsInterval.String(), cfg.StuckAfter.String(), cfg.PodLabels, cfg.CompatDCGM
		var memory runtime.MemStats
		runtime.ReadMemStats(&memory)
		out.Process.Goroutines, out.Process.HeapBytes = runtime.NumGoroutine(), memory.HeapAlloc
		w.Header().Set("Content-Type", "application/json")
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		e.Encode(out)
	}
}
