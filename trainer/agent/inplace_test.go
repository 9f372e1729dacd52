package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// The test's binary is its own command: with this in the environment it is a trainer of one worker that re-rings in place.
const childEnv = "AGENT_TEST_CHILD"

func TestMain(m *testing.M) {
	if how := os.Getenv(childEnv); how != "" {
		os.Exit(child(how))
	}
	code := m.Run()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, "after the tests:", err)
		code = 1
	}
	os.Exit(code)
}

// child does a step every 2 ms. how says what is wrong with it.
func child(how string) int {
	if how == "no socket" {
		return 0
	}
	conn, err := net.Dial("unix", os.Getenv(SocketEnv))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	say := func(a Answer) { line, _ := json.Marshal(a); conn.Write(append(line, '\n')) }
	var step, wish, run atomic.Int64
	lines := bufio.NewScanner(conn)
	for lines.Scan() {
		var c Command
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		switch c.Do {
		case "warm":
			step.Store(10)
			say(Answer{ID: c.ID, Step: 10})
		case "enter":
			if how == "lost" {
				rank := 1
				say(Answer{ID: c.ID, Lost: &rank})
				continue
			}
			wish.Store(0)
			step.Store(c.Step)
			say(Answer{ID: c.ID, Hash: fmt.Sprintf("%016x", 1000*len(c.Members)+len(c.Environment))})
		case "wish":
			wish.Store(c.Step)
		case "run":
			run.Store(c.ID)
			go func() {
				for run.Load() == c.ID {
					time.Sleep(2 * time.Millisecond)
					n := step.Add(1)
					at := wish.Load()
					say(Answer{Step: n, QuiesceAt: at, Compute: 0.002})
					switch {
					case how == "dies" && n == 15:
						fmt.Fprintln(os.Stderr, "RuntimeError: loss is NaN")
						os.Exit(1)
					case how == "garbage" && n == 15:
						conn.Write([]byte("hello\n"))
					case at > 0 && n >= at:
						run.Store(0)
						say(Answer{ID: c.ID})
					case n == 1000:
						run.Store(0)
						say(Answer{ID: c.ID, Finished: true})
					}
				}
			}()
		case "abort":
			if how == "deaf" {
				continue
			}
			run.Store(0)
			time.Sleep(5 * time.Millisecond)
			say(Answer{ID: c.ID, Step: step.Load()})
		case "save":
			os.WriteFile(os.Getenv("CHECKPOINT"), fmt.Appendln(nil, step.Load()), 0o600)
			say(Answer{ID: c.ID, Step: step.Load()})
		default:
			say(Answer{ID: c.ID})
		}
	}
	return 0
}

