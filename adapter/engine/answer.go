package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/prometheus/model/labels"

	"github.com/capstan-gpu/capstan/metricname"
)

// answer is what an engine says to a query.
type answer struct {
	points       []Point  // each with a pod_uid, no two with the same labels
	notes        []string // remarks about the query, and what is odd about the elements
	unidentified int      // elements without a pod_uid
}

// envelope is the API's answer as it is written.
type envelope struct {
	Status    string   `json:"status"`
	ErrorType string   `json:"errorType"`
	Error     string   `json:"error"`
	Warnings  []string `json:"warnings"`
	Infos     []string `json:"infos"`
	IsPartial bool     `json:"isPartial"` // of a VictoriaMetrics cluster
	Data      *struct {
		ResultType string    `json:"resultType"`
		Result     []element `json:"result"` // of a vector
	} `json:"data"`
}

// element is one of a vector, as it is written.
type element struct {
	Metric    map[string]string `json:"metric"`
	Value     []any             `json:"value"` // Unix time in seconds, and the value as a string
	Histogram json.RawMessage   `json:"histogram"`
}

// apiError is what a body tells of an error; "", "" = it is not the API's.
func apiError(body []byte) (kind, text string) {
	var e envelope
	if json.Unmarshal(body, &e) != nil || e.Status != "error" {
		return "", ""
	}
	if e.ErrorType == "" {
		e.ErrorType = "error"
	}
	return clean(e.ErrorType), e.Error
}

// promqlRemark begins the engine's remarks about an expression. Every other warning is about data that is not whole.
const promqlRemark = "PromQL "

// decode reads the body of a response of status 200 to a query about a moment. It never gives elements and a failure both.
func decode(body []byte, at time.Time) (answer, *failure) {
	var e envelope
	err := json.Unmarshal(body, &e)
	if _, typed := errors.AsType[*json.UnmarshalTypeError](err); err != nil && !typed {
		return answer{}, fail(malformed, "its answer is not the API's (%w; it begins %q): check that the URL is that of the query API", err, excerpt(body)).always()
	}
	if e.Status == "error" {
		return answer{}, fail(rejected, "cannot evaluate it, with status 200 (%s: %s): mend the rule, or the data that it stumbles over", clean(e.ErrorType), clean(e.Error))
	}
	if e.Status != "success" || e.Data == nil || e.Data.ResultType == "" {
		return answer{}, fail(malformed, "its answer has status %q and no data: check that the URL is that of the query API", clean(e.Status)).always()
	}
	if e.IsPartial {
		return answer{}, fail(partial, "its answer is partial (isPartial): see which of its storage nodes is down")
	}
	var a answer
	for _, w := range e.Warnings {
		if !strings.HasPrefix(w, promqlRemark) {
			return answer{}, fail(partial, "its answer comes with a warning, so it may be partial (%s): see which of its stores is down", clean(w))
		}
		a.notes = append(a.notes, clean(w))
	}
	for _, i := range e.Infos {
		a.notes = append(a.notes, clean(i))
	}
	if t := e.Data.ResultType; t != "vector" {
		return answer{}, fail(rejected, "gives a %s, not an instant vector: write an expression with one element for each pod", clean(t)).everywhere()
	}
	if err == nil && e.Data.Result == nil {
		err = errors.New("it is null, which is not an empty one")
	}
	if err != nil { // what is written is of another type; the rest could be read
		return answer{}, fail(malformed, "its vector cannot be read (%w): see whether a proxy changes the engine's answers", err).always()
	}
	if f := a.take(e.Data.Result, at); f != nil {
		return answer{}, f
	}
	return a, nil
}

// take makes points of elements. What it made is of no use when it fails.
func (a *answer) take(elements []element, at time.Time) *failure {
	points := make([]Point, 0, len(elements))
	seen := make(map[uint64][]int, len(elements)) // by hash, the points with it
	relabeled := map[string]bool{}
	build := labels.NewScratchBuilder(16)
	for _, e := range elements {
		build.Reset()
		for name, value := range e.Metric {
			if value != "" { // an empty label is none
				build.Add(name, value)
			}
			if isRelabeled(name) {
				relabeled[name] = true
			}
		}
		build.Sort()
		l := build.Labels()
		value, f := e.value(l, at)
		if f != nil {
			return f
		}
		hash := l.Hash()
		if slices.ContainsFunc(seen[hash], func(i int) bool { return labels.Equal(points[i].Labels, l) }) {
			return fail(malformed, "its answer has %s twice: see whether a proxy before the engine joins answers", clean(l.String()))
		}
		seen[hash] = append(seen[hash], len(points))
		points = append(points, Point{l, value})
	}
	a.points = slices.DeleteFunc(points, func(p Point) bool { return p.Labels.Get(metricname.PodUID) == "" })
	a.unidentified = len(elements) - len(a.points)
	names := strings.Join(slices.Sorted(maps.Keys(relabeled)), ", ")
	switch {
	case relabeled[exported+metricname.PodUID]:
		return fail(rejected, "its elements carry %s: a scrape configuration has put another pod's UID in the place of the worker's: %s", names, honor).everywhere()
	case len(elements) > 0 && len(a.points) == 0:
		return fail(rejected, "none of its %d elements carries the label %s, by which the adapter finds their pods: keep the label in the rule, in relabelings and in recording rules", len(elements), metricname.PodUID).everywhere()
	case names != "":
		a.notes = append(a.notes, fmt.Sprintf("elements carry %s: a scrape configuration has put its own pod in the place of the worker's, so a query for one namespace finds nothing: %s", names, honor))
	}
	return nil
}

// value reads an element's value. l is for the error.
func (e element) value(l labels.Labels, at time.Time) (float64, *failure) {
	if len(e.Histogram) > 0 && len(e.Value) == 0 {
		return 0, fail(rejected, "gives a histogram for %s, not a number: write an expression that makes a number of it", clean(l.String())).everywhere()
	}
	const proxy = "see whether a proxy changes the engine's answers"
	bad := func() (float64, *failure) {
		text, _ := json.Marshal(e.Value)
		return 0, fail(malformed, "its element %s has %s for a time and a value: %s", clean(l.String()), clean(string(text)), proxy)
	}
	if e.Metric == nil {
		return 0, fail(malformed, "it has an element without labels: %s", proxy)
	}
	if len(e.Value) != 2 {
		return bad()
	}
	seconds, timed := e.Value[0].(float64)
	text, written := e.Value[1].(string)
	if !timed || !written {
		return bad()
	}
	if off := seconds - float64(at.UnixMilli())/1000; math.Abs(off) > 1 {
		return 0, fail(malformed, "its answer is of a moment %.0f s from the one that was asked for: see whether a cache before the engine answers in its place", off)
	}
	value, err := strconv.ParseFloat(text, 64)
	if err != nil || strings.ContainsAny(text, "xX_") {
		return bad()
	}
	return value, nil
}

// exported is what Prometheus puts before a label that the target itself set and that the scrape configuration sets, too.
const exported = "exported_"

// honor is the fix.
const honor = "set honorLabels: true in the PodMonitor or ServiceMonitor (honor_labels: true in a scrape_config) that scrapes Capstan's exporters"

func isRelabeled(name string) bool {
	switch strings.TrimPrefix(name, exported) {
	case metricname.Pod, metricname.Namespace, metricname.PodUID:
		return strings.HasPrefix(name, exported)
	}
	return false
}
