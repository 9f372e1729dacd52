package gpu

import (
	"fmt"
	"slices"
	"time"
)

// asking is one pass over one GPU. Once the driver or the GPU is gone, no further call is made.
type asking struct {
	reader *Reader
	unit   *unit
	now    time.Time

	gauging bool // the gauges are due, and with them the performance counters of a GPU that has another source of utilization

	gone code // the driver is gone: why
	down bool // the GPU is lost
	ok   bool // it has answered anything
}

// notAsked stands for the answer to a call that was not made.
const notAsked code = -1

// ask makes one call about the GPU, unless it is known to be unsupported.
func (a *asking) ask(call string, f func() code) code {
	return a.about(a.unit.asked, a.unit.UUID, call, f)
}

// about makes one call about the GPU or an instance of it.
func (a *asking) about(known asked, uuid, call string, f func() code) code {
	if a.gone != success || a.down || known.unsupported(call, a.now) {
		return notAsked
	}
	c := a.reader.timed(call, f)
	if c.verdict() == driverGone {
		a.gone = c
		return c
	}
	good := a.reader.known(a.unit, known, uuid, call, c, a.now)
	a.ok = a.ok || good
	a.down = c.verdict() == lost
	return c
}

// read reads one GPU: how busy it is and its memory in every pass, the rest less often. gone is set when the driver is gone; ok says
// that the GPU answered anything.
func (r *Reader) read(u *unit, now time.Time) (gone code, ok bool) {
	if u.handle == nil || !u.Up && now.Before(u.probe) {
		return success, false
	}
	a := &asking{reader: r, unit: u, now: now, gauging: now.Sub(u.gauged) >= gaugesEvery}
	d := u.Device // what a group does not read in this pass stays as it was
	a.load(&d.Load, &u.load, u.asked, u.UUID, u.handle, -1)
	a.memory(&d.Memory, u.asked, u.UUID, u.handle)
	a.parts()
	if r.podOf != nil && now.Sub(u.processed) >= processesEvery {
		u.processed = now
		if !u.MIG { // else the instances have them
			a.processes(&u.load.processes, u.asked, u.UUID, u.handle)
		}
		for _, p := range u.instances {
			a.processes(&p.load.processes, p.asked, p.UUID, p.handle)
		}
	}
	if a.gauging {
		u.gauged = now
		d.Gauges, d.Counters = a.gauges(), a.counters()
		if r.detail {
			d.Detail = a.detail()
		}
	}
	if now.Sub(u.checked) >= healthEvery {
		u.checked = now
		d.Health = a.health()
	}
	switch {
	case a.down:
		// Of a GPU that is lost nothing is known but who it was, and what it reported.
		d = Device{UUID: d.UUID, Model: d.Model, PCIBusID: d.PCIBusID, Index: d.Index, Minor: d.Minor, MIG: d.MIG, XIDErrors: d.XIDErrors, LastXID: d.LastXID,
			Reason: u.Reason, Load: Load{UtilizationSource: u.UtilizationSource}}
		u.gauged, u.checked = time.Time{}, time.Time{}
		for _, p := range u.instances {
			p.Memory, p.Utilization = Memory{}, nil
		}
	case a.ok && !u.Up:
		r.log.Info("a GPU answers again", "gpu", u.Index, "uuid", u.UUID)
		d.Up, d.Reason = true, ""
		r.listed = time.Time{} // what could not be learned of it, its MIG instances among that, is learned in the next pass
	default:
		d.Up, d.Reason = u.Up, u.Reason
	}
	u.Device = d
	return a.gone, a.ok && !a.down
}

// parts reads the MIG instances. A handle of one that is gone is no argument any more: then the inventory is taken anew.
func (a *asking) parts() {
	for _, p := range a.unit.instances {
		a.load(&p.Load, &p.load, p.asked, p.UUID, p.handle, p.GPUInstance)
		if c := a.memory(&p.Memory, p.asked, p.UUID, p.handle); c == invalidArgument || c == notFound {
			a.reader.listed = time.Time{}
		}
	}
}

// loadMeter integrates how busy a GPU or an instance is.
type loadMeter struct {
	meter
	activity  activityMeter
	processes processMeter
}

func (m *loadMeter) publish(l *Load) {
	l.Busy, l.Observed = m.busy, m.observed
	l.Activity = m.activity.published()
	if !m.processes.last.IsZero() {
		l.Processes, l.ProcessesObserved = m.processes.published(), m.processes.observed
	}
}

