package hpa

import (
	"slices"
	"time"
)

// History is what the controller remembers of one HPA. It is a value: nothing here changes the one it is given. All of it but
// ScaledToZero, which is a condition in the HPA's status, is lost when the controller restarts.
type History struct {
	Recommendations []Recommendation // as the metrics made them, not stabilized; in no order
	Ups, Downs      []ScaleEvent     // kept only while the HPA has a behavior
	ScaledToZero    bool             // the HPA itself scaled to 0, so it may scale from 0, too
}

// Recommendation is the size that the metrics asked for at a sync.
type Recommendation struct {
	Replicas int32
	At       time.Time
}

// ScaleEvent is a change of the size by the HPA.
type ScaleEvent struct {
	Change int32 // number of pods, positive in both directions
	At     time.Time

	outdated bool // no policy looked back so far when it was last looked at: its place may be taken
}

// begin makes the size that the controller finds first its first recommendation, so that a restart does not scale down at once.
func (h History) begin(current int32, now time.Time) History {
	if len(h.Recommendations) == 0 {
		h.Recommendations = []Recommendation{{current, now}}
	}
	return h
}

// record puts a recommendation in the place of one that is too old for every window, if there is one.
func (h History) record(replicas int32, old int, now time.Time) History {
	r := Recommendation{replicas, now}
	if old < 0 {
		h.Recommendations = append(slices.Clip(h.Recommendations), r)
		return h
	}
	h.Recommendations = slices.Clone(h.Recommendations)
	h.Recommendations[old] = r
	return h
}

// rescaled notes a change of the size.
func (h History) rescaled(s Spec, from, to int32, now time.Time) History {
	h.ScaledToZero = from > 0 && to == 0 && s.MinReplicas == 0 && s.fromZero()
	if s.Behavior == nil {
		return h
	}
	behavior := s.Behavior.withDefaults(Controller{}) // the windows do not matter here
	if to > from {
		h.Ups = noted(h.Ups, to-from, behavior.ScaleUp.Policies, now)
	} else {
		h.Downs = noted(h.Downs, from-to, behavior.ScaleDown.Policies, now)
	}
	return h
}

func noted(events []ScaleEvent, change int32, policies []Policy, now time.Time) []ScaleEvent {
	var longest time.Duration
	for _, p := range policies {
		longest = max(longest, p.Period)
	}
	events = slices.Clone(events)
	old := -1
	for i := range events {
		if events[i].At.Before(now.Add(-longest)) {
			events[i].outdated = true
		}
		if events[i].outdated {
			old = i
		}
	}
	event := ScaleEvent{Change: change, At: now}
	if old < 0 {
		return append(events, event)
	}
	events[old] = event
	return events
}

// Stabilization is what the window makes of the metrics' recommendation.
type Stabilization struct {
	Recommended int32          // the metrics' highest proposal, at least 0
	Replicas    int32          // after the window
	Reason      string         // ScaleUpStabilized or ScaleDownStabilized; "" = the window changed nothing
	By          Recommendation // which one stands in the way, the newest of its size; zero without a Reason
	Until       time.Time      // when that one leaves the window
}

// stabilizeDown is for HPAs without a behavior: the highest recommendation of the window counts. One exactly as old as the window is
// still in it.
func (h History) stabilizeDown(recommended int32, window time.Duration, now time.Time) (Stabilization, History) {
	s := Stabilization{Recommended: recommended, Replicas: recommended}
	cutoff := now.Add(-window)
	old := -1
	for i, r := range h.Recommendations {
		switch {
		case r.At.Before(cutoff):
			old = i
		case r.Replicas > s.Replicas || s.Reason != "" && r.Replicas == s.Replicas && r.At.After(s.By.At):
			s.Replicas, s.Reason, s.By, s.Until = r.Replicas, "ScaleDownStabilized", r, r.At.Add(window)
		}
	}
	return s, h.record(recommended, old, now)
}

// stabilize is for HPAs with a behavior: the size grows to the lowest recommendation of the window upwards, and shrinks to the highest of
// that downwards. One exactly as old as a window is no longer in it.
func (h History) stabilize(b Behavior, current, recommended int32, now time.Time) (Stabilization, History) {
	up, down := *b.ScaleUp.StabilizationWindow, *b.ScaleDown.StabilizationWindow
	lowest, highest := Recommendation{Replicas: recommended}, Recommendation{Replicas: recommended}
	old := -1
	for i, r := range h.Recommendations {
		if r.At.After(now.Add(-up)) && (r.Replicas < lowest.Replicas || r.Replicas == lowest.Replicas && r.At.After(lowest.At)) {
			lowest = r
		}
		if r.At.After(now.Add(-down)) && (r.Replicas > highest.Replicas || r.Replicas == highest.Replicas && r.At.After(highest.At)) {
			highest = r
		}
		if r.At.Before(now.Add(-up)) && r.At.Before(now.Add(-down)) {
			old = i
		}
	}
	s := Stabilization{Recommended: recommended, Replicas: min(max(current, lowest.Replicas), highest.Replicas)}
	switch {
	case s.Replicas == recommended:
	case recommended >= current:
		s.Reason, s.By, s.Until = "ScaleUpStabilized", lowest, lowest.At.Add(up)
	default:
		s.Reason, s.By, s.Until = "ScaleDownStabilized", highest, highest.At.Add(down)
	}
	return s, h.record(recommended, old, now)
}
