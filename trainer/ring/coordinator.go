package ring

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// coordinator is the part of one node that decides for all. It lives as long as the node holds the lease, and begins with nothing but the
// record: all else it learns from reports, within a heart-beat.
type coordinator struct {
	cfg   Config
	self  ID
	term  uint32
	count uint32 // generations numbered in this term
	began time.Time
	now   time.Time // newest given

	record  Record  // the newest that is recorded
	writing *Record // one that is being recorded
	refused bool    // the record is not ours to write any more: somebody else wrote
	resigns bool    // has asked to be relieved

	// How the members of record get into it; known only to the coordinator that made it.
	source    ID
	behind    []ID
	committed time.Time

	proposal *proposal
	views    []*view // of all processes heard of, sorted by ID
	pods     *Pods   // nil = not known
	pausing  time.Time

	running  time.Time     // since when all members of record step; zero = not yet
	took     time.Duration // from the proposal until then
	proposed time.Time     // when the proposal that led to record was made
	greeted  time.Time
	leavers  time.Time   // since when a member wants to leave; zero = none does
	copyFrom map[ID]bool // whose state differs from the others'
	differed int         // generations in a row with states that differ
	changes  map[Reason]uint64

	out []Action
}

// proposal is a generation that is to be: who stops for it may become its member.
type proposal struct {
	generation Generation
	reason     Reason
	since      time.Time
	abort      bool // do not finish the step
	abortSince time.Time
	ready      time.Time // since when all members of the old ring have stopped; zero = not yet
	paused     bool
	why        string
	reload     bool // the state is to be read from a checkpoint
	suspend    bool // nobody is to stay: save, then release
	saver      ID
	saved      bool
}

// view is what is known of one process.
type view struct {
	id        ID
	report    Report
	known     bool       // it has reported to this coordinator
	heard     time.Time  // last; for a member of record that has not reported, since when it is waited for
	suspected time.Time  // since when a peer says that its connection to it broke in record's generation
	warm      time.Time  // since when it is warm; zero = is not
	anew      bool       // it warmed up while this coordinator looked on, so warm is when it read its checkpoint
	gone      bool       // for good
	crashes   int        // of report.Crashes, accounted for
	slow      int64      // steps in a row that took it longer than the others
	judged    int64      // the newest step that was
	out       bool       // taken out of the ring for its slowness
	skip      Generation // it failed to get into that one: not again before the next planned change
}

func newCoordinator(cfg Config, self ID, term, count uint32, record Record, now time.Time) *coordinator {
	c := &coordinator{
		cfg: cfg, self: self, term: term, count: count, began: now, now: now, record: record,
		copyFrom: map[ID]bool{}, changes: map[Reason]uint64{},
	}
	for _, id := range record.Members {
		c.view(id)
	}
	return c
}

func (c *coordinator) do(a Action) { c.out = append(c.out, a) }

func (c *coordinator) find(id ID) *view {
	if i, found := slices.BinarySearchFunc(c.views, id, func(v *view, id ID) int { return v.id.Compare(id) }); found {
		return c.views[i]
	}
	return nil
}

func (c *coordinator) view(id ID) *view {
	i, found := slices.BinarySearchFunc(c.views, id, func(v *view, id ID) int { return v.id.Compare(id) })
	if !found {
		c.views = slices.Insert(c.views, i, &view{id: id, heard: c.now})
	}
	return c.views[i]
}

// event hears one, then decides.
func (c *coordinator) event(e Event, now time.Time) {
	c.now = now
	switch e := e.(type) {
	case Message:
		if !c.hear(e.From, *e.Report) {
			c.dismiss(e)
			return
		}
		defer func() {
			if v := c.find(e.From); v != nil {
				c.tell(v)
			}
			if v := c.find(c.self); v != nil && e.Report.Phase == Left {
				c.tell(v) // it may have waited to be the last
			}
		}()
	case Pods:
		c.pods = &e
		if c.record.End != "" && e.Replicas > 0 {
			c.do(ScaleToZero{})
		}
	case Recorded:
		c.recorded(e)
	case NotRecorded:
		if c.writing != nil && c.writing.Generation == e.Generation && c.writing.End == e.End {
			c.refused = true
			c.resign()
		}
	}
	c.decide()
}

