package env

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// python is the interpreter in $PYTHON, if it has the module; else the test is skipped.
func python(t *testing.T, module string) string {
	t.Helper()
	python := cmp.Or(os.Getenv("PYTHON"), "python3")
	if _, err := exec.LookPath(python); err != nil {
		t.Skipf("no Python: %v; PYTHON=… names one", err)
	}
	find := "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
	if err := exec.Command(python, "-c", find, module).Run(); err != nil {
		t.Skipf("%s has no module %s; PYTHON=… names another one", python, module)
	}
	return python
}

// firstPort is one with which the generation's port is free.
func firstPort(t *testing.T, g ring.Generation) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port - Port(0, g)
}

// The frameworks themselves meet by what is written for them: each process sees its rank, the world, and a sum over all.
func TestFrameworksMeet(t *testing.T) {
	for _, c := range []struct {
		framework    Framework
		module       string
		pods, locals int
	}{
		{PyTorch, "torch", 3, 1},
		{PyTorch, "torch", 2, 2},
		{TensorFlow, "tensorflow", 1, 1},
		{TensorFlow, "tensorflow", 2, 1},
		{JAX, "jax", 2, 1},
	} {
		t.Run(fmt.Sprintf("%s-%dx%d", c.framework, c.pods, c.locals), func(t *testing.T) {
			python := python(t, c.module)
			p := job(0)
			p.LocalProcesses, p.FirstPort = c.locals, firstPort(t, p.Generation)
			for rank := range c.pods {
				p.Members = append(p.Members, 2*rank)
				p.Hosts = append(p.Hosts, fmt.Sprintf("127.0.0.%d", 1+rank))
			}
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			// TensorFlow listens on all addresses of a machine: here its second worker needs a port of its own.
			clash := fmt.Sprintf("127.0.0.2:%d", Port(p.FirstPort, p.Generation))
			apart := strings.NewReplacer(clash, fmt.Sprintf("127.0.0.2:%d", Port(firstPort(t, p.Generation), p.Generation)))
			world := c.pods * c.locals
			var all sync.WaitGroup
			for n := range world {
				p.Rank, p.LocalRank = n/c.locals, n%c.locals
				e, err := Write(p, c.framework)
				if err != nil {
					t.Fatal(err)
				}
				if c.framework == TensorFlow {
					for i := range e.Set {
						e.Set[i] = apart.Replace(e.Set[i])
					}
				}
				all.Go(func() {
					var stdout, stderr bytes.Buffer
					run := exec.CommandContext(ctx, python, "testdata/meet.py", string(c.framework))
					// What a pod had for an older generation does no harm.
					run.Env = e.Apply(append(os.Environ(), `TF_CONFIG={"cluster":{"worker":["gone:1","gone:2"]},"task":{"type":"worker","index":1}}`, "RANK=77", "TORCHELASTIC_USE_AGENT_STORE=True"))
					run.Stdout, run.Stderr = &stdout, &stderr
					err := run.Run()
					lines := strings.Split(strings.TrimSpace(stdout.String()), "\n") // before the last one, a framework may talk
					if want := fmt.Sprintf("%d %d %d", n, world, world*(world+1)/2); err != nil || lines[len(lines)-1] != want {
						t.Errorf("process %d: %v, %q, want %q; it says:\n%s", n, err, lines, want, stderr.String())
					}
				})
			}
			all.Wait()
		})
	}
}

// TensorFlow reads each golden TF_CONFIG as it is meant.
func TestResolver(t *testing.T) {
	python := python(t, "tensorflow")
	var names []string
	var input, stderr bytes.Buffer
	var want []any
	for _, g := range goldens {
		e, err := Write(g.process, g.framework)
		if err != nil {
			t.Fatal(err)
		}
		line, err := e.value("TF_CONFIG")
		if err != nil {
			continue
		}
		var c any
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			t.Fatal(err)
		}
		names, want = append(names, g.name), append(want, c)
		input.WriteString(line + "\n")
	}
	run := exec.Command(python, "testdata/meet.py", "resolve")
	run.Stdin, run.Stderr = &input, &stderr
	out, err := run.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) != len(want) || len(want) < 10 {
		t.Fatalf("it read %d of %d", len(lines), len(want))
	}
	for i, line := range lines {
		var got any
		if err := json.Unmarshal([]byte(line), &got); err != nil {
			t.Fatal(err)
		}
		if diff := gocmp.Diff(want[i], got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", names[i], diff)
		}
	}
}
