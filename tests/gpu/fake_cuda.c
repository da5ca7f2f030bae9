/* The rest of CUDA that JAX's own plugin calls before and around a program: with it, the plugin
 * compiles and runs programs on the driver without a GPU. There are no kernels: a program's own work
 * is copies, `fake_scale`, and what handlers do.
 *
 * One library stands for four: the driver, its runtime, NVML and cuDNN. What it lacks the plugin
 * takes for a driver that is too old, and says so. */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ffi.h"

#define CONTEXT ((void *)1)
#define DELAY_US 200
#define VERSION 12090
#define GLOBAL 4096 /* bytes of a constant */

/* ---- one device: an H100 as far as its numbers go ---- */

static int contexts_made;

int fake_contexts_made(void) { return contexts_made; }

int cuInit(unsigned flags) { return fake_start(); }

int cuDriverGetVersion(int *version) {
  *version = VERSION;
  return 0;
}

int cuDeviceGetCount(int *count) {
  *count = 1;
  return 0;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return 0;
}

int cuDeviceGetName(char *name, int size, int device) {
  snprintf(name, size, "no GPU");
  return 0;
}

int cuDeviceGetPCIBusId(char *id, int size, int device) {
  snprintf(id, size, "0000:01:00.0");
  return 0;
}

int cuDeviceTotalMem_v2(size_t *size, int device) {
  *size = ARENA;
  return 0;
}

int cuMemGetInfo_v2(size_t *unused, size_t *total) {
  *unused = *total = ARENA;
  return 0;
}

/* By CU_DEVICE_ATTRIBUTE_...; 0 for what is not here. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  static const int values[256] = {
      [1] = 1024,       [2] = 1024,    [3] = 1024,  [4] = 64,     [5] = 2147483647, [6] = 65535,
      [7] = 65535,      [8] = 49152,   [10] = 32,   [12] = 65536, [13] = 1980000,   [16] = 132,
      [36] = 2619000,   [37] = 5120,   [38] = 52428800, [39] = 2048, [41] = 1,      [75] = 9,
      [81] = 233472,    [82] = 65536,  [97] = 232448, [102] = 1,  [106] = 32,       [111] = 1024,
  };
  *value = attribute < 256 ? values[attribute] : 0;
  return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  ++contexts_made;
  *context = CONTEXT;
  return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = contexts_made > 0;
  return 0;
}

int cuCtxGetCurrent(void **context) {
  *context = current;
  return 0;
}

int cuCtxSetCurrent(void *context) {
  current = context;
  return 0;
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  *least = *greatest = 0;
  return 0;
}

int cuGetErrorName(int code, const char **name) {
  *name = "FAKE_ERROR";
  return 0;
}

/* ---- memory: reserved ranges are mapped as they are ---- */

int cuMemFreeHost(void *address) { return 0; }

int cuMemGetAllocationGranularity(size_t *size, const void *properties, int option) {
  *size = (size_t)2 << 20;
  return 0;
}

int cuMemCreate(uint64_t *handle, size_t size, const void *properties, uint64_t flags) {
  *handle = 1;
  return 0;
}

int cuMemAddressReserve(void **at, size_t size, size_t alignment, void *wish, uint64_t flags) {
  return cuMemAlloc_v2(at, size);
}

int cuMemAddressFree(void *address, size_t size) { return 0; }

int cuMemMap(void *address, size_t size, size_t offset, uint64_t handle, uint64_t flags) { return 0; }

int cuMemUnmap(void *address, size_t size) { return 0; }

int cuMemRelease(uint64_t handle) { return 0; }

int cuMemSetAccess(void *address, size_t size, const void *access, size_t count) { return 0; }

/* Whose the memory is: of the one device. */
int cuPointerGetAttribute(int *value, int attribute, void *address) {
  *value = 0;
  return 0;
}

/* ---- streams and events ---- */

int cuStreamCreateWithPriority(struct stream **stream, unsigned flags, int priority) {
  *stream = fake_stream(DELAY_US, (long)CONTEXT);
  return 0;
}

int cuStreamCreate(struct stream **stream, unsigned flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}

int cuStreamDestroy_v2(struct stream *stream) { return 0; }

int cuStreamIsCapturing(struct stream *stream, int *capturing) {
  *capturing = 0;
  return 0;
}

int cuEventDestroy_v2(struct event *event) { return 0; }

int cuLaunchHostFunc(struct stream *stream, void (*function)(void *), void *argument) {
  fake_queue(stream, function, argument);
  return 0;
}

/* ---- modules: they may be loaded, for what lies in them besides kernels ---- */

int cuModuleLoadData(void **module, const void *image) {
  *module = CONTEXT;
  return 0;
}

int cuModuleLoadFatBinary(void **module, const void *image) {
  return cuModuleLoadData(module, image);
}

int cuModuleUnload(void *module) { return 0; }

int cuModuleGetGlobal_v2(void **at, size_t *size, void *module, const char *name) {
  *size = GLOBAL;
  return cuMemAlloc_v2(at, GLOBAL);
}

/* ---- what a program computes: y = factor * x, of float64, late and on its stream ---- */

struct scaling {
  double *y;
  const double *x;
  double factor;
  int64_t count;
};

static void run_scaling(void *argument) {
  struct scaling *scaling = argument;
  for (int64_t i = 0; i < scaling->count; ++i) scaling->y[i] = scaling->factor * scaling->x[i];
  free(scaling);
}

XLA_FFI_Error *fake_scale(XLA_FFI_CallFrame *frame) {
  if (ffi_answer_metadata(frame)) return NULL;
  const XLA_FFI_Buffer *x = ffi_arg(frame, 0), *y = ffi_ret(frame, 0);
  void *stream;
  if (!ffi_stream(frame, &stream)) return ffi_error(frame, "no stream");
  struct scaling *scaling = malloc(sizeof(struct scaling));
  *scaling = (struct scaling){
      (double *)on_device(y->data, ffi_bytes(y)), (const double *)on_device(x->data, ffi_bytes(x)),
      *(double *)((XLA_FFI_Scalar *)frame->attrs.attrs[0])->value, ffi_count(x)};
  fake_queue(stream, run_scaling, scaling);
  return NULL;
}

/* ---- the runtime library ---- */

int cudaGetDeviceCount(int *count) { return cuDeviceGetCount(count); }

int cudaRuntimeGetVersion(int *version) { return cuDriverGetVersion(version); }

int cudaDriverGetVersion(int *version) { return cuDriverGetVersion(version); }

int cudaPeekAtLastError(void) { return 0; }

void **__cudaRegisterFatBinary(void *binary) {
  static void *registered;
  return &registered;
}

void __cudaRegisterFatBinaryEnd(void **binary) {}

void __cudaUnregisterFatBinary(void **binary) {}

void __cudaRegisterFunction(void **binary) {}

void __cudaRegisterVar(void **binary) {}

/* ---- NVML and cuDNN, of which the plugin wants to know that they are there ---- */

int nvmlInit_v2(void) { return 0; }

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
  snprintf(version, size, "575.57.08");
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return 3; }

const char *nvmlErrorString(int code) { return "not there"; }

int cudnnCreate(void **handle) {
  *handle = CONTEXT;
  return 0;
}

size_t cudnnGetVersion(void) { return 99900; }

int cudnnGetProperty(int part, int *value) {
  static const int parts[] = {9, 99, 0};
  *value = parts[part];
  return 0;
}
