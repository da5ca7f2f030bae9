/* A GPU's driver without a GPU, that checks how it is used.
 *
 * "Device" memory is host memory at addresses that nobody may touch: each page is mapped twice, once
 * without any access, at the address that a program is given, and once for this driver. Copies run
 * late, on the thread of their stream, one after the other. Every broken rule is kept as text.
 *
 * Besides the driver's functions (cu...): what a test does with the memory and the streams (fake_...).
 */
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define ALIGNMENT 256
#define PAGE 4096
#define MOST_PINNED 256
#define MOST_STREAMS 256
#define OUT_OF_MEMORY 2
#define NOT_READY 600

/* ---- memory ---- */

static pthread_mutex_t memory = PTHREAD_MUTEX_INITIALIZER; /* of what is given out */
static char *arena;  /* the addresses that are given out */
static char *shadow; /* the same pages, for this file */
static size_t arena_used;
static struct { char *at; size_t size; } pinned[MOST_PINNED];
static int n_pinned;
static size_t pinned_bytes;

int fake_start(void) {
  if (arena != NULL) return 0;
  int file = memfd_create("device", 0);
  if (file < 0 || ftruncate(file, ARENA) != 0) return 1;
  /* With FAKE_UNPROTECTED anyone may touch it, as where MPI takes device pointers. */
  int access = getenv("FAKE_UNPROTECTED") ? PROT_READ | PROT_WRITE : PROT_NONE;
  arena = mmap(NULL, ARENA, access, MAP_SHARED, file, 0);
  shadow = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return arena == MAP_FAILED || shadow == MAP_FAILED;
}

void fake_reset(void) {
  arena_used = 0;
  forget_rules();
}

/* Let anyone touch device memory, as where MPI takes its pointers. */
int fake_unprotect(int enabled) {
  return mprotect(arena, ARENA, enabled ? PROT_READ | PROT_WRITE : PROT_NONE);
}

size_t fake_pinned_bytes(void) { return pinned_bytes; }

