package gpu

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"
)

// driver is NVML as this package needs it, in plain types. A call that the library lacks answers functionMissing.
type driver interface {
	// open loads the library and initializes it. On an error nothing of it is in use.
	open() error
	close()
	version() (string, code)   // nvmlSystemGetDriverVersion
	count() (int, code)        // nvmlDeviceGetCount
	device(int) (device, code) // nvmlDeviceGetHandleByIndex
}

// device is one GPU's handle. Units are NVML's own.
type device interface {
	uuid() (string, code)
	name() (string, code)
	minor() (int, code)
	busID() (string, code)
	samples(since uint64) ([]sample, code)          // nvmlDeviceGetSamples, GPU utilization
	rates() (percent uint32, c code)                // nvmlDeviceGetUtilizationRates
	memory() (used, reserved, total uint64, c code) // nvmlDeviceGetMemoryInfo_v2
	memoryOld() (used, total uint64, c code)        // nvmlDeviceGetMemoryInfo: used counts what the driver holds
	power() (milliwatts uint32, c code)             // nvmlDeviceGetPowerUsage
	energy() (millijoules uint64, c code)           // nvmlDeviceGetTotalEnergyConsumption
	temperature() (celsius uint32, c code)          // nvmlDeviceGetTemperature, the GPU's sensor
	clock(kind int) (megahertz uint32, c code)      // nvmlDeviceGetClockInfo
}

var clockNames = []string{"graphics", "sm", "memory", "video"} // nvmlClockType_t in order

// How often things are tried again.
const (
	openAgainFirst  = time.Second
	openAgainAtMost = 10 * time.Second
	listAgain       = 30 * time.Second // GPUs may be added
	askAgain        = 5 * time.Minute  // what was not supported: MIG may have been switched off
	probeAgain      = 5 * time.Second  // a lost GPU
	blindAtMost     = 30               // passes in which every GPU failed, after which the process is of no use
)

// Reader reads the GPUs. It owns the library and is not safe for concurrent use: one goroutine calls it.
type Reader struct {
	driver driver
	log    *slog.Logger

	opened     bool      // the library is initialized
	everOpened bool      // it was so once
	openErr    error     // why not
	openNext   time.Time // not tried before
	openWait   time.Duration
	versionIs  string

	listed time.Time // when the inventory was taken
	gpus   []*unit
	blind  int // passes in a row in which no GPU answered

	errors map[CallErrors]uint64 // keyed with Count 0
}

// unit is what is remembered of one GPU.
type unit struct {
	Device
	handle   device
	meter    meter
	noneTill map[string]time.Time // call → not supported, asked again then
	probe    time.Time            // a lost GPU is not asked before
}

// New makes a Reader. It opens nothing and starts nothing.
func New(config Config) *Reader { return newReader(newDriver(config.LibraryPath), config.Logger) }

func newReader(d driver, log *slog.Logger) *Reader {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Reader{driver: d, log: log, openWait: openAgainFirst, errors: map[CallErrors]uint64{}}
}

// Close lets go of the library: no handle of the driver is held afterwards. The next Read opens it again.
func (r *Reader) Close() error {
	if r.opened {
		r.driver.close()
		r.opened = false
	}
	r.gpus = nil
	return nil
}

// Read makes one pass over the GPUs: it opens the library when needed, reads every GPU once and integrates. It blocks as long as the
// driver does. now is the time of the reading.
func (r *Reader) Read(now time.Time) Reading {
	err := r.pass(now)
	reading := Reading{At: now, Err: err, DriverVersion: r.versionIs}
	for _, u := range r.gpus {
		reading.Devices = append(reading.Devices, u.published())
	}
	for e, n := range r.errors {
		e.Count = n
		reading.Errors = append(reading.Errors, e)
	}
	slices.SortFunc(reading.Errors, func(a, b CallErrors) int {
		return strings.Compare(a.UUID+" "+a.Call+" "+a.Code, b.UUID+" "+b.Call+" "+b.Code)
	})
	return reading
}

func (u *unit) published() Device {
	d := u.Device
	d.Busy, d.Observed, d.Discarded = u.meter.busy, u.meter.observed, u.meter.discarded
	return d
}

