// Package python_test runs the tests of the Python helper, and holds its description of the protocol against the agent's own types.
package python_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/capstan-gpu/capstan/trainer/agent"
)

// TestPython runs tests/test_*.py with the Python in $PYTHON, or python3. Those that need PyTorch are skipped where it has none.
func TestPython(t *testing.T) {
	python := os.Getenv("PYTHON")
	if python == "" {
		python = "python3"
	}
	if out, err := exec.Command(python, "-c", "import sys; sys.exit(sys.version_info < (3, 10) and 'older than 3.10: ' + sys.version)").CombinedOutput(); err != nil {
		t.Skipf("no Python for the tests: %v %s; PYTHON=… names another one", err, out)
	}
	for _, file := range []string{"test_capstan.py", "test_torch.py"} {
		t.Run(file, func(t *testing.T) {
			run := exec.CommandContext(t.Context(), python, "-B", "-m", "unittest", "-v", "tests/"+file)
			out, err := run.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			if why := regexp.MustCompile(`skipped '(.*)'`).FindSubmatch(out); why != nil {
				t.Skipf("%s; PYTHON=… names another one", why[1])
			}
			if !bytes.Contains(out, []byte("... ok\n")) {
				t.Fatalf("no test was run:\n%s", out)
			}
		})
	}
}

// The lines in the README are those that the agent sends and understands: each command byte for byte, each answer without a name that
// the agent does not know.
func TestReadme(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		said, found := strings.CutPrefix(line, "> {")
		if found {
			var c agent.Command
			strict(t, "{"+said, &c)
			again, err := json.Marshal(c)
			if err != nil || string(again) != "{"+said {
				t.Errorf("the agent sends\n%s, %v; the README has\n{%s", again, err, said)
			}
			seen[c.Do]++
		} else if said, found = strings.CutPrefix(line, "< {"); found {
			var a agent.Answer
			strict(t, "{"+said, &a)
			seen["answer"]++
		}
	}
	for _, do := range []string{"warm", "enter", "run", "wish", "park", "abort", "save", "answer"} {
		if seen[do] == 0 {
			t.Errorf("the README shows no %s", do)
		}
	}
	if !strings.Contains(string(text), "`"+agent.SocketEnv+"`") {
		t.Errorf("the README does not name %s", agent.SocketEnv)
	}
}

func strict(t *testing.T, line string, into any) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(line))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		t.Errorf("%s: %v", line, err)
	}
}
