"""Handlers for reductions and broadcast: decode the call frame, call MPI, check.

Attributes arrive sorted by name; the comment above each handler lists them in that order. Inside a
larger program the ordering token is the last operand and the last result; no handler looks at it.
"""

from libc.stdint cimport int64_t

from distsolve.mpi.native.abi cimport (
    ALLREDUCE, BCAST, EXSCAN, REDUCE, REDUCE_SCATTER_BLOCK, SCAN, Call, Comm,
)
from distsolve.mpi.native.calls cimport NO_OP, NO_PEER, Visit, check, enter, leave, ready
from distsolve.mpi.native.canary cimport verify
from distsolve.mpi.native.columns cimport reduce_scatter
from distsolve.mpi.native.device cimport NEVER
from distsolve.mpi.native.engine cimport Job, direct_bytes, job_of, mirror, run
from distsolve.mpi.native.ffi cimport (
    Buffer, Error, Frame, capsule, ffi_arg, ffi_count, ffi_counts, ffi_int, ffi_operands, ffi_ret,
)


cdef Error *combine(Frame *frame, Call call, int op_at, int root_at) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    cdef Job job
    if not ready(frame, call, 1, &comm, &error):
        return error
    cdef int64_t op = ffi_int(frame, op_at) if op_at > 0 else NO_OP
    cdef int64_t root = ffi_int(frame, root_at) if root_at > 0 else NO_PEER
    cdef int64_t count = ffi_counts(frame, 0, ffi_operands(frame))
    job = job_of(frame, call, comm, ffi_arg(frame, 0), op, <int> root, ffi_int(frame, 0))
    cdef Visit visit
    if not enter(
            frame, call, comm, count, root, op, direct_bytes(&job, count), &visit, &error):
        return error
    job.lane = &visit.lane
    cdef int code = run(&job)
    cdef Error *wrong = NULL
    if code == 0:
        wrong = verify(frame, comm, visit.entry, &visit.lane, &visit.canary)
    error = check(frame, call, leave(&visit, code), comm, count, NO_PEER)
    return error if wrong == NULL else wrong


# chunk, comm, op
cdef Error *allreduce(Frame *frame) noexcept nogil:
    return combine(frame, ALLREDUCE, 2, 0)


# chunk, comm, op, root
cdef Error *reduce(Frame *frame) noexcept nogil:
    return combine(frame, REDUCE, 2, 3)


# chunk, comm, op
cdef Error *scan(Frame *frame) noexcept nogil:
    return combine(frame, SCAN, 2, 0)


# chunk, comm, op
cdef Error *exscan(Frame *frame) noexcept nogil:
    return combine(frame, EXSCAN, 2, 0)


# chunk, comm, root
cdef Error *bcast(Frame *frame) noexcept nogil:
    return combine(frame, BCAST, 0, 2)


# chunk, comm, op; the operand is a stack of square matrices in host memory: see `triangles.py`.
cdef Error *allreduce_symmetric(Frame *frame) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, ALLREDUCE, 1, &comm, &error):
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef int64_t n = x.dims[x.rank - 1]
    cdef int64_t total = ffi_count(x)
    cdef int64_t sent = total // max(n, 1) * (n + 1) // 2   # upper triangles with their diagonals
    cdef Job job = job_of(frame, ALLREDUCE, comm, x, ffi_int(frame, 2), 0, ffi_int(frame, 0))
    cdef int64_t i
    cdef int code = 0
    if total == 0:
        return NULL
    job.triangle = n
    job.n_segments = total // n
    job.src = <char *> x.data
    job.dst = <char *> ffi_ret(frame, 0).data
    cdef Visit visit
    if not enter(frame, ALLREDUCE, comm, sent, NO_PEER, job.op, NEVER, &visit, &error):
        return error
    job.lane = &visit.lane
    code = leave(&visit, run(&job))
    for i in range(total // (n * n)):
        mirror(job.dst + i * n * n * job.item, n, job.dtype, job.item)
    return check(frame, ALLREDUCE, code, comm, sent, NO_PEER)


# chunk, comm, op
cdef Error *reduce_scatter_block(Frame *frame) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, REDUCE_SCATTER_BLOCK, 1, &comm, &error):
        return error
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef Job job = job_of(
        frame, REDUCE_SCATTER_BLOCK, comm, y, ffi_int(frame, 2), 0, ffi_int(frame, 0))
    cdef Visit visit
    if not enter(frame, REDUCE_SCATTER_BLOCK, comm, ffi_count(y), NO_PEER, job.op, NEVER, &visit,
                 &error):
        return error
    job.lane = &visit.lane
    cdef int code = leave(&visit, reduce_scatter(
        &job, <char *> ffi_arg(frame, 0).data, <char *> y.data, ffi_count(y)))
    return check(frame, REDUCE_SCATTER_BLOCK, code, comm, ffi_count(y), NO_PEER)


HANDLERS = {
    "allreduce": capsule(allreduce),
    "reduce": capsule(reduce),
    "scan": capsule(scan),
    "exscan": capsule(exscan),
    "bcast": capsule(bcast),
    "allreduce_symmetric": capsule(allreduce_symmetric),
    "reduce_scatter": capsule(reduce_scatter_block),
}
