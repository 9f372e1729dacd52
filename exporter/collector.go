package exporter

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/capstan-gpu/capstan/exporter/gpu"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/trainer/stats"
)

// Families about the exporter itself, which nobody else reads by name.
const (
	stageAge       = metricname.Prefix + "stage_age_seconds"
	kubeletUp      = metricname.Prefix + "kubelet_api_up"
	podsWithoutUID = metricname.Prefix + "pods_without_uid"
	unknownDevices = metricname.Prefix + "unknown_device_ids"
	samplesRefused = metricname.Prefix + "stats_samples_refused_total"
	labelAPI       = "api"
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

func podDesc(name, help string, labels ...string) *prometheus.Desc {
	return desc(name, help, append([]string{metricname.Namespace, metricname.Pod, metricname.PodUID}, labels...)...)
}

func instanceDesc(name, help string, labels ...string) *prometheus.Desc {
	return desc(name, help, append([]string{metricname.UUID, metricname.ParentUUID, metricname.Profile}, labels...)...)
}

// activityDescs are the families of one [gpu.Activity].
type activityDescs struct{ sm, tensor, dram, observed *prometheus.Desc }

var (
	descGPUInfo = desc(metricname.GPUInfo, "Who this GPU is, and what its utilization is made of: samples, rates, or nothing.",
		metricname.UUID, metricname.Index, metricname.Minor, metricname.Model, metricname.PCIBusID, metricname.DriverVersion, metricname.UtilizationSource)
	descGPUUp        = desc(metricname.GPUUp, "1 = the GPU answers, 0 = it was there and does not.", metricname.UUID)
	descBusy         = desc(metricname.GPUBusySeconds, "Seconds for which at least one kernel was running. Divide its rate by that of observed.", metricname.UUID)
	descObserved     = desc(metricname.GPUObservedSeconds, "Seconds for which a valid reading of the utilization exists.", metricname.UUID)
	descUtilization  = desc(metricname.GPUUtilizationRatio, "Busy share in the newest reading, 0 to 1.", metricname.UUID)
	descMemUsed      = desc(metricname.GPUMemoryUsed, "Memory in use, without what the driver reserves.", metricname.UUID)
	descMemReserved  = desc(metricname.GPUMemoryReserved, "Memory that the driver holds for itself.", metricname.UUID)
	descMemTotal     = desc(metricname.GPUMemoryTotal, "Memory of the GPU.", metricname.UUID)
	descPower        = desc(metricname.GPUPower, "Power drawn.", metricname.UUID)
	descEnergy       = desc(metricname.GPUEnergy, "Energy used since the driver was loaded.", metricname.UUID)
	descTemperature  = desc(metricname.GPUTemperature, "Temperature of the GPU.", metricname.UUID)
	descPowerInstant = desc(metricname.GPUPowerInstant, "Power drawn at this instant.", metricname.UUID)
	descPowerLimit   = desc(metricname.GPUPowerLimit, "Power that the driver lets the GPU draw.", metricname.UUID)
	descMemTemp      = desc(metricname.GPUMemoryTemperature, "Temperature of the memory.", metricname.UUID)
	descThrottled    = desc(metricname.GPUThrottledSeconds, "Time in which the clocks were held down, by why.", metricname.UUID, metricname.Reason)
	descPCIe         = desc(metricname.GPUPCIeBytes, "Bytes moved over PCIe.", metricname.UUID, metricname.Direction)
	descNVLink       = desc(metricname.GPUNVLinkBytes, "Bytes moved over all NVLinks, without overhead of the protocol.", metricname.UUID, metricname.Direction)
	descReplays      = desc(metricname.GPUPCIeReplays, "Transfers over PCIe that had to be repeated.", metricname.UUID)
	descEngine       = desc(metricname.GPUEngineUtilization, "Busy share of the encoder, the decoder and the memory's controller in the last second, 0 to 1; not how full the memory is.", metricname.UUID, metricname.Engine)
	descECC          = desc(metricname.GPUECCErrors, "ECC errors since the driver was loaded.", metricname.UUID, metricname.Type)
	descRemapped     = desc(metricname.GPURemappedRows, "Memory rows replaced by spare ones, by the errors that caused it.", metricname.UUID, metricname.Type)
	descRemapPending = desc(metricname.GPURowRemapPending, "1 = a row is replaced at the next reset of the GPU.", metricname.UUID)
	descRemapFailed  = desc(metricname.GPURowRemapFailed, "1 = a row could not be replaced: the GPU is to be exchanged.", metricname.UUID)
	descRecovery     = desc(metricname.GPURecoveryAction, "What the driver asks for: 0 nothing, 1 reset the GPU, 2 reboot the node, 3 drain, 4 drain and reset.", metricname.UUID)
	descXID          = desc(metricname.GPUXIDErrors, "XID errors that the driver reported since the exporter began.", metricname.UUID, metricname.XID)
	descCallSeconds  = desc(metricname.CallSeconds, "Time that calls of NVML took.", metricname.Call)

	descActivity = activityDescs{
		sm:       desc(metricname.GPUSMActive, "Seconds of the multiprocessors' activity, weighed by its share. Divide its rate by that of activity_observed.", metricname.UUID),
		tensor:   desc(metricname.GPUTensorActive, "Seconds of the tensor pipes' activity, weighed by its share.", metricname.UUID),
		dram:     desc(metricname.GPUDRAMActive, "Seconds of use of the memory's bandwidth, weighed by its share.", metricname.UUID),
		observed: desc(metricname.GPUActivityObserved, "Seconds for which the performance counters were read.", metricname.UUID),
	}
	descInstanceInfo        = instanceDesc(metricname.InstanceInfo, "A MIG instance, and what its utilization is made of.", metricname.GPUInstance, metricname.UtilizationSource)
	descInstanceBusy        = instanceDesc(metricname.InstanceBusySeconds, "Seconds for which the instance's graphics engine was busy.")
	descInstanceObserved    = instanceDesc(metricname.InstanceObservedSeconds, "Seconds for which a valid reading of the instance's utilization exists.")
	descInstanceUtilization = instanceDesc(metricname.InstanceUtilizationRatio, "Busy share in the newest reading, 0 to 1.")
	descInstanceMemUsed     = instanceDesc(metricname.InstanceMemoryUsed, "Memory of the instance in use.")
	descInstanceMemTotal    = instanceDesc(metricname.InstanceMemoryTotal, "Memory of the instance.")
	descInstanceActivity    = activityDescs{
		sm:       instanceDesc(metricname.InstanceSMActive, "As of the GPU, of this instance's multiprocessors."),
		tensor:   instanceDesc(metricname.InstanceTensorActive, "As of the GPU, of this instance's tensor pipes."),
		dram:     instanceDesc(metricname.InstanceDRAMActive, "As of the GPU, of this instance's part of the bandwidth."),
		observed: instanceDesc(metricname.InstanceActivityObserved, "Seconds for which the instance's performance counters were read."),
	}

	descClock      = desc(metricname.GPUClock, "Clock frequency now.", metricname.UUID, metricname.Clock)
	descCallErrors = desc(metricname.GPUCollectErrors, "NVML calls that failed, by call and code; OUT_OF_RANGE = an answer that cannot be and was dropped; without uuid those of the library as a whole.",
		metricname.UUID, metricname.Call, metricname.Code)
	descAllocation = desc(metricname.GPUAllocationInfo, "Which container holds this GPU.",
		metricname.UUID, metricname.Namespace, metricname.Pod, metricname.PodUID, metricname.Container, metricname.Resource, metricname.Shared)

	descPodGPUs         = podDesc(metricname.PodGPUs, "Distinct GPUs that the pod holds.")
	descPodBusy         = podDesc(metricname.PodGPUBusySeconds, "Busy GPU-seconds of the pod's GPUs while it held them. On a shared GPU the device's, never to be summed.", metricname.Shared)
	descPodObserved     = podDesc(metricname.PodGPUObservedSeconds, "GPU-seconds of the pod's GPUs for which a valid reading exists, while it held them.", metricname.Shared)
	descPodSM           = podDesc(metricname.PodSMActive, "Seconds of the multiprocessors' activity of the pod's GPUs, weighed by its share.", metricname.Shared)
	descPodActivity     = podDesc(metricname.PodActivityObserved, "GPU-seconds for which the performance counters of the pod's GPUs were read.", metricname.Shared)
	descProcessBusy     = podDesc(metricname.PodProcessBusySeconds, "GPU-seconds of the pod's own processes, weighed by their share of the multiprocessors. The pods of a GPU add up.")
	descProcessObserved = podDesc(metricname.PodProcessObserved, "GPU-seconds for which the shares of processes are known on the pod's GPUs.")
	descProcessMemory   = podDesc(metricname.PodProcessMemoryUsed, "Memory that the pod's own processes use.")
	descPodMemory       = podDesc(metricname.PodGPUMemoryUsed, "Memory in use on the pod's GPUs.", metricname.Shared)

	descLibraryUp     = desc(metricname.LibraryUp, "1 = the NVML library answers.")
	descSnapshot      = desc(metricname.SnapshotTimestamp, "When the GPUs were read.")
	descDuration      = desc(metricname.CollectionSeconds, "How long the newest round of a stage took.", metricname.Stage)
	descAge           = desc(stageAge, "How long ago a stage last came to an end; grows while its driver, kubelet or trainers do not answer.", metricname.Stage)
	descMappingAge    = desc(metricname.PodMappingAge, "Age of the kubelet's answer that allocations rest on; absent when there is none.")
	descMappingErrors = desc(metricname.PodMappingErrors, "Answers of the kubelet that could not be used.", metricname.Reason)
	descKubeletUp     = desc(kubeletUp, "1 = this interface of the kubelet answers. Without pods there are no UIDs, and nothing per pod is exported.", labelAPI)
	descWithoutUID    = desc(podsWithoutUID, "Pods that hold a device and have no certain UID; nothing is exported for them.")
	descUnknown       = desc(unknownDevices, "Device ids in the hands of pods that are no GPU of this node's driver; nothing is exported for them.")
	descReads         = desc(metricname.StatsReads, "Reads of trainers' stats pages, by how they ended.", metricname.Result)
	descRefused       = desc(samplesRefused, "Single samples left out of good stats pages.", metricname.Reason)

	allDescs = []*prometheus.Desc{descGPUInfo, descGPUUp, descBusy, descObserved, descUtilization, descMemUsed, descMemReserved, descMemTotal,
		descPower, descPowerInstant, descPowerLimit, descEnergy, descTemperature, descMemTemp, descClock, descThrottled, descPCIe, descReplays, descNVLink, descEngine, descECC,
		descRemapped, descRemapPending, descRemapFailed, descRecovery, descXID, descCallSeconds,
		descActivity.sm, descActivity.tensor, descActivity.dram, descActivity.observed,
		descInstanceInfo, descInstanceBusy, descInstanceObserved, descInstanceUtilization, descInstanceMemUsed, descInstanceMemTotal,
		descInstanceActivity.sm, descInstanceActivity.tensor, descInstanceActivity.dram, descInstanceActivity.observed, descPodSM, descPodActivity, descProcessBusy, descProcessObserved, descProcessMemory, descCallErrors, descAllocation, descPodGPUs, descPodBusy, descPodObserved, descPodMemory,
		descLibraryUp, descSnapshot, descDuration, descAge, descMappingAge, descMappingErrors, descKubeletUp, descWithoutUID,
		descUnknown, descReads, descRefused}
)

// trainingDescs are the descriptions of what stats pages may say, by the name on the page.
func trainingDescs(families []stats.Family) map[string]*prometheus.Desc {
	descs := make(map[string]*prometheus.Desc, len(families))
	for _, f := range families {
		descs[f.Name] = podDesc(metricname.Prefix+f.Name, f.Help, f.Labels...)
	}
	return descs
}

// collector renders the newest Snapshot. It does no other work, and never panics on what a driver, kubelet or trainer said.
type collector struct {
	snapshot func() *Snapshot
	now      func() time.Time
	training map[string]*prometheus.Desc
}

// Describe sends every family that Collect may.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range allDescs {
		ch <- d
	}
	for _, d := range c.training {
		ch <- d
	}
}

