"""Handlers for data movement between all ranks: decode the call frame, call MPI, check.

Attributes arrive sorted by name; the comment above each handler lists them in that order. Inside a
larger program the ordering token is the last operand and the last result; no handler looks at it.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

from distsolve.mpi.native.abi cimport (
    ALLGATHER, ALLGATHERV, ALLREDUCE, ALLTOALL, ALLTOALLW, BARRIER, ERR_NO_MEM, GATHER, GATHERV,
    MAX, SCATTER, SCATTERV, Call, Comm, address, allgatherv_t, barrier_t, combine_t, constants,
    count_call, exchange_t, gatherv_t, mpi_op, mpi_type, rooted_t, scatterv_t,
)
from distsolve.mpi.native.calls cimport NO_OP, NO_PEER, Visit, check, enter, leave, ready
from distsolve.mpi.native.device cimport (
    NEVER, Lane, as_seen, carry, fetch, put, synchronize,
)
from distsolve.mpi.native.exchange cimport Exchange, begin, finish
from distsolve.mpi.native.ffi cimport (
    XLA_FFI_DataType_S64, Buffer, Error, Frame, capsule, ffi_arg, ffi_bytes, ffi_count, ffi_int,
    ffi_ints, ffi_item, ffi_ret, ffi_row,
)


cdef int large_blocks(
    Call call, const Comm *comm, int root, const Buffer *x, Buffer *y, int64_t block, Lane *lane
) noexcept nogil:
    """The four block operations for blocks that no int can count, or no staging memory holds."""
    cdef Exchange plan
    cdef int i
    cdef bint sends_all = call == ALLTOALL or (call == SCATTER and comm.rank == root)
    cdef bint receives_all = (
        call == ALLTOALL or call == ALLGATHER or (call == GATHER and comm.rank == root))
    if not begin(&plan, comm.size, x.data, y.data, lane):
        return ERR_NO_MEM
    plan.largest = block
    for i in range(comm.size):
        if sends_all or call == ALLGATHER or (call == GATHER and i == root):
            plan.send_bytes[i] = block
            plan.send_offsets[i] = i * block if sends_all else 0
        if receives_all or (call == SCATTER and i == root):
            plan.recv_bytes[i] = block
            plan.recv_offsets[i] = i * block if receives_all else 0
    return finish(&plan, comm)


cdef int small_blocks(
    Call call, const Comm *comm, int root, const Buffer *x, Buffer *y, int n
) noexcept nogil:
    count_call(call)
    if call == GATHER or call == SCATTER:
        return (<rooted_t> address[<int> call])(
            x.data, n, constants.byte, y.data, n, constants.byte, root, comm.handle)
    return (<exchange_t> address[<int> call])(
        x.data, n, constants.byte, y.data, n, constants.byte, comm.handle)


cdef int arrive(Lane *lane, Buffer *seen_x, const Buffer *x, bint sends) noexcept nogil:
    """Have an operand where MPI reads it; before it comes what is to be in its place."""
    cdef int code = 0
    seen_x[0] = as_seen(lane, x, 0)
    if sends and lane.staged:
        code = fetch(lane, <char *> seen_x.data, <const char *> x.data, ffi_bytes(x))
    return code or synchronize(lane)


cdef int depart(Lane *lane, Buffer *y, const Buffer *seen_y, bint receives) noexcept nogil:
    """Have a result where XLA reads it."""
    if not receives or not lane.staged:
        return 0
    return put(lane, <char *> y.data, <const char *> seen_y.data, ffi_bytes(y))


cdef bint is_large(const Lane *lane, int64_t message, int64_t total) noexcept nogil:
    """Whether ints cannot count, or staging memory not hold, what goes between all ranks."""
    return message > constants.count_limit or (lane.staged and total > lane.room)


cdef Error *blocks(Frame *frame, Call call, int root_at) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, call, 0, &comm, &error):
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef Buffer seen_x, seen_y
    cdef int root = <int> ffi_int(frame, root_at) if root_at > 0 else 0
    cdef int64_t block = min(ffi_bytes(x), ffi_bytes(y))
    cdef int64_t count = min(ffi_count(x), ffi_count(y))
    cdef bint receives = call != GATHER or comm.rank == root
    cdef int code = 0
    if call == ALLTOALL:
        block //= comm.size
    cdef int64_t total = block * comm.size
    cdef Visit visit
    cdef Lane *lane = &visit.lane
    if not enter(frame, call, comm, count, root if root_at > 0 else NO_PEER, NO_OP, total, &visit,
                 &error):
        return error
    if not receives:
        code = carry(lane, y, x)
    if is_large(lane, block, total):
        code = code or synchronize(lane)
        code = code or large_blocks(call, comm, root, x, y, block, lane)
    else:
        seen_y = as_seen(lane, y, 1)
        code = code or arrive(lane, &seen_x, x, call != SCATTER or comm.rank == root)
        code = code or small_blocks(call, comm, root, &seen_x, &seen_y, <int> block)
        code = code or depart(lane, y, &seen_y, receives)
    return check(frame, call, leave(&visit, code), comm, ffi_count(x), NO_PEER)


# comm, root
cdef Error *gather(Frame *frame) noexcept nogil:
    return blocks(frame, GATHER, 1)


# comm, root
cdef Error *scatter(Frame *frame) noexcept nogil:
    return blocks(frame, SCATTER, 1)


# comm
cdef Error *allgather(Frame *frame) noexcept nogil:
    return blocks(frame, ALLGATHER, 0)


# comm
cdef Error *alltoall(Frame *frame) noexcept nogil:
    return blocks(frame, ALLTOALL, 0)


cdef void lay_out(
    const int64_t *rows, int64_t row, int size, int64_t *nbytes, int64_t *offsets
) noexcept nogil:
    """Bytes and offsets of consecutive blocks."""
    cdef int64_t offset = 0
    cdef int i
    for i in range(size):
        nbytes[i] = rows[i] * row
        offsets[i] = offset
        offset += nbytes[i]


cdef int uneven_in_ints(
    Call call, const Comm *comm, int root, const Buffer *x, Buffer *y,
    const int64_t *rows, int64_t row
) noexcept nogil:
    cdef int *counts = <int *> malloc(2 * comm.size * sizeof(int))
    cdef int *displacements = counts + comm.size
    cdef int offset = 0
    cdef int i, code
    if counts == NULL:
        return ERR_NO_MEM
    for i in range(comm.size):
        counts[i] = <int> (rows[i] * row)
        displacements[i] = offset
        offset += counts[i]
    count_call(call)
    if call == GATHERV:
        code = (<gatherv_t> address[<int> GATHERV])(
            x.data, counts[comm.rank], constants.byte,
            y.data, counts, displacements, constants.byte, root, comm.handle)
    elif call == SCATTERV:
        code = (<scatterv_t> address[<int> SCATTERV])(
            x.data, counts, displacements, constants.byte,
            y.data, counts[comm.rank], constants.byte, root, comm.handle)
    else:
        code = (<allgatherv_t> address[<int> ALLGATHERV])(
            x.data, counts[comm.rank], constants.byte,
            y.data, counts, displacements, constants.byte, comm.handle)
    free(counts)
    return code


cdef int uneven_at_large(
    Call call, const Comm *comm, int root, const Buffer *x, Buffer *y,
    const int64_t *rows, int64_t row, Lane *lane
) noexcept nogil:
    cdef Exchange plan
    cdef int i
    if not begin(&plan, comm.size, x.data, y.data, lane):
        return ERR_NO_MEM
    for i in range(comm.size):
        plan.largest = max(plan.largest, rows[i] * row)
    if call == SCATTERV:
        if comm.rank == root:
            lay_out(rows, row, comm.size, plan.send_bytes, plan.send_offsets)
        plan.recv_bytes[root] = rows[comm.rank] * row
    else:
        for i in range(comm.size):
            if call == ALLGATHERV or i == root:
                plan.send_bytes[i] = rows[comm.rank] * row
        if call == ALLGATHERV or comm.rank == root:
            lay_out(rows, row, comm.size, plan.recv_bytes, plan.recv_offsets)
    return finish(&plan, comm)


cdef Error *uneven(Frame *frame, Call call, int root_at) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, call, 0, &comm, &error):
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef int root = <int> ffi_int(frame, root_at) if root_at > 0 else 0
    cdef const int64_t *rows = ffi_ints(frame, 1)
    cdef Buffer seen_x, seen_y
    cdef int64_t row = ffi_row(x)
    cdef int64_t total = 0
    cdef bint receives = call != GATHERV or comm.rank == root
    cdef int i
    cdef int code = 0
    for i in range(comm.size):
        total += rows[i] * row
    cdef int64_t count = total // ffi_item(x.dtype)
    cdef Visit visit
    cdef Lane *lane = &visit.lane
    if not enter(frame, call, comm, count, root if root_at > 0 else NO_PEER, NO_OP, total, &visit,
                 &error):
        return error
    if not receives:
        code = carry(lane, y, x)
    if is_large(lane, total, total):
        code = code or synchronize(lane)
        code = code or uneven_at_large(call, comm, root, x, y, rows, row, lane)
    else:
        seen_y = as_seen(lane, y, 1)
        code = code or arrive(lane, &seen_x, x, call != SCATTERV or comm.rank == root)
        code = code or uneven_in_ints(call, comm, root, &seen_x, &seen_y, rows, row)
        code = code or depart(lane, y, &seen_y, receives)
    return check(frame, call, leave(&visit, code), comm, ffi_count(x), NO_PEER)


# comm, counts (rows of every rank), root
cdef Error *gatherv(Frame *frame) noexcept nogil:
    return uneven(frame, GATHERV, 2)


# comm, counts, root
cdef Error *scatterv(Frame *frame) noexcept nogil:
    return uneven(frame, SCATTERV, 2)


# comm, counts
cdef Error *allgatherv(Frame *frame) noexcept nogil:
    return uneven(frame, ALLGATHERV, 0)


cdef int agree_on_largest(Exchange *plan, const Comm *comm) noexcept nogil:
    """Let all ranks know the largest message, which decides how many rounds there are."""
    cdef int64_t *largest = &plan.largest
    cdef int i
    if not plan.lane.staged:
        return 0
    for i in range(comm.size):
        largest[0] = max(largest[0], plan.send_bytes[i])
    count_call(ALLREDUCE)
    return (<combine_t> address[<int> ALLREDUCE])(
        constants.in_place, largest, 1, mpi_type(XLA_FFI_DataType_S64), mpi_op(MAX), comm.handle)


# comm, recv_counts, send_counts. A rank knows the counts of its own messages only, so whether ints
# suffice is decided message by message, which MPI_Alltoallv cannot do.
cdef Error *alltoallv(Frame *frame) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, ALLTOALLW, 0, &comm, &error):
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef int64_t row = ffi_row(x)
    cdef Exchange plan
    cdef int code = ERR_NO_MEM
    cdef Visit visit
    if not enter(frame, ALLTOALLW, comm, ffi_count(x), NO_PEER, NO_OP, NEVER, &visit, &error):
        return error
    if begin(&plan, comm.size, x.data, y.data, &visit.lane):
        lay_out(ffi_ints(frame, 2), row, comm.size, plan.send_bytes, plan.send_offsets)
        lay_out(ffi_ints(frame, 1), row, comm.size, plan.recv_bytes, plan.recv_offsets)
        code = agree_on_largest(&plan, comm)
        code = code or finish(&plan, comm)
    return check(frame, ALLTOALLW, leave(&visit, code), comm, ffi_count(x), NO_PEER)


# comm
cdef Error *barrier(Frame *frame) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, BARRIER, 0, &comm, &error):
        return error
    cdef Visit visit
    if not enter(frame, BARRIER, comm, 0, NO_PEER, NO_OP, NEVER, &visit, &error):
        return error
    count_call(BARRIER)
    cdef int code = leave(&visit, (<barrier_t> address[<int> BARRIER])(comm.handle))
    return check(frame, BARRIER, code, comm, 0, NO_PEER)


HANDLERS = {
    "gather": capsule(gather),
    "scatter": capsule(scatter),
    "allgather": capsule(allgather),
    "alltoall": capsule(alltoall),
    "gatherv": capsule(gatherv),
    "scatterv": capsule(scatterv),
    "allgatherv": capsule(allgatherv),
    "alltoallv": capsule(alltoallv),
    "barrier": capsule(barrier),
}
