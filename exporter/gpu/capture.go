package gpu

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// A capture is what a driver answered, pass by pass, as lines of JSON: for bug reports, and for tests on GPUs that are not at hand. It
// holds the names of GPUs and the numbers of processes, and nothing of what these compute.

// line is one line of a capture: the beginning of a pass, or an answer.
type line struct {
	Read   *time.Time      `json:"read,omitempty"` // the pass' time
	Call   string          `json:"call,omitempty"` // the method of driver or device, with its argument
	Of     string          `json:"of,omitempty"`   // gpu0, gpu0/3 for an instance's GPU instance; "" = the driver
	Code   code            `json:"code,omitempty"`
	Error  string          `json:"error,omitempty"` // of open
	Answer json.RawMessage `json:"answer,omitempty"`
}

// recorder writes what a driver answers. The first error of writing ends the recording, not the reading.
type recorder struct {
	driver
	to   io.Writer
	stop func(error) // told once
	left int64       // bytes
}

// maxCapture bounds a recording that somebody forgot: two hours of eight GPUs.
const maxCapture = 256 << 20

func (r *recorder) write(l line) {
	if r.left <= 0 {
		return
	}
	text, err := json.Marshal(l)
	if err == nil {
		text = append(text, '\n')
		if r.left -= int64(len(text)); r.left <= 0 {
			err = fmt.Errorf("the capture has %d MiB, which is enough", maxCapture>>20)
		} else {
			_, err = r.to.Write(text)
		}
	}
	if err != nil {
		r.left = 0
		r.stop(err)
	}
}

// recorded passes an answer on, and writes it down.
func recorded[T any](r *recorder, of, call string, answer T, c code) (T, code) {
	l := line{Call: call, Of: of, Code: c}
	if c == success {
		text, err := json.Marshal(answer)
		if err != nil { // a NaN of the driver's
			text = nil
		}
		l.Answer = text
	}
	r.write(l)
	return answer, c
}

// Answers of more than one value, and with fields that encoding/json is to see.
type (
	memoryAnswer struct{ Used, Reserved, Total uint64 }
	sampleAnswer struct{ T, P uint64 }
	valueAnswer  struct {
		Code   code
		Number float64
		Narrow bool
	}
	instanceAnswer struct {
		ID, Profile string
		GPUInstance int
		Placement   *Placement
	}
	processAnswer struct {
		PID    uint32
		Memory uint64
	}
	processSampleAnswer struct {
		PID     uint32
		T       uint64
		Percent uint32
	}
	eventAnswer struct {
		UUID string
		XID  uint64
	}
)

func each[A, B any](list []A, f func(A) B) []B {
	out := make([]B, len(list))
	for i, a := range list {
		out[i] = f(a)
	}
	return out
}

func (r *recorder) open() error {
	err := r.driver.open()
	l := line{Call: "open"}
	if err != nil {
		l.Error = err.Error()
	}
	r.write(l)
	return err
}

func (r *recorder) version() (string, code) {
	v, c := r.driver.version()
	return recorded(r, "", "version", v, c)
}
func (r *recorder) count() (int, code) {
	v, c := r.driver.count()
	return recorded(r, "", "count", v, c)
}
func (r *recorder) device(i int) (device, code) {
	d, c := r.driver.device(i)
	of := fmt.Sprintf("gpu%d", i)
	recorded(r, of, "device", true, c)
	return &recordedDevice{device: d, r: r, of: of}, c
}
func (r *recorder) watch(d device, uuid string) code {
	return r.driver.watch(d.(*recordedDevice).device, uuid)
}
func (r *recorder) event() (event, code) {
	e, c := r.driver.event()
	if c != timeout && c != functionMissing { // a line a second that says nothing
		recorded(r, "", "event", eventAnswer{e.uuid, e.xid}, c)
	}
	return e, c
}

// recordedDevice is a device whose answers are written down.
type recordedDevice struct {
	device
	r  *recorder
	of string
}

