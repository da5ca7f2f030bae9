/* The driver without a GPU under other names, and functions that break one of its rules each. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

/* ---- the driver under AMD's names: a current device where the other has a stack of contexts ---- */

static __thread int hip_device;

int hipGetDevice(int *number) {
  *number = hip_device;
  return 0;
}

/* A test's device is 0 before and after a call, and every stream has another. */
int hipSetDevice(int number) {
  hip_device = number;
  depth = number != 0;
  current = (void *)(intptr_t)number;
  return 0;
}

int hipStreamGetDevice(struct stream *stream, int *number) {
  void *context;
  int code = cuStreamGetCtx(stream, &context);
  *number = (int)(intptr_t)context;
  return code;
}

int hipMemcpyDtoHAsync(void *host, const void *device, size_t size, struct stream *stream) {
  return cuMemcpyDtoHAsync_v2(host, device, size, stream);
}

int hipMemcpyHtoDAsync(void *device, const void *host, size_t size, struct stream *stream) {
  return cuMemcpyHtoDAsync_v2(device, host, size, stream);
}

int hipMemcpyDtoDAsync(void *to, const void *from, size_t size, struct stream *stream) {
  return cuMemcpyDtoDAsync_v2(to, from, size, stream);
}

int hipStreamSynchronize(struct stream *stream) { return cuStreamSynchronize(stream); }

int hipHostMalloc(char **at, size_t size, unsigned flags) { return cuMemHostAlloc(at, size, flags); }

int hipEventCreateWithFlags(struct event **event, unsigned flags) {
  return cuEventCreate(event, flags);
}

int hipEventRecord(struct event *event, struct stream *stream) {
  return cuEventRecord(event, stream);
}

int hipEventSynchronize(struct event *event) { return cuEventSynchronize(event); }

int hipDrvGetErrorString(int code, const char **text) { return cuGetErrorString(code, text); }

/* ---- functions that break a rule ---- */

int mutant_synchronize(struct stream *stream) { return 0; }

int mutant_event_synchronize(struct event *event) { return 0; }

int mutant_event_record(struct event *event, struct stream *stream) { return 0; }

int mutant_copy_to_host(void *host, const void *device, size_t size, struct stream *stream) {
  return cuMemcpyDtoHAsync_v2(host, device, size, NULL);
}

int mutant_copy_to_device(void *device, const void *host, size_t size, struct stream *stream) {
  return cuMemcpyHtoDAsync_v2(device, host, size, NULL);
}

int mutant_copy_on_device(void *to, const void *from, size_t size, struct stream *stream) {
  return cuMemcpyDtoDAsync_v2(to, from, size, NULL);
}

/* A copy that blocks and knows of no stream, as cuMemcpyDtoH does. */
int mutant_block(void *host, const void *device, size_t size, struct stream *stream) {
  memcpy(host, on_device(device, size), size);
  return 0;
}

/* On a stream of its own, behind nothing. */
int mutant_other_stream(void *device, const void *host, size_t size, struct stream *stream) {
  static struct stream *other;
  if (other == NULL) other = fake_stream(0, 1);
  return cuMemcpyHtoDAsync_v2(device, host, size, other);
}

/* The result stays what it was. */
int mutant_lose(void *device, const void *host, size_t size, struct stream *stream) { return 0; }

int mutant_allocate(char **at, size_t size, unsigned flags) {
  *at = malloc(size);
  return *at == NULL;
}

int mutant_enter_context(void *context) { return 0; }

int mutant_leave_context(void **context) { return 0; }

/* AMD's only: the device that was current before the call is forgotten. */
int mutant_current_device(int *number) {
  *number = 7;
  return 0;
}
