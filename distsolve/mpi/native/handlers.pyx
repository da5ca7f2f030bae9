"""The XLA handlers: decode the call frame, call MPI, check.

Attributes arrive sorted by name; the comment above each handler lists them in that order. Where
the program runs inside a larger one, the ordering token is the last operand and the last result,
and no handler looks at it.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcpy

from distsolve.mpi.native.abi cimport (
    ALLGATHER, ALLGATHERV, ALLREDUCE, ALLTOALL, ALLTOALLW, BARRIER, BCAST, EXSCAN, GATHER, GATHERV,
    GET_ELEMENTS_X, RECV, REDUCE, REDUCE_SCATTER_BLOCK, SCAN, SCATTER, SCATTERV, SEND, SENDRECV,
    Call, Comm, Handle, address, allgatherv_t, barrier_t, check, constants, count_call, enter,
    exchange_t, find_comm, gatherv_t, get_elements_t, leave, peer, recv_t, rooted_t, scatterv_t,
    send_t, sendrecv_t, status_layout, unusable, user_status,
)
from distsolve.mpi.native.engine cimport Job, item_size, job_of, mirror, reduce_scatter, run
from distsolve.mpi.native.exchange cimport Exchange, begin, bytes_type, finish, free_type
from distsolve.mpi.native.ffi cimport (
    Buffer, Error, Frame, ffi_answer_metadata, ffi_arg, ffi_count, ffi_error, ffi_int, ffi_ints,
    ffi_ret,
)


cdef extern from "ffi.h" nogil:
    enum:
        XLA_FFI_DataType_S32

cdef enum:
    STATUS_SIZE = 128       # bytes kept for an MPI_Status, far more than any library needs
    NO_PEER = -3
    MAX_RANKS_ON_STACK = 256


cdef int64_t nbytes(const Buffer *buffer) noexcept nogil:
    return ffi_count(buffer) * item_size(buffer.dtype)


cdef int64_t row_bytes(const Buffer *buffer) noexcept nogil:
    """Bytes in one element of the leading axis."""
    cdef int64_t size = item_size(buffer.dtype)
    cdef int64_t axis
    for axis in range(1, buffer.rank):
        size *= buffer.dims[axis]
    return size


cdef void carry(Buffer *y, const Buffer *x) noexcept nogil:
    """Give an operand back as the result; XLA has usually put both in one place."""
    if y.data != x.data:
        memcpy(y.data, x.data, nbytes(x))


# ---- reductions and broadcast: chunk, comm, op[, root] ----

cdef Error *combine(Frame *frame, Call call, int64_t op, int root) noexcept nogil:
    cdef Comm *comm = find_comm(ffi_int(frame, 1))
    cdef Error *error = unusable(frame, comm, call)
    cdef Job job
    if error != NULL:
        return error
    job = job_of(frame, call, comm, ffi_arg(frame, 0), op, root, ffi_int(frame, 0))
    enter()
    cdef int code = run(&job)
    leave()
    return check(frame, call, code, comm, ffi_count(ffi_arg(frame, 0)), NO_PEER)


cdef Error *allreduce(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    return combine(frame, ALLREDUCE, ffi_int(frame, 2), 0)


cdef Error *reduce(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    return combine(frame, REDUCE, ffi_int(frame, 2), <int> ffi_int(frame, 3))


cdef Error *scan(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    return combine(frame, SCAN, ffi_int(frame, 2), 0)


cdef Error *exscan(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    return combine(frame, EXSCAN, ffi_int(frame, 2), 0)


# chunk, comm, root
cdef Error *bcast(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    return combine(frame, BCAST, 0, <int> ffi_int(frame, 2))


# chunk, comm, op; the operand is a stack of square matrices
cdef Error *allreduce_symmetric(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    cdef Comm *comm = find_comm(ffi_int(frame, 1))
    cdef Error *error = unusable(frame, comm, ALLREDUCE)
    if error != NULL:
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef int64_t n = x.dims[x.rank - 1]
    cdef int64_t total = ffi_count(x)
    cdef Job job = job_of(frame, ALLREDUCE, comm, x, ffi_int(frame, 2), 0, ffi_int(frame, 0))
    cdef int code = 0
    cdef int64_t done = 0
    job.triangle = job.n_segments = n
    enter()
    while done < total and code == 0:
        job.src = <char *> x.data + done * job.item
        job.dst = <char *> y.data + done * job.item
        code = run(&job)
        mirror(job.dst, n, job.dtype, job.item)
        done += n * n
    leave()
    return check(frame, ALLREDUCE, code, comm, total, NO_PEER)


# chunk, comm, op
cdef Error *reduce_scatter_block(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    cdef Comm *comm = find_comm(ffi_int(frame, 1))
    cdef Error *error = unusable(frame, comm, REDUCE_SCATTER_BLOCK)
    if error != NULL:
        return error
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef Job job = job_of(
        frame, REDUCE_SCATTER_BLOCK, comm, y, ffi_int(frame, 2), 0, ffi_int(frame, 0))
    enter()
    cdef int code = reduce_scatter(
        &job, <char *> ffi_arg(frame, 0).data, <char *> y.data, ffi_count(y))
    leave()
    return check(frame, REDUCE_SCATTER_BLOCK, code, comm, ffi_count(y), NO_PEER)


# ---- data movement in equal blocks: comm[, root] ----

cdef int large_blocks(
    Call call, const Comm *comm, int root, const Buffer *x, Buffer *y, int64_t block
) noexcept nogil:
    """The four block operations for blocks that no int can count."""
    cdef Exchange plan
    cdef int i
    cdef bint sends_all = call == ALLTOALL or (call == SCATTER and comm.rank == root)
    cdef bint receives_all = (
        call == ALLTOALL or call == ALLGATHER or (call == GATHER and comm.rank == root))
    if not begin(&plan, comm.size, x.data, y.data):
        return 1
    for i in range(comm.size):
        if sends_all or call == ALLGATHER or (call == GATHER and i == root):
            plan.send_bytes[i] = block
            plan.send_offsets[i] = i * block if sends_all else 0
        if receives_all or (call == SCATTER and i == root):
            plan.recv_bytes[i] = block
            plan.recv_offsets[i] = i * block if receives_all else 0
    return finish(&plan, comm)


cdef Error *blocks(Frame *frame, Call call, int root) noexcept nogil:
    cdef Comm *comm = find_comm(ffi_int(frame, 0))
    cdef Error *error = unusable(frame, comm, call)
    if error != NULL:
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef int64_t block = min(nbytes(x), nbytes(y))
    cdef int n
    cdef int code
    if call == ALLTOALL:
        block //= comm.size
    if call == GATHER and comm.rank != root:
        carry(y, x)
    enter()
    if block > constants.count_limit:
        code = large_blocks(call, comm, root, x, y, block)
    else:
        n = <int> block
        count_call(call)
        if call == GATHER or call == SCATTER:
            code = (<rooted_t> address[<int> call])(
                x.data, n, constants.byte, y.data, n, constants.byte, root, comm.handle)
        else:
            code = (<exchange_t> address[<int> call])(
                x.data, n, constants.byte, y.data, n, constants.byte, comm.handle)
    leave()
    return check(frame, call, code, comm, ffi_count(x), NO_PEER)


cdef Error *gather(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    return blocks(frame, GATHER, <int> ffi_int(frame, 1))


cdef Error *scatter(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    return blocks(frame, SCATTER, <int> ffi_int(frame, 1))


cdef Error *allgather(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    return blocks(frame, ALLGATHER, 0)


cdef Error *alltoall(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    return blocks(frame, ALLTOALL, 0)


# ---- data movement in uneven blocks: comm, counts[, root]; counts are rows ----

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
    const int64_t *rows, int64_t row, int *counts, int *displacements
) noexcept nogil:
    cdef int offset = 0
    cdef int i
    for i in range(comm.size):
        counts[i] = <int> (rows[i] * row)
        displacements[i] = offset
        offset += counts[i]
    count_call(call)
    if call == GATHERV:
        return (<gatherv_t> address[<int> GATHERV])(
            x.data, counts[comm.rank], constants.byte,
            y.data, counts, displacements, constants.byte, root, comm.handle)
    if call == SCATTERV:
        return (<scatterv_t> address[<int> SCATTERV])(
            x.data, counts, displacements, constants.byte,
            y.data, counts[comm.rank], constants.byte, root, comm.handle)
    return (<allgatherv_t> address[<int> ALLGATHERV])(
        x.data, counts[comm.rank], constants.byte,
        y.data, counts, displacements, constants.byte, comm.handle)


cdef int uneven_at_large(
    Call call, const Comm *comm, int root, const Buffer *x, Buffer *y,
    const int64_t *rows, int64_t row
) noexcept nogil:
    cdef Exchange plan
    cdef int i
    if not begin(&plan, comm.size, x.data, y.data):
        return 1
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


cdef Error *uneven(Frame *frame, Call call, int root) noexcept nogil:
    cdef Comm *comm = find_comm(ffi_int(frame, 0))
    cdef Error *error = unusable(frame, comm, call)
    if error != NULL:
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef const int64_t *rows = ffi_ints(frame, 1)
    cdef int64_t row = row_bytes(x)
    cdef int on_stack[2 * MAX_RANKS_ON_STACK]
    cdef int64_t total = 0
    cdef int i
    cdef int code
    for i in range(comm.size):
        total += rows[i] * row
    if call == GATHERV and comm.rank != root:
        carry(y, x)
    enter()
    if total > constants.count_limit or comm.size > MAX_RANKS_ON_STACK:
        code = uneven_at_large(call, comm, root, x, y, rows, row)
    else:
        code = uneven_in_ints(
            call, comm, root, x, y, rows, row, on_stack, on_stack + MAX_RANKS_ON_STACK)
    leave()
    return check(frame, call, code, comm, ffi_count(x), NO_PEER)


cdef Error *gatherv(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    return uneven(frame, GATHERV, <int> ffi_int(frame, 2))


cdef Error *scatterv(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    return uneven(frame, SCATTERV, <int> ffi_int(frame, 2))


cdef Error *allgatherv(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    return uneven(frame, ALLGATHERV, 0)


# comm, recv_counts, send_counts
cdef Error *alltoallv(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    cdef Comm *comm = find_comm(ffi_int(frame, 0))
    cdef Error *error = unusable(frame, comm, ALLTOALLW)
    if error != NULL:
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef int64_t row = row_bytes(x)
    cdef Exchange plan
    cdef int code = 1
    enter()
    if begin(&plan, comm.size, x.data, y.data):
        lay_out(ffi_ints(frame, 2), row, comm.size, plan.send_bytes, plan.send_offsets)
        lay_out(ffi_ints(frame, 1), row, comm.size, plan.recv_bytes, plan.recv_offsets)
        code = finish(&plan, comm)
    leave()
    return check(frame, ALLTOALLW, code, comm, ffi_count(x), NO_PEER)


# ---- point to point ----

cdef int message_type(int64_t size, int *count, Handle *made) noexcept nogil:
    """Count and datatype of a message of `size` bytes; `made` must be freed where it is not 0."""
    made[0] = 0
    count[0] = 1
    if size > constants.count_limit:
        return bytes_type(0, size, made)
    count[0] = <int> size
    return 0


cdef Error *report_status(
    Frame *frame, char *status, int64_t status_id, int64_t item, Buffer *y
) noexcept nogil:
    """Fill the (source, tag, count) result, and the user's own status object if there is one."""
    cdef int64_t values[3]
    cdef int64_t length = 0
    cdef int i
    (<get_elements_t> address[<int> GET_ELEMENTS_X])(status, constants.byte, &length)
    values[0] = (<int *> (status + status_layout.source))[0]
    values[1] = (<int *> (status + status_layout.tag))[0]
    values[2] = length // item
    if status_id > 0:
        memcpy(user_status(status_id), status, status_layout.size)
    if y.dtype != XLA_FFI_DataType_S32:
        memcpy(y.data, values, sizeof(values))
        return NULL
    if values[2] > INT32_MAX:
        return ffi_error(frame, "The number of elements received does not fit the 32-bit count of "
                         "a Status: enable jax_enable_x64.")
    for i in range(3):
        (<int32_t *> y.data)[i] = <int32_t> values[i]
    return NULL


