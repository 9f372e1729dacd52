package ring

import (
	"slices"
	"time"
)

// member is the part of a node that trains. It obeys the coordinator with the highest term that it has heard of.
type member struct {
	cfg  Config
	self ID

	term   uint32 // highest heard of
	leader ID     // whom it reports to; zero = nobody known

	promised Generation
	record   Record // of the newest generation that it was committed to
	phase    Phase
	position Position
	entered  Generation
	synced   bool
	hash     uint64
	lost     []ID
	retired  bool // Generation went on without it

	leaving  bool
	deadline time.Time
	saving   Generation // proposal for which it was asked to save
	reloaded Generation // proposal for which it was asked to read the checkpoint anew
	served   Generation // that it handed its state to without being in it
	warms    int
	saved    Position
	crashes  int
	crash    Crash
	compute  time.Duration
	why      string
	end      Outcome

	seq      uint64
	reported time.Time
	changed  bool // since the last report
	refused  uint64
	lostStep uint64

	out   []Action
	exits *Exit // after all of out
}

func (m *member) do(a Action) { m.out = append(m.out, a) }

// take returns what there is to do, a report included if something has changed.
func (m *member) take(now time.Time) []Action {
	if m.changed {
		m.report(now)
	}
	if m.exits != nil { // the others are told first
		m.do(*m.exits)
		m.exits = nil
	}
	out := m.out
	m.out = nil
	return out
}

func (m *member) become(p Phase) { m.phase, m.changed = p, true }

func (m *member) report(now time.Time) {
	m.changed = false
	m.reported = now
	if m.leader == (ID{}) && !m.cfg.FixedCoordinator {
		return
	}
	m.seq++
	r := &Report{
		Seq: m.seq, Phase: m.phase, Version: m.cfg.Version, Leaving: m.leaving, Term: m.term, Warms: m.warms, Reloaded: m.reloaded,
		Promised: m.promised, Generation: m.record.Generation, Position: m.position, Entered: m.entered,
		Synced: m.synced, Hash: m.hash, Lost: slices.Clone(m.lost), Saved: m.saved, Crashes: m.crashes, Crash: m.crash, Compute: m.compute,
	}
	if m.phase.stopped() && !m.record.Generation.IsZero() {
		record := m.record
		r.Record = &record
	}
	to := m.leader
	if m.cfg.FixedCoordinator {
		to = ID{Ordinal: m.cfg.FirstOrdinal} // whichever process that is now
	}
	m.do(Send{Message{Job: m.cfg.Job, From: m.self, To: to, Report: r}})
}

func (m *member) tick(now time.Time) {
	if m.phase == Left {
		return
	}
	if m.leaving && !now.Before(m.deadline) && m.phase != Over {
		m.exit("the deadline has come")
		return
	}
	if now.Sub(m.reported) >= m.cfg.Heartbeat {
		m.changed = true
	}
}

// order obeys the coordinator, unless it is deposed, or speaks of a generation that is over.
func (m *member) order(from ID, o Order) {
	if o.Term < m.term {
		m.refused++
		return
	}
	m.term, m.leader = o.Term, from
	if m.phase == Left || m.phase == Over {
		return
	}
	switch o.Kind {
	case Hello:
		m.changed = true
	case Propose:
		m.propose(o)
	case Commit:
		m.commit(o)
	case Run:
		if o.Generation == m.record.Generation && o.Generation == m.promised && m.phase == Syncing && m.synced {
			m.become(Running)
			m.do(RunGeneration{m.record.Generation, m.position.Step})
		}
	case Retire:
		if o.Generation.Compare(m.record.Generation) <= 0 {
			m.refused++
			return
		}
		m.retired = true
		if o.Generation.Compare(m.promised) > 0 {
			m.promised = o.Generation
		}
		switch {
		case m.phase.active():
			m.abort()
		case m.phase == Stopped || m.phase == Paused:
			m.become(Standby)
		}
	case Release:
		if m.leaving {
			m.exit("released")
		}
	case Save:
		if o.Generation == m.promised && m.phase.stopped() && m.saving != o.Generation {
			m.saving = o.Generation
			m.do(SaveState{m.position.Step})
		}
	case Reload:
		if o.Generation == m.promised && m.phase.stopped() && m.phase != Joining && m.reloaded != o.Generation {
			m.reloaded = o.Generation
			m.fresh()
		}
	case Wait:
		if o.Generation == m.promised && m.phase.stopped() {
			if m.why = o.Why; m.phase == Stopped {
				m.become(Paused)
			}
		}
	case End:
		m.over(*o.Record)
	}
}

func (m *member) propose(o Order) {
	if o.Generation.Compare(m.promised) < 0 {
		m.refused++
		return
	}
	if m.promised != o.Generation {
		m.promised, m.changed = o.Generation, true
	}
	switch {
	case m.phase == Running && !o.Abort:
		m.become(Quiescing)
		m.do(Quiesce{m.record.Generation, m.position.Step + 1})
	case m.phase == AtEnd:
		m.park()
	case m.phase == Syncing, (m.phase == Running || m.phase == Quiescing) && o.Abort:
		m.abort()
	case m.phase == Standby, m.phase == Paused:
		m.become(Stopped)
	}
}

