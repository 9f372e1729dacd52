//go:build linux && cgo

package gpu

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/capstan-gpu/capstan/test/fakegpu/state"
)

// Each of these runs in a process of its own: a process cannot swap the library that it has loaded. TEST_READER holds the name of
// the scenario that the child plays.
func TestMain(m *testing.M) {
	if name := os.Getenv("TEST_READER"); name != "" {
		scenarios[name]()
		return
	}
	dir, err := os.MkdirTemp("", "libraries")
	if err != nil {
		panic(err)
	}
	libraries.dir = dir
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

var libraries = struct {
	dir    string // of this run
	byName map[string]string
}{byName: map[string]string{}}

// compiled makes the simulated libnvidia-ml.so.1 in a variant, once.
func compiled(t *testing.T, variant string) string {
	t.Helper()
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("needs a C compiler: apt-get install gcc make")
	}
	path := filepath.Join(libraries.dir, variant, "libnvidia-ml.so.1")
	if libraries.byName[variant] != "" {
		return path
	}
	libraries.byName[variant] = path
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("make", "-s", "-C", "../../test/fakegpu/lib", "VARIANT="+variant, "OUT="+path, path).CombinedOutput(); err != nil {
		t.Fatalf("compile the library: %v\n%s", err, out)
	}
	return path
}

// play runs a scenario against a library and a state file, and returns what it printed.
func play(t *testing.T, scenario, lib, stateFile string, env ...string) string {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), "TEST_READER="+scenario, "TEST_LIBRARY="+lib, "FAKEGPU_STATE="+stateFile), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", scenario, err, out)
	}
	return string(out)
}

func newState(t *testing.T, gpus int) (*state.File, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "state")
	f, err := state.Create(path, "node-1", gpus, state.Profiles[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f, path
}

func say(words ...string) { os.Stdout.WriteString(strings.Join(words, " ") + "\n") }

func childReader() *Reader {
	return New(Config{LibraryPath: os.Getenv("TEST_LIBRARY"), Detail: os.Getenv("TEST_VERBOSE") != ""})
}

func describe(r Reading) {
	switch {
	case errors.Is(r.Err, ErrRestart):
		say("restart:", r.Err.Error())
	case r.Err != nil:
		say("error:", r.Err.Error())
	}
	for _, d := range r.Devices {
		words := []string{d.UUID, "by", d.UtilizationSource, "up"}
		if !d.Up {
			words = append(words, "no", d.Reason)
		}
		if d.MemoryReserved != nil {
			words = append(words, "reserved")
		}
		if d.EnergyJoules != nil {
			words = append(words, "energy")
		}
		say(words...)
		if os.Getenv("TEST_VERBOSE") != "" {
			detail(d)
		}
	}
}

func detail(d Device) {
	value := func(v *float64) string {
		if v == nil {
			return "-"
		}
		return fmt.Sprintf("%.1f", *v)
	}
	activity := func(l Load) string {
		if l.Activity == nil {
			return "no counters"
		}
		seconds := func(v *float64) string {
			if v == nil || l.Activity.Observed == 0 {
				return "-"
			}
			return fmt.Sprintf("%.1f", *v/l.Activity.Observed)
		}
		return "sm " + seconds(l.Activity.SM) + " tensor " + seconds(l.Activity.Tensor) + " dram " + seconds(l.Activity.DRAM)
	}
	say(" ", activity(d.Load))
	say("  power", value(d.PowerWatts), "instant", value(d.PowerInstantWatts), "of", value(d.PowerLimitWatts), "memory", value(d.MemoryTemperatureCelsius), "°C")
	say("  throttled", fmt.Sprint(d.ThrottledSeconds), "pcie", fmt.Sprint(d.PCIeBytes), "nvlink", fmt.Sprint(d.NVLinkBytes))
	say("  ecc", fmt.Sprint(d.ECCErrors), "remapped", fmt.Sprint(d.RemappedRows), "xid", fmt.Sprint(d.XIDErrors))
	for _, in := range d.Instances {
		place := "nowhere"
		if in.Placement != nil {
			place = fmt.Sprint(*in.Placement)
		}
		say("  instance", in.Profile, "at", place, "by", in.UtilizationSource, value(in.Utilization), activity(in.Load), "memory", fmt.Sprint(*in.MemoryTotal>>30))
	}
}

// stateFile is the state that this child's library shows.
func stateFile() *state.File {
	f, err := state.Open(os.Getenv("FAKEGPU_STATE"))
	if err != nil {
		panic(err)
	}
	return f
}

// mapped says whether this process holds what stands for the driver's device files. The library's own file stays mapped for ever, as
// glibc does with a library that the program itself has bound symbols of; it keeps no kernel module from being unloaded.
func mapped() bool {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		panic(err)
	}
	return strings.Contains(string(maps), os.Getenv("FAKEGPU_STATE"))
}

