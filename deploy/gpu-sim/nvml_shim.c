/*
 * A stateful stand-in for libnvidia-ml.so.1, for tests and for nodes without a GPU: the unmodified nvidia-ml-py drives it.
 *
 * All state lies in one file, shared by every process that maps it (environment variable PERSEUS_NVML_SHIM_STATE) and guarded by a
 * robust mutex in it, so that a killed process leaves no lock behind. A call that sets a clock takes a while, in which it holds the
 * driver's lock, and the clock follows later: both are drawn as by perseus_sim.gpus.switching. A GPU's power follows its clock; its
 * energy integrates the power and is published in ticks, as on hardware. perseus_sim.gpus.nvml_shim builds this
 * file and pokes the state through the perseus_shim_* functions at the end. Return codes are NVML's.
 *
 * A simulated trainer may lead a GPU (perseus_shim_spend): it then says what its past drew, and what is drawn now. The counter
 * moves on by that until it says more; if that was too much, the counter stands until what it says has caught up.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
  SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, UNKNOWN_ERROR = 999
};
enum { MAX_GPUS = 16, MAX_INJECTIONS = 32, NAME_BYTES = 96, SAMPLES = 120, SAMPLE_US = 20000, MAX_CHANGES = 16 };
enum { IDLE_PERCENT_OF_CLOCK = 15, POWER_CAP = 4 };
static const double Z99 = 2.3263478740408408, AT_POWER_LIMIT = 0.999;
static const uint64_t MAGIC = 0x344c4d564e53524bULL;
static const uint32_t FIELD_POWER_INSTANT = 186, FIELD_SMOOTHING = 251, FIELD_FLOOR = 275, FIELD_SECONDARY_FLOOR = 276;

typedef unsigned int nvmlReturn_t;
typedef void *nvmlDevice_t;
typedef struct {
  uint32_t fieldId, scopeId;
  int64_t timestamp, latencyUsec;
  uint32_t valueType, nvmlReturn;
  union { uint32_t uiVal; uint64_t ullVal; double dVal; } value;
} nvmlFieldValue_t;

typedef struct {
  uint64_t timeStamp;
  union { uint32_t uiVal; uint64_t ullVal; double dVal; } sampleValue;
} nvmlSample_t;

typedef struct {
  unsigned int gpu, memory;
} nvmlUtilization_t;

/* Calls that hold it follow each other; other programs hold it now and then. */
typedef struct {
  int64_t free_us, reader_us;
} driver_lock_t;

typedef struct {
  int64_t mhz, effective_us;
} change_t;

typedef struct {
  char uuid[NAME_BYTES], name[NAME_BYTES];
  /* Written by perseus_shim_set; the order is that of KEYS below. */
  int64_t min_mhz, max_mhz, step_mhz, memory_mhz, idle_mw, max_mw, busy_permille, transition_us, energy_period_us, energy_frozen,
      has_energy, has_samples, lost, mig, mps, processes, permitted, reasons, cap_mhz, transition_p99_us, call_us, call_p99_us,
      target_permille, outlier_ppm, outlier_permille, shared_lock, reader_period_us, reader_call_us, plateau_mhz,
      requested_profiles, enforced_profiles, floor_w, secondary_floor_w, locked_mhz;
  /* Kept by the shim; read by perseus_shim_get. */
  int64_t lock_calls, reset_calls, last_write_ns, settle_us, clock_mhz, energy_mj;
  /* Clocks that were asked for and are not in effect, in the order in which they will be. */
  change_t changes[MAX_CHANGES];
  int64_t coming;
  driver_lock_t lock; /* where the GPUs do not share one */
  uint64_t random;
  int64_t settled_us, lead_until_us, lead_mw;
  double exact_uj, published_uj;
  /* Mean power of each 20 ms, by the number of its end: those after `unsampled`, up to `sampled`, the last that is complete. */
  int64_t unsampled, sampled;
  double sample_uj;
  nvmlSample_t samples[SAMPLES];
} gpu_t;

typedef struct {
  char function[64];
  int32_t gpu, code, remaining, latency_ms; /* gpu -1: any; code -1: only the latency; remaining -1: for ever */
} injection_t;