func (c *coordinator) tick(now time.Time) {
	c.now = now
	c.decide()
}

// hear takes a report in. It says false if the report is not to be heard.
func (c *coordinator) hear(from ID, r Report) bool {
	v := c.find(from)
	if v != nil && v.known && r.Seq <= v.report.Seq || c.replaced(from) {
		return false
	}
	if v == nil {
		if r.Phase == Left {
			return false
		}
		v = c.view(from)
	}
	for _, old := range c.views {
		if old.id.Ordinal == from.Ordinal && old.id.Pod == from.Pod && old.id.Boot < from.Boot && !old.gone {
			old.gone = true
			if c.record.has(old.id) && c.record.End == "" && !old.report.Leaving {
				c.record.Restarts++
			}
		}
	}
	before := v.known
	v.known, v.heard = true, c.now
	c.compute(v, r)
	v.anew = v.anew || before && r.Warms != v.report.Warms
	if r.Warms != v.report.Warms {
		v.warm = time.Time{}
	}
	v.report = r
	if r.Phase == Left {
		v.gone = true
	}
	switch warm := r.Phase != Joining && r.Phase != Left; {
	case !warm:
		v.warm = time.Time{}
	case v.warm.IsZero():
		v.warm = c.now
	}
	if r.Generation == c.record.Generation && c.record.has(from) {
		for _, peer := range r.Lost {
			// Whoever has stopped has itself closed its connections, which is no sign of its death.
			if p := c.find(peer); p != nil && p.suspected.IsZero() && !(p.report.Phase.stopped() || p.report.Phase == Aborting) {
				p.suspected = c.now
			}
		}
	}
	c.crashed(v)
	if c.cfg.FixedCoordinator {
		c.learn(v)
	}
	return true
}

// dismiss has a process stop whose place is another's, so that it does not hold a GPU for a generation that is over.
func (c *coordinator) dismiss(m Message) {
	if m.Report.Phase.active() && !c.record.has(m.From) && m.Report.Generation.Compare(c.record.Generation) < 0 {
		c.do(Send{Message{Job: c.cfg.Job, From: c.self, To: m.From, Order: &Order{Kind: Retire, Term: c.term, Generation: c.record.Generation}}})
	}
}

// learn is for a coordinator that has no record but what the members remember, and no term but the one that its clock gave it.
func (c *coordinator) learn(v *view) {
	r := v.report
	if term := max(r.Term, r.Promised.Term); term > c.term || term == c.term && r.Promised.Term == term && r.Promised.Count > c.count {
		c.term, c.count = term+1, 0
		if c.proposal != nil {
			c.renumber()
		}
	}
	if r.Record != nil && r.Record.Generation.Compare(c.record.Generation) > 0 && r.Record.Job == c.cfg.Job && c.writing == nil {
		c.record = *r.Record
		for _, id := range c.record.Members {
			c.view(id)
		}
	}
}

// replaced says that a process is known to be dead, whatever still comes from it.
func (c *coordinator) replaced(id ID) bool {
	for _, v := range c.views {
		if v.id.Ordinal == id.Ordinal && (v.id.Pod == id.Pod && v.id.Boot > id.Boot || v.id == id && v.gone) {
			return true
		}
	}
	return c.podGone(id)
}

// podGone says that the API server has told that the pod exists no more.
func (c *coordinator) podGone(id ID) bool {
	if c.pods == nil {
		return false
	}
	return !slices.ContainsFunc(c.pods.Pods, func(p Pod) bool { return p.Ordinal == id.Ordinal && p.UID == id.Pod })
}

