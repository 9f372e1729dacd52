/*
 * The state file of the simulated driver: what libnvidia-ml.so.1 shows, which calls fail, and how often each was made.
 * It is mapped into memory by the library (in C) and by its writers (test/fakegpu/state, in Go). Both sides have the same layout:
 * little-endian, natural alignment. A change of layout is a new FAKEGPU_VERSION; a test compares the two sides field by field.
 */
#ifndef FAKEGPU_H
#define FAKEGPU_H

#include <stdint.h>

#define FAKEGPU_MAGIC   0x55504746u /* "FGPU" */
#define FAKEGPU_VERSION 2u
#define FAKEGPU_GPUS    64
#define FAKEGPU_SAMPLES 128
#define FAKEGPU_LOG     1024
#define FAKEGPU_FIELDS    48 /* of a GPU */
#define FAKEGPU_INSTANCES 8  /* MIG instances of a GPU */
#define FAKEGPU_PROCESSES 32 /* of a GPU */
#define FAKEGPU_EVENTS    64

/* Every simulated function. The order is part of the layout. */
#define FAKEGPU_FUNCTIONS(X)                                                                                              \
	X(nvmlInit_v2) X(nvmlShutdown) X(nvmlSystemGetDriverVersion) X(nvmlSystemGetNVMLVersion) X(nvmlErrorString)           \
	X(nvmlDeviceGetCount_v2) X(nvmlDeviceGetHandleByIndex_v2) X(nvmlDeviceGetUUID) X(nvmlDeviceGetName)                   \
	X(nvmlDeviceGetIndex) X(nvmlDeviceGetMinorNumber) X(nvmlDeviceGetPciInfo_v3) X(nvmlDeviceGetUtilizationRates)         \
	X(nvmlDeviceGetSamples) X(nvmlDeviceGetMemoryInfo) X(nvmlDeviceGetMemoryInfo_v2) X(nvmlDeviceGetPowerUsage)           \
	X(nvmlDeviceGetTotalEnergyConsumption) X(nvmlDeviceGetTemperature) X(nvmlDeviceGetClockInfo) X(nvmlDeviceGetMigMode)  \
	X(nvmlDeviceGetFieldValues) X(nvmlDeviceGetEnforcedPowerLimit)                                                        \
	X(nvmlGpmQueryDeviceSupport) X(nvmlGpmSampleAlloc) X(nvmlGpmSampleFree) X(nvmlGpmSampleGet) X(nvmlGpmMigSampleGet)    \
	X(nvmlGpmMetricsGet)                                                                                                  \
	X(nvmlEventSetCreate) X(nvmlEventSetFree) X(nvmlEventSetWait_v2) X(nvmlDeviceRegisterEvents)                          \
	X(nvmlDeviceGetSupportedEventTypes)                                                                                   \
	X(nvmlDeviceGetMaxMigDeviceCount) X(nvmlDeviceGetMigDeviceHandleByIndex) X(nvmlDeviceGetGpuInstanceId)                \
	X(nvmlDeviceGetComputeInstanceId)                                                                                     \
	X(nvmlDeviceGetComputeRunningProcesses_v3) X(nvmlDeviceGetMPSComputeRunningProcesses_v3)                              \
	X(nvmlDeviceGetProcessUtilization)                                                                                    \
	X(nvmlDeviceGetEncoderUtilization) X(nvmlDeviceGetDecoderUtilization) X(nvmlDeviceGetPcieReplayCounter)               \
	X(nvmlDeviceGetGpuInstanceById) X(nvmlGpuInstanceGetInfo)

#define X(name) FN_##name,
enum fakegpu_function { FAKEGPU_FUNCTIONS(X) FAKEGPU_FUNCTION_COUNT };
#undef X
#define FAKEGPU_SLOTS 64 /* room for functions to come */

/* One reading of the driver's sample ring. */
struct fakegpu_sample {
	uint64_t timestamp_us; /* since the epoch */
	uint32_t utilization;  /* percent */
	uint32_t reserved;
};

/* One value of nvmlDeviceGetFieldValues. id 0 = no such value: NOT_SUPPORTED. */
struct fakegpu_field {
	uint32_t id;
	int32_t  code; /* nvmlReturn_t of this value */
	uint32_t type; /* nvmlValueType_t */
	uint32_t reserved;
	uint64_t value; /* the bits */
};