typedef struct {
  uint64_t magic;
  pthread_mutex_t mutex;
  uint32_t count, generation;
  driver_lock_t lock;
  uint32_t order[MAX_GPUS]; /* index, and handle, to GPU: what a driver reload may permute */
  char driver[80];
  gpu_t gpus[MAX_GPUS];
  injection_t injections[MAX_INJECTIONS];
} state_t;

static state_t *state;
static int users;
static uint32_t seen_generation;
static pthread_mutex_t process_mutex = PTHREAD_MUTEX_INITIALIZER;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void lock_state(state_t *s) {
  if (pthread_mutex_lock(&s->mutex) == EOWNERDEAD) pthread_mutex_consistent(&s->mutex);
}

static state_t *map_state(const char *path) {
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return NULL;
  state_t *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  off_t size = lseek(fd, 0, SEEK_END);
  close(fd);
  if (s == MAP_FAILED) return NULL;
  if (size < (off_t)sizeof *s || s->magic != MAGIC) { munmap(s, sizeof *s); return NULL; }
  return s;
}

/* ---------------------------------------------------------------------------------------------------------- physics */

/* A trainer says that its GPU draws all that it may, and the clock that is set is above what that leaves. */
static int at_power_limit(const gpu_t *g) {
  int most = g->lead_until_us && (double)g->lead_mw >= AT_POWER_LIMIT * (double)g->max_mw;
  return most && g->plateau_mhz && g->clock_mhz > g->plateau_mhz;
}

/* The clock that the lock, and whatever holds the clock down, leave. */
static int64_t running_mhz(const gpu_t *g) {
  int64_t mhz = g->cap_mhz && g->cap_mhz < g->clock_mhz ? g->cap_mhz : g->clock_mhz;
  return at_power_limit(g) && g->plateau_mhz < mhz ? g->plateau_mhz : mhz;
}

static double formula_mw(const gpu_t *g) {
  double speed = (double)running_mhz(g) / (double)g->max_mhz;
  return g->idle_mw + (g->max_mw - g->idle_mw) * (g->busy_permille / 1000.0) * (0.25 * speed + 0.75 * pow(speed, 3));
}

static double power_mw(const gpu_t *g) { return g->lead_until_us ? g->lead_mw : formula_mw(g); }

static int busy(const gpu_t *g) { return g->busy_permille || g->lead_until_us; }

static int64_t default_mhz(const gpu_t *g) {
  return busy(g) ? g->max_mhz : g->max_mhz * IDLE_PERCENT_OF_CLOCK / 100;
}

/* Publish the energy at the last tick before `until`, drawing so much since it was settled; it never falls. */
static void publish(gpu_t *g, int64_t until_us, double mw) {
  int64_t tick_us = until_us / g->energy_period_us * g->energy_period_us;
  double uj = g->exact_uj + mw * (tick_us - g->settled_us) / 1000; /* mW x us = nJ */
  if (tick_us > g->settled_us && uj > g->published_uj) g->published_uj = uj;
}

/* The past up to `until_us` drew so much: samples of it that are complete are kept, stamped by the wall clock of now. */
static void sample(gpu_t *g, int64_t until_us, double mw) {
  struct timespec wall;
  clock_gettime(CLOCK_REALTIME, &wall);
  int64_t offset_us = (int64_t)wall.tv_sec * 1000000 + wall.tv_nsec / 1000 - now_ns() / 1000;
  int64_t from_us = g->settled_us;
  int64_t oldest = until_us / SAMPLE_US - SAMPLES;
  if (g->sampled < oldest) g->sampled = oldest, g->sample_uj = 0, from_us = oldest * SAMPLE_US;
  for (int64_t end_us; (end_us = (g->sampled + 1) * SAMPLE_US) <= until_us; from_us = end_us) {
    g->sample_uj += mw * (end_us - from_us) / 1000;
    nvmlSample_t *complete = &g->samples[++g->sampled % SAMPLES];
    complete->timeStamp = (uint64_t)(end_us + offset_us);
    complete->sampleValue.uiVal = (uint32_t)(g->sample_uj * 1000 / SAMPLE_US);
    g->sample_uj = 0;
  }
  g->sample_uj += mw * (until_us - from_us) / 1000;
}

