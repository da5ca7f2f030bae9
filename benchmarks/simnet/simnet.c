/* A slower network, by preload: collectives take alpha + beta x bytes longer than they do.

   What it models. A blocking collective returns alpha + beta x bytes after the real one, and so that
   long after the last rank entered it (where the real one waits for all ranks; each rank adds its
   own delay, so no rank is ahead). A non-blocking collective is complete no sooner than alpha +
   beta x bytes after this rank started it: until then MPI_Test says no and MPI_Wait sleeps. `bytes`
   is what this rank contributes. The delay is slept, not spun: the core is free for other work, as
   it is while a network card is busy.

   With SIMNET_TREE=1 both depend on the p ranks, as in `distsolve.linalg.machine`: alpha counts once
   for each of ceil(log2 p) stages, and for each of p - 1 partners in an all-to-all; beta counts 2
   (p - 1) / p times in an allreduce, and (p - 1) / p times in an all-to-all.

   What it does not model. Point-to-point messages, one-sided and neighbourhood communication and
   persistent collectives are not delayed, nor is what the MPI library sends inside a call. There is
   no contention and no need for progress: a pending collective completes on time even if nobody calls
   MPI meanwhile. A sleep ends some 0.05 ms late.

   Use: LD_PRELOAD of this library, built with the mpicc of the MPI that the program runs (build.py
   does it), and
     SIMNET_ALPHA_US         microseconds per collective
     SIMNET_BETA_US_PER_MB   microseconds per 1e6 bytes
     SIMNET_TREE             1: depending on the number of ranks
   or, from inside the program, `simnet_delay`. `simnet_calls` and `simnet_bytes` count the
   collectives and their bytes so far, also with no delay. */

#define _POSIX_C_SOURCE 200809L
#include <mpi.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { CAPACITY = 1024 };
enum kind { TREE, SUM, PAIRS };

static double alpha_ns, beta_ns; /* nanoseconds, nanoseconds per byte */
static int tree;
static int64_t calls, bytes_sent;
static struct { MPI_Request request; int64_t due; } pending[CAPACITY];
static int used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void simnet_delay(double alpha_us, double beta_us_per_mb)
{
    alpha_ns = alpha_us * 1e3;
    beta_ns = beta_us_per_mb * 1e-3;
}

int64_t simnet_calls(void) { return __atomic_load_n(&calls, __ATOMIC_RELAXED); }

int64_t simnet_bytes(void) { return __atomic_load_n(&bytes_sent, __ATOMIC_RELAXED); }

static double variable(const char *name)
{
    const char *text = getenv(name);
    char *end = NULL;
    double value = text ? strtod(text, &end) : 0;
    if (text && (end == text || *end || !(value >= 0))) {
        fprintf(stderr, "simnet: %s must be a number >= 0, got '%s'\n", name, text);
        exit(2);
    }
    return value;
}

__attribute__((constructor)) static void read_environment(void)
{
    simnet_delay(variable("SIMNET_ALPHA_US"), variable("SIMNET_BETA_US_PER_MB"));
    tree = variable("SIMNET_TREE") != 0;
}

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static void sleep_until(int64_t due)
{
    struct timespec time = {due / 1000000000, due % 1000000000};
    while (due && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL))
        ; /* a signal woke us */
}

static int64_t bytes_of(int64_t n, MPI_Datatype type)
{
    int size = 0;
    PMPI_Type_size(type, &size);
    return n * size;
}

static int size_of(MPI_Comm comm)
{
    int size;
    PMPI_Comm_size(comm, &size);
    return size;
}

static int rank_in(MPI_Comm comm)
{
    int rank;
    PMPI_Comm_rank(comm, &rank);
    return rank;
}

#define SUM_OF(counts, comm)                                       \
    ({ int64_t total = 0;                                          \
       for (int i = 0; i < size_of(comm); i++) total += counts[i]; \
       total; })
#define BYTES_OF_ALL(counts, types, comm)                                              \
    ({ int64_t total = 0;                                                              \
       for (int i = 0; i < size_of(comm); i++) total += bytes_of(counts[i], types[i]); \
       total; })

/* Counts a collective; how long it takes, in nanoseconds. */
static int64_t delay_of(int64_t bytes, enum kind kind, MPI_Comm comm)
{
    double messages = 1, share = 1;
    __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&bytes_sent, bytes, __ATOMIC_RELAXED);
    if (tree) {
        int p = size_of(comm);
        for (messages = 0; 1 << (int)messages < p;)
            messages++;
        if (kind != TREE)
            share = (kind == SUM ? 2.0 : 1.0) * (p - 1) / p;
        if (kind == PAIRS)
            messages = p - 1;
    }
    return (int64_t)(alpha_ns * messages + beta_ns * bytes * share);
}

