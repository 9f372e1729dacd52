// Package rules says which external metrics there are and what may be served of them.
//
// A [Rule] is PromQL and a policy. [Parse] reads them from strict YAML, [Check] says what is doubtful, too, [Default] are the shipped ones. The PromQL is
// evaluated elsewhere, once a tick for the whole fleet; [Decide] then turns one workload's readings into what the
// HorizontalPodAutoscaler gets: a complete vector, or an error that says what is missing.
//
// The package does no I/O, has no clock and starts nothing: files are read by the caller, now is an argument.
package rules

import (
	"strings"
	"time"
)

// Missing is what happens to a worker that should report and does not.
type Missing string

const (
	Hold Missing = "hold" // its last value stands, at most HoldFor, then Fail
	Fail Missing = "fail" // the whole workload is an error at once
)

// Per is what one served item stands for.
type Per string

const (
	PerPod      Per = "pod"      // one item per worker pod; the HPA adds them up
	PerWorkload Per = "workload" // one item per workload, made of its pods by Aggregate
)

// Aggregate is how a PerWorkload item is made of the pods' values.
type Aggregate string

const (
	Max Aggregate = "max" // every pod tells the same of its ring (a step is the ring's): the highest is the newest. One pod's report is enough
	Sum Aggregate = "sum" // every pod tells its own part: all must report
)

// Collect is when a rule is evaluated.
type Collect string

const (
	Always Collect = "always" // whether anybody asks or not, so that a new HPA finds a value at once
	Asked  Collect = "asked"  // while an HPA asks for the metric, or somebody has lately: what nobody asks for costs nothing
)

// Percent is the unit whose values are 0 to 100; anything else is never served. See [Rule.Unit].
const Percent = "percent"

// Rule is one external metric.
type Rule struct {
	Metric string // as the HPA asks for it: lower case, because the HPA's client lower-cases
	Help   string // one sentence for people
	Unit   string // "percent" bounds the values to 0..100; see units
	Expr   string // PromQL of an instant vector whose elements carry the label pod_uid; $window stands for Window

	Window    time.Duration // the interval that a value speaks for; Expr looks back no further
	Freshness string        // selector of the series whose newest sample is a reading's age
	MaxAge    time.Duration // an older reading is no longer fresh
	Missing   Missing       // what becomes of an expected worker without a fresh reading
	HoldFor   time.Duration // nothing older than this is ever served
	JoinFor   time.Duration // how long a worker that is Ready may take until its first reading before it is called missing
	Per       Per           //
	Collect   Collect       //
	Aggregate Aggregate     // for PerWorkload; else ""
}

// Query is the expression with $window replaced.
func (r Rule) Query() string {
	return strings.ReplaceAll(r.Expr, windowVariable, promDuration(r.Window))
}

// FreshnessQuery gives, per pod_uid, the Unix time in seconds of the newest sample of the rule's freshness selector.
// Evaluate it with a look-back of at least HoldFor to learn the age of what is missing, too.
func (r Rule) FreshnessQuery() string {
	return "max by (pod_uid) (timestamp(" + r.Freshness + "))"
}
