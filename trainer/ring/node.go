package ring

import "time"

// Node is one worker's part in the ring: a member, and the coordinator as well while it leads. It is not safe for concurrent use. Times
// given to it must not go back, and need not agree with any other machine's.
type Node struct {
	cfg         Config
	member      member
	coordinator *coordinator
	count       Generation // highest that a coordinator of this node numbered
	refused     uint64
}

// New makes the node of a worker that has just started. What it is to do first comes from the first Step or Tick.
func New(cfg Config, self ID) (*Node, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	n := &Node{cfg: cfg, member: member{cfg: cfg, self: self, phase: Joining, position: Position{Step: -1}, changed: true}}
	n.member.do(Warm{})
	return n, nil
}

// Step tells the node what happened and returns what there is to do.
func (n *Node) Step(e Event, now time.Time) []Action {
	switch e := e.(type) {
	case Message:
		return n.settle(n.deliver(e, now), now)
	case Leader:
		n.lead(e, now)
	case Pods:
		if n.coordinator != nil {
			n.coordinator.event(e, now)
		}
	case Recorded, NotRecorded:
		if n.coordinator != nil {
			n.coordinator.event(e, now)
		}
	default:
		n.member.event(e)
	}
	return n.settle(nil, now)
}

// Tick tells the node that time has passed. Heart-beats and time-outs are as exact as ticks are frequent: give one every 100 ms.
func (n *Node) Tick(now time.Time) []Action {
	n.member.tick(now)
	if n.coordinator != nil {
		n.coordinator.tick(now)
	}
	return n.settle(nil, now)
}

// deliver hands a message to the part of the node that it is for. What is for another job or another process is not heard.
func (n *Node) deliver(m Message, now time.Time) []Action {
	to := m.To
	if n.cfg.FixedCoordinator && to == (ID{Ordinal: n.member.self.Ordinal}) {
		to = n.member.self
	}
	switch {
	case m.Job != n.cfg.Job || to != n.member.self || (m.Report == nil) == (m.Order == nil):
		n.refused++
	case m.Order != nil:
		if (m.Order.Kind == Commit || m.Order.Kind == End) && m.Order.Record == nil {
			n.refused++
			return nil
		}
		n.member.order(m.From, *m.Order)
	case n.coordinator != nil:
		n.coordinator.event(m, now)
	default:
		n.refused++
	}
	return nil
}

// lead takes the coordinator's part on, or lays it down.
func (n *Node) lead(e Leader, now time.Time) {
	m := &n.member
	if e.Record.Job != n.cfg.Job {
		e.Record = Record{}
	}
	if e.Term < m.term {
		n.refused++
		return
	}
	if e.Holder != (ID{}) {
		m.term = e.Term
	}
	if m.leader != e.Holder {
		m.leader, m.changed = e.Holder, true
	}
	c := n.coordinator
	if e.Holder != m.self {
		n.coordinator = nil
	} else if c == nil || c.refused || c.term < e.Term && !n.cfg.FixedCoordinator {
		if n.count.Term != e.Term {
			n.count = Generation{Term: e.Term}
		}
		n.coordinator = newCoordinator(n.cfg, m.self, e.Term, n.count.Count, e.Record, now)
		n.coordinator.tick(now)
	}
	if e.Record.End != "" {
		m.over(e.Record)
	}
}

// settle collects what there is to do, and delivers what the node says to itself.
func (n *Node) settle(out []Action, now time.Time) []Action {
	for {
		var actions []Action
		if c := n.coordinator; c != nil {
			if n.member.phase == Left {
				c.resign()
			}
			actions, c.out = c.out, nil
			n.count = Generation{c.term, c.count}
		}
		actions = append(actions, n.member.take(now)...)
		if len(actions) == 0 {
			return out
		}
		for _, a := range actions {
			if s, ok := a.(Send); ok && (s.Message.To == n.member.self || n.cfg.FixedCoordinator && s.Message.To == (ID{Ordinal: n.member.self.Ordinal})) {
				n.deliver(s.Message, now)
				continue
			}
			out = append(out, a)
		}
	}
}

// Status is what a stats page and a person want to know.
type Status struct {
	ID          ID
	Phase       Phase
	Generation  Generation // the newest that it was in
	Rank, World int        // in it; Rank is -1 while in none
	Step        int64      // steps in its state; -1 = it has none
	Leader      ID         // whom it reports to; zero = nobody
	Why         string     // for Paused and Over
	End         Outcome    // for Over
	Refused     uint64     // messages and events of old generations, deposed coordinators, other jobs
	LostSteps   uint64     // steps that were begun and not finished
	Coordinator *CoordinatorStatus
}

// CoordinatorStatus is what only the coordinator knows.
type CoordinatorStatus struct {
	Term       uint32
	Record     Record
	Proposal   Generation // that is being formed; zero = none
	Desired    int        // replicas; -1 = not known
	Running    bool       // all members step
	Ready      []ID       // standbys
	Waiting    []Pod      // that do not run, as [Pods] told
	Stragglers []ID
	Paused     string // why there is no ring; "" = there is, or will be at once
	Changes    map[Reason]uint64
	ChangeTook time.Duration // the newest change, from its proposal until all could step; a pause not counted
}

// Status says how the node is.
func (n *Node) Status() Status {
	m := &n.member
	s := Status{
		ID: m.self, Phase: m.phase, Generation: m.record.Generation, Rank: -1, World: len(m.record.Members), Step: m.position.Step,
		Leader: m.leader, Why: m.why, End: m.end, Refused: n.refused + m.refused, LostSteps: m.lostStep,
	}
	if m.phase.active() {
		for rank, id := range m.record.Members {
			if id == m.self {
				s.Rank = rank
			}
		}
	}
	c := n.coordinator
	if c == nil {
		return s
	}
	cs := &CoordinatorStatus{Term: c.term, Record: c.record, Desired: -1, Running: !c.running.IsZero() && c.proposal == nil, Changes: map[Reason]uint64{}, ChangeTook: c.took}
	if c.proposal != nil {
		cs.Proposal = c.proposal.generation
		if c.proposal.paused {
			cs.Paused = c.proposal.why
		}
	}
	for r, count := range c.changes {
		cs.Changes[r] = count
	}
	if c.pods != nil {
		cs.Desired = c.pods.Replicas
		for _, p := range c.pods.Pods {
			if !p.Running {
				cs.Waiting = append(cs.Waiting, p)
			}
		}
	}
	for _, v := range c.views {
		if v.report.Phase == Standby && !v.gone {
			cs.Ready = append(cs.Ready, v.id)
		}
		if c.straggles(v) {
			cs.Stragglers = append(cs.Stragglers, v.id)
		}
	}
	s.Coordinator = cs
	return s
}
