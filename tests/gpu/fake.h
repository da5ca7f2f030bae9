/* What the files of the driver without a GPU share. */
#ifndef FAKE_H
#define FAKE_H

#include <stddef.h>
#include <stdint.h>

#define ARENA ((size_t)1 << 30) /* bytes of device memory */

struct stream;
struct event;

/* Of this thread: contexts entered and not left, and the one that is current. */
extern __thread int depth;
extern __thread void *current;
extern struct stream *expected; /* that of the program whose handler is called */

#define FAILURE 700 /* what a function answers that is ordered to fail */
#define FAIL_IF_ORDERED \
  if (fails(__func__)) return FAILURE

void violate(const char *rule);
void forget_rules(void);
int fails(const char *function);
char *on_device(const void *address, size_t size);
int fake_start(void);
void *fake_stream(long delay_us, long context);
void fake_queue(struct stream *stream, void (*run)(void *), void *argument);

int cuMemAlloc_v2(void **at, size_t size);
int cuCtxPushCurrent_v2(void *context);
int cuStreamGetCtx(struct stream *stream, void **context);
int cuMemcpyDtoHAsync_v2(void *host, const void *device, size_t size, struct stream *stream);
int cuMemcpyHtoDAsync_v2(void *device, const void *host, size_t size, struct stream *stream);
int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t size, struct stream *stream);
int cuStreamSynchronize(struct stream *stream);
int cuMemHostAlloc(char **at, size_t size, unsigned flags);
int cuEventCreate(struct event **event, unsigned flags);
int cuEventRecord(struct event *event, struct stream *stream);
int cuEventSynchronize(struct event *event);
int cuGetErrorString(int code, const char **text);

#endif
