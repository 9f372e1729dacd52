package podmap

import (
	"maps"
	"slices"
	"time"
)

// blind is how long we go on without the Pods API while pod-resources answers, which is how long it takes to open a new watch.
// In that time a pod that died might be taken for its successor of the same name on the same device.
const blind = 3 * time.Second

// Core turns the kubelet's answers into a [Mapping]. It has no goroutine, clock or socket, and is not safe for concurrent use.
//
// An answer of pod-resources names pods without UID. It is bound to a UID only if that UID was the only live one of its name
// when the call began, and still is, unchanged, when the *next* call begins (decision 9). The next call and not the end of
// this one, because the news of a pod's end reaches us a moment after the kubelet's own tables know it. So an allocation
// shows up one poll late, and never on the wrong pod. A pod that ends loses its devices at once.
type Core struct {
	hami   bool          // pods hold what HAMi says they were given
	maxAge time.Duration // of the newest good answer, before nothing is known any more

	pods       map[string]Pod  // by UID, live ones
	ended      map[string]bool // UIDs that ended since the last Sync: nothing that is said of them later makes them live again
	names      map[name]*named // by namespace and name
	generation uint64          // grows with every pod that comes or goes
	synced     bool            // pods is complete and follows the kubelet
	lost       time.Time       // when synced became false

	before  map[name]claim // names that had exactly one live UID when the call under way began
	pending *question      // an answer that waits for its confirmation
	held    []Allocation   // confirmed; may name pods that died since
	at      time.Time      // of the answer that held rests on
	unbound []string

	resources, podsAPI API
	errors             map[string]uint64
}

type name struct{ namespace, name string }

// named is what is known of one pod name.
type named struct {
	uids       map[string]struct{} // live now
	generation uint64              // of the newest change of uids; never the same twice
}

// claim is a name's only live UID, and the generation at which it was that.
type claim struct {
	uid        string
	generation uint64
}

// question is an answer with what was known when it was asked for.
type question struct {
	asked  time.Time
	before map[name]claim
	answer Answer
}

// NewCore returns a Core that knows nothing. Answers older than maxAge are forgotten.
func NewCore(maxAge time.Duration) *Core { return newCore(maxAge, false) }

func newCore(maxAge time.Duration, hami bool) *Core {
	c := &Core{maxAge: maxAge, hami: hami, pods: map[string]Pod{}, ended: map[string]bool{}, names: map[name]*named{}, errors: map[string]uint64{}}
	c.resources.Problem = "the kubelet's pod-resources was not asked yet"
	c.podsAPI.Problem = "the kubelet's Pods API was not asked yet"
	return c
}

// Sync replaces all that is known about pods: the kubelet said them all.
func (c *Core) Sync(now time.Time, pods []Pod) {
	fresh := make(map[string]Pod, len(pods))
	for _, p := range pods {
		if p.live() {
			fresh[p.UID] = p
		}
	}
	for uid := range c.pods {
		if _, ok := fresh[uid]; !ok {
			c.remove(uid)
		}
	}
	clear(c.ended)
	for _, p := range fresh {
		c.put(p)
	}
	c.synced = true
	c.podsAPI = API{Up: true, Answered: now}
}

// Update takes the news of one pod.
func (c *Core) Update(now time.Time, p Pod) {
	if p.live() {
		c.put(p)
	} else {
		c.remove(p.UID)
	}
	c.podsAPI.Answered = now
}

// Remove takes the news that a pod ended or is gone.
func (c *Core) Remove(now time.Time, uid string) {
	c.remove(uid)
	c.podsAPI.Answered = now
}

// PodsLost takes the news that the Pods API does not answer any more. Nothing new is bound until the next [Core.Sync].
func (c *Core) PodsLost(now time.Time, reason, problem string) {
	if c.synced {
		c.synced, c.lost = false, now
	}
	c.pending, c.before = nil, nil
	c.podsAPI.Up, c.podsAPI.Problem = false, problem
	c.errors[reason]++
}

// Ask notes what is known before a call of pod-resources, and settles the answer before: what it said is now confirmed, or never.
func (c *Core) Ask(now time.Time) {
	c.settle()
	c.before = nil
	if !c.synced {
		return
	}
	c.before = make(map[name]claim, len(c.names))
	for n, known := range c.names {
		if len(known.uids) == 1 {
			for uid := range known.uids {
				c.before[n] = claim{uid, known.generation}
			}
		}
	}
}