static void advance(gpu_t *g, int64_t until_us, double mw) {
  if (until_us <= g->settled_us) return;
  publish(g, until_us, mw);
  sample(g, until_us, mw);
  g->exact_uj += mw * (until_us - g->settled_us) / 1000;
  g->settled_us = until_us;
}

/* Let a clock be in effect from a moment on. What was asked for earlier and would come later is void. */
static void change_clock(gpu_t *g, int64_t mhz, int64_t effective_us) {
  while (g->coming && (g->changes[g->coming - 1].effective_us >= effective_us || g->coming == MAX_CHANGES)) g->coming--;
  g->changes[g->coming++] = (change_t){mhz, effective_us};
}

/* Bring a GPU to the present; call before anything is read or changed. */
static void settle(gpu_t *g) {
  int64_t now_us = now_ns() / 1000;
  if (g->lead_until_us && now_us >= g->lead_until_us) {
    advance(g, g->lead_until_us, g->lead_mw);
    g->lead_until_us = 0;
    if (!g->locked_mhz) change_clock(g, default_mhz(g), now_us);
  }
  int64_t done = 0;
  for (; done < g->coming && g->changes[done].effective_us <= now_us; done++) {
    if (!g->lead_until_us) advance(g, g->changes[done].effective_us, formula_mw(g));
    g->clock_mhz = g->changes[done].mhz;
  }
  g->coming -= done;
  memmove(g->changes, g->changes + done, sizeof *g->changes * (size_t)g->coming);
  if (g->lead_until_us) publish(g, now_us, g->lead_mw);
  else advance(g, now_us, formula_mw(g));
  if (!g->energy_frozen) g->energy_mj = (int64_t)(g->published_uj / 1000);
}

static void request_clock(gpu_t *g, int64_t locked_mhz, int64_t effective_us) {
  settle(g);
  g->locked_mhz = locked_mhz;
  change_clock(g, locked_mhz ? locked_mhz : default_mhz(g), effective_us);
  settle(g);
}

/* --------------------------------------------------------------------------------------------------------- the driver */

static uint64_t hash(const char *text) { /* FNV-1a */
  uint64_t found = 0xcbf29ce484222325ULL;
  for (; *text; text++) found = (found ^ (unsigned char)*text) * 0x100000001b3ULL;
  return found;
}

/* The next of a row of random numbers between 0 and 1 (splitmix64); never 0. */
static double uniform(uint64_t *random) {
  uint64_t z = *random += 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return (double)((z ^ (z >> 31)) >> 11) / 9007199254740992.0 + 1e-17;
}

static double normal(uint64_t *random) {
  double radius = sqrt(-2 * log(uniform(random)));
  return radius * cos(2 * M_PI * uniform(random));
}

static double sigma(int64_t p50, int64_t p99) { return p50 > 0 && p99 > p50 ? log((double)p99 / (double)p50) / Z99 : 0; }

/* A change to a clock: how long the call takes, and how long it takes from the call's begin to the new clock. Log-normal; a part of
 * the spread belongs to the target clock of a GPU model, and slow calls belong to slow changes. */
static void draw_change(gpu_t *g, int64_t mhz, int64_t *call_us, int64_t *latency_us) {
  double z = normal(&g->random), spread = sigma(g->transition_us, g->transition_p99_us);
  double share = g->target_permille / 1000.0;
  uint64_t of_target = hash(g->name) + (uint64_t)mhz;
  double latency = g->transition_us * exp(spread * (sqrt(share) * normal(&of_target) + sqrt(1 - share) * z));
  if (uniform(&g->random) * 1e6 < g->outlier_ppm) latency *= g->outlier_permille / 1000.0;
  double call = g->call_us * exp(sigma(g->call_us, g->call_p99_us) * z);
  *latency_us = (int64_t)latency;
  *call_us = (int64_t)(call < latency ? call : latency);
}

/* Hold the driver's lock from the earliest moment for so long; returns that moment. */
static int64_t acquire(gpu_t *g, driver_lock_t *lock, int64_t hold_us) {
  int64_t now_us = now_ns() / 1000, period_us = g->reader_period_us;
  if (period_us && lock->reader_us < now_us - period_us) lock->reader_us = now_us / period_us * period_us;
  while (period_us && lock->reader_us <= (lock->free_us > now_us ? lock->free_us : now_us)) {
    if (lock->free_us < lock->reader_us) lock->free_us = lock->reader_us;
    lock->free_us += g->reader_call_us;
    lock->reader_us += period_us;
  }
  int64_t begin_us = lock->free_us > now_us ? lock->free_us : now_us;
  lock->free_us = begin_us + hold_us;
  return begin_us;
}

