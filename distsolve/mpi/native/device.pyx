"""A GPU's driver, and the road of a call between device memory and MPI.

The functions come from the driver's own library, which ``device.py`` finds at run time: no header
and no toolkit takes part. Four rules keep the data right:

- every copy goes onto the stream that XLA runs the program on, behind what computes the operand
  and before what reads the result;
- no copy blocks, and none touches memory that the driver did not allocate on the host;
- that stream is synchronised before MPI, or this thread, touches what was copied from it;
- staging memory is used again only behind the event of its last copy.

Functions return 0 or ERR_DRIVER, and then `driver_error` says what the driver said.
"""

from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from distsolve.mpi.native.abi cimport (
    ALLREDUCE, AUTO, ERR_DRIVER, ERR_NO_MEM, MAX, SIZE_CLASSES, Call, Comm, Trial, address,
    calls_of_thread, combine_t, count_call, mpi_op, mpi_type,
)
from distsolve.mpi.native.ffi cimport (
    XLA_FFI_DataType_F64, Buffer, Frame, ffi_bytes, ffi_carry, ffi_on_device, ffi_stream,
    pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock,
)
from distsolve.mpi.native.recorder cimport clock_now


cdef extern from *:
    """
    #define DRIVER_TEXT 256
    static __thread char driver_text[DRIVER_TEXT];  /* of this thread's last error */

    /* Sizes between two powers of two are alike. */
    static int size_class(int64_t nbytes) { return nbytes ? 64 - __builtin_clzll(nbytes) : 0; }
    """
    const int DRIVER_TEXT
    char *driver_text
    int size_class(int64_t nbytes) nogil


# One entry per function of a driver; it indexes `functions` and the tables of ``device.py``.
cdef enum Function:
    COPY_TO_HOST, COPY_TO_DEVICE, COPY_ON_DEVICE, SYNCHRONIZE, ALLOCATE
    EVENT_CREATE, EVENT_RECORD, EVENT_SYNCHRONIZE
    CONTEXT_OF_STREAM, CURRENT_CONTEXT, ENTER_CONTEXT, LEAVE_CONTEXT, ERROR_TEXT
    N_FUNCTIONS

cdef enum:
    TRIALS = 6          # calls of a size that are timed, on the two roads in turn
    PORTABLE = 1        # pinned memory, for all contexts
    NO_TIMING = 2       # of an event

# Device addresses and contexts travel in 64-bit registers, as MPI's handles do.
ctypedef int (*to_host_t)(void *, uintptr_t, size_t, void *) noexcept nogil
ctypedef int (*to_device_t)(uintptr_t, const void *, size_t, void *) noexcept nogil
ctypedef int (*on_device_t)(uintptr_t, uintptr_t, size_t, void *) noexcept nogil
ctypedef int (*stream_t)(void *) noexcept nogil
ctypedef int (*allocate_t)(char **, size_t, unsigned int) noexcept nogil
ctypedef int (*create_t)(void **, unsigned int) noexcept nogil
ctypedef int (*record_t)(void *, void *) noexcept nogil
ctypedef int (*context_of_t)(void *, void **) noexcept nogil
ctypedef int (*enter_t)(void *) noexcept nogil
ctypedef int (*current_t)(void **) noexcept nogil
ctypedef int (*text_t)(int, const char **) noexcept nogil

FUNCTIONS = (
    "copy_to_host", "copy_to_device", "copy_on_device", "synchronize", "allocate",
    "event_create", "event_record", "event_synchronize",
    "context_of_stream", "current_context", "enter_context", "leave_context", "error_text",
)
assert len(FUNCTIONS) == N_FUNCTIONS

cdef void *functions[<int> N_FUNCTIONS]
cdef const char *names[<int> N_FUNCTIONS]
_names_as_bytes = []            # owns what `names` points at, for ever
cdef int64_t staging_half = 16 << 20
cdef Staging *idle = NULL       # one per thread that was in a call at once
cdef pthread_mutex_t lock       # of the list
pthread_mutex_init(&lock, NULL)


cdef int answer(Function function, int code) noexcept nogil:
    """Keep what the driver says of a code that is not 0."""
    cdef const char *text = "no text"
    if code == 0:
        return 0
    if functions[<int> ERROR_TEXT] != NULL:
        (<text_t> functions[<int> ERROR_TEXT])(code, &text)
    snprintf(driver_text, DRIVER_TEXT, "%s of the GPU's driver failed with code %d (%s)",
             names[<int> function], code, text)
    return ERR_DRIVER


cdef const char *driver_error() noexcept nogil:
    """What the driver said of this thread's last ERR_DRIVER."""
    return driver_text


cdef int fetch(Lane *lane, char *host, const char *device, int64_t nbytes) noexcept nogil:
    """Queue a copy to staging memory; it is there after `synchronize`."""
    if nbytes == 0:
        return 0
    return answer(COPY_TO_HOST, (<to_host_t> functions[<int> COPY_TO_HOST])(
        host, <uintptr_t> device, nbytes, lane.stream))