static void hold(MPI_Request request, int64_t due)
{
    pthread_mutex_lock(&lock);
    if (used == CAPACITY) {
        fprintf(stderr, "simnet: more than %d collectives in flight\n", CAPACITY);
        abort();
    }
    pending[used].request = request;
    pending[used++].due = due;
    pthread_mutex_unlock(&lock);
}

/* When the last of these requests may complete; 0 if all may now. Forgets those that may. */
static int64_t held_until(int n, const MPI_Request *requests)
{
    int64_t latest = 0;
    pthread_mutex_lock(&lock);
    int64_t time = used ? now() : 0;
    for (int i = 0; i < n; i++)
        for (int k = used - 1; k >= 0; k--) {
            if (pending[k].request != requests[i])
                continue;
            if (pending[k].due <= time)
                pending[k] = pending[--used];
            else if (pending[k].due > latest)
                latest = pending[k].due;
        }
    pthread_mutex_unlock(&lock);
    return latest;
}

/* Held requests still move their messages when they are asked for, as they would without us. */
static int held(int n, const MPI_Request *requests)
{
    int ready, wait = held_until(n, requests) != 0;
    for (int i = 0; wait && i < n; i++)
        if (requests[i] != MPI_REQUEST_NULL)
            PMPI_Request_get_status(requests[i], &ready, MPI_STATUS_IGNORE);
    return wait;
}

static void sleep_while_held(int n, const MPI_Request *requests)
{
    sleep_until(held_until(n, requests));
    held_until(n, requests); /* forgets them: their handles will be used again */
}

#define LIST(...) __VA_ARGS__
#define COLLECTIVE(NAME, INAME, PARAMETERS, ARGUMENTS, BYTES, KIND) \
    int MPI(NAME)(LIST PARAMETERS)                                  \
    {                                                               \
        int64_t delay = delay_of(BYTES, KIND, comm);                \
        int code = PMPI(NAME) ARGUMENTS;                            \
        sleep_until(delay ? now() + delay : 0);                     \
        return code;                                                \
    }                                                               \
    int MPI(INAME)(LIST PARAMETERS, MPI_Request * request)          \
    {                                                               \
        int64_t delay = delay_of(BYTES, KIND, comm);                \
        int64_t due = now() + delay;                                \
        int code = PMPI(INAME)(LIST ARGUMENTS, request);            \
        if (delay && code == MPI_SUCCESS)                           \
            hold(*request, due);                                    \
        return code;                                                \
    }

#define MPI(name) MPI_##name
#define PMPI(name) PMPI_##name
#define COUNT int
#define DISPL int
COLLECTIVE(Barrier, Ibarrier, (MPI_Comm comm), (comm), 0, TREE)
#include "collectives.h"

#if MPI_VERSION >= 4
#undef MPI
#undef PMPI
#undef COUNT
#undef DISPL
#define MPI(name) MPI_##name##_c
#define PMPI(name) PMPI_##name##_c
#define COUNT MPI_Count
#define DISPL MPI_Aint
#include "collectives.h"
#endif

int MPI_Wait(MPI_Request *request, MPI_Status *status)
{
    sleep_while_held(1, request);
    return PMPI_Wait(request, status);
}

int MPI_Waitall(int n, MPI_Request *requests, MPI_Status *statuses)
{
    sleep_while_held(n, requests);
    return PMPI_Waitall(n, requests, statuses);
}

int MPI_Waitany(int n, MPI_Request *requests, int *index, MPI_Status *status)
{
    sleep_while_held(n, requests);
    return PMPI_Waitany(n, requests, index, status);
}

int MPI_Waitsome(int n, MPI_Request *requests, int *count, int *indices, MPI_Status *statuses)
{
    sleep_while_held(n, requests);
    return PMPI_Waitsome(n, requests, count, indices, statuses);
}

int MPI_Test(MPI_Request *request, int *flag, MPI_Status *status)
{
    *flag = 0;
    return held(1, request) ? MPI_SUCCESS : PMPI_Test(request, flag, status);
}

int MPI_Testall(int n, MPI_Request *requests, int *flag, MPI_Status *statuses)
{
    *flag = 0;
    return held(n, requests) ? MPI_SUCCESS : PMPI_Testall(n, requests, flag, statuses);
}

int MPI_Testany(int n, MPI_Request *requests, int *index, int *flag, MPI_Status *status)
{
    *flag = 0, *index = MPI_UNDEFINED;
    return held(n, requests) ? MPI_SUCCESS : PMPI_Testany(n, requests, index, flag, status);
}

int MPI_Testsome(int n, MPI_Request *requests, int *count, int *indices, MPI_Status *statuses)
{
    *count = 0;
    return held(n, requests) ? MPI_SUCCESS
                             : PMPI_Testsome(n, requests, count, indices, statuses);
}

int MPI_Request_get_status(MPI_Request request, int *flag, MPI_Status *status)
{
    *flag = 0;
    return held(1, &request) ? MPI_SUCCESS : PMPI_Request_get_status(request, flag, status);
}