/* ---------------------------------------------------------------------------------------------------------- entry */

/* Common to all calls: injected latency and errors, initialisation, a lost GPU. On success the state is locked if gpu is wanted. */
static nvmlReturn_t enter(const char *function, nvmlDevice_t handle, gpu_t **gpu) {
  state_t *s = state;
  if (!s || !users) return UNINITIALIZED;
  int index = -1;
  nvmlReturn_t code = SUCCESS;
  int latency_ms = 0;
  lock_state(s);
  if (gpu) {
    uintptr_t number = (uintptr_t)handle;
    if (number < 1 || number > s->count) code = INVALID_ARGUMENT;
    else index = (int)s->order[number - 1];
  }
  for (int i = 0; i < MAX_INJECTIONS; i++) {
    injection_t *j = &s->injections[i];
    if (!j->remaining || strcmp(j->function, function) || (j->gpu >= 0 && j->gpu != index)) continue;
    if (j->remaining > 0) j->remaining--;
    latency_ms = j->latency_ms;
    if (j->code >= 0) code = (nvmlReturn_t)j->code;
    break;
  }
  if (code == SUCCESS && s->generation != seen_generation) code = UNINITIALIZED;
  if (code == SUCCESS && index >= 0 && s->gpus[index].lost) code = GPU_IS_LOST;
  if (latency_ms) {
    pthread_mutex_unlock(&s->mutex);
    usleep((useconds_t)latency_ms * 1000);
    lock_state(s);
  }
  if (code == SUCCESS && gpu) {
    *gpu = &s->gpus[index];
    settle(*gpu);
    return SUCCESS;
  }
  pthread_mutex_unlock(&s->mutex);
  return code;
}

static nvmlReturn_t leave(nvmlReturn_t code) {
  pthread_mutex_unlock(&state->mutex);
  return code;
}

#define ENTER(handle)                                  \
  gpu_t *g;                                            \
  nvmlReturn_t entered = enter(__func__, handle, &g);  \
  if (entered != SUCCESS) return entered

static nvmlReturn_t copy_text(char *to, unsigned int length, const char *from) {
  if (strlen(from) + 1 > length) return INSUFFICIENT_SIZE;
  strcpy(to, from);
  return SUCCESS;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
  (void)flags;
  pthread_mutex_lock(&process_mutex);
  state_t *found = users && state ? state : map_state(getenv("PERSEUS_NVML_SHIM_STATE"));
  nvmlReturn_t code = found ? SUCCESS : DRIVER_NOT_LOADED;
  if (found) {
    state = found;
    seen_generation = found->generation;
    users++;
    code = enter(__func__, NULL, NULL);
    if (code != SUCCESS) users--;
  }
  pthread_mutex_unlock(&process_mutex);
  return code;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) {
  pthread_mutex_lock(&process_mutex);
  nvmlReturn_t code = users ? SUCCESS : UNINITIALIZED;
  if (users) users--; /* the state stays mapped: another thread may be inside a call */
  pthread_mutex_unlock(&process_mutex);
  return code;
}

const char *nvmlErrorString(nvmlReturn_t code) {
  switch (code) {
    case SUCCESS: return "The operation was successful";
    case NO_PERMISSION: return "Insufficient Permissions";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "error reported by the NVML shim";
  }
}

/* ---------------------------------------------------------------------------------------------------------- system */

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
  nvmlReturn_t code = enter(__func__, NULL, NULL);
  return code ? code : copy_text(version, length, state->driver);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
  return nvmlSystemGetDriverVersion(version, length);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
  nvmlReturn_t code = enter(__func__, NULL, NULL);
  if (!code) *count = state->count;
  return code;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *handle) {
  nvmlDevice_t wanted = (nvmlDevice_t)((uintptr_t)index + 1);
  ENTER(wanted);
  *handle = wanted;
  return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *handle) {
  nvmlReturn_t code = enter(__func__, NULL, NULL);
  if (code) return code;
  for (unsigned int i = 0; i < state->count; i++) {
    gpu_t *g = &state->gpus[state->order[i]];
    if (strcmp(g->uuid, uuid)) continue;
    if (g->lost) return GPU_IS_LOST;
    *handle = (nvmlDevice_t)((uintptr_t)i + 1);
    return SUCCESS;
  }
  return NOT_FOUND;
}

