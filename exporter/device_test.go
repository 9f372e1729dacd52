package exporter

import (
	"testing"

	"github.com/capstan-gpu/capstan/exporter/gpu"
	"github.com/capstan-gpu/capstan/exporter/podmap"
)

// Device ids are not resource names (dcgm-exporter#151): each plugin has names of its own, and all of them find their device.
func TestEveryPluginsNames(t *testing.T) {
	node := gpu.Reading{Devices: []gpu.Device{
		{UUID: "GPU-a", Index: 0, Minor: 3, Up: true},
		{UUID: "GPU-b", Index: 1, Minor: 0, Up: true, MIG: true, Instances: []gpu.Instance{{UUID: "MIG-b1", GPUInstance: 7}, {UUID: "MIG-b2", GPUInstance: 9, Profile: "1g.10gb", Placement: &gpu.Placement{ProfileID: 19, Start: 4}}}},
		{UUID: "GPU-c", Index: 2, Minor: -1, Up: true},
	}}
	for name, want := range map[string]string{
		"GPU-a": "GPU-a", "0": "GPU-a", "nvidia3": "GPU-a", "gpu-3": "GPU-a",
		"MIG-b1": "MIG-b1", "MIG-GPU-b/9/0": "MIG-b2", "nvidia0/gi7": "MIG-b1", "nvidia0": "GPU-b", "gpu-0": "GPU-b",
		"GPU-c": "GPU-c", "2": "GPU-c",
		"nvidia-1": "nvidia-1", "nvidia7": "nvidia7", "gpu-0-mig-1g.10gb-19-4": "MIG-b2", "gpu-0-mig-1g.10gb-19-0": "gpu-0-mig-1g.10gb-19-0",
	} {
		if got := resolve(node, []podmap.Allocation{{UUID: name}})[0].UUID; got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
}
