package exporter

import (
	"flag"
	"fmt"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/capstan-gpu/capstan/exporter/gpu"
	"github.com/capstan-gpu/capstan/exporter/podmap"
	"github.com/capstan-gpu/capstan/exporter/trainer"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/trainer/stats"
)

var update = flag.Bool("update", false, "rewrite the golden files")

var noon = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

func uuid(i int) string { return fmt.Sprintf("GPU-00000000-0000-4000-8000-%012d", i) }

// node is a node as it may be on a bad day: four GPUs, one of them lost and one that says little; a worker with two GPUs, two
// that share one, a trainer, and a pod with two lives.
func node() *Snapshot {
	full := func(i int, busy, observed, ratio float64) gpu.Device {
		return gpu.Device{UUID: uuid(i), Index: i, Minor: i, Model: "NVIDIA H200", PCIBusID: fmt.Sprintf("00000000:%02X:00.0", 0x18+i), Up: true,
			Load: gpu.Load{UtilizationSource: "samples", Busy: busy, Observed: observed, Utilization: &ratio,
				Activity: &gpu.Activity{Observed: observed, SM: at(busy / 2), Tensor: at(busy / 4), DRAM: at(busy / 8), Graphics: &ratio, SMRatio: at(0.5), TensorRatio: at(0.25), DRAMRatio: at(0.125)}},
			Memory: gpu.Memory{MemoryUsed: at(uint64(70) << 30), MemoryReserved: at(uint64(600) << 20), MemoryTotal: at(uint64(141) << 30)},
			Gauges: gpu.Gauges{PowerWatts: at(612.5), EnergyJoules: at(1.25e6), TemperatureCelsius: at(61.0),
				ClockHertz: map[string]float64{"sm": 1.98e9}},
			Counters: gpu.Counters{ThrottledSeconds: map[string]float64{"power_cap": 2.5, "thermal_hardware": 0}, PCIeBytes: map[string]float64{"transmit": 1e12, "receive": 2e12},
				NVLinkBytes: map[string]float64{"transmit": 3e12, "receive": 4e12}},
			Health: gpu.Health{ECCErrors: map[string]float64{"corrected": 1, "uncorrected": 0}, RowRemapFailed: at(false), RecoveryAction: at(1)},
			Detail: gpu.Detail{MemoryTemperatureCelsius: at(70.0), MoreClockHertz: map[string]float64{"memory": 3.201e9}, PowerInstantWatts: at(630.0), PowerLimitWatts: at(700.0), EngineUtilization: map[string]float64{"encoder": 0, "decoder": 0.25, "memory": 0.4},
				PCIeReplays: at(3.0), RemappedRows: map[string]float64{"corrected": 0, "uncorrected": 1}, RowRemapPending: at(true)}}
	}
	lost := gpu.Device{UUID: uuid(2), Index: 2, Minor: 2, Model: "NVIDIA H200", PCIBusID: "00000000:1A:00.0", Reason: "GPU_IS_LOST",
		Load: gpu.Load{UtilizationSource: "samples", Busy: 100, Observed: 200}, XIDErrors: map[uint64]uint64{79: 1}, LastXID: 79}
	divided := gpu.Device{UUID: uuid(4), Index: 4, Minor: 4, Model: "NVIDIA H200", PCIBusID: "00000000:1C:00.0", Up: true, MIG: true,
		Load: gpu.Load{UtilizationSource: "gpm", Busy: 30, Observed: 60, Utilization: at(0.5)},
		Instances: []gpu.Instance{{UUID: "MIG-00000000-0000-4000-8000-000000000000", Profile: "3g.71gb", GPUInstance: 1,
			Load:   gpu.Load{UtilizationSource: "gpm", Busy: 60, Observed: 60, Utilization: at(1.0), Activity: &gpu.Activity{Observed: 60, SM: at(45.0)}},
			Memory: gpu.Memory{MemoryUsed: at(uint64(10) << 30), MemoryTotal: at(uint64(71) << 30)}}}}
	allocation := func(id, uuid, pod, uid string, shared bool) podmap.Allocation {
		return podmap.Allocation{DeviceID: id, UUID: uuid, Namespace: "train", Pod: pod, PodUID: uid, Container: "worker", Resource: "nvidia.com/gpu", Shared: shared}
	}
	s := &Snapshot{
		GPUs: gpu.Reading{At: noon, DriverVersion: "590.48.01",
			Devices: []gpu.Device{full(0, 950, 1000, 0.95), full(1, 500.5, 1000, 0.5), lost,
				{UUID: uuid(3), Index: 3, Minor: 3, Model: `NVIDIA "odd\ name`, PCIBusID: "00000000:1B:00.0", Up: true}, divided},
			Costs:  []gpu.CallCost{{Call: "nvmlDeviceGetSamples", Count: 1000, Seconds: 0.25}},
			Errors: []gpu.CallErrors{{UUID: uuid(2), Call: "nvmlDeviceGetUtilizationRates", Code: "GPU_IS_LOST", Count: 3}, {Call: "nvmlInit_v2", Code: "DRIVER_NOT_LOADED", Count: 2}}},
		Usage: []PodUsage{
			{Namespace: "train", Pod: "mnist-training-worker-0", PodUID: "6f1c0000-0000-4000-8000-000000000000", GPUs: 2, Busy: at(1450.5), Observed: at(2000.0), SMActive: at(725.25), ActivityObserved: at(2000.0), MemoryUsed: at(uint64(140) << 30), MemoryTotal: at(uint64(282) << 30)},
			{Namespace: "train", Pod: "shared-0", PodUID: "6f1c0000-0000-4000-8000-000000000001", GPUs: 1, Shared: true, Busy: at(10.0), Observed: at(20.0),
				Process: &ProcessUsage{Busy: 2.5, Observed: 20, MemoryUsed: at(uint64(4) << 30)}},
			{Namespace: "train", Pod: "shared-1", PodUID: "6f1c0000-0000-4000-8000-000000000002", GPUs: 1, Shared: true, Busy: at(0.0), Observed: at(0.0)},
			{Namespace: "train", Pod: "silent-0", PodUID: "6f1c0000-0000-4000-8000-000000000003", GPUs: 1},
		},
		Mapping: podmap.Mapping{At: noon.Add(-time.Second),
			Allocations: []podmap.Allocation{
				allocation(uuid(0), uuid(0), "mnist-training-worker-0", "6f1c0000-0000-4000-8000-000000000000", false),
				allocation(uuid(1), uuid(1), "mnist-training-worker-0", "6f1c0000-0000-4000-8000-000000000000", false),
				allocation(uuid(2)+"::0", uuid(2), "shared-0", "6f1c0000-0000-4000-8000-000000000001", true),
				allocation(uuid(2)+"::1", uuid(2), "shared-1", "6f1c0000-0000-4000-8000-000000000002", true),
				allocation(uuid(3), uuid(3), "silent-0", "6f1c0000-0000-4000-8000-000000000003", false),
			},
			Resources: podmap.API{Up: true, Answered: noon.Add(-time.Second)}, PodsAPI: podmap.API{Up: true, Answered: noon.Add(-time.Second)},
			Errors: map[string]uint64{podmap.ReasonAmbiguous: 1, podmap.ReasonUnreachable: 4}, Unbound: []string{"train/twice-0"}},
		Training: trainer.Result{Reads: map[string]uint64{trainer.ReasonOK: 40, trainer.ReasonTimeout: 2}, Refused: map[string]uint64{trainer.ReasonLabels: 1}},
	}
	worker := trainer.Page{Namespace: "train", Pod: "mnist-training-worker-0", UID: "6f1c0000-0000-4000-8000-000000000000", At: noon, First: noon.Add(-time.Minute)}
	for _, f := range stats.Families() {
		labels := make([]string, len(f.Labels))
		for i := range labels {
			labels[i] = "join"
		}
		worker.Samples = append(worker.Samples, trainer.Sample{Family: &f, Labels: labels, Value: 7})
	}
	s.Training.Pages = []trainer.Page{worker}
	s.Held = s.Mapping.Allocations
	for i := range s.Stages {
		s.Stages[i] = Stage{Began: noon.Add(-5 * time.Millisecond), Ended: noon, Took: 5 * time.Millisecond}
	}
	return s
}