// Collect renders.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	s, now := c.snapshot(), c.now()
	p := page{ch}
	p.self(s, now)
	for i := range s.GPUs.Devices {
		p.device(&s.GPUs.Devices[i], s.GPUs.DriverVersion)
	}
	for _, e := range s.GPUs.Errors {
		p.counter(descCallErrors, float64(e.Count), e.UUID, e.Call, e.Code)
	}
	for _, c := range s.GPUs.Costs {
		p.counter(descCallSeconds, c.Seconds, c.Call)
	}
	p.allocations(s)
	for _, u := range s.Usage {
		p.pod(u)
	}
	for _, t := range s.Training.Pages {
		for _, sample := range t.Samples {
			labels := append([]string{t.Namespace, t.Pod, t.UID}, sample.Labels...)
			if sample.Family.Kind == stats.Counter {
				p.counter(c.training[sample.Family.Name], sample.Value, labels...)
			} else {
				p.gauge(c.training[sample.Family.Name], sample.Value, labels...)
			}
		}
	}
}

// page is one rendering.
type page struct{ ch chan<- prometheus.Metric }

func (p page) gauge(d *prometheus.Desc, v float64, labels ...string) {
	p.send(d, prometheus.GaugeValue, v, labels)
}

func (p page) counter(d *prometheus.Desc, v float64, labels ...string) {
	p.send(d, prometheus.CounterValue, v, labels)
}