func (d *recordedDevice) uuid() (string, code) {
	v, c := d.device.uuid()
	return recorded(d.r, d.of, "uuid", v, c)
}
func (d *recordedDevice) name() (string, code) {
	v, c := d.device.name()
	return recorded(d.r, d.of, "name", v, c)
}
func (d *recordedDevice) minor() (int, code) {
	v, c := d.device.minor()
	return recorded(d.r, d.of, "minor", v, c)
}
func (d *recordedDevice) busID() (string, code) {
	v, c := d.device.busID()
	return recorded(d.r, d.of, "busID", v, c)
}
func (d *recordedDevice) rates() (uint32, code) {
	v, c := d.device.rates()
	return recorded(d.r, d.of, "rates", v, c)
}
func (d *recordedDevice) power() (uint32, code) {
	v, c := d.device.power()
	return recorded(d.r, d.of, "power", v, c)
}
func (d *recordedDevice) powerLimit() (uint32, code) {
	v, c := d.device.powerLimit()
	return recorded(d.r, d.of, "powerLimit", v, c)
}
func (d *recordedDevice) energy() (uint64, code) {
	v, c := d.device.energy()
	return recorded(d.r, d.of, "energy", v, c)
}
func (d *recordedDevice) temperature() (uint32, code) {
	v, c := d.device.temperature()
	return recorded(d.r, d.of, "temperature", v, c)
}
func (d *recordedDevice) clock(kind int) (uint32, code) {
	v, c := d.device.clock(kind)
	return recorded(d.r, d.of, fmt.Sprintf("clock %d", kind), v, c)
}
func (d *recordedDevice) encoder() (uint32, code) {
	v, c := d.device.encoder()
	return recorded(d.r, d.of, "encoder", v, c)
}
func (d *recordedDevice) decoder() (uint32, code) {
	v, c := d.device.decoder()
	return recorded(d.r, d.of, "decoder", v, c)
}
func (d *recordedDevice) controller() (uint32, code) {
	v, c := d.device.controller()
	return recorded(d.r, d.of, "controller", v, c)
}
func (d *recordedDevice) replays() (uint32, code) {
	v, c := d.device.replays()
	return recorded(d.r, d.of, "replays", v, c)
}

func (d *recordedDevice) memory() (used, reserved, total uint64, c code) {
	used, reserved, total, c = d.device.memory()
	recorded(d.r, d.of, "memory", memoryAnswer{used, reserved, total}, c)
	return used, reserved, total, c
}

func (d *recordedDevice) memoryOld() (used, total uint64, c code) {
	used, total, c = d.device.memoryOld()
	recorded(d.r, d.of, "memoryOld", memoryAnswer{Used: used, Total: total}, c)
	return used, total, c
}

func (d *recordedDevice) instances() ([]instance, code) {
	all, c := d.device.instances()
	recorded(d.r, d.of, "instances", each(all, func(in instance) instanceAnswer {
		return instanceAnswer{in.id, in.profile, in.gpuInstance, in.placement}
	}), c)
	for i := range all {
		all[i].device = &recordedDevice{device: all[i].device, r: d.r, of: fmt.Sprintf("%s/%d", d.of, all[i].gpuInstance)}
	}
	return all, c
}

func (d *recordedDevice) samples(since uint64) ([]sample, code) {
	all, c := d.device.samples(since)
	recorded(d.r, d.of, "samples", each(all, func(s sample) sampleAnswer { return sampleAnswer{s.timestamp, uint64(s.percent)} }), c)
	return all, c
}

func (d *recordedDevice) fields(ask []field) ([]value, code) {
	all, c := d.device.fields(ask)
	recorded(d.r, d.of, fmt.Sprintf("fields %v", ask), each(all, func(v value) valueAnswer { return valueAnswer{v.code, v.number, v.narrow} }), c)
	return all, c
}

func (d *recordedDevice) processes(mps bool) ([]process, code) {
	all, c := d.device.processes(mps)
	recorded(d.r, d.of, fmt.Sprintf("processes %t", mps), each(all, func(p process) processAnswer { return processAnswer{p.pid, p.memory} }), c)
	return all, c
}

func (d *recordedDevice) processSamples(since uint64) ([]processSample, code) {
	all, c := d.device.processSamples(since)
	recorded(d.r, d.of, "processSamples", each(all, func(s processSample) processSampleAnswer { return processSampleAnswer{s.pid, s.timestamp, s.percent} }), c)
	return all, c
}

func (d *recordedDevice) activity(key string, gpuInstance int) (shares, code) {
	v, c := d.device.activity(key, gpuInstance)
	return recorded(d.r, d.of, fmt.Sprintf("activity %d", gpuInstance), v, c)
}

// Replay reads a capture and makes of it the readings that a Reader made, or makes of it today: what the capture does not hold, because
// the program that recorded it did not ask, is not supported. An error names the line that is no line of a capture.
func Replay(from io.Reader, config Config) ([]Reading, error) {
	p := &player{}
	r := newReader(p, config)
	var readings []Reading
	var now time.Time
	pass := func() {
		if !now.IsZero() {
			readings = append(readings, r.Read(now))
		}
		p.lines = p.lines[:0]
	}
	scanner := bufio.NewScanner(from)
	scanner.Buffer(nil, 1<<20)
	for n := 1; scanner.Scan(); n++ {
		var l line
		if err := json.Unmarshal(scanner.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("capture, line %d: %w", n, err)
		}
		switch {
		case l.Read != nil:
			pass()
			now = *l.Read
		case l.Call == "":
			return nil, fmt.Errorf("capture, line %d: neither read nor call", n)
		default:
			p.lines = append(p.lines, l)
		}
	}
	if err := scanner.Err(); err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	pass()
	return readings, nil
}

// player is a driver that answers out of the lines of one pass.
type player struct{ lines []line }