func (r *Reader) pass(now time.Time) error {
	if err := r.open(now); err != nil {
		return err
	}
	if r.gpus == nil || now.Sub(r.listed) >= listAgain {
		if err := r.list(now); err != nil {
			return err
		}
	}
	answered := len(r.gpus) == 0
	for _, u := range r.gpus {
		gone, ok := r.read(u, now)
		if gone != success {
			return r.gone(gone, fmt.Sprintf("read gpu %d", u.Index))
		}
		answered = answered || ok
	}
	if answered {
		r.blind = 0
		return nil
	}
	// Every GPU fails: the container has lost its device files, or the driver is stuck. A new container gets them back.
	if r.blind++; r.blind >= blindAtMost && !r.onlyLost() {
		return fmt.Errorf("no GPU has answered in %d readings: %w", r.blind, ErrRestart)
	}
	return nil
}

// onlyLost says that every GPU has told why it does not answer: a new process would hear the same.
func (r *Reader) onlyLost() bool {
	return !slices.ContainsFunc(r.gpus, func(u *unit) bool { return u.Up })
}

func (r *Reader) open(now time.Time) error {
	if r.opened {
		return nil
	}
	if now.Before(r.openNext) {
		return r.openErr
	}
	if err := r.driver.open(); err != nil {
		if r.everOpened && !errors.Is(err, ErrRestart) {
			err = fmt.Errorf("%w: %w", err, ErrRestart)
		}
		if r.openErr == nil || r.openErr.Error() != err.Error() {
			r.log.Warn("no GPU can be read; trying again", "err", err)
		}
		r.openErr, r.openNext = err, now.Add(r.openWait)
		r.openWait = min(2*r.openWait, openAgainAtMost)
		return err
	}
	r.opened, r.everOpened, r.openErr, r.openWait, r.blind = true, true, nil, openAgainFirst, 0
	if v, c := r.driver.version(); c == success {
		r.versionIs = v
	} else {
		r.count("", "nvmlSystemGetDriverVersion", c)
	}
	r.log.Info("NVML is open", "driver", r.versionIs)
	return nil
}

// gone ends this process's use of the driver.
func (r *Reader) gone(c code, doing string) error {
	r.driver.close()
	r.opened = false
	return fmt.Errorf("%s: %s: %w", doing, c, ErrRestart)
}

// list takes the inventory: new GPUs are added, known ones get a new handle and keep their counters.
func (r *Reader) list(now time.Time) error {
	n, c := r.driver.count()
	switch c.verdict() {
	case fine:
	case driverGone:
		return r.gone(c, "count the gpus")
	default:
		r.count("", "nvmlDeviceGetCount_v2", c)
		return fmt.Errorf("count the gpus: %s", c)
	}
	for i := range n {
		h, c := r.driver.device(i)
		if c != success {
			if c.verdict() == driverGone && c != gpuNotFound {
				return r.gone(c, fmt.Sprintf("open gpu %d", i))
			}
			r.failed(i, "nvmlDeviceGetHandleByIndex_v2", c, now)
			continue
		}
		uuid, c := h.uuid()
		if c != success {
			r.failed(i, "nvmlDeviceGetUUID", c, now)
			continue
		}
		u := r.unit(uuid)
		if u == nil {
			u = &unit{Device: Device{UUID: uuid, Up: true, Minor: -1}, noneTill: map[string]time.Time{}}
			r.gpus = append(r.gpus, u)
			r.log.Info("found a GPU", "gpu", i, "uuid", uuid)
		}
		u.handle, u.Index = h, i
		if v, c := h.name(); r.known(u, "nvmlDeviceGetName", c, now) {
			u.Model = v
		}
		if v, c := h.minor(); r.known(u, "nvmlDeviceGetMinorNumber", c, now) {
			u.Minor = v
		}
		if v, c := h.busID(); r.known(u, "nvmlDeviceGetPciInfo_v3", c, now) {
			u.PCIBusID = v
		}
	}
	slices.SortFunc(r.gpus, func(a, b *unit) int { return a.Index - b.Index })
	r.listed = now
	if r.gpus == nil {
		r.gpus = []*unit{} // there is none: that is an inventory
	}
	return nil
}

// failed is a GPU that the inventory could not open. A known one with that index is down.
func (r *Reader) failed(index int, call string, c code, now time.Time) {
	for _, u := range r.gpus {
		if u.Index == index {
			r.known(u, call, c, now)
			return
		}
	}
	r.count("", call, c)
}

func (r *Reader) unit(uuid string) *unit {
	for _, u := range r.gpus {
		if u.UUID == uuid {
			return u
		}
	}
	return nil
}