func (p page) send(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels []string) {
	for i, l := range labels {
		labels[i] = strings.ToValidUTF8(l, "�") // a driver's string is bytes
	}
	m, err := prometheus.NewConstMetric(d, kind, v, labels...)
	if err != nil { // one series less, not a page less
		m = prometheus.NewInvalidMetric(d, err)
	}
	p.ch <- m
}

func (p page) maybe(d *prometheus.Desc, v *float64, labels ...string) {
	if v != nil {
		p.gauge(d, *v, labels...)
	}
}

func (p page) bytes(d *prometheus.Desc, v *uint64, labels ...string) {
	if v != nil {
		p.gauge(d, float64(*v), labels...)
	}
}

func (p page) device(d *gpu.Device, driver string) {
	p.gauge(descGPUInfo, 1, d.UUID, strconv.Itoa(d.Index), strconv.Itoa(d.Minor), d.Model, d.PCIBusID, driver, d.UtilizationSource)
	p.gauge(descGPUUp, number(d.Up), d.UUID)
	p.load(d.Load, descBusy, descObserved, descUtilization, descActivity, d.UUID)
	p.bytes(descMemUsed, d.MemoryUsed, d.UUID)
	p.bytes(descMemReserved, d.MemoryReserved, d.UUID)
	p.bytes(descMemTotal, d.MemoryTotal, d.UUID)
	p.maybe(descPower, d.PowerWatts, d.UUID)
	p.maybe(descPowerInstant, d.PowerInstantWatts, d.UUID)
	p.maybe(descPowerLimit, d.PowerLimitWatts, d.UUID)
	p.maybeCounter(descEnergy, d.EnergyJoules, d.UUID)
	p.maybe(descTemperature, d.TemperatureCelsius, d.UUID)
	p.maybe(descMemTemp, d.MemoryTemperatureCelsius, d.UUID)
	p.each(descClock, prometheus.GaugeValue, d.ClockHertz, d.UUID)
	p.each(descClock, prometheus.GaugeValue, d.MoreClockHertz, d.UUID)
	p.each(descThrottled, prometheus.CounterValue, d.ThrottledSeconds, d.UUID)
	p.each(descPCIe, prometheus.CounterValue, d.PCIeBytes, d.UUID)
	p.maybeCounter(descReplays, d.PCIeReplays, d.UUID)
	p.each(descEngine, prometheus.GaugeValue, d.EngineUtilization, d.UUID)
	p.each(descNVLink, prometheus.CounterValue, d.NVLinkBytes, d.UUID)
	p.each(descECC, prometheus.CounterValue, d.ECCErrors, d.UUID)
	p.each(descRemapped, prometheus.GaugeValue, d.RemappedRows, d.UUID)
	p.flag(descRemapPending, d.RowRemapPending, d.UUID)
	p.flag(descRemapFailed, d.RowRemapFailed, d.UUID)
	if d.RecoveryAction != nil {
		p.gauge(descRecovery, float64(*d.RecoveryAction), d.UUID)
	}
	for xid, n := range d.XIDErrors {
		p.counter(descXID, float64(n), d.UUID, strconv.FormatUint(xid, 10))
	}
	for _, in := range d.Instances {
		p.gauge(descInstanceInfo, 1, in.UUID, d.UUID, in.Profile, strconv.Itoa(in.GPUInstance), in.UtilizationSource)
		p.load(in.Load, descInstanceBusy, descInstanceObserved, descInstanceUtilization, descInstanceActivity, in.UUID, d.UUID, in.Profile)
		p.bytes(descInstanceMemUsed, in.MemoryUsed, in.UUID, d.UUID, in.Profile)
		p.bytes(descInstanceMemTotal, in.MemoryTotal, in.UUID, d.UUID, in.Profile)
	}
}

