package exporter

import (
	"fmt"
	"strconv"

	"github.com/capstan-gpu/capstan/exporter/gpu"
)

// dcgm renders the newest Snapshot once more under the names, labels and units of dcgm-exporter's default counters, so that dashboards
// and rules that were made for it (Grafana's 12239 among them) go on. What we do not know is absent, and so is what has no honest value
// in a gauge: DCGM_FI_PROF_PCIE_*_BYTES and DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL are rates there and counters here.
//
// A device's series has the labels of the pod that holds it. Held by several it has none of them: dcgm-exporter names one of them at
// random, or copies the whole GPU's value for each.
type dcgm struct {
	snapshot func() *Snapshot
	host     string
}

var dcgmLabels = []string{"gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "DCGM_FI_DRIVER_VERSION", "GPU_I_PROFILE", "GPU_I_ID", "container", "namespace", "pod"}

type dcgmFamily struct {
	*family
	value func(d *gpu.Device) *float64
}

func dcgmGauge(name, help string, value func(d *gpu.Device) *float64) dcgmFamily {
	return dcgmFamily{gauge(name, help, dcgmLabels...), value}
}

func dcgmCounter(name, help string, value func(d *gpu.Device) *float64) dcgmFamily {
	return dcgmFamily{counter(name, help, dcgmLabels...), value}
}

func times(v *float64, factor float64) *float64 {
	if v == nil {
		return nil
	}
	scaled := *v * factor
	return &scaled
}

func mebibytes(v *uint64) *float64 {
	if v == nil {
		return nil
	}
	scaled := float64(*v) / (1 << 20)
	return &scaled
}

func entry(values map[string]float64, key string, factor float64) *float64 {
	if v, ok := values[key]; ok {
		return times(&v, factor)
	}
	return nil
}

func activity(d *gpu.Device, f func(a *gpu.Activity) *float64) *float64 {
	if d.Activity == nil {
		return nil
	}
	return f(d.Activity)
}

var dcgmFamilies = []dcgmFamily{
	dcgmGauge("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).", func(d *gpu.Device) *float64 { return entry(d.ClockHertz, "sm", 1e-6) }),
	dcgmGauge("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", func(d *gpu.Device) *float64 { return entry(d.MoreClockHertz, "memory", 1e-6) }),
	dcgmGauge("DCGM_FI_DEV_MEMORY_TEMP", "Memory temperature (in C).", func(d *gpu.Device) *float64 { return d.MemoryTemperatureCelsius }),
	dcgmGauge("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", func(d *gpu.Device) *float64 { return d.TemperatureCelsius }),
	dcgmGauge("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", func(d *gpu.Device) *float64 { return d.PowerWatts }),
	dcgmCounter("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "Energy since boot (in mJ).", func(d *gpu.Device) *float64 { return times(d.EnergyJoules, 1e3) }),
	dcgmCounter("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "PCIe retries.", func(d *gpu.Device) *float64 { return d.PCIeReplays }),
	dcgmGauge("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", func(d *gpu.Device) *float64 { return times(d.Utilization, 100) }),
	dcgmGauge("DCGM_FI_DEV_MEM_COPY_UTIL", "Memory utilization (in %): of its controller.", func(d *gpu.Device) *float64 { return entry(d.EngineUtilization, "memory", 100) }),
	dcgmGauge("DCGM_FI_DEV_ENC_UTIL", "Encoder utilization (in %).", func(d *gpu.Device) *float64 { return entry(d.EngineUtilization, "encoder", 100) }),
	dcgmGauge("DCGM_FI_DEV_DEC_UTIL", "Decoder utilization (in %).", func(d *gpu.Device) *float64 { return entry(d.EngineUtilization, "decoder", 100) }),
	dcgmGauge("DCGM_FI_DEV_XID_ERRORS", "Number of the newest XID error, 0 = none since the exporter began.", func(d *gpu.Device) *float64 {
		if d.Model == "" { // an instance: errors are reported of the whole GPU
			return nil
		}
		xid := float64(d.LastXID)
		return &xid
	}),
	dcgmGauge("DCGM_FI_DEV_FB_FREE", "Frame buffer memory free (in MiB).", func(d *gpu.Device) *float64 {
		if d.MemoryUsed == nil || d.MemoryTotal == nil {
			return nil
		}
		free := *d.MemoryTotal - *d.MemoryUsed
		if d.MemoryReserved != nil {
			free -= *d.MemoryReserved
		}
		return mebibytes(&free)
	}),
	dcgmGauge("DCGM_FI_DEV_FB_USED", "Frame buffer memory used (in MiB).", func(d *gpu.Device) *float64 { return mebibytes(d.MemoryUsed) }),
	dcgmGauge("DCGM_FI_DEV_FB_RESERVED", "Frame buffer memory reserved (in MiB).", func(d *gpu.Device) *float64 { return mebibytes(d.MemoryReserved) }),
	dcgmGauge("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "Remapped rows for uncorrectable errors.", func(d *gpu.Device) *float64 { return entry(d.RemappedRows, "uncorrected", 1) }),
	dcgmGauge("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "Remapped rows for correctable errors.", func(d *gpu.Device) *float64 { return entry(d.RemappedRows, "corrected", 1) }),
	dcgmGauge("DCGM_FI_DEV_ROW_REMAP_FAILURE", "Whether remapping of rows has failed.", func(d *gpu.Device) *float64 {
		if d.RowRemapFailed == nil {
			return nil
		}
		v := number(*d.RowRemapFailed)
		return &v
	}),
	dcgmGauge("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "Ratio of time the graphics engine is active.", func(d *gpu.Device) *float64 {
		return activity(d, func(a *gpu.Activity) *float64 { return a.Graphics })
	}),
	dcgmGauge("DCGM_FI_PROF_SM_ACTIVE", "Ratio of time an SM has at least one warp assigned.", func(d *gpu.Device) *float64 {
		return activity(d, func(a *gpu.Activity) *float64 { return a.SMRatio })
	}),
	dcgmGauge("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "Ratio of cycles the tensor pipe is active.", func(d *gpu.Device) *float64 {
		return activity(d, func(a *gpu.Activity) *float64 { return a.TensorRatio })
	}),
	dcgmGauge("DCGM_FI_PROF_DRAM_ACTIVE", "Ratio of cycles the memory interface sends or receives.", func(d *gpu.Device) *float64 {
		return activity(d, func(a *gpu.Activity) *float64 { return a.DRAMRatio })
	}),
}

func (c *dcgm) render(p page) {
	s := c.snapshot()
	type holder struct{ container, namespace, pod string }
	holders := map[string][]holder{}
	for _, a := range s.Held {
		holders[a.UUID] = append(holders[a.UUID], holder{a.Container, a.Namespace, a.Pod})
	}
	write := func(gpuOf, d *gpu.Device, uuid, profile, instance string) {
		var h holder
		if all := holders[uuid]; len(all) == 1 {
			h = all[0]
		}
		for _, f := range dcgmFamilies {
			p.maybe(f.family, f.value(d), strconv.Itoa(gpuOf.Index), gpuOf.UUID, gpuOf.PCIBusID, fmt.Sprintf("nvidia%d", gpuOf.Minor), gpuOf.Model, c.host,
				s.GPUs.DriverVersion, profile, instance, h.container, h.namespace, h.pod)
		}
	}
	for i := range s.GPUs.Devices {
		d := &s.GPUs.Devices[i]
		write(d, d, d.UUID, "", "")
		for _, in := range d.Instances { // of which only its load and its memory are its own
			write(d, &gpu.Device{Load: in.Load, Memory: in.Memory}, in.UUID, in.Profile, strconv.Itoa(in.GPUInstance))
		}
	}
}
