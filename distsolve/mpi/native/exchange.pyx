"""Data movement between ranks whose sizes or offsets do not fit MPI's int counts.

Every such operation is one MPI_Alltoallw: each pair of ranks has its own derived datatype, which
holds a 64-bit offset and as many blocks as the data need, and the count is one.
"""

from libc.stdint cimport int32_t, int64_t, intptr_t
from libc.stdlib cimport calloc, free, malloc

from distsolve.mpi.native.abi cimport (
    ALLTOALLW, ERR_NO_MEM, TYPE_COMMIT, TYPE_CREATE_HINDEXED, TYPE_FREE, Comm, Handle, address,
    alltoallw_t, constants, count_call, create_hindexed_t, type_t,
)

cdef enum:
    PIECE = 1 << 30         # bytes per block of a large datatype


cdef int bytes_type(int64_t offset, int64_t nbytes, Handle *made) noexcept nogil:
    """A committed datatype of `nbytes` bytes that starts `offset` bytes into the buffer."""
    cdef int64_t piece = min(<int64_t> PIECE, constants.count_limit)
    cdef int n = <int> ((nbytes + piece - 1) // piece)
    cdef int *lengths = <int *> malloc(n * sizeof(int))
    cdef intptr_t *offsets = <intptr_t *> malloc(n * sizeof(intptr_t))
    cdef int code = ERR_NO_MEM
    cdef int i
    made[0] = 0
    if lengths != NULL and offsets != NULL:
        for i in range(n):
            lengths[i] = <int> min(piece, nbytes - i * piece)
            offsets[i] = offset + i * piece
        code = (<create_hindexed_t> address[<int> TYPE_CREATE_HINDEXED])(
            n, lengths, offsets, constants.byte, made)
        if code == 0:
            code = (<type_t> address[<int> TYPE_COMMIT])(made)
    free(lengths)
    free(offsets)
    return code


cdef int free_type(Handle *made) noexcept nogil:
    return (<type_t> address[<int> TYPE_FREE])(made)


cdef bint begin(Exchange *plan, int size, const void *send, void *recv) noexcept nogil:
    """Make an empty plan; False where there is no memory for it."""
    cdef int64_t *rows = <int64_t *> calloc(4 * size, sizeof(int64_t))
    plan.send, plan.recv = <const char *> send, <char *> recv
    plan.send_bytes = rows
    if rows == NULL:
        return False
    plan.send_offsets = rows + size
    plan.recv_bytes = rows + 2 * size
    plan.recv_offsets = rows + 3 * size
    return True


cdef void put(void *handles, int index, Handle handle) noexcept nogil:
    """Store a handle in an array of the library's own handle type."""
    if constants.handle_size == sizeof(int32_t):
        (<int32_t *> handles)[index] = <int32_t> handle
    else:
        (<Handle *> handles)[index] = handle


cdef int describe(
    int size, const int64_t *nbytes, const int64_t *offsets,
    int *counts, int *displacements, void *types, Handle *made
) noexcept nogil:
    """One side of MPI_Alltoallw: plain bytes where ints suffice, a datatype where not."""
    cdef int code = 0
    cdef int i
    for i in range(size):
        if nbytes[i] <= constants.count_limit and offsets[i] <= constants.count_limit:
            counts[i], displacements[i] = <int> nbytes[i], <int> offsets[i]
            put(types, i, constants.byte)
        else:
            counts[i], displacements[i] = 1 if nbytes[i] > 0 else 0, 0
            if code == 0 and nbytes[i] > 0:
                code = bytes_type(offsets[i], nbytes[i], &made[i])
            put(types, i, made[i] if made[i] != 0 else constants.byte)
    return code


cdef int finish(Exchange *plan, const Comm *comm) noexcept nogil:
    """Carry the plan out and free it."""
    cdef int size = comm.size
    cdef int *ints = <int *> calloc(4 * size, sizeof(int))
    cdef Handle *types = <Handle *> calloc(2 * size, sizeof(Handle))
    cdef Handle *made = <Handle *> calloc(2 * size, sizeof(Handle))
    cdef int code = ERR_NO_MEM
    cdef int i
    if ints != NULL and types != NULL and made != NULL:
        code = describe(
            size, plan.send_bytes, plan.send_offsets, ints, ints + size, types, made)
        if code == 0:
            code = describe(
                size, plan.recv_bytes, plan.recv_offsets, ints + 2 * size, ints + 3 * size,
                types + size, made + size)
        if code == 0:
            count_call(ALLTOALLW)
            code = (<alltoallw_t> address[<int> ALLTOALLW])(
                plan.send, ints, ints + size, types,
                plan.recv, ints + 2 * size, ints + 3 * size, types + size, comm.handle)
    if made != NULL:
        for i in range(2 * size):
            if made[i] != 0:
                free_type(&made[i])
    free(ints)
    free(types)
    free(made)
    free(plan.send_bytes)
    return code
