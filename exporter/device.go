package exporter

import (
	"fmt"
	"strconv"

	"github.com/capstan-gpu/capstan/exporter/gpu"
	"github.com/capstan-gpu/capstan/exporter/podmap"
)

// namesOf lists every name by which a device plugin may hand out one of the node's devices, with the UUID of that device:
//
//	GPU-…, MIG-…             NVIDIA's plugin
//	0                        NVIDIA's plugin with --device-id-strategy=index
//	MIG-GPU-…/7/0            NVIDIA's plugin before driver 470: GPU, GPU instance, compute instance
//	nvidia0, nvidia0/gi7     GKE's plugin, by the device file's minor number
//	gpu-0                    NVIDIA's driver for dynamic resource allocation, by the minor number
//	gpu-0-mig-1g.10gb-19-3   the same: profile, its number, and where it begins
func namesOf(r gpu.Reading) map[string]string {
	names := make(map[string]string, 4*len(r.Devices))
	for _, d := range r.Devices {
		names[d.UUID] = d.UUID
		names[strconv.Itoa(d.Index)] = d.UUID
		if d.Minor >= 0 {
			names[fmt.Sprintf("nvidia%d", d.Minor)] = d.UUID
			names[fmt.Sprintf("gpu-%d", d.Minor)] = d.UUID
		}
		for _, in := range d.Instances {
			names[in.UUID] = in.UUID
			names[fmt.Sprintf("MIG-%s/%d/0", d.UUID, in.GPUInstance)] = in.UUID
			if d.Minor < 0 {
				continue
			}
			names[fmt.Sprintf("nvidia%d/gi%d", d.Minor, in.GPUInstance)] = in.UUID
			if p := in.Placement; p != nil {
				names[fmt.Sprintf("gpu-%d-mig-%s-%d-%d", d.Minor, in.Profile, p.ProfileID, p.Start)] = in.UUID
			}
		}
	}
	return names
}

// resolve replaces the names of devices by their UUIDs. What the driver does not know keeps its name.
func resolve(r gpu.Reading, allocations []podmap.Allocation) []podmap.Allocation {
	names := namesOf(r)
	resolved := make([]podmap.Allocation, len(allocations))
	for i, a := range allocations {
		if uuid, ok := names[a.UUID]; ok {
			a.UUID = uuid
		}
		resolved[i] = a
	}
	return resolved
}
