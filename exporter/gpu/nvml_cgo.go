//go:build linux && cgo

package gpu

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// library is NVML by go-nvml, with a guard before every call: go-nvml binds lazily, and calling a function that the driver's library
// lacks ends the whole process. No nvml.Return is ever printed: that, too, calls into the library.
type library struct {
	path     string          // as configured; "" = to be found
	nvml     nvml.Interface  // of the newest attempt to open it
	has      map[string]bool // call → the library exports what is behind it
	counters map[string]*counters
	events   nvml.EventSet
	watched  map[nvml.Device]string // handle → UUID, as registered
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

// needed are the symbols behind each call, any of which does: go-nvml takes the newest version that is there. Calls that need several
// functions have a name for each.
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
	"powerLimit":  {"nvmlDeviceGetEnforcedPowerLimit"},
	"encoder":     {"nvmlDeviceGetEncoderUtilization"},
	"decoder":     {"nvmlDeviceGetDecoderUtilization"},
	"replays":     {"nvmlDeviceGetPcieReplayCounter"},
	"fields":      {"nvmlDeviceGetFieldValues"},

	"processes":      {"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses"},
	"processesMPS":   {"nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v2", "nvmlDeviceGetMPSComputeRunningProcesses"},
	"processSamples": {"nvmlDeviceGetProcessUtilization"},

	"gpmSupport": {"nvmlGpmQueryDeviceSupport"},
	"gpmAlloc":   {"nvmlGpmSampleAlloc"},
	"gpmFree":    {"nvmlGpmSampleFree"},
	"gpmGet":     {"nvmlGpmSampleGet"},
	"gpmGetMIG":  {"nvmlGpmMigSampleGet"},
	"gpmMetrics": {"nvmlGpmMetricsGet"},

	"eventCreate":   {"nvmlEventSetCreate"},
	"eventFree":     {"nvmlEventSetFree"},
	"eventWait":     {"nvmlEventSetWait_v2", "nvmlEventSetWait"},
	"eventRegister": {"nvmlDeviceRegisterEvents"},

	"migMode":     {"nvmlDeviceGetMigMode"},
	"migCount":    {"nvmlDeviceGetMaxMigDeviceCount"},
	"migHandle":   {"nvmlDeviceGetMigDeviceHandleByIndex"},
	"migInstance": {"nvmlDeviceGetGpuInstanceId"},
	"migById":     {"nvmlDeviceGetGpuInstanceById"},
	"migInfo":     {"nvmlGpuInstanceGetInfo"},
}

// lacks says that one of the calls is not to be had.
func (l *library) lacks(calls ...string) bool {
	return slices.ContainsFunc(calls, func(c string) bool { return !l.has[c] })
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
	l.counters, l.events, l.watched = map[string]*counters{}, nil, map[nvml.Device]string{}
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

// close lets go of everything that was taken from the library, and then of the library. Whatever it answers, we are done with it.
func (l *library) close() {
	for key := range l.counters {
		l.forget(key)
	}
	if l.events != nil {
		_ = l.events.Free()
	}
	l.counters, l.events, l.watched = nil, nil, nil
	_ = l.nvml.Shutdown()
}

func (l *library) forget(key string) {
	if c := l.counters[key]; c != nil {
		_ = c.older.Free()
		_ = c.newer.Free()
		delete(l.counters, key)
	}
}

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
	return handle{d, l}, code(r)
}

// handle is one GPU.
type handle struct {
	nvml.Device
	*library
}

func (h handle) uuid() (string, code) {
	v, r := h.GetUUID()
	return strings.Clone(v), code(r)
}

func (h handle) name() (string, code) {
	if !h.library.has["name"] {
		return "", functionMissing
	}
	v, r := h.GetName()
	return strings.Clone(v), code(r)
}

func (h handle) minor() (int, code) {
	if !h.library.has["minor"] {
		return 0, functionMissing
	}
	v, r := h.GetMinorNumber()
	return v, code(r)
}

