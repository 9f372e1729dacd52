package agent

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
	"github.com/capstan-gpu/capstan/trainer/stats"
)

// page counts what the stats page says. Safe for concurrent use.
type page struct {
	mu       sync.Mutex
	began    time.Time // of the generation
	stopped  time.Time // since when the ring does not step; zero = it does, or never did
	pause    time.Duration
	changing time.Duration // all pauses
	changes  map[ring.Reason]uint64
	steps    uint64
	stepped  time.Time // when the newest step was done, within its generation
	step     time.Duration
	compute  time.Duration
	save     time.Duration // that the newest checkpoint took
	running  bool
}

func newPage() *page { return &page{changes: map[ring.Reason]uint64{}} }

func (p *page) acted(a ring.Action, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch a := a.(type) {
	case ring.StartGeneration:
		p.changes[a.Reason]++
		p.began = now
	case ring.RunGeneration:
		p.stepped, p.running, p.pause = now, true, 0
		if !p.stopped.IsZero() {
			p.pause = now.Sub(p.stopped)
			p.changing += p.pause
		}
		p.stopped = time.Time{}
	case ring.Park, ring.AbortStep:
		if p.running {
			p.stopped, p.running = now, false
		}
	case ring.Done, ring.Fail, ring.Exit:
		p.stopped, p.running = time.Time{}, false
	}
}

func (p *page) stepDone(e ring.StepDone, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.steps++
	p.compute += e.Compute
	if p.running {
		p.step, p.stepped = now.Sub(p.stepped), now
	}
}

func (p *page) checkpoint(took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.save = took
}

// Status is the state of an agent, as its page /status and the command `status` show it.
type Status struct {
	Ordinal     int        `json:"ordinal"`
	Phase       ring.Phase `json:"phase"`
	Generation  string     `json:"generation,omitempty"` // term.count; "" = it was in none
	Number      uint64     `json:"generationNumber"`     // as on the stats page
	Age         float64    `json:"generationAgeSeconds"` // since it began; 0 = it is over
	Rank        int        `json:"rank"`                 // -1 = in no ring
	World       int        `json:"world"`
	Step        int64      `json:"step"`          // in its state; -1 = it has none
	Coordinator int        `json:"coordinator"`   // ordinal; -1 = not known
	Why         string     `json:"why,omitempty"` // of a pause, or of a failure
	End         string     `json:"end,omitempty"` // succeeded or failed
	LostSteps   uint64     `json:"lostSteps"`
	Refused     uint64     `json:"refused"` // messages and events of what is over
	Pause       float64    `json:"lastPauseSeconds"`
	Checkpoint  float64    `json:"checkpointSeconds,omitempty"` // that the newest one took

	Ring *RingStatus `json:"ring,omitempty"` // what only the coordinator knows

	member ring.Status
	at     time.Time
}

// hungAfter is how old a status may be, which is made ten times a second, before the agent takes itself for hung.
const hungAfter = 10 * time.Second

// RingStatus is what the coordinator knows of the ring.
type RingStatus struct {
	Term       uint32                 `json:"term"`
	Members    []int                  `json:"members"` // ordinals, by rank
	Desired    int                    `json:"desired"` // replicas; -1 = not known
	Running    bool                   `json:"running"`
	Standby    []int                  `json:"standby,omitempty"`
	Waiting    map[int]string         `json:"waiting,omitempty"` // ordinal of a pod that does not run, and why
	Stragglers []int                  `json:"stragglers,omitempty"`
	Paused     string                 `json:"paused,omitempty"`
	Restarts   int                    `json:"restarts"`
	Crash      string                 `json:"lastCrash,omitempty"`
	Changes    map[ring.Reason]uint64 `json:"changes"`
	ChangeTook float64                `json:"lastChangeSeconds"`
}

func numbers(ids []ring.ID) []int {
	out := make([]int, len(ids))
	for i, id := range ids {
		out[i] = id.Ordinal
	}
	return out
}

