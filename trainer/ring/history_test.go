package ring

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// hasty is a configuration whose times are short, so that a history of many changes is.
func hasty() Config {
	return Config{
		Job: "job-1", Version: "v1", Heartbeat: 300 * time.Millisecond, DeadAfter: 1500 * time.Millisecond, SuspectAfter: 200 * time.Millisecond,
		Settle: 500 * time.Millisecond, SettleMax: 2 * time.Second, LeaveSettle: 100 * time.Millisecond, ChangeInterval: 500 * time.Millisecond,
		QuiesceTimeout: 2 * time.Second, SyncTimeout: 3 * time.Second, SameCrashes: 1 << 20,
	}
}

// history is a cluster to which things happen.
type history struct {
	*cluster
	crashes int
}

func newHistory(cfg Config, seed uint64) *history {
	h := &history{cluster: newCluster(cfg, rand.New(rand.NewPCG(seed, seed)))}
	h.leaseTTL, h.grace = 3*time.Second, 8*time.Second
	h.scale(3)
	h.run(5 * time.Second)
	return h
}

// happen lets the n-th of the things that can happen happen, to whom the chance has it.
func (h *history) happen(n int) {
	var p *process
	if live := slices.DeleteFunc(slices.Clone(h.processes), func(p *process) bool { return !p.alive }); len(live) > 0 {
		p = live[h.rng.IntN(len(live))]
	}
	if p == nil && n != 0 && n != 9 {
		n = 0
	}
	switch n {
	case 0:
		h.scale(1 + min(h.rng.IntN(8), h.rng.IntN(8)))
		h.say("--- replicas %d", h.replicas)
	case 1:
		h.say("--- kill %s", p.id)
		h.kill(p)
	case 2:
		h.crashes++
		if p.child.up {
			h.crash(p, fmt.Sprintf("crash %d", h.crashes))
		}
	case 3:
		if !h.cfg.FixedCoordinator {
			h.say("--- cut")
			for _, q := range h.processes {
				h.sides[q] = h.rng.IntN(3) / 2
			}
		}
	case 4:
		h.say("--- heal")
		clear(h.sides)
	case 5:
		// A fixed coordinator that starts anew and cannot hear of the others does not know that there are any: see Config.
		if !h.cfg.FixedCoordinator {
			h.say("--- freeze %s", p.id)
			p.frozen = true
		}
	case 6:
		for _, q := range h.processes {
			if q.frozen {
				h.say("--- thaw %s", q.id)
				h.thaw(q)
			}
		}
	case 7:
		// Of a whole ring of zombies nobody could tell that it is one: that is what a forced deletion risks.
		zombie := slices.ContainsFunc(h.processes, func(q *process) bool { return q.alive && q.pod.gone })
		if !zombie && len(h.record.Members) > 2 && !h.cfg.FixedCoordinator {
			h.say("--- force-delete %s", p.id)
			h.forceDelete(p.pod)
			h.after(h.about(5*time.Second), func() { h.kill(p) })
		}
	case 8:
		if h.record.has(p.id) && p.child.up && !p.child.torn && p.child.in == h.record.Generation {
			h.save(p.child.state)
		}
	case 9:
		h.unlucky, h.late = float64(h.rng.IntN(3))*0.1, float64(h.rng.IntN(3))*0.05
	case 10:
		h.say("--- delete %s", p.id)
		h.terminate(p.pod)
	case 11:
		if h.chance(0.2) {
			h.scale(0)
			h.say("--- replicas 0")
		}
	}
}

// things is how many there are.
const things = 12

// quiet ends all faults, and says what keeps a ring of exactly the live members from stepping, if anything does after so long.
func (h *history) quiet(wait time.Duration) string {
	h.unlucky, h.late = 0, 0
	clear(h.sides)
	for _, p := range h.processes {
		if p.frozen {
			h.thaw(p)
		}
	}
	if h.replicas == 0 {
		h.scale(2)
	}
	h.say("--- quiet, replicas %d", h.replicas)
	h.run(wait)
	lacks := func() string {
		if h.model.broken != "" {
			return h.model.broken
		}
		if len(h.record.Members) != h.replicas {
			return fmt.Sprintf("the ring has %d members, want %d", len(h.record.Members), h.replicas)
		}
		for ordinal, id := range h.record.Members {
			p := h.pods[ordinal]
			if p == nil || p.process == nil || p.process.id != id {
				return fmt.Sprintf("member %s is not the live one", id)
			}
			if s := p.process.node.Status(); s.Phase != Running || s.Generation != h.record.Generation || s.Rank != ordinal {
				return fmt.Sprintf("%s is %s in %s with rank %d, want running in %s", id, s.Phase, s.Generation, s.Rank, h.record.Generation)
			}
		}
		return ""
	}
	if why := lacks(); why != "" {
		return why
	}
	before := len(h.model.lineage)
	h.run(5 * time.Second)
	if after := len(h.model.lineage); after <= before {
		return fmt.Sprintf("no step in 5 s, %d so far", after)
	}
	return lacks()
}

