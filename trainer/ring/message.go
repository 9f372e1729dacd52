package ring

import "time"

// Message goes from one node to another. The agent encodes it, and must have proved that From is who sent it.
type Message struct {
	Job      string
	From, To ID
	Report   *Report // to the coordinator, or
	Order    *Order  // from it
}

// Report is all that a coordinator needs to know of a member. A member sends one every heart-beat, and at once when it has changed.
type Report struct {
	Seq     uint64 // rises with every report of this process: an older one that comes later is not heard
	Phase   Phase
	Version string
	Leaving bool
	Term    uint32 // of the highest coordinator that it has heard of
	Warms   int    // how often its child has warmed up

	Promised   Generation // it hears no order of a lower one
	Reloaded   Generation // it has read a checkpoint anew for that one, or is about to
	Generation Generation // the newest that it was committed to; zero = none yet
	Position   Position   // of its state
	Entered    Generation // the newest whose state it ever held: had Generation stepped, all its members would have entered it
	Record     *Record    // of Generation, while stopped: for a coordinator that could not read it elsewhere

	Synced  bool   // in phase Syncing: connections and state are there
	Hash    uint64 // of the state with which it entered; 0 = not known
	Lost    []ID   // peers whose connection it saw break in Generation, by ordinal
	Saved   Position
	Crashes int   // of its child, since it started
	Crash   Crash // the newest
	Compute time.Duration
}

// Kind is what an order is about.
type Kind string

// The kinds.
const (
	Hello   Kind = "hello"   // Term has this coordinator: report
	Propose Kind = "propose" // stop for Generation, and promise to hear no lower one
	Commit  Kind = "commit"  // be a member of Record
	Run     Kind = "run"     // all members of Generation have the state: step
	Retire  Kind = "retire"  // Generation is without you: be a standby
	Release Kind = "release" // you may leave
	Save    Kind = "save"    // write a durable checkpoint of your state
	Reload  Kind = "reload"  // the ring's state is lost: have the child read its checkpoint anew
	Wait    Kind = "wait"    // there can be no generation, says Why
	End     Kind = "end"     // the job has ended as Record says
)

// Order is what a coordinator wants of one member.
type Order struct {
	Kind       Kind
	Term       uint32 // of the coordinator: who has heard of a higher one does not obey
	Generation Generation
	Abort      bool    // Propose: do not finish the step
	Record     *Record // Commit, End
	Source     ID      // Commit: whose state counts
	Behind     []ID    // Commit: members who must copy it, by ordinal
	Why        string  // Wait
}

// Event is what a node is told: a [Message], or something that happened on its own machine or at the API server.
type Event interface{ event() }

// The events that the agent gives, besides [Message].
type (
	// Leader says who holds the lease now, and must be given on every change that the agent sees, first of all to the holder itself.
	// Without a lease, the agent of the first ordinal gives it once, with itself as the Holder.
	Leader struct {
		// Term is higher for every holder: the lease's transitions + 1, where the holder's name is new at every start of the agent. Without
		// a lease: the Unix time of the agent's start; if that clock was set back, the node takes a higher one by itself.
		Term   uint32
		Holder ID // zero = nobody, or not known any more
		// Record is what was read after the lease was got and all writes of this agent were settled; zero = there is none. Only the holder
		// needs it, but for one that has an End: any worker that sees it on its start need not wait for a coordinator.
		Record Record
	}

	// Pods is what the API server says of the job's pods; only the lease's holder needs it. It must be complete, and read after [Leader]
	// told this node that it holds the lease, from no cache that may be older: a member whose pod is not in it is gone for good.
	Pods struct {
		Replicas int // .spec.replicas
		Pods     []Pod
	}

	// Warmed says that the child is ready to be admitted: imported, connected to its data, with the newest checkpoint read.
	Warmed struct {
		Step int64 // of that checkpoint; 0 = there is none
	}

	// Synced says that the connections of the generation are open, and that the state is there, copied if it had to be.
	Synced struct {
		Generation Generation
		Hash       uint64 // of the state; 0 = not computed
	}

	// StepDone says that the child has applied a step. QuiesceAt is the maximum of what all members wished in this step's all-reduce (see
	// action [Quiesce]), 0 = nothing: all see the same, so all stop after the same step, the first one with Step ≥ QuiesceAt > 0.
	StepDone struct {
		Generation Generation
		Step       int64
		QuiesceAt  int64
		Compute    time.Duration // spent by this member, without waiting for others; 0 = not known
	}

	// Aborted answers [AbortStep]: the child stands still. Step is what its state has now, -1 if the state was torn by an unfinished copy.
	Aborted struct {
		Generation Generation
		Step       int64
	}

	// PeerLost says that a connection of the generation broke. Whose fault it was is not known: the peer may be well.
	PeerLost struct {
		Generation Generation
		Peer       ID
	}

	// Crashed says that the child has died, and its state with it.
	Crashed struct{ Error string }

	// Finished says that the child has done the job's last step, which was told by a StepDone before (or was in the state that it began with).
	Finished struct{ Generation Generation }

	// Saved says that a checkpoint of the state is durable.
	Saved struct{ Step int64 }

	// Leave says that this worker has to go (SIGTERM): it leaves at the next step boundary if that comes before Deadline, else then.
	Leave struct{ Deadline time.Time }

	// Recorded says that [WriteRecord] is done, for certain.
	Recorded struct {
		Generation Generation
		End        Outcome
	}

	// NotRecorded says that it is not and will not be, for certain: somebody else wrote. A [Leader] with what is there now must follow.
	NotRecorded struct {
		Generation Generation
		End        Outcome
	}
)

