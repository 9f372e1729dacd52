// Package state is the state file of the simulated driver: what libnvidia-ml.so.1 shows, which of its calls fail, and how often each
// was made. The layout is that of lib/fakegpu.h, held equal by a test. Writers take a lock on the file, so that the daemon and a
// person at the command line never undo each other; the library reads without a lock, by sequence numbers.
package state

import (
	"bytes"
	"crypto/sha1"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Bounds of the layout.
const (
	magic        = 0x55504746
	Version      = 2
	MaxGPUs      = 64
	Samples      = 128
	MaxFields    = 48
	MaxInstances = 8
	MaxProcesses = 32
	maxEvents    = 64
	logSize      = 1024
	slots        = 64
	AnyGPU       = -1 // a fault or count that is of no GPU in particular
)

// Functions are the simulated functions in the order of the layout.
var Functions = strings.Fields(`nvmlInit_v2 nvmlShutdown nvmlSystemGetDriverVersion nvmlSystemGetNVMLVersion nvmlErrorString
	nvmlDeviceGetCount_v2 nvmlDeviceGetHandleByIndex_v2 nvmlDeviceGetUUID nvmlDeviceGetName
	nvmlDeviceGetIndex nvmlDeviceGetMinorNumber nvmlDeviceGetPciInfo_v3 nvmlDeviceGetUtilizationRates
	nvmlDeviceGetSamples nvmlDeviceGetMemoryInfo nvmlDeviceGetMemoryInfo_v2 nvmlDeviceGetPowerUsage
	nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetTemperature nvmlDeviceGetClockInfo nvmlDeviceGetMigMode
	nvmlDeviceGetFieldValues nvmlDeviceGetEnforcedPowerLimit
	nvmlGpmQueryDeviceSupport nvmlGpmSampleAlloc nvmlGpmSampleFree nvmlGpmSampleGet nvmlGpmMigSampleGet nvmlGpmMetricsGet
	nvmlEventSetCreate nvmlEventSetFree nvmlEventSetWait_v2 nvmlDeviceRegisterEvents nvmlDeviceGetSupportedEventTypes
	nvmlDeviceGetMaxMigDeviceCount nvmlDeviceGetMigDeviceHandleByIndex nvmlDeviceGetGpuInstanceId nvmlDeviceGetComputeInstanceId
	nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetMPSComputeRunningProcesses_v3 nvmlDeviceGetProcessUtilization
	nvmlDeviceGetEncoderUtilization nvmlDeviceGetDecoderUtilization nvmlDeviceGetPcieReplayCounter
	nvmlDeviceGetGpuInstanceById nvmlGpuInstanceGetInfo`)

// Sample is one reading of the driver's ring.
type Sample struct {
	TimestampMicros uint64 // since the epoch
	Utilization     uint32 // percent
	_               uint32
}

// Types of a field's value (nvmlValueType_t).
const (
	Double         = 0
	UnsignedInt    = 1
	UnsignedLong64 = 3
)

// WholeGPU is the GPU instance of what is of no instance.
const WholeGPU = 0xFFFFFFFF

// Field is one value of nvmlDeviceGetFieldValues; ID 0 = none.
type Field struct {
	ID    uint32
	Code  int32 // nvmlReturn_t of this value alone
	Type  uint32
	_     uint32
	Value uint64 // its bits
}

// Activity is the performance counters: microseconds for which a part was active, weighed by its share. They only grow.
type Activity struct{ Graphics, SM, Tensor, Memory uint64 }

// Advance adds time in which the GPU was busy to a share (0..1), the way that a training step uses its parts.
func (a *Activity) Advance(elapsed time.Duration, share float64) {
	us := share * float64(elapsed.Microseconds())
	a.Graphics += uint64(us)
	a.SM += uint64(0.8 * us)
	a.Tensor += uint64(0.4 * us)
	a.Memory += uint64(0.5 * us)
}

// Instance is a MIG instance: a GPU instance with one compute instance.
type Instance struct {
	uuid                         [96]byte
	profile                      [32]byte
	GPUInstance, ComputeInstance uint32
	ProfileID, Placement         uint32
	MemoryTotal, MemoryReserved  uint64 // bytes
	MemoryUsed                   uint64 // bytes, without reserved
	Activity                     Activity
}

// UUID and Profile are the instance's texts; UUID "" = the slot is empty.
func (i *Instance) UUID() string    { return text(i.uuid[:]) }
func (i *Instance) Profile() string { return text(i.profile[:]) }

// Process is a process on a GPU; PID 0 = none.
type Process struct {
	PID             uint32
	MPS             uint32 // 1 = a client of MPS
	Memory          uint64 // bytes
	TimestampMicros uint64 // of SM
	SM              uint32 // percent
	GPUInstance     uint32 // or WholeGPU
}

type event struct {
	kind, data       uint64
	gpu, gpuInstance uint32
}

// Bits of GPU.Pinned: values that the daemon leaves as they are.
const (
	PinUtilization = 1 << iota
	PinPower
	PinTemperature
	PinMemory
)

// GPU is one simulated GPU as it lies in the file.
type GPU struct {
	sequence          uint32
	Minor             uint32
	uuid              [96]byte
	name              [96]byte
	busID             [32]byte
	Utilization       uint32 // percent of the last second
	MemoryUtilization uint32 // percent
	MemoryTotal       uint64 // bytes
	MemoryReserved    uint64 // bytes
	MemoryUsed        uint64 // bytes, without reserved
	EnergyMillijoules uint64
	PowerMilliwatts   uint32
	Temperature       uint32    // degrees Celsius
	ClockMegahertz    [4]uint32 // graphics, SM, memory, video
	SampleCount       uint32    // ever written
	Pinned            uint32
	PowerLimit        uint32 // milliwatts
	GPM               uint32 // 1 = has performance counters
	MIG               uint32 // 1 = MIG is on
	_                 uint32
	Activity          Activity
	samples           [Samples]Sample
	Fields            [MaxFields]Field
	Instances         [MaxInstances]Instance
	Processes         [MaxProcesses]Process
}

// SetField sets what nvmlDeviceGetFieldValues gives for an id, and the return of that value alone. It panics when there is no room.
func (g *GPU) SetField(id, kind uint32, value uint64, code int32) {
	for i := range g.Fields {
		if f := &g.Fields[i]; f.ID == id || f.ID == 0 {
			*f = Field{ID: id, Code: code, Type: kind, Value: value}
			return
		}
	}
	panic("no room for another field")
}

// AddField adds to a field's value.
func (g *GPU) AddField(id uint32, value uint64) {
	for i := range g.Fields {
		if g.Fields[i].ID == id {
			g.Fields[i].Value += value
		}
	}
}

// profileIDs are nvmlGpuInstanceInfo_t's of the plain profiles of H100 and A100.
var profileIDs = map[string]uint32{"1g": 19, "2g": 14, "3g": 9, "4g": 5, "7g": 0}

// SetInstances switches MIG on with one instance for each profile (like 3g.40gb, whose memory is 40 GiB), or off without any.
func (g *GPU) SetInstances(profiles ...string) {
	g.Instances, g.MIG = [MaxInstances]Instance{}, 0
	for i, profile := range profiles {
		in := &g.Instances[i]
		h := sha1.Sum(fmt.Appendf(nil, "%s %d %s", g.UUID(), i, profile))
		copy(in.uuid[:], fmt.Sprintf("MIG-%x-%x-%x-%x-%x", h[0:4], h[4:6], h[6:8], h[8:10], h[10:16]))
		copy(in.profile[:], profile)
		in.GPUInstance = uint32(7 + i)
		in.ProfileID, in.Placement = profileIDs[strings.SplitN(profile, ".", 2)[0]], uint32(i)
		var slices, gib uint64
		if _, err := fmt.Sscanf(profile, "%dg.%dgb", &slices, &gib); err != nil {
			gib = g.MemoryTotal >> 30 / uint64(len(profiles))
		}
		in.MemoryTotal, in.MemoryReserved = gib<<30, 16<<20
		g.MIG = 1
	}
}

// UUID, Name and BusID are the GPU's texts.
func (g *GPU) UUID() string  { return text(g.uuid[:]) }
func (g *GPU) Name() string  { return text(g.name[:]) }
func (g *GPU) BusID() string { return text(g.busID[:]) }

// Push puts a reading into the ring.
func (g *GPU) Push(at time.Time, percent uint32) {
	g.samples[g.SampleCount%Samples] = Sample{TimestampMicros: uint64(at.UnixMicro()), Utilization: percent}
	g.SampleCount++
}

type fault struct {
	code    int32
	_       uint32
	latency uint64 // microseconds
	after   uint64
}

type call struct {
	timestamp uint64
	function  uint32
	gpu       int32
}

// layout is struct fakegpu_state.
type layout struct {
	magic, version uint32
	gpuCount       uint32
	generation     uint32
	driver         [80]byte
	gpus           [MaxGPUs]GPU
	faults         [slots][MaxGPUs + 1]fault
	counts         [slots][MaxGPUs + 1]uint64
	calls          uint64
	log            [logSize]call
	eventCount     uint64
	events         [maxEvents]event
}

// File is an open state file. Its methods are safe for use by several processes at once, and not by several goroutines of one.
type File struct {
	file *os.File
	data []byte
	at   *layout
}

// Create makes a state file with so many GPUs of a profile, whose names follow from the node's. An existing one with the same GPUs is
// kept, with its counters and what was pinned; any other is replaced.
func Create(path, node string, gpus int, profile Profile) (*File, error) {
	if gpus < 0 || gpus > MaxGPUs {
		return nil, fmt.Errorf("%d GPUs: must be 0 to %d", gpus, MaxGPUs)
	}
	if f, err := Open(path); err == nil {
		if f.Count() == gpus && (gpus == 0 || f.at.gpus[0].UUID() == UUID(node, 0) && f.at.gpus[0].Name() == profile.Model) {
			return f, nil
		}
		// Who has the old file mapped would never see the new one: tell it that its driver is gone.
		if err := f.Upgrade("replaced"); err != nil {
			return nil, err
		}
		f.Close()
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	fresh := layout{magic: magic, version: Version, gpuCount: uint32(gpus), generation: 1}
	copy(fresh.driver[:], "580.95.05")
	for i := range gpus {
		g := &fresh.gpus[i]
		g.Minor = uint32(i)
		copy(g.uuid[:], UUID(node, i))
		copy(g.busID[:], fmt.Sprintf("00000000:%02X:00.0", i+1))
		profile.shape(g)
	}
	temporary := path + ".new"
	if err := os.WriteFile(temporary, unsafe.Slice((*byte)(unsafe.Pointer(&fresh)), unsafe.Sizeof(fresh)), 0o666); err != nil {
		return nil, err
	}
	// The library in a worker's container, which is not root, counts its calls too.
	if err := os.Chmod(temporary, 0o666); err != nil {
		return nil, err
	}
	if err := os.Rename(temporary, path); err != nil {
		return nil, err
	}
	return Open(path)
}

// UUID is the name of a node's GPU: the same at every start, and another one on every node.
func UUID(node string, index int) string {
	h := sha1.Sum(fmt.Appendf(nil, "fakegpu %s %d", node, index))
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", h[0:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

// Open maps an existing state file.
func Open(path string) (*File, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open the state of the simulated driver: %w", err)
	}
	size := int(unsafe.Sizeof(layout{}))
	info, err := f.Stat()
	if err == nil && info.Size() < int64(size) {
		err = fmt.Errorf("%s has %d bytes, a state file of version %d has %d", path, info.Size(), Version, size)
	}
	var data []byte
	if err == nil {
		data, err = unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	s := &File{file: f, data: data, at: (*layout)(unsafe.Pointer(&data[0]))}
	if s.at.magic != magic || s.at.version != Version {
		s.Close()
		return nil, fmt.Errorf("%s is no state file of version %d: remove it and start fakegpu daemon again", path, Version)
	}
	return s, nil
}

// Close unmaps the file.
func (f *File) Close() error { return errors.Join(unix.Munmap(f.data), f.file.Close()) }

// Count is the number of GPUs.
func (f *File) Count() int { return int(f.at.gpuCount) }

// GPU is a copy of a GPU, untorn.
func (f *File) GPU(i int) GPU {
	for {
		before := atomic.LoadUint32(&f.at.gpus[i].sequence)
		if before%2 == 0 {
			g := f.at.gpus[i]
			if atomic.LoadUint32(&f.at.gpus[i].sequence) == before {
				return g
			}
		}
	}
}

// Update changes a GPU; change gets it and may write every field.
func (f *File) Update(i int, change func(*GPU)) error {
	if err := unix.Flock(int(f.file.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock the state file: %w", err)
	}
	g := &f.at.gpus[i]
	// Even when a writer was killed between its two additions, the number is odd while we write and even afterwards.
	atomic.StoreUint32(&g.sequence, g.sequence|1)
	change(g)
	atomic.AddUint32(&g.sequence, 1)
	return unix.Flock(int(f.file.Fd()), unix.LOCK_UN)
}

// DriverVersion is what nvmlSystemGetDriverVersion says.
func (f *File) DriverVersion() string { return text(f.at.driver[:]) }

// Upgrade loads another driver version: whoever has opened the library before gets LIB_RM_VERSION_MISMATCH from now on.
func (f *File) Upgrade(version string) error {
	if len(version) >= len(f.at.driver) {
		return fmt.Errorf("driver version %q: at most %d characters", version, len(f.at.driver)-1)
	}
	clear(f.at.driver[:])
	copy(f.at.driver[:], version)
	atomic.AddUint32(&f.at.generation, 1)
	return nil
}

// XID makes a GPU report an XID error.
func (f *File) XID(gpu int, xid uint64) error {
	return f.emit(event{kind: 0x8, data: xid, gpu: uint32(gpu), gpuInstance: WholeGPU})
}

func (f *File) emit(e event) error {
	if err := unix.Flock(int(f.file.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock the state file: %w", err)
	}
	f.at.events[f.at.eventCount%maxEvents] = e
	atomic.AddUint64(&f.at.eventCount, 1)
	return unix.Flock(int(f.file.Fd()), unix.LOCK_UN)
}

// Function is the place of a function in the layout.
func Function(name string) (int, error) {
	for i, f := range Functions {
		if f == name {
			return i, nil
		}
	}
	return 0, fmt.Errorf("function %q is not simulated; there are %s", name, strings.Join(Functions, ", "))
}

func slot(gpu int) (int, error) {
	if gpu == AnyGPU {
		return MaxGPUs, nil
	}
	if gpu < 0 || gpu >= MaxGPUs {
		return 0, fmt.Errorf("gpu %d: must be 0 to %d", gpu, MaxGPUs-1)
	}
	return gpu, nil
}

// Fail makes a function answer with a code and a latency, from the call after the next `after` ones on; code 0 and no latency end it.
// Each GPU counts for itself; with AnyGPU the count of the GPU that is asked for applies.
func (f *File) Fail(function string, gpu int, code int32, latency time.Duration, after uint64) error {
	fn, err := Function(function)
	if err != nil {
		return err
	}
	s, err := slot(gpu)
	if err != nil {
		return err
	}
	f.at.faults[fn][s] = fault{code: code, latency: uint64(latency.Microseconds()), after: after + atomic.LoadUint64(&f.at.counts[fn][s])}
	return nil
}

// Counts is how often each function was called, over all GPUs.
func (f *File) Counts() map[string]uint64 {
	counts := map[string]uint64{}
	for i, name := range Functions {
		for s := range f.at.counts[i] {
			counts[name] += atomic.LoadUint64(&f.at.counts[i][s])
		}
	}
	return counts
}

// Calls is how many calls were ever made.
func (f *File) Calls() uint64 { return atomic.LoadUint64(&f.at.calls) }

// Call is one entry of the log.
type Call struct {
	At       time.Time `json:"at"`
	Function string    `json:"function"`
	GPU      int       `json:"gpu"` // AnyGPU where there is none
}

// Log is the newest calls, oldest first.
func (f *File) Log() (calls []Call) {
	total := f.Calls()
	for n := total - min(total, logSize); n < total; n++ {
		c := f.at.log[n%logSize]
		if int(c.function) < len(Functions) {
			calls = append(calls, Call{At: time.UnixMicro(int64(c.timestamp)), Function: Functions[c.function], GPU: int(c.gpu)})
		}
	}
	return calls
}

// Clear forgets counts and log.
func (f *File) Clear() {
	for i := range f.at.counts {
		for s := range f.at.counts[i] {
			atomic.StoreUint64(&f.at.counts[i][s], 0)
			f.at.faults[i][s].after = 0
		}
	}
	atomic.StoreUint64(&f.at.calls, 0)
}

func text(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}