// known notes how a call about a GPU went, and says whether its value is good.
func (r *Reader) known(u *unit, call string, c code, now time.Time) bool {
	switch c.verdict() {
	case fine:
		return true
	case absent:
		u.noneTill[call] = now.Add(askAgain)
	case empty:
	case lost:
		r.count(u.UUID, call, c)
		if u.Up {
			r.log.Warn("a GPU does not answer; the others go on", "gpu", u.Index, "uuid", u.UUID, "code", c.String())
		}
		u.Up, u.Reason, u.probe = false, c.String(), now.Add(probeAgain)
	default:
		r.count(u.UUID, call, c)
	}
	return false
}

func (r *Reader) count(uuid, call string, c code) {
	r.errors[CallErrors{UUID: uuid, Call: call, Code: c.String()}]++
}

// read reads one GPU. gone is set when the driver is gone; ok says that the GPU answered anything.
func (r *Reader) read(u *unit, now time.Time) (gone code, ok bool) {
	d := Device{UUID: u.UUID, Model: u.Model, PCIBusID: u.PCIBusID, Index: u.Index, Minor: u.Minor, Up: u.Up, Reason: u.Reason, UtilizationSource: u.UtilizationSource}
	if !u.Up && now.Before(u.probe) {
		u.Device = d
		return success, false
	}
	// ask makes one call, unless it is known to be unsupported, and once the GPU is lost no further one.
	down := false
	ask := func(call string, f func() code) {
		if gone != success || down || now.Before(u.noneTill[call]) {
			return
		}
		c := f()
		if c.verdict() == driverGone {
			gone = c
			return
		}
		if r.known(u, call, c, now) {
			ok = true
		}
		down = c.verdict() == lost
	}
	r.readUtilization(u, &d, now, ask)
	ask("nvmlDeviceGetMemoryInfo_v2", func() code {
		used, reserved, total, c := u.handle.memory()
		if c == success {
			d.MemoryUsed, d.MemoryReserved, d.MemoryTotal = &used, &reserved, &total
		}
		return c
	})
	if now.Before(u.noneTill["nvmlDeviceGetMemoryInfo_v2"]) {
		ask("nvmlDeviceGetMemoryInfo", func() code {
			used, total, c := u.handle.memoryOld()
			if c == success {
				d.MemoryUsed, d.MemoryTotal = &used, &total
			}
			return c
		})
	}
	ask("nvmlDeviceGetPowerUsage", func() code {
		v, c := u.handle.power()
		return into(&d.PowerWatts, float64(v)/1e3, c)
	})
	ask("nvmlDeviceGetTotalEnergyConsumption", func() code {
		v, c := u.handle.energy()
		return into(&d.EnergyJoules, float64(v)/1e3, c)
	})
	ask("nvmlDeviceGetTemperature", func() code {
		v, c := u.handle.temperature()
		return into(&d.TemperatureCelsius, float64(v), c)
	})
	clocks := map[string]float64{}
	for kind, name := range clockNames {
		ask("nvmlDeviceGetClockInfo", func() code {
			v, c := u.handle.clock(kind)
			if c == success {
				clocks[name] = float64(v) * 1e6
			}
			return c
		})
	}
	if len(clocks) > 0 {
		d.ClockHertz = clocks
	}
	switch {
	case down:
		d = Device{UUID: u.UUID, Model: u.Model, PCIBusID: u.PCIBusID, Index: u.Index, Minor: u.Minor, Reason: u.Reason, UtilizationSource: u.UtilizationSource}
	case ok && !u.Up:
		r.log.Info("a GPU answers again", "gpu", u.Index, "uuid", u.UUID)
		d.Up, d.Reason = true, ""
	}
	u.Device = d
	return gone, ok && !down
}

func into(to **float64, v float64, c code) code {
	if c == success {
		*to = &v
	}
	return c
}

// readUtilization integrates the ring's new samples. The ring of an idle GPU runs dry; then the rate of the last second speaks.
func (r *Reader) readUtilization(u *unit, d *Device, now time.Time, ask func(string, func() code)) {
	const samples, rates = "nvmlDeviceGetSamples", "nvmlDeviceGetUtilizationRates"
	done := false
	take := func(share float64, valid bool) {
		if valid {
			d.Utilization, done = &share, true
		}
	}
	ask(samples, func() code {
		ring, c := u.handle.samples(u.meter.newest)
		if c == success {
			take(u.meter.samples(now, ring))
		}
		return c
	})
	if !done {
		ask(rates, func() code {
			percent, c := u.handle.rates()
			if c == success {
				take(u.meter.rate(now, percent))
			}
			return c
		})
	}
	switch {
	case !now.Before(u.noneTill[samples]):
		d.UtilizationSource = "samples"
	case !now.Before(u.noneTill[rates]):
		d.UtilizationSource = "rates"
	default:
		d.UtilizationSource = ""
	}
}