func (p page) load(l gpu.Load, busy, observed, utilization *prometheus.Desc, activity activityDescs, labels ...string) {
	if l.UtilizationSource != "" {
		p.counter(busy, l.Busy, labels...)
		p.counter(observed, l.Observed, labels...)
	}
	p.maybe(utilization, l.Utilization, labels...)
	if a := l.Activity; a != nil {
		p.counter(activity.observed, a.Observed, labels...)
		p.maybeCounter(activity.sm, a.SM, labels...)
		p.maybeCounter(activity.tensor, a.Tensor, labels...)
		p.maybeCounter(activity.dram, a.DRAM, labels...)
	}
}

// each writes one line for each key, which is the last label.
func (p page) each(d *prometheus.Desc, kind prometheus.ValueType, values map[string]float64, labels ...string) {
	for key, v := range values {
		p.send(d, kind, v, append(slices.Clone(labels), key))
	}
}

func (p page) flag(d *prometheus.Desc, set *bool, labels ...string) {
	if set != nil {
		p.gauge(d, number(*set), labels...)
	}
}

func (p page) maybeCounter(d *prometheus.Desc, v *float64, labels ...string) {
	if v != nil {
		p.counter(d, *v, labels...)
	}
}

// allocations writes one line for each container and GPU; two replicas of a GPU in one container are one line.
func (p page) allocations(s *Snapshot) {
	type line struct{ uuid, namespace, pod, uid, container, resource string }
	var last line
	for _, a := range s.Held {
		now := line{a.UUID, a.Namespace, a.Pod, a.PodUID, a.Container, a.Resource}
		if now == last {
			continue
		}
		last = now
		p.gauge(descAllocation, 1, a.UUID, a.Namespace, a.Pod, a.PodUID, a.Container, a.Resource, strconv.FormatBool(a.Shared))
	}
}

