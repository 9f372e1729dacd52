package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

var testReaper = func() *Reaper {
	r, err := NewReaper()
	if err != nil {
		panic(err)
	}
	return r
}()

// shell makes a Process of a shell script, which finds its folder in $DIR and what the environment says in $RANK and $WORLD.
func shell(t *testing.T, script string) (p *Process, dir string, log *buffer) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); testReaper.Run(ctx) }()
	dir, log = t.TempDir(), &buffer{}
	p, err := NewProcess(ProcessConfig{
		Command: []string{"/bin/sh", "-c", script}, Reaper: testReaper, Stdout: log, Stderr: log, Logger: slog.New(slog.DiscardHandler), StopTimeout: 2 * time.Second,
		Environment: func(e Entry) ([]string, error) {
			return []string{"DIR=" + dir, fmt.Sprintf("RANK=%d", e.Rank), fmt.Sprintf("WORLD=%d", len(e.Members))}, nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(); cancel(); <-done })
	return p, dir, log
}

func entry(count uint32, step int64) Entry {
	return Entry{Generation: ring.Generation{Term: 1, Count: count}, Rank: 1, Members: make([]Peer, 3), Step: step}
}

// waitFor waits for a file to say something.
func waitFor(t *testing.T, file string) string {
	t.Helper()
	for range 500 {
		if data, err := os.ReadFile(file); err == nil && strings.HasSuffix(string(data), "\n") {
			return strings.TrimSpace(string(data))
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("%s is not there after 5 s", file)
	return ""
}

func session(e Entry, deliver Deliver) *Session {
	return &Session{Generation: e.Generation, Step: e.Step, deliver: deliver}
}

func alive(pid string) bool {
	n, _ := strconv.Atoi(pid)
	return n > 0 && syscall.Kill(n, 0) == nil
}

// A generation ends with SIGTERM, in which the command saves; nothing that it started is left when the next one begins.
func TestProcess(t *testing.T) {
	p, dir, _ := shell(t, `
		echo $RANK of $WORLD > $DIR/world.tmp; mv $DIR/world.tmp $DIR/world
		trap 'echo saved > $DIR/saved; exit 0' TERM
		trap 'echo usr1 > $DIR/usr1' USR1
		sleep 1000 & echo $! > $DIR/helper                                    # in its group
		setsid sh -c 'sleep 1000 & echo $! > $DIR/daemon; trap "" TERM; wait' & # in a group of its own, and deaf
		while :; do sleep 0.05; done`)
	if step, err := p.Warm(t.Context()); step != 0 || err != nil {
		t.Fatalf("Warm = %d, %v", step, err)
	}
	e := entry(1, 40)
	if _, err := p.Enter(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	if got := waitFor(t, filepath.Join(dir, "world")); got != "1 of 3" {
		t.Errorf("the command knows %q, want 1 of 3", got)
	}
	helper, daemon := waitFor(t, filepath.Join(dir, "helper")), waitFor(t, filepath.Join(dir, "daemon"))
	p.Signal(syscall.SIGUSR1)
	waitFor(t, filepath.Join(dir, "usr1"))

	events := make(chan ring.Event, 10)
	s := session(e, func(e ring.Event, _ ...Attached) { events <- e })
	s.wish.Store(41)
	if finished, err := p.Run(t.Context(), s); finished || err != nil {
		t.Fatalf("Run = %t, %v; want that it was stopped", finished, err)
	}
	if got, want := <-events, (ring.StepDone{Generation: e.Generation, Step: 41, QuiesceAt: 41}); got != want {
		t.Errorf("told %+v, want %+v", got, want)
	}
	waitFor(t, filepath.Join(dir, "saved"))
	for _, pid := range []string{helper, daemon} {
		if alive(pid) {
			t.Errorf("process %s is left", pid)
		}
	}
	first := p.PID()
	if err := p.Park(t.Context()); err != nil || first != 0 {
		t.Errorf("Park: %v, PID %d", err, first)
	}
	if _, err := p.Enter(t.Context(), entry(2, 41)); err != nil || p.PID() == 0 {
		t.Errorf("the next generation: %v, PID %d", err, p.PID())
	}
}

// A command that does not heed SIGTERM is killed: late where it may be saving, soon where others wait.
func TestProcessDeaf(t *testing.T) {
	p, dir, _ := shell(t, `trap '' TERM; echo 1 > $DIR/up; while :; do sleep 0.05; done`)
	e := entry(1, 7)
	if _, err := p.Enter(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	waitFor(t, filepath.Join(dir, "up"))
	began := time.Now()
	step, err := p.Abort(t.Context())
	if took := time.Since(began); step != 7 || err != nil || took < time.Second || took > 3*time.Second {
		t.Errorf("Abort = %d, %v after %s; want 7 after a second", step, err, took)
	}
	if _, err := p.Enter(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	began = time.Now()
	if _, err := p.Run(ctx, session(e, nil)); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > time.Second {
		t.Errorf("a canceled Run: %v after %s", err, time.Since(began))
	}
	began = time.Now()
	p.Close()
	if took := time.Since(began); took < 2*time.Second || took > 4*time.Second || p.PID() != 0 {
		t.Errorf("Close took %s, want the 2 s of StopTimeout", took)
	}
}

// How a command ends: 0 is the job's end; anything else is a crash with its last words, unless it was to stop anyway.
func TestProcessEnds(t *testing.T) {
	for _, c := range []struct {
		name, script string
		wish         time.Duration // after it; 0 = never
		finished     bool
		err          string
		steps        int
	}{
		{name: "success", script: "exit 0", finished: true, steps: 1},
		{name: "a crash", script: "echo 'Traceback:' >&2; echo 'RuntimeError: CUDA out of memory' >&2; exit 3", err: "exit status 3: RuntimeError: CUDA out of memory"},
		{name: "killed", script: "kill -9 $$", err: "signal: killed"},
		{name: "a peer was stopped a moment before", script: "exit 1", wish: abate / 2, steps: 1},
		{name: "a daemon holds its output", script: "sleep 1000 & exit 0", finished: true, steps: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, _, _ := shell(t, c.script)
			e := entry(1, 10)
			if _, err := p.Enter(t.Context(), e); err != nil {
				t.Fatal(err)
			}
			steps := 0
			s := session(e, func(ring.Event, ...Attached) { steps++ })
			if c.wish > 0 {
				time.AfterFunc(c.wish, func() { s.wish.Store(11) })
			}
			finished, err := p.Run(t.Context(), s)
			if finished != c.finished || steps != c.steps || (err == nil) != (c.err == "") || err != nil && !strings.HasSuffix(err.Error(), c.err) {
				t.Errorf("Run = %t, %v with %d steps; want %t, %q, %d", finished, err, steps, c.finished, c.err, c.steps)
			}
		})
	}
	p, _, _ := shell(t, "")
	p.cfg.Command = []string{"/does/not/exist"}
	if _, err := p.Enter(t.Context(), entry(1, 0)); err == nil || !strings.Contains(err.Error(), "start /does/not/exist") {
		t.Errorf("a command that is not there: %v", err)
	}
	if _, err := NewProcess(ProcessConfig{}); err == nil || !strings.Contains(err.Error(), "after --") {
		t.Errorf("no command: %v", err)
	}
}

// Orphans are reaped, and a child of our own is left to whoever waits for it.
func TestReaper(t *testing.T) {
	p, dir, _ := shell(t, `(sh -c 'echo $$ > $DIR/orphan; sleep 0.2' &) ; sleep 1000`)
	if _, err := p.Enter(t.Context(), entry(1, 0)); err != nil {
		t.Fatal(err)
	}
	orphan := waitFor(t, filepath.Join(dir, "orphan"))
	for begun := time.Now(); alive(orphan); time.Sleep(10 * time.Millisecond) {
		if time.Since(begun) > 5*time.Second {
			t.Fatalf("the orphan %s is there after 5 s, dead or alive", orphan)
		}
	}
	for range 50 { // which die at once, while the reaper looks
		p, _, _ := shell(t, "exit 0")
		e := entry(1, 0)
		if _, err := p.Enter(t.Context(), e); err != nil {
			t.Fatal(err)
		}
		if finished, err := p.Run(t.Context(), session(e, func(ring.Event, ...Attached) {})); !finished || err != nil {
			t.Fatalf("Run = %t, %v; want its own end to be seen", finished, err)
		}
	}
}

func TestTail(t *testing.T) {
	var log buffer
	tail := &tail{to: &log}
	for _, s := range []string{"first\nsec", "ond\n", "\n  \n", strings.Repeat("x", 1000) + "\n"} {
		tail.Write([]byte(s))
	}
	if got := tail.last(); got != strings.Repeat("x", maxTail) {
		t.Errorf("the last line is %q", got)
	}
	tail.Write([]byte("end"))
	if got := tail.last(); got != "end" || !strings.HasSuffix(log.String(), "x\nend") {
		t.Errorf("the last line is %q, of %d bytes", got, len(log.String()))
	}
}
