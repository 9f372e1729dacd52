package hpa_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/capstan-gpu/capstan/hpa"
	"github.com/capstan-gpu/capstan/rules"
)

// tick is the adapter's interval; the HPA syncs at every third.
const tick = 5 * time.Second

// worker is a pod of the simulated job.
type worker struct {
	rules.Pod
	born   time.Time
	leaves time.Time // when it is gone, while it terminates
	load   []float64 // how busy it was in each tick since it works, in percent
	silent bool      // its exporter tells nothing new
	absurd float64   // what its exporter says instead of the load; 0 = the load
	said   rules.Reading
}

// job is a training job with so much work, shared by whoever works, the adapter's rules, and an HPA that reads what these serve.
type job struct {
	rule      rules.Rule
	memory    rules.Memory
	spec      hpa.Spec
	history   hpa.History
	size      int32
	work      float64   // in percent of one worker
	blurred   time.Time // when it last changed, or was more than the workers could do: then their load does not tell how much it is
	startUp   time.Duration
	workers   []*worker // of a StatefulSet: ordinals 0 to size-1
	born      int
	tells     bool      // its trainers have a stats page, so when the ring last changed is known
	members   string    // who worked in the last tick
	changed   time.Time // when the ring last re-formed, as far as it is known
	stalled   bool      // it re-forms in this tick
	now       time.Time
	served    rules.Answer
	decision  hpa.Decision
	truth     int32   // what it would propose with full information
	truths    []int32 // of all ticks
	replicas  int32   // at the last sync, before it
	syncs     int
	narrative []string
}

// working are the workers that share the work.
func (j *job) working() (out []*worker) {
	for _, w := range j.workers {
		if w.Ready && !w.Terminating {
			out = append(out, w)
		}
	}
	return out
}

// step is a tick of the adapter, and at every third a sync of the HPA.
func (j *job) step() {
	j.now = j.now.Add(tick)
	for i := int32(len(j.workers)); i < j.size; i++ {
		w := &worker{Pod: rules.Pod{Name: fmt.Sprintf("web-%d", i)}}
		j.replace(w)
		j.workers = append(j.workers, w)
	}
	j.workers = j.workers[:j.size]
	for _, w := range j.workers {
		if w.Terminating && !j.now.Before(w.leaves) {
			j.replace(w)
		}
		if !w.Ready && j.now.Sub(w.born) >= j.startUp {
			w.Phase, w.Ready, w.ReadySince = "Running", true, j.now
		}
	}
	each := min(100, j.work/float64(len(j.working())))
	if each == 100 {
		j.blurred = j.now
	}
	readings := map[string]rules.Reading{}
	for _, w := range j.workers {
		if !w.Ready {
			continue
		}
		if j.stalled || w.Terminating {
			w.load = append(w.load, 0)
		} else if w.ReadySince.Before(j.now) { // the tick in which it got Ready is before its work
			w.load = append(w.load, each)
		}
		if !w.silent && len(w.load) > 0 {
			w.said = rules.Reading{PodUID: w.UID, Value: j.mean(w.load), At: j.now}
			if w.absurd != 0 {
				w.said.Value = w.absurd
			}
		}
		if !w.said.At.IsZero() {
			readings[w.UID] = w.said
		}
	}
	members := ""
	for _, w := range j.working() {
		members += w.UID + " "
	}
	if j.stalled || j.tells && members != j.members {
		j.changed = j.now
	}
	j.stalled, j.members = false, members
	var pods []rules.Pod
	for _, w := range j.workers {
		pods = append(pods, w.Pod)
	}
	j.served, j.memory = rules.Decide(j.rule, rules.Workload{Name: "web", Pods: pods, Changed: j.changed}, readings, j.memory, j.now)
	j.truth = j.fullInformation()
	j.truths = append(j.truths, j.truth)
	if j.now.Sub(epoch)%(3*tick) == 0 {
		j.sync()
	}
}

// mean is what a rate over the rule's window gives.
func (j *job) mean(load []float64) float64 {
	load = load[max(0, len(load)-int(j.rule.Window/tick)):]
	sum := 0.0
	for _, v := range load {
		sum += v
	}
	return sum / float64(len(load))
}

var epoch = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

// fullInformation is what the HPA would propose if it knew what every worker does in this moment.
func (j *job) fullInformation() int32 {
	working := j.working()
	var whole hpa.Reading
	for range working {
		whole.Items = append(whole.Items, asServed(min(100, j.work/float64(len(working)))))
	}
	d, _ := hpa.Decide(hpa.Defaults, j.spec, j.state(whole), hpa.History{}, j.now)
	return d.Metrics[0].Replicas
}

func (j *job) state(r hpa.Reading) hpa.State {
	return hpa.State{SpecReplicas: j.size, StatusReplicas: int32(len(j.workers)), Readings: []hpa.Reading{r}}
}

func (j *job) sync() {
	j.syncs++
	j.replicas = j.size
	reading := hpa.Reading{Err: j.served.Err}
	for _, item := range j.served.Items {
		reading.Items = append(reading.Items, asServed(item.Value))
	}
	j.decision, j.history = hpa.Decide(hpa.Defaults, j.spec, j.state(reading), j.history, j.now)
	j.size = j.decision.Replicas
	j.tell("the HPA proposes %d (%v), with full information %d, and goes from %d to %d", j.decision.Metrics[0].Replicas, j.decision.Err, j.truth, j.replicas, j.size)
}

