package rules

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "rewrite the golden files")

var noon = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

// play is a workload that a transcript moves: its pods, what they report, and the policy's memory.
type play struct {
	rule   Rule
	pods   []Pod
	value  map[string]float64 // by pod name: what its exporter says
	at     map[string]time.Time
	silent map[string]bool // its exporter says nothing new
	now    time.Time
	memory Memory
	ended  string
	rings  map[string]*simRing // by pod name: what its stats page says
}

// simRing is a worker's stats page. The steps go on while it is not stuck.
type simRing struct {
	generation, steps float64
	began             time.Time
	takes             time.Duration
	stuck             bool
}

func newPlay() *play {
	return &play{
		rule:  Rule{Metric: "gpu_utilization", Unit: Percent, Window: 15 * time.Second, MaxAge: 6 * time.Second, Missing: Hold, HoldFor: 30 * time.Second, JoinFor: 20 * time.Second, Per: PerPod},
		value: map[string]float64{}, at: map[string]time.Time{}, silent: map[string]bool{}, now: noon, rings: map[string]*simRing{},
	}
}

func (p *play) pod(name string) *Pod {
	for i := range p.pods {
		if p.pods[i].Name == name {
			return &p.pods[i]
		}
	}
	p.pods = append(p.pods, Pod{Name: name, UID: "uid-" + name, Node: "node-1", Phase: "Running", Ready: true, ReadySince: p.now, GPUs: 1})
	return &p.pods[len(p.pods)-1]
}

// do runs one command of a transcript.
func (p *play) do(line string) error {
	words := strings.Fields(line)
	switch words[0] {
	case "rule": // rule missing=fail …
		for _, w := range words[1:] {
			key, value, _ := strings.Cut(w, "=")
			d, _ := time.ParseDuration(value)
			switch key {
			case "window":
				p.rule.Window = d
			case "maxAge":
				p.rule.MaxAge = d
			case "holdFor":
				p.rule.HoldFor = d
			case "joinFor":
				p.rule.JoinFor = d
			case "missing":
				p.rule.Missing = Missing(value)
			case "per":
				p.rule.Per, p.rule.Unit = Per(value), "per second"
			case "aggregate":
				p.rule.Aggregate = Aggregate(value)
			default:
				return fmt.Errorf("rule %q?", w)
			}
		}
	case "pods": // pods web-0 web-1 …: Ready from now on, with a GPU
		for _, name := range words[1:] {
			p.pod(name)
		}
	case "pod": // pod web-0 terminating|pending|notready|ready|cpu|uid=…
		pod := p.pod(words[1])
		for _, w := range words[2:] {
			switch w {
			case "terminating":
				pod.Terminating = true
			case "pending":
				pod.Phase, pod.Ready = "Pending", false
			case "notready":
				pod.Ready, pod.ReadySince = false, p.now
			case "ready":
				pod.Phase, pod.Ready, pod.ReadySince = "Running", true, p.now
			case "cpu":
				pod.GPUs = 0
			default:
				uid, ok := strings.CutPrefix(w, "uid=")
				if !ok {
					return fmt.Errorf("pod %q?", w)
				}
				pod.UID, pod.ReadySince = uid, p.now
			}
		}
	case "gone":
		for _, name := range words[1:] {
			for i := range p.pods {
				if p.pods[i].Name == name {
					p.pods = append(p.pods[:i], p.pods[i+1:]...)
					break
				}
			}
			delete(p.value, name)
			delete(p.at, name)
		}
	case "reads": // reads 95 web-0 web-1 …
		v, err := strconv.ParseFloat(words[1], 64)
		if err != nil {
			return err
		}
		for _, name := range words[2:] {
			p.value[name], p.at[name] = v, p.now
		}
	case "silent":
		for _, name := range words[1:] {
			p.silent[name] = true
		}
	case "speaks":
		for _, name := range words[1:] {
			delete(p.silent, name)
		}
	case "ring": // ring 3 web-0 web-1 …: they form generation 3 now, and step once a second
		generation, err := strconv.ParseFloat(words[1], 64)
		if err != nil {
			return err
		}
		for _, name := range words[2:] {
			p.rings[name] = &simRing{generation: generation, steps: 100 * generation, began: p.now, takes: time.Second}
		}
	case "stuck": // stuck web-0 …: in the midst of a step
		for _, name := range words[1:] {
			p.rings[name].stuck = true
		}
	case "steps": // steps 20s web-0 …: a step of theirs takes as long
		d, err := time.ParseDuration(words[1])
		if err != nil {
			return err
		}
		for _, name := range words[2:] {
			p.rings[name].takes, p.rings[name].stuck = d, false
		}
	case "pageless": // the stats page cannot be read
		for _, name := range words[1:] {
			delete(p.rings, name)
		}
	case "ended":
		p.ended = strings.Join(words[1:], " ")
	case "restart": // of the adapter
		p.memory = Memory{}
	case "until": // until 40s: a tick every two seconds, as the adapter does
		d, err := time.ParseDuration(words[1])
		if err != nil {
			return err
		}
		for p.now.Before(noon.Add(d)) {
			p.tick(2 * time.Second)
		}
	default:
		return fmt.Errorf("%q?", words[0])
	}
	return nil
}