/* ---------------------------------------------------------------------------------------------------------- a GPU */

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *uuid, unsigned int length) {
  ENTER(d);
  return leave(copy_text(uuid, length, g->uuid));
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *name, unsigned int length) {
  ENTER(d);
  return leave(copy_text(name, length, g->name));
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t d, unsigned int *minor) {
  ENTER(d);
  *minor = (unsigned int)(g - state->gpus);
  return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t d, unsigned int *index) {
  ENTER(d);
  *index = (unsigned int)((uintptr_t)d - 1);
  return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t d, unsigned int type, unsigned int *mhz) {
  ENTER(d);
  *mhz = (unsigned int)(type == 2 ? g->memory_mhz : running_mhz(g));
  return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t d, unsigned int type, unsigned int *mhz) {
  ENTER(d);
  *mhz = (unsigned int)(type == 2 ? g->memory_mhz : g->max_mhz);
  return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t d, unsigned int *count, unsigned int *clocks) {
  ENTER(d);
  unsigned int room = *count;
  *count = 1;
  if (room < 1 || !clocks) return leave(INSUFFICIENT_SIZE);
  clocks[0] = (unsigned int)g->memory_mhz;
  return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(
    nvmlDevice_t d, unsigned int memory_mhz, unsigned int *count, unsigned int *clocks) {
  ENTER(d);
  if (memory_mhz != g->memory_mhz) return leave(NOT_FOUND);
  unsigned int room = *count;
  *count = (unsigned int)((g->max_mhz - g->min_mhz) / g->step_mhz + 1);
  if (room < *count || !clocks) return leave(INSUFFICIENT_SIZE);
  for (unsigned int i = 0; i < *count; i++) clocks[i] = (unsigned int)(g->max_mhz - i * g->step_mhz);
  return leave(SUCCESS);
}

static nvmlReturn_t write_clock(gpu_t *g, int64_t *calls, int64_t mhz) {
  if (!g->permitted) return leave(NO_PERMISSION);
  int64_t call_us, latency_us;
  draw_change(g, mhz, &call_us, &latency_us);
  int64_t begin_us = acquire(g, g->shared_lock ? &state->lock : &g->lock, call_us);
  g->last_write_ns = now_ns();
  g->settle_us = begin_us + latency_us - g->last_write_ns / 1000;
  request_clock(g, mhz, begin_us + latency_us);
  (*calls)++;
  leave(SUCCESS);
  if (call_us || begin_us > now_ns() / 1000) {
    int64_t end_us = begin_us + call_us;
    struct timespec end = {end_us / 1000000, end_us % 1000000 * 1000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL) == EINTR) {}
  }
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceSetGpuLockedClocks(nvmlDevice_t d, unsigned int min_mhz, unsigned int max_mhz) {
  ENTER(d);
  if (min_mhz > max_mhz || max_mhz < g->min_mhz) return leave(INVALID_ARGUMENT);
  int64_t mhz = max_mhz > g->max_mhz ? g->max_mhz : max_mhz;
  mhz = g->min_mhz + (mhz - g->min_mhz) / g->step_mhz * g->step_mhz; /* off the grid: silently another step, as drivers do */
  return write_clock(g, &g->lock_calls, mhz);
}

nvmlReturn_t nvmlDeviceResetGpuLockedClocks(nvmlDevice_t d) {
  ENTER(d);
  return write_clock(g, &g->reset_calls, 0);
}

nvmlReturn_t nvmlDeviceSetMemoryLockedClocks(nvmlDevice_t d, unsigned int min_mhz, unsigned int max_mhz) {
  (void)min_mhz, (void)max_mhz;
  ENTER(d);
  return leave(NOT_SUPPORTED);
}

nvmlReturn_t nvmlDeviceResetMemoryLockedClocks(nvmlDevice_t d) {
  ENTER(d);
  return leave(NOT_SUPPORTED);
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t d, unsigned long long *energy_mj) {
  ENTER(d);
  if (!g->has_energy) return leave(NOT_SUPPORTED);
  *energy_mj = (unsigned long long)g->energy_mj;
  return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t d, unsigned int *mw) {
  ENTER(d);
  *mw = (unsigned int)power_mw(g);
  return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t d, nvmlUtilization_t *rates) {
  ENTER(d);
  rates->gpu = busy(g) ? 100 : 0;
  rates->memory = 0;
  return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t d, unsigned int *least, unsigned int *most) {
  ENTER(d);
  *least = (unsigned int)g->idle_mw;
  *most = (unsigned int)g->max_mw;
  return leave(SUCCESS);
}

/* Samples of power, oldest first. A trainer that leads tells its past: they lag by as much as it does. */
nvmlReturn_t nvmlDeviceGetSamples(
    nvmlDevice_t d, unsigned int type, unsigned long long after_us, unsigned int *value_type, unsigned int *count,
    nvmlSample_t *samples) {
  ENTER(d);
  if (type || !g->has_samples) return leave(NOT_SUPPORTED);
  unsigned int room = samples ? *count : 0, found = 0;
  int64_t oldest = g->sampled - SAMPLES > g->unsampled ? g->sampled - SAMPLES : g->unsampled;
  for (int64_t at = oldest + 1; at <= g->sampled && found < room; at++) {
    const nvmlSample_t *complete = &g->samples[at % SAMPLES];
    if (complete->timeStamp > after_us) samples[found++] = *complete;
  }
  *value_type = 1;
  *count = samples ? found : SAMPLES;
  return leave(samples && !found ? NOT_FOUND : SUCCESS);
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t d, int count, nvmlFieldValue_t *values) {
  ENTER(d);
  for (int i = 0; i < count; i++) {
    values[i].timestamp = now_ns() / 1000;
    uint32_t field = values[i].fieldId;
    int known = field == FIELD_POWER_INSTANT || field == FIELD_SMOOTHING || field == FIELD_FLOOR || field == FIELD_SECONDARY_FLOOR;
    values[i].nvmlReturn = known ? SUCCESS : NOT_SUPPORTED;
    values[i].valueType = 1;
    values[i].value.ullVal = !known ? 0
                             : field == FIELD_POWER_INSTANT ? (uint64_t)power_mw(g)
                             : field == FIELD_SMOOTHING     ? (uint64_t)(g->floor_w || g->secondary_floor_w)
                             : field == FIELD_FLOOR         ? (uint64_t)g->floor_w
                                                            : (uint64_t)g->secondary_floor_w;
  }
  return leave(SUCCESS);
}

typedef struct {
  uint32_t mask[8];
} mask_t;

typedef struct {
  uint32_t version;
  mask_t known, requested, enforced;
} profiles_t;

/* Workload power profiles: the first 32 of them. They change nothing else here; cap_mhz does what a profile would do. */
nvmlReturn_t nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(nvmlDevice_t d, profiles_t *profiles) {
  ENTER(d);
  memset(&profiles->known, 0, 3 * sizeof(mask_t));
  profiles->known.mask[0] = ~0u;
  profiles->requested.mask[0] = (uint32_t)g->requested_profiles;
  profiles->enforced.mask[0] = (uint32_t)g->enforced_profiles;
  return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t d, unsigned long long *reasons) {
  ENTER(d);
  *reasons = (unsigned long long)g->reasons | (busy(g) ? 0 : 1) | (at_power_limit(g) ? POWER_CAP : 0);
  return leave(SUCCESS);
}

/* The same under the name that drivers before 535 know. */
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t d, unsigned long long *reasons) {
  ENTER(d);
  *reasons = (unsigned long long)g->reasons | (busy(g) ? 0 : 1) | (at_power_limit(g) ? POWER_CAP : 0);
  return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned int *current, unsigned int *pending) {
  ENTER(d);
  *current = *pending = (unsigned int)g->mig;
  return leave(SUCCESS);
}