// gone says that a process exists no more, for certain. Where there is no API server to ask, a long silence must do. That is safe there: the
// fixed coordinator is in every ring, so the one before has either heard of this change or died, and steps no more.
func (c *coordinator) gone(id ID) bool {
	v := c.find(id)
	return v != nil && v.gone || c.replaced(id) || c.cfg.FixedCoordinator && (v == nil || c.now.Sub(v.heard) > 2*c.cfg.DeadAfter)
}

func (c *coordinator) silent(v *view) bool { return c.now.Sub(v.heard) > c.cfg.DeadAfter }

// dead says that a process is not counted on now. It may come back.
func (c *coordinator) dead(v *view) bool { return c.silent(v) || c.gone(v.id) }

func (v *view) suspect() bool { return !v.suspected.IsZero() && !v.heard.After(v.suspected) }

// condemned says that the StatefulSet has no place for this ordinal, or that the process was told to go.
func (c *coordinator) condemned(v *view) bool {
	return v.report.Leaving || c.pods != nil && v.id.Ordinal-c.cfg.FirstOrdinal >= c.pods.Replicas
}

// contested says that two live processes claim one ordinal. One that is in the ring keeps its place; else neither gets it.
func (c *coordinator) contested(v *view) bool {
	if c.record.has(v.id) {
		return false
	}
	return slices.ContainsFunc(c.views, func(o *view) bool {
		return o.id != v.id && o.id.Ordinal == v.id.Ordinal && o.known && !c.dead(o)
	})
}

// admissible says that a process may be in the next generation, if it is at hand then.
func (c *coordinator) admissible(v *view) bool {
	return v.known && !v.warm.IsZero() && !c.dead(v) && !c.condemned(v) && !c.contested(v) && !v.out
}

// candidates are those who would make the next generation now, of one version: the ring's, as long as that one has enough.
func (c *coordinator) candidates(ok func(*view) bool) []ID {
	count := map[string]int{}
	for _, v := range c.views {
		if c.admissible(v) {
			count[v.report.Version]++
		}
	}
	version := c.record.Version
	if c.cfg.world(count[version]) == 0 {
		for _, v := range c.views { // in order, so that equals are decided alike
			if n := count[v.report.Version]; n > count[version] {
				version = v.report.Version
			}
		}
	}
	var ids []ID
	for _, v := range c.views {
		if c.admissible(v) && v.report.Version == version && ok(v) {
			ids = append(ids, v.id)
		}
	}
	return ids
}

func anyone(*view) bool { return true }

// settled says that there is no use in waiting for more joiners: all pods are here, or nobody has come for a while.
func (c *coordinator) settled() bool {
	here := map[string]bool{}
	var first, last time.Time
	for _, v := range c.views {
		if !c.admissible(v) {
			continue
		}
		here[v.id.Pod] = true
		if c.record.has(v.id) && !v.report.Position.Generation.IsZero() {
			continue // it does not join, it stays
		}
		if first.IsZero() || v.warm.Before(first) {
			first = v.warm
		}
		if v.warm.After(last) {
			last = v.warm
		}
	}
	complete := c.pods != nil
	if complete {
		for _, p := range c.pods.Pods {
			if p.Running && p.Ordinal-c.cfg.FirstOrdinal < c.pods.Replicas && !here[p.UID] {
				complete = false
			}
		}
	}
	// A coordinator that has just begun has not heard of all who are here.
	return complete || c.now.Sub(c.began) >= c.cfg.Settle && (c.now.Sub(last) >= c.cfg.Settle || c.now.Sub(first) >= c.cfg.SettleMax)
}

func (c *coordinator) decide() {
	if c.refused || c.writing != nil || c.record.End != "" {
		return
	}
	c.forget()
	c.greet()
	if c.hopeless() {
		return
	}
	if c.proposal == nil {
		c.follow()
		if c.writing != nil {
			return
		}
		if reason, abort := c.due(); reason != "" {
			c.propose(reason, abort)
		}
	}
	if c.proposal != nil {
		c.advance()
	} else {
		c.handOver()
	}
}