func (h handle) busID() (string, code) {
	if !h.library.has["busID"] {
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
	if !h.library.has["samples"] {
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
	if !h.library.has["rates"] {
		return 0, functionMissing
	}
	u, r := h.GetUtilizationRates()
	return u.Gpu, code(r)
}

func (h handle) memory() (used, reserved, total uint64, c code) {
	if !h.library.has["memory"] {
		return 0, 0, 0, functionMissing
	}
	m, r := h.GetMemoryInfo_v2()
	return m.Used, m.Reserved, m.Total, code(r)
}

func (h handle) memoryOld() (used, total uint64, c code) {
	if !h.library.has["memoryOld"] {
		return 0, 0, functionMissing
	}
	m, r := h.GetMemoryInfo()
	return m.Used, m.Total, code(r)
}

func (h handle) power() (uint32, code) {
	if !h.library.has["power"] {
		return 0, functionMissing
	}
	v, r := h.GetPowerUsage()
	return v, code(r)
}

func (h handle) energy() (uint64, code) {
	if !h.library.has["energy"] {
		return 0, functionMissing
	}
	v, r := h.GetTotalEnergyConsumption()
	return v, code(r)
}

func (h handle) temperature() (uint32, code) {
	if !h.library.has["temperature"] {
		return 0, functionMissing
	}
	v, r := h.GetTemperature(nvml.TEMPERATURE_GPU)
	return v, code(r)
}

func (h handle) clock(kind int) (uint32, code) {
	if !h.library.has["clock"] {
		return 0, functionMissing
	}
	v, r := h.GetClockInfo(nvml.ClockType(kind))
	return v, code(r)
}

func (h handle) powerLimit() (uint32, code) {
	if h.lacks("powerLimit") {
		return 0, functionMissing
	}
	v, r := h.GetEnforcedPowerLimit()
	return v, code(r)
}

func (h handle) encoder() (uint32, code) {
	if h.lacks("encoder") {
		return 0, functionMissing
	}
	v, _, r := h.GetEncoderUtilization()
	return v, code(r)
}

func (h handle) decoder() (uint32, code) {
	if h.lacks("decoder") {
		return 0, functionMissing
	}
	v, _, r := h.GetDecoderUtilization()
	return v, code(r)
}

func (h handle) controller() (uint32, code) {
	if h.lacks("rates") {
		return 0, functionMissing
	}
	u, r := h.GetUtilizationRates()
	return u.Memory, code(r)
}

func (h handle) replays() (uint32, code) {
	if h.lacks("replays") {
		return 0, functionMissing
	}
	v, r := h.GetPcieReplayCounter()
	return uint32(v), code(r)
}

func (h handle) processes(mps bool) (all []process, c code) {
	needs, get := "processes", h.GetComputeRunningProcesses
	if mps {
		needs, get = "processesMPS", h.GetMPSComputeRunningProcesses
	}
	if h.lacks(needs) {
		return nil, functionMissing
	}
	infos, r := get()
	for _, p := range infos {
		all = append(all, process{pid: p.Pid, memory: p.UsedGpuMemory})
	}
	return all, code(r)
}

func (h handle) processSamples(since uint64) (all []processSample, c code) {
	if h.lacks("processSamples") {
		return nil, functionMissing
	}
	samples, r := h.GetProcessUtilization(since)
	if code(r) != success {
		return nil, code(r)
	}
	for _, s := range samples {
		all = append(all, processSample{pid: s.Pid, timestamp: s.TimeStamp, percent: s.SmUtil})
	}
	return all, success
}

func (h handle) fields(ask []field) ([]value, code) {
	if h.lacks("fields") {
		return nil, functionMissing
	}
	raw := make([]nvml.FieldValue, len(ask)) // fresh ones: a value that failed is left as it was
	for i, f := range ask {
		raw[i].FieldId, raw[i].ScopeId = f.id, f.scope
	}
	if r := h.GetFieldValues(raw); code(r) != success {
		return nil, code(r)
	}
	values := make([]value, len(raw))
	for i, v := range raw {
		values[i] = fieldValue(code(v.NvmlReturn), v.ValueType, v.Value)
	}
	return values, success
}

// fieldValue decodes a value by its type. One of a type that is not known is not supported.
func fieldValue(c code, kind uint32, raw [8]byte) value {
	bits := binary.LittleEndian.Uint64(raw[:])
	switch nvml.ValueType(kind) {
	case nvml.VALUE_TYPE_DOUBLE:
		return value{code: c, number: math.Float64frombits(bits)}
	case nvml.VALUE_TYPE_UNSIGNED_INT:
		return value{code: c, number: float64(uint32(bits)), narrow: true}
	case nvml.VALUE_TYPE_SIGNED_INT:
		return value{code: c, number: float64(int32(bits)), narrow: true}
	case nvml.VALUE_TYPE_UNSIGNED_LONG, nvml.VALUE_TYPE_UNSIGNED_LONG_LONG:
		return value{code: c, number: float64(bits)}
	case nvml.VALUE_TYPE_SIGNED_LONG_LONG:
		return value{code: c, number: float64(int64(bits))}
	case nvml.VALUE_TYPE_UNSIGNED_SHORT:
		return value{code: c, number: float64(uint16(bits)), narrow: true}
	}
	if c == success {
		c = notSupported
	}
	return value{code: c}
}

// counters are two samples of a GPU's or an instance's performance counters. The library's memory is behind them: they are reused,
// belong to the one goroutine that reads (two at once have brought down nodes), and are freed before the library is.
type counters struct {
	older, newer nvml.GpmSample
	taken        int
}

func (h handle) activity(key string, gpuInstance int) (shares, code) {
	get := func(into nvml.GpmSample) nvml.Return { return h.GpmSampleGet(into) }
	needs := "gpmGet"
	if gpuInstance >= 0 {
		needs = "gpmGetMIG"
		get = func(into nvml.GpmSample) nvml.Return { return h.GpmMigSampleGet(gpuInstance, into) }
	}
	if h.lacks("gpmSupport", "gpmAlloc", "gpmFree", "gpmMetrics", needs) {
		return nil, functionMissing
	}
	c := h.library.counters[key]
	if c == nil {
		support, r := h.GpmQueryDeviceSupport()
		if code(r) != success {
			return nil, code(r)
		}
		if support.IsSupportedDevice == 0 {
			return nil, notSupported
		}
		older, r := h.library.nvml.GpmSampleAlloc()
		if code(r) != success {
			return nil, code(r)
		}
		newer, r := h.library.nvml.GpmSampleAlloc()
		if code(r) != success {
			_ = older.Free()
			return nil, code(r)
		}
		c = &counters{older: older, newer: newer}
		h.library.counters[key] = c
	}
	if r := get(c.older); code(r) != success {
		c.taken = 0 // what is in it now is of nobody knows when
		return nil, code(r)
	}
	c.older, c.newer = c.newer, c.older
	if c.taken++; c.taken < 2 {
		return nil, noData
	}
	ask := nvml.GpmMetricsGetType{NumMetrics: uint32(len(metrics)), Sample1: c.older, Sample2: c.newer}
	for i, id := range metrics {
		ask.Metrics[i].MetricId = uint32(id)
	}
	if r := h.library.nvml.GpmMetricsGet(&ask); code(r) != success {
		return nil, code(r)
	}
	found := shares{}
	for i, id := range metrics {
		if code(ask.Metrics[i].NvmlReturn) == success {
			found[id] = ask.Metrics[i].Value
		}
	}
	return found, success
}

func (h handle) instances() ([]instance, code) {
	if h.lacks("migMode", "migCount", "migHandle", "migInstance", "name") {
		return nil, functionMissing
	}
	mode, _, r := h.GetMigMode()
	if code(r) != success || mode != nvml.DEVICE_MIG_ENABLE {
		return nil, code(r)
	}
	slots, r := h.GetMaxMigDeviceCount()
	if code(r) != success {
		return nil, code(r)
	}
	var found []instance
	for i := range slots {
		d, r := h.GetMigDeviceHandleByIndex(i)
		if c := code(r); c == notFound || c == invalidArgument {
			continue // an empty slot
		} else if c != success {
			return nil, c
		}
		in := instance{device: handle{d, h.library}}
		id, r := d.GetUUID()
		if code(r) != success {
			continue // it was taken away this moment
		}
		gi, r := d.GetGpuInstanceId()
		if code(r) != success {
			continue
		}
		in.id, in.gpuInstance = strings.Clone(id), gi
		if name, r := d.GetName(); code(r) == success {
			_, profile, _ := strings.Cut(name, " MIG ")
			in.profile = strings.Clone(profile)
		}
		in.placement = h.placement(gi)
		found = append(found, in)
	}
	return found, success
}

// placement is nil where the driver does not say: then only dynamic resource allocation lacks a name for the instance.
func (h handle) placement(gpuInstance int) *Placement {
	if h.lacks("migById", "migInfo") {
		return nil
	}
	gi, r := h.GetGpuInstanceById(gpuInstance)
	if code(r) != success {
		return nil
	}
	info, r := gi.GetInfo()
	if code(r) != success {
		return nil
	}
	return &Placement{ProfileID: int(info.ProfileId), Start: int(info.Placement.Start)}
}

func (l *library) watch(d device, uuid string) code {
	if l.lacks("eventCreate", "eventFree", "eventWait", "eventRegister") {
		return functionMissing
	}
	if l.events == nil {
		set, r := l.nvml.EventSetCreate()
		if code(r) != success {
			return code(r)
		}
		l.events = set
	}
	h := d.(handle)
	c := code(h.RegisterEvents(nvml.EventTypeXidCriticalError, l.events))
	if c == success {
		l.watched[h.Device] = uuid
	}
	return c
}

func (l *library) event() (event, code) {
	if l.events == nil || len(l.watched) == 0 {
		return event{}, functionMissing
	}
	e, r := l.events.Wait(0)
	if code(r) != success {
		return event{}, code(r)
	}
	return event{uuid: l.watched[e.Device], xid: e.EventData}, success
}