/* So many processes, of which nothing is known. */
static nvmlReturn_t list_processes(int64_t running, unsigned int *count, void *processes) {
  unsigned int room = *count;
  *count = (unsigned int)running;
  if (room < *count || (*count && !processes)) return leave(INSUFFICIENT_SIZE);
  if (*count) memset(processes, 0, 24 * (size_t)*count);
  return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t d, unsigned int *count, void *processes) {
  ENTER(d);
  return list_processes(g->mps, count, processes);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned int *count, void *processes) {
  ENTER(d);
  return list_processes(g->processes, count, processes);
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t d, unsigned int *mode) {
  ENTER(d);
  *mode = 1;
  return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t d, unsigned int sensor, unsigned int *celsius) {
  (void)sensor;
  ENTER(d);
  *celsius = 30 + (unsigned int)(50 * power_mw(g) / (double)g->max_mw);
  return leave(SUCCESS);
}

/* ------------------------------------------------------------------------------------------ for perseus_sim.gpus.nvml_shim */

static const char *const KEYS[] = {
    "min_mhz", "max_mhz", "step_mhz", "memory_mhz", "idle_mw", "max_mw", "busy_permille", "transition_us",
    "energy_period_us", "energy_frozen", "has_energy", "has_samples", "lost", "mig", "mps", "processes", "permitted", "reasons", "cap_mhz",
    "transition_p99_us", "call_us", "call_p99_us", "target_permille", "outlier_ppm", "outlier_permille", "shared_lock",
    "reader_period_us", "reader_call_us", "plateau_mhz", "requested_profiles", "enforced_profiles", "floor_w",
    "secondary_floor_w", "locked_mhz",
    "lock_calls", "reset_calls", "last_write_ns", "settle_us", "clock_mhz", "energy_mj"};
