package ring

import (
	"fmt"
	"slices"
	"time"
)

// Config is what the nodes of a job must agree on. The zero value works, but for Job. All times are of the node's own clock.
type Config struct {
	Job     string // UID of the StatefulSet: messages and records of another job are refused
	Version string // of code and configuration; two versions are never in one ring

	Min        int   // members below which the ring pauses; 0 = 1
	WorldUnit  int   // a world size must be a multiple of it; 0 = 1
	WorldSizes []int // if not empty, the only sizes of a world

	// FixedCoordinator is for a cluster where the agent may not hold a lease: the coordinator is the pod with FirstOrdinal, and nothing
	// is recorded. While that pod is away the others wait for it, their state in memory, and it is in every ring. A state that only
	// others hold is given up when they are silent for 2 × DeadAfter (or, after its own restart, for Settle), for a checkpoint's.
	FixedCoordinator bool
	FirstOrdinal     int // the StatefulSet's .spec.ordinals.start

	Heartbeat    time.Duration // between two reports; 0 = 1 s
	DeadAfter    time.Duration // who has not reported for so long is lost; 0 = 5 s
	SuspectAfter time.Duration // the same for one whose connection a peer has seen break; 0 = 500 ms

	Settle         time.Duration // so long after the newest joiner a generation waits for more, if not all pods have come; 0 = 3 s
	SettleMax      time.Duration // so long after the first; 0 = 15 s
	LeaveSettle    time.Duration // so long after the first leaver it waits for more, so that k leavers are one change; 0 = 200 ms
	ChangeInterval time.Duration // between two changes that only add members, or 20 times what the last took; 0 = 60 s
	RegrowWait     time.Duration // so long after a loss the others wait for the lost one to come back; 0 = not at all
	QuiesceTimeout time.Duration // a step boundary that has not come by then is not waited for; 0 = 10 s; take 5 times the p99 of a step
	SyncTimeout    time.Duration // opening connections and copying the state; 0 = 30 s; add the state's size / 50 MB/s
	PauseLimit     time.Duration // a pause of so long fails the job; 0 = none does

	MaxRestarts int // crashes of the whole job, wherever they happen, after which it fails; 0 = any number
	SameCrashes int // generations in a row that crash at one step with one error, after which the job fails; 0 = 3

	StragglerRatio float64 // a member that computes longer than this times the median is slow; 0 = 1.5
	StragglerSteps int64   // so many slow steps in a row make a straggler; 0 = 50
	Quarantine     bool    // take a straggler out, if it has the highest ordinal; a StatefulSet cannot lose one of the middle
}

func (c Config) withDefaults() Config {
	set := func(d *time.Duration, to time.Duration) {
		if *d == 0 {
			*d = to
		}
	}
	c.Min, c.WorldUnit = max(c.Min, 1), max(c.WorldUnit, 1)
	set(&c.Heartbeat, time.Second)
	set(&c.DeadAfter, 5*time.Second)
	set(&c.SuspectAfter, 500*time.Millisecond)
	set(&c.Settle, 3*time.Second)
	set(&c.SettleMax, 15*time.Second)
	set(&c.LeaveSettle, 200*time.Millisecond)
	set(&c.ChangeInterval, time.Minute)
	set(&c.QuiesceTimeout, 10*time.Second)
	set(&c.SyncTimeout, 30*time.Second)
	if c.SameCrashes == 0 {
		c.SameCrashes = 3
	}
	if c.StragglerRatio == 0 {
		c.StragglerRatio = 1.5
	}
	if c.StragglerSteps == 0 {
		c.StragglerSteps = 50
	}
	return c
}

