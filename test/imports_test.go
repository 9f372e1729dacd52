// Package test holds the rules of the house that are about all of it: who may import whom, and that every package says what it is for.
package test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/capstan-gpu/capstan"

// fence keeps a package, or all below it, out of every shipped package but a few. Do not change this table to make a build pass:
// change the code, or find a reason that belongs here.
type fence struct {
	what string   // an import path; with /... all below it, too
	only []string // packages of ours that may import it, likewise
	why  string
}

var fences = []fence{
	{"github.com/NVIDIA/go-nvml/...", []string{"exporter/gpu"}, "everything else must build without cgo"},
	{"C", []string{"exporter/gpu"}, "everything else must build without cgo"},
	{"k8s.io/client-go/...", []string{"adapter", "adapter/api", "adapter/tls", "adapter/workloads", "adapter/collect", "cmd/capstan-adapter", "trainer/agent", "cmd/capstan-agent", "cmd/capstan-trainer"}, "the exporter has no rights in the API server and no client for it"},
	{"k8s.io/...", []string{"adapter", "adapter/...", "exporter/podmap", "cmd/capstan-adapter", "trainer/agent", "cmd/capstan-agent", "cmd/capstan-trainer"}, "what decides must be quick to build and test, and know nothing of Kubernetes' types"},
	{"sigs.k8s.io/custom-metrics-apiserver/...", []string{"adapter", "adapter/api"}, "serving is one stage"},
	{"github.com/prometheus/prometheus/...", []string{"adapter", "adapter/...", "rules/..."}, "the exporter stays small"},
	{"github.com/prometheus/client_golang/...", []string{"exporter", "adapter", "adapter/...", "cmd/capstan-exporter", "cmd/capstan-adapter"}, "stages return values, not metrics"},
	{"os/exec", []string{"trainer/agent"}, "only the agent that wraps a training command starts processes"},
	{"testing", nil, "what is shipped holds no test code"},
	{module + "/test/...", nil, "what is shipped holds no test code"},
	{module + "/exporter/...", []string{"exporter", "exporter/...", "cmd/capstan-exporter"}, "exporter and adapter meet only in metricname"},
	{module + "/adapter/...", []string{"adapter", "adapter/...", "cmd/capstan-adapter", "rules/reading", "rules/ruletest"}, "exporter and adapter meet only in metricname"},
	{module + "/trainer/agent", []string{"cmd/capstan-agent", "cmd/capstan-trainer", "trainer/reference"}, "the ring's core knows nothing of what drives it"},
	{module + "/trainer/ring", []string{"trainer/agent", "trainer/reference", "trainer/env", "cmd/capstan-agent", "cmd/capstan-trainer"}, "allreduce moves bytes and knows no membership"},
	{module + "/trainer/stream", []string{"cmd/capstan-trainer"}, "the stand-in is nobody's library"},
}

// pure packages import nothing that does I/O or keeps time running: their inputs are arguments, now included.
var pure = []string{"hpa", "rules", "rules/document", "rules/export", "metricname", "trainer/ring", "trainer/env"}

var notPure = []string{"os", "net", "net/http", "os/exec", "os/signal", "syscall", "log/slog", "context", "k8s.io/client-go/kubernetes"}

// notShipped are the folders that no user's binary comes from: the fences are not about them.
var notShipped = []string{"test", "test/...", "images", "images/...", "dashboards", "dashboards/...", "deploy", "deploy/...", "adapter/api/apitest"}

type goPackage struct {
	ImportPath, Name, Doc string
	GoFiles, CgoFiles     []string
	Imports               []string
}

// packages lists ours, as they are compiled with and without cgo.
func packages(t *testing.T) (all []goPackage) {
	t.Helper()
	for _, cgo := range []string{"0", "1"} {
		cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Name,Doc,GoFiles,CgoFiles,Imports", "./...")
		cmd.Dir = ".."
		cmd.Env = append(cmd.Environ(), "CGO_ENABLED="+cgo)
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("go list: %v", err)
		}
		decoder := json.NewDecoder(strings.NewReader(string(out)))
		for {
			var p goPackage
			if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			all = append(all, p)
		}
	}
	if len(all) < 40 {
		t.Fatalf("go list finds %d packages: too few to be true", len(all))
	}
	return all
}

func matches(patterns []string, path string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		below, ok := strings.CutSuffix(p, "/...")
		return path == p || ok && (path == below || strings.HasPrefix(path, below+"/"))
	})
}

// broken says which rules the imports of one package break.
func broken(p goPackage) (problems []string) {
	name := strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
	if matches(notShipped, name) {
		return nil
	}
	for _, imported := range p.Imports {
		for _, f := range fences {
			if matches([]string{f.what}, imported) && !matches(f.only, name) {
				problems = append(problems, fmt.Sprintf("%s imports %s: %s", name, imported, f.why))
			}
		}
		if matches(pure, name) && matches(notPure, imported) {
			problems = append(problems, fmt.Sprintf("%s imports %s: it is pure; I/O and clocks are its caller's", name, imported))
		}
	}
	return problems
}

func TestImports(t *testing.T) {
	for _, p := range packages(t) {
		for _, problem := range broken(p) {
			t.Error(problem)
		}
	}
}

// The check can fail.
func TestImportsFinds(t *testing.T) {
	for _, p := range []goPackage{
		{ImportPath: module + "/exporter", Imports: []string{"k8s.io/client-go/kubernetes"}},
		{ImportPath: module + "/exporter", Imports: []string{module + "/adapter/store"}},
		{ImportPath: module + "/rules", Imports: []string{"os"}},
		{ImportPath: module + "/adapter", Imports: []string{module + "/test/rig"}},
		{ImportPath: module + "/trainer/stats", Imports: []string{"os/exec"}},
		{ImportPath: module + "/exporter", Imports: []string{"C"}},
	} {
		if len(broken(p)) == 0 {
			t.Errorf("%s may import %v", p.ImportPath, p.Imports)
		}
	}
	if problems := broken(goPackage{ImportPath: module + "/test/rig", Imports: []string{"os/exec", "k8s.io/client-go/kubernetes"}}); len(problems) > 0 {
		t.Errorf("test code is fenced: %v", problems)
	}
}

// Every package says what it is for, and the table is about packages that exist.
func TestPackagesAreDocumented(t *testing.T) {
	exists := map[string]bool{}
	for _, p := range packages(t) {
		exists[strings.TrimPrefix(p.ImportPath, module+"/")] = true
		if p.Doc == "" && len(p.GoFiles)+len(p.CgoFiles) > 0 {
			t.Errorf("%s has no package comment", p.ImportPath)
		}
	}
	for _, f := range fences {
		for _, name := range append(f.only, pure...) {
			if !strings.HasSuffix(name, "/...") && !exists[name] {
				t.Errorf("the table names %s, which does not exist", name)
			}
		}
	}
}

// Every test that docs/field-reports.md names exists.
func TestFieldReportsAreTests(t *testing.T) {
	page, err := os.ReadFile("../docs/field-reports.md")
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile("`((?:Test|Fuzz)[A-Za-z0-9]+)`").FindAllStringSubmatch(string(page), -1)
	if len(names) < 30 {
		t.Fatalf("the page names %d tests", len(names))
	}
	for _, n := range names {
		if out, err := exec.Command("git", "grep", "-q", "func "+n[1]+"(", "--", ":/*_test.go").CombinedOutput(); err != nil {
			t.Errorf("there is no %s: %v %s", n[1], err, out)
		}
	}
}