// load integrates how busy a GPU or an instance was: by the driver's ring or its rates and, where MIG hides both, by the performance
// counters, if the GPU has them. Of a GPU that shows its rates the counters are read with the gauges only: they miss nothing meanwhile.
func (a *asking) load(l *Load, m *loadMeter, known asked, uuid string, h device, gpuInstance int) {
	l.Utilization = nil
	whole := gpuInstance < 0
	if whole {
		a.rates(l, m, known, uuid, h)
	}
	hidden := !whole || known.unsupported(samplesCall, a.now) && known.unsupported(ratesCall, a.now)
	if hidden || a.gauging {
		a.activity(l, m, known, uuid, h, gpuInstance, hidden)
	}
	switch {
	case whole && !known.unsupported(samplesCall, a.now):
		l.UtilizationSource = "samples"
	case whole && !known.unsupported(ratesCall, a.now):
		l.UtilizationSource = "rates"
	case !known.unsupported(countersCall, a.now):
		l.UtilizationSource = "gpm"
	default:
		l.UtilizationSource = ""
	}
}

const samplesCall, ratesCall, countersCall = "nvmlDeviceGetSamples", "nvmlDeviceGetUtilizationRates", "nvmlGpmMetricsGet"

// rates integrates the ring's new samples. The ring of an idle GPU runs dry; then the rate of the last second speaks.
func (a *asking) rates(l *Load, m *loadMeter, known asked, uuid string, h device) {
	a.checked(m, known, uuid, samplesCall, func() code {
		ring, c := h.samples(m.newest)
		if c == success {
			l.take(m.samples(a.now, ring))
		}
		return c
	})
	if l.Utilization != nil {
		return
	}
	a.checked(m, known, uuid, ratesCall, func() code {
		percent, c := h.rates()
		if c == success {
			l.take(m.rate(a.now, percent))
		}
		return c
	})
}

// activity integrates the performance counters; of a GPU that shows nothing else they are its utilization, too.
func (a *asking) activity(l *Load, m *loadMeter, known asked, uuid string, h device, gpuInstance int, hidden bool) {
	a.checked(m, known, uuid, countersCall, func() code {
		found, c := h.activity(uuid, gpuInstance)
		if c != success {
			return c
		}
		if !m.activity.add(a.now, found) {
			m.discarded++
		}
		if busy, ok := found[graphicsUtil]; ok && hidden {
			l.take(m.counted(a.now, busy))
		}
		return c
	})
}

// take is the share of a reading, if it is valid.
func (l *Load) take(share float64, valid bool) {
	if valid {
		l.Utilization = &share
	}
}

// outOfRange is the code of an answer that cannot be.
const outOfRange = "OUT_OF_RANGE"

// checked makes a call whose answer may be out of range, which is an error of the call, and of that alone.
func (a *asking) checked(m *loadMeter, known asked, uuid, call string, f func() code) {
	before := m.discarded
	a.about(known, uuid, call, f)
	if n := m.discarded - before; n > 0 {
		a.reader.errors[CallErrors{UUID: uuid, Call: call, Code: outOfRange}] += n
	}
}

func (a *asking) memory(m *Memory, known asked, uuid string, h device) code {
	const call = "nvmlDeviceGetMemoryInfo_v2"
	*m = Memory{}
	c := a.about(known, uuid, call, func() code {
		used, reserved, total, c := h.memory()
		if c == success {
			m.MemoryUsed, m.MemoryReserved, m.MemoryTotal = &used, &reserved, &total
		}
		return c
	})
	if known.unsupported(call, a.now) {
		c = a.about(known, uuid, "nvmlDeviceGetMemoryInfo", func() code {
			used, total, c := h.memoryOld()
			if c == success {
				m.MemoryUsed, m.MemoryTotal = &used, &total
			}
			return c
		})
	}
	return c
}

// gauges takes what moves by the second.
func (a *asking) gauges() (g Gauges) {
	h := a.unit.handle
	a.ask("nvmlDeviceGetPowerUsage", func() code { v, c := h.power(); return into(&g.PowerWatts, float64(v)/1e3, c) })
	a.ask("nvmlDeviceGetTotalEnergyConsumption", func() code { v, c := h.energy(); return into(&g.EnergyJoules, float64(v)/1e3, c) })
	a.ask("nvmlDeviceGetTemperature", func() code { v, c := h.temperature(); return into(&g.TemperatureCelsius, float64(v), c) })
	a.clock(&g.ClockHertz, "sm", 1)
	return g
}

// clock reads one nvmlClockType_t. The graphics clock is that of the multiprocessors, and video follows it.
func (a *asking) clock(to *map[string]float64, name string, kind int) {
	a.ask("nvmlDeviceGetClockInfo", func() code {
		v, c := a.unit.handle.clock(kind)
		if c == success {
			put(to, name, float64(v)*1e6)
		}
		return c
	})
}