// asServed is the quantity that the adapter makes of a value.
func asServed(v float64) hpa.Milli { return hpa.Milli(math.Round(v * 1000)) }

func (j *job) tell(format string, args ...any) {
	j.narrative = append(j.narrative, fmt.Sprintf("%s: ", j.now.Sub(epoch))+fmt.Sprintf(format, args...))
}

// happens changes the job as the word says.
func (j *job) happens(what string, to int) {
	w := j.workers[to%len(j.workers)]
	j.tell("%s %s", w.Name, what)
	switch what {
	case "falls silent":
		w.silent = true
	case "speaks again":
		w.silent, w.absurd = false, 0
	case "says NaN":
		w.absurd = math.NaN()
	case "says +Inf":
		w.absurd = math.Inf(1)
	case "says -1":
		w.absurd = -1
	case "says 1e300":
		w.absurd = 1e300
	case "dies":
		j.replace(w)
	case "terminates":
		w.Terminating, w.leaves = true, j.now.Add(30*time.Second)
	case "gets more to do", "gets less to do":
		j.blurred = j.now
		if j.work *= 1.4; what == "gets less to do" {
			j.work /= 1.4 * 1.4
		}
	case "is not Ready":
		w.Ready, w.ReadySince, w.born = false, j.now, j.now
	case "re-forms the ring":
		j.stalled = true
	case "restarts the adapter":
		if j.tells { // else nobody can tell the new one who has left just now
			j.memory = rules.Memory{}
		}
	}
}

// replace makes a new pod of a worker's name.
func (j *job) replace(w *worker) {
	j.born++
	*w = worker{Pod: rules.Pod{UID: fmt.Sprint("uid-", j.born), Name: w.Name, Phase: "Pending", GPUs: 1}, born: j.now}
}

var happenings = []string{"terminates", "gets more to do", "gets less to do", "falls silent", "speaks again", "says NaN", "says +Inf", "says -1", "says 1e300", "dies", "is not Ready", "re-forms the ring", "restarts the adapter"}

func drawJob(t *rapid.T) *job {
	j := &job{rule: rules.Default()[0], now: epoch}
	j.work = float64(rapid.IntRange(20, 900).Draw(t, "work, in percent of one worker"))
	j.size = int32(rapid.IntRange(1, 12).Draw(t, "size"))
	j.tells = rapid.Bool().Draw(t, "has a stats page")
	j.startUp = time.Duration(rapid.IntRange(0, 12).Draw(t, "ticks until Ready")) * tick
	window := time.Duration(rapid.SampledFrom([]int{0, 300}).Draw(t, "window downwards")) * time.Second
	j.spec = hpa.Spec{MinReplicas: 1, MaxReplicas: 12, Behavior: &hpa.Behavior{ScaleDown: hpa.Rules{StabilizationWindow: &window}},
		Metrics: []hpa.Metric{{Name: j.rule.Metric, Source: hpa.External, Target: hpa.Target{Type: hpa.AverageValue, Value: 80_000}}}}
	return j
}

// An HPA that reads what the rules serve never asks for fewer workers than it has or than full information would make it ask for,
// whichever is less; nor, garbage or not, for more than full information does or lately did. Where the work has lately become another,
// or more than the workers could do, full information is that of any moment of which the served values may speak. When nothing happens
// any more, constant work comes to a constant size.
func TestHonestMetricNeverShrinksByMistake(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		j := drawJob(t)
		watch := func() {
			syncs := j.syncs
			j.step()
			if j.syncs == syncs {
				return
			}
			if j.decision.Err != nil {
				return
			}
			proposed := j.decision.Metrics[0].Replicas
			known := j.rule.Window + j.rule.HoldFor // how far back a value speaks that is served
			lately := j.truths[max(0, len(j.truths)-int(known/tick)-1):]
			least := j.truth
			if j.now.Sub(j.blurred) <= known {
				least = slices.Min(lately)
			}
			if least = min(j.replicas, least); proposed < least {
				t.Fatalf("it asks for %d, of %d, and full information for %d at least; the metric is %+v\n%s", proposed, j.replicas, least, j.served, strings.Join(j.narrative, "\n"))
			}
			if most := max(j.replicas, slices.Max(lately)); proposed > most {
				t.Fatalf("it asks for %d, of %d, and full information for %d at most; the metric is %+v\n%s", proposed, j.replicas, most, j.served, strings.Join(j.narrative, "\n"))
			}
		}
		for range rapid.IntRange(0, 12).Draw(t, "happenings") {
			for range rapid.SampledFrom([]int{1, 1, 2, 3, 6, 13, 40}).Draw(t, "ticks") {
				watch()
			}
			j.happens(rapid.SampledFrom(happenings).Draw(t, "what"), rapid.IntRange(0, 11).Draw(t, "who"))
		}
		for _, w := range j.workers {
			w.silent, w.absurd = false, 0
		}
		for range 480 { // 40 minutes: a window of 300 s, and some steps with a ring each
			watch()
		}
		size := j.size
		for range 120 {
			if watch(); j.size != size {
				t.Fatalf("%g %% of work come to no rest: %d, then %d\n%s", j.work, size, j.size, strings.Join(j.narrative, "\n"))
			}
		}
	})
}
