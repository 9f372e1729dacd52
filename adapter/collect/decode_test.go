package collect

import (
	"math"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/model"

	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules"
)

var at = time.UnixMilli(1_800_000_000_123)

// TestContract holds the exporter to what is read here: its golden page is our input.
func TestContract(t *testing.T) {
	page, err := os.ReadFile("../../exporter/testdata/golden/metrics.prom")
	if os.IsNotExist(err) {
		t.Skip("the exporter's golden page is not there yet")
	}
	if err != nil {
		t.Fatal(err)
	}
	got, err := Decode(page, "node-a", at, nil, 1000)
	if err != nil {
		t.Fatal(err)
	}
	if got.Snapshot.IsZero() {
		t.Error("the page must say when its snapshot was taken: a frozen exporter is known by it")
	}
	families := map[string]int{}
	for _, s := range got.Samples {
		name := s.Labels.Get(model.MetricNameLabel)
		families[name]++
		if s.Labels.Get("node") != "node-a" || !s.At.Equal(at) {
			t.Errorf("%s at %v: want the node and the time that we gave", s.Labels, s.At)
		}
		switch name {
		case metricname.PodGPUBusySeconds, metricname.PodGPUObservedSeconds:
			for _, l := range []string{metricname.Namespace, metricname.Pod, metricname.PodUID, metricname.Shared} {
				if !s.Labels.Has(l) {
					t.Errorf("%s: no label %s", s.Labels, l)
				}
			}
		}
	}
	for _, name := range []string{metricname.PodGPUBusySeconds, metricname.PodGPUObservedSeconds, metricname.PodGPUMemoryUsed, metricname.PodGPUs, metricname.GPUBusySeconds} {
		if families[name] == 0 {
			t.Errorf("no sample of %s", name)
		}
	}
	if m := got.Models["6f1c0000-0000-4000-8000-000000000000"]; m != "NVIDIA H200" {
		t.Errorf("model of the first pod is %q, all: %v", m, got.Models)
	}
}