func startChild(t *testing.T, how string) *InPlace {
	t.Helper()
	t.Setenv(childEnv, how)
	log := &buffer{}
	p, err := NewInPlace(ProcessConfig{
		Command: []string{os.Args[0]}, Reaper: testReaper, Stdout: log, Stderr: log, Logger: slog.New(slog.DiscardHandler), StopTimeout: time.Second, AbortTimeout: 300 * time.Millisecond,
		Environment: func(e Entry) ([]string, error) { return []string{"RANK=" + fmt.Sprint(e.Rank), "MASTER_PORT=1"}, nil },
	}, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

func twoMembers(count uint32, step int64) Entry {
	return Entry{Generation: ring.Generation{Term: 1, Count: count}, Rank: 0, Step: step, Members: []Peer{
		{ID: ring.ID{Ordinal: 0, Pod: "u0", Boot: 1}, Address: "10.0.0.1:29400"}, {ID: ring.ID{Ordinal: 1, Pod: "u1", Boot: 1}, Address: "10.0.0.2:29400"}}}
}

// One process lives through generations, an abort and a save, and is the same at the end.
func TestInPlace(t *testing.T) {
	checkpoint := filepath.Join(t.TempDir(), "checkpoint")
	t.Setenv("CHECKPOINT", checkpoint)
	p := startChild(t, "well")
	step, err := p.Warm(t.Context())
	if step != 10 || err != nil {
		t.Fatalf("Warm = %d, %v; want 10", step, err)
	}
	pid := p.PID()
	e := twoMembers(1, 10)
	hash, err := p.Enter(t.Context(), e)
	if hash != 2002 || err != nil { // two members, two variables
		t.Fatalf("Enter = %d, %v; want 2002", hash, err)
	}
	steps := make(chan ring.StepDone, 1000)
	s := session(e, func(e ring.Event, _ ...Attached) { steps <- e.(ring.StepDone) })
	time.AfterFunc(30*time.Millisecond, func() { s.wish.Store(30) })
	if finished, err := p.Run(t.Context(), s); finished || err != nil || !s.boundary.Load() {
		t.Fatalf("Run = %t, %v, boundary %t; want that it was stopped at one", finished, err, s.boundary.Load())
	}
	close(steps)
	at := int64(10)
	for d := range steps {
		if at++; d.Step != at || d.Compute != 2*time.Millisecond {
			t.Errorf("told of %+v, want step %d", d, at)
		}
	}
	if at < 30 {
		t.Errorf("it stopped after step %d, want 30 or later", at)
	}
	if err := p.Park(t.Context()); err != nil {
		t.Error(err)
	}
	if saved, err := p.Save(t.Context()); saved != at || err != nil || waitFor(t, checkpoint) != fmt.Sprint(at) {
		t.Errorf("Save = %d, %v; want %d", saved, err, at)
	}

	if _, err := p.Enter(t.Context(), twoMembers(2, at)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if _, err := p.Run(ctx, session(twoMembers(2, at), func(ring.Event, ...Attached) {})); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a canceled Run: %v", err)
	}
	aborted, err := p.Abort(t.Context())
	if aborted <= at || err != nil {
		t.Errorf("Abort = %d, %v; want more than %d", aborted, err, at)
	}

	if _, err := p.Enter(t.Context(), twoMembers(3, 990)); err != nil {
		t.Fatal(err)
	}
	if finished, err := p.Run(t.Context(), session(twoMembers(3, 990), func(ring.Event, ...Attached) {})); !finished || err != nil {
		t.Errorf("Run = %t, %v; want that the job is done", finished, err)
	}
	if step, err := p.Warm(t.Context()); step != 10 || err != nil || p.PID() != pid {
		t.Errorf("Warm again = %d, %v, PID %d; want 10 of the same process, %d", step, err, p.PID(), pid)
	}
}

// What is wrong with a command is told as it is, and a new one can be started.
func TestInPlaceFails(t *testing.T) {
	for _, c := range []struct{ how, err string }{
		{"dies", "exit status 1: RuntimeError: loss is NaN"},
		{"garbage", "the command says what is no answer"},
		{"lost", "connection to ordinal 1"},
		{"no socket", "never opened the socket in CAPSTAN_SOCKET; without --in-place it need not"},
	} {
		t.Run(c.how, func(t *testing.T) {
			p := startChild(t, c.how)
			e := twoMembers(1, 10)
			_, err := p.Warm(t.Context())
			if err == nil {
				_, err = p.Enter(t.Context(), e)
			}
			if err == nil {
				_, err = p.Run(t.Context(), session(e, func(ring.Event, ...Attached) {}))
			}
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%v, want %q", err, c.err)
			}
			if lost, ok := errors.AsType[*PeerError](err); ok != (c.how == "lost") || ok && lost.Peer.Ordinal != 1 {
				t.Errorf("%v is a peer's: %t", err, ok)
			}
			t.Setenv(childEnv, "well")
			if c.how == "lost" {
				return // the state is still good
			}
			if step, err := p.Warm(t.Context()); step != 10 || err != nil {
				t.Errorf("Warm again = %d, %v", step, err)
			}
		})
	}
	p := startChild(t, "deaf")
	if _, err := p.Warm(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Abort(t.Context()); err == nil || !strings.Contains(err.Error(), "did not abort within 300ms") || p.PID() != 0 {
		t.Errorf("a deaf command: %v, PID %d; want that it is killed", err, p.PID())
	}
}
