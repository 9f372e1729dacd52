package hpa

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "rewrite the golden files")

var noon = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

// play is an HPA that a transcript moves.
type play struct {
	spec    Spec
	state   State
	history History
	now     time.Time
	last    Decision
	follows bool // status.replicas are spec.replicas
}

func newPlay() *play {
	return &play{spec: Spec{MinReplicas: 1, MaxReplicas: 10}, now: noon, follows: true}
}

// do runs one command of a transcript.
func (p *play) do(line string) error {
	words := strings.Fields(line)
	settings := map[string]string{}
	for _, w := range words[1:] {
		if key, value, ok := strings.Cut(w, "="); ok {
			settings[key] = value
		}
	}
	switch words[0] {
	case "hpa": // hpa min=1 max=10
		p.spec.MinReplicas, p.spec.MaxReplicas = number(settings["min"]), number(settings["max"])
	case "metric": // metric gpu_utilization External AverageValue 80
		m := Metric{Name: words[1], Source: Source(words[2]), Target: Target{Type: TargetType(words[3]), Value: milli(words[4])}}
		if m.Target.Type == Utilization {
			m.Target.Value, m.Target.Percent = 0, number(words[4])
		}
		p.spec.Metrics = append(p.spec.Metrics, m)
		p.state.Readings = append(p.state.Readings, Reading{})
	case "up", "down": // up window=60s select=Min tolerance=0.05 policies=Pods:4/15s,Percent:100/15s
		if p.spec.Behavior == nil {
			p.spec.Behavior = &Behavior{}
		}
		r, err := rules(settings)
		if err != nil {
			return err
		}
		if words[0] == "up" {
			p.spec.Behavior.ScaleUp = r
		} else {
			p.spec.Behavior.ScaleDown = r
		}
	case "size": // size 4: somebody writes spec.replicas
		p.state.SpecReplicas = number(words[1])
	case "exist": // exist 5: status.replicas no longer follow
		p.state.StatusReplicas, p.follows = number(words[1]), false
	case "pods": // pods web-0 web-1=Pending web-2=Failed web-3=Terminating
		p.state.Pods = nil
		for _, w := range words[1:] {
			name, how, _ := strings.Cut(w, "=")
			pod := Pod{Name: name, Phase: "Running", Ready: "True", ReadySince: noon.Add(-time.Hour), Started: noon.Add(-time.Hour)}
			switch how {
			case "":
			case "Terminating":
				pod.Terminating = true
			case "Starting":
				pod.Ready, pod.Started, pod.ReadySince = "False", p.now, p.now
			default:
				pod.Phase, pod.Ready = how, "False"
			}
			p.state.Pods = append(p.state.Pods, pod)
		}
	case "reads": // reads gpu_utilization 95 95, reads queue web-0=3 web-1=4, reads cpu web-0=300/500 (of what it requests)
		return p.reads(words[1], words[2:])
	case "until": // until 5m: a sync every 15 seconds
		d, err := time.ParseDuration(words[1])
		if err != nil {
			return err
		}
		for p.now.Before(noon.Add(d)) {
			p.now = p.now.Add(15 * time.Second)
			p.sync()
		}
	default:
		return fmt.Errorf("%q?", words[0])
	}
	return nil
}

func (p *play) reads(name string, values []string) error {
	for i, m := range p.spec.Metrics {
		if m.Name != name {
			continue
		}
		r := Reading{Samples: map[string]Sample{}, Requests: map[string]Milli{}}
		if len(values) > 0 && values[0] == "error" {
			r = Reading{Err: errors.New(strings.Join(values[1:], " "))}
			values = nil
		}
		for _, v := range values {
			pod, value, ofPod := strings.Cut(v, "=")
			if !ofPod {
				r.Items = append(r.Items, milli(v))
				continue
			}
			value, request, requests := strings.Cut(value, "/")
			r.Samples[pod] = Sample{Value: milli(value), At: p.now, Window: 30 * time.Second}
			if requests {
				r.Requests[pod] = milli(request)
			}
		}
		p.state.Readings[i] = r
		return nil
	}
	return fmt.Errorf("no metric %s", name)
}

func (p *play) sync() {
	if p.follows {
		p.state.StatusReplicas = p.state.SpecReplicas
	}
	p.last, p.history = Decide(Defaults, p.spec, p.state, p.history, p.now)
	p.state.SpecReplicas = p.last.Replicas
}