cdef int put(Lane *lane, char *device, const char *host, int64_t nbytes) noexcept nogil:
    """Queue a copy from staging memory, which must stay as it is until `synchronize`."""
    if nbytes == 0:
        return 0
    return answer(COPY_TO_DEVICE, (<to_device_t> functions[<int> COPY_TO_DEVICE])(
        <uintptr_t> device, host, nbytes, lane.stream))


cdef int copy(Lane *lane, char *to, const char *source, int64_t nbytes) noexcept nogil:
    """Queue a copy from device memory to device memory."""
    if nbytes == 0 or to == source:
        return 0
    return answer(COPY_ON_DEVICE, (<on_device_t> functions[<int> COPY_ON_DEVICE])(
        <uintptr_t> to, <uintptr_t> source, nbytes, lane.stream))


cdef int carry(Lane *lane, Buffer *y, const Buffer *x) noexcept nogil:
    """Give an operand back as the result, where XLA has not put both in one place."""
    if lane.stream == NULL:
        ffi_carry(y, x)
        return 0
    return copy(lane, <char *> y.data, <const char *> x.data, ffi_bytes(x))


cdef int get_small(Lane *lane, void *values, const Buffer *x) noexcept nogil:
    """Read an operand of a few bytes."""
    cdef int code
    if lane.stream == NULL:
        memcpy(values, x.data, ffi_bytes(x))
        return 0
    code = fetch(lane, lane.staging.half[0], <const char *> x.data, ffi_bytes(x))
    code = code or synchronize(lane)
    memcpy(values, lane.staging.half[0], ffi_bytes(x))
    return code


cdef int set_small(Lane *lane, Buffer *y, const void *values) noexcept nogil:
    """Set a result of a few bytes, once in a call, when the first half is free."""
    if lane.stream == NULL:
        memcpy(y.data, values, ffi_bytes(y))
        return 0
    memcpy(lane.staging.half[0], values, ffi_bytes(y))
    return put(lane, <char *> y.data, lane.staging.half[0], ffi_bytes(y))


cdef int synchronize(Lane *lane) noexcept nogil:
    """Wait for all that the stream was given so far; nothing to do in host memory."""
    if lane.stream == NULL:
        return 0
    return answer(SYNCHRONIZE, (<stream_t> functions[<int> SYNCHRONIZE])(lane.stream))


cdef Buffer as_seen(const Lane *lane, const Buffer *buffer, int half) noexcept nogil:
    """A buffer as MPI sees it: where it lies, or at the beginning of a half of staging memory."""
    cdef Buffer seen = buffer[0]
    if lane.staged:
        seen.data = lane.staging.half[half]
    return seen


cdef int make_staging(void *context, Staging **made) noexcept nogil:
    """The memory comes last, and at once: a failure leaves none behind."""
    cdef Staging *staging = <Staging *> calloc(1, sizeof(Staging))
    cdef int code
    if staging == NULL:
        return ERR_NO_MEM
    code = answer(EVENT_CREATE, (<create_t> functions[<int> EVENT_CREATE])(
        &staging.event, NO_TIMING))
    if code == 0:
        code = answer(ALLOCATE, (<allocate_t> functions[<int> ALLOCATE])(
            &staging.half[0], 2 * staging_half, PORTABLE))
    if code != 0:
        free(staging)
        return code
    staging.half[1] = staging.half[0] + staging_half
    staging.context = context
    made[0] = staging
    return 0


cdef void set_aside(Staging *staging) noexcept nogil:
    global idle
    pthread_mutex_lock(&lock)
    staging.next = idle
    idle = staging
    pthread_mutex_unlock(&lock)


cdef int take_staging(Lane *lane, void *context) noexcept nogil:
    """Staging memory that no copy uses any more: the context's own, or that of another thread."""
    cdef Staging **link = &idle
    cdef Staging *staging
    cdef int code
    pthread_mutex_lock(&lock)
    while link[0] != NULL and link[0].context != context:
        link = &link[0].next
    staging = link[0]
    if staging != NULL:
        link[0] = staging.next
    pthread_mutex_unlock(&lock)
    if staging == NULL:
        return make_staging(context, &lane.staging)
    code = answer(EVENT_SYNCHRONIZE, (<stream_t> functions[<int> EVENT_SYNCHRONIZE])(staging.event))
    if code == 0:
        lane.staging = staging
    else:
        set_aside(staging)      # the next call waits for its event
    return code


cdef int give_staging(Lane *lane) noexcept nogil:
    """Let others use the staging memory behind its last copy; never where that may go on."""
    cdef int code = answer(EVENT_RECORD, (<record_t> functions[<int> EVENT_RECORD])(
        lane.staging.event, lane.stream))
    if code == 0 or synchronize(lane) == 0:
        set_aside(lane.staging)
    return code