func (m *member) commit(o Order) {
	rec := o.Record
	rank, behind := slices.Index(rec.Members, m.self), slices.Contains(o.Behind, m.self)
	if !behind && m.position != (Position{rec.Base, rec.Step}) {
		// It has lost the state for which it was chosen, while the choice was being recorded.
		m.refused++
		m.changed = m.changed || rec.Generation == m.promised && m.record.Generation.Compare(rec.Generation) < 0
		return
	}
	if rank < 0 && o.Source == m.self && rec.Generation == m.promised && m.phase.stopped() && m.phase != Joining {
		// One who leaves hands its state over.
		if m.served != rec.Generation {
			m.served = rec.Generation
			m.serve(o)
		}
		return
	}
	if rec.Generation != m.promised || rec.Generation.Compare(m.record.Generation) <= 0 || rank < 0 || m.phase == Joining || !m.phase.stopped() {
		m.refused++
		return
	}
	m.record = *rec
	m.synced, m.hash, m.lost, m.retired, m.why = false, 0, nil, false, ""
	m.become(Syncing)
	m.do(StartGeneration{rec.Generation, rank, slices.Clone(rec.Members), rec.Step, rec.Reason})
	if behind {
		m.position = Position{Step: -1}
		m.do(SyncState{rec.Generation, o.Source, m.self, rec.Step})
	}
	if o.Source == m.self {
		m.serve(o)
	}
}

func (m *member) serve(o Order) {
	for _, to := range o.Behind {
		m.do(SyncState{o.Record.Generation, m.self, to, o.Record.Step})
	}
}

// abort stops the child in the midst of whatever it does. What it has then, Aborted will say.
func (m *member) abort() {
	if m.phase == Running || m.phase == Quiescing {
		m.lostStep++
	}
	m.do(AbortStep{m.record.Generation, m.position.Step + 1})
	m.become(Aborting)
}

func (m *member) park() {
	m.do(Park{m.record.Generation, m.position.Step})
	m.become(Stopped)
}

func (m *member) exit(reason string) {
	if m.phase.active() {
		m.do(AbortStep{m.record.Generation, m.position.Step + 1})
	}
	m.become(Left)
	m.exits = &Exit{m.record.Generation, m.position.Step, reason}
}

func (m *member) over(rec Record) {
	if m.phase == Left || m.phase == Over {
		return
	}
	if m.phase.active() && m.phase != AtEnd {
		m.do(AbortStep{m.record.Generation, m.position.Step + 1})
	}
	m.end, m.why = rec.End, rec.EndReason
	m.become(Over)
	if rec.End == Succeeded {
		m.do(Done{rec.Generation, rec.EndStep})
	} else {
		m.do(Fail{rec.EndReason})
	}
}

// event hears what happened on this machine. What belongs to another generation than the member's is not heard.
func (m *member) event(e Event) {
	if m.phase == Left || m.phase == Over {
		if e, ok := e.(Leave); ok && m.phase == Over {
			m.leaving, m.deadline = true, e.Deadline
			m.exit("the job has ended")
		}
		return
	}
	switch e := e.(type) {
	case Warmed:
		if m.phase == Joining {
			m.position = Position{Step: e.Step}
			m.warms++
			m.become(Standby)
		}
	case Synced:
		if e.Generation != m.record.Generation || m.phase != Syncing {
			m.refused++
		} else if !m.synced {
			m.synced, m.hash = true, e.Hash
			m.position = Position{m.record.Generation, m.record.Step}
			m.entered, m.changed = m.record.Generation, true
		}
	case StepDone:
		m.stepDone(e)
	case Aborted:
		m.aborted(e)
	case PeerLost:
		if e.Generation != m.record.Generation || !m.phase.active() && m.phase != Aborting {
			m.refused++
			return
		}
		if i, found := slices.BinarySearchFunc(m.lost, e.Peer, ID.Compare); !found {
			m.lost, m.changed = slices.Insert(m.lost, i, e.Peer), true
		}
		if m.phase.active() {
			m.abort()
		}
	case Crashed:
		m.crashes++
		m.crash = Crash{Generation: m.record.Generation, Step: m.position.Step + 1, Error: e.Error, Generations: 1}
		if m.phase.active() {
			m.do(AbortStep{m.record.Generation, m.position.Step + 1})
		}
		m.fresh()
	case Finished:
		switch {
		case e.Generation != m.record.Generation:
			m.refused++
		case m.phase == Running:
			m.become(AtEnd)
		case m.phase == Quiescing:
			m.park()
		}
	case Saved:
		m.saved, m.changed = Position{m.position.Generation, e.Step}, true
	case Leave:
		m.leaving, m.deadline, m.changed = true, e.Deadline, true
		// Nobody counts on one who has promised nothing since it was last in a ring.
		if m.phase == Joining && m.promised.IsZero() || m.phase == Standby && (m.retired || m.promised.IsZero()) {
			m.exit("never admitted")
		}
	}
}

// fresh begins anew, without a state.
func (m *member) fresh() {
	m.position = Position{Step: -1}
	m.become(Joining)
	m.do(Warm{})
}

func (m *member) stepDone(e StepDone) {
	if e.Generation != m.record.Generation || m.phase != Running && m.phase != Quiescing && m.phase != Aborting || e.Step <= m.position.Step {
		m.refused++
		return
	}
	if e.Step > m.position.Step+1 {
		// A child that skips a step has not the state that all have. It must not be anybody's source.
		m.event(Crashed{Error: "the child skipped a step"})
		return
	}
	m.position.Step, m.compute = e.Step, e.Compute
	if m.phase == Aborting {
		return
	}
	if e.QuiesceAt > 0 && e.Step >= e.QuiesceAt {
		m.park()
	}
}

func (m *member) aborted(e Aborted) {
	if e.Generation != m.record.Generation || m.phase != Aborting {
		m.refused++
		return
	}
	switch {
	case e.Step < m.position.Step || e.Step > m.position.Step+1 || !m.synced && e.Step != m.position.Step:
		// What the child has is no state that the ring ever agreed on, such as an unfinished copy.
		m.position = Position{Step: -1}
	default:
		m.position.Step = e.Step
	}
	m.become(Stopped)
}
