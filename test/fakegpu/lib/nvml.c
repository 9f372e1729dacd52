/*
 * A libnvidia-ml.so.1 that shows what a state file says (fakegpu.h). The path of the file is in FAKEGPU_STATE, else /fakegpu/state.
 * Signatures, structures and codes are those of NVIDIA's NVML API reference; only what a reader of GPUs calls is here.
 * Which of the functions a build exports is in the .map files: leaving one out makes an older driver.
 */
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <errno.h>

#include "fakegpu.h"

typedef int nvmlReturn_t;
enum {
	SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
	DRIVER_NOT_LOADED = 9, TIMEOUT = 10, LIB_RM_VERSION_MISMATCH = 18, MEMORY = 20, ARGUMENT_VERSION_MISMATCH = 25,
};

/* A handle: of a GPU, or of the instance of one. */
struct device { int index, instance; /* -1 = the whole GPU */ };
typedef struct device *nvmlDevice_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef union { double d; unsigned int ui; unsigned long ul; unsigned long long ull; signed long long sll; } nvmlValue_t;
typedef struct { unsigned long long timeStamp; nvmlValue_t sampleValue; } nvmlSample_t;
typedef struct {
	char busIdLegacy[16];
	unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
	char busId[32];
} nvmlPciInfo_t;

_Static_assert(sizeof(nvmlUtilization_t) == 8, "as in nvml.h");
_Static_assert(sizeof(nvmlMemory_t) == 24, "as in nvml.h");
_Static_assert(sizeof(nvmlMemory_v2_t) == 40, "as in nvml.h");
_Static_assert(sizeof(nvmlSample_t) == 16, "as in nvml.h");
_Static_assert(sizeof(nvmlPciInfo_t) == 68, "as in nvml.h");
_Static_assert(FAKEGPU_FUNCTION_COUNT <= FAKEGPU_SLOTS, "more functions than slots");

static struct fakegpu_state *state;
static int writable; /* the mapping takes counts and the log */
static int inits;
static uint32_t generation;
static struct device devices[FAKEGPU_GPUS], instances[FAKEGPU_GPUS][FAKEGPU_INSTANCES];