const allLinks = 0xFFFFFFFF // the scope of a field that is to be summed over the links

// counters takes what the driver counts.
func (a *asking) counters() (c Counters) {
	throttled := func(reason string) func(value) {
		return func(v value) { put(&c.ThrottledSeconds, reason, v.number/1e9) } // ns
	}
	moved := func(to *map[string]float64, direction string, unit float64) func(value) {
		return func(v value) {
			if !v.narrow { // 4 GiB are moved in a tenth of a second: a counter that short says nothing
				put(to, direction, v.number*unit)
			}
		}
	}
	a.fields(map[field]func(value){
		{id: 74}: throttled("power_cap"), {id: 269}: throttled("thermal_software"),
		{id: 270}: throttled("thermal_hardware"), {id: 271}: throttled("power_brake"),
		{id: 197}: moved(&c.PCIeBytes, "transmit", 1), {id: 198}: moved(&c.PCIeBytes, "receive", 1),
		{id: 138, scope: allLinks}: moved(&c.NVLinkBytes, "transmit", 1024), {id: 139, scope: allLinks}: moved(&c.NVLinkBytes, "receive", 1024), // KiB
	})
	return c
}

func (a *asking) health() (h Health) {
	count := func(kind string) func(value) {
		return func(v value) { put(&h.ECCErrors, kind, v.number) }
	}
	a.fields(map[field]func(value){
		{id: 3}: count("corrected"), {id: 4}: count("uncorrected"),
		{id: 145}: func(v value) { failed := v.number != 0; h.RowRemapFailed = &failed },
		{id: 230}: func(v value) { action := int(v.number); h.RecoveryAction = &action },
	})
	return h
}

func (a *asking) detail() (d Detail) {
	h := a.unit.handle
	a.clock(&d.MoreClockHertz, "memory", 2)
	a.ask("nvmlDeviceGetEnforcedPowerLimit", func() code { v, c := h.powerLimit(); return into(&d.PowerLimitWatts, float64(v)/1e3, c) })
	a.ask("nvmlDeviceGetPcieReplayCounter", func() code { v, c := h.replays(); return into(&d.PCIeReplays, float64(v), c) })
	for _, engine := range []struct {
		name, call string
		make       func() (uint32, code)
	}{{"encoder", "nvmlDeviceGetEncoderUtilization", h.encoder}, {"decoder", "nvmlDeviceGetDecoderUtilization", h.decoder},
		{"memory", "nvmlDeviceGetUtilizationRates", h.controller}} {
		a.ask(engine.call, func() code {
			percent, c := engine.make()
			if share, ok := clamped(float64(percent)); ok && c == success {
				put(&d.EngineUtilization, engine.name, share)
			}
			return c
		})
	}
	a.fields(map[field]func(value){
		{id: 82}:  func(v value) { d.MemoryTemperatureCelsius = &v.number },
		{id: 186}: func(v value) { w := v.number / 1e3; d.PowerInstantWatts = &w },
		{id: 142}: func(v value) { put(&d.RemappedRows, "corrected", v.number) },
		{id: 143}: func(v value) { put(&d.RemappedRows, "uncorrected", v.number) },
		{id: 144}: func(v value) { pending := v.number != 0; d.RowRemapPending = &pending },
	})
	return d
}

// fields asks for several values in one call, and hands out those that are good. Each has a return of its own.
func (a *asking) fields(wanted map[field]func(value)) {
	const call = "nvmlDeviceGetFieldValues"
	name := func(f field) string { return fmt.Sprintf("%s(%d)", call, f.id) }
	var list []field
	for f := range wanted {
		if !a.unit.asked.unsupported(name(f), a.now) {
			list = append(list, f)
		}
	}
	if len(list) == 0 {
		return
	}
	slices.SortFunc(list, func(a, b field) int { return int(a.id) - int(b.id) }) // a capture is replayed in one order
	var values []value
	if a.ask(call, func() (c code) { values, c = a.unit.handle.fields(list); return c }) != success {
		return
	}
	for i, v := range values {
		if a.reader.known(a.unit, a.unit.asked, a.unit.UUID, name(list[i]), v.code, a.now) {
			wanted[list[i]](v)
		}
	}
}

func into(to **float64, v float64, c code) code {
	if c == success {
		*to = &v
	}
	return c
}

func put(to *map[string]float64, key string, v float64) {
	if *to == nil {
		*to = map[string]float64{}
	}
	(*to)[key] = v
}
