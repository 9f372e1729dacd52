package main

import (
	"strings"
	"testing"
	"time"
)

var plan = Plan{BaseRate: 100, RushRate: 300, Min: 2, Settle: 4 * time.Second, Limit: time.Minute}

// feed gives one sight every two seconds and returns the acts in which each found the story.
func feed(s *Story, sights ...Sight) (acts []string) {
	for i, n := range sights {
		n.At = time.Duration(2*i) * time.Second
		s.Step(n)
		acts = append(acts, s.Act.String())
	}
	return acts
}

func repeat(n int, s Sight) (all []Sight) {
	for range n {
		all = append(all, s)
	}
	return all
}

func TestStoryGoesUpAndComesBack(t *testing.T) {
	calm := Sight{Rate: 100, Workers: 2, Desired: 2, Read: 50, ReadOK: true}
	rush := Sight{Rate: 300, Workers: 2, Desired: 3, Read: 99, ReadOK: true, Backlog: 5000}
	high := Sight{Rate: 300, Workers: 4, Desired: 4, Read: 75, ReadOK: true}
	s := &Story{Plan: plan}
	feed(s, append(append(append(repeat(4, calm), rush), repeat(4, high)...), repeat(4, calm)...)...)
	if s.Act != Done || s.Peak != 4 || len(s.Ups) != 2 {
		t.Errorf("act %s, peak %d, ups %v; want done, 4, two: the HPA went to 3 and to 4", s.Act, s.Peak, s.Ups)
	}
}

func TestStoryFailsWhen(t *testing.T) {
	never := Sight{Rate: 300, Workers: 2, Desired: 2, Read: 50, ReadOK: true, Backlog: 9000}
	for name, c := range map[string]struct {
		sights []Sight
		why    string
	}{
		"the HPA reads nothing":    {repeat(40, Sight{MetricError: "no exporter"}), "no exporter"},
		"the HPA does not go up":   {append(repeat(4, Sight{Workers: 2, Desired: 2, ReadOK: true}), repeat(40, never)...), "still asks for 2"},
		"a sample is lost":         {repeat(2, Sight{Lost: 1}), "1 samples were lost"},
		"workers do not get ready": {repeat(40, Sight{Workers: 1, Desired: 2, ReadOK: true}), "1 workers are ready of 2"},
	} {
		t.Run(name, func(t *testing.T) {
			s := &Story{Plan: plan}
			feed(s, c.sights...)
			if s.Act != Failed || !strings.Contains(s.Why, c.why) {
				t.Errorf("act %s, why %q; want failed and %q", s.Act, s.Why, c.why)
			}
		})
	}
}

func TestStoryStaysFailed(t *testing.T) {
	s := &Story{Plan: plan}
	feed(s, append([]Sight{{Lost: 1}}, repeat(40, Sight{Workers: 2, Desired: 2, ReadOK: true})...)...)
	if s.Act != Failed {
		t.Errorf("act %s after a loss, want failed", s.Act)
	}
}

func TestLine(t *testing.T) {
	got := Sight{At: 83 * time.Second, Rate: 300, Backlog: 1234, Workers: 3, Desired: 4, Utilization: []float64{99.6, 100, 98}, Held: true, Read: 99.4, ReadOK: true}.Line()
	want := "  01:23    300/s     1234        3       99%        4  100 100 98  (held)"
	if got != want {
		t.Errorf("Line:\n%s\nwant\n%s", got, want)
	}
}
