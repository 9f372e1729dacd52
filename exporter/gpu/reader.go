package gpu

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"
)

// How often things are tried again.
const (
	openAgainFirst  = time.Second
	openAgainAtMost = 10 * time.Second
	listAgain       = 30 * time.Second // GPUs may be added
	askAgain        = 5 * time.Minute  // what was not supported: MIG may have been switched off
	probeAgain      = 5 * time.Second  // a lost GPU
	gaugesEvery     = 5 * time.Second  // power, temperatures, clocks, and what the driver counts
	healthEvery     = 30 * time.Second // errors that a person has to look into
	eventsAtMost    = 64               // in one pass: a GPU that falls off the bus may report for ever
	blindAtMost     = 30               // passes in which every GPU failed, after which the process is of no use
)

// Reader reads the GPUs. It owns the library and is not safe for concurrent use: one goroutine calls it.
type Reader struct {
	driver driver
	record *recorder // nil = nothing is recorded
	log    *slog.Logger
	detail bool
	podOf  func(uint32) string // nil = processes are not read
	clock  func() time.Time    // what calls cost

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
	costs  map[string]*CallCost
}

// unit is what is remembered of one GPU.
type unit struct {
	Device
	handle    device
	asked     asked
	load      loadMeter
	instances []*part
	watched   bool      // its events are registered
	probe     time.Time // a lost GPU is not asked before
	processed time.Time // when the groups that are read less often were read
	gauged    time.Time
	checked   time.Time
}

// part is what is remembered of one MIG instance.
type part struct {
	Instance
	handle device
	asked  asked
	load   loadMeter
}

// asked says until when a call is not made again, since its answer was that there is no such thing.
type asked map[string]time.Time

func (a asked) unsupported(call string, now time.Time) bool { return now.Before(a[call]) }

// New makes a Reader. It opens nothing and starts nothing.
func New(config Config) *Reader { return newReader(newDriver(config.LibraryPath), config) }

func newReader(d driver, config Config) *Reader {
	if config.Logger == nil {
		config.Logger = slog.New(slog.DiscardHandler)
	}
	var record *recorder
	if config.Record != nil {
		record = &recorder{driver: d, to: config.Record, left: maxCapture, stop: func(err error) { config.Logger.Warn("the recording ended", "err", err) }}
		d = record
	}
	return &Reader{driver: d, record: record, log: config.Logger, detail: config.Detail, podOf: config.PodOf, clock: time.Now, openWait: openAgainFirst,
		errors: map[CallErrors]uint64{}, costs: map[string]*CallCost{}}
}

// Close lets go of the driver: none of its device files is held afterwards, though the library's file stays mapped, as glibc will have
// it. The next Read opens it again. The GPUs' counters go on where they were.
func (r *Reader) Close() error {
	if r.opened {
		r.driver.close()
		r.opened = false
	}
	for _, u := range r.gpus {
		u.handle, u.instances, u.watched = nil, nil, false
	}
	r.listed, r.openNext = time.Time{}, time.Time{}
	return nil
}

// Read makes one pass over the GPUs: it opens the library when needed, reads every GPU once and integrates. It blocks as long as the
// driver does. now is the time of the reading.
func (r *Reader) Read(now time.Time) Reading {
	if r.record != nil {
		r.record.write(line{Read: &now})
	}
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
	for _, name := range slices.Sorted(maps.Keys(r.costs)) {
		reading.Costs = append(reading.Costs, *r.costs[name])
	}
	return reading
}

func (u *unit) published() Device {
	d := u.Device
	u.load.publish(&d.Load)
	d.Instances = nil
	for _, p := range u.instances {
		in := p.Instance
		p.load.publish(&in.Load)
		d.Instances = append(d.Instances, in)
	}
	return d
}

