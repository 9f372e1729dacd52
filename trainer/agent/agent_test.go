package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"math/rand/v2"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
	"github.com/capstan-gpu/capstan/trainer/stats"
)

// Three agents in one process: 2→3→2 by the StatefulSet, each change without a lost step, then a loss that costs one step at most.
func TestReRing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, ring.Config{ChangeInterval: 5 * time.Second})
		w.scale(2)
		w.until(10*time.Second, "a ring of 2", w.running(2, ring.Generation{}))
		first := w.generation()
		time.Sleep(10 * time.Second)

		w.scale(3)
		w.until(20*time.Second, "a ring of 3", w.running(3, first))
		second := w.generation()
		up := w.pause(0)
		time.Sleep(time.Second)
		if w.redone != 0 {
			t.Errorf("%d steps were done again by a planned change, want 0", w.redone)
		}

		w.scale(2)
		w.until(5*time.Second, "a ring of 2 again", w.running(2, second))
		third := w.generation()
		down := w.pause(0)
		leaver := w.all[2]
		<-leaver.done
		if leaver.err != nil || leaver.exit.Reason != "released" {
			t.Errorf("the leaver ended with %+v, %v; want it released", leaver.exit, leaver.err)
		}
		time.Sleep(time.Second)
		if w.redone != 0 {
			t.Errorf("%d steps were done again by planned changes, want 0", w.redone)
		}

		began := time.Now()
		w.workers[1].kill()
		w.until(10*time.Second, "a ring of 1 after a loss", w.running(1, third))
		loss := time.Since(began)
		time.Sleep(time.Second)
		w.check()
		if w.redone > 1 {
			t.Errorf("%d steps were done again after a loss, want 1 at most", w.redone)
		}
		for _, c := range []struct {
			what        string
			pause, want time.Duration
		}{{"2→3", up, 100 * time.Millisecond}, {"3→2", down, 100 * time.Millisecond}, {"a loss", loss, 5 * time.Second}} {
			t.Logf("%s: pause %s", c.what, c.pause)
			if c.pause <= 0 || c.pause > c.want {
				t.Errorf("%s: pause %s, want more than 0, %s at most", c.what, c.pause, c.want)
			}
		}
		if got := w.all[0].trainer.warms; got != 1 {
			t.Errorf("the survivor warmed up %d times, want once", got)
		}
	})
}

// pause is the newest pause of a worker.
func (w *world) pause(ordinal int) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Duration(w.workers[ordinal].agent.Status().Pause * float64(time.Second))
}

// The same with a lease, a record and pods at an API server. A coordinator that is lost costs the lease's time, and no more than a step;
// and a ring steps on while the API server is away.
func TestReRingKubernetes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, ring.Config{ChangeInterval: 5 * time.Second})
		w.api = newAPIServer()
		w.scale(2)
		w.until(10*time.Second, "a ring of 2", w.running(2, ring.Generation{}))
		time.Sleep(6 * time.Second)
		before := w.generation()
		w.scale(4)
		w.until(20*time.Second, "a ring of 4", w.running(4, before))
		before = w.generation()
		w.scale(3)
		w.until(5*time.Second, "a ring of 3", w.running(3, before))
		time.Sleep(time.Second)
		if w.redone != 0 {
			t.Errorf("%d steps were done again by planned changes, want 0", w.redone)
		}

		for ordinal := range 4 {
			w.api.mu.Lock()
			w.api.away[ordinal] = true
			w.api.mu.Unlock()
		}
		before, step := w.generation(), w.workers[0].agent.Status().Step
		time.Sleep(time.Minute)
		if got := w.workers[0].agent.Status().Step - step; got < 4000 || w.generation() != before {
			t.Errorf("%d steps in a minute without the API server, in generation %s; want it to step on in %s", got, w.generation(), before)
		}
		for ordinal := range 4 {
			w.api.mu.Lock()
			w.api.away[ordinal] = false
			w.api.mu.Unlock()
		}
		time.Sleep(20 * time.Second)

		w.api.mu.Lock()
		w.api.away[0] = true // so that it does not release the lease: it is killed
		w.api.mu.Unlock()
		w.workers[0].kill()
		took := w.until(25*time.Second, "a ring without the coordinator", w.running(2, before))
		t.Logf("a ring without the coordinator after %s", took)
		if took < 10*time.Second {
			t.Errorf("a ring without the coordinator after %s, which is before its lease can have ended", took)
		}
		time.Sleep(time.Second)
		w.check()
		if w.redone > 1 {
			t.Errorf("%d steps were done again after one loss, want 1 at most", w.redone)
		}
	})
}