func gathererOf(s *Snapshot) gatherer {
	return gatherer{&nodeRenderer{snapshot: func() *Snapshot { return s }, now: func() time.Time { return noon.Add(500 * time.Millisecond) },
		training: trainingFamilies(stats.Families())}}
}

// rendered is the page in the format that accept asks for. The library's own checks find nothing wrong with it.
func rendered(t *testing.T, g gatherer, accept string) string {
	t.Helper()
	if _, err := (prometheus.Gatherers{g}).Gather(); err != nil {
		t.Error(err)
	}
	r := httptest.NewRequest("GET", "/metrics", nil)
	r.Header.Set("Accept", accept)
	w := httptest.NewRecorder()
	promhttp.HandlerFor(g, promhttp.HandlerOpts{EnableOpenMetrics: true}).ServeHTTP(w, r)
	if w.Code != 200 {
		t.Fatalf("status %d: %s", w.Code, w.Body)
	}
	return w.Body.String()
}

func render(t *testing.T, s *Snapshot, accept string) string {
	t.Helper()
	return rendered(t, gathererOf(s), accept)
}

// golden compares with a file in testdata/golden.
func golden(t *testing.T, file, got string) {
	t.Helper()
	path := "testdata/golden/" + file
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got; rewrite with: go test ./exporter -update)\n%s", path, diff)
	}
}

