package exporter

import (
	"maps"
	"slices"
	"strconv"
	"time"

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

// ofPod are the labels of a family about pods; more may follow.
func ofPod(more ...string) []string {
	return append([]string{metricname.Namespace, metricname.Pod, metricname.PodUID}, more...)
}

// ofInstance are the labels of a family about MIG instances.
func ofInstance(more ...string) []string {
	return append([]string{metricname.UUID, metricname.ParentUUID, metricname.Profile}, more...)
}

// activityFamilies are the families of one [gpu.Activity].
type activityFamilies struct{ sm, tensor, dram, observed *family }

var (
	familyGPUInfo = gauge(metricname.GPUInfo, "Who this GPU is, and what its utilization is made of: samples, rates, or nothing.",
		metricname.UUID, metricname.Index, metricname.Minor, metricname.Model, metricname.PCIBusID, metricname.DriverVersion, metricname.UtilizationSource)
	familyGPUUp        = gauge(metricname.GPUUp, "1 = the GPU answers, 0 = it was there and does not.", metricname.UUID)
	familyBusy         = counter(metricname.GPUBusySeconds, "Seconds for which at least one kernel was running. Divide its rate by that of observed.", metricname.UUID)
	familyObserved     = counter(metricname.GPUObservedSeconds, "Seconds for which a valid reading of the utilization exists.", metricname.UUID)
	familyUtilization  = gauge(metricname.GPUUtilizationRatio, "Busy share in the newest reading, 0 to 1.", metricname.UUID)
	familyMemUsed      = gauge(metricname.GPUMemoryUsed, "Memory in use, without what the driver reserves.", metricname.UUID)
	familyMemReserved  = gauge(metricname.GPUMemoryReserved, "Memory that the driver holds for itself.", metricname.UUID)
	familyMemTotal     = gauge(metricname.GPUMemoryTotal, "Memory of the GPU.", metricname.UUID)
	familyPower        = gauge(metricname.GPUPower, "Power drawn.", metricname.UUID)
	familyEnergy       = counter(metricname.GPUEnergy, "Energy used since the driver was loaded.", metricname.UUID)
	familyTemperature  = gauge(metricname.GPUTemperature, "Temperature of the GPU.", metricname.UUID)
	familyPowerInstant = gauge(metricname.GPUPowerInstant, "Power drawn at this instant.", metricname.UUID)
	familyPowerLimit   = gauge(metricname.GPUPowerLimit, "Power that the driver lets the GPU draw.", metricname.UUID)
	familyMemTemp      = gauge(metricname.GPUMemoryTemperature, "Temperature of the memory.", metricname.UUID)
	familyThrottled    = counter(metricname.GPUThrottledSeconds, "Time in which the clocks were held down, by why.", metricname.UUID, metricname.Reason)
	familyPCIe         = counter(metricname.GPUPCIeBytes, "Bytes moved over PCIe.", metricname.UUID, metricname.Direction)
	familyNVLink       = counter(metricname.GPUNVLinkBytes, "Bytes moved over all NVLinks, without overhead of the protocol.", metricname.UUID, metricname.Direction)
	familyReplays      = counter(metricname.GPUPCIeReplays, "Transfers over PCIe that had to be repeated.", metricname.UUID)
	familyEngine       = gauge(metricname.GPUEngineUtilization, "Busy share of the encoder, the decoder and the memory's controller in the last second, 0 to 1; not how full the memory is.", metricname.UUID, metricname.Engine)
	familyECC          = counter(metricname.GPUECCErrors, "ECC errors since the driver was loaded.", metricname.UUID, metricname.Type)
	familyRemapped     = gauge(metricname.GPURemappedRows, "Memory rows replaced by spare ones, by the errors that caused it.", metricname.UUID, metricname.Type)
	familyRemapPending = gauge(metricname.GPURowRemapPending, "1 = a row is replaced at the next reset of the GPU.", metricname.UUID)
	familyRemapFailed  = gauge(metricname.GPURowRemapFailed, "1 = a row could not be replaced: the GPU is to be exchanged.", metricname.UUID)
	familyRecovery     = gauge(metricname.GPURecoveryAction, "What the driver asks for: 0 nothing, 1 reset the GPU, 2 reboot the node, 3 drain, 4 drain and reset.", metricname.UUID)
	familyXID          = counter(metricname.GPUXIDErrors, "XID errors that the driver reported since the exporter began.", metricname.UUID, metricname.XID)
	familyCallSeconds  = counter(metricname.CallSeconds, "Time that calls of NVML took.", metricname.Call)

	familyActivity = activityFamilies{
		sm:       counter(metricname.GPUSMActive, "Seconds of the multiprocessors' activity, weighed by its share. Divide its rate by that of activity_observed.", metricname.UUID),
		tensor:   counter(metricname.GPUTensorActive, "Seconds of the tensor pipes' activity, weighed by its share.", metricname.UUID),
		dram:     counter(metricname.GPUDRAMActive, "Seconds of use of the memory's bandwidth, weighed by its share.", metricname.UUID),
		observed: counter(metricname.GPUActivityObserved, "Seconds for which the performance counters were read.", metricname.UUID),
	}
	familyInstanceInfo        = gauge(metricname.InstanceInfo, "A MIG instance, and what its utilization is made of.", ofInstance(metricname.GPUInstance, metricname.UtilizationSource)...)
	familyInstanceBusy        = counter(metricname.InstanceBusySeconds, "Seconds for which the instance's graphics engine was busy.", ofInstance()...)
	familyInstanceObserved    = counter(metricname.InstanceObservedSeconds, "Seconds for which a valid reading of the instance's utilization exists.", ofInstance()...)
	familyInstanceUtilization = gauge(metricname.InstanceUtilizationRatio, "Busy share in the newest reading, 0 to 1.", ofInstance()...)
	familyInstanceMemUsed     = gauge(metricname.InstanceMemoryUsed, "Memory of the instance in use.", ofInstance()...)
	familyInstanceMemTotal    = gauge(metricname.InstanceMemoryTotal, "Memory of the instance.", ofInstance()...)
	familyInstanceActivity    = activityFamilies{
		sm:       counter(metricname.InstanceSMActive, "As of the GPU, of this instance's multiprocessors.", ofInstance()...),
		tensor:   counter(metricname.InstanceTensorActive, "As of the GPU, of this instance's tensor pipes.", ofInstance()...),
		dram:     counter(metricname.InstanceDRAMActive, "As of the GPU, of this instance's part of the bandwidth.", ofInstance()...),
		observed: counter(metricname.InstanceActivityObserved, "Seconds for which the instance's performance counters were read.", ofInstance()...),
	}

	familyClock      = gauge(metricname.GPUClock, "Clock frequency now.", metricname.UUID, metricname.Clock)
	familyCallErrors = counter(metricname.GPUCollectErrors, "NVML calls that failed, by call and code; OUT_OF_RANGE = an answer that cannot be and was dropped; without uuid those of the library as a whole.",
		metricname.UUID, metricname.Call, metricname.Code)
	familyAllocation = gauge(metricname.GPUAllocationInfo, "Which container holds this GPU.",
		metricname.UUID, metricname.Namespace, metricname.Pod, metricname.PodUID, metricname.Container, metricname.Resource, metricname.Shared)

	familyPodGPUs         = gauge(metricname.PodGPUs, "Distinct GPUs that the pod holds.", ofPod()...)
	familyPodBusy         = counter(metricname.PodGPUBusySeconds, "Busy GPU-seconds of the pod's GPUs while it held them. On a shared GPU the device's, never to be summed.", ofPod(metricname.Shared)...)
	familyPodObserved     = counter(metricname.PodGPUObservedSeconds, "GPU-seconds of the pod's GPUs for which a valid reading exists, while it held them.", ofPod(metricname.Shared)...)
	familyPodSM           = counter(metricname.PodSMActive, "Seconds of the multiprocessors' activity of the pod's GPUs, weighed by its share.", ofPod(metricname.Shared)...)
	familyPodActivity     = counter(metricname.PodActivityObserved, "GPU-seconds for which the performance counters of the pod's GPUs were read.", ofPod(metricname.Shared)...)
	familyProcessBusy     = counter(metricname.PodProcessBusySeconds, "GPU-seconds of the pod's own processes, weighed by their share of the multiprocessors. The pods of a GPU add up.", ofPod()...)
	familyProcessObserved = counter(metricname.PodProcessObserved, "GPU-seconds for which the shares of processes are known on the pod's GPUs.", ofPod()...)
	familyProcessMemory   = gauge(metricname.PodProcessMemoryUsed, "Memory that the pod's own processes use.", ofPod()...)
	familyPodMemoryTotal  = gauge(metricname.PodGPUMemoryTotal, "Memory of the pod's GPUs.", ofPod(metricname.Shared)...)
	familyPodMemory       = gauge(metricname.PodGPUMemoryUsed, "Memory in use on the pod's GPUs.", ofPod(metricname.Shared)...)

	familyLibraryUp        = gauge(metricname.LibraryUp, "1 = the NVML library answers.")
	familySnapshot         = gauge(metricname.SnapshotTimestamp, "When the GPUs were read.")
	familyDuration         = gauge(metricname.CollectionSeconds, "How long the newest round of a stage took.", metricname.Stage)
	familyAge              = gauge(stageAge, "How long ago a stage last came to an end; grows while its driver, kubelet or trainers do not answer.", metricname.Stage)
	familyMappingAge       = gauge(metricname.PodMappingAge, "Age of the kubelet's answer that allocations rest on; absent when there is none.")
	familyMappingErrors    = counter(metricname.PodMappingErrors, "Answers of the kubelet that could not be used.", metricname.Reason)
	familyKubeletUp        = gauge(kubeletUp, "1 = this interface of the kubelet answers. Without pods there are no UIDs, and nothing per pod is exported.", labelAPI)
	familyWithoutUID       = gauge(podsWithoutUID, "Pods that hold a device and have no certain UID; nothing is exported for them.")
	familyUnknown          = gauge(unknownDevices, "Device ids in the hands of pods that are no GPU of this node's driver; nothing is exported for them.")
	familyTrainingObserved = counter(metricname.TrainingObserved, "Seconds between the first and the newest read of the stats page. Divide the rates of its counters by its.", ofPod()...)
	familyReads            = counter(metricname.StatsReads, "Reads of trainers' stats pages, by how they ended.", metricname.Result)
	familyRefused          = counter(samplesRefused, "Single samples left out of good stats pages.", metricname.Reason)
)

// trainingFamilies are the families of what stats pages may say, by the name on the page.
func trainingFamilies(families []stats.Family) map[string]*family {
	all := make(map[string]*family, len(families))
	for _, f := range families {
		kind := gauge
		if f.Kind == stats.Counter {
			kind = counter
		}
		all[f.Name] = kind(metricname.Prefix+f.Name, f.Help, ofPod(f.Labels...)...)
	}
	return all
}

// nodeRenderer renders the newest Snapshot. It does no other work, and never panics on what a driver, kubelet or trainer said.
type nodeRenderer struct {
	snapshot func() *Snapshot
	now      func() time.Time
	training map[string]*family
}

func (r *nodeRenderer) render(p page) {
	s, now := r.snapshot(), r.now()
	p.self(s, now)
	for i := range s.GPUs.Devices {
		p.device(&s.GPUs.Devices[i], s.GPUs.DriverVersion)
	}
	for _, e := range s.GPUs.Errors {
		p.add(familyCallErrors, float64(e.Count), e.UUID, e.Call, e.Code)
	}
	for _, c := range s.GPUs.Costs {
		p.add(familyCallSeconds, c.Seconds, c.Call)
	}
	p.allocations(s)
	for _, u := range s.Usage {
		p.pod(u)
	}
	for _, t := range s.Training.Pages {
		p.add(familyTrainingObserved, t.At.Sub(t.First).Seconds(), t.Namespace, t.Pod, t.UID)
		for _, sample := range t.Samples {
			p.add(r.training[sample.Family.Name], sample.Value, append([]string{t.Namespace, t.Pod, t.UID}, sample.Labels...)...)
		}
	}
}

func (p page) device(d *gpu.Device, driver string) {
	p.add(familyGPUInfo, 1, d.UUID, strconv.Itoa(d.Index), strconv.Itoa(d.Minor), d.Model, d.PCIBusID, driver, d.UtilizationSource)
	p.add(familyGPUUp, number(d.Up), d.UUID)
	p.load(d.Load, familyBusy, familyObserved, familyUtilization, familyActivity, d.UUID)
	p.bytes(familyMemUsed, d.MemoryUsed, d.UUID)
	p.bytes(familyMemReserved, d.MemoryReserved, d.UUID)
	p.bytes(familyMemTotal, d.MemoryTotal, d.UUID)
	p.maybe(familyPower, d.PowerWatts, d.UUID)
	p.maybe(familyPowerInstant, d.PowerInstantWatts, d.UUID)
	p.maybe(familyPowerLimit, d.PowerLimitWatts, d.UUID)
	p.maybe(familyEnergy, d.EnergyJoules, d.UUID)
	p.maybe(familyTemperature, d.TemperatureCelsius, d.UUID)
	p.maybe(familyMemTemp, d.MemoryTemperatureCelsius, d.UUID)
	p.each(familyClock, d.ClockHertz, d.UUID)
	p.each(familyClock, d.MoreClockHertz, d.UUID)
	p.each(familyThrottled, d.ThrottledSeconds, d.UUID)
	p.each(familyPCIe, d.PCIeBytes, d.UUID)
	p.maybe(familyReplays, d.PCIeReplays, d.UUID)
	p.each(familyEngine, d.EngineUtilization, d.UUID)
	p.each(familyNVLink, d.NVLinkBytes, d.UUID)
	p.each(familyECC, d.ECCErrors, d.UUID)
	p.each(familyRemapped, d.RemappedRows, d.UUID)
	p.flag(familyRemapPending, d.RowRemapPending, d.UUID)
	p.flag(familyRemapFailed, d.RowRemapFailed, d.UUID)
	if d.RecoveryAction != nil {
		p.add(familyRecovery, float64(*d.RecoveryAction), d.UUID)
	}
	for _, xid := range slices.Sorted(maps.Keys(d.XIDErrors)) {
		p.add(familyXID, float64(d.XIDErrors[xid]), d.UUID, strconv.FormatUint(xid, 10))
	}
	for _, in := range d.Instances {
		p.add(familyInstanceInfo, 1, in.UUID, d.UUID, in.Profile, strconv.Itoa(in.GPUInstance), in.UtilizationSource)
		p.load(in.Load, familyInstanceBusy, familyInstanceObserved, familyInstanceUtilization, familyInstanceActivity, in.UUID, d.UUID, in.Profile)
		p.bytes(familyInstanceMemUsed, in.MemoryUsed, in.UUID, d.UUID, in.Profile)
		p.bytes(familyInstanceMemTotal, in.MemoryTotal, in.UUID, d.UUID, in.Profile)
	}
}

func (p page) load(l gpu.Load, busy, observed, utilization *family, activity activityFamilies, labels ...string) {
	if l.UtilizationSource != "" {
		p.add(busy, l.Busy, labels...)
		p.add(observed, l.Observed, labels...)
	}
	p.maybe(utilization, l.Utilization, labels...)
	if a := l.Activity; a != nil {
		p.add(activity.observed, a.Observed, labels...)
		p.maybe(activity.sm, a.SM, labels...)
		p.maybe(activity.tensor, a.Tensor, labels...)
		p.maybe(activity.dram, a.DRAM, labels...)
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
		p.add(familyAllocation, 1, a.UUID, a.Namespace, a.Pod, a.PodUID, a.Container, a.Resource, strconv.FormatBool(a.Shared))
	}
}

func (p page) pod(u PodUsage) {
	shared := strconv.FormatBool(u.Shared)
	p.add(familyPodGPUs, float64(u.GPUs), u.Namespace, u.Pod, u.PodUID)
	p.maybe(familyPodBusy, u.Busy, u.Namespace, u.Pod, u.PodUID, shared)
	p.maybe(familyPodObserved, u.Observed, u.Namespace, u.Pod, u.PodUID, shared)
	p.maybe(familyPodSM, u.SMActive, u.Namespace, u.Pod, u.PodUID, shared)
	p.maybe(familyPodActivity, u.ActivityObserved, u.Namespace, u.Pod, u.PodUID, shared)
	if u.Process != nil {
		p.add(familyProcessBusy, u.Process.Busy, u.Namespace, u.Pod, u.PodUID)
		p.add(familyProcessObserved, u.Process.Observed, u.Namespace, u.Pod, u.PodUID)
		p.bytes(familyProcessMemory, u.Process.MemoryUsed, u.Namespace, u.Pod, u.PodUID)
	}
	p.bytes(familyPodMemory, u.MemoryUsed, u.Namespace, u.Pod, u.PodUID, shared)
	p.bytes(familyPodMemoryTotal, u.MemoryTotal, u.Namespace, u.Pod, u.PodUID, shared)
}

func (p page) self(s *Snapshot, now time.Time) {
	if !s.Stages[stageGPU].Ended.IsZero() {
		p.add(familyLibraryUp, number(s.GPUs.Err == nil))
		p.add(familySnapshot, float64(s.GPUs.At.UnixMilli())/1000)
	}
	for i, stage := range s.Stages {
		if !stage.Ended.IsZero() {
			p.add(familyDuration, stage.Took.Seconds(), stageNames[i])
		}
		p.add(familyAge, stage.Age(now).Seconds(), stageNames[i])
	}
	if !s.Mapping.At.IsZero() {
		p.add(familyMappingAge, now.Sub(s.Mapping.At).Seconds())
	}
	p.counts(familyMappingErrors, s.Mapping.Errors)
	p.add(familyKubeletUp, number(s.Mapping.Resources.Up), "pod-resources")
	p.add(familyKubeletUp, number(s.Mapping.PodsAPI.Up), "pods")
	p.add(familyWithoutUID, float64(len(s.Mapping.Unbound)))
	p.add(familyUnknown, float64(len(s.unknownDevices())))
	p.counts(familyReads, s.Training.Reads)
	p.counts(familyRefused, s.Training.Refused)
}