func number(s string) int32 {
	n, err := strconv.ParseInt(s, 10, 32)
	if err != nil {
		panic(err)
	}
	return int32(n)
}

func milli(s string) Milli {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil {
		panic(err)
	}
	return Milli(math.Ceil(v * 1000))
}

func rules(settings map[string]string) (r Rules, err error) {
	if w, ok := settings["window"]; ok {
		d, err := time.ParseDuration(w)
		if err != nil {
			return r, err
		}
		r.StabilizationWindow = &d
	}
	if t, ok := settings["tolerance"]; ok {
		v, err := strconv.ParseFloat(t, 64)
		if err != nil {
			return r, err
		}
		r.Tolerance = &v
	}
	r.SelectPolicy = SelectPolicy(settings["select"])
	if settings["policies"] == "" {
		return r, nil
	}
	for text := range strings.SplitSeq(settings["policies"], ",") {
		p := Policy{}
		kind, rest, _ := strings.Cut(text, ":")
		value, period, _ := strings.Cut(rest, "/")
		p.Type, p.Value = PolicyType(kind), number(value)
		if p.Period, err = time.ParseDuration(period); err != nil {
			return r, err
		}
		r.Policies = append(r.Policies, p)
	}
	return r, nil
}

// text is a decision as a transcript shows it.
func (p *play) text() string {
	d := p.last
	var b strings.Builder
	fmt.Fprintf(&b, "%d, by %s\n", d.Replicas, d.Ground)
	for i, m := range d.Metrics {
		fmt.Fprintf(&b, "  %s", m.Metric)
		if m.Err != nil {
			fmt.Fprintf(&b, ": %v\n", m.Err)
			continue
		}
		fmt.Fprintf(&b, ": usage %s, ratio %.3f", quantity(m.Usage), m.Ratio)
		if m.Assumed != 0 {
			fmt.Fprintf(&b, ", with what is assumed %.3f", m.Assumed)
		}
		fmt.Fprintf(&b, ", %s [%g %g]: %d", m.Why, m.Low, m.High, m.Replicas)
		if i == d.Deciding {
			b.WriteString(" decides")
		}
		if m.Wraps {
			b.WriteString(" (wraps)")
		}
		for _, group := range []struct {
			what string
			pods []string
		}{{"missing", m.Missing}, {"unready", m.Unready}, {"ignored", m.Ignored}} {
			if len(group.pods) > 0 {
				fmt.Fprintf(&b, "\n    %s: %s", group.what, strings.Join(group.pods, " "))
			}
		}
		b.WriteString("\n")
	}
	if d.Err != nil {
		fmt.Fprintf(&b, "  error: %v\n", d.Err)
	}
	if s := d.Stabilization; s.Reason != "" {
		fmt.Fprintf(&b, "  window: %d becomes %d, %s by %d of %s until %s\n", s.Recommended, s.Replicas, s.Reason, s.By.Replicas, s.By.At.Sub(noon), s.Until.Sub(noon))
	}
	for _, l := range d.Limit.Policies {
		fmt.Fprintf(&b, "  policy %s %d in %s: from %d (+%d -%d) to %d", l.Policy.Type, l.Policy.Value, l.Policy.Period, l.Start, l.Added, l.Removed, l.Bound)
		if l.Wraps {
			b.WriteString(" (wraps)")
		}
		if !l.Until.IsZero() {
			fmt.Fprintf(&b, " until %s", l.Until.Sub(noon))
		}
		b.WriteString("\n")
	}
	if l := d.Limit; l.Reason != "" {
		fmt.Fprintf(&b, "  limit: %d becomes %d, %s\n", d.Stabilization.Replicas, l.Replicas, l.Reason)
	}
	fmt.Fprintf(&b, "  AbleToScale %v, ScalingActive %v, ScalingLimited %v\n", d.AbleToScale, d.ScalingActive, d.ScalingLimited)
	return b.String()
}

func (c Condition) String() string {
	if c.Reason == "" {
		return "-"
	}
	return fmt.Sprintf("%t (%s)", c.True, c.Reason)
}

func quantity(v Milli) string {
	if v%1000 == 0 {
		return strconv.FormatInt(int64(v/1000), 10)
	}
	return strconv.FormatInt(int64(v), 10) + "m"
}

