"""Data movement between ranks whose sizes or offsets do not fit MPI's int counts."""

from libc.stdint cimport int64_t

from distsolve.mpi.native.abi cimport Comm, Handle
from distsolve.mpi.native.device cimport Lane

# Bytes each rank sends and receives, and where they lie. `largest`: of all messages of all ranks;
# only messages from and to device memory need it.
cdef struct Exchange:
    const char *send
    char *recv
    int64_t *send_bytes
    int64_t *send_offsets
    int64_t *recv_bytes
    int64_t *recv_offsets
    int64_t largest
    Lane *lane

cdef bint begin(
    Exchange *plan, int size, const void *send, void *recv, Lane *lane) noexcept nogil
cdef int finish(Exchange *plan, const Comm *comm) noexcept nogil
cdef int bytes_type(int64_t offset, int64_t nbytes, Handle *made) noexcept nogil
cdef int free_type(Handle *made) noexcept nogil