// greet tells the members who have not reported yet whom to report to. The lease would tell them, but perhaps too late to be counted on.
func (c *coordinator) greet() {
	if c.now.Sub(c.greeted) < c.cfg.Heartbeat {
		return
	}
	c.greeted = c.now
	for _, id := range c.record.Members {
		if !c.find(id).known {
			c.do(Send{Message{Job: c.cfg.Job, From: c.self, To: id, Order: &Order{Kind: Hello, Term: c.term}}})
		}
	}
}

// forget drops what is known of processes that are dead and matter to nobody.
func (c *coordinator) forget() {
	c.views = slices.DeleteFunc(c.views, func(v *view) bool {
		return !c.record.has(v.id) && c.now.Sub(v.heard) > 10*c.cfg.DeadAfter
	})
}

// follow watches the members of the record on their way into it and to the job's end.
func (c *coordinator) follow() {
	if len(c.record.Members) == 0 {
		return
	}
	synced, running, finished := true, true, true
	for _, id := range c.record.Members {
		r := c.find(id).report
		in := r.Generation == c.record.Generation
		synced = synced && in && r.Synced && (r.Phase == Syncing || r.Phase == Running || r.Phase == AtEnd)
		running = running && in && (r.Phase == Running || r.Phase == AtEnd)
		finished = finished && in && r.Phase == AtEnd
	}
	if synced && c.running.IsZero() && c.agree() {
		c.running = c.now
		if !c.proposed.IsZero() {
			c.took = c.now.Sub(c.proposed)
		}
		c.tellAll()
	}
	if finished {
		rec := c.record
		rec.End, rec.EndStep = Succeeded, c.find(rec.Members[0]).report.Position.Step
		c.write(rec)
	}
}

// agree says that all members began with the same state, and notes who did not.
func (c *coordinator) agree() bool {
	source := c.source
	if !c.record.has(source) {
		source = c.record.Members[0]
	}
	want := c.find(source).report.Hash
	same := true
	for _, id := range c.record.Members {
		if h := c.find(id).report.Hash; h != want && h != 0 && want != 0 {
			c.copyFrom[id], same = true, false
		}
	}
	return same
}

// due says whether there must be a new generation, why, and whether the step in flight can still be finished.
func (c *coordinator) due() (reason Reason, abort bool) {
	if c.record.Generation.IsZero() {
		for _, v := range c.views {
			if v.known && !v.report.Generation.IsZero() && !c.dead(v) {
				return Loss, true // there is a ring that nobody has told us of
			}
		}
		if c.cfg.world(len(c.candidates(anyone))) > 0 && c.settled() {
			return Start, true
		}
		return "", false
	}
	if c.broken() || len(c.copyFrom) > 0 {
		return Loss, true
	}
	candidates := c.candidates(anyone)
	target := c.cfg.pick(c.record, candidates)
	leaving := false
	for _, id := range c.record.Members {
		if !c.find(id).known {
			return "", false // a coordinator that has just begun
		}
		leaving = leaving || !slices.Contains(candidates, id)
	}
	if !leaving {
		c.leavers = time.Time{}
	} else {
		if c.leavers.IsZero() {
			c.leavers = c.now
		}
		if c.now.Sub(c.leavers) >= c.cfg.LeaveSettle {
			return ScaleDown, c.running.IsZero() // no step is lost by not waiting until a ring has formed that is not wanted
		}
		return "", false
	}
	if c.running.IsZero() {
		return "", false
	}
	if len(target) > len(c.record.Members) && c.settled() && c.now.Sub(c.running) >= max(c.cfg.ChangeInterval, 20*c.took) {
		return ScaleUp, false
	}
	return "", false
}

