// Package metricname holds the names that exporter, adapter, rules and dashboards share: the contract between them.
// It is a leaf: it imports nothing of ours, and renaming a constant here breaks one test on each side.
//
// Units are base units (seconds, bytes, watts, joules, ratio 0..1); device series carry only [UUID], pod series carry
// [Namespace], [Pod] and [PodUID]. A series that is absent means "not known", never zero.
package metricname

// Prefix starts every family that Capstan exports.
const Prefix = "capstan_"

// Families about a GPU. Each carries the label [UUID].
const (
	GPUInfo              = Prefix + "gpu_info"                   // 1; who this GPU is, in labels
	GPUUp                = Prefix + "gpu_up"                     // 1 = it answers, 0 = remembered but lost
	GPUBusySeconds       = Prefix + "gpu_busy_seconds_total"     // seconds for which a kernel was running
	GPUObservedSeconds   = Prefix + "gpu_observed_seconds_total" // seconds for which a valid reading exists
	GPUUtilizationRatio  = Prefix + "gpu_utilization_ratio"      // 0..1, the newest reading
	GPUMemoryUsed        = Prefix + "gpu_memory_used_bytes"      // without what the driver reserves
	GPUMemoryReserved    = Prefix + "gpu_memory_reserved_bytes"  // held by the driver
	GPUMemoryTotal       = Prefix + "gpu_memory_total_bytes"     //
	GPUPower             = Prefix + "gpu_power_watts"            //
	GPUEnergy            = Prefix + "gpu_energy_joules_total"    // since the driver was loaded
	GPUTemperature       = Prefix + "gpu_temperature_celsius"    //
	GPUPowerInstant      = Prefix + "gpu_power_instant_watts"    //
	GPUPowerLimit        = Prefix + "gpu_power_limit_watts"      // that the driver enforces
	GPUMemoryTemperature = Prefix + "gpu_memory_temperature_celsius"
	GPUThrottledSeconds  = Prefix + "gpu_throttled_seconds_total" // by label [Reason]
	GPUPCIeBytes         = Prefix + "gpu_pcie_bytes_total"        // by label [Direction]
	GPUNVLinkBytes       = Prefix + "gpu_nvlink_bytes_total"      // by label [Direction], over all links
	GPUPCIeReplays       = Prefix + "gpu_pcie_replays_total"
	GPUEngineUtilization = Prefix + "gpu_engine_utilization_ratio" // by label [Engine]
	GPUECCErrors         = Prefix + "gpu_ecc_errors_total"         // by label [Type]
	GPURemappedRows      = Prefix + "gpu_remapped_rows"            // by label [Type]
	GPURowRemapPending   = Prefix + "gpu_row_remap_pending"        // 1 = a reset of the GPU will remap
	GPURowRemapFailed    = Prefix + "gpu_row_remap_failed"         // 1 = no spare row is left
	GPURecoveryAction    = Prefix + "gpu_recovery_action"          // 0 none, 1 reset the GPU, 2 reboot the node, 3 drain, 4 drain and reset
	GPUXIDErrors         = Prefix + "gpu_xid_errors_total"         // by label [XID]
	GPUSMActive          = Prefix + "gpu_sm_active_seconds_total"  // weighed by the share of the multiprocessors; Hopper and newer
	GPUTensorActive      = Prefix + "gpu_tensor_active_seconds_total"
	GPUDRAMActive        = Prefix + "gpu_dram_active_seconds_total" // weighed by the share of the memory's bandwidth
	GPUActivityObserved  = Prefix + "gpu_activity_observed_seconds_total"
	CallSeconds          = Prefix + "nvml_call_seconds_total"     // by label [Call]
	GPUClock             = Prefix + "gpu_clock_hertz"             // by label [Clock]
	GPUCollectErrors     = Prefix + "gpu_collect_errors_total"    // by labels [Call] and [Code]; OUT_OF_RANGE = an answer that cannot be
	GPUAllocationInfo    = Prefix + "gpu_allocation_info"         // 1; which container holds this GPU
	LibraryUp            = Prefix + "nvml_up"                     // 1 = the NVML library answers
	SnapshotTimestamp    = Prefix + "snapshot_timestamp_seconds"  // Unix time at which the served snapshot was taken
	CollectionSeconds    = Prefix + "collection_duration_seconds" // duration of the newest collection, by label [Stage]
	StatsReads           = Prefix + "stats_page_reads_total"      // reads of trainers' stats pages, by label [Result]
	PodMappingAge        = Prefix + "pod_mapping_age_seconds"     // age of the newest good answer of the kubelet
	PodMappingErrors     = Prefix + "pod_mapping_errors_total"    // failed or unusable answers of the kubelet, by label [Reason]
)

