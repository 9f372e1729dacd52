// Package remote holds the proof that rules give the same by real engines, asked by their HTTP API, as by the embedded one.
//
// The engines are built from their Go modules, each in a module of its own here, so that what they need is nobody else's; once built they
// are kept outside the checkout. CAPSTAN_REMOTE=1 asks for these tests: without it they are skipped, for a build takes many minutes.
package remote

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/capstan-gpu/capstan/test/kept"
)

// binary is an engine that is built from the module in the folder of its name.
type binary struct{ name, pkg, tags string }

var (
	// Without the discovery of targets in clouds it is a third less to compile.
	prometheus      = binary{"prometheus", "github.com/prometheus/prometheus/cmd/prometheus", "remove_all_sd"}
	victoriaMetrics = binary{"victoriametrics", "github.com/VictoriaMetrics/VictoriaMetrics/app/victoria-metrics", ""}
)

// required skips a test that nobody asked for.
func required(t *testing.T) {
	t.Helper()
	if os.Getenv("CAPSTAN_REMOTE") == "" {
		t.Skip("CAPSTAN_REMOTE is not set: building the engines takes many minutes, the first time")
	}
}

// build gives the path of the engine, which is built unless it is there already. What it is made from is in the name.
func (b binary) build(t *testing.T) string {
	t.Helper()
	toolchain, err := kept.Toolchain("../..")
	if err != nil {
		t.Fatal(err)
	}
	key, err := kept.Key(toolchain, b.name, []string{"go.mod", "go.sum"}, []string{b.pkg + " " + b.tags})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(kept.Folder(), "remote-"+key, b.name)
	if _, err := os.Stat(path); err == nil {
		return path
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if err := kept.Build(t.Context(), toolchain, b.name, b.pkg, path, "-tags", b.tags, "-ldflags", "-s -w"); err != nil {
		t.Fatal(err)
	}
	t.Logf("built %s in %s", b.name, time.Since(begin).Round(time.Second))
	return path
}

// The engine that the embedded one is compared with is of the same version.
func TestVersions(t *testing.T) {
	const module = "github.com/prometheus/prometheus v"
	version := func(file string) string {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			if _, version, found := strings.Cut(line, module); found {
				return strings.Fields(version)[0]
			}
		}
		t.Fatalf("%s does not name %s", file, module)
		return ""
	}
	if ours, theirs := version("../../go.mod"), version("prometheus/go.mod"); ours != theirs {
		t.Errorf("embedded is %s, remote is %s: go get -tool %s@v%s in test/remote/prometheus", ours, theirs, prometheus.pkg, ours)
	}
}