// Transcripts: commands, a line of dashes, what the last sync decided. `go test ./hpa -update` rewrites the answers; read the diff.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/decide/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			p := newPlay()
			var out strings.Builder
			inAnswer := false
			for line := range strings.Lines(string(data)) {
				text := strings.TrimSpace(line)
				switch {
				case text == "----":
					inAnswer = true
					out.WriteString(line + p.text())
					continue
				case inAnswer && text != "":
					continue // the old answer
				case text == "new":
					p = newPlay()
				case text != "" && !strings.HasPrefix(text, "#"):
					if err := p.do(text); err != nil {
						t.Fatalf("%s: %v", text, err)
					}
				}
				inAnswer = false
				out.WriteString(line)
			}
			if *update {
				if err := os.WriteFile(file, []byte(out.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if out.String() != string(data) {
				t.Errorf("%s: the HPA decides otherwise (go test ./hpa -update rewrites it); it is now\n%s", file, out.String())
			}
		})
	}
}

// The sum of the items counts, never their mean, and nobody asks how many pods it is of. Target 80, tolerance 0.1.
func TestSumPerPod(t *testing.T) {
	items := func(n int, v Milli) (out []Milli) {
		for range n {
			out = append(out, v)
		}
		return out
	}
	for _, c := range []struct {
		what  string
		pods  int32
		items []Milli
		want  int32
	}{
		{"4 pods at 95", 4, items(4, 95_000), 5},
		{"the same as one item", 4, items(1, 380_000), 5},
		{"the mean served instead of the sum", 4, items(1, 95_000), 2},
		{"and again", 2, items(1, 75_000), 1},
		{"3 of 8 do not report", 8, items(5, 95_000), 6},
		{"4 of 16 do not report", 16, items(12, 95_000), 15},
		{"idle", 8, items(8, 0), 0},
		{"a negative first item is an overflow", 8, append(items(1, -1000), items(7, 95_000)...), math.MaxInt32},
		{"a negative last one is only less", 8, append(items(7, 95_000), -1000), 8},
		{"NaN through a plain conversion", 8, items(1, math.MinInt64), math.MaxInt32},
		{"an overflow", 8, items(2, math.MaxInt64), math.MaxInt32},
		{"the upper end of the tolerance", 4, items(4, 88_000), 4},
		{"past it", 4, append(items(3, 88_000), 88_001), 5},
		{"the lower end", 4, items(4, 72_000), 4},
		{"past it, but not a pod less", 4, items(4, 71_000), 4},
		{"a pod less", 4, items(4, 60_000), 3},
		{"5 of 8 pods run at 100, the others are Pending", 8, items(5, 100_000), 7},
		{"no pod exists", 0, items(1, 200_000), 3},
	} {
		m := Metric{Name: "gpu_utilization", Source: External, Target: Target{Type: AverageValue, Value: 80_000}}
		d, _ := Decide(Defaults, Spec{MinReplicas: 1, MaxReplicas: math.MaxInt32, Metrics: []Metric{m}},
			State{SpecReplicas: max(1, c.pods), StatusReplicas: c.pods, Readings: []Reading{{Items: c.items}}}, History{}, noon)
		if got := d.Metrics[0].Replicas; d.Err != nil || got != c.want {
			t.Errorf("%s: %d pods with %v propose %d, %v; want %d", c.what, c.pods, c.items, got, d.Err, c.want)
		}
	}
}

// Nothing that Decide is given changes, so a caller may ask twice and keep what it had.
func TestDecideLeavesItsArgumentsAlone(t *testing.T) {
	p := newPlay()
	for _, line := range []string{
		"metric gpu_utilization External AverageValue 80", "up policies=Pods:1/15s", "down window=0s policies=Pods:1/15s",
		"size 4", "reads gpu_utilization 500", "until 2m", "reads gpu_utilization 10", "until 4m",
	} {
		if err := p.do(line); err != nil {
			t.Fatal(err)
		}
	}
	before := fmt.Sprintf("%+v %+v", p.history, p.state)
	first, _ := Decide(Defaults, p.spec, p.state, p.history, p.now.Add(time.Hour))
	second, _ := Decide(Defaults, p.spec, p.state, p.history, p.now.Add(time.Hour))
	if after := fmt.Sprintf("%+v %+v", p.history, p.state); after != before {
		t.Errorf("Decide changed what it was given:\n%s\n%s", before, after)
	}
	if a, b := fmt.Sprintf("%+v", first), fmt.Sprintf("%+v", second); a != b {
		t.Errorf("twice the same question: %s\n%s", a, b)
	}
}