// Families about a MIG instance. Each carries [UUID], [ParentUUID] and [Profile]. They are apart from those of the GPU, so that a sum
// over GPUs is one.
const (
	InstanceInfo             = Prefix + "gpu_instance_info" // 1; with [GPUInstance] and [UtilizationSource]
	InstanceBusySeconds      = Prefix + "gpu_instance_busy_seconds_total"
	InstanceObservedSeconds  = Prefix + "gpu_instance_observed_seconds_total"
	InstanceUtilizationRatio = Prefix + "gpu_instance_utilization_ratio"
	InstanceMemoryUsed       = Prefix + "gpu_instance_memory_used_bytes"
	InstanceMemoryTotal      = Prefix + "gpu_instance_memory_total_bytes"
	InstanceSMActive         = Prefix + "gpu_instance_sm_active_seconds_total"
	InstanceTensorActive     = Prefix + "gpu_instance_tensor_active_seconds_total"
	InstanceDRAMActive       = Prefix + "gpu_instance_dram_active_seconds_total"
	InstanceActivityObserved = Prefix + "gpu_instance_activity_observed_seconds_total"
)

// Families about a pod that holds GPUs. Each carries [Namespace], [Pod] and [PodUID].
const (
	PodGPUs               = Prefix + "pod_gpus"                        // number of distinct GPUs that the pod holds
	PodGPUBusySeconds     = Prefix + "pod_gpu_busy_seconds_total"      // GPU-seconds, summed over the pod's GPUs; label [Shared]
	PodGPUObservedSeconds = Prefix + "pod_gpu_observed_seconds_total"  // GPU-seconds, summed over the pod's GPUs; label [Shared]
	PodSMActive           = Prefix + "pod_gpu_sm_active_seconds_total" // GPU-seconds; label [Shared]
	PodActivityObserved   = Prefix + "pod_gpu_activity_observed_seconds_total"
	PodLabels             = Prefix + "pod_labels"                         // 1; the pod's labels that were asked for, as label_NAME
	PodProcessBusySeconds = Prefix + "pod_process_gpu_busy_seconds_total" // of the pod's own processes: these can be summed over the pods of a GPU
	PodProcessObserved    = Prefix + "pod_process_gpu_observed_seconds_total"
	PodProcessMemoryUsed  = Prefix + "pod_process_gpu_memory_used_bytes"
	PodGPUMemoryUsed      = Prefix + "pod_gpu_memory_used_bytes"  // of the pod's GPUs; label [Shared]
	PodGPUMemoryTotal     = Prefix + "pod_gpu_memory_total_bytes" // likewise
)

// Training is the prefix of the families read from trainers' stats pages: [Prefix] and the page's own name.
const Training = Prefix + "training_"

// Of these families, what the adapter reads of a worker's ring. Each carries [Namespace], [Pod] and [PodUID].
const (
	TrainingSteps         = Training + "steps_total"           // the ring's: every member counts the same
	TrainingStepDuration  = Training + "step_duration_seconds" // of the newest step
	TrainingGeneration    = Training + "ring_generation"
	TrainingGenerationAge = Training + "ring_generation_age_seconds"
)

// TrainingObserved is the twin of the counters on a trainer's page: seconds between the first and the newest read of it. A counter's rate
// divided by its is the trainer's own, whatever reads are missing.
const TrainingObserved = Training + "observed_seconds_total"

// Labels.
const (
	UUID              = "uuid"
	Index             = "index"
	Minor             = "minor"
	Model             = "model"
	PCIBusID          = "pci_bus_id"
	DriverVersion     = "driver_version"
	UtilizationSource = "utilization_source"
	Clock             = "clock"
	ParentUUID        = "parent_uuid"
	Profile           = "profile"
	GPUInstance       = "gpu_instance"
	Direction         = "direction"
	Engine            = "engine"
	Type              = "type"
	XID               = "xid"
	Call              = "call"
	Code              = "code"
	Stage             = "stage"
	Result            = "result"
	Reason            = "reason"
	Namespace         = "namespace"
	Pod               = "pod"
	PodUID            = "pod_uid"
	Container         = "container"
	Resource          = "resource"
	Shared            = "shared" // "true" where the device is handed to more than one pod: its busy share is the device's, never to be summed
)

// Annotations on a worker pod, and the labels of an item that the external metrics API serves.
const (
	AnnotationStatsPort = "capstan.dev/stats-port"
	AnnotationStatsPath = "capstan.dev/stats-path"

	// On a StatefulSet whose job has ended: its UID, "succeeded" or "failed", and the reason, with blanks between. Of another UID it says nothing.
	AnnotationEnded = "capstan.dev/ended"

	ItemPod      = "pod"
	ItemWorkload = "workload"
	ItemNode     = "node"
	ItemGPUModel = "gpu_model"
	ItemHeld     = "held"
)
