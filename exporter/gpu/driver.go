package gpu

// driver is NVML as this package needs it, in plain types. A call that the library lacks answers functionMissing.
type driver interface {
	// open loads the library and initializes it. On an error nothing of it is in use.
	open() error
	close()
	version() (string, code)   // nvmlSystemGetDriverVersion
	count() (int, code)        // nvmlDeviceGetCount
	device(int) (device, code) // nvmlDeviceGetHandleByIndex

	watch(d device, uuid string) code // nvmlDeviceRegisterEvents, XIDs; once for each GPU
	event() (event, code)             // nvmlEventSetWait without waiting; timeout = nothing happened
	forget(key string)                // frees what device.activity keeps for a key
}

// event is an XID error. The GPU's name is kept at registration: a lost GPU cannot be asked for it.
type event struct {
	uuid string
	xid  uint64
}

// device is a handle: of a GPU or, for a few of the calls, of a MIG instance. Units are NVML's own.
type device interface {
	uuid() (string, code)
	name() (string, code)
	minor() (int, code)
	busID() (string, code)
	instances() ([]instance, code) // notSupported where MIG is unknown; none where it is off

	samples(since uint64) ([]sample, code)          // nvmlDeviceGetSamples, GPU utilization
	rates() (percent uint32, c code)                // nvmlDeviceGetUtilizationRates
	memory() (used, reserved, total uint64, c code) // nvmlDeviceGetMemoryInfo_v2
	memoryOld() (used, total uint64, c code)        // nvmlDeviceGetMemoryInfo: used counts what the driver holds
	power() (milliwatts uint32, c code)             // nvmlDeviceGetPowerUsage
	powerLimit() (milliwatts uint32, c code)        // nvmlDeviceGetEnforcedPowerLimit
	energy() (millijoules uint64, c code)           // nvmlDeviceGetTotalEnergyConsumption
	temperature() (celsius uint32, c code)          // nvmlDeviceGetTemperature, the GPU's sensor
	clock(kind int) (megahertz uint32, c code)      // nvmlDeviceGetClockInfo
	encoder() (percent uint32, c code)              // nvmlDeviceGetEncoderUtilization
	decoder() (percent uint32, c code)              // nvmlDeviceGetDecoderUtilization
	controller() (percent uint32, c code)           // nvmlDeviceGetUtilizationRates, the memory's
	replays() (count uint32, c code)                // nvmlDeviceGetPcieReplayCounter
	fields(ask []field) ([]value, code)             // nvmlDeviceGetFieldValues, an answer for each

	processes(mps bool) ([]process, code)                // nvmlDeviceGetComputeRunningProcesses, or the one of MPS' clients
	processSamples(since uint64) ([]processSample, code) // nvmlDeviceGetProcessUtilization; notFound = none was busy

	// activity is what the performance counters say of the time since the last call with this key: nvmlGpmSampleGet, or
	// nvmlGpmMigSampleGet for a GPU instance (-1 = the whole GPU), and nvmlGpmMetricsGet. noData at the first call.
	activity(key string, gpuInstance int) (shares, code)
}

// instance is a MIG device: its handle, and what does not change while it lives.
type instance struct {
	device
	id          string // UUID
	profile     string
	gpuInstance int
	placement   *Placement
}

// field names a value of nvmlDeviceGetFieldValues.
type field struct{ id, scope uint32 }

// value is the answer for one field. Its code is its own: the call succeeds even if no value is good.
type value struct {
	code   code
	number float64
	narrow bool // of 32 bits
}

// shares are percentages by metric; one that this GPU does not have is absent.
type shares map[metric]float64

// metric is a nvmlGpmMetricId_t.
type metric uint32

const (
	graphicsUtil metric = 1
	smUtil       metric = 2
	tensorUtil   metric = 5
	dramUtil     metric = 10
)

var metrics = []metric{graphicsUtil, smUtil, tensorUtil, dramUtil}
