package rules

import (
	"errors"
	"time"
)

// Pod is a pod of a workload as the API server tells it.
type Pod struct {
	UID, Name, Node string
	Phase           string    // Pending, Running, Succeeded, Failed, Unknown
	Ready           bool      // condition Ready is True
	ReadySince      time.Time // when Ready last became what it is; zero = not known
	Terminating     bool      // has a deletion timestamp
	GPUs            int       // GPUs that it requests, of any resource name
}

// Workload is a StatefulSet and its pods.
type Workload struct {
	Namespace, Name string // the StatefulSet's
	UID             string
	Pods            []Pod     // all that it owns, whatever their state; the order does not matter
	Changed         time.Time // when its ring last changed, where that is known better than from the pods; zero = not known
}

// Reading is what the rule's query said of one pod.
type Reading struct {
	PodUID string
	Value  float64
	At     time.Time         // the newest sample of the rule's freshness selector; zero = none
	Labels map[string]string // more labels for the item, such as gpu_model; not changed, only passed on
}

// Item is one served value.
type Item struct {
	Pod, PodUID, Workload, Node string // Pod, PodUID and Node are empty for PerWorkload
	Value                       float64
	At                          time.Time // of the reading that it came from
	Held                        bool      // an older reading that still stands
	Labels                      map[string]string
}

// Answer is what the HPA gets: Items or Err, exactly one of both.
type Answer struct {
	Items []Item   // sorted by pod name, in the order of ordinals
	Err   error    // wraps one of ErrNoPods, ErrNoneReady, ErrMissing, ErrCollecting
	Notes []string // for people: who is not counted, and why a value stands
}

// Why there is no answer.
var (
	ErrNoPods     = errors.New("no pods")
	ErrNoneReady  = errors.New("no worker is ready")
	ErrMissing    = errors.New("missing")
	ErrCollecting = errors.New("collecting")
)

// Memory is what Decide remembers of one rule and one workload between ticks. The zero value is an adapter that has just
// started. It is a value: Decide never changes the one it was given.
type Memory struct{}

// Decide says what w's items are at now.
func Decide(r Rule, w Workload, readings map[string]Reading, m Memory, now time.Time) (Answer, Memory) {
	return Answer{Err: ErrCollecting}, m
}