// finish lets the job come to its end while things go on happening, and says what keeps it from that.
func (h *history) finish() string {
	h.scale(max(h.replicas, h.cfg.Min, 1))
	h.lastStep = int64(len(h.model.lineage)) + 30
	for n := 0; n < 20 && h.record.End == "" && h.model.broken == ""; n++ {
		h.happen(1 + h.rng.IntN(6))
		h.run(h.about(400 * time.Millisecond))
	}
	h.unlucky, h.late = 0, 0
	clear(h.sides)
	for _, p := range h.processes {
		h.thaw(p)
	}
	if h.record.End == "" {
		h.scale(max(h.replicas, 2))
	}
	h.run(300 * time.Second)
	switch {
	case h.model.broken != "":
		return h.model.broken
	case h.record.End != Succeeded:
		return fmt.Sprintf("the job has not ended, it has %d steps of %d", len(h.model.lineage), h.lastStep)
	case h.replicas != 0 || len(h.pods) != 0:
		return fmt.Sprintf("the job has ended, and there are %d replicas, %d pods", h.replicas, len(h.pods))
	}
	return ""
}

// TestHistories lets everything happen to a ring that may: splits, losses, duplicates, late messages, frozen and killed processes,
// zombies, crashes, a StatefulSet that grows and shrinks, until it has changed a thousand times. The model watches every event. Now and
// then all faults end, and the ring must form. RING_SEED plays one history again, RING_LOG prints it.
func TestHistories(t *testing.T) {
	seeds, changes := []uint64{1, 2, 3, 4}, 250
	if testing.Short() {
		changes = 50
	}
	if s := os.Getenv("RING_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		seeds = []uint64{n}
	}
	if s := os.Getenv("RING_SEEDS"); s != "" { // many, by hand
		n, _ := strconv.Atoi(s)
		seeds = nil
		for i := range n {
			seeds = append(seeds, uint64(100+i))
		}
	}
	for _, fixed := range []bool{false, true} {
		total := model{}
		for _, seed := range seeds {
			cfg := hasty()
			cfg.FixedCoordinator = fixed
			cfg.Min = int(seed % 3)
			h := newHistory(cfg, seed)
			why := ""
			for n := 0; why == "" && h.model.changes < changes; n++ {
				if n > 40*changes {
					why = fmt.Sprintf("only %d changes after %d events", h.model.changes, n)
					break
				}
				h.happen(h.rng.IntN(things))
				for h.chance(0.3) { // at the same moment
					h.happen(1 + h.rng.IntN(7))
				}
				h.run(h.about(400 * time.Millisecond))
				why = h.model.broken
				if why == "" && n%80 == 79 {
					h.replicas = max(h.replicas, cfg.Min)
					h.scale(h.replicas)
					why = h.quiet(300 * time.Second) // more than 20 times a change that waited for the dead and for a slow API server
				}
			}
			if why == "" {
				why = h.finish()
			}
			if why != "" {
				if os.Getenv("RING_LOG") != "" {
					t.Log("\n" + strings.Join(slices.Concat(h.log[max(0, len(h.log)-150):], h.state()), "\n"))
				}
				t.Fatalf("RING_SEED=%d fixed=%v, after %d changes: %s", seed, fixed, h.model.changes, why)
			}
			total.changes += h.model.changes
			total.planned += h.model.planned
			total.redone += h.model.redone
			total.restarts += h.model.restarts
			total.conflicts += h.model.conflicts
			total.maxWorld = max(total.maxWorld, h.model.maxWorld)
		}
		t.Logf("fixed=%v: %d changes, of them %d planned, %d that did a step again, %d from a checkpoint; %d refused; worlds up to %d", fixed, total.changes, total.planned, total.redone, total.restarts, total.conflicts, total.maxWorld)
	}
}
