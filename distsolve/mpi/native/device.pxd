"""A GPU's driver, and the road of a call between device memory and MPI."""

from libc.stdint cimport int64_t

from distsolve.mpi.native.abi cimport Call, Comm, Trial
from distsolve.mpi.native.ffi cimport Buffer, Frame

# Whether MPI may be given device memory, where that is not a number of bytes: see `open_lane`.
cdef enum:
    NO_DATA = -3        # the handler opens a lane of its own
    NEVER = -2
    ALWAYS = 0x1000000000000000

# Memory that a driver copies to and from without detours, in two halves, and the event behind the
# last copy from it.
cdef struct Staging:
    Staging *next
    char *half[2]
    void *event
    void *context           # that of the event

# The road of one call. In host memory all is 0.
cdef struct Lane:
    void *stream
    void *outer             # the context, or device, that was current before
    Staging *staging
    int64_t room            # bytes in a half of it, the same on all ranks
    bint staged             # MPI must not see device memory
    const Comm *comm
    Trial *trial            # of a call that is timed, or NULL
    int64_t began
    int64_t made            # MPI calls of this thread before it

cdef int open_lane(
    Frame *frame, Call call, const Comm *comm, int64_t direct, Lane *lane) noexcept nogil
cdef int finish_trial(Lane *lane, int failed) noexcept nogil
cdef int close_lane(Lane *lane, int code) noexcept nogil
cdef int fetch(Lane *lane, char *host, const char *device, int64_t nbytes) noexcept nogil
cdef int put(Lane *lane, char *device, const char *host, int64_t nbytes) noexcept nogil
cdef int copy(Lane *lane, char *to, const char *source, int64_t nbytes) noexcept nogil
cdef int carry(Lane *lane, Buffer *y, const Buffer *x) noexcept nogil
cdef int synchronize(Lane *lane) noexcept nogil
cdef Buffer as_seen(const Lane *lane, const Buffer *buffer, int half) noexcept nogil
cdef int get_small(Lane *lane, void *values, const Buffer *x) noexcept nogil
cdef int set_small(Lane *lane, Buffer *y, const void *values) noexcept nogil
cdef const char *driver_error() noexcept nogil
