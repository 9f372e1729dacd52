// Package remote holds the proof that rules give the same by real engines, asked by their HTTP API, as by the embedded one.
//
// The engines are built from their Go modules, each in a module of its own here, so that what they need is nobody else's; once built they
// are kept outside the checkout. CAPSTAN_REMOTE=1 asks for these tests: without it they are skipped, for a build takes many minutes.
package remote

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
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

// build gives the path of the engine, which is built unless it is there already.
func (b binary) build(t *testing.T) string {
	t.Helper()
	path, err := b.cached()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err == nil {
		return path
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	toolchain, err := os.ReadFile("../../toolchain.txt")
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	// Whatever else the machine does goes first.
	cmd := exec.CommandContext(t.Context(), "nice", "-n", "15", "go", "build", "-o", path+".new", "-tags", b.tags, "-ldflags", "-s -w", b.pkg)
	cmd.Dir = b.name
	cmd.Env = append(os.Environ(), "GOTOOLCHAIN="+strings.TrimSpace(string(toolchain)), "GOFLAGS=-trimpath -buildvcs=false", "GOWORK=off", "CGO_ENABLED=0")
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Run(); err != nil {
		t.Fatalf("build %s: %v\n%s", b.name, err, output.String())
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	t.Logf("built %s in %s", b.name, time.Since(begin).Round(time.Second))
	return path
}

// cached is where the engine is kept. What it is made from is in the name: the toolchain and all versions.
func (b binary) cached() (string, error) {
	root := os.Getenv("CAPSTAN_CACHE")
	if root == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			dir = "/var/cache"
		}
		root = filepath.Join(dir, "capstan")
	}
	h := sha256.New()
	fmt.Fprintln(h, b.pkg, b.tags)
	for _, file := range []string{"../../toolchain.txt", filepath.Join(b.name, "go.mod"), filepath.Join(b.name, "go.sum")} {
		data, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("read what %s is made from: %w", b.name, err)
		}
		fmt.Fprintln(h, file, len(data))
		h.Write(data)
	}
	return filepath.Join(root, "remote-"+hex.EncodeToString(h.Sum(nil))[:12], b.name), nil
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