# comm, dest, tag
cdef Error *send(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    cdef Comm *comm = find_comm(ffi_int(frame, 0))
    cdef Error *error = unusable(frame, comm, SEND)
    if error != NULL:
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef Handle made
    cdef int count
    cdef int code = message_type(nbytes(x), &count, &made)
    if code == 0:
        enter()
        count_call(SEND)
        code = (<send_t> address[<int> SEND])(
            x.data, count, made if made != 0 else constants.byte,
            peer(ffi_int(frame, 1)), <int> ffi_int(frame, 2), comm.handle)
        leave()
    if made != 0:
        free_type(&made)
    return check(frame, SEND, code, comm, ffi_count(x), ffi_int(frame, 1))


cdef int received_tag(int64_t tag) noexcept nogil:
    return constants.any_tag if tag < 0 else <int> tag


# comm, source, status, tag
cdef Error *recv(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    cdef Comm *comm = find_comm(ffi_int(frame, 0))
    cdef Error *error = unusable(frame, comm, RECV)
    if error != NULL:
        return error
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef char status[STATUS_SIZE]
    cdef Handle made
    cdef int count
    cdef int code = message_type(nbytes(y), &count, &made)
    carry(y, ffi_arg(frame, 0))
    if code == 0:
        enter()
        count_call(RECV)
        code = (<recv_t> address[<int> RECV])(
            y.data, count, made if made != 0 else constants.byte,
            peer(ffi_int(frame, 1)), received_tag(ffi_int(frame, 3)), comm.handle, status)
        leave()
    if made != 0:
        free_type(&made)
    error = check(frame, RECV, code, comm, ffi_count(y), ffi_int(frame, 1))
    if error != NULL:
        return error
    return report_status(
        frame, status, ffi_int(frame, 2), item_size(y.dtype), ffi_ret(frame, 1))


# comm, dest, recvtag, sendtag, source, status; operands sendbuf, recvbuf
cdef Error *sendrecv(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    cdef Comm *comm = find_comm(ffi_int(frame, 0))
    cdef Error *error = unusable(frame, comm, SENDRECV)
    if error != NULL:
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef char status[STATUS_SIZE]
    cdef Handle sent
    cdef Handle received
    cdef int n_sent, n_received
    cdef int code = message_type(nbytes(x), &n_sent, &sent)
    if code == 0:
        code = message_type(nbytes(y), &n_received, &received)
    carry(y, ffi_arg(frame, 1))
    if code == 0:
        enter()
        count_call(SENDRECV)
        code = (<sendrecv_t> address[<int> SENDRECV])(
            x.data, n_sent, sent if sent != 0 else constants.byte,
            peer(ffi_int(frame, 1)), <int> ffi_int(frame, 3),
            y.data, n_received, received if received != 0 else constants.byte,
            peer(ffi_int(frame, 4)), received_tag(ffi_int(frame, 2)), comm.handle, status)
        leave()
        if received != 0:
            free_type(&received)
    if sent != 0:
        free_type(&sent)
    error = check(frame, SENDRECV, code, comm, ffi_count(x), ffi_int(frame, 4))
    if error != NULL:
        return error
    return report_status(
        frame, status, ffi_int(frame, 5), item_size(y.dtype), ffi_ret(frame, 1))


# comm
cdef Error *barrier(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    cdef Comm *comm = find_comm(ffi_int(frame, 0))
    cdef Error *error = unusable(frame, comm, BARRIER)
    if error != NULL:
        return error
    enter()
    count_call(BARRIER)
    cdef int code = (<barrier_t> address[<int> BARRIER])(comm.handle)
    leave()
    return check(frame, BARRIER, code, comm, 0, NO_PEER)


cdef object capsule(Error *(*handler)(Frame *) noexcept nogil):
    return PyCapsule_New(<void *> handler, NULL, NULL)


HANDLERS = {
    "allreduce": capsule(allreduce),
    "reduce": capsule(reduce),
    "scan": capsule(scan),
    "exscan": capsule(exscan),
    "bcast": capsule(bcast),
    "allreduce_symmetric": capsule(allreduce_symmetric),
    "reduce_scatter": capsule(reduce_scatter_block),
    "gather": capsule(gather),
    "scatter": capsule(scatter),
    "allgather": capsule(allgather),
    "alltoall": capsule(alltoall),
    "gatherv": capsule(gatherv),
    "scatterv": capsule(scatterv),
    "allgatherv": capsule(allgatherv),
    "alltoallv": capsule(alltoallv),
    "send": capsule(send),
    "recv": capsule(recv),
    "sendrecv": capsule(sendrecv),
    "barrier": capsule(barrier),
}
