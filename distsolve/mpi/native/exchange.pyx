"""Data movement between ranks whose sizes or offsets do not fit MPI's int counts.

Every such operation is one MPI_Alltoallw: each pair of ranks has its own derived datatype, which
holds a 64-bit offset and as many blocks as the data need, and the count is one. From and to device
memory it is a round of such exchanges, through staging memory.
"""

from libc.stdint cimport int32_t, int64_t, intptr_t
from libc.stdlib cimport calloc, free, malloc

from distsolve.mpi.native.abi cimport (
    ALLTOALLW, ERR_NO_MEM, TYPE_COMMIT, TYPE_CREATE_HINDEXED, TYPE_FREE, Comm, Handle, address,
    alltoallw_t, constants, count_call, create_hindexed_t, type_t,
)
from distsolve.mpi.native.device cimport Lane, fetch, put, synchronize

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


cdef bint begin(
    Exchange *plan, int size, const void *send, void *recv, Lane *lane
) noexcept nogil:
    """Make an empty plan; False where there is no memory for it."""
    cdef int64_t *rows = <int64_t *> calloc(4 * size, sizeof(int64_t))
    plan.send, plan.recv = <const char *> send, <char *> recv
    plan.send_bytes, plan.largest, plan.lane = rows, 0, lane
    if rows == NULL:
        return False
    plan.send_offsets = rows + size
    plan.recv_bytes = rows + 2 * size
    plan.recv_offsets = rows + 3 * size
    return True


cdef void set_handle(void *handles, int index, Handle handle) noexcept nogil:
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
            set_handle(types, i, constants.byte)
        else:
            counts[i], displacements[i] = 1 if nbytes[i] > 0 else 0, 0
            if code == 0 and nbytes[i] > 0:
                code = bytes_type(offsets[i], nbytes[i], &made[i])
            set_handle(types, i, made[i] if made[i] != 0 else constants.byte)
    return code


cdef int exchange(const Exchange *plan, const Comm *comm) noexcept nogil:
    """One MPI_Alltoallw."""
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
    return code


cdef int64_t limited(int64_t nbytes, int64_t start, int64_t most) noexcept nogil:
    """Bytes of a message from `start` on, at most `most` of them."""
    return max(min(nbytes - start, most), <int64_t> 0)


cdef int queue_sent(Exchange *plan, Exchange *part, int size, int64_t start) noexcept nogil:
    """Queue the copies of one round to staging memory."""
    cdef int64_t nbytes, offset
    cdef int code = 0
    cdef int i
    for i in range(size):
        nbytes = part.send_bytes[i] = limited(plan.send_bytes[i], start, part.largest)
        offset = part.send_offsets[i] = i * part.largest
        if (i > 0 and plan.send_offsets[i] == plan.send_offsets[i - 1]
                and nbytes == part.send_bytes[i - 1]):
            part.send_offsets[i] = part.send_offsets[i - 1]     # the same for all
        else:
            code = code or fetch(
                plan.lane, <char *> part.send + offset,
                plan.send + plan.send_offsets[i] + start, nbytes)
    return code


cdef int exchange_staged(Exchange *plan, const Comm *comm) noexcept nogil:
    """Rounds of messages through staging memory, as many on every rank."""
    cdef Exchange part
    cdef int64_t start = 0
    cdef int code = 0
    cdef int i
    if not begin(&part, comm.size, plan.lane.staging.half[0], plan.lane.staging.half[1], NULL):
        return ERR_NO_MEM
    part.largest = plan.lane.room // comm.size
    if part.largest == 0:
        code = ERR_NO_MEM
    while start < plan.largest and code == 0:
        code = queue_sent(plan, &part, comm.size, start)
        code = code or synchronize(plan.lane)
        for i in range(comm.size):
            part.recv_bytes[i] = limited(plan.recv_bytes[i], start, part.largest)
            part.recv_offsets[i] = i * part.largest
        code = code or exchange(&part, comm)
        for i in range(comm.size):
            code = code or put(
                plan.lane, plan.recv + plan.recv_offsets[i] + start,
                part.recv + part.recv_offsets[i], part.recv_bytes[i])
        start += part.largest
    free(part.send_bytes)
    return code


cdef int finish(Exchange *plan, const Comm *comm) noexcept nogil:
    """Carry the plan out and free it."""
    cdef int code
    if plan.lane.staged:
        code = exchange_staged(plan, comm)
    else:
        code = exchange(plan, comm)
    free(plan.send_bytes)
    return code