static uint64_t now_us(void) {
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

static nvmlReturn_t open_state(void) {
	const char *path = getenv("FAKEGPU_STATE");
	if (!path || !*path) path = "/fakegpu/state";
	writable = 1;
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0) {
		writable = 0;
		fd = open(path, O_RDONLY | O_CLOEXEC);
	}
	if (fd < 0) return DRIVER_NOT_LOADED;
	struct stat st;
	struct fakegpu_state *s = MAP_FAILED;
	if (fstat(fd, &st) == 0 && (size_t)st.st_size >= sizeof *s)
		s = mmap(NULL, sizeof *s, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
	close(fd);
	if (s == MAP_FAILED) return DRIVER_NOT_LOADED;
	if (s->magic != FAKEGPU_MAGIC || s->version != FAKEGPU_VERSION) {
		munmap(s, sizeof *s);
		return LIB_RM_VERSION_MISMATCH;
	}
	state = s;
	for (int i = 0; i < FAKEGPU_GPUS; i++) {
		devices[i] = (struct device){i, -1};
		for (int k = 0; k < FAKEGPU_INSTANCES; k++) instances[i][k] = (struct device){i, k};
	}
	return SUCCESS;
}

/* called counts and logs a call, and answers with the fault that was set for it, if any. gpu is -1 for a call without one. */
static nvmlReturn_t called(enum fakegpu_function fn, int gpu) {
	if (!state) return UNINITIALIZED;
	uint64_t count = 0;
	int slot = gpu < 0 ? FAKEGPU_GPUS : gpu;
	if (writable) {
		count = __atomic_add_fetch(&state->counts[fn][slot], 1, __ATOMIC_RELAXED);
		uint64_t n = __atomic_fetch_add(&state->calls, 1, __ATOMIC_RELAXED);
		struct fakegpu_call *c = &state->log[n % FAKEGPU_LOG];
		c->timestamp_us = now_us();
		c->function = fn;
		c->gpu = gpu;
	}
	const struct fakegpu_fault *f = &state->faults[fn][slot];
	if (f->code == 0 && f->latency_us == 0) f = &state->faults[fn][FAKEGPU_GPUS];
	if ((f->code || f->latency_us) && (!writable || count > f->after)) {
		uint64_t us = f->latency_us;
		struct timespec left = {.tv_sec = us / 1000000u, .tv_nsec = (us % 1000000u) * 1000u};
		while (us && nanosleep(&left, &left) == -1 && errno == EINTR) {}
		if (f->code) return f->code;
	}
	if (fn != FN_nvmlInit_v2 && fn != FN_nvmlShutdown && state->generation != generation) return LIB_RM_VERSION_MISMATCH;
	return SUCCESS;
}

/* on is called for a call about a device. */
static nvmlReturn_t on(enum fakegpu_function fn, nvmlDevice_t d) {
	if (!state) return UNINITIALIZED;
	if (!d || d->index < 0 || d->index >= (int)state->gpu_count) return INVALID_ARGUMENT;
	return called(fn, d->index);
}

/* read takes an untorn copy of a GPU. */
static void read_gpu(nvmlDevice_t d, struct fakegpu_gpu *copy) {
	struct fakegpu_gpu *g = &state->gpus[d->index];
	for (;;) {
		uint32_t before = __atomic_load_n(&g->sequence, __ATOMIC_ACQUIRE);
		if (before % 2 == 0) {
			memcpy(copy, g, sizeof *copy);
			__atomic_thread_fence(__ATOMIC_ACQUIRE);
			if (__atomic_load_n(&g->sequence, __ATOMIC_RELAXED) == before) return;
		}
	}
}

static nvmlReturn_t text(const char *from, char *to, unsigned int length) {
	if (!to) return INVALID_ARGUMENT;
	if (strlen(from) + 1 > length) return INSUFFICIENT_SIZE;
	strcpy(to, from);
	return SUCCESS;
}

#define CALL(fn, device) do { nvmlReturn_t r_ = on(FN_##fn, device); if (r_) return r_; } while (0)
#define GPU(device) struct fakegpu_gpu g; read_gpu(device, &g)
#define INSTANCE(device) (g.instances[(device)->instance])
#define NEED(pointer) do { if (!(pointer)) return INVALID_ARGUMENT; } while (0)

nvmlReturn_t nvmlInit_v2(void) {
	if (!state) {
		nvmlReturn_t r = open_state();
		if (r) return r;
		generation = state->generation;
	}
	nvmlReturn_t r = called(FN_nvmlInit_v2, -1);
	if (r) return r;
	inits++;
	return SUCCESS;
}

nvmlReturn_t nvmlShutdown(void) {
	if (inits == 0) return UNINITIALIZED;
	nvmlReturn_t r = called(FN_nvmlShutdown, -1);
	if (r) return r;
	if (--inits == 0) {
		munmap(state, sizeof *state);
		state = NULL;
	}
	return SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t r) {
	if (state) called(FN_nvmlErrorString, -1);
	return r == SUCCESS ? "Success" : "simulated error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
	nvmlReturn_t r = called(FN_nvmlSystemGetDriverVersion, -1);
	return r ? r : text(state->driver_version, version, length);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
	nvmlReturn_t r = called(FN_nvmlSystemGetNVMLVersion, -1);
	return r ? r : text("13.580.0", version, length);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
	NEED(count);
	nvmlReturn_t r = called(FN_nvmlDeviceGetCount_v2, -1);
	if (r) return r;
	*count = state->gpu_count;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
	NEED(device);
	if (!state) return UNINITIALIZED;
	if (index >= state->gpu_count) return INVALID_ARGUMENT;
	nvmlReturn_t r = called(FN_nvmlDeviceGetHandleByIndex_v2, (int)index);
	if (r) return r;
	*device = &devices[index];
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *uuid, unsigned int length) {
	CALL(nvmlDeviceGetUUID, d);
	GPU(d);
	if (d->instance < 0) return text(g.uuid, uuid, length);
	return *INSTANCE(d).uuid ? text(INSTANCE(d).uuid, uuid, length) : NOT_FOUND; /* the slot was emptied under us */
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *name, unsigned int length) {
	CALL(nvmlDeviceGetName, d);
	GPU(d);
	if (d->instance < 0) return text(g.name, name, length);
	char full[160];
	snprintf(full, sizeof full, "%s MIG %s", g.name, INSTANCE(d).profile);
	return text(full, name, length);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t d, unsigned int *index) {
	NEED(index);
	CALL(nvmlDeviceGetIndex, d);
	*index = (unsigned int)d->index;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t d, unsigned int *minor) {
	NEED(minor);
	CALL(nvmlDeviceGetMinorNumber, d);
	GPU(d);
	*minor = g.minor;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *pci) {
	NEED(pci);
	CALL(nvmlDeviceGetPciInfo_v3, d);
	GPU(d);
	memset(pci, 0, sizeof *pci);
	pci->bus = (unsigned int)d->index + 1;
	pci->pciDeviceId = 0x233010de;
	memcpy(pci->busId, g.bus_id, sizeof pci->busId);
	snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04x:%02x:00.0", 0, pci->bus & 0xff);
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t d, nvmlUtilization_t *u) {
	NEED(u);
	CALL(nvmlDeviceGetUtilizationRates, d);
	GPU(d);
	if (g.mig || d->instance >= 0) return NOT_SUPPORTED;
	u->gpu = g.utilization;
	u->memory = g.memory_utilization;
	return SUCCESS;
}

/* Samples newer than last, oldest first. Without any the driver says NOT_FOUND: that is what an idle GPU does. */
nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t d, int type, unsigned long long last, int *value_type, unsigned int *count, nvmlSample_t *samples) {
	NEED(count);
	CALL(nvmlDeviceGetSamples, d);
	if (type != 1) return NOT_SUPPORTED; /* NVML_GPU_UTILIZATION_SAMPLES */
	GPU(d);
	if (g.mig || d->instance >= 0) return NOT_SUPPORTED;
	unsigned int total = g.sample_count < FAKEGPU_SAMPLES ? g.sample_count : FAKEGPU_SAMPLES;
	if (value_type) *value_type = 1; /* unsigned int */
	if (!samples) {
		*count = FAKEGPU_SAMPLES;
		return SUCCESS;
	}
	unsigned int n = 0;
	for (unsigned int i = 0; i < total; i++) {
		const struct fakegpu_sample *s = &g.samples[(g.sample_count - total + i) % FAKEGPU_SAMPLES];
		if (s->timestamp_us <= last) continue;
		if (n == *count) return INSUFFICIENT_SIZE;
		samples[n].timeStamp = s->timestamp_us;
		samples[n].sampleValue.ull = 0;
		samples[n++].sampleValue.ui = s->utilization;
	}
	*count = n;
	return n ? SUCCESS : NOT_FOUND;
}

