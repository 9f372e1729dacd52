package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// What the API server answers, as far as anybody decides by it.
var (
	ErrNotFound = errors.New("not found")
	ErrConflict = errors.New("somebody else wrote since it was read")
)

// Leases is the job's lease. Each write is under the condition that nobody has written since Version.
type Leases interface {
	Lease(ctx context.Context) (Lease, error)             // or ErrNotFound
	PutLease(ctx context.Context, l Lease) (Lease, error) // or ErrConflict; with Version "" it makes it
	// WatchLease sends the lease whenever it changes, from about now on, and closes the channel when it cannot any more or ctx is done.
	WatchLease(ctx context.Context) (<-chan Lease, error)
}

// Records is where the ring's record lies. It is written like a lease, and read from no cache.
type Records interface {
	Record(ctx context.Context) (Stored, error)
	PutRecord(ctx context.Context, s Stored) (Stored, error)
}

// Workload is the StatefulSet and its pods.
type Workload interface {
	// Pods reads the pods and the replicas from no cache.
	Pods(ctx context.Context) (ring.Pods, error)
	// Changes sends whenever there may be something new to read, and closes the channel when it cannot any more or ctx is done.
	Changes(ctx context.Context) (<-chan struct{}, error)
	ScaleToZero(ctx context.Context) error
}

// Lease is who leads.
type Lease struct {
	Holder      string // see holderName; "" = nobody
	Address     string // of the holder's agent
	Key         string // of the holder's connections: whoever trusts the API server trusts it
	Transitions int
	Version     string // of the object; "" = there is none yet
}

// Stored is a record as it is stored.
type Stored struct {
	Record  ring.Record
	Writer  string // holder's name; with Record.Generation and End it tells one write from any other
	Version string // of the object; "" = there is none yet
}

// Times of the lease. A holder that cannot renew takes itself for deposed well before another may take over, without a common clock.
const (
	leaseDuration = 15 * time.Second
	renewDeadline = 10 * time.Second
	renewEvery    = 2 * time.Second
	pollEvery     = 10 * time.Second // where a watch may have missed something
	callTimeout   = 3 * time.Second  // of one call of the API server
	turn          = 100 * time.Millisecond
	turns         = 20 // the lowest ordinal that sees a free lease takes it: each waits its turn
	listEvery     = 100 * time.Millisecond
)

// holderName names a process in the lease, for people and machines.
func holderName(statefulSet string, id ring.ID) string {
	return fmt.Sprintf("%s-%d/%s/%d", statefulSet, id.Ordinal, id.Pod, id.Boot)
}

// parseHolder is the way back; the zero ID if it is no such name.
func parseHolder(name string) ring.ID {
	parts := strings.Split(name, "/")
	if len(parts) != 3 {
		return ring.ID{}
	}
	ordinal, err1 := strconv.Atoi(parts[0][strings.LastIndexByte(parts[0], '-')+1:])
	boot, err2 := strconv.ParseInt(parts[2], 10, 64)
	if err1 != nil || err2 != nil || ordinal < 0 {
		return ring.ID{}
	}
	return ring.ID{Ordinal: ordinal, Pod: parts[1], Boot: boot}
}

// KubernetesConfig is what a [Kubernetes] needs. All fields are to be given.
type KubernetesConfig struct {
	Self         Peer
	StatefulSet  string
	FirstOrdinal int
	Leases       Leases
	Records      Records
	Workload     Workload
	Logger       *slog.Logger
}

// Kubernetes is a [Cluster] with the rights to hold a lease, to read the job's pods, and to keep a record.
//
// It is not client-go's leader election, which says that one leads and not what [ring.Leader] must say: a term that rises with each
// holder, the holder's address and key for the others, and a record that was read after the lease was got and this agent's own writes
// were settled. Nor does it use an informer: its first list may come from a cache of the API server and be older than the lease, and
// then a pod that is well would be taken for gone. A watch only wakes; what counts is what is read after.
type Kubernetes struct {
	cfg     KubernetesConfig
	name    string
	tasks   chan task
	resigns chan struct{}
	scales  chan struct{}
	held    lockedTerm
}

// task is for the one goroutine that reads and writes the record, so that no read overtakes a write.
type task struct {
	write *ring.Record
	term  uint32          // to begin
	lead  context.Context // while it lasts
}

// lockedTerm is the term that this agent leads in.
type lockedTerm struct {
	mu   sync.Mutex
	term uint32 // 0 = in none
}

func (l *lockedTerm) set(term uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.term = term
}

func (l *lockedTerm) get() uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.term
}

// NewKubernetes returns a cluster. [Kubernetes.Run] starts it.
func NewKubernetes(cfg KubernetesConfig) *Kubernetes {
	return &Kubernetes{
		cfg: cfg, name: holderName(cfg.StatefulSet, cfg.Self.ID), tasks: make(chan task, 16), resigns: make(chan struct{}, 1), scales: make(chan struct{}, 1),
	}
}

// WriteRecord is [Cluster]'s.
func (k *Kubernetes) WriteRecord(r ring.Record) { k.tasks <- task{write: &r} } // the node waits for one answer at a time

// Resign is [Cluster]'s.
func (k *Kubernetes) Resign() { nudge(k.resigns) }

// ScaleToZero is [Cluster]'s.
func (k *Kubernetes) ScaleToZero() { nudge(k.scales) }