func (p *play) tick(d time.Duration) Answer {
	p.now = p.now.Add(d)
	for name := range p.value {
		if !p.silent[name] {
			p.at[name] = p.now
		}
	}
	for _, r := range p.rings {
		if !r.stuck {
			r.steps += math.Floor(d.Seconds() / r.takes.Seconds())
		}
	}
	return p.decide()
}

func (p *play) decide() (a Answer) {
	readings := map[string]Reading{}
	for _, pod := range p.pods {
		if at, ok := p.at[pod.Name]; ok {
			readings[pod.UID] = Reading{PodUID: pod.UID, Value: p.value[pod.Name], At: at}
		}
	}
	pods := slices.Clone(p.pods)
	for i := range pods {
		if r := p.rings[pods[i].Name]; r != nil {
			pods[i].Ring = &Ring{Generation: r.generation, Began: r.began, Steps: r.steps, StepTakes: r.takes, SampleTaken: p.now}
		}
	}
	a, p.memory = Decide(p.rule, Workload{Namespace: "training", Name: "web", Pods: pods, Ended: p.ended}, readings, p.memory, p.now)
	return a
}

func (a Answer) String() string {
	var b strings.Builder
	sum := 0.0
	for _, i := range a.Items {
		fmt.Fprintf(&b, "%s %g", i.Pod, i.Value)
		if i.Held {
			b.WriteString(" held")
		}
		b.WriteString("\n")
		sum += i.Value
	}
	if a.Err != nil {
		fmt.Fprintf(&b, "error: %v\n", a.Err)
	}
	for _, n := range a.Notes {
		fmt.Fprintf(&b, "  (%s)\n", n)
	}
	return b.String()
}

// Transcripts: commands, a line of dashes, what the policy answers. `go test ./rules -update` rewrites the answers; read the diff.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/policy/*.txt")
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
					out.WriteString(line + p.decide().String())
					continue
				case inAnswer && text != "":
					continue // the old answer
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
				t.Errorf("%s: the policy answers otherwise (go test ./rules -update rewrites it); it is now\n%s", file, out.String())
			}
		})
	}
}

// desired is the HPA's arithmetic for an External metric with AverageValue (k8s.io/kubernetes, GetExternalPerPodMetricReplicas),
// within min and max; an error keeps the size.
func desired(a Answer, target float64, replicas, least, most int) int {
	if a.Err != nil {
		return replicas
	}
	sum := 0.0
	for _, i := range a.Items {
		sum += i.Value
	}
	if ratio := sum / (target * float64(replicas)); ratio >= 0.9 && ratio <= 1.1 {
		return replicas
	}
	return min(max(int(math.Ceil(sum/target-1e-9)), least), most)
}

// A job with constant demand (so much work, shared by whoever works) comes to a size and stays there, whatever time its pods take to
// get Ready, and however the signal comes and goes. It never goes below what the demand needs.
func TestConstantDemandComesToRest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := newPlay()
		demand := rapid.Float64Range(30, 900).Draw(t, "demand, in percent of one worker")
		needs := max(int(math.Ceil(demand/88)), 2) // 88 % is still within the HPA's tolerance of 80
		replicas := rapid.IntRange(max(needs, 2), 12).Draw(t, "replicas")
		startUp := time.Duration(rapid.IntRange(0, 20).Draw(t, "seconds until Ready")) * time.Second
		born := map[string]time.Time{}
		sizes := []int{}
		for step := range 400 {
			for i := range 12 {
				name := fmt.Sprintf("web-%d", i)
				_, there := born[name]
				switch {
				case i < replicas && !there:
					born[name] = p.now
					p.pod(name).Ready = false
				case i >= replicas && there:
					delete(born, name)
					if err := p.do("gone " + name); err != nil {
						t.Fatal(err)
					}
				}
			}
			working := 0
			for name, at := range born {
				if pod := p.pod(name); p.now.Sub(at) >= startUp {
					if !pod.Ready {
						pod.Ready, pod.ReadySince = true, p.now
					}
					working++
				}
			}
			for name := range born {
				if p.pod(name).Ready {
					p.value[name] = min(100, demand/float64(working))
				}
			}
			a := p.tick(2 * time.Second)
			if step%3 == 2 {
				replicas = desired(a, 80, replicas, 2, 12)
			}
			if step > 200 {
				sizes = append(sizes, replicas)
			}
			if replicas < needs-1 {
				t.Fatalf("step %d: %d workers for a demand of %g", step, replicas, demand)
			}
		}
		for _, s := range sizes {
			if s != sizes[0] {
				t.Fatalf("demand %g does not come to rest: %v", demand, sizes)
			}
		}
	})
}

