package gpu

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// simulatedKind is a kind of GPU of [Simulated]. Figures are those of the products' data sheets.
type simulatedKind struct {
	model     string
	memory    uint64 // bytes
	limit     uint32 // W
	counters  bool   // performance counters: Hopper and newer
	instances []string
	megahertz [2]uint32 // sm, memory
}

var simulatedKinds = map[string]simulatedKind{
	"a100":     {model: "NVIDIA A100-SXM4-80GB", memory: 80 << 30, limit: 400, megahertz: [2]uint32{1410, 1593}},
	"h100":     {model: "NVIDIA H100 80GB HBM3", memory: 80 << 30, limit: 700, counters: true, megahertz: [2]uint32{1980, 2619}},
	"h200":     {model: "NVIDIA H200", memory: 141 << 30, limit: 700, counters: true, megahertz: [2]uint32{1980, 3201}},
	"h100-mig": {model: "NVIDIA H100 80GB HBM3", memory: 80 << 30, limit: 700, counters: true, megahertz: [2]uint32{1980, 2619}, instances: []string{"3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"}},
}

// SimulatedProfiles are the names that [Simulated] takes.
func SimulatedProfiles() []string { return []string{"a100", "h100", "h100-mig", "h200", "mixed"} }

// Simulated makes a Reader of eight GPUs that are not there, for trials of dashboards and rules on any machine. "mixed" is two of each
// kind. They work in waves, each a little later than the one before, so that there is something to see; the sixth is lost for a minute
// in ten. What is shown is a function of the time alone.
func Simulated(profile string, config Config) (*Reader, error) {
	if !slices.Contains(SimulatedProfiles(), profile) {
		return nil, fmt.Errorf("profile %q: there are %s", profile, strings.Join(SimulatedProfiles(), ", "))
	}
	s := &simulation{now: time.Now}
	for i := range 8 {
		kind := profile
		if profile == "mixed" {
			kind = []string{"a100", "h100", "h100-mig", "h200"}[i/2]
		}
		s.gpus = append(s.gpus, &simulated{simulation: s, kind: simulatedKinds[kind], index: i, instance: -1, last: map[string]time.Time{}})
	}
	return newReader(s, config), nil
}

// SimulatedDevices are the UUIDs of what pods could hold of a profile: GPUs, or their instances where MIG is on.
func SimulatedDevices(profile string) ([]string, error) {
	r, err := Simulated(profile, Config{})
	if err != nil {
		return nil, err
	}
	var all []string
	for _, g := range r.driver.(*simulation).gpus {
		parts, _ := g.instances()
		for _, in := range parts {
			all = append(all, in.id)
		}
		if len(parts) == 0 {
			uuid, _ := g.uuid()
			all = append(all, uuid)
		}
	}
	return all, nil
}

// simulation is a driver.
type simulation struct {
	gpus []*simulated
	now  func() time.Time
}

func (s *simulation) open() error                 { return nil }
func (s *simulation) close()                      {}
func (s *simulation) version() (string, code)     { return "simulated", success }
func (s *simulation) count() (int, code)          { return len(s.gpus), success }
func (s *simulation) device(i int) (device, code) { return s.gpus[i], success }
func (s *simulation) watch(device, string) code   { return success }
func (s *simulation) event() (event, code)        { return event{}, timeout }
func (s *simulation) forget(string)               {}

// simulated is one GPU, or an instance of it.
type simulated struct {
	*simulation
	kind     simulatedKind
	index    int
	instance int // -1 = the whole GPU
	last     map[string]time.Time
}

const wave = 5 * time.Minute

// share is how busy the GPU is at a time.
func (g *simulated) share(at time.Time) float64 {
	phase := float64(at.UnixMilli())/float64(wave.Milliseconds()) - float64(g.index+max(g.instance, 0))/16
	return 0.55 + 0.4*math.Sin(2*math.Pi*phase)
}

// worked is how long the GPU has been busy since the epoch, in seconds: the integral of share.
func (g *simulated) worked(at time.Time) float64 {
	t, period := float64(at.UnixMilli())/1000, wave.Seconds()
	phase := t/period - float64(g.index+max(g.instance, 0))/16
	return 0.55*t - 0.4*period/(2*math.Pi)*math.Cos(2*math.Pi*phase)
}

// answers is success, or that the GPU is lost.
func (g *simulated) answers() code {
	if at := g.now(); g.index == 5 && at.Minute()%10 == 9 {
		return gpuIsLost
	}
	return success
}