void *fake_allocate(size_t size) {
  pthread_mutex_lock(&memory);
  size_t at = arena_used, end = at + (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + ALIGNMENT;
  if (end <= ARENA) arena_used = end;
  pthread_mutex_unlock(&memory);
  if (end > ARENA) return NULL;
  memset(shadow + at, 0xab, end - at);
  return arena + at;
}

char *on_device(const void *address, size_t size) {
  if (size == 0) return shadow; /* JAX copies tokens, which lie nowhere */
  size_t at = (size_t)((const char *)address - arena);
  if ((const char *)address < arena || at + size > arena_used) {
    violate("a copy outside of the device's memory");
    return NULL;
  }
  return shadow + at;
}

void fake_read(void *to, const void *device, size_t size) {
  memcpy(to, on_device(device, size), size);
}

static void require_pinned(const void *host, size_t size) {
  int found = depth == 0;
  pthread_mutex_lock(&memory);
  for (int i = 0; i < n_pinned; ++i)
    found |= (const char *)host >= pinned[i].at &&
             (const char *)host + size <= pinned[i].at + pinned[i].size;
  pthread_mutex_unlock(&memory);
  if (!found) violate("a copy from or to host memory that the driver did not allocate");
}

int cuMemAlloc_v2(void **at, size_t size) {
  *at = fake_allocate(size);
  return *at == NULL ? OUT_OF_MEMORY : 0;
}

/* ---- contexts: numbers, one to be current on a thread that allocates or copies ---- */

/* Handlers push their context, and JAX's plugin sets its own: where the depth is 0, the plugin is at
 * work, which need not keep the handlers' rules. (A test's own calls come at depth 0, too, with no
 * context current.) */
__thread int depth;
__thread void *current;
static __thread void *outer;

static void require_context(void) {
  if (current == NULL) violate("no context was current");
}

int cuCtxPushCurrent_v2(void *context) {
  FAIL_IF_ORDERED;
  if (context == NULL) violate("no context was entered");
  if (depth++ == 0) outer = current;
  current = context;
  return 0;
}

int cuCtxPopCurrent_v2(void **context) {
  if (--depth < 0) violate("a context was left that was not entered");
  *context = current;
  current = outer;
  return 0;
}

int cuMemHostAlloc(char **at, size_t size, unsigned flags) {
  FAIL_IF_ORDERED;
  require_context();
  *at = aligned_alloc(PAGE, (size + PAGE - 1) / PAGE * PAGE);
  if (*at == NULL || flags != 1) return 1;
  pthread_mutex_lock(&memory);
  if (n_pinned == MOST_PINNED) abort();
  pinned[n_pinned].at = *at;
  pinned[n_pinned++].size = size;
  if (depth > 0) pinned_bytes += size;
  pthread_mutex_unlock(&memory);
  return 0;
}

/* ---- streams: each a thread that does one thing after the other, late ---- */

struct work {
  struct work *next;
  void (*run)(void *);
  void *argument;
};

struct stream {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  struct work *first, *last;
  int64_t queued, done;
  long delay_us; /* before each piece of work */
  void *context;
};

static struct stream streams[MOST_STREAMS];
static int n_streams;
struct stream *expected;

static void *work_off(void *argument) {
  struct stream *stream = argument;
  for (;;) {
    pthread_mutex_lock(&stream->lock);
    while (stream->first == NULL) pthread_cond_wait(&stream->changed, &stream->lock);
    struct work *work = stream->first;
    pthread_mutex_unlock(&stream->lock);
    nanosleep(&(struct timespec){0, stream->delay_us * 1000}, NULL);
    work->run(work->argument);
    pthread_mutex_lock(&stream->lock);
    stream->first = work->next;
    if (stream->first == NULL) stream->last = NULL;
    ++stream->done;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    free(work);
  }
  return NULL;
}

void *fake_stream(long delay_us, long context) {
  if (n_streams == MOST_STREAMS) abort();
  struct stream *stream = &streams[n_streams++];
  stream->delay_us = delay_us;
  stream->context = (void *)context;
  pthread_mutex_init(&stream->lock, NULL);
  pthread_cond_init(&stream->changed, NULL);
  pthread_create(&stream->thread, NULL, work_off, stream);
  return stream;
}

void fake_delay(struct stream *stream, long delay_us) { stream->delay_us = delay_us; }

static int copies;

int fake_copies(void) { return copies; }

void fake_queue(struct stream *stream, void (*run)(void *), void *argument) {
  struct work *work = calloc(1, sizeof(struct work));
  work->run = run;
  work->argument = argument;
  pthread_mutex_lock(&stream->lock);
  if (stream->last != NULL)
    stream->last->next = work;
  else
    stream->first = work;
  stream->last = work;
  ++stream->queued;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
}

struct copy {
  char *to;
  const char *from;
  size_t size;
  char *owned; /* freed after the copy */
};

static void run_copy(void *argument) {
  struct copy *copy = argument;
  memcpy(copy->to, copy->from, copy->size);
  free(copy->owned);
  free(copy);
}

static void queue(struct stream *stream, char *to, const char *from, size_t size, char *owned) {
  if (to == NULL || from == NULL) return;
  struct copy *copy = malloc(sizeof(struct copy));
  *copy = (struct copy){to, from, size, owned};
  fake_queue(stream, run_copy, copy);
}

static int64_t queued_so_far(struct stream *stream) {
  pthread_mutex_lock(&stream->lock);
  int64_t number = stream->queued;
  pthread_mutex_unlock(&stream->lock);
  return number;
}

static int has_done(struct stream *stream, int64_t number) {
  pthread_mutex_lock(&stream->lock);
  int done = stream->done >= number;
  pthread_mutex_unlock(&stream->lock);
  return done;
}

static int wait_until(struct stream *stream, int64_t number) {
  pthread_mutex_lock(&stream->lock);
  while (stream->done < number) pthread_cond_wait(&stream->changed, &stream->lock);
  pthread_mutex_unlock(&stream->lock);
  return 0;
}

/* Work of the program around the call: what makes an operand, and what reads a result. */
void fake_produce(struct stream *stream, void *device, const void *values, size_t size) {
  char *copy = malloc(size);
  memcpy(copy, values, size);
  queue(stream, on_device(device, size), copy, size, copy);
}

void fake_consume(struct stream *stream, void *host, const void *device, size_t size) {
  queue(stream, host, on_device(device, size), size, NULL);
}

void fake_drain(struct stream *stream) { wait_until(stream, queued_so_far(stream)); }

int cuStreamGetCtx(struct stream *stream, void **context) {
  FAIL_IF_ORDERED;
  *context = stream == NULL ? NULL : stream->context;
  return stream == NULL;
}

static int rightly_used(struct stream *stream) {
  require_context();
  if (depth == 0) return stream != NULL;
  if (stream == NULL) violate("the default stream was used");
  if (stream != NULL && expected != NULL && stream != expected)
    violate("a stream was used that is not the program's");
  return stream != NULL;
}

int cuMemcpyDtoHAsync_v2(void *host, const void *device, size_t size, struct stream *stream) {
  FAIL_IF_ORDERED;
  require_pinned(host, size);
  __atomic_fetch_add(&copies, 1, __ATOMIC_RELAXED);
  if (rightly_used(stream)) queue(stream, host, on_device(device, size), size, NULL);
  return 0;
}

int cuMemcpyHtoDAsync_v2(void *device, const void *host, size_t size, struct stream *stream) {
  FAIL_IF_ORDERED;
  require_pinned(host, size);
  __atomic_fetch_add(&copies, 1, __ATOMIC_RELAXED);
  if (rightly_used(stream)) queue(stream, on_device(device, size), host, size, NULL);
  return 0;
}

int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t size, struct stream *stream) {
  FAIL_IF_ORDERED;
  if (rightly_used(stream)) queue(stream, on_device(to, size), on_device(from, size), size, NULL);
  return 0;
}