// broken says that the record's generation can go on no more.
func (c *coordinator) broken() bool {
	for _, id := range c.record.Members {
		v := c.find(id)
		r := v.report
		switch {
		case c.dead(v), v.suspect():
			return true
		case !v.known:
		case r.Generation == c.record.Generation:
			if r.Phase.stopped() || r.Phase == Aborting {
				return true
			}
		case r.Promised != c.record.Generation || r.Phase == Joining:
			return true // it has promised to hear of no such generation, or lost what it was chosen for
		case !slices.Contains(c.behind, id) && r.Position != (Position{c.record.Base, c.record.Step}):
			return true // it has lost the state for which it was chosen
		case c.committed.IsZero():
			return true // only the one who made this generation could say who copies from whom
		}
		since := c.committed
		if since.IsZero() {
			since = c.began
		}
		if c.now.Sub(since) >= c.cfg.SyncTimeout && c.running.IsZero() && !(r.Generation == c.record.Generation && r.Synced) {
			if !(c.cfg.FixedCoordinator && id == c.self) { // which no ring can do without
				v.skip = c.record.Generation
			}
			return true
		}
	}
	return false
}

func (c *coordinator) propose(reason Reason, abort bool) {
	c.proposal = &proposal{reason: reason, since: c.now}
	if abort {
		c.proposal.abort, c.proposal.abortSince = true, c.now
	}
	c.renumber()
	c.tellAll()
}

func (c *coordinator) renumber() {
	c.count++
	c.proposal.generation = Generation{c.term, c.count}
}

// advance takes the proposal further, when those who are waited for have stopped.
func (c *coordinator) advance() {
	p := c.proposal
	if !p.abort && (c.now.Sub(p.since) >= c.cfg.QuiesceTimeout || c.torn()) {
		p.abort, p.abortSince, p.reason = true, c.now, Loss
		c.tellAll()
	}
	if c.waits() {
		return
	}
	rec, why := c.plan()
	if why == "" {
		c.pausing = time.Time{}
		c.write(rec)
		return
	}
	if !p.paused || p.why != why {
		if !p.paused {
			c.pausing = c.now
		}
		p.paused, p.why = true, why
		c.tellAll()
	}
	if c.cfg.PauseLimit > 0 && c.now.Sub(c.pausing) >= c.cfg.PauseLimit {
		c.fail(fmt.Sprintf("paused for %s: %s", c.cfg.PauseLimit, why))
		return
	}
	// The larger side of a split may have a node that could lead it.
	if !c.cfg.FixedCoordinator && strings.Contains(why, "fewer than half") && c.now.Sub(c.pausing) >= 2*c.cfg.DeadAfter {
		c.resign()
	}
}

// torn says that the old ring cannot come to a step boundary any more.
func (c *coordinator) torn() bool {
	return slices.ContainsFunc(c.record.Members, func(id ID) bool {
		v := c.find(id)
		return c.dead(v) || v.suspect() || v.report.Generation == c.record.Generation &&
			(v.report.Phase == Joining || v.report.Phase == Aborting || len(v.report.Lost) > 0)
	})
}

// promised says that a process has stopped for the proposal.
func (c *coordinator) promised(v *view) bool {
	return v.known && v.report.Promised == c.proposal.generation && v.report.Phase.stopped()
}

// waits says that somebody will probably stop, and has not yet.
func (c *coordinator) waits() bool {
	p := c.proposal
	old := false
	for _, id := range c.record.Members {
		v := c.find(id)
		if c.promised(v) || c.dead(v) ||
			v.suspect() && c.now.Sub(v.suspected) >= c.cfg.SuspectAfter ||
			p.abort && c.now.Sub(p.abortSince) >= c.cfg.DeadAfter {
			continue
		}
		old = true
	}
	if old {
		p.ready = time.Time{}
		return true
	}
	if p.ready.IsZero() {
		p.ready = c.now
	}
	if c.now.Sub(p.ready) >= c.cfg.SuspectAfter {
		return false
	}
	for _, id := range c.candidates(anyone) {
		if !c.record.has(id) && !c.promised(c.find(id)) {
			return true
		}
	}
	return false
}