func (g *simulated) uuid() (string, code) {
	return fmt.Sprintf("GPU-51000000-0000-4000-8000-%012d", g.index), success
}
func (g *simulated) name() (string, code) { return g.kind.model, success }
func (g *simulated) minor() (int, code)   { return g.index, success }
func (g *simulated) busID() (string, code) {
	return fmt.Sprintf("00000000:%02X:00.0", g.index+1), success
}

func (g *simulated) instances() (all []instance, c code) {
	for i, profile := range g.kind.instances {
		all = append(all, instance{device: &simulated{simulation: g.simulation, kind: g.kind, index: g.index, instance: i, last: g.last},
			id: fmt.Sprintf("MIG-51000000-0000-4000-8000-%010d%02d", g.index, i), profile: profile, gpuInstance: i + 1})
	}
	return all, g.answers()
}

func (g *simulated) samples(since uint64) (ring []sample, c code) {
	if g.kind.instances != nil {
		return nil, notSupported
	}
	const period = time.Second / 6
	for at := g.now().Truncate(period).Add(-20 * period); !at.After(g.now()); at = at.Add(period) {
		if us := uint64(at.UnixMicro()); us > since {
			ring = append(ring, sample{us, uint32(100 * g.share(at))})
		}
	}
	return ring, g.answers()
}

func (g *simulated) rates() (uint32, code) {
	if g.kind.instances != nil {
		return 0, notSupported
	}
	return uint32(100 * g.share(g.now())), g.answers()
}

func (g *simulated) memory() (used, reserved, total uint64, c code) {
	total = g.kind.memory
	if g.instance >= 0 { // its name says so: 3g.40gb
		var slices int
		if _, err := fmt.Sscanf(g.kind.instances[g.instance], "%dg.%dgb", &slices, &total); err != nil {
			return 0, 0, 0, unknown
		}
		total <<= 30
	}
	return uint64(float64(total) * 0.7), total / 128, total, g.answers()
}
func (g *simulated) memoryOld() (used, total uint64, c code) { return 0, 0, functionMissing }
func (g *simulated) power() (uint32, code) {
	return uint32(1000 * float64(g.kind.limit) * (0.1 + 0.88*g.share(g.now()))), g.answers()
}
func (g *simulated) powerLimit() (uint32, code) { return 1000 * g.kind.limit, g.answers() }
func (g *simulated) energy() (uint64, code) {
	return uint64(1000 * float64(g.kind.limit) * g.worked(g.now()) / 1e6), g.answers() // as if it were new
}
func (g *simulated) temperature() (uint32, code) {
	return uint32(32 + 46*g.share(g.now())), g.answers()
}
func (g *simulated) clock(kind int) (uint32, code) {
	return g.kind.megahertz[kind-1], g.answers() // 1 and 2 are asked for
}

func (g *simulated) encoder() (uint32, code)                       { return 0, g.answers() }
func (g *simulated) decoder() (uint32, code)                       { return 0, g.answers() }
func (g *simulated) replays() (uint32, code)                       { return 0, g.answers() }
func (g *simulated) processes(bool) ([]process, code)              { return nil, notSupported }
func (g *simulated) processSamples(uint64) ([]processSample, code) { return nil, notSupported }
func (g *simulated) controller() (uint32, code) {
	if g.kind.instances != nil {
		return 0, notSupported
	}
	return uint32(40 * g.share(g.now())), g.answers()
}

func (g *simulated) fields(ask []field) ([]value, code) {
	worked := g.worked(g.now()) / 1e6
	known := map[uint32]float64{
		3: 2, 4: 0, 142: 0, 143: 0, 144: 0, 145: 0, 230: 0, // nothing is broken
		74: worked * 1e9 / 50, 76: 0, 269: 0, 270: 0, 271: 0, // throttled by power, ns
		82: 36 + 46*g.share(g.now()), 186: 1000 * float64(g.kind.limit) * (0.1 + 0.9*g.share(g.now())),
		138: worked * (90 << 20), 139: worked * (90 << 20), 197: worked * (4 << 30), 198: worked * (2 << 30),
	}
	values := make([]value, len(ask))
	for i, f := range ask {
		number, ok := known[f.id]
		if values[i] = (value{number: math.Floor(number)}); !ok {
			values[i].code = notSupported
		}
	}
	return values, g.answers()
}

func (g *simulated) activity(key string, _ int) (shares, code) {
	if !g.kind.counters {
		return nil, notSupported
	}
	from, now := g.last[key], g.now()
	g.last[key] = now
	if from.IsZero() || !now.After(from) {
		return nil, noData
	}
	busy := 100 * (g.worked(now) - g.worked(from)) / now.Sub(from).Seconds()
	return shares{graphicsUtil: busy, smUtil: 0.8 * busy, tensorUtil: 0.45 * busy, dramUtil: 0.5 * busy}, g.answers()
}