// Many changes in a row, planned and not: the states stay one, and at most one step is done again for each loss.
func TestManyChanges(t *testing.T) {
	for seed := range uint64(4) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			w := newWorld(t, ring.Config{ChangeInterval: time.Second, RegrowWait: 2 * time.Second})
			w.api = newAPIServer()
			w.scale(3)
			w.until(10*time.Second, "a ring", w.running(3, ring.Generation{}))
			losses := 0
			for range 25 {
				switch n := 1 + rng.IntN(6); {
				case rng.IntN(3) > 0:
					w.scale(n)
				default: // a process dies; the StatefulSet makes another one
					w.mu.Lock()
					var victim *worker
					for _, k := range w.workers {
						if k.id.Ordinal > 0 && (victim == nil || k.id.Ordinal < victim.id.Ordinal) {
							victim = k
						}
					}
					w.mu.Unlock()
					if victim != nil {
						losses++
						victim.kill()
						<-victim.done
						w.scale(w.replicas)
					}
				}
				time.Sleep(time.Duration(rng.IntN(3000)) * time.Millisecond)
			}
			n := w.replicas // which nobody changes now
			w.until(time.Minute, "the ring of all", func() bool { return w.count() == n && w.running(n, ring.Generation{})() })
			time.Sleep(time.Second)
			w.check()
			if w.redone > losses {
				t.Errorf("seed %d: %d steps were done again after %d losses", seed, w.redone, losses)
			}
			t.Logf("seed %d: %s at the end, %d losses, %d steps done again, %d steps", seed, w.generation(), losses, w.redone, w.workers[0].agent.Status().Step)
		})
	}
}

func (w *world) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.workers)
}

// A trainer that dies is warmed up again and copies the state; the others go on with theirs.
func TestCrash(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, ring.Config{RegrowWait: 3 * time.Second})
		w.scale(3)
		w.until(10*time.Second, "a ring", w.running(3, ring.Generation{}))
		before := w.generation()
		k := w.workers[1]
		k.trainer.failAt(k.agent.Status().Step+50, func() bool { return k.trainer.warms == 1 })
		w.until(10*time.Second, "the ring again", w.running(3, before))
		time.Sleep(time.Second)
		w.check()
		if got := w.workers[1].trainer.warms; got != 2 {
			t.Errorf("the trainer that died warmed up %d times, want 2", got)
		}
		if got := w.workers[0].trainer.warms; got != 1 {
			t.Errorf("a survivor warmed up %d times, want 1", got)
		}
		if s := w.workers[0].agent.Status(); s.Ring == nil || s.Ring.Restarts != 1 || s.Ring.Crash != "out of memory" {
			t.Errorf("status %+v, want one restart for \"out of memory\"", s.Ring)
		}
	})
}

// A step that kills whoever computes it ends the job, with the error and without a crash-loop.
func TestSameCrash(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, ring.Config{})
		w.scale(2)
		for _, k := range w.all {
			k.trainer.failAt(200, func() bool { return true })
		}
		w.until(time.Minute, "the end", func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.record.End == ring.Failed && len(w.workers) == 0
		})
		if want := "step 200 has crashed in 3 generations in a row: out of memory"; w.record.EndReason != want {
			t.Errorf("it failed for %q, want %q", w.record.EndReason, want)
		}
	})
}

// failAt has the trainer die before a step, when that is so.
func (l *listTrainer) failAt(at int64, when func() bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fails = func(step int64) string {
		if step == at && when() {
			return "out of memory"
		}
		return ""
	}
}

// The job ends when all have done the last step: it is recorded, and the StatefulSet goes to 0 and again to 0 after a late write of the HPA.
func TestDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, ring.Config{})
		w.lastStep = 300
		w.scale(2)
		w.until(30*time.Second, "the end", func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.record.End == ring.Succeeded
		})
		w.until(time.Second, "no worker", func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return len(w.workers) == 0 && w.replicas == 0
		})
		if w.record.EndStep != 300 {
			t.Errorf("it ended at step %d, want 300", w.record.EndStep)
		}
		w.scale(1) // the HPA had not seen it
		late := w.all[len(w.all)-1]
		<-late.done
		if late.exit.Reason != "the job has ended" || late.trainer.warms != 0 {
			t.Errorf("a late worker left with %q and %d warm-ups, want that the job has ended, and none", late.exit.Reason, late.trainer.warms)
		}
		if w.replicas != 0 {
			t.Errorf("%d replicas, want 0 again", w.replicas)
		}
	})
}