// plan makes the next record of those who have promised, or says why there is none to be made yet.
func (c *coordinator) plan() (rec Record, why string) {
	p := c.proposal
	var promises []promise
	for _, v := range c.views {
		if c.promised(v) && !c.dead(v) {
			if c.idle(v) {
				continue
			}
			promises = append(promises, promise{v.id, v.report.Position, v.report.Entered, v.report.Leaving, c.fresh(v)})
		}
	}
	source, restart, why := choose(c.record, promises, c.gone)
	p.reload = restart && why != ""
	if why != "" {
		return rec, why
	}
	candidates := c.candidates(c.promised)
	// One that failed to get into the last generation is left out once, if it can be done without.
	members := c.cfg.pick(c.record, c.candidates(func(v *view) bool { return c.promised(v) && (v.skip.IsZero() || v.skip != c.record.Generation) }))
	if members == nil {
		members = c.cfg.pick(c.record, candidates)
	}
	if c.suspends(source) {
		return rec, "nobody is to stay"
	}
	switch {
	case members == nil:
		return rec, fmt.Sprintf("%d can be in a ring, and it takes at least %d", len(candidates), c.cfg.smallest())
	case c.cfg.FixedCoordinator && !slices.Contains(members, c.self):
		// A ring without it could go on while its successor, who knows nothing, makes another.
		return rec, fmt.Sprintf("it takes the coordinator, %d, which is not ready", c.self.Ordinal)
	case p.reason == Loss && c.now.Sub(p.since) < c.cfg.RegrowWait && c.lacks(members) != "":
		return rec, c.lacks(members) + " may come back"
	case (p.reason == Start || p.paused) && !c.settled():
		return rec, "more may come"
	}
	rec = Record{
		Job: c.cfg.Job, Generation: p.generation, Members: members, Step: source.position.Step, Base: source.position.Generation,
		Reason: p.reason, Version: c.find(members[0]).report.Version, Restarts: c.record.Restarts, Crash: c.record.Crash,
	}
	switch {
	case restart && c.record.Generation.IsZero():
		rec.Reason = Start
	case restart:
		rec.Reason = Restart
	}
	c.source, c.behind = source.id, nil
	for _, id := range members {
		same := c.find(id).report.Position == source.position && !c.copyFrom[id]
		// Two fresh states are not one state.
		if id != source.id && (!same || source.position == (Position{})) {
			c.behind = append(c.behind, id)
		}
	}
	return rec, ""
}

// lacks are the ordinals of members of the record for whom there is no successor, though they did not leave.
func (c *coordinator) lacks(members []ID) string {
	var lost []ID
	for _, id := range c.record.Members {
		if !c.condemned(c.find(id)) && !slices.ContainsFunc(members, func(m ID) bool { return m.Ordinal == id.Ordinal }) {
			lost = append(lost, id)
		}
	}
	return ordinals(lost)
}

// smallest is the smallest size of a world.
func (c Config) smallest() int {
	for n := c.Min; n <= MaxMembers; n++ {
		if c.world(n) == n {
			return n
		}
	}
	return MaxMembers
}

// suspends leads the job to rest, where all who are here are to go and nobody else comes: the state is saved, then they may.
func (c *coordinator) suspends(source promise) bool {
	p := c.proposal
	p.suspend = !slices.ContainsFunc(c.views, func(v *view) bool { return v.known && !c.dead(v) && !c.condemned(v) })
	if !p.suspend {
		p.saver, p.saved = ID{}, false
		return false
	}
	saver, saved := source.id, source.position.Generation.IsZero() || c.find(source.id).report.Saved == source.position
	if p.saver != saver || p.saved != saved {
		p.saver, p.saved = saver, saved
		c.tellAll()
	}
	return true
}

// idle says that a process wants to leave, and that nothing is lost with it: it is in no ring and has no state but a checkpoint's.
func (c *coordinator) idle(v *view) bool {
	return v.report.Leaving && !c.record.has(v.id) && v.report.Position.Generation.IsZero()
}