// Whatever comes and goes, an answer is whole: either an error, or one valid item for each member, none twice and none too old; or
// the last such vector. A naive twin keeps every vector that was ever whole and looks the served one up.
func TestNeverPartialNeverGarbage(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := newPlay()
		if rapid.Bool().Draw(t, "fail") {
			p.rule.Missing = Fail
		}
		served := map[string]bool{} // the vectors that were whole when they were served
		for range rapid.IntRange(1, 80).Draw(t, "ticks") {
			name := fmt.Sprintf("web-%d", rapid.IntRange(0, 3).Draw(t, "pod"))
			command := rapid.SampledFrom([]string{"pods", "gone", "reads 95", "reads NaN", "reads +Inf", "reads -1", "reads 250", "reads 0", "silent", "speaks", "terminating", "notready", "ready", "restart", ""}).Draw(t, "command")
			var err error
			switch command {
			case "":
			case "terminating", "notready", "ready":
				err = p.do("pod " + name + " " + command)
			default:
				err = p.do(command + " " + name)
			}
			if err != nil {
				t.Fatal(err)
			}
			a := p.tick(time.Duration(rapid.IntRange(1, 8).Draw(t, "seconds")) * time.Second)
			for _, item := range a.Fresh {
				if item.Held || p.now.Sub(item.At) > p.rule.MaxAge || !(item.Value >= 0 && item.Value <= 100) {
					t.Fatalf("%+v is among the fresh values at %s", item, p.now)
				}
			}
			if (a.Err == nil) == (len(a.Items) == 0) {
				t.Fatalf("%d items and the error %v: it must be one of both", len(a.Items), a.Err)
			}
			if a.Err != nil {
				continue
			}
			members := map[string]bool{}
			for _, pod := range p.pods {
				if pod.Ready && !pod.Terminating && pod.GPUs > 0 {
					members[pod.UID] = true
				}
			}
			seen, held := map[string]bool{}, 0
			for _, i := range a.Items {
				if !(i.Value >= 0 && i.Value <= 100) || seen[i.PodUID] || p.now.Sub(i.At) > p.rule.HoldFor || !i.Held && p.now.Sub(i.At) > p.rule.MaxAge {
					t.Fatalf("item %+v at %s", i, p.now)
				}
				seen[i.PodUID] = true
				if i.Held {
					held++
				}
			}
			whole := len(seen) == len(members)
			for uid := range members {
				whole = whole && seen[uid]
			}
			key := fmt.Sprint(len(a.Items))
			for _, i := range a.Items {
				key += fmt.Sprint(" ", i.PodUID, i.Value, i.At.Unix())
			}
			if whole {
				served[key] = true
			} else if held != len(a.Items) || !served[key] {
				t.Fatalf("%v is not of the members %v, and was never served whole", a.Items, members)
			}
		}
	})
}

func TestDecideLeavesItsArgumentsAlone(t *testing.T) {
	p := newPlay()
	for _, line := range []string{"pods web-0 web-1", "reads 95 web-0 web-1", "until 20s"} {
		if err := p.do(line); err != nil {
			t.Fatal(err)
		}
	}
	before := fmt.Sprintf("%+v %+v", p.memory, p.pods)
	w := Workload{Name: "web", Pods: p.pods}
	for range 3 {
		Decide(p.rule, w, nil, p.memory, p.now.Add(time.Minute))
	}
	if after := fmt.Sprintf("%+v %+v", p.memory, p.pods); after != before {
		t.Errorf("Decide changed what it was given:\n%s\n%s", before, after)
	}
}

func TestErrorsAreOfAKind(t *testing.T) {
	p := newPlay()
	if a := p.decide(); !errors.Is(a.Err, ErrNoPods) {
		t.Errorf("no pods: %v", a.Err)
	}
	p.pod("web-0").Ready = false
	if a := p.decide(); !errors.Is(a.Err, ErrNoneReady) {
		t.Errorf("none ready: %v", a.Err)
	}
	p.pod("web-0").Ready = true
	if a := p.decide(); !errors.Is(a.Err, ErrCollecting) {
		t.Errorf("collecting: %v", a.Err)
	}
	if a := p.tick(time.Minute); !errors.Is(a.Err, ErrMissing) {
		t.Errorf("missing: %v", a.Err)
	}
}