// take finds the first answer to a call that was not given yet, and decodes it.
func take[T any](p *player, of, call string) (answer T, c code) {
	i := slices.IndexFunc(p.lines, func(l line) bool { return l.Of == of && l.Call == call })
	if i < 0 {
		return answer, functionMissing
	}
	l := p.lines[i]
	p.lines = slices.Delete(p.lines, i, i+1)
	if l.Code == success && json.Unmarshal(l.Answer, &answer) != nil {
		return answer, unknown
	}
	return answer, l.Code
}

func (p *player) open() error {
	i := slices.IndexFunc(p.lines, func(l line) bool { return l.Call == "open" })
	if i < 0 {
		return nil // the recording began later
	}
	problem := p.lines[i].Error
	p.lines = slices.Delete(p.lines, i, i+1)
	if problem != "" {
		return errors.New(problem)
	}
	return nil
}
func (p *player) close()                    {}
func (p *player) forget(string)             {}
func (p *player) version() (string, code)   { return take[string](p, "", "version") }
func (p *player) count() (int, code)        { return take[int](p, "", "count") }
func (p *player) watch(device, string) code { return success }
func (p *player) event() (event, code) {
	e, c := take[eventAnswer](p, "", "event")
	return event{e.UUID, e.XID}, c
}
func (p *player) device(i int) (device, code) {
	of := fmt.Sprintf("gpu%d", i)
	_, c := take[bool](p, of, "device")
	return &played{p, of}, c
}

// played is a device of a player.
type played struct {
	p  *player
	of string
}

func (d *played) uuid() (string, code)        { return take[string](d.p, d.of, "uuid") }
func (d *played) name() (string, code)        { return take[string](d.p, d.of, "name") }
func (d *played) minor() (int, code)          { return take[int](d.p, d.of, "minor") }
func (d *played) busID() (string, code)       { return take[string](d.p, d.of, "busID") }
func (d *played) rates() (uint32, code)       { return take[uint32](d.p, d.of, "rates") }
func (d *played) power() (uint32, code)       { return take[uint32](d.p, d.of, "power") }
func (d *played) powerLimit() (uint32, code)  { return take[uint32](d.p, d.of, "powerLimit") }
func (d *played) energy() (uint64, code)      { return take[uint64](d.p, d.of, "energy") }
func (d *played) temperature() (uint32, code) { return take[uint32](d.p, d.of, "temperature") }
func (d *played) clock(kind int) (uint32, code) {
	return take[uint32](d.p, d.of, fmt.Sprintf("clock %d", kind))
}
func (d *played) encoder() (uint32, code)    { return take[uint32](d.p, d.of, "encoder") }
func (d *played) decoder() (uint32, code)    { return take[uint32](d.p, d.of, "decoder") }
func (d *played) controller() (uint32, code) { return take[uint32](d.p, d.of, "controller") }
func (d *played) replays() (uint32, code)    { return take[uint32](d.p, d.of, "replays") }
func (d *played) memory() (u, r, t uint64, c code) {
	m, c := take[memoryAnswer](d.p, d.of, "memory")
	return m.Used, m.Reserved, m.Total, c
}
func (d *played) memoryOld() (u, t uint64, c code) {
	m, c := take[memoryAnswer](d.p, d.of, "memoryOld")
	return m.Used, m.Total, c
}
func (d *played) instances() ([]instance, code) {
	all, c := take[[]instanceAnswer](d.p, d.of, "instances")
	return each(all, func(in instanceAnswer) instance {
		return instance{device: &played{d.p, fmt.Sprintf("%s/%d", d.of, in.GPUInstance)}, id: in.ID, profile: in.Profile, gpuInstance: in.GPUInstance, placement: in.Placement}
	}), c
}
func (d *played) samples(uint64) ([]sample, code) {
	all, c := take[[]sampleAnswer](d.p, d.of, "samples")
	return each(all, func(s sampleAnswer) sample { return sample{s.T, uint32(s.P)} }), c
}
func (d *played) fields(ask []field) ([]value, code) {
	all, c := take[[]valueAnswer](d.p, d.of, fmt.Sprintf("fields %v", ask))
	if c == success && len(all) != len(ask) {
		return nil, unknown
	}
	return each(all, func(v valueAnswer) value { return value{v.Code, v.Number, v.Narrow} }), c
}
func (d *played) processes(mps bool) ([]process, code) {
	all, c := take[[]processAnswer](d.p, d.of, fmt.Sprintf("processes %t", mps))
	return each(all, func(p processAnswer) process { return process{p.PID, p.Memory} }), c
}
func (d *played) processSamples(uint64) ([]processSample, code) {
	all, c := take[[]processSampleAnswer](d.p, d.of, "processSamples")
	return each(all, func(s processSampleAnswer) processSample { return processSample{s.PID, s.T, s.Percent} }), c
}
func (d *played) activity(_ string, gpuInstance int) (shares, code) {
	return take[shares](d.p, d.of, fmt.Sprintf("activity %d", gpuInstance))
}