// fresh says that a process has read its checkpoint since the ring stopped, so that it has the newest, if it has no other state.
func (c *coordinator) fresh(v *view) bool {
	return c.record.Generation.IsZero() || v.report.Reloaded == c.proposal.generation || v.anew && !v.warm.Before(c.proposal.since)
}

// last says that no other process waits for this coordinator to be let go.
func (c *coordinator) last() bool {
	return !slices.ContainsFunc(c.views, func(v *view) bool { return v.id != c.self && v.report.Leaving && !c.dead(v) })
}

func (c *coordinator) write(rec Record) {
	c.writing = &rec
	c.do(WriteRecord{rec})
}

func (c *coordinator) fail(reason string) {
	rec := c.record
	rec.Job, rec.End, rec.EndReason = c.cfg.Job, Failed, reason
	c.write(rec)
}

func (c *coordinator) recorded(e Recorded) {
	if c.writing == nil || c.writing.Generation != e.Generation || c.writing.End != e.End || c.refused {
		return
	}
	restarts, crash := c.record.Restarts, c.record.Crash // it may have heard of one since
	c.record, c.writing = *c.writing, nil
	c.record.Restarts, c.record.Crash = restarts, crash
	if c.record.End != "" {
		if c.pods == nil || c.pods.Replicas > 0 {
			c.do(ScaleToZero{})
		}
		c.tellAll()
		return
	}
	c.changes[c.record.Reason]++
	c.committed, c.proposed, c.running, c.leavers = c.now, c.proposal.since, time.Time{}, time.Time{}
	if c.proposal.abort && c.proposal.paused {
		c.proposed = c.now // a pause is not what a change takes
	}
	c.proposal = nil
	if c.differed++; len(c.copyFrom) == 0 {
		c.differed = 0
	}
	clear(c.copyFrom)
	for _, v := range c.views {
		v.suspected, v.slow, v.judged = time.Time{}, 0, 0
	}
	c.tellAll()
}

// resign gives the lease up, once.
func (c *coordinator) resign() {
	if !c.resigns && !c.cfg.FixedCoordinator {
		c.resigns = true
		c.do(Resign{})
	}
}

// handOver gives the lease up where that costs nothing: the ring steps, and another is to lead it. Ordinal 0 is the last that the HPA
// takes away.
func (c *coordinator) handOver() {
	if c.running.IsZero() || c.cfg.FixedCoordinator || c.resigns {
		return
	}
	if c.record.Members[0].Ordinal < c.self.Ordinal && c.now.Sub(c.running) >= c.cfg.DeadAfter && c.last() {
		c.resign()
	}
}

// order is what a process should hear now, given what it has reported last.
func (c *coordinator) order(v *view) (Order, bool) {
	o := Order{Term: c.term}
	r := v.report
	p := c.proposal
	abort := p != nil && (p.abort || !c.record.has(v.id)) // who is in no ring any more has no step to finish
	switch {
	case !v.known || r.Phase == Left:
		return o, false
	case c.record.End != "":
		o.Kind, o.Record = End, &c.record
		return o, r.Phase != Over
	case c.refused || c.writing != nil:
		return o, false
	case p != nil && c.idle(v):
		o.Kind = Release
	case p != nil && (r.Promised.Compare(p.generation) < 0 || r.Promised == p.generation && r.Phase == Quiescing && abort):
		o.Kind, o.Generation, o.Abort = Propose, p.generation, abort
	case p != nil && r.Promised == p.generation && r.Phase.stopped():
		o.Generation = p.generation
		switch {
		case p.suspend && !p.saved && v.id == p.saver:
			o.Kind = Save
		case p.suspend && p.saved && r.Leaving:
			o.Kind = Release
			return o, v.id != c.self || c.last()
		case p.reload && r.Phase != Joining && !c.fresh(v):
			o.Kind = Reload
		case p.paused:
			o.Kind, o.Why = Wait, p.why
		default:
			return o, false
		}
	case p != nil:
		return o, false
	case (c.record.has(v.id) && r.Generation.Compare(c.record.Generation) < 0 || v.id == c.source && !c.record.has(v.id) && c.running.IsZero()) && r.Promised == c.record.Generation && !c.committed.IsZero():
		record := c.record
		o.Kind, o.Generation, o.Record, o.Source, o.Behind = Commit, record.Generation, &record, c.source, c.behind
	case c.record.has(v.id) && r.Phase == Syncing && !c.running.IsZero():
		o.Kind, o.Generation = Run, c.record.Generation
	case c.record.has(v.id):
		return o, false
	case r.Leaving && (!c.running.IsZero() || c.idle(v)):
		o.Kind = Release
		return o, v.id != c.self || c.last()
	case !c.record.Generation.IsZero() && (r.Phase.active() || r.Phase == Stopped || r.Phase == Paused):
		o.Kind, o.Generation = Retire, c.record.Generation
	default:
		return o, false
	}
	return o, true
}

