"""Reduce-scatter of any size in bounded scratch memory: some columns of the blocks at a time."""

from libc.stdint cimport int64_t
from libc.stdlib cimport malloc

from distsolve.mpi.native.abi cimport (
    ERR_NO_MEM, REDUCE_SCATTER_BLOCK, address, combine_t, count_call,
)
from distsolve.mpi.native.device cimport Staging, fetch, put, synchronize
from distsolve.mpi.native.engine cimport (
    SCRATCH, Job, give_scratch, is_staged, narrow, take_scratch, widen,
)


cdef int reduce_scatter_on_host(
    const Job *job, const char *src, char *dst, int64_t block
) noexcept nogil:
    """Reduce (size, block) elements and keep this rank's block, some columns at a time."""
    cdef combine_t function = <combine_t> address[<int> REDUCE_SCATTER_BLOCK]
    cdef int64_t size = job.comm.size
    cdef int64_t columns = max(
        min(job.chunk, SCRATCH) // ((size + 1) * job.wire_item), 1)
    cdef int64_t done = 0
    cdef int64_t step, row
    cdef char *scratch
    cdef char *recv
    cdef int code = 0
    if job.wire_item == job.item and block * size * job.item <= job.chunk:
        count_call(REDUCE_SCATTER_BLOCK)
        return function(src, dst, <int> block, job.wire_type, job.wire_op, job.comm.handle)
    if (size + 1) * job.wire_item > SCRATCH:
        scratch = <char *> malloc((size + 1) * job.wire_item)
    else:
        scratch = take_scratch()
    if scratch == NULL:
        return ERR_NO_MEM
    while done < block and code == 0:
        step = min(columns, block - done)
        recv = scratch + size * step * job.wire_item
        for row in range(size):
            widen(job, src + (row * block + done) * job.item,
                  scratch + row * step * job.wire_item, step)
        count_call(REDUCE_SCATTER_BLOCK)
        code = function(
            scratch, recv, <int> step, job.wire_type, job.wire_op, job.comm.handle)
        narrow(job, recv, dst + done * job.item, step)
        done += step
    give_scratch(scratch)
    return code


cdef int reduce_scatter(const Job *job, const char *src, char *dst, int64_t block) noexcept nogil:
    """The same on any memory: from a device as many columns at a time as fit into staging."""
    cdef int64_t size = job.comm.size
    cdef int64_t columns = job.lane.room // (size * job.item)
    cdef Staging *staging = job.lane.staging
    cdef int64_t done = 0
    cdef int64_t step, row
    cdef int code = 0
    if not is_staged(job):
        return reduce_scatter_on_host(job, src, dst, block)
    if columns == 0:
        return ERR_NO_MEM
    while done < block and code == 0:
        step = min(columns, block - done)
        for row in range(size):
            if code == 0:
                code = fetch(job.lane, staging.half[0] + row * step * job.item,
                             src + (row * block + done) * job.item, step * job.item)
        code = code or synchronize(job.lane)
        code = code or reduce_scatter_on_host(job, staging.half[0], staging.half[1], step)
        code = code or put(job.lane, dst + done * job.item, staging.half[1], step * job.item)
        done += step
    return code
