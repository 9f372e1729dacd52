package exporter

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/capstan-gpu/capstan/exporter/gpu"
	"github.com/capstan-gpu/capstan/exporter/podmap"
)

// TestCaptures replays what drivers answered (capstan-exporter --record), with a pod on every device, and compares the page after the last
// reading. A capture of a GPU that behaves otherwise than those here is a test once it is put into the folder.
func TestCaptures(t *testing.T) {
	captures, err := filepath.Glob("testdata/captures/*.jsonl")
	if err != nil || len(captures) == 0 {
		t.Fatalf("no capture: %v", err)
	}
	for _, path := range captures {
		name := strings.TrimSuffix(filepath.Base(path), ".jsonl")
		t.Run(name, func(t *testing.T) {
			file, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
			readings, err := gpu.Replay(file, gpu.Config{Detail: true})
			if err != nil || len(readings) < 5 {
				t.Fatalf("%d readings, %v", len(readings), err)
			}
			b := newBoard()
			for _, r := range readings {
				r.Costs = nil // of this machine, not of that driver
				b.begin(stageGPU, r.At)
				b.mapped(onePodEach(r))
				b.read(r.At, r)
			}
			last := readings[len(readings)-1].At
			page := rendered(t, gatherer{&nodeRenderer{snapshot: b.snapshot, now: func() time.Time { return last.Add(500 * time.Millisecond) }},
				&dcgm{snapshot: b.snapshot, host: "captured"}}, "text/plain")
			golden(t, "../captures/"+name+".prom", page)
		})
	}
}

// onePodEach gives every device that can be held to a pod of its own.
func onePodEach(r gpu.Reading) podmap.Mapping {
	m := podmap.Mapping{At: r.At, Resources: podmap.API{Up: true, Answered: r.At}, PodsAPI: podmap.API{Up: true, Answered: r.At}}
	add := func(uuid string) {
		i := len(m.Allocations)
		m.Allocations = append(m.Allocations, podmap.Allocation{DeviceID: uuid, UUID: uuid, Namespace: "train", Pod: fmt.Sprintf("worker-%d", i),
			PodUID: fmt.Sprintf("6f1c0000-0000-4000-8000-%012d", i), Container: "worker", Resource: "nvidia.com/gpu"})
	}
	for _, d := range r.Devices {
		if len(d.Instances) == 0 {
			add(d.UUID)
		}
		for _, in := range d.Instances {
			add(in.UUID)
		}
	}
	return m
}