// tell sends a process what it should hear, if there is anything.
func (c *coordinator) tell(v *view) {
	if o, ok := c.order(v); ok {
		c.do(Send{Message{Job: c.cfg.Job, From: c.self, To: v.id, Order: &o}})
	}
}

func (c *coordinator) tellAll() {
	for _, v := range c.views {
		c.tell(v)
	}
}

// crashed accounts for a crash of a child. A generation that breaks counts once, however many of its members die of it.
func (c *coordinator) crashed(v *view) {
	r := v.report
	if r.Crashes <= v.crashes {
		return
	}
	v.crashes = r.Crashes
	last, crash := c.record.Crash, r.Crash
	if crash.Generation == last.Generation {
		return
	}
	c.record.Restarts++
	crash.Generations = 1
	if crash.Error == last.Error && crash.Step == last.Step {
		crash.Generations = last.Generations + 1
	}
	c.record.Crash = crash
}

// hopeless ends a job that crashes whatever is done.
func (c *coordinator) hopeless() bool {
	crash := c.record.Crash
	switch {
	case c.cfg.SameCrashes > 0 && crash.Generations >= c.cfg.SameCrashes:
		c.fail(fmt.Sprintf("step %d has crashed in %d generations in a row: %s", crash.Step, crash.Generations, crash.Error))
	case c.cfg.MaxRestarts > 0 && c.record.Restarts > c.cfg.MaxRestarts:
		c.fail(fmt.Sprintf("%d restarts, MaxRestarts is %d; the last one: %s", c.record.Restarts, c.cfg.MaxRestarts, cmp.Or(crash.Error, "not known")))
	case c.differed >= 3:
		c.fail("the members' states differ though they were copied from one: the trainer is not deterministic, or leaves state out of the copy")
	default:
		return false
	}
	return true
}

// compute judges how long a member computes, each time that it reports new steps.
func (c *coordinator) compute(v *view, r Report) {
	if r.Generation != c.record.Generation || r.Phase != Running || r.Compute <= 0 || !c.record.has(v.id) {
		return
	}
	steps := r.Position.Step - max(v.judged, c.record.Step)
	if steps <= 0 {
		return
	}
	v.judged = r.Position.Step
	var all []time.Duration
	for _, id := range c.record.Members {
		if d := c.find(id).report.Compute; d > 0 {
			all = append(all, d)
		}
	}
	if len(all) < 2 {
		return
	}
	slices.Sort(all)
	if median := all[(len(all)-1)/2]; float64(r.Compute) > c.cfg.StragglerRatio*float64(median) {
		v.slow += steps
	} else {
		v.slow = 0
	}
	// A StatefulSet can only lose the highest ordinal.
	v.out = v.out || c.cfg.Quarantine && c.straggles(v) && v.id == c.record.Members[len(c.record.Members)-1]
}

func (c *coordinator) straggles(v *view) bool { return v.slow >= c.cfg.StragglerSteps }
