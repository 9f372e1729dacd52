package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/capstan-gpu/capstan/test/fakegpu/state"
)

// fakegpu runs the command in this process and returns what it printed.
func fakegpu(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out strings.Builder
	c := command()
	c.SetArgs(args)
	c.SetOut(&out)
	c.SetErr(&out)
	err := c.ExecuteContext(t.Context())
	return out.String(), err
}

func TestPinAndLetGo(t *testing.T) {
	dir := t.TempDir()
	f, err := state.Create(filepath.Join(dir, "state"), "node-1", 2, state.Profiles[0])
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, args := range [][]string{{"set", "--utilization", "95"}, {"set", "--gpu", state.UUID("node-1", 1), "--power", "700"}, {"unset", "--gpu", "0"},
		{"call", "nvmlDeviceGetUUID", "--gpu", "1", "--code", "15"}} {
		if out, err := fakegpu(t, append([]string{"--dir", dir}, args...)...); err != nil || out != "" {
			t.Errorf("fakegpu %v: %v %s", args, err, out)
		}
	}
	first, second := f.GPU(0), f.GPU(1)
	if first.Utilization != 0 || first.Pinned != 0 || second.Utilization != 95 || second.PowerMilliwatts != 700_000 {
		t.Errorf("GPU 0 shows %d %% (pinned %d), GPU 1 %d %%, %d mW", first.Utilization, first.Pinned, second.Utilization, second.PowerMilliwatts)
	}
	out, err := fakegpu(t, "--dir", dir, "show")
	if err != nil || !strings.Contains(out, state.UUID("node-1", 1)+"  95 %") || !strings.Contains(out, "pinned") {
		t.Errorf("show: %v\n%s", err, out)
	}
}

func TestErrorsSayWhatToDo(t *testing.T) {
	dir := t.TempDir()
	for want, args := range map[string][]string{
		"start the daemon first":   {"--dir", dir, "show"},
		"--node is empty":          {"--dir", dir, "daemon", "--node", ""},
		"--replicas 0: must be 1":  {"--dir", dir, "daemon", "--node", "n", "--replicas", "0"},
		"nothing to set":           {"--dir", dir, "set"},
		"make -C test/fakegpu/lib": {"--dir", dir, "library", "install", "--library", "/none"},
	} {
		if out, err := fakegpu(t, args...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("fakegpu %v: %v %s; want %q", args, err, out, want)
		}
	}
}

func TestSharesAddUpAndGrowOld(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	for name, c := range map[string]struct {
		text string
		age  time.Duration
	}{"GPU-a::0": {"0.25\n", 0}, "GPU-a::1": {"0.5", time.Second}, "GPU-b": {"0.9\n", 4 * time.Second}, "GPU-c": {"NaN\n", 0}, "GPU-d": {"7\n", 0}, "GPU-e": {"", 0}, "GPU-f": {"1\n", 2 * time.Minute}} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(c.text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, now, now.Add(-c.age)); err != nil {
			t.Fatal(err)
		}
	}
	got, err := readShares(dir, now)
	if err != nil || fmt.Sprint(got) != "map[GPU-a:0.75]" {
		t.Errorf("shares %v, %v; want only GPU-a, 0.75", got, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "GPU-f")); !os.IsNotExist(err) {
		t.Error("the file of a worker that is long gone is still there")
	}
}

func TestDeviceIDs(t *testing.T) {
	f, err := state.Create(filepath.Join(t.TempDir(), "state"), "n", 2, state.Profiles[0])
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got := deviceIDs(f, 1); len(got) != 2 || got[0] != state.UUID("n", 0) {
		t.Errorf("unshared: %v", got)
	}
	if got := deviceIDs(f, 3); len(got) != 6 || got[4] != state.UUID("n", 1)+"::1" {
		t.Errorf("shared: %v", got)
	}
	if err := f.Update(1, func(g *state.GPU) { g.SetInstances("3g.40gb", "1g.10gb") }); err != nil {
		t.Fatal(err)
	}
	g := f.GPU(1)
	if got := deviceIDs(f, 1); len(got) != 3 || got[2] != g.Instances[1].UUID() {
		t.Errorf("with MIG on the second GPU: %v; want the first GPU and two instances", got)
	}
}

func TestFollowEnds(t *testing.T) {
	f, err := state.Create(filepath.Join(t.TempDir(), "state"), "n", 1, state.Profiles[0])
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := follow(ctx, f, t.TempDir()); err != nil {
		t.Error(err)
	}
}