var scenarios = map[string]func(){
	// Everything that a GPU can show, after three readings in which it was busy, and every second instance of it.
	"all": func() {
		f, r := stateFile(), childReader()
		last := time.Now()
		for i := range 3 {
			time.Sleep(150 * time.Millisecond) // the counters have the driver's clock, which is real
			err := f.Update(0, func(g *state.GPU) {
				elapsed := time.Since(last)
				last = last.Add(elapsed)
				for k := range g.Instances {
					g.Instances[k].Activity.Advance(elapsed, float64(k%2))
				}
				g.Activity.Advance(elapsed, 1)
				if g.Fields[0].ID == 0 { // this kind of GPU knows no fields
					return
				}
				g.SetField(state.FieldECCUncorrected, state.UnsignedLong64, 2, 0)
				g.SetField(state.FieldThrottlePower, state.UnsignedLong64, 1_500_000_000, 0)
				g.SetField(state.FieldPCIeTransmit, state.UnsignedLong64, 1<<40, 0)
				g.SetField(state.FieldRemapPending, state.UnsignedInt, 0, 999)
			})
			if err != nil {
				panic(err)
			}
			reading := r.Read(noon.Add(time.Duration(i) * gaugesEvery))
			if i == 1 {
				if err := f.XID(0, 79); err != nil {
					panic(err)
				}
			}
			if i == 2 {
				describe(reading)
				for _, e := range reading.Errors {
					say("error", e.Call, e.Code)
				}
			}
		}
		if err := r.Close(); err != nil {
			panic(err)
		}
		counts := f.Counts()
		say("left", fmt.Sprint(counts["nvmlGpmSampleAlloc"]-counts["nvmlGpmSampleFree"]), "samples", fmt.Sprint(counts["nvmlEventSetCreate"]-counts["nvmlEventSetFree"]), "event sets")
	},
	"release": func() {
		r := childReader()
		r.Read(noon)
		say("in use:", fmt.Sprint(mapped()))
		if err := r.Close(); err != nil {
			panic(err)
		}
		say("released:", fmt.Sprint(!mapped()))
		describe(r.Read(noon.Add(time.Second)))
		say("in use:", fmt.Sprint(mapped()))
	},
	"read": func() {
		r := childReader()
		for i := range 3 {
			describe(r.Read(noon.Add(time.Duration(i) * time.Second)))
		}
		if err := r.Close(); err != nil {
			panic(err)
		}
	},
	// The library is installed into a folder that did not exist when the process first looked for it.
	"appears": func() {
		r := New(Config{})
		describe(r.Read(noon))
		dir := os.Getenv("LD_LIBRARY_PATH")
		data, err := os.ReadFile(os.Getenv("TEST_LIBRARY"))
		if err == nil {
			err = os.MkdirAll(dir, 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, soname), data, 0o755)
		}
		if err != nil {
			panic(err)
		}
		describe(r.Read(noon.Add(time.Minute)))
	},
	"upgrade": func() {
		r := childReader()
		describe(r.Read(noon))
		f, err := state.Open(os.Getenv("FAKEGPU_STATE"))
		if err != nil {
			panic(err)
		}
		if err := f.Upgrade("600.1"); err != nil {
			panic(err)
		}
		describe(r.Read(noon.Add(time.Second)))
	},
}

func TestRealLibraryInEveryVariant(t *testing.T) {
	for variant, want := range map[string]string{
		"full":           "by samples up reserved energy",
		"no-errorstring": "by samples up reserved energy",
		"r470":           "by rates up",
	} {
		t.Run(variant, func(t *testing.T) {
			f, path := newState(t, 2)
			out := play(t, "read", compiled(t, variant), path)
			last := strings.TrimSpace(out[strings.LastIndex(strings.TrimSpace(out), "\n")+1:])
			if last != state.UUID("node-1", 1)+" "+want {
				t.Errorf("the last GPU reads %q, want %q", last, want)
			}
			if n := f.Counts()["nvmlErrorString"]; n != 0 {
				t.Errorf("nvmlErrorString was called %d times", n)
			}
		})
	}
}

func TestNoLibrary(t *testing.T) {
	_, path := newState(t, 1)
	out := play(t, "read", filepath.Join(t.TempDir(), "libnvidia-ml.so.1"), path)
	if !strings.HasPrefix(out, "error: libnvidia-ml.so.1 is not to be found") {
		t.Errorf("%s", out)
	}
}

func TestLibraryAppearsInANewFolder(t *testing.T) {
	_, path := newState(t, 1)
	out := play(t, "appears", compiled(t, "full"), path, "LD_LIBRARY_PATH="+filepath.Join(t.TempDir(), "not", "yet"))
	if !strings.HasPrefix(out, "error: "+ErrNoLibrary.Error()) || !strings.HasSuffix(out, state.UUID("node-1", 0)+" by samples up reserved energy\n") {
		t.Errorf("%s", out)
	}
}

func TestDriverNotLoaded(t *testing.T) {
	out := play(t, "read", compiled(t, "full"), filepath.Join(t.TempDir(), "none"))
	if !strings.HasPrefix(out, "error: "+ErrDriverNotLoaded.Error()) {
		t.Errorf("%s", out)
	}
}

