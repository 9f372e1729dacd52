package rules

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
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
	Ring            *Ring     // what its trainer says of the ring; nil = it has no stats page, or none that could be read
}

// Workload is a StatefulSet and its pods.
type Workload struct {
	Namespace, Name string // the StatefulSet's
	UID             string
	Pods            []Pod     // all that it owns, whatever their state; the order does not matter
	Changed         time.Time // when its ring last changed, where that is known better than from the pods; zero = not known
	Ended           string    // how its job ended, as was recorded: "succeeded", or "failed" and why; "" = it has not
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
	Err   error    // wraps one of ErrEnded, ErrNoPods, ErrNoneReady, ErrMissing, ErrCollecting, ErrNotStepping
	Notes []string // for people: who is not counted, and why a value stands

	// Fresh are the members' values of now, of PerPod, for who treats missing ones himself, as the HPA does for a metric of type Pods. Nil
	// where the job has ended or its ring does not step.
	Fresh []Item
}

// Why there is no answer.
var (
	ErrEnded       = errors.New("the job is done")
	ErrNoPods      = errors.New("no pods")
	ErrNoneReady   = errors.New("no worker is ready")
	ErrMissing     = errors.New("missing")
	ErrCollecting  = errors.New("collecting")
	ErrNotStepping = errors.New("ring not stepping")
)

// Memory is what Decide remembers of one rule and one workload between ticks. The zero value is an adapter that has just
// started. It is a value: Decide never changes the one it was given.
type Memory struct {
	seen    time.Time // since when the workload is looked at; zero = not yet
	members []string  // UIDs of the admitted pods, sorted
	since   time.Time // since when they are the members
	last    []Item    // the newest vector that was complete, each item with its own At; nil = there was none
	ring    ringMemory
}

// Decide says what w's items are at now.
//
// A pod is admitted when it is Ready, not terminating, holds a GPU, and the ring, if its workers tell of one, has admitted it. The admitted
// pods are the members. While members come and go,
// the last complete vector stands, those who left included: the HPA adds up the items and divides by its replicas, so a mix of old and
// new members would make it flap. Once the members and their ring's generation have been the same for a window, the vector is theirs. A member without a fresh
// value has its last one held. Nothing older than HoldFor is served, ever, and nothing partial: then it is an error, at which the HPA
// keeps its size.
//
// The held vector proposes what it proposed before. The HPA asks for ceil(sum/target) unless sum/(target×replicas) is within its
// tolerance of 1, in which case it asks for the replicas that it has: both hold the size that was decided upon.
func Decide(r Rule, w Workload, readings map[string]Reading, m Memory, now time.Time) (Answer, Memory) {
	if w.Ended != "" {
		return Answer{Err: fmt.Errorf("%w: %s", ErrEnded, w.Ended)}, Memory{}
	}
	if m.seen.IsZero() {
		m.seen = now
	}
	m.ring = m.ring.follow(r, w.Pods, now)
	admitted, notes := admit(r, w, m.ring, now)
	m = m.follow(admitted, later(w.Changed, m.ring.began), now)
	if len(w.Pods) == 0 {
		return Answer{Err: fmt.Errorf("%w: the StatefulSet %s has no pod", ErrNoPods, w.Name)}, Memory{}
	}
	if why := m.ring.hung(r, admitted, now); why != nil {
		return Answer{Err: why, Notes: notes}, m
	}
	if r.Per == PerWorkload {
		return decideWhole(r, w, admitted, readings, m, notes, now)
	}
	if len(admitted) == 0 {
		return m.stand(r, notes, fmt.Errorf("%w of %d pods of %s%s", ErrNoneReady, len(w.Pods), w.Name, listed(notes)), now), m
	}

	items := make([]Item, 0, len(admitted))
	var fresh []Item
	var missing, joining []string
	for _, p := range admitted {
		item, age, ok := r.item(w, p, readings[p.UID], now)
		if ok {
			items, fresh = append(items, item), append(fresh, item)
			continue
		}
		last, held := m.held(r, p.UID, now)
		if !held || r.Missing == Fail {
			known := !item.At.IsZero()
			if !last.At.IsZero() {
				known, age = true, now.Sub(last.At)
			}
			if !known && r.joins(p, m, now) {
				joining = append(joining, p.Name)
			} else {
				missing = append(missing, r.missed(p, m, age, known, now))
			}
			continue
		}
		items = append(items, last)
		notes = append(notes, fmt.Sprintf("%s has no fresh value: the one of %s ago stands", p.Name, ago(now.Sub(last.At))))
	}
	stable := now.Sub(m.since) >= r.Window

	switch {
	case len(missing) > 0 && (stable || m.last == nil):
		return Answer{Err: fmt.Errorf("%w: %s", ErrMissing, strings.Join(missing, "; ")), Notes: notes, Fresh: fresh}, m
	case len(missing) > 0 || len(joining) > 0 || !stable:
		why := fmt.Errorf("%w: %d of %d workers of %s have reported", ErrCollecting, len(items), len(admitted), w.Name)
		switch {
		case len(missing) > 0:
			why = fmt.Errorf("%w: %s", ErrMissing, strings.Join(missing, "; "))
		case len(joining) > 0:
			why = fmt.Errorf("%w; no value yet of %s", why, strings.Join(joining, ", "))
		case !stable:
			why = fmt.Errorf("%w, who have been the members for %s; a vector needs %s", why, ago(now.Sub(m.since)), r.Window)
		}
		a := m.stand(r, notes, why, now)
		a.Fresh = fresh
		return a, m
	}
	m.last = items
	if len(fresh) == len(items) {
		fresh = items // the same, once in memory
	}
	return Answer{Items: items, Notes: notes, Fresh: fresh}, m
}

