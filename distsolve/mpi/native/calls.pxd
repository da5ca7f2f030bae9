"""A call from its beginning to its end: what every handler does around MPI."""

from libc.stdint cimport int64_t

from distsolve.mpi.native.abi cimport Call, Comm
from distsolve.mpi.native.canary cimport Canary
from distsolve.mpi.native.device cimport Lane
from distsolve.mpi.native.ffi cimport Error, Frame, fp_mode
from distsolve.mpi.native.recorder cimport Entry

# The root or peer, and the operation, of a call that has none.
cdef enum:
    NO_PEER = -3
    NO_OP = -3

# A call between `enter` and `leave`.
cdef struct Visit:
    fp_mode mode
    Entry *entry
    int64_t sequence
    Canary canary
    Lane lane

cdef bint ready(
    Frame *frame, Call call, int64_t comm_id_at, Comm **comm, Error **answer
) noexcept nogil
cdef bint enter(
    Frame *frame, Call call, const Comm *comm, int64_t count, int64_t peer, int64_t op,
    int64_t direct, Visit *visit, Error **answer
) noexcept nogil
cdef int leave(Visit *visit, int code) noexcept nogil
cdef Error *check(
    Frame *frame, Call call, int code, const Comm *comm, int64_t count, int64_t peer
) noexcept nogil
cdef bint in_use() noexcept nogil