// Answered takes the answer to the call that began at asked, with the last [Core.Ask].
func (c *Core) Answered(asked time.Time, a Answer) {
	c.resources = API{Up: true, Answered: asked}
	c.pending = nil
	switch {
	case c.before != nil:
		c.pending = &question{asked: asked, before: c.before, answer: a}
	case asked.Sub(c.lost) > blind:
		c.held, c.unbound, c.at = nil, nil, time.Time{}
	default:
		c.held = slices.DeleteFunc(slices.Clone(c.held), func(h Allocation) bool { return !a.says(h) })
	}
}

// says tells whether the answer names the allocation, whatever the pod's UID.
func (a Answer) says(h Allocation) bool {
	return slices.ContainsFunc(a, func(o Holder) bool {
		return o.Namespace == h.Namespace && o.Pod == h.Pod && o.Container == h.Container && slices.Contains(o.DeviceIDs, h.DeviceID)
	})
}

// Failed takes the news that the call of pod-resources failed. The last good answer stands until it is too old.
func (c *Core) Failed(reason, problem string) {
	c.resources.Up, c.resources.Problem = false, problem
	c.errors[reason]++
}

// settle turns the pending answer into what is held, as far as the UIDs around it did not change.
func (c *Core) settle() {
	q := c.pending
	c.pending = nil
	if q == nil || !c.synced {
		return
	}
	var held []Allocation
	unbound := map[string]struct{}{}
	for _, h := range q.answer {
		n := name{h.Namespace, h.Pod}
		was, certain := q.before[n]
		known := c.names[n]
		certain = certain && known != nil && known.generation == was.generation
		for _, id := range h.DeviceIDs {
			if !isGPU(h.Resource, id) {
				continue
			}
			if !certain {
				if known != nil { // else it ended, or came and is not announced yet: nothing strange
					unbound[h.Namespace+"/"+h.Pod] = struct{}{}
				}
				continue
			}
			names := []string{id}
			if given := c.pods[was.uid].Given; c.hami && len(given) > 0 {
				names = each(given, func(uuid string) string { return uuid + "::hami" }) // which makes it a shared one
			}
			for _, name := range names {
				uuid, _ := uuidOf(name)
				held = append(held, Allocation{DeviceID: name, UUID: uuid, Namespace: h.Namespace, Pod: h.Pod, PodUID: was.uid,
					Container: h.Container, Resource: h.Resource})
			}
		}
	}
	c.errors[ReasonAmbiguous] += uint64(len(unbound))
	c.held, c.at, c.unbound = markShared(held), q.asked, slices.Sorted(maps.Keys(unbound))
}

func each[A, B any](list []A, f func(A) B) (out []B) {
	for _, a := range list {
		out = append(out, f(a))
	}
	return out
}

// Mapping is what is known at now.
func (c *Core) Mapping(now time.Time) Mapping {
	m := Mapping{Resources: c.resources, PodsAPI: c.podsAPI, Errors: maps.Clone(c.errors)}
	m.Pods = make([]Pod, 0, len(c.pods))
	for _, p := range c.pods {
		m.Pods = append(m.Pods, p)
	}
	slices.SortFunc(m.Pods, comparePods)
	if !c.synced && now.Sub(c.podsAPI.Answered) > c.maxAge {
		m.Pods = nil
	}
	if c.at.IsZero() || now.Sub(c.at) > c.maxAge {
		return m
	}
	m.At, m.Unbound = c.at, c.unbound
	m.Allocations = make([]Allocation, 0, len(c.held))
	for _, a := range c.held {
		if _, alive := c.pods[a.PodUID]; alive {
			m.Allocations = append(m.Allocations, a)
		}
	}
	return m
}

func (c *Core) put(p Pod) {
	if c.ended[p.UID] {
		return
	}
	_, had := c.pods[p.UID]
	c.pods[p.UID] = p
	if had {
		return
	}
	n := name{p.Namespace, p.Name}
	known := c.names[n]
	if known == nil {
		known = &named{uids: map[string]struct{}{}}
		c.names[n] = known
	}
	known.uids[p.UID] = struct{}{}
	c.generation++
	known.generation = c.generation
}

func (c *Core) remove(uid string) {
	c.ended[uid] = true
	p, had := c.pods[uid]
	if !had {
		return
	}
	delete(c.pods, uid)
	n := name{p.Namespace, p.Name}
	known := c.names[n]
	delete(known.uids, uid)
	c.generation++
	known.generation = c.generation
	if len(known.uids) == 0 {
		delete(c.names, n)
	}
}
