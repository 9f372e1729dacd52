package ring

import (
	"fmt"
	"slices"
)

// model is the naive twin: it sees everything at once, knows nothing of the protocol, and says which rule was broken first.
type model struct {
	broken string

	record  Record
	lineage []Generation // the job's steps: lineage[i] is the generation that step i+1 counts in
	stepped Generation   // the highest generation that completed a step
	starts  map[Generation]StartGeneration
	states  map[Generation]uint64 // with which it began
	leaders map[uint32]ID
	newest  map[ID]Generation // that a process started
	promise map[ID]Generation // that a process told
	term    map[ID]uint32     // that a process told

	changes, restarts, redone, conflicts int
	planned                              int
	maxWorld                             int
}

func newModel() *model {
	return &model{starts: map[Generation]StartGeneration{}, states: map[Generation]uint64{}, leaders: map[uint32]ID{}, newest: map[ID]Generation{}, promise: map[ID]Generation{}, term: map[ID]uint32{}}
}

func (m *model) fail(c *cluster, format string, args ...any) {
	if m.broken == "" {
		m.broken = fmt.Sprintf(format, args...)
		c.say("BROKEN: %s", m.broken)
	}
}

// No two coordinators: a term has one, and a member's word is never taken back.
func (m *model) sent(c *cluster, msg Message) {
	if o := msg.Order; o != nil {
		if was, ok := m.leaders[o.Term]; ok && was != msg.From {
			m.fail(c, "term %d has two coordinators, %s and %s", o.Term, was, msg.From)
		}
		m.leaders[o.Term] = msg.From
	}
	if r := msg.Report; r != nil {
		if r.Promised.Compare(m.promise[msg.From]) < 0 || r.Term < m.term[msg.From] {
			m.fail(c, "%s promised %s in term %d, now it says %s in term %d", msg.From, m.promise[msg.From], m.term[msg.From], r.Promised, r.Term)
		}
		m.promise[msg.From], m.term[msg.From] = r.Promised, r.Term
	}
}

// Ranks are dense by numeric ordinal and the same for all; nobody goes back to an old generation.
func (m *model) acted(c *cluster, p *process, a Action) {
	switch a := a.(type) {
	case StartGeneration:
		for i, id := range a.Members {
			if i > 0 && a.Members[i-1].Ordinal >= id.Ordinal {
				m.fail(c, "generation %s: ranks are not by ordinal: %v", a.Generation, a.Members)
			}
		}
		if a.Rank < 0 || a.Rank >= len(a.Members) || a.Members[a.Rank] != p.id {
			m.fail(c, "generation %s: %s has rank %d of %v", a.Generation, p.id, a.Rank, a.Members)
		}
		if a.Generation.Compare(m.newest[p.id]) <= 0 {
			m.fail(c, "%s starts generation %s after %s", p.id, a.Generation, m.newest[p.id])
		}
		if a.Generation.Compare(m.promise[p.id]) < 0 {
			m.fail(c, "%s starts generation %s, having promised %s", p.id, a.Generation, m.promise[p.id])
		}
		m.newest[p.id] = a.Generation
		if was, ok := m.starts[a.Generation]; ok && (!slices.Equal(was.Members, a.Members) || was.Step != a.Step) {
			m.fail(c, "generation %s began twice: %v and %v", a.Generation, was, a)
		}
		m.starts[a.Generation] = a
	case RunGeneration:
		if a.Generation != m.newest[p.id] || m.promise[p.id].Compare(a.Generation) > 0 {
			m.fail(c, "%s runs generation %s, its newest is %s and it promised %s", p.id, a.Generation, m.newest[p.id], m.promise[p.id])
		}
		ch := &p.child
		if ch.in != a.Generation {
			break // it has died, and its agent has not heard yet
		}
		if ch.torn || int64(len(ch.state)) != a.Step {
			m.fail(c, "%s runs generation %s from step %d with a state of %d steps (torn %v)", p.id, a.Generation, a.Step, len(ch.state), ch.torn)
		}
		h := hash(ch.state)
		if was, ok := m.states[a.Generation]; ok && was != h {
			m.fail(c, "generation %s began with two states", a.Generation)
		}
		m.states[a.Generation] = h
		if a.Generation == m.record.Generation && m.stepped.Compare(a.Generation) < 0 && !slices.Equal(ch.state, m.lineage) {
			m.fail(c, "generation %s begins with a state that is not the job's: %v, the job's is %v", a.Generation, ch.state, m.lineage)
		}
	case Done, Fail:
		if m.record.End == "" {
			m.fail(c, "%s hears of an end that is not recorded", p.id)
		}
	}
}