// admit picks the members, in the order of their ordinals, and says of everybody else why not.
func admit(r Rule, w Workload, ring ringMemory, now time.Time) (admitted []Pod, notes []string) {
	seen := map[string]bool{}
	for _, p := range w.Pods {
		switch {
		case seen[p.UID]:
		case p.Terminating:
			notes = append(notes, p.Name+" is terminating")
		case p.Phase == "Succeeded" || p.Phase == "Failed":
			notes = append(notes, p.Name+" has ended ("+p.Phase+")")
		case p.Phase == "Pending":
			notes = append(notes, p.Name+" is Pending")
		case !p.Ready:
			notes = append(notes, p.Name+" is not Ready")
		case p.GPUs == 0:
			notes = append(notes, p.Name+" holds no GPU")
		case !ring.joined(r, p, now):
			notes = append(notes, p.Name+" is not in the ring")
		default:
			admitted = append(admitted, p)
		}
		seen[p.UID] = true
	}
	slices.SortStableFunc(admitted, func(a, b Pod) int { return compareOrdinal(a.Name, b.Name) })
	return admitted, notes
}

// follow notes who the members are and since when. A joiner is one since it is Ready, which the API server says; that somebody left
// is known only from when it was seen.
func (m Memory) follow(admitted []Pod, changed, now time.Time) Memory {
	members := make([]string, 0, len(admitted))
	var newest time.Time
	for _, p := range admitted {
		members = append(members, p.UID)
		if p.ReadySince.After(newest) {
			newest = p.ReadySince
		}
	}
	slices.Sort(members)
	for _, old := range m.members {
		if _, stays := slices.BinarySearch(members, old); !stays {
			newest = now
		}
	}
	if changed.After(newest) {
		newest = changed
	}
	// A clock of the API server that is ahead of ours must not keep a workload waiting for ever.
	if newest.After(now) {
		newest = now
	}
	if !slices.Equal(members, m.members) || newest.After(m.since) {
		m.since = later(m.since, newest)
	}
	m.members = members
	return m
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// stand serves the last complete vector while nothing in it is older than HoldFor, else the reason why there is none of now.
func (m Memory) stand(r Rule, notes []string, why error, now time.Time) Answer {
	if len(m.last) == 0 {
		return Answer{Err: why, Notes: notes}
	}
	items := make([]Item, len(m.last))
	for i, item := range m.last {
		if age := now.Sub(item.At); age > r.HoldFor {
			return Answer{Err: fmt.Errorf("%w; the last complete values are %s old (holdFor %s)", why, ago(age), r.HoldFor), Notes: notes}
		}
		item.Held = true
		items[i] = item
	}
	return Answer{Items: items, Notes: append(notes, "the last complete values stand: "+why.Error())}
}

// held is a pod's last value. ok says that it may still be served: it is not too old, and not from before the members were these, when each
// had another share of the work.
func (m Memory) held(r Rule, uid string, now time.Time) (item Item, ok bool) {
	for _, item := range m.last {
		if item.PodUID == uid {
			item.Held = true
			return item, now.Sub(item.At) <= r.HoldFor && !item.At.Before(m.since)
		}
	}
	return Item{}, false
}

// item makes a pod's item of its reading. fresh says that it may be served; age is that of the reading.
func (r Rule) item(w Workload, p Pod, reading Reading, now time.Time) (item Item, age time.Duration, fresh bool) {
	item = Item{Pod: p.Name, PodUID: p.UID, Workload: w.Name, Node: p.Node, At: reading.At, Labels: reading.Labels}
	if reading.At.IsZero() {
		return item, 0, false
	}
	age = now.Sub(reading.At)
	v, ok := r.valid(reading.Value)
	item.Value = v
	return item, age, ok && age <= r.MaxAge
}

// joins says that a pod may still be on its way: it has not been Ready for joinFor, or nobody has looked for so long.
func (r Rule) joins(p Pod, m Memory, now time.Time) bool {
	return p.ReadySince.IsZero() || now.Sub(later(p.ReadySince, m.seen)) < r.JoinFor
}

// missed says what a person should know of a pod that should report and does not.
func (r Rule) missed(p Pod, m Memory, age time.Duration, known bool, now time.Time) string {
	where := ""
	if p.Node != "" {
		where = " on " + p.Node
	}
	if !known {
		return fmt.Sprintf("worker %s%s has been Ready for %s and has never had a value (joinFor %s)", p.Name, where, ago(now.Sub(later(p.ReadySince, m.seen))), r.JoinFor)
	}
	limit := fmt.Sprintf("holdFor %s", r.HoldFor)
	if last, _ := m.held(r, p.UID, now); r.Missing == Fail {
		limit = fmt.Sprintf("maxAge %s", r.MaxAge)
	} else if last.At.Before(m.since) && age <= r.HoldFor {
		limit = "its last one is from before the members were these"
	}
	return fmt.Sprintf("worker %s%s has had no valid value for %s (%s)", p.Name, where, ago(age), limit)
}

// decideWhole makes one item of the workload. With Max, one member's report is enough, for all tell of the same ring; with Sum every
// member must report.
func decideWhole(r Rule, w Workload, admitted []Pod, readings map[string]Reading, m Memory, notes []string, now time.Time) (Answer, Memory) {
	whole := Item{Workload: w.Name}
	var absent []string
	reported := 0
	for _, p := range admitted {
		item, _, fresh := r.item(w, p, readings[p.UID], now)
		if !fresh {
			absent = append(absent, p.Name)
			continue
		}
		reported++
		if whole.At.IsZero() || item.At.Before(whole.At) {
			whole.At = item.At
		}
		if r.Aggregate == Sum {
			whole.Value += item.Value
		} else {
			whole.Value = max(whole.Value, item.Value)
		}
	}
	if reported > 0 && (len(absent) == 0 || r.Aggregate == Max) {
		m.last = []Item{whole}
		return Answer{Items: m.last, Notes: notes}, m
	}
	why := fmt.Errorf("%w of %d pods of %s%s", ErrNoneReady, len(w.Pods), w.Name, listed(notes))
	if len(admitted) > 0 {
		why = fmt.Errorf("%w: no fresh value of %s", ErrMissing, strings.Join(absent, ", "))
	}
	if r.Missing == Fail {
		return Answer{Err: why, Notes: notes}, m
	}
	return m.stand(r, notes, why, now), m
}

func listed(notes []string) string {
	if len(notes) == 0 {
		return ""
	}
	return ": " + strings.Join(notes, ", ")
}

// ago is an age for people.
func ago(d time.Duration) string { return d.Round(time.Second).String() }

// compareOrdinal orders pods of a StatefulSet by the number at the end of their names: web-10 after web-9.
func compareOrdinal(a, b string) int {
	nameA, ordinalA := splitOrdinal(a)
	nameB, ordinalB := splitOrdinal(b)
	return cmp.Or(cmp.Compare(nameA, nameB), cmp.Compare(ordinalA, ordinalB))
}

func splitOrdinal(name string) (string, int) {
	i := strings.LastIndexByte(name, '-')
	n, err := strconv.Atoi(name[i+1:])
	if err != nil {
		return name, -1
	}
	return name[:max(i, 0)], n
}