// Run is [Cluster]'s.
func (k *Kubernetes) Run(ctx context.Context, deliver Deliver) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var group sync.WaitGroup
	group.Go(func() { k.keepRecord(ctx, deliver) })
	group.Go(func() { k.scale(ctx) })
	k.elect(ctx, deliver)
	group.Wait()
	return nil
}

// scale sets the replicas to 0 when it was asked to. Whether it stays, the pods will say, and then it is asked again.
func (k *Kubernetes) scale(ctx context.Context) {
	for {
		select {
		case <-k.scales:
		case <-ctx.Done():
			return
		}
		call, cancel := context.WithTimeout(ctx, callTimeout)
		err := k.cfg.Workload.ScaleToZero(call)
		cancel()
		if err != nil && ctx.Err() == nil {
			k.cfg.Logger.Warn("cannot scale the StatefulSet to 0; trying again", "error", err)
			sleep(ctx, time.Second)
			nudge(k.scales)
		}
	}
}

// keepRecord does the tasks, one after the other.
func (k *Kubernetes) keepRecord(ctx context.Context, deliver Deliver) {
	// A worker that comes when all is over need not wait for anybody.
	for range 3 {
		s, err := k.readRecord(ctx)
		if err == nil {
			if s.Record.End != "" {
				deliver(ring.Leader{Record: s.Record})
			}
			break
		}
		if !sleep(ctx, time.Second) {
			return
		}
	}
	var stored Stored
	var watching sync.WaitGroup
	defer watching.Wait()
	for {
		var t task
		select {
		case t = <-k.tasks:
		case <-ctx.Done():
			return
		}
		if t.write == nil {
			watching.Wait() // what was read in an earlier term is not to be told in this one
			if s, ok := k.begin(t, deliver); ok {
				stored = s
				watching.Go(func() { k.watchPods(t.lead, deliver) })
			}
			continue
		}
		ok, now := k.settle(ctx, *t.write, stored)
		if ctx.Err() != nil {
			return
		}
		stored = now
		if ok {
			deliver(ring.Recorded{Generation: t.write.Generation, End: t.write.End})
			continue
		}
		deliver(ring.NotRecorded{Generation: t.write.Generation, End: t.write.End})
		if term := k.held.get(); term != 0 {
			deliver(ring.Leader{Term: term, Holder: k.cfg.Self.ID, Record: stored.Record})
		}
	}
}

// begin reads the record for a term and says that this agent leads.
func (k *Kubernetes) begin(t task, deliver Deliver) (Stored, bool) {
	for t.lead.Err() == nil {
		s, err := k.readRecord(t.lead)
		if err == nil {
			deliver(ring.Leader{Term: t.term, Holder: k.cfg.Self.ID, Record: s.Record})
			return s, true
		}
		if t.lead.Err() == nil {
			k.cfg.Logger.Warn("cannot read the ring's record; trying again", "error", err)
		}
		sleep(t.lead, time.Second)
	}
	return Stored{}, false
}

func (k *Kubernetes) readRecord(ctx context.Context) (Stored, error) {
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	s, err := k.cfg.Records.Record(call)
	if errors.Is(err, ErrNotFound) {
		return Stored{}, nil
	}
	return s, err
}

// settle writes a record over the one that was read, and returns what is there then. It comes back when it is certain, or ctx is done.
//
// An answer that got lost leaves open whether the write was done, and even whether it is still to be. So the same write is sent again:
// if it goes through, the first one never will; if there is a conflict, what is there now tells whose it was.
func (k *Kubernetes) settle(ctx context.Context, r ring.Record, stored Stored) (ok bool, now Stored) {
	wait := 50 * time.Millisecond
	for {
		call, cancel := context.WithTimeout(ctx, callTimeout)
		written, err := k.cfg.Records.PutRecord(call, Stored{Record: r, Writer: k.name, Version: stored.Version})
		cancel()
		if err == nil {
			return true, written
		}
		if errors.Is(err, ErrConflict) || errors.Is(err, ErrNotFound) {
			there, err := k.readRecord(ctx)
			if err == nil && there.Version != stored.Version {
				ours := there.Writer == k.name && there.Record.Generation == r.Generation && there.Record.End == r.End
				return ours, there
			}
		}
		if ctx.Err() == nil {
			k.cfg.Logger.Warn("cannot write the ring's record yet; trying again", "generation", r.Generation, "error", err)
		}
		if !sleep(ctx, wait) {
			return false, stored
		}
		wait = min(2*time.Second, 2*wait)
	}
}

// watchPods tells of the pods while this agent leads.
func (k *Kubernetes) watchPods(ctx context.Context, deliver Deliver) {
	var changes <-chan struct{}
	failed := false
	for ctx.Err() == nil {
		if changes == nil {
			var err error
			if changes, err = k.cfg.Workload.Changes(ctx); err != nil {
				k.cfg.Logger.Debug("cannot watch the pods; reading them every second", "error", err)
			}
		}
		call, cancel := context.WithTimeout(ctx, callTimeout)
		pods, err := k.cfg.Workload.Pods(call)
		cancel()
		if err == nil {
			deliver(pods)
		} else if ctx.Err() == nil && !failed {
			k.cfg.Logger.Warn("cannot read the job's pods; trying again", "error", err)
		}
		failed = err != nil
		poll := pollEvery
		if failed || changes == nil {
			poll = time.Second
		}
		sleep(ctx, listEvery)
		timer := time.NewTimer(poll)
		select {
		case _, open := <-changes:
			if !open {
				changes = nil
			}
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}
