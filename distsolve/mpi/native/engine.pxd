"""The chunk engine: reductions and broadcasts of any size in bounded scratch memory."""

from libc.stdint cimport int64_t

from distsolve.mpi.native.abi cimport Call, Comm, Handle
from distsolve.mpi.native.device cimport Lane
from distsolve.mpi.native.ffi cimport Buffer, Frame

cdef enum:
    SCRATCH = 4 << 20       # bytes; sending and receiving halves

# One reduction or broadcast over a list of segments, each an input and an output of equal length.
# The segments are the operands of the call frame; where `triangle` is set, the rows of the upper
# triangles of a stack of square matrices of that order; where there is no frame, `count` elements.
cdef struct Job:
    Call call
    const Comm *comm
    int root
    int64_t op
    int dtype               # XLA's number for the elements in memory
    int64_t item            # bytes per element in memory
    int64_t wire_item       # bytes per element on the wire: 16-bit floats are summed in float32
    Handle wire_type
    Handle wire_op
    int64_t chunk           # bytes handed to MPI at a time
    int64_t n_segments
    Frame *frame
    int64_t triangle        # order of the matrices at src and dst, or 0
    int64_t count
    char *src
    char *dst
    Lane *lane              # whose memory the segments are in: host memory unless set

cdef Job job_of(
    Frame *frame, Call call, const Comm *comm, const Buffer *buffer, int64_t op, int root,
    int64_t chunk
) noexcept nogil
cdef int64_t direct_bytes(const Job *job, int64_t count) noexcept nogil
cdef bint is_staged(const Job *job) noexcept nogil
cdef char *take_scratch() noexcept nogil
cdef void give_scratch(char *scratch) noexcept nogil
cdef int run(Job *job) noexcept nogil
cdef void widen(const Job *job, const char *src, char *wire, int64_t count) noexcept nogil
cdef void narrow(const Job *job, const char *wire, char *dst, int64_t count) noexcept nogil
cdef void mirror(char *matrix, int64_t n, int dtype, int64_t item) noexcept nogil