// Validate says which field has which value, what it may be, and what to do.
func (c Config) Validate() error {
	if c.Job == "" {
		//lint:ignore ST1005 it begins with a field's name
		return fmt.Errorf("Job is empty: set it to the UID of the StatefulSet, so that a job of the same name begins anew")
	}
	for _, f := range []struct {
		name      string
		value     int64
		low, high int64
		fix       string
	}{
		{"Min", int64(c.Min), 0, MaxMembers, "set it to the fewest workers that may train, at least 1"},
		{"WorldUnit", int64(c.WorldUnit), 0, MaxMembers, "set it to the workers that make one unit, 1 for any number"},
		{"FirstOrdinal", int64(c.FirstOrdinal), 0, 1 << 30, "set it to the StatefulSet's .spec.ordinals.start"},
		{"MaxRestarts", int64(c.MaxRestarts), 0, 1 << 30, "set it to 0 for any number"},
		{"SameCrashes", int64(c.SameCrashes), 0, 1 << 30, "set it to 0 for 3"},
		{"StragglerSteps", c.StragglerSteps, 0, 1 << 30, "set it to 0 for 50"},
	} {
		if f.value < f.low || f.value > f.high {
			return fmt.Errorf("%s %d: want %d to %d; %s", f.name, f.value, f.low, f.high, f.fix)
		}
	}
	for _, f := range []struct {
		name      string
		value     time.Duration
		low, high time.Duration
	}{
		{"Heartbeat", c.Heartbeat, 10 * time.Millisecond, time.Minute},
		{"DeadAfter", c.DeadAfter, 20 * time.Millisecond, 10 * time.Minute},
		{"SuspectAfter", c.SuspectAfter, time.Millisecond, 10 * time.Minute},
		{"Settle", c.Settle, time.Millisecond, time.Hour},
		{"SettleMax", c.SettleMax, time.Millisecond, time.Hour},
		{"LeaveSettle", c.LeaveSettle, time.Millisecond, time.Minute},
		{"ChangeInterval", c.ChangeInterval, time.Millisecond, 24 * time.Hour},
		{"RegrowWait", c.RegrowWait, time.Millisecond, time.Hour},
		{"QuiesceTimeout", c.QuiesceTimeout, time.Millisecond, 24 * time.Hour},
		{"SyncTimeout", c.SyncTimeout, time.Millisecond, 24 * time.Hour},
		{"PauseLimit", c.PauseLimit, time.Second, 365 * 24 * time.Hour},
	} {
		if f.value != 0 && (f.value < f.low || f.value > f.high) {
			return fmt.Errorf("%s %s: want %s to %s; leave it out for the default", f.name, f.value, f.low, f.high)
		}
	}
	if c.StragglerRatio != 0 && !(c.StragglerRatio > 1 && c.StragglerRatio <= 1000) {
		return fmt.Errorf("StragglerRatio %v: want more than 1, at most 1000; leave it out for 1.5", c.StragglerRatio)
	}
	d := c.withDefaults()
	if d.DeadAfter < 2*d.Heartbeat {
		return fmt.Errorf("DeadAfter %s: want at least 2 × Heartbeat, %s, else one late report is a loss; raise it or lower Heartbeat", d.DeadAfter, 2*d.Heartbeat)
	}
	if d.SettleMax < d.Settle {
		return fmt.Errorf("SettleMax %s: want at least Settle, %s; raise it", d.SettleMax, d.Settle)
	}
	for _, size := range c.WorldSizes {
		if size < 1 || size > MaxMembers || size%d.WorldUnit != 0 {
			return fmt.Errorf("WorldSizes %d: want 1 to %d, a multiple of WorldUnit %d; take it out", size, MaxMembers, d.WorldUnit)
		}
	}
	if len(c.WorldSizes) > 0 && slices.Max(c.WorldSizes) < d.Min {
		return fmt.Errorf("WorldSizes up to %d: want one of at least Min, %d, else there can be no ring; add one or lower Min", slices.Max(c.WorldSizes), d.Min)
	}
	return nil
}

// MaxMembers bounds a ring. A node with an ordinal beyond what it leaves room for is still heard; the world is cut.
const MaxMembers = 4096

// world is the largest size of a world that n workers can make, 0 if there is none.
func (c Config) world(n int) int {
	n = min(n, MaxMembers)
	for ; n >= c.Min && n > 0; n-- {
		if n%c.WorldUnit == 0 && (len(c.WorldSizes) == 0 || slices.Contains(c.WorldSizes, n)) {
			return n
		}
	}
	return 0
}