int cuStreamSynchronize(struct stream *stream) {
  FAIL_IF_ORDERED;
  return rightly_used(stream) ? wait_until(stream, queued_so_far(stream)) : 0;
}

/* ---- events ---- */

struct event {
  void *context;
  struct stream *stream;
  int64_t number;
};

int cuEventCreate(struct event **event, unsigned flags) {
  FAIL_IF_ORDERED;
  require_context();
  *event = calloc(1, sizeof(struct event));
  if (*event != NULL) (*event)->context = current;
  return *event == NULL || (depth > 0 && flags != 2);
}

int cuEventRecord(struct event *event, struct stream *stream) {
  FAIL_IF_ORDERED;
  if (!rightly_used(stream)) return 0;
  if (event->context != stream->context) violate("an event of another context was recorded");
  event->stream = stream;
  event->number = queued_so_far(stream);
  return 0;
}

int cuEventSynchronize(struct event *event) {
  FAIL_IF_ORDERED;
  return event->stream == NULL ? 0 : wait_until(event->stream, event->number);
}

int cuEventQuery(struct event *event) {
  return event->stream == NULL || has_done(event->stream, event->number) ? 0 : NOT_READY;
}

int cuCtxSynchronize(void) {
  for (int i = 0; i < n_streams; ++i) fake_drain(&streams[i]);
  return 0;
}

int cuStreamQuery(struct stream *stream) {
  return has_done(stream, queued_so_far(stream)) ? 0 : NOT_READY;
}

struct moment {
  struct stream *stream;
  int64_t number;
};

static void run_wait(void *argument) {
  struct moment *moment = argument;
  wait_until(moment->stream, moment->number);
  free(moment);
}

/* Behind what the event stands for now, wherever it is recorded later. */
int cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags) {
  if (event->stream == NULL || event->stream == stream) return 0;
  struct moment *moment = malloc(sizeof(struct moment));
  *moment = (struct moment){event->stream, event->number};
  fake_queue(stream, run_wait, moment);
  return 0;
}