/* Version 1 counts what the driver holds as used. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *m) {
	NEED(m);
	CALL(nvmlDeviceGetMemoryInfo, d);
	GPU(d);
	m->total = g.memory_total;
	m->used = g.memory_used + g.memory_reserved;
	m->free = m->total - m->used;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, nvmlMemory_v2_t *m) {
	NEED(m);
	CALL(nvmlDeviceGetMemoryInfo_v2, d);
	if (m->version != (sizeof *m | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
	GPU(d);
	m->total = d->instance < 0 ? g.memory_total : INSTANCE(d).memory_total;
	m->reserved = d->instance < 0 ? g.memory_reserved : INSTANCE(d).memory_reserved;
	m->used = d->instance < 0 ? g.memory_used : INSTANCE(d).memory_used;
	m->free = m->total - m->used - m->reserved;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t d, unsigned int *milliwatts) {
	NEED(milliwatts);
	CALL(nvmlDeviceGetPowerUsage, d);
	GPU(d);
	*milliwatts = g.power_mw;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t d, unsigned long long *millijoules) {
	NEED(millijoules);
	CALL(nvmlDeviceGetTotalEnergyConsumption, d);
	GPU(d);
	*millijoules = g.energy_mj;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t d, int sensor, unsigned int *celsius) {
	NEED(celsius);
	CALL(nvmlDeviceGetTemperature, d);
	if (sensor != 0) return INVALID_ARGUMENT;
	GPU(d);
	*celsius = g.temperature_c;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t d, int type, unsigned int *mhz) {
	NEED(mhz);
	CALL(nvmlDeviceGetClockInfo, d);
	if (type < 0 || type > 3) return INVALID_ARGUMENT;
	GPU(d);
	*mhz = g.clock_mhz[type];
	return SUCCESS;
}


nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t d, unsigned int *milliwatts) {
	NEED(milliwatts);
	CALL(nvmlDeviceGetEnforcedPowerLimit, d);
	GPU(d);
	*milliwatts = g.power_limit_mw;
	return SUCCESS;
}

/* Training neither encodes nor decodes. */
nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t d, unsigned int *percent, unsigned int *period_us) {
	NEED(percent);
	NEED(period_us);
	CALL(nvmlDeviceGetEncoderUtilization, d);
	*percent = 0;
	*period_us = 1000000;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t d, unsigned int *percent, unsigned int *period_us) {
	NEED(percent);
	NEED(period_us);
	CALL(nvmlDeviceGetDecoderUtilization, d);
	*percent = 0;
	*period_us = 1000000;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t d, unsigned int *count) {
	NEED(count);
	CALL(nvmlDeviceGetPcieReplayCounter, d);
	*count = 0;
	return SUCCESS;
}