func (p page) pod(u PodUsage) {
	shared := strconv.FormatBool(u.Shared)
	p.gauge(descPodGPUs, float64(u.GPUs), u.Namespace, u.Pod, u.PodUID)
	p.maybeCounter(descPodBusy, u.Busy, u.Namespace, u.Pod, u.PodUID, shared)
	p.maybeCounter(descPodObserved, u.Observed, u.Namespace, u.Pod, u.PodUID, shared)
	p.maybeCounter(descPodSM, u.SMActive, u.Namespace, u.Pod, u.PodUID, shared)
	p.maybeCounter(descPodActivity, u.ActivityObserved, u.Namespace, u.Pod, u.PodUID, shared)
	if u.Process != nil {
		p.counter(descProcessBusy, u.Process.Busy, u.Namespace, u.Pod, u.PodUID)
		p.counter(descProcessObserved, u.Process.Observed, u.Namespace, u.Pod, u.PodUID)
		p.bytes(descProcessMemory, u.Process.MemoryUsed, u.Namespace, u.Pod, u.PodUID)
	}
	p.bytes(descPodMemory, u.MemoryUsed, u.Namespace, u.Pod, u.PodUID, shared)
}

func (p page) self(s *Snapshot, now time.Time) {
	if !s.Stages[stageGPU].Ended.IsZero() {
		p.gauge(descLibraryUp, number(s.GPUs.Err == nil))
		p.gauge(descSnapshot, float64(s.GPUs.At.UnixMilli())/1000)
	}
	for i, stage := range s.Stages {
		if !stage.Ended.IsZero() {
			p.gauge(descDuration, stage.Took.Seconds(), stageNames[i])
		}
		p.gauge(descAge, stage.Age(now).Seconds(), stageNames[i])
	}
	if !s.Mapping.At.IsZero() {
		p.gauge(descMappingAge, now.Sub(s.Mapping.At).Seconds())
	}
	for reason, n := range s.Mapping.Errors {
		p.counter(descMappingErrors, float64(n), reason)
	}
	p.gauge(descKubeletUp, number(s.Mapping.Resources.Up), "pod-resources")
	p.gauge(descKubeletUp, number(s.Mapping.PodsAPI.Up), "pods")
	p.gauge(descWithoutUID, float64(len(s.Mapping.Unbound)))
	p.gauge(descUnknown, float64(len(s.unknownDevices())))
	for reason, n := range s.Training.Reads {
		p.counter(descReads, float64(n), reason)
	}
	for reason, n := range s.Training.Refused {
		p.counter(descRefused, float64(n), reason)
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
