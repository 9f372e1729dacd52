package agent

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// Fixed is a [Cluster] without an API server: the coordinator is the pod with the first ordinal, found by the name that the headless
// Service gives it, and nothing is recorded. It goes with [ring.Config.FixedCoordinator].
type Fixed struct {
	self, first ring.ID
	address     string
	log         *slog.Logger
	answers     chan ring.Recorded

	mu   sync.Mutex
	told bool
}

// NewFixed returns the cluster of a worker. address is host:port of the first ordinal's agent, such as
// training-0.training.ml.svc:29400.
func NewFixed(self ring.ID, firstOrdinal int, address string, log *slog.Logger) *Fixed {
	return &Fixed{self: self, first: ring.ID{Ordinal: firstOrdinal}, address: address, log: log, answers: make(chan ring.Recorded, 16)}
}

// Run says once who leads.
func (f *Fixed) Run(ctx context.Context, deliver Deliver) error {
	if f.self.Ordinal == f.first.Ordinal {
		deliver(ring.Leader{Term: uint32(time.Now().Unix()), Holder: f.self})
	} else {
		// Who that is, its first order says. Until then reports go to the address.
		deliver(ring.Leader{}, Attached{Peers: []Peer{{ID: f.first, Address: f.address}}})
	}
	for {
		select {
		case e := <-f.answers:
			deliver(e)
		case <-ctx.Done():
			return nil
		}
	}
}

// WriteRecord writes nothing: the members remember.
func (f *Fixed) WriteRecord(r ring.Record) {
	f.answers <- ring.Recorded{Generation: r.Generation, End: r.End} // the node waits for one answer at a time
}

// Resign cannot be: nobody else may lead.
func (f *Fixed) Resign() {}

// ScaleToZero can only ask people.
func (f *Fixed) ScaleToZero() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.told {
		f.told = true
		f.log.Warn("the job has ended, and this agent has no right to scale the StatefulSet to 0: do it, to free the GPUs")
	}
}