// What the page says while the ring runs, changes and is over.
func TestPage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, ring.Config{ChangeInterval: time.Second})
		page := func() string {
			var b bytes.Buffer
			if err := stats.Write(&b, w.all[0].agent.Samples()); err != nil {
				t.Fatal(err)
			}
			var values []string
			for _, line := range strings.Split(b.String(), "\n") {
				if line != "" && line[0] != '#' && !strings.Contains(line, "_seconds") {
					values = append(values, line)
				}
			}
			return strings.Join(values, "\n")
		}
		w.scale(1)
		if got := page(); got != "training_lost_steps_total 0\ntraining_steps_total 0" {
			t.Errorf("at the start the page says\n%s", got)
		}
		w.until(10*time.Second, "a ring of 1", w.running(1, ring.Generation{}))
		time.Sleep(2 * time.Second)
		w.scale(2)
		w.until(10*time.Second, "a ring of 2", w.running(2, w.generation()))
		time.Sleep(time.Second)
		got := page()
		for _, line := range []string{"training_rank 0", "training_world_size 2", "training_ring_generation 262146", `training_ring_changes_total{reason="start"} 1`, `training_ring_changes_total{reason="scale_up"} 1`} {
			if !strings.Contains(got, line) {
				t.Errorf("the page lacks %s:\n%s", line, got)
			}
		}
		for _, s := range w.all[0].agent.Samples() {
			if s.Name == stats.RingGenerationAge && (s.Value < 1 || s.Value > 1.2) {
				t.Errorf("the generation's age is %v s, want one second", s.Value)
			}
			if s.Name == stats.StepDuration && (s.Value < 0.01 || s.Value > 0.02) {
				t.Errorf("a step took %v s, want 11 ms", s.Value)
			}
		}
	})
}

// A trainer that does not stop ends the process: nothing else would free its GPU.
func TestStuckTrainer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, ring.Config{})
		hold := make(chan struct{})
		defer close(hold)
		w.wrap = func(l *listTrainer) Trainer { return &stuck{listTrainer: l, hold: hold} }
		w.scale(1)
		k := w.all[0]
		w.until(10*time.Second, "a ring", w.running(1, ring.Generation{}))
		k.agent.Drain()
		began := time.Now()
		<-k.done
		if k.err == nil || !strings.Contains(k.err.Error(), ErrStuck.Error()) {
			t.Errorf("Run returned %v, want %v", k.err, ErrStuck)
		}
		if took := time.Since(began); took > 60*time.Second {
			t.Errorf("after %s, want the deadline of the drain and 30 s", took)
		}
	})
}

// stuck does not heed that Run is canceled.
type stuck struct {
	*listTrainer
	hold chan struct{}
}

func (s *stuck) Run(context.Context, *Session) (bool, error) { <-s.hold; return false, nil }

// A checkpoint that takes longer than the grace leaves room for is warned of once it is known.
func TestGrace(t *testing.T) {
	var log buffer
	cfg := Config{Ring: ring.Config{Job: "job-1"}, Self: Peer{ID: ring.ID{Pod: "u0", Boot: 1}}, Book: &Book{}, Logger: slog.New(slog.NewTextHandler(&log, nil)), Grace: 30 * time.Second}
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	a.checkGrace(14 * time.Second)
	if got := log.String(); got != "" {
		t.Errorf("14 s fit into 30 s, less 15: %s", got)
	}
	a.checkGrace(20 * time.Second)
	if got := log.String(); !strings.Contains(got, "raise terminationGracePeriodSeconds") || !strings.Contains(got, "terminationGracePeriodSeconds=30 want=36 checkpoint=20s") {
		t.Errorf("20 s do not fit: %q", got)
	}
	cfg.Grace = 9 * time.Second
	if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), "grace 9s: want at least 10s") {
		t.Errorf("a grace of 9 s: %v", err)
	}
}

// /healthz is well whether the worker is in a ring or not, and not when the agent hangs; /status is for tools.
func TestHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, ring.Config{})
		w.scale(1)
		get := func(path string) (int, string) {
			r := httptest.NewRecorder()
			w.all[0].agent.Handler().ServeHTTP(r, httptest.NewRequest("GET", path, nil))
			return r.Code, r.Body.String()
		}
		if code, body := get("/healthz"); code != 200 || body != "ok\n" {
			t.Errorf("before there is a ring: %d %s", code, body)
		}
		w.until(10*time.Second, "a ring", w.running(1, ring.Generation{}))
		var s Status
		if code, body := get("/status"); code != 200 || json.Unmarshal([]byte(body), &s) != nil || s.Phase != ring.Running || s.World != 1 || s.Coordinator != 0 || s.Ring == nil || s.Ring.Desired != 1 {
			t.Errorf("in a ring: %d %s", code, body)
		}
		if code, body := get("/metrics"); code != 200 || !strings.Contains(body, "training_world_size 1\n") {
			t.Errorf("in a ring: %d %s", code, body)
		}
		w.all[0].kill()
		<-w.all[0].done
		time.Sleep(11 * time.Second)
		if code, body := get("/healthz"); code != 503 || !strings.Contains(body, "has not looked at its ring for 11s") {
			t.Errorf("of an agent that hangs: %d %s", code, body)
		}
	})
}
