package rules

import (
	"fmt"
	"time"
)

// Ring is what a worker's stats page says of its ring, in the newest sample. A page is read every few seconds, so Began may be later than
// the truth by that much, and differ from sample to sample.
type Ring struct {
	Generation  float64       // number of the ring's membership, which grows with every change; 0 = in no ring, or not said
	Began       time.Time     // when that generation began; zero = not said
	Steps       float64       // that the ring has done; -1 = not said
	StepTakes   time.Duration // the newest step; 0 = not said
	SampleTaken time.Time     // when the sample came in
}

// quietFor is how long a ring may go without a step before it counts as hung, unless its steps take longer than a tenth of that.
const quietFor = time.Minute

// ringMemory is what is remembered of a workload's ring between ticks. The zero value: none was seen.
type ringMemory struct {
	generation float64
	began      time.Time     // the earliest that anybody said of this generation
	steps      float64       // the most that anybody said
	stepped    time.Time     // when steps was last seen to change, or the generation; zero = nobody says steps
	longest    time.Duration // the longest step seen in this generation
}

// fresh is the pod's ring, if its sample is not too old.
func (p Pod) fresh(r Rule, now time.Time) (ring Ring, ok bool) {
	if p.Ring == nil || now.Sub(p.Ring.SampleTaken) > r.MaxAge {
		return Ring{}, false
	}
	return *p.Ring, true
}

// follow takes in what the workers say. All numbers are the ring's, so the highest is the newest. A number that fell is a ring that began
// anew. While nobody says anything, what was known stands.
func (m ringMemory) follow(r Rule, pods []Pod, now time.Time) ringMemory {
	newest := -1.0
	for _, p := range pods {
		if ring, ok := p.fresh(r, now); ok && p.Ready && !p.Terminating {
			newest = max(newest, ring.Generation)
		}
	}
	if newest < 0 {
		return m
	}
	next := m
	if newest != m.generation {
		next = ringMemory{generation: newest}
	}
	steps := -1.0
	for _, p := range pods {
		ring, ok := p.fresh(r, now)
		if !ok || ring.Generation != newest || !p.Ready || p.Terminating {
			continue
		}
		if began := ring.Began; !began.IsZero() && newest > 0 && (next.began.IsZero() || began.Before(next.began)) {
			next.began = began
		}
		steps = max(steps, ring.Steps)
		next.longest = max(next.longest, ring.StepTakes)
	}
	if newest > 0 && next.began.IsZero() {
		next.began = now
	}
	if steps >= 0 && (next.stepped.IsZero() || steps != next.steps) {
		next.steps, next.stepped = steps, now
	}
	return next
}

// joined says whether a worker is in the ring's newest generation. One that has no stats page, or whose page says nothing of a ring while
// nobody's does, is judged by its readiness alone.
func (m ringMemory) joined(r Rule, p Pod, now time.Time) bool {
	ring, ok := p.fresh(r, now)
	return !ok || ring.Generation >= m.generation
}

// hung says why the ring counts as hung, if it does: all of its members have a stats page, and none has done a step for long. It may still
// keep its GPUs at 100 %, waiting.
func (m ringMemory) hung(r Rule, members []Pod, now time.Time) error {
	if m.stepped.IsZero() || len(members) == 0 {
		return nil
	}
	for _, p := range members {
		if ring, ok := p.fresh(r, now); !ok || ring.Steps < 0 {
			return nil
		}
	}
	quiet, limit := now.Sub(m.stepped), max(quietFor, 10*m.longest)
	if quiet <= limit {
		return nil
	}
	return fmt.Errorf("%w: none of its %d members has done a step for %s (allowed: %s); generation %g, step %g",
		ErrNotStepping, len(members), ago(quiet), limit.Round(time.Second), m.generation, m.steps)
}