cdef void choose_road(Lane *lane, Call call, int64_t direct) noexcept nogil:
    cdef Trial *trial
    cdef int64_t kind = <int64_t> call * SIZE_CLASSES
    if direct < 0 or direct >= ALWAYS or lane.comm.direct_from != AUTO:
        lane.staged = direct < lane.comm.direct_from
        return
    trial = &lane.comm.trials[kind + size_class(direct)]
    if trial.calls < TRIALS:
        lane.trial, lane.staged = trial, trial.calls % 2 == 1
        lane.began, lane.made = clock_now(), calls_of_thread()
    else:
        lane.staged = trial.staged


cdef int finish_trial(Lane *lane, int failed) noexcept nogil:
    """Note how long a call took; after the last one all ranks choose what was quicker for all.

    Also where the call has failed, with this code, after MPI: the other ranks count it. Before MPI
    it was not made, and may be repeated. Returns the code.
    """
    if failed and calls_of_thread() == lane.made:
        return failed
    cdef Trial *trial = lane.trial
    cdef double mine[2]
    cdef double seconds
    cdef double *best = &trial.seconds[1 if lane.staged else 0]
    cdef int code = failed or synchronize(lane)
    cdef int agreed = 0
    seconds = (clock_now() - lane.began) * 1e-9 if code == 0 else INFINITY
    if trial.calls < 2 or seconds < best[0]:
        best[0] = seconds
    trial.calls += 1
    if trial.calls == TRIALS:
        mine[0], mine[1] = trial.seconds[0], trial.seconds[1]
        count_call(ALLREDUCE)
        agreed = (<combine_t> address[<int> ALLREDUCE])(
            mine, trial.seconds, 2, mpi_type(XLA_FFI_DataType_F64), mpi_op(MAX),
            lane.comm.handle)
        trial.staged = trial.seconds[1] < trial.seconds[0]
    return code or agreed


cdef int open_lane(
    Frame *frame, Call call, const Comm *comm, int64_t direct, Lane *lane
) noexcept nogil:
    """Begin a call, behind all that the stream computes.

    `direct`, the same on all ranks: the bytes that MPI may be given where they lie in device
    memory; negative where it must never be. Waiting here, before the call is recorded, keeps slow
    computations apart from slow messages.
    """
    cdef void *context = NULL
    cdef int code
    memset(lane, 0, sizeof(Lane))
    if direct == NO_DATA or frame == NULL or not ffi_on_device(frame):
        return 0
    if not ffi_stream(frame, &lane.stream) or lane.stream == NULL:
        snprintf(driver_text, DRIVER_TEXT, "XLA names no stream for this program")
        return ERR_DRIVER
    code = answer(CONTEXT_OF_STREAM, (<context_of_t> functions[<int> CONTEXT_OF_STREAM])(
        lane.stream, &context))
    code = code or enter_context(lane, context)
    if code == 0:
        code = synchronize(lane)
        code = code or take_staging(lane, context)
        if code != 0:
            leave_context(lane)
    if code != 0:
        memset(lane, 0, sizeof(Lane))       # nothing to close
        return code
    lane.comm, lane.room = comm, comm.staging
    choose_road(lane, call, direct)
    return 0


cdef int enter_context(Lane *lane, void *context) noexcept nogil:
    """Make a context current on this thread, and note which was where no stack of them does."""
    cdef int code = 0
    if functions[<int> CURRENT_CONTEXT] != NULL:
        code = answer(CURRENT_CONTEXT, (<current_t> functions[<int> CURRENT_CONTEXT])(&lane.outer))
    return code or answer(ENTER_CONTEXT, (<enter_t> functions[<int> ENTER_CONTEXT])(context))


cdef void leave_context(const Lane *lane) noexcept nogil:
    """Make current what was current before the call: XLA's threads do not ask."""
    cdef void *left = NULL
    if functions[<int> LEAVE_CONTEXT] != NULL:
        (<current_t> functions[<int> LEAVE_CONTEXT])(&left)
    else:
        (<enter_t> functions[<int> ENTER_CONTEXT])(lane.outer)


cdef int close_lane(Lane *lane, int code) noexcept nogil:
    """End a call; what it has queued comes before all that XLA queues next. Returns its code."""
    cdef int given
    if lane.stream == NULL:
        return code
    given = give_staging(lane)
    leave_context(lane)
    return code if code != 0 else given


def bind(addresses, int64_t half):
    """Set the driver's functions, each a name and an address or None, and the bytes in a half."""
    global idle, staging_half
    idle = NULL     # what another driver has allocated
    for index, function in enumerate(FUNCTIONS):
        name, pointer = addresses[function]
        _names_as_bytes.append(name.encode())
        names[<int> index] = _names_as_bytes[len(_names_as_bytes) - 1]
        functions[<int> index] = <void *> <uintptr_t> (pointer or 0)
    staging_half = half