// The page of one reading, whole. It is also what the adapter's tests read.
func TestGoldenPage(t *testing.T) {
	golden(t, "metrics.prom", render(t, node(), "text/plain"))
	golden(t, "metrics.openmetrics", render(t, node(), "application/openmetrics-text"))
}

func TestNames(t *testing.T) {
	problems, err := testutil.GatherAndLint(gathererOf(node()))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// The page that somebody who comes from dcgm-exporter sees beside ours.
func TestGoldenDCGM(t *testing.T) {
	s := node()
	golden(t, "dcgm.prom", rendered(t, gatherer{&dcgm{snapshot: func() *Snapshot { return s }, host: "node-1"}}, "text/plain"))
}

// A node that knows nothing yet serves no value of a GPU or pod, in particular no 0.
func TestNothingKnown(t *testing.T) {
	for name, s := range map[string]*Snapshot{
		"nothing collected": {},
		"no library":        {GPUs: gpu.Reading{At: noon, Err: gpu.ErrNoLibrary}, Stages: [stages]Stage{stageGPU: {Began: noon, Ended: noon}}},
	} {
		page := render(t, s, "text/plain")
		for line := range strings.Lines(page) {
			for _, prefix := range []string{metricname.Prefix + "gpu_", metricname.Prefix + "pod_gpu", metricname.Training} {
				if strings.HasPrefix(line, prefix) {
					t.Errorf("%s: the page has %s", name, line)
				}
			}
		}
		if has := strings.Contains(page, metricname.LibraryUp+" 0"); has != (name == "no library") {
			t.Errorf("%s: says that the library is down: %t", name, has)
		}
	}
}

// Strings of drivers, kubelets and trainers are bytes. Whatever they are, the page can be read, and each healthy GPU is on it.
func FuzzPage(f *testing.F) {
	f.Add("NVIDIA \"x\\\n", "pod\x00", "\xff\xfe", 0.5)
	f.Add("", "", "", -1.0)
	f.Fuzz(func(t *testing.T, model_, pod, code string, v float64) {
		s := node()
		s.GPUs.Devices[0].Model = model_
		s.GPUs.Devices[0].ClockHertz = map[string]float64{code: v}
		s.GPUs.Errors = []gpu.CallErrors{{UUID: code, Call: pod, Code: model_}}
		s.Usage[0].Pod = pod
		page := render(t, s, "text/plain")
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, err := parser.TextToMetricFamilies(strings.NewReader(page))
		if err != nil {
			t.Fatalf("%v in\n%s", err, page)
		}
		if n := len(families[metricname.GPUInfo].GetMetric()); n != 5 {
			t.Fatalf("%d GPUs on the page, want 5", n)
		}
	})
}

func TestProbes(t *testing.T) {
	whole := node()
	whole.GPUs.Devices = whole.GPUs.Devices[:2]
	whole.Held, whole.Mapping.Unbound = whole.Held[:2], nil
	f := func(name string, got verdict, ok bool, words ...string) {
		t.Helper()
		if got.ok != ok {
			t.Errorf("%s: %+v, want %t", name, got, ok)
		}
		for _, w := range words {
			if !strings.Contains(got.text, w) {
				t.Errorf("%s: %q does not say %q", name, got.text, w)
			}
		}
	}
	stage := func(began, ended time.Duration) *Snapshot {
		s := &Snapshot{}
		if began >= 0 {
			s.Stages[stageGPU].Began = noon.Add(-began)
		}
		if ended >= 0 {
			s.Stages[stageGPU].Ended = noon.Add(-ended)
		}
		return s
	}
	f("just started", live(stage(-1, -1), noon, time.Minute), true)
	f("reading for long", live(stage(59*time.Second, 60*time.Second), noon, time.Minute), true)
	f("stuck", live(stage(61*time.Second, 62*time.Second), noon, time.Minute), false, "1m1s ago", "1m0s")
	f("stuck from the start", live(stage(61*time.Second, -1), noon, time.Minute), false, "has not come back")
	f("the loop stopped", live(stage(63*time.Second, 62*time.Second), noon, time.Minute), false, "no reading")
	noLibrary := stage(time.Second, time.Second)
	noLibrary.GPUs.Err = gpu.ErrNoLibrary
	f("no library", live(noLibrary, noon, time.Minute), true)

	f("whole", ready(whole, noon), true, "ready: 2 GPUs, 2 of them")
	f("before", ready(stage(3*time.Second, -1), noon), false, "first reading has not ended; it began 3s ago")
	noLibrary.Stages[stagePods] = noLibrary.Stages[stageGPU]
	f("no library", ready(noLibrary, noon), true, "something is missing", "libnvidia-ml.so.1")
	f("a bad day", ready(node(), noon), true, "GPU 2", "GPU_IS_LOST", "train/twice-0")
	s := node()
	s.Held[4].UUID, s.Held[4].DeviceID = "MIG-7", "MIG-7"
	s.Mapping.PodsAPI = podmap.API{Problem: "enable the feature gate"}
	f("unknown device", ready(s, noon), true, `like "MIG-7"`, "enable the feature gate")
}

func TestValidate(t *testing.T) {
	good := Config{Listen: ":0", Interval: time.Second, KubeletDir: "/var/lib/kubelet", MappingInterval: time.Second, MappingMaxAge: 30 * time.Second,
		StatsInterval: 5 * time.Second, StuckAfter: time.Minute, GPU: &fakeReader{}, Registry: prometheus.NewRegistry(), Logger: discard}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	f := func(change func(*Config), words ...string) {
		t.Helper()
		c := good
		change(&c)
		err := c.Validate()
		if err == nil {
			t.Errorf("valid, want an error with %q", words)
			return
		}
		for _, w := range words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q does not say %q", err, w)
			}
		}
	}
	f(func(c *Config) { c.Listen = "9401" }, "Listen", `"9401"`)
	f(func(c *Config) { c.LocalListen = ":9403" }, "LocalListen", `":9403"`, "127.0.0.1:PORT")
	f(func(c *Config) { c.Interval = time.Microsecond }, "Interval is 1µs", "1ms to 1m0s")
	f(func(c *Config) { c.MappingInterval = 0 }, "MappingInterval is 0s", "1ms")
	f(func(c *Config) { c.MappingMaxAge = time.Hour }, "MappingMaxAge is 1h0m0s", "5m0s")
	f(func(c *Config) { c.StatsInterval = 0 }, "StatsInterval is 0s")
	f(func(c *Config) { c.StuckAfter = time.Second }, "StuckAfter is 1s", "2s to 1h0m0s")
	f(func(c *Config) { c.KubeletDir = "kubelet" }, "KubeletDir", `"kubelet"`)
	f(func(c *Config) { c.GPU = nil }, "GPU")
	if err := Run(t.Context(), Config{}); err == nil {
		t.Error("Run with an empty Config: want an error")
	}
}
