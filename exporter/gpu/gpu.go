// Package gpu reads a node's GPUs through NVIDIA's management library (NVML) and integrates how long each was busy. It is the only
// package with cgo. It refuses to guess: what the driver does not give is absent, a reading outside its range is dropped and counted,
// and one GPU that fails costs only itself.
package gpu

import (
	"errors"
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
	// ErrRestart: the driver that this process opened is gone. A process cannot swap the library, so it must end, and the kubelet
	// starts a container with the new one.
	ErrRestart = errors.New("the NVIDIA driver was replaced or taken away under this process; only a new process can read it")
)

// Config of a Reader. The zero value reads the library that the loader finds, and logs nothing.
type Config struct {
	LibraryPath string // "" = libnvidia-ml.so.1, found by the loader
	Logger      *slog.Logger
}

// Reading is what one pass over the node's GPUs found. It is immutable once returned.
type Reading struct {
	At            time.Time
	Err           error // why no GPU could be read at all; nil = Devices is the true inventory
	DriverVersion string
	Devices       []Device     // in order of their index; one that was there and does not answer stays, with Up false
	Errors        []CallErrors // cumulative since New, ordered
}

// Device is one GPU at one time. A nil pointer or empty source means "not known" or "not supported", never zero.
type Device struct {
	UUID, Model, PCIBusID string
	Index, Minor          int
	Up                    bool
	Reason                string // why it is not up: an NVML return, like GPU_IS_LOST

	// UtilizationSource is where Busy comes from: "samples" (the driver's ring, nvmlDeviceGetSamples), "rates"
	// (nvmlDeviceGetUtilizationRates), or "" where the GPU supports neither; then Busy and Observed mean nothing.
	UtilizationSource string
	Busy, Observed    float64  // seconds since this Reader first saw the GPU; monotone
	Utilization       *float64 // 0..1, since the reading before
	Discarded         uint64   // utilization readings above 100 %, dropped

	MemoryUsed, MemoryReserved, MemoryTotal      *uint64 // bytes; used is without reserved where the driver tells them apart
	PowerWatts, EnergyJoules, TemperatureCelsius *float64
	ClockHertz                                   map[string]float64 // by "graphics", "sm", "memory", "video"
}

// CallErrors counts how often a call about a GPU (UUID "" = about none) failed with a code.
type CallErrors struct {
	UUID, Call, Code string
	Count            uint64
}