// One generation after the other, each with what the one before it had done, but for the step in flight.
func (m *model) recorded(c *cluster, rec Record) {
	old := m.record
	m.record = rec
	if old.End != "" {
		m.fail(c, "generation %s is recorded after the job has ended", rec.Generation)
	}
	if rec.End != "" {
		if rec.Generation != old.Generation {
			m.fail(c, "the end of %s is recorded in %s", rec.Generation, old.Generation)
		}
		for _, id := range rec.Members {
			if p := c.process(id); rec.End == Succeeded && p.alive && p.child.up && int64(len(p.child.state)) != c.lastStep {
				m.fail(c, "the job is done, and %s has done %d steps of %d", id, len(p.child.state), c.lastStep)
			}
		}
		return
	}
	if rec.Generation.Compare(old.Generation) <= 0 && !c.cfg.FixedCoordinator {
		m.fail(c, "generation %s is recorded after %s", rec.Generation, old.Generation)
	}
	m.changes++
	m.maxWorld = max(m.maxWorld, len(rec.Members))
	head := int64(len(m.lineage))
	// A coordinator without a record may begin with an old member's state, when all who had a newer one are dead.
	forgot := c.cfg.FixedCoordinator && rec.Step < head-1
	switch {
	case rec.Reason == Restart || rec.Reason == Start || forgot:
		for _, id := range old.Members {
			if p := c.process(id); p.alive && !p.pod.gone && p.child.up && !p.child.torn && len(p.child.state) > 0 && p.child.in == old.Generation && slices.Contains(p.child.state, old.Generation) {
				m.fail(c, "generation %s begins with a checkpoint, though %s has the state of %s", rec.Generation, id, old.Generation)
			}
		}
		m.restarts++
	case rec.Step < head-1:
		m.fail(c, "generation %s begins with step %d, the job had %d", rec.Generation, rec.Step, head)
	case rec.Step < head:
		m.redone++
		if rec.Reason == ScaleUp || rec.Reason == ScaleDown {
			m.fail(c, "generation %s is planned and begins with step %d, the job had %d", rec.Generation, rec.Step, head)
		}
	case rec.Reason == ScaleUp || rec.Reason == ScaleDown:
		m.planned++
	}
	for _, id := range rec.Members {
		if p := c.process(id); p.child.in == old.Generation && p.child.up && !p.child.torn && len(p.child.state) > int(rec.Step) && p.child.state[len(p.child.state)-1] == old.Generation {
			m.fail(c, "generation %s begins with step %d, and its member %s had done %d", rec.Generation, rec.Step, id, len(p.child.state))
		}
	}
	if forgot {
		for _, p := range c.processes {
			if p.alive && p.child.in == rec.Base && int64(len(p.child.state)) == rec.Step {
				m.lineage = slices.Clone(p.child.state)
			}
		}
	} else if rec.Reason == Restart || rec.Reason == Start {
		m.lineage = slices.Clone(c.saved[rec.Step])
	}
	if rec.Step < int64(len(m.lineage)) {
		m.lineage = slices.Clip(m.lineage[:rec.Step])
	}
	// A step that all but the lost ones had taken part in and that nobody at hand had seen applied may show up now.
	if rec.Step == int64(len(m.lineage))+1 {
		m.lineage = append(m.lineage, rec.Base)
	}
	if rec.Step != int64(len(m.lineage)) {
		m.fail(c, "generation %s begins with step %d, the job has %d", rec.Generation, rec.Step, len(m.lineage))
	}
}

func (m *model) contributed(c *cluster, p *process, g Generation, step int64) {
	if g.Compare(m.promise[p.id]) < 0 && p.node.Status().Phase.stopped() {
		m.fail(c, "%s steps in generation %s after it has stopped for %s", p.id, g, m.promise[p.id])
	}
}

// One generation at a time: a step is completed only in the newest that ever completed one.
func (m *model) completed(c *cluster, g Generation, step int64) {
	if g.Compare(m.stepped) < 0 {
		m.fail(c, "generation %s completes step %d, and %s has stepped already", g, step, m.stepped)
	}
	m.stepped = g
	if g.Compare(m.record.Generation) > 0 {
		m.fail(c, "generation %s steps and is not recorded", g)
	}
}

// No step twice, none skipped: in a state, and in the job.
func (m *model) applied(c *cluster, p *process, g Generation, step int64) {
	if int64(len(p.child.state)) != step {
		m.fail(c, "%s applies step %d to a state of %d steps", p.id, step, len(p.child.state)-1)
	}
	if g == m.record.Generation && step == int64(len(m.lineage))+1 {
		m.lineage = append(m.lineage, g)
	}
}