// Pod is one pod of the StatefulSet.
type Pod struct {
	Ordinal int
	UID     string
	Running bool   // its agent can be expected to report
	Waiting string // for people: why it is not running, such as "0/3 nodes have a free GPU"
}

func (Message) event()     {}
func (Leader) event()      {}
func (Pods) event()        {}
func (Warmed) event()      {}
func (Synced) event()      {}
func (StepDone) event()    {}
func (Aborted) event()     {}
func (PeerLost) event()    {}
func (Crashed) event()     {}
func (Finished) event()    {}
func (Saved) event()       {}
func (Leave) event()       {}
func (Recorded) event()    {}
func (NotRecorded) event() {}

// Action is what the agent has to do, in the order given.
type Action interface{ action() }

// The actions.
type (
	// Send a message. It may get lost.
	Send struct{ Message Message }

	// Warm starts the child, or starts it anew if its state was lost; [Warmed] answers.
	Warm struct{}

	// StartGeneration opens the connections of a generation. The child does not step before [RunGeneration]. [Synced] answers, when the
	// state is there, too.
	StartGeneration struct {
		Generation Generation
		Rank       int
		Members    []ID  // by rank
		Step       int64 // steps in the state that all begin with
		Reason     Reason
	}

	// SyncState copies the state from one member to another; both ends get it, and From must not give its state for a generation of which
	// it has not got it: it may have lost the state since. What To had before is not to be used any more. From may be a leaver who is not
	// in the generation.
	SyncState struct {
		Generation Generation
		From, To   ID
		Step       int64
	}

	// RunGeneration lets the child step, from Step on.
	RunGeneration struct {
		Generation Generation
		Step       int64
	}

	// Quiesce has the child wish Step in the all-reduce of its next step, where the maximum of all wishes is taken.
	Quiesce struct {
		Generation Generation
		Step       int64
	}

	// Park says that this was the last step of the generation: the child keeps its state, the connections can be closed.
	Park struct {
		Generation Generation
		Step       int64
	}

	// AbortStep tears the generation's connections down at once. Step would have been the next to be applied. [Aborted] answers; a child
	// that does not stop is to be killed, then [Crashed] does.
	AbortStep struct {
		Generation Generation
		Step       int64
	}

	// SaveState writes a durable checkpoint; [Saved] answers.
	SaveState struct{ Step int64 }

	// Exit stops the child and ends the process: this worker has left, which is no success and no failure of the job.
	Exit struct {
		Generation Generation // the newest that it was in
		Step       int64
		Reason     string
	}

	// Done says that the job has succeeded, as is recorded. The child is stopped, the process stays.
	Done struct {
		Generation Generation
		Step       int64
	}

	// Fail says that the job has failed, as is recorded. The child is stopped, the process stays.
	Fail struct{ Reason string }

	// WriteRecord writes the record, if nobody has since it was read by this coordinator. [Recorded] or [NotRecorded] answers; where it
	// is not known which, the agent reads until it is. Where nothing can be written (FixedCoordinator), Recorded answers at once.
	WriteRecord struct{ Record Record }

	// Resign gives the lease up, for another node to take.
	Resign struct{}

	// ScaleToZero sets the StatefulSet's replicas to 0, after the job's end and as often as somebody raises them again.
	ScaleToZero struct{}
)

func (Send) action()            {}
func (Warm) action()            {}
func (StartGeneration) action() {}
func (SyncState) action()       {}
func (RunGeneration) action()   {}
func (Quiesce) action()         {}
func (Park) action()            {}
func (AbortStep) action()       {}
func (SaveState) action()       {}
func (Exit) action()            {}
func (Done) action()            {}
func (Fail) action()            {}
func (WriteRecord) action()     {}
func (Resign) action()          {}
func (ScaleToZero) action()     {}
