// Package gpu reads a node's GPUs through NVIDIA's management library (NVML) and integrates how long each was busy. It is the only
// package with cgo. It refuses to guess: what the driver does not give is absent, a reading outside its range is dropped and counted,
// and one GPU that fails costs only itself.
package gpu

import (
	"errors"
	"io"
	"log/slog"
	"time"
)

// Why no GPU can be read, or why this process cannot go on reading.
var (
	// ErrNoLibrary: the loader finds no NVML. The library may appear later; the reader keeps trying.
	ErrNoLibrary = errors.New("libnvidia-ml.so.1 is not to be found: is the NVIDIA driver installed on the node, and does the container get its libraries (runtimeClassName nvidia, or a mount and LD_LIBRARY_PATH)?")
	// ErrDriverNotLoaded: the library is there, the kernel driver is not, or not yet.
	ErrDriverNotLoaded = errors.New("the NVIDIA kernel driver is not loaded")
	// ErrVersionMismatch: library and kernel driver are of different versions.
	ErrVersionMismatch = errors.New("libnvidia-ml.so.1 and the kernel driver are of different versions")
	// ErrReleased: somebody asked to let go of the driver, so that it can be unloaded or a GPU handed to a virtual machine.
	ErrReleased = errors.New("the driver was let go of on request; `capstan-exporter resume` takes it up again")
	// ErrRestart: the driver that this process opened is gone. A process cannot swap the library, so it must end, and the kubelet
	// starts a container with the new one.
	ErrRestart = errors.New("the NVIDIA driver was replaced or taken away under this process; only a new process can read it")
)

// Config of a Reader. The zero value reads the library that the loader finds, and logs nothing.
type Config struct {
	LibraryPath string                        // "" = libnvidia-ml.so.1, found by the loader
	Detail      bool                          // also read what few look at: see Detail
	PodOf       func(pid uint32) (uid string) // also read which processes there are, and whose; nil = do not
	Record      io.Writer                     // what the driver answers is written there, for Replay; nil = nowhere
	Logger      *slog.Logger
}

// Reading is what one pass over the node's GPUs found. It is immutable once returned.
type Reading struct {
	At            time.Time
	Err           error // why no GPU could be read at all; nil = Devices is the true inventory
	DriverVersion string
	Devices       []Device     // in order of their index; one that was there and does not answer stays, with Up false
	Errors        []CallErrors // cumulative since New, ordered
	Costs         []CallCost   // cumulative since New, ordered
}

// Device is one GPU at one time. A nil pointer, map or empty source means "not known" or "not supported", never zero.
type Device struct {
	UUID, Model, PCIBusID string
	Index, Minor          int
	Up                    bool
	Reason                string // why it is not up: an NVML return, like GPU_IS_LOST

	Load
	Memory
	Gauges
	Counters
	Health
	Detail
	XIDErrors map[uint64]uint64 // how often each XID was reported since this Reader first saw the GPU (nvmlEventSetWait)

	LastXID uint64 // the newest of them, 0 = none

	MIG       bool // the GPU is divided: pods hold its Instances
	Instances []Instance
}

// Instance is a MIG instance of a GPU. Several compute instances of one GPU instance share its Load: the counters know no more.
type Instance struct {
	UUID        string
	Profile     string // like 1g.10gb
	GPUInstance int
	Placement   *Placement // nil = the driver does not say

	Load
	Memory
}

// Placement is where on its GPU an instance lies (nvmlGpuInstanceGetInfo), which is its name to dynamic resource allocation.
type Placement struct{ ProfileID, Start int }

// Load is how busy a GPU or an instance was.
type Load struct {
	// UtilizationSource is where Busy comes from: "samples" (the driver's ring, nvmlDeviceGetSamples), "rates"
	// (nvmlDeviceGetUtilizationRates), "gpm" (the performance counters' graphics engine, where MIG hides the other two), or "" where
	// there is none; then Busy and Observed mean nothing.
	UtilizationSource string
	Busy, Observed    float64  // seconds since this Reader first saw the GPU; monotone
	Utilization       *float64 // 0..1, since the reading before

	// Processes are read with Config.PodOf only, and every ten seconds. Nil = not read; empty = there is none.
	Processes         []Process
	ProcessesObserved float64 // seconds for which the processes' shares are known; monotone

	Activity *Activity // nil = no performance counters: before Hopper
}

// Activity is what the performance counters (nvmlGpmMetricsGet, Hopper and newer) say: seconds since this Reader first saw the GPU,
// each weighed by its share, monotone. Divide a rate by that of Observed.
type Activity struct {
	Observed float64
	SM       *float64 // a warp was assigned to the multiprocessors, mean over all of them
	Tensor   *float64 // the tensor pipes were active
	DRAM     *float64 // the memory's bandwidth was used

	Graphics, SMRatio, TensorRatio, DRAMRatio *float64 // 0..1, in the newest reading; Graphics is the graphics and compute engine
}

// Memory is in bytes; used is without reserved where the driver tells them apart (nvmlDeviceGetMemoryInfo_v2).
type Memory struct {
	MemoryUsed, MemoryReserved, MemoryTotal *uint64
}

// Gauges are read every few seconds.
type Gauges struct {
	PowerWatts         *float64           // nvmlDeviceGetPowerUsage: mean of the last second on Ampere and newer, else now
	EnergyJoules       *float64           // since the driver was loaded
	TemperatureCelsius *float64           // of the chip
	ClockHertz         map[string]float64 // by "sm"
}

// Detail is read only on request.
type Detail struct {
	MoreClockHertz           map[string]float64 // by "memory"
	MemoryTemperatureCelsius *float64           // field 82
	PowerInstantWatts        *float64           // field 186
	PowerLimitWatts          *float64           // nvmlDeviceGetEnforcedPowerLimit
	EngineUtilization        map[string]float64 // 0..1, of the last second or less, by "encoder", "decoder", "memory": the controller's, not how full it is
	PCIeReplays              *float64           // nvmlDeviceGetPcieReplayCounter
	RemappedRows             map[string]float64 // by type of the error that caused it, ever
	RowRemapPending          *bool              // a reset of the GPU will remap
}

// Counters are what the driver itself counts, since it was loaded.
type Counters struct {
	ThrottledSeconds map[string]float64 // by reason: power_cap, thermal_software, thermal_hardware, power_brake
	PCIeBytes        map[string]float64 // by direction: transmit, receive
	NVLinkBytes      map[string]float64 // by direction, over all links, without protocol overhead
}

// Health changes rarely, and is asked rarely.
type Health struct {
	ECCErrors      map[string]float64 // by type, corrected and uncorrected, since the driver was loaded
	RowRemapFailed *bool              // the GPU has no spare row left
	RecoveryAction *int               // nvmlDeviceGpuRecoveryAction_t: 0 none, 1 reset the GPU, 2 reboot the node, 3 drain, 4 drain and reset
}

// CallErrors counts how often a call about a GPU (UUID "" = about none) failed with a code. OUT_OF_RANGE is ours: the call succeeded,
// and what it gave cannot be, like a utilization of 4294967295 %.
type CallErrors struct {
	UUID, Call, Code string
	Count            uint64
}

// CallCost is what a call has cost.
type CallCost struct {
	Call    string
	Count   uint64
	Seconds float64
}