enum { WRITABLE_KEYS = 34, ALL_KEYS = 40 };

static int64_t *value_of(gpu_t *g, const char *key, int keys) {
  for (int i = 0; i < keys; i++)
    if (!strcmp(KEYS[i], key)) return (int64_t *)((char *)g + offsetof(gpu_t, min_mhz)) + i;
  return NULL;
}

void *perseus_shim_open(const char *path) { return map_state(path); }

void perseus_shim_close(state_t *s) { munmap(s, sizeof *s); }

/* A new state file with GPUs like an A100; 0, or errno. It appears under its name only when it is whole. */
int perseus_shim_create(const char *path, unsigned int count) {
  char partial[4096];
  if (count > MAX_GPUS || snprintf(partial, sizeof partial, "%s.partial", path) >= (int)sizeof partial) return EINVAL;
  int fd = open(partial, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return errno;
  state_t *s = ftruncate(fd, sizeof *s) ? MAP_FAILED : mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (s == MAP_FAILED) return errno;
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&s->mutex, &attributes);
  s->count = count;
  s->generation = 1;
  strcpy(s->driver, "570.86.15");
  for (unsigned int i = 0; i < count; i++) {
    gpu_t *g = &s->gpus[i];
    s->order[i] = i;
    snprintf(g->uuid, sizeof g->uuid, "GPU-00000000-0000-4000-8000-%012x", i);
    strcpy(g->name, "NVIDIA A100-SXM4-40GB");
    g->min_mhz = 210, g->max_mhz = 1410, g->step_mhz = 15, g->memory_mhz = 1215;
    g->idle_mw = 55000, g->max_mw = 400000;
    g->energy_period_us = 100000, g->has_energy = 1, g->has_samples = 1, g->permitted = 1;
    g->settled_us = now_ns() / 1000;
    g->sampled = g->settled_us / SAMPLE_US;
    g->unsampled = g->sampled + 1; /* which began before the GPU did */
    g->clock_mhz = default_mhz(g);
    g->random = hash(g->uuid);
  }
  s->magic = MAGIC;
  munmap(s, sizeof *s);
  return rename(partial, path) ? errno : 0;
}

int perseus_shim_set(state_t *s, unsigned int gpu, const char *key, int64_t value) {
  lock_state(s);
  gpu_t *g = gpu < s->count ? &s->gpus[gpu] : NULL;
  int64_t *field = g ? value_of(g, key, WRITABLE_KEYS) : NULL;
  if (field) {
    settle(g);
    *field = value;
    /* A lock by another program, or a change of load, moves the clock as well. */
    if (field == &g->locked_mhz || (field == &g->busy_permille && !g->locked_mhz))
      request_clock(g, g->locked_mhz, now_ns() / 1000 + g->transition_us);
  }
  pthread_mutex_unlock(&s->mutex);
  return field ? 0 : EINVAL;
}

