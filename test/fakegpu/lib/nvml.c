/*
 * A libnvidia-ml.so.1 that shows what a state file says (fakegpu.h). The path of the file is in FAKEGPU_STATE, else /fakegpu/state.
 * Signatures, structures and codes are those of NVIDIA's NVML API reference; only what a reader of GPUs calls is here.
 * Which of the functions a build exports is in the .map files: leaving one out makes an older driver.
 */
#include <fcntl.h>
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
	DRIVER_NOT_LOADED = 9, LIB_RM_VERSION_MISMATCH = 18, ARGUMENT_VERSION_MISMATCH = 25,
};

struct device { int index; };
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
static struct device devices[FAKEGPU_GPUS];

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
	for (int i = 0; i < FAKEGPU_GPUS; i++) devices[i].index = i;
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
	return text(g.uuid, uuid, length);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *name, unsigned int length) {
	CALL(nvmlDeviceGetName, d);
	GPU(d);
	return text(g.name, name, length);
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
	m->total = g.memory_total;
	m->reserved = g.memory_reserved;
	m->used = g.memory_used;
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

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned int *current, unsigned int *pending) {
	NEED(current);
	NEED(pending);
	CALL(nvmlDeviceGetMigMode, d);
	*current = *pending = 0;
	return SUCCESS;
}