func (r *Reader) pass(now time.Time) error {
	if err := r.open(now); err != nil {
		return err
	}
	if r.listed.IsZero() || now.Sub(r.listed) >= listAgain {
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
	r.takeEvents()
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

// takeEvents counts what happened since the pass before. It never waits: this goroutine has GPUs to read.
func (r *Reader) takeEvents() {
	for range eventsAtMost {
		var e event
		c := r.timed("nvmlEventSetWait", func() (c code) { e, c = r.driver.event(); return c })
		switch c.verdict() {
		case fine:
		case failed:
			if c != timeout {
				r.count("", "nvmlEventSetWait", c)
			}
			return
		default:
			return // no events on this driver; a driver that is gone shows at the next call
		}
		u := r.unit(e.uuid)
		if u == nil {
			continue
		}
		r.log.Warn("a GPU reports an XID error", "gpu", u.Index, "uuid", u.UUID, "xid", e.xid)
		u.XIDErrors = maps.Clone(u.XIDErrors)
		if u.XIDErrors == nil {
			u.XIDErrors = map[uint64]uint64{}
		}
		u.XIDErrors[e.xid]++
		u.LastXID = e.xid
	}
}

// timed makes a call and notes what it cost.
func (r *Reader) timed(call string, f func() code) code {
	began := r.clock()
	c := f()
	if c == functionMissing { // there was no call
		return c
	}
	cost := r.costs[call]
	if cost == nil {
		cost = &CallCost{Call: call}
		r.costs[call] = cost
	}
	cost.Count++
	cost.Seconds += r.clock().Sub(began).Seconds()
	return c
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
	var n int
	c := r.timed("nvmlDeviceGetCount_v2", func() (c code) { n, c = r.driver.count(); return c })
	switch c.verdict() {
	case fine:
	case driverGone:
		return r.gone(c, "count the gpus")
	default:
		r.count("", "nvmlDeviceGetCount_v2", c)
		return fmt.Errorf("count the gpus: %s", c)
	}
	for i := range n {
		var h device
		var uuid string
		const handle, name = "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"
		// The first handle of a GPU initializes it, which takes seconds where the driver is not persistent.
		c := r.timed(handle, func() (c code) { h, c = r.driver.device(i); return c })
		if c != success {
			if c.verdict() == driverGone && c != gpuNotFound {
				return r.gone(c, fmt.Sprintf("open gpu %d", i))
			}
			r.failed(i, handle, c, now)
			continue
		}
		if c := r.timed(name, func() (c code) { uuid, c = h.uuid(); return c }); c != success {
			r.failed(i, name, c, now)
			continue
		}
		u := r.unit(uuid)
		if u == nil {
			u = &unit{Device: Device{UUID: uuid, Up: true, Minor: -1}, asked: asked{}}
			r.gpus = append(r.gpus, u)
			r.log.Info("found a GPU", "gpu", i, "uuid", uuid)
		}
		u.handle, u.Index = h, i
		r.describe(u, now)
	}
	r.gpus = slices.DeleteFunc(r.gpus, func(u *unit) bool { return u.handle == nil && u.Index >= n }) // taken away while we had let go
	slices.SortFunc(r.gpus, func(a, b *unit) int { return a.Index - b.Index })
	r.listed = now
	return nil
}

// describe learns what changes rarely of a GPU: who it is, its MIG instances, and that its errors are to be reported.
func (r *Reader) describe(u *unit, now time.Time) {
	ask := func(call string, f func() code) bool {
		return !u.asked.unsupported(call, now) && r.known(u, u.asked, u.UUID, call, r.timed(call, f), now)
	}
	ask("nvmlDeviceGetName", func() code { v, c := u.handle.name(); return keep(&u.Model, v, c) })
	ask("nvmlDeviceGetMinorNumber", func() code { v, c := u.handle.minor(); return keep(&u.Minor, v, c) })
	ask("nvmlDeviceGetPciInfo_v3", func() code { v, c := u.handle.busID(); return keep(&u.PCIBusID, v, c) })
	if !u.watched {
		u.watched = ask("nvmlDeviceRegisterEvents", func() code { return r.driver.watch(u.handle, u.UUID) })
	}
	var found []instance
	const mig = "nvmlDeviceGetMigDeviceHandleByIndex"
	if !ask(mig, func() (c code) { found, c = u.handle.instances(); return c }) {
		if !u.asked.unsupported(mig, now) {
			return
		}
	}
	if on := len(found) > 0; on != u.MIG {
		r.log.Info("MIG was switched", "gpu", u.Index, "uuid", u.UUID, "instances", len(found))
		u.MIG = on
		clear(u.asked) // what the GPU supports is another now
	}
	var parts []*part
	for _, in := range found {
		i := slices.IndexFunc(u.instances, func(p *part) bool { return p.UUID == in.id })
		p := &part{asked: asked{}}
		if i >= 0 {
			p = u.instances[i]
		}
		p.UUID, p.Profile, p.GPUInstance, p.Placement, p.handle = in.id, in.profile, in.gpuInstance, in.placement, in.device
		parts = append(parts, p)
	}
	for _, p := range u.instances {
		if !slices.Contains(parts, p) {
			r.driver.forget(p.UUID)
		}
	}
	u.instances = parts
}

// keep stores a value that is good.
func keep[T any](to *T, v T, c code) code {
	if c == success {
		*to = v
	}
	return c
}

// failed is a GPU that the inventory could not open. A known one with that index is down.
func (r *Reader) failed(index int, call string, c code, now time.Time) {
	for _, u := range r.gpus {
		if u.Index == index {
			r.known(u, u.asked, u.UUID, call, c, now)
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

// known notes how a call about a GPU, or about the instance uuid of it, went, and says whether its value is good.
func (r *Reader) known(u *unit, a asked, uuid, call string, c code, now time.Time) bool {
	switch c.verdict() {
	case fine:
		return true
	case absent:
		a[call] = now.Add(askAgain)
	case empty:
	case lost:
		r.count(uuid, call, c)
		if u.Up {
			r.log.Warn("a GPU does not answer; the others go on", "gpu", u.Index, "uuid", u.UUID, "code", c.String())
		}
		u.Up, u.Reason, u.probe = false, c.String(), now.Add(probeAgain)
	default:
		r.count(uuid, call, c)
	}
	return false
}

func (r *Reader) count(uuid, call string, c code) {
	r.errors[CallErrors{UUID: uuid, Call: call, Code: c.String()}]++
}