// publish makes the status of this moment known.
func (a *Agent) publish(now time.Time) {
	m := a.node.Status()
	s := Status{
		Ordinal: m.ID.Ordinal, Phase: m.Phase, Number: m.Generation.Number(), Rank: m.Rank, World: m.World, Step: m.Step, Coordinator: -1,
		Why: m.Why, End: string(m.End), LostSteps: m.LostSteps, Refused: m.Refused, member: m, at: now,
	}
	if !m.Generation.IsZero() {
		s.Generation = m.Generation.String()
	}
	if m.Leader != (ring.ID{}) {
		s.Coordinator = m.Leader.Ordinal
	}
	a.page.mu.Lock()
	if m.Rank >= 0 {
		s.Age = now.Sub(a.page.began).Seconds()
	}
	s.Pause, s.Checkpoint = a.page.pause.Seconds(), a.page.save.Seconds()
	a.page.mu.Unlock()
	if c := m.Coordinator; c != nil {
		s.Coordinator = m.ID.Ordinal
		s.Ring = &RingStatus{
			Term: c.Term, Members: numbers(c.Record.Members), Desired: c.Desired, Running: c.Running, Standby: numbers(c.Ready),
			Stragglers: numbers(c.Stragglers), Paused: c.Paused, Restarts: c.Record.Restarts, Crash: c.Record.Crash.Error,
			Changes: c.Changes, ChangeTook: c.ChangeTook.Seconds(),
		}
		for _, p := range c.Waiting {
			if s.Ring.Waiting == nil {
				s.Ring.Waiting = map[int]string{}
			}
			s.Ring.Waiting[p.Ordinal] = p.Waiting
		}
	}
	a.status.Store(&s)
}

// Samples are the numbers of the stats page. Rank and generation are there only while this worker is in a ring.
func (a *Agent) Samples() []stats.Sample {
	m := a.Status().member
	now := time.Now()
	p := a.page
	p.mu.Lock()
	changing := p.changing
	if !p.stopped.IsZero() {
		changing += now.Sub(p.stopped)
	}
	out := []stats.Sample{
		{Name: stats.Steps, Value: float64(p.steps)},
		{Name: stats.LostSteps, Value: float64(m.LostSteps)},
		{Name: stats.RingChangeSeconds, Value: changing.Seconds()},
	}
	if p.compute > 0 {
		out = append(out, stats.Sample{Name: stats.ComputeSeconds, Value: p.compute.Seconds()})
	}
	if p.step > 0 {
		out = append(out, stats.Sample{Name: stats.StepDuration, Value: p.step.Seconds()})
	}
	for r, n := range p.changes {
		out = append(out, stats.Sample{Name: stats.RingChanges, Value: float64(n), Labels: []string{string(r)}})
	}
	began := p.began
	p.mu.Unlock()
	if m.Rank >= 0 {
		out = append(out, stats.Sample{Name: stats.Rank, Value: float64(m.Rank)}, stats.Sample{Name: stats.WorldSize, Value: float64(m.World)},
			stats.Sample{Name: stats.RingGeneration, Value: float64(m.Generation.Number())},
			stats.Sample{Name: stats.RingGenerationAge, Value: now.Sub(began).Seconds()})
	}
	if a.cfg.Stats == nil {
		return out
	}
	// What the trainer says of its own steps is nearer to the truth.
	for _, s := range a.cfg.Stats() {
		out = slices.DeleteFunc(out, func(o stats.Sample) bool { return o.Name == s.Name && slices.Equal(o.Labels, s.Labels) })
		out = append(out, s)
	}
	return out
}

// Handler serves the stats page; /status, the same as JSON for people and tools; and /healthz, which is well while the agent works,
// whether it is in a ring or not: a pod that is ready only in the ring would keep a StatefulSet from making the next one.
func (a *Agent) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET "+stats.Path, stats.Handler(a.Samples))
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		e.Encode(a.Status())
	})
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if age := time.Since(a.Status().at); age > hungAfter {
			http.Error(w, fmt.Sprintf("the agent has not looked at its ring for %s", age.Round(time.Second)), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}