/* The performance counters (GPM): microseconds for which a part was active, weighed by its share. They only grow. */
struct fakegpu_activity {
	uint64_t graphics_us, sm_us, tensor_us, memory_us;
};

/* One MIG instance: a GPU instance with one compute instance. uuid "" = an empty slot. */
struct fakegpu_instance {
	char     uuid[96];
	char     profile[32]; /* like 1g.10gb */
	uint32_t gpu_instance, compute_instance;
	uint32_t profile_id, placement; /* nvmlGpuInstanceInfo_t: which profile, and where it begins */
	uint64_t memory_total, memory_reserved, memory_used; /* bytes */
	struct fakegpu_activity activity;
};

/* One process on a GPU. pid 0 = none. */
struct fakegpu_process {
	uint32_t pid;
	uint32_t mps;          /* 1 = a client of MPS */
	uint64_t memory;       /* bytes */
	uint64_t timestamp_us; /* of the utilization */
	uint32_t sm;           /* percent */
	uint32_t gpu_instance; /* 0xFFFFFFFF = the whole GPU */
};

/* One event for those who registered the GPU. */
struct fakegpu_event {
	uint64_t type; /* bits of nvmlEventType */
	uint64_t data; /* the XID */
	uint32_t gpu;
	uint32_t gpu_instance; /* 0xFFFFFFFF = the whole GPU */
};

/* One GPU. sequence is odd while a writer is at work: readers try again. */
struct fakegpu_gpu {
	uint32_t sequence;
	uint32_t minor;
	char     uuid[96];
	char     name[96];
	char     bus_id[32];
	uint32_t utilization;        /* percent of the last second */
	uint32_t memory_utilization; /* percent */
	uint64_t memory_total, memory_reserved, memory_used; /* bytes; used is without reserved */
	uint64_t energy_mj;
	uint32_t power_mw;
	uint32_t temperature_c;
	uint32_t clock_mhz[4]; /* graphics, SM, memory, video */
	uint32_t sample_count; /* samples ever written; the newest is at (sample_count - 1) % FAKEGPU_SAMPLES */
	uint32_t pinned;       /* bit 0 utilization, 1 power, 2 temperature, 3 memory: the daemon leaves these as they are */
	uint32_t power_limit_mw;
	uint32_t gpm; /* 1 = has performance counters (Hopper and newer) */
	uint32_t mig; /* 1 = MIG is on: no utilization of the whole but by GPM */
	uint32_t reserved;
	struct fakegpu_activity activity;
	struct fakegpu_sample   samples[FAKEGPU_SAMPLES];
	struct fakegpu_field    fields[FAKEGPU_FIELDS];
	struct fakegpu_instance instances[FAKEGPU_INSTANCES];
	struct fakegpu_process  processes[FAKEGPU_PROCESSES];
};

/* What a function answers instead of the truth, once it was called more than `after` times. */
struct fakegpu_fault {
	int32_t  code; /* nvmlReturn_t, 0 = none */
	uint32_t reserved;
	uint64_t latency_us;
	uint64_t after;
};

struct fakegpu_call {
	uint64_t timestamp_us;
	uint32_t function;
	int32_t  gpu; /* -1 = none */
};

struct fakegpu_state {
	uint32_t magic, version;
	uint32_t gpu_count;
	uint32_t generation; /* of the driver: a process that saw another one gets LIB_RM_VERSION_MISMATCH */
	char     driver_version[80];
	struct fakegpu_gpu   gpus[FAKEGPU_GPUS];
	struct fakegpu_fault faults[FAKEGPU_SLOTS][FAKEGPU_GPUS + 1]; /* the last is for every GPU, and for functions without one */
	uint64_t             counts[FAKEGPU_SLOTS][FAKEGPU_GPUS + 1];
	uint64_t             calls; /* ever made; the newest is at (calls - 1) % FAKEGPU_LOG */
	struct fakegpu_call  log[FAKEGPU_LOG];
	uint64_t             event_count; /* ever; the newest is at (event_count - 1) % FAKEGPU_EVENTS */
	struct fakegpu_event events[FAKEGPU_EVENTS];
};

#endif
