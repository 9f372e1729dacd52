//go:build linux && cgo

package gpu

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// library is NVML by go-nvml, with a guard before every call: go-nvml binds lazily, and calling a function that the driver's library
// lacks ends the whole process. No nvml.Return is ever printed: that, too, calls into the library.
type library struct {
	path string          // as configured; "" = to be found
	nvml nvml.Interface  // of the newest attempt to open it
	has  map[string]bool // call → the library exports what is behind it
}

func newDriver(path string) driver { return &library{path: path} }

const soname = "libnvidia-ml.so.1"

// find is the path to open. The folders of LD_LIBRARY_PATH are looked through here, for the loader remembers for ever which of them
// did not exist when it first looked: a driver that is installed after this process began would never be found.
func find(configured string) string {
	if configured != "" {
		return configured
	}
	for _, dir := range filepath.SplitList(os.Getenv("LD_LIBRARY_PATH")) {
		if path := filepath.Join(dir, soname); dir != "" {
			if _, err := os.Stat(path); err == nil {
				return path
			}
		}
	}
	return soname
}

// needed are the symbols behind each call, any of which does: go-nvml takes the newest version that is there.
var needed = map[string][]string{
	"init":        {"nvmlInit_v2", "nvmlInit"},
	"shutdown":    {"nvmlShutdown"},
	"version":     {"nvmlSystemGetDriverVersion"},
	"count":       {"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"},
	"device":      {"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"},
	"uuid":        {"nvmlDeviceGetUUID"},
	"name":        {"nvmlDeviceGetName"},
	"minor":       {"nvmlDeviceGetMinorNumber"},
	"busID":       {"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo"},
	"samples":     {"nvmlDeviceGetSamples"},
	"rates":       {"nvmlDeviceGetUtilizationRates"},
	"memory":      {"nvmlDeviceGetMemoryInfo_v2"},
	"memoryOld":   {"nvmlDeviceGetMemoryInfo"},
	"power":       {"nvmlDeviceGetPowerUsage"},
	"energy":      {"nvmlDeviceGetTotalEnergyConsumption"},
	"temperature": {"nvmlDeviceGetTemperature"},
	"clock":       {"nvmlDeviceGetClockInfo"},
}

// open looks before it leaps: a failed nvml.Init keeps a reference to the library for ever, and one without nvmlInit ends the process.
func (l *library) open() error {
	path := find(l.path)
	look := dl.New(path, dl.RTLD_LAZY|dl.RTLD_GLOBAL)
	if err := look.Open(); err != nil {
		if strings.Contains(err.Error(), "No such file") || strings.Contains(err.Error(), "cannot open shared object") {
			return ErrNoLibrary
		}
		return fmt.Errorf("%w (%w)", ErrNoLibrary, err)
	}
	has := map[string]bool{}
	for call, symbols := range needed {
		for _, s := range symbols {
			has[call] = has[call] || look.Lookup(s) == nil
		}
	}
	if err := look.Close(); err != nil {
		return fmt.Errorf("close %s: %w", path, err)
	}
	for _, call := range []string{"init", "shutdown", "count", "device", "uuid"} {
		if !has[call] {
			return fmt.Errorf("%s lacks %s: it is no NVML that this program can use", path, needed[call][0])
		}
	}
	l.has, l.nvml = has, nvml.New(nvml.WithLibraryPath(path))
	switch c := code(l.nvml.Init()); c {
	case success:
		return nil
	case libraryNotFound:
		return ErrNoLibrary
	case driverNotLoaded:
		return ErrDriverNotLoaded
	case versionMismatch:
		return ErrVersionMismatch
	default:
		return fmt.Errorf("open NVML: %s", c)
	}
}

func (l *library) close() { _ = l.nvml.Shutdown() } // whatever it says, we are done with it

func (l *library) version() (string, code) {
	if !l.has["version"] {
		return "", functionMissing
	}
	v, r := l.nvml.SystemGetDriverVersion()
	return strings.Clone(v), code(r)
}

func (l *library) count() (int, code) {
	n, r := l.nvml.DeviceGetCount()
	return n, code(r)
}

func (l *library) device(i int) (device, code) {
	d, r := l.nvml.DeviceGetHandleByIndex(i)
	return handle{d, l.has}, code(r)
}

// handle is one GPU.
type handle struct {
	nvml.Device
	has map[string]bool
}

func (h handle) uuid() (string, code) {
	v, r := h.GetUUID()
	return strings.Clone(v), code(r)
}

func (h handle) name() (string, code) {
	if !h.has["name"] {
		return "", functionMissing
	}
	v, r := h.GetName()
	return strings.Clone(v), code(r)
}

func (h handle) minor() (int, code) {
	if !h.has["minor"] {
		return 0, functionMissing
	}
	v, r := h.GetMinorNumber()
	return v, code(r)
}

func (h handle) busID() (string, code) {
	if !h.has["busID"] {
		return "", functionMissing
	}
	pci, r := h.GetPciInfo()
	var b strings.Builder
	for _, c := range pci.BusId {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c))
	}
	return b.String(), code(r)
}

func (h handle) samples(since uint64) ([]sample, code) {
	if !h.has["samples"] {
		return nil, functionMissing
	}
	kind, all, r := h.GetSamples(nvml.GPU_UTILIZATION_SAMPLES, since)
	if code(r) != success {
		return nil, code(r)
	}
	if kind != nvml.VALUE_TYPE_UNSIGNED_INT {
		return nil, argumentVersion
	}
	ring := make([]sample, len(all))
	for i, s := range all {
		ring[i] = sample{s.TimeStamp, binary.LittleEndian.Uint32(s.SampleValue[:4])}
	}
	return ring, success
}

func (h handle) rates() (uint32, code) {
	if !h.has["rates"] {
		return 0, functionMissing
	}
	u, r := h.GetUtilizationRates()
	return u.Gpu, code(r)
}

func (h handle) memory() (used, reserved, total uint64, c code) {
	if !h.has["memory"] {
		return 0, 0, 0, functionMissing
	}
	m, r := h.GetMemoryInfo_v2()
	return m.Used, m.Reserved, m.Total, code(r)
}

func (h handle) memoryOld() (used, total uint64, c code) {
	if !h.has["memoryOld"] {
		return 0, 0, functionMissing
	}
	m, r := h.GetMemoryInfo()
	return m.Used, m.Total, code(r)
}

func (h handle) power() (uint32, code) {
	if !h.has["power"] {
		return 0, functionMissing
	}
	v, r := h.GetPowerUsage()
	return v, code(r)
}

func (h handle) energy() (uint64, code) {
	if !h.has["energy"] {
		return 0, functionMissing
	}
	v, r := h.GetTotalEnergyConsumption()
	return v, code(r)
}

func (h handle) temperature() (uint32, code) {
	if !h.has["temperature"] {
		return 0, functionMissing
	}
	v, r := h.GetTemperature(nvml.TEMPERATURE_GPU)
	return v, code(r)
}

func (h handle) clock(kind int) (uint32, code) {
	if !h.has["clock"] {
		return 0, functionMissing
	}
	v, r := h.GetClockInfo(nvml.ClockType(kind))
	return v, code(r)
}