int perseus_shim_get(state_t *s, unsigned int gpu, const char *key, int64_t *value) {
  lock_state(s);
  gpu_t *g = gpu < s->count ? &s->gpus[gpu] : NULL;
  int64_t *field = g ? value_of(g, key, ALL_KEYS) : NULL;
  if (field) {
    settle(g);
    *value = field == &g->clock_mhz ? running_mhz(g) : *field;
  }
  pthread_mutex_unlock(&s->mutex);
  return field ? 0 : EINVAL;
}

/* A trainer accounts for its GPU: so much power up to `until_us` and from then on, and it will be heard again within `hold_us`
 * (0: no more). */
int perseus_shim_spend(state_t *s, unsigned int gpu, int64_t until_us, int64_t mw, int64_t hold_us) {
  lock_state(s);
  gpu_t *g = gpu < s->count ? &s->gpus[gpu] : NULL;
  if (g) {
    settle(g);
    int led = g->lead_until_us != 0;
    if (led) advance(g, until_us, mw);
    g->lead_mw = mw;
    g->lead_until_us = now_ns() / 1000 + hold_us;
    if (!led && !g->locked_mhz) request_clock(g, 0, now_ns() / 1000);
    settle(g);
  }
  pthread_mutex_unlock(&s->mutex);
  return g ? 0 : EINVAL;
}

int perseus_shim_set_text(state_t *s, unsigned int gpu, const char *key, const char *text) {
  if (gpu >= s->count || strlen(text) >= NAME_BYTES) return EINVAL;
  lock_state(s);
  char *field = !strcmp(key, "uuid") ? s->gpus[gpu].uuid : !strcmp(key, "name") ? s->gpus[gpu].name : NULL;
  if (field) strcpy(field, text);
  if (field == s->gpus[gpu].uuid) s->gpus[gpu].random = hash(text);
  pthread_mutex_unlock(&s->mutex);
  return field ? 0 : EINVAL;
}

/* The next `times` calls (-1: all) of a function on a GPU (-1: any) take so long, and return a code (-1: what they would). */
int perseus_shim_inject(state_t *s, const char *function, int gpu, int code, int times, int latency_ms) {
  if (strlen(function) >= sizeof s->injections[0].function) return EINVAL;
  lock_state(s);
  injection_t *free_slot = NULL;
  for (int i = MAX_INJECTIONS; i-- > 0;)
    if (!s->injections[i].remaining) free_slot = &s->injections[i];
  if (free_slot) {
    strcpy(free_slot->function, function);
    free_slot->gpu = gpu, free_slot->code = code, free_slot->remaining = times, free_slot->latency_ms = latency_ms;
  }
  pthread_mutex_unlock(&s->mutex);
  return free_slot ? 0 : ENOSPC;
}

void perseus_shim_clear(state_t *s) {
  lock_state(s);
  memset(s->injections, 0, sizeof s->injections);
  pthread_mutex_unlock(&s->mutex);
}

/* Indices and handles come to mean other GPUs. */
int perseus_shim_permute(state_t *s, const uint32_t *order, unsigned int count) {
  unsigned int seen = 0;
  for (unsigned int i = 0; i < count; i++) seen |= order[i] < count ? 1u << order[i] : 0;
  if (count != s->count || seen != (1u << count) - 1) return EINVAL;
  lock_state(s);
  memcpy(s->order, order, count * sizeof *order);
  pthread_mutex_unlock(&s->mutex);
  return 0;
}

/* The driver is unloaded and loaded: locks and energy are gone, and every process must open the library anew. */
void perseus_shim_reload(state_t *s) {
  lock_state(s);
  s->generation++;
  for (unsigned int i = 0; i < s->count; i++) {
    gpu_t *g = &s->gpus[i];
    request_clock(g, 0, now_ns() / 1000);
    g->exact_uj = g->published_uj = 0;
    g->energy_mj = 0;
    g->unsampled = g->sampled;
  }
  pthread_mutex_unlock(&s->mutex);
}