func TestDriverIsReplaced(t *testing.T) {
	_, path := newState(t, 1)
	out := play(t, "upgrade", compiled(t, "full"), path)
	if !strings.Contains(out, "restart: read gpu 0: LIB_RM_VERSION_MISMATCH") {
		t.Errorf("%s", out)
	}
}

func TestLostFromTheSecondReadingOn(t *testing.T) {
	f, path := newState(t, 2)
	// go-nvml asks twice in a reading: how many samples there can be, and which there are.
	for _, call := range []string{"nvmlDeviceGetSamples", "nvmlDeviceGetUtilizationRates"} {
		if err := f.Fail(call, 1, int32(gpuIsLost), 0, 2); err != nil {
			t.Fatal(err)
		}
	}
	out := play(t, "read", compiled(t, "full"), path)
	if !strings.Contains(out, state.UUID("node-1", 0)+" by samples up reserved energy") || !strings.Contains(out, state.UUID("node-1", 1)+" by samples up no GPU_IS_LOST") {
		t.Errorf("%s", out)
	}
}

func shape(t *testing.T, profile string) string {
	t.Helper()
	kind, err := state.ProfileNamed(profile)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "state")
	f, err := state.Create(path, "node-1", 1, kind)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	return path
}

// Shares of the performance counters hang on how long the machine let the child sleep: rounded to tenths they do not.
func TestEverythingThatAGPUCanShow(t *testing.T) {
	for profile, want := range map[string][]string{
		"h100": {"by samples up", "sm 0.8 tensor 0.4 dram 0.5", "power 70.0 instant 70.0 of 700.0 memory 36.0 °C", "power_cap:1.5", "transmit:1.099511627776e+12",
			"ecc map[corrected:0 uncorrected:2]", "xid map[79:1]", "error nvmlDeviceGetFieldValues(144) UNKNOWN", "left 0 samples 0 event sets"},
		"a100":     {"by samples up", "no counters", "of 400.0"},
		"t4":       {"no counters", "power 7.0 instant - of 70.0 memory - °C", "throttled map[] pcie map[] nvlink map[]", "ecc map[]"},
		"h100-mig": {"by gpm up", "instance 1g.10gb at {19 0} by gpm 0.0 sm 0.0", "instance 1g.10gb at {19 1} by gpm 1.0 sm 0.8 tensor 0.4 dram 0.5 memory 10", "left 0 samples"},
		"a100-mig": {"by  up", "instance 3g.40gb at {9 0} by  - no counters memory 40"},
	} {
		t.Run(profile, func(t *testing.T) {
			out := play(t, "all", compiled(t, "full"), shape(t, profile), "TEST_VERBOSE=1")
			for _, w := range want {
				if !strings.Contains(out, w) {
					t.Errorf("lacks %q:\n%s", w, out)
				}
			}
		})
	}
}

// dcgm-exporter#706: an exporter that holds the driver keeps it from being unloaded.
func TestReleaseLetsGoOfTheDriver(t *testing.T) {
	_, path := newState(t, 2)
	out := play(t, "release", compiled(t, "full"), path)
	want := "in use: true\nreleased: true\n" + state.UUID("node-1", 0) + " by samples up reserved energy\n" + state.UUID("node-1", 1) + " by samples up reserved energy\nin use: true\n"
	if out != want {
		t.Errorf("got\n%swant\n%s", out, want)
	}
}

// What a reading costs is what the call log says: no process list, no PCIe throughput, nothing that is known to be slow.
func TestCallsOfAReading(t *testing.T) {
	f, path := newState(t, 1)
	play(t, "read", compiled(t, "full"), path)
	counts := f.Counts()
	for call, most := range map[string]uint64{"nvmlInit_v2": 1, "nvmlDeviceGetCount_v2": 1, "nvmlDeviceGetUUID": 1, "nvmlDeviceGetSamples": 6,
		"nvmlDeviceGetUtilizationRates": 3, "nvmlDeviceGetMemoryInfo_v2": 3, "nvmlDeviceGetPowerUsage": 3, "nvmlShutdown": 1, "nvmlDeviceGetMemoryInfo": 0} {
		if counts[call] > most {
			t.Errorf("%s was called %d times in three readings, want at most %d", call, counts[call], most)
		}
	}
	if counts["nvmlShutdown"] != 1 {
		t.Errorf("Close called nvmlShutdown %d times, want once", counts["nvmlShutdown"])
	}
}

// A program that is linked to bind at once (-z now) would die at start wherever the driver lacks one function.
func TestLinkedLazily(t *testing.T) {
	f, err := elf.Open(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for tag, bit := range map[elf.DynTag]uint64{elf.DT_FLAGS: uint64(elf.DF_BIND_NOW), elf.DT_FLAGS_1: uint64(elf.DF_1_NOW)} {
		values, err := f.DynValue(tag)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range values {
			if v&bit != 0 {
				t.Errorf("%s has BIND_NOW set", tag)
			}
		}
	}
}
