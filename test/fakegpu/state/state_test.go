package state

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"
)

// The C side and the Go side have one layout: a small C program prints its offsets, and they are ours.
func TestLayoutIsThatOfTheHeader(t *testing.T) {
	compiler, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("needs a C compiler: apt-get install gcc")
	}
	var s layout
	var g GPU
	var in Instance
	var pr Process
	fields := []struct {
		c    string
		ours uintptr
	}{
		{"sizeof(struct fakegpu_state)", unsafe.Sizeof(s)},
		{"sizeof(struct fakegpu_gpu)", unsafe.Sizeof(g)},
		{"offsetof(struct fakegpu_state, driver_version)", unsafe.Offsetof(s.driver)},
		{"offsetof(struct fakegpu_state, gpus)", unsafe.Offsetof(s.gpus)},
		{"offsetof(struct fakegpu_state, faults)", unsafe.Offsetof(s.faults)},
		{"offsetof(struct fakegpu_state, counts)", unsafe.Offsetof(s.counts)},
		{"offsetof(struct fakegpu_state, calls)", unsafe.Offsetof(s.calls)},
		{"offsetof(struct fakegpu_state, log)", unsafe.Offsetof(s.log)},
		{"offsetof(struct fakegpu_gpu, uuid)", unsafe.Offsetof(g.uuid)},
		{"offsetof(struct fakegpu_gpu, bus_id)", unsafe.Offsetof(g.busID)},
		{"offsetof(struct fakegpu_gpu, utilization)", unsafe.Offsetof(g.Utilization)},
		{"offsetof(struct fakegpu_gpu, memory_used)", unsafe.Offsetof(g.MemoryUsed)},
		{"offsetof(struct fakegpu_gpu, energy_mj)", unsafe.Offsetof(g.EnergyMillijoules)},
		{"offsetof(struct fakegpu_gpu, clock_mhz)", unsafe.Offsetof(g.ClockMegahertz)},
		{"offsetof(struct fakegpu_gpu, pinned)", unsafe.Offsetof(g.Pinned)},
		{"offsetof(struct fakegpu_gpu, power_limit_mw)", unsafe.Offsetof(g.PowerLimit)},
		{"offsetof(struct fakegpu_gpu, mig)", unsafe.Offsetof(g.MIG)},
		{"offsetof(struct fakegpu_gpu, activity)", unsafe.Offsetof(g.Activity)},
		{"offsetof(struct fakegpu_gpu, samples)", unsafe.Offsetof(g.samples)},
		{"offsetof(struct fakegpu_gpu, fields)", unsafe.Offsetof(g.Fields)},
		{"offsetof(struct fakegpu_gpu, instances)", unsafe.Offsetof(g.Instances)},
		{"offsetof(struct fakegpu_gpu, processes)", unsafe.Offsetof(g.Processes)},
		{"sizeof(struct fakegpu_field)", unsafe.Sizeof(Field{})},
		{"offsetof(struct fakegpu_field, value)", unsafe.Offsetof(Field{}.Value)},
		{"sizeof(struct fakegpu_instance)", unsafe.Sizeof(in)},
		{"offsetof(struct fakegpu_instance, gpu_instance)", unsafe.Offsetof(in.GPUInstance)},
		{"offsetof(struct fakegpu_instance, placement)", unsafe.Offsetof(in.Placement)},
		{"offsetof(struct fakegpu_instance, memory_used)", unsafe.Offsetof(in.MemoryUsed)},
		{"offsetof(struct fakegpu_instance, activity)", unsafe.Offsetof(in.Activity)},
		{"sizeof(struct fakegpu_process)", unsafe.Sizeof(pr)},
		{"offsetof(struct fakegpu_process, timestamp_us)", unsafe.Offsetof(pr.TimestampMicros)},
		{"offsetof(struct fakegpu_process, gpu_instance)", unsafe.Offsetof(pr.GPUInstance)},
		{"offsetof(struct fakegpu_state, event_count)", unsafe.Offsetof(s.eventCount)},
		{"offsetof(struct fakegpu_state, events)", unsafe.Offsetof(s.events)},
		{"sizeof(struct fakegpu_event)", unsafe.Sizeof(event{})},
		{"offsetof(struct fakegpu_event, gpu)", unsafe.Offsetof(event{}.gpu)},
		{"FAKEGPU_FIELDS", MaxFields}, {"FAKEGPU_INSTANCES", MaxInstances}, {"FAKEGPU_PROCESSES", MaxProcesses}, {"FAKEGPU_EVENTS", maxEvents},
		{"FAKEGPU_VERSION", Version}, {"FAKEGPU_GPUS", MaxGPUs}, {"FAKEGPU_SAMPLES", Samples}, {"FAKEGPU_LOG", logSize}, {"FAKEGPU_SLOTS", slots},
	}
	var program, want strings.Builder
	program.WriteString("#include <stdio.h>\n#include <stddef.h>\n#include \"fakegpu.h\"\n#define X(name) puts(#name);\nint main(void) {\n")
	for _, f := range fields {
		fmt.Fprintf(&program, "printf(\"%%s %%zu\\n\", %q, (size_t)(%s));\n", f.c, f.c)
		fmt.Fprintf(&want, "%s %d\n", f.c, f.ours)
	}
	program.WriteString("FAKEGPU_FUNCTIONS(X)\nreturn 0; }\n")
	want.WriteString(strings.Join(Functions, "\n") + "\n")
	dir := t.TempDir()
	source := filepath.Join(dir, "layout.c")
	if err := os.WriteFile(source, []byte(program.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(compiler, "-I", "../lib", "-o", filepath.Join(dir, "layout"), source).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	got, err := exec.Command(filepath.Join(dir, "layout")).Output()
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want.String() {
		t.Errorf("the header says\n%sstate.go says\n%s", got, want.String())
	}
}

func create(t *testing.T, gpus int) *File {
	t.Helper()
	f, err := Create(filepath.Join(t.TempDir(), "state"), "node-1", gpus, Profiles[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestCreateKeepsTheSameGPUs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	f, err := Create(path, "node-1", 2, Profiles[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Update(1, func(g *GPU) { g.Utilization = 42 }); err != nil {
		t.Fatal(err)
	}
	f.Close()
	for _, c := range []struct {
		node string
		gpus int
		want uint32
	}{{"node-1", 2, 42}, {"node-1", 3, 0}, {"node-2", 3, 0}} {
		f, err := Create(path, c.node, c.gpus, Profiles[0])
		if err != nil {
			t.Fatal(err)
		}
		if got := f.GPU(1).Utilization; got != c.want {
			t.Errorf("after Create(%s, %d) GPU 1 shows %d, want %d", c.node, c.gpus, got, c.want)
		}
		f.Close()
	}
}

func TestUUIDs(t *testing.T) {
	seen := map[string]bool{}
	for _, node := range []string{"node-1", "node-2"} {
		for i := range MaxGPUs {
			u := UUID(node, i)
			if len(u) != len("GPU-00000000-0000-0000-0000-000000000000") || seen[u] {
				t.Errorf("UUID(%s, %d) = %s: wrong length, or given twice", node, i, u)
			}
			seen[u] = true
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	if err := os.WriteFile(path, make([]byte, 100), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path); err == nil || !strings.Contains(err.Error(), "100 bytes") {
		t.Errorf("a short file: %v", err)
	}
	if err := os.WriteFile(path, make([]byte, unsafe.Sizeof(layout{})), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path); err == nil || !strings.Contains(err.Error(), "no state file") {
		t.Errorf("a file of zeros: %v", err)
	}
}

func TestFailNamesWhatThereIs(t *testing.T) {
	f := create(t, 1)
	if err := f.Fail("nvmlDeviceGetMood", 0, 15, 0, 0); err == nil || !strings.Contains(err.Error(), "nvmlDeviceGetUUID") {
		t.Errorf("an unknown function: %v", err)
	}
	if err := f.Fail("nvmlDeviceGetUUID", 64, 15, 0, 0); err == nil {
		t.Error("GPU 64 is taken")
	}
	if err := f.Fail("nvmlDeviceGetUUID", 0, 15, time.Second, 3); err != nil {
		t.Error(err)
	}
}