/* Every value has a return of its own; the call succeeds even when none does. */
typedef struct {
	unsigned int fieldId, scopeId;
	long long timestamp, latencyUsec;
	unsigned int valueType;
	nvmlReturn_t nvmlReturn;
	nvmlValue_t value;
} nvmlFieldValue_t;
_Static_assert(sizeof(nvmlFieldValue_t) == 40, "as in nvml.h");

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t d, int count, nvmlFieldValue_t *values) {
	NEED(values);
	CALL(nvmlDeviceGetFieldValues, d);
	GPU(d);
	for (int i = 0; i < count; i++) {
		nvmlFieldValue_t *v = &values[i];
		v->nvmlReturn = NOT_SUPPORTED;
		v->timestamp = (long long)now_us();
		v->latencyUsec = 3;
		for (int k = 0; k < FAKEGPU_FIELDS; k++) {
			if (g.fields[k].id != v->fieldId || v->fieldId == 0) continue;
			v->nvmlReturn = g.fields[k].code;
			v->valueType = g.fields[k].type;
			if (v->nvmlReturn == SUCCESS) v->value.ull = g.fields[k].value; /* else the value is left as it was */
		}
	}
	return SUCCESS;
}

/* Performance counters: a sample is a copy of them with its time, and two samples make the shares between them. */
struct nvmlGpmSample_st {
	uint64_t at_us;
	struct fakegpu_activity activity;
	int index, gpu_instance;
};
typedef struct { struct nvmlGpmSample_st *handle; } nvmlGpmSample_t;
typedef struct { char *shortName, *longName, *unit; } nvmlGpmMetricMetricInfo_t;
typedef struct {
	unsigned int metricId;
	nvmlReturn_t nvmlReturn;
	double value;
	nvmlGpmMetricMetricInfo_t metricInfo;
} nvmlGpmMetric_t;
/* The array's length grew from one header to the next without a new version: only numMetrics entries may be touched. */
typedef struct {
	unsigned int version, numMetrics;
	nvmlGpmSample_t sample1, sample2;
	nvmlGpmMetric_t metrics[];
} nvmlGpmMetricsGet_t;
typedef struct { unsigned int version, isSupportedDevice; } nvmlGpmSupport_t;
_Static_assert(sizeof(nvmlGpmMetric_t) == 40, "as in nvml.h");
_Static_assert(offsetof(nvmlGpmMetricsGet_t, metrics) == 24, "as in nvml.h");

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t d, nvmlGpmSupport_t *support) {
	NEED(support);
	CALL(nvmlGpmQueryDeviceSupport, d);
	if (support->version != 1) return ARGUMENT_VERSION_MISMATCH;
	GPU(d);
	support->isSupportedDevice = g.gpm;
	return SUCCESS;
}

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample) {
	NEED(sample);
	nvmlReturn_t r = called(FN_nvmlGpmSampleAlloc, -1);
	if (r) return r;
	sample->handle = calloc(1, sizeof *sample->handle);
	return sample->handle ? SUCCESS : MEMORY;
}

nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) {
	NEED(sample.handle);
	nvmlReturn_t r = called(FN_nvmlGpmSampleFree, -1);
	if (r) return r;
	free(sample.handle);
	return SUCCESS;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t d, nvmlGpmSample_t sample) {
	NEED(sample.handle);
	CALL(nvmlGpmSampleGet, d);
	GPU(d);
	if (!g.gpm) return NOT_SUPPORTED;
	*sample.handle = (struct nvmlGpmSample_st){now_us(), d->instance < 0 ? g.activity : INSTANCE(d).activity, d->index, d->instance};
	return SUCCESS;
}

nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t d, unsigned int gpu_instance, nvmlGpmSample_t sample) {
	NEED(sample.handle);
	CALL(nvmlGpmMigSampleGet, d);
	GPU(d);
	if (!g.gpm || !g.mig) return NOT_SUPPORTED;
	for (int k = 0; k < FAKEGPU_INSTANCES; k++)
		if (*g.instances[k].uuid && g.instances[k].gpu_instance == gpu_instance) {
			*sample.handle = (struct nvmlGpmSample_st){now_us(), g.instances[k].activity, d->index, (int)gpu_instance};
			return SUCCESS;
		}
	return INVALID_ARGUMENT;
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *m) {
	NEED(m);
	NEED(m->sample1.handle);
	NEED(m->sample2.handle);
	nvmlReturn_t r = called(FN_nvmlGpmMetricsGet, -1);
	if (r) return r;
	if (m->version != 1) return ARGUMENT_VERSION_MISMATCH;
	const struct nvmlGpmSample_st *a = m->sample1.handle, *b = m->sample2.handle;
	if (a->index != b->index || a->gpu_instance != b->gpu_instance) return INVALID_ARGUMENT;
	double elapsed = (double)(b->at_us - a->at_us);
	for (unsigned int i = 0; i < m->numMetrics; i++) {
		uint64_t from, to;
		switch (m->metrics[i].metricId) {
		case 1: from = a->activity.graphics_us, to = b->activity.graphics_us; break;
		case 2: from = a->activity.sm_us, to = b->activity.sm_us; break;
		case 5: from = a->activity.tensor_us, to = b->activity.tensor_us; break;
		case 10: from = a->activity.memory_us, to = b->activity.memory_us; break;
		default: m->metrics[i].nvmlReturn = NOT_SUPPORTED; continue;
		}
		m->metrics[i].nvmlReturn = elapsed > 0 ? SUCCESS : INVALID_ARGUMENT;
		if (elapsed > 0) m->metrics[i].value = 100 * (double)(to - from) / elapsed;
	}
	return SUCCESS;
}

/* Events: a set sees what happens to its GPUs from their registration on. */
struct nvmlEventSet_st {
	uint64_t seen;
	uint64_t types[FAKEGPU_GPUS];
};
typedef struct nvmlEventSet_st *nvmlEventSet_t;
typedef struct {
	nvmlDevice_t device;
	unsigned long long eventType, eventData;
	unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;
_Static_assert(sizeof(nvmlEventData_t) == 32, "as in nvml.h");

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
	NEED(set);
	nvmlReturn_t r = called(FN_nvmlEventSetCreate, -1);
	if (r) return r;
	*set = calloc(1, sizeof **set);
	if (!*set) return MEMORY;
	(*set)->seen = state->event_count;
	return SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
	NEED(set);
	nvmlReturn_t r = called(FN_nvmlEventSetFree, -1);
	if (r) return r;
	free(set);
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t d, unsigned long long *types) {
	NEED(types);
	CALL(nvmlDeviceGetSupportedEventTypes, d);
	*types = 0x1 | 0x2 | 0x8 | 0x10;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t d, unsigned long long types, nvmlEventSet_t set) {
	NEED(set);
	CALL(nvmlDeviceRegisterEvents, d);
	set->types[d->index] |= types;
	return SUCCESS;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms) {
	NEED(set);
	NEED(data);
	nvmlReturn_t r = called(FN_nvmlEventSetWait_v2, -1);
	if (r) return r;
	for (uint64_t until = now_us() + 1000u * (uint64_t)timeout_ms;;) {
		uint64_t count = __atomic_load_n(&state->event_count, __ATOMIC_ACQUIRE);
		if (count > set->seen + FAKEGPU_EVENTS) set->seen = count - FAKEGPU_EVENTS;
		while (set->seen < count) {
			const struct fakegpu_event *e = &state->events[set->seen++ % FAKEGPU_EVENTS];
			if (e->gpu >= state->gpu_count || !(set->types[e->gpu] & e->type)) continue;
			*data = (nvmlEventData_t){&devices[e->gpu], e->type, e->data, e->gpu_instance, 0xFFFFFFFF};
			return SUCCESS;
		}
		if (now_us() >= until) return TIMEOUT;
		nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
	}
}

/* MIG. */
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned int *current, unsigned int *pending) {
	NEED(current);
	NEED(pending);
	CALL(nvmlDeviceGetMigMode, d);
	GPU(d);
	*current = *pending = g.mig;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t d, unsigned int *count) {
	NEED(count);
	CALL(nvmlDeviceGetMaxMigDeviceCount, d);
	*count = FAKEGPU_INSTANCES - 1; /* seven, as on real GPUs */
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t d, unsigned int index, nvmlDevice_t *instance) {
	NEED(instance);
	CALL(nvmlDeviceGetMigDeviceHandleByIndex, d);
	GPU(d);
	if (index >= FAKEGPU_INSTANCES) return INVALID_ARGUMENT;
	if (!g.mig || !*g.instances[index].uuid) return NOT_FOUND;
	*instance = &instances[d->index][index];
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t d, unsigned int *id) {
	NEED(id);
	CALL(nvmlDeviceGetGpuInstanceId, d);
	GPU(d);
	if (d->instance < 0) return INVALID_ARGUMENT;
	*id = INSTANCE(d).gpu_instance;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t d, unsigned int *id) {
	NEED(id);
	CALL(nvmlDeviceGetComputeInstanceId, d);
	GPU(d);
	if (d->instance < 0) return INVALID_ARGUMENT;
	*id = INSTANCE(d).compute_instance;
	return SUCCESS;
}

