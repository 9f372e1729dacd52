//go:build linux && cgo

package gpu

import (
	"debug/elf"
	"errors"
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
	os.Exit(m.Run())
}

// compiled makes the simulated libnvidia-ml.so.1 in a variant.
func compiled(t *testing.T, variant string) string {
	t.Helper()
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("needs a C compiler: apt-get install gcc make")
	}
	path := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
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

func childReader() *Reader { return New(Config{LibraryPath: os.Getenv("TEST_LIBRARY")}) }

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
	}
}

var scenarios = map[string]func(){
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
