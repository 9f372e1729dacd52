package main

import (
	"fmt"
	"math"
	"strings"
	"time"
)

// Act is a part of the story.
type Act int

// The acts in their order. Failed ends the story early.
const (
	Calm  Act = iota // the base rate; the smallest number of workers keeps up
	Rush             // the rate is multiplied; the HPA must go up until the backlog is gone
	After            // the base rate again; the HPA must come back
	Done
	Failed
)

func (a Act) String() string {
	return [...]string{"calm", "rush", "calm again", "done", "failed"}[a]
}

// Sight is what the demonstration saw at one moment. Pure data: the story is a function of a sequence of these.
type Sight struct {
	At      time.Duration // since the story began
	Rate    float64       // samples/s offered
	Backlog int64         // samples that wait
	Done    int64         // samples completed
	Lost    int64         // samples lost; any is a failure

	Workers     int       // that are Ready
	Desired     int       // that the HPA asks for
	Utilization []float64 // percent, one per item that the external metric serves, in order of the worker's ordinal; empty = an error
	Held        bool      // some item is a held one
	MetricError string    // why the external metric serves nothing
	Read        float64   // percent, what the HPA says it read
	ReadOK      bool      // the HPA read something
}

// Plan is what the story plays, and how long each act may last.
type Plan struct {
	BaseRate, RushRate float64       // samples/s
	Min                int           // the HPA's minReplicas
	Settle             time.Duration // for which an act's end state must stand
	Limit              time.Duration // for each act
}

// Story is the state of the play. The zero value, with Plan set, is its beginning.
type Story struct {
	Plan Plan

	Act     Act
	Why     string // why it failed
	Peak    int    // most Ready workers seen
	Ups     []time.Duration
	Entered time.Duration // when the act began
	good    time.Duration // since when the act's end state stands; 0 = it does not
	seen    bool          // a Sight was seen: desired is what it was
	desired int
	Marks   map[Act]time.Duration // when each act began
}

// Step takes what was seen and returns the rate that the source should offer now.
func (s *Story) Step(now Sight) (rate float64) {
	if s.Marks == nil {
		s.Marks = map[Act]time.Duration{Calm: now.At}
		s.Entered = now.At
	}
	if s.seen && now.Desired > s.desired && s.Act == Rush {
		s.Ups = append(s.Ups, now.At)
	}
	s.seen, s.desired, s.Peak = true, now.Desired, max(s.Peak, now.Workers)

	switch {
	case s.Act >= Done:
	case now.Lost > 0:
		s.fail("%d samples were lost", now.Lost)
	case now.At-s.Entered > s.Plan.Limit:
		s.fail("the act %q took longer than %s: %s", s.Act, s.Plan.Limit, s.missing(now))
	case s.missing(now) != "":
		s.good = 0
	case s.good == 0:
		s.good = max(now.At, 1)
	case now.At-s.good >= s.Plan.Settle:
		s.Act, s.Entered, s.good = s.Act+1, now.At, 0
		s.Marks[s.Act] = now.At
	}
	if s.Act == Rush {
		return s.Plan.RushRate
	}
	return s.Plan.BaseRate
}

func (s *Story) fail(format string, args ...any) {
	s.Act, s.Why = Failed, fmt.Sprintf(format, args...)
}

// missing says what the act still waits for; empty when its end state is there.
func (s *Story) missing(now Sight) string {
	switch {
	case !now.ReadOK:
		return "the HPA has read no value: " + now.MetricError
	case now.Workers != now.Desired:
		return fmt.Sprintf("%d workers are ready of %d that the HPA asks for", now.Workers, now.Desired)
	case s.Act == Rush && now.Desired <= s.Plan.Min:
		return fmt.Sprintf("the HPA still asks for %d workers", now.Desired)
	case s.Act == Rush && float64(now.Backlog) > now.Rate:
		return fmt.Sprintf("%d samples still wait", now.Backlog)
	case s.Act != Rush && now.Desired != s.Plan.Min:
		return fmt.Sprintf("the HPA still asks for %d workers", now.Desired)
	}
	return ""
}

// Header names the columns of Line.
const Header = "   time    rate  backlog  workers  HPA read  desired  utilization of each worker (%)"

// Line is one sight for a person.
func (n Sight) Line() string {
	read := "     -"
	if n.ReadOK {
		read = fmt.Sprintf("%5.0f%%", n.Read)
	}
	util := n.MetricError
	if util == "" {
		var each []string
		for _, u := range n.Utilization {
			each = append(each, fmt.Sprintf("%.0f", u))
		}
		util = strings.Join(each, " ")
		if n.Held {
			util += "  (held)"
		}
	}
	clock := n.At.Round(time.Second)
	return fmt.Sprintf("  %02d:%02d  %5.0f/s  %7d  %7d    %s  %7d  %s",
		int(clock.Minutes()), int(clock.Seconds())%60, n.Rate, n.Backlog, n.Workers, read, n.Desired, util)
}

// Changed says whether a person would want a new line: something other than the clock and small movement of the backlog and
// of utilization differs.
func (n Sight) Changed(old Sight) bool {
	return n.Rate != old.Rate || n.Workers != old.Workers || n.Desired != old.Desired || n.ReadOK != old.ReadOK ||
		math.Abs(n.Read-old.Read) >= 5 || len(n.Utilization) != len(old.Utilization) || n.Held != old.Held ||
		(n.MetricError == "") != (old.MetricError == "")
}