/* The handle of a GPU instance is that of its MIG device here: one compute instance each. */
typedef struct { unsigned int start, size; } nvmlGpuInstancePlacement_t;
typedef struct {
	nvmlDevice_t device;
	unsigned int id, profileId;
	nvmlGpuInstancePlacement_t placement;
} nvmlGpuInstanceInfo_t;
_Static_assert(sizeof(nvmlGpuInstanceInfo_t) == 24, "as in nvml.h");

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t d, unsigned int id, nvmlDevice_t *gpu_instance) {
	NEED(gpu_instance);
	CALL(nvmlDeviceGetGpuInstanceById, d);
	GPU(d);
	for (int k = 0; k < FAKEGPU_INSTANCES; k++)
		if (*g.instances[k].uuid && g.instances[k].gpu_instance == id) {
			*gpu_instance = &instances[d->index][k];
			return SUCCESS;
		}
	return NOT_FOUND;
}

nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlDevice_t instance, nvmlGpuInstanceInfo_t *info) {
	NEED(info);
	CALL(nvmlGpuInstanceGetInfo, instance);
	GPU(instance);
	*info = (nvmlGpuInstanceInfo_t){&devices[instance->index], INSTANCE(instance).gpu_instance, INSTANCE(instance).profile_id, {INSTANCE(instance).placement, 1}};
	return SUCCESS;
}

/* Processes. */
typedef struct {
	unsigned int pid;
	unsigned long long usedGpuMemory;
	unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
typedef struct {
	unsigned int pid;
	unsigned long long timeStamp;
	unsigned int smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;
_Static_assert(sizeof(nvmlProcessInfo_t) == 24, "as in nvml.h");
_Static_assert(sizeof(nvmlProcessUtilizationSample_t) == 32, "as in nvml.h");

static nvmlReturn_t processes(nvmlDevice_t d, uint32_t mps, unsigned int *count, nvmlProcessInfo_t *infos) {
	GPU(d);
	unsigned int n = 0;
	for (int i = 0; i < FAKEGPU_PROCESSES; i++) {
		const struct fakegpu_process *p = &g.processes[i];
		if (p->pid == 0 || p->mps != mps) continue;
		if (d->instance >= 0 && p->gpu_instance != INSTANCE(d).gpu_instance) continue;
		if (n < *count && infos) infos[n] = (nvmlProcessInfo_t){p->pid, p->memory, p->gpu_instance, 0xFFFFFFFF};
		n++;
	}
	int fits = n <= *count && (infos || n == 0);
	*count = n;
	return fits ? SUCCESS : INSUFFICIENT_SIZE;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned int *count, nvmlProcessInfo_t *infos) {
	NEED(count);
	CALL(nvmlDeviceGetComputeRunningProcesses_v3, d);
	return processes(d, 0, count, infos);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t d, unsigned int *count, nvmlProcessInfo_t *infos) {
	NEED(count);
	CALL(nvmlDeviceGetMPSComputeRunningProcesses_v3, d);
	return processes(d, 1, count, infos);
}

/* Only processes that did something since last. */
nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t d, nvmlProcessUtilizationSample_t *samples, unsigned int *count, unsigned long long last) {
	NEED(count);
	CALL(nvmlDeviceGetProcessUtilization, d);
	GPU(d);
	if (g.mig) return NOT_SUPPORTED;
	if (!samples) {
		*count = FAKEGPU_PROCESSES;
		return INSUFFICIENT_SIZE;
	}
	unsigned int n = 0;
	for (int i = 0; i < FAKEGPU_PROCESSES && n < *count; i++) {
		const struct fakegpu_process *p = &g.processes[i];
		if (p->pid == 0 || p->sm == 0 || p->timestamp_us <= last) continue;
		samples[n++] = (nvmlProcessUtilizationSample_t){.pid = p->pid, .timeStamp = p->timestamp_us, .smUtil = p->sm};
	}
	*count = n;
	return n ? SUCCESS : NOT_FOUND;
}