func TestDecode(t *testing.T) {
	const page = `# HELP capstan_pod_gpus GPUs.
# TYPE capstan_pod_gpus gauge
capstan_pod_gpus{pod_uid="u",node="forged"} 2 123
capstan_pod_gpus{pod_uid="nan"} NaN
capstan_pod_gpus{pod_uid="inf"} +Inf
capstan_gpu_up{uuid="x"} 1
other{a="b"} 1
capstan_snapshot_timestamp_seconds 1.7e9
process_start_time_seconds 1.6e+09
capstan_gpu_info{uuid="1",model="B"} 1
capstan_gpu_info{uuid="2",model="A"} 1
capstan_gpu_info{uuid="3",model="A"} 1
capstan_gpu_allocation_info{uuid="1",pod_uid="u"} 1
capstan_gpu_allocation_info{uuid="2",pod_uid="u"} 1
capstan_gpu_allocation_info{uuid="3",pod_uid="u"} 1
capstan_gpu_allocation_info{uuid="3",pod_uid="v"} 1
capstan_gpu_allocation_info{uuid="4",pod_uid="w"} 1
capstan_training_ring_generation{namespace="n",pod="p",pod_uid="u"} 7
capstan_training_ring_generation_age_seconds{namespace="n",pod="p",pod_uid="u"} 90
capstan_training_steps_total{namespace="n",pod="p",pod_uid="u"} 1200
capstan_training_step_duration_seconds{namespace="n",pod="p",pod_uid="u"} 0.25
capstan_training_ring_generation{namespace="n",pod="q",pod_uid="v"} NaN
capstan_training_steps_total{namespace="n",pod="r",pod_uid="w"} -1
capstan_training_steps_total{namespace="n",pod="s",pod_uid="x"} 3
capstan_training_steps_total 5
`
	got, err := Decode([]byte(page), "n", at, Families{"capstan_pod_gpus": true}, 10)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Samples) != 1 || got.Samples[0].Labels.String() != `{__name__="capstan_pod_gpus", node="n", pod_uid="u"}` || got.Samples[0].Value != 2 {
		t.Errorf("samples: %v", got.Samples)
	}
	got.Samples = nil
	want := Page{Start: time.Unix(1.6e9, 0), Snapshot: time.Unix(1.7e9, 0), Models: map[string]string{"u": "A_B", "v": "A"}, Dropped: 2, Rings: map[string]*rules.Ring{
		"u": {Generation: 7, Began: at.Add(-90 * time.Second), Steps: 1200, StepTakes: 250 * time.Millisecond, SampleTaken: at},
		"x": {Steps: 3, SampleTaken: at},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}

	if _, err := Decode([]byte(page), "n", at, nil, 3); err == nil || !strings.Contains(err.Error(), "more series than 3") {
		t.Errorf("too many series: %v", err)
	}
	for _, bad := range []string{"capstan_a{", "capstan_a{x=\"1\"", "capstan_a 1\ncapstan_b x\n", "<html>", "capstan_a{x=\"\xff\"} 1\n", "capstan_a{x=\"1\",x=\"2\"} 1\n"} {
		if got, err := Decode([]byte(bad), "n", at, nil, 10); err == nil {
			t.Errorf("%q: no error but %v", bad, got)
		}
	}
	for _, fine := range []string{"", "\n", "# comment\n", "capstan_a 1", `{"capstan_a",x="1"} 1` + "\n"} {
		if _, err := Decode([]byte(fine), "n", at, nil, 10); err != nil {
			t.Errorf("%q: %v", fine, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	golden, err := os.ReadFile("../../exporter/testdata/golden/metrics.prom")
	if err != nil && !os.IsNotExist(err) {
		f.Fatal(err)
	}
	f.Add(golden)
	f.Add([]byte("capstan_pod_gpus{pod_uid=\"u\",node=\"forged\"} NaN 1\n"))
	f.Add([]byte("{\"capstan_a\",node=\"x\"} 1e400\n"))
	f.Add([]byte("capstan_snapshot_timestamp_seconds -1\nprocess_start_time_seconds 1e300\n"))
	f.Fuzz(func(t *testing.T, page []byte) {
		const most = 50
		got, err := Decode(page, "n", at, nil, most)
		if err != nil {
			if len(got.Samples) > 0 {
				t.Error("half a page beside an error")
			}
			return
		}
		if len(got.Samples) > most {
			t.Errorf("%d samples", len(got.Samples))
		}
		for _, s := range got.Samples {
			if s.Labels.Get("node") != "n" || !s.At.Equal(at) {
				t.Errorf("%s at %v: node and time are ours", s.Labels, s.At)
			}
			if math.IsNaN(s.Value) || math.IsInf(s.Value, 0) {
				t.Errorf("%s is %v", s.Labels, s.Value)
			}
			if name, twice := s.Labels.HasDuplicateLabelNames(); twice {
				t.Errorf("%s has %s twice", s.Labels, name)
			}
		}
	})
}

func BenchmarkDecode(b *testing.B) {
	page, err := os.ReadFile("../../exporter/testdata/golden/metrics.prom")
	if err != nil {
		b.Skip(err)
	}
	b.SetBytes(int64(len(page)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Decode(page, "n", at, Families{metricname.PodGPUBusySeconds: true, metricname.PodGPUObservedSeconds: true}, 1000); err != nil {
			b.Fatal(err)
		}
	}
}

// The exporter is asked for what the rules name and what else is read, and for everything when that is not known.
func TestAskForWhatIsKept(t *testing.T) {
	if got := Families(nil).query(); got != "" {
		t.Errorf("everything: %q", got)
	}
	asked, err := url.Parse(Families{"capstan_pod_gpu_busy_seconds_total": true}.query())
	if err != nil {
		t.Fatal(err)
	}
	want := []string{metricname.GPUAllocationInfo, metricname.GPUInfo, metricname.InstanceInfo, "capstan_pod_gpu_busy_seconds_total", metricname.SnapshotTimestamp,
		metricname.TrainingGeneration, metricname.TrainingGenerationAge, metricname.TrainingStepDuration, metricname.TrainingSteps, processStart}
	if got := asked.Query()["name[]"]; !slices.Equal(got, want) {
		t.Errorf("asks for %q, want %q", got, want)
	}
}

func TestModelOfAnInstanceIsItsGPUs(t *testing.T) {
	page, err := Decode([]byte(`capstan_gpu_info{uuid="GPU-1",model="NVIDIA H200"} 1
capstan_gpu_instance_info{uuid="MIG-1",parent_uuid="GPU-1",profile="3g.71gb"} 1
capstan_gpu_allocation_info{uuid="MIG-1",pod_uid="u"} 1
`), "node", time.Unix(1, 0), Families{}, 10)
	if err != nil || page.Models["u"] != "NVIDIA H200" {
		t.Errorf("%v, %v", page.Models, err)
	}
}

// Pages of every kind of GPU that was captured, as the exporter makes them.
func TestCapturedPages(t *testing.T) {
	pages, err := filepath.Glob("../../exporter/testdata/captures/*.prom")
	if err != nil || len(pages) == 0 {
		t.Fatalf("no page: %v", err)
	}
	for _, path := range pages {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		page, err := Decode(text, "node", at, nil, 10_000)
		if err != nil || len(page.Samples) < 20 || len(page.Models) == 0 || page.Snapshot.IsZero() {
			t.Errorf("%s: %d samples, models %v, snapshot %s, %v", path, len(page.Samples), page.Models, page.Snapshot, err)
		}
	}
}
