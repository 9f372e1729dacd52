package gpu

import (
	"strings"
	"testing"
	"time"
)

// The reader integrates the simulation to what the simulation itself has worked.
func TestSimulated(t *testing.T) {
	for _, profile := range SimulatedProfiles() {
		r, err := Simulated(profile, Config{Detail: true})
		if err != nil {
			t.Fatal(err)
		}
		s := r.driver.(*simulation)
		now := noon
		s.now = func() time.Time { return now }
		var first, last Reading
		for range 62 {
			last = r.Read(now)
			if first.At.IsZero() {
				first = last
			}
			now = now.Add(time.Second)
		}
		if len(last.Devices) != 8 || last.Err != nil || len(last.Errors) != 0 {
			t.Fatalf("%s: %d GPUs, %v, %v", profile, len(last.Devices), last.Err, last.Errors)
		}
		for i, d := range last.Devices {
			want := s.gpus[i].worked(last.At) - s.gpus[i].worked(first.At)
			loads := []Load{d.Load}
			for _, in := range d.Instances {
				loads = append(loads, in.Load)
			}
			for k, l := range loads {
				if k > 0 {
					in := *s.gpus[i]
					in.instance = k - 1
					want = in.worked(last.At) - in.worked(first.At)
				}
				if l.UtilizationSource == "" {
					continue
				}
				if l.Observed < 58 || l.Busy < want-2 || l.Busy > want+2 {
					t.Errorf("%s GPU %d, part %d: busy %.1f of %.1f s, want %.1f", profile, i, k, l.Busy, l.Observed, want)
				}
			}
			if has := d.Activity != nil; has != (d.Model != "NVIDIA A100-SXM4-80GB") {
				t.Errorf("%s: %s has performance counters: %t", profile, d.Model, has)
			}
		}
		now = time.Date(2026, 12, 1, 12, 9, 30, 0, time.UTC)
		if d := r.Read(now).Devices[5]; d.Up || d.Reason != "GPU_IS_LOST" {
			t.Errorf("%s: the sixth GPU in the tenth minute: %+v; want it lost", profile, d)
		}
	}
	if _, err := Simulated("b200", Config{}); err == nil || !strings.Contains(err.Error(), "h100-mig") {
		t.Errorf("an unknown profile: %v", err)
	}
}
