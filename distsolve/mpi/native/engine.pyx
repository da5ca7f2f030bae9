"""The chunk engine: reductions and broadcasts of any size in bounded scratch memory.

An MPI library allocates scratch in proportion to the message, and counts are C ints. So a large
array goes to MPI a chunk at a time, in place where the buffers allow it. What cannot go directly
is copied through one scratch buffer of fixed size: small leaves (packed into one message), 16-bit
floats (widened to float32 and rounded once), and arrays whose MPI must not see MPI_IN_PLACE.

Device memory comes to MPI in pieces through the two halves of staging memory: while MPI reduces one
piece, the one before goes back to the device and the one after comes from it.
"""

from libc.stdint cimport int64_t, uint16_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from distsolve.mpi.native.abi cimport (
    BCAST, ERR_NO_MEM, EXSCAN, REDUCE, Call, Comm, address, bcast_t,
    combine_t, constants, count_call, identity, mpi_op, mpi_type, reduce_t,
)
from distsolve.mpi.native.device cimport (
    NEVER, Lane, copy, fetch, put, synchronize,
)
from distsolve.mpi.native.ffi cimport (
    XLA_FFI_DataType_BF16, XLA_FFI_DataType_C128, XLA_FFI_DataType_C64, XLA_FFI_DataType_F16,
    XLA_FFI_DataType_F32, Buffer, Frame, bfloat16_to_float, ffi_arg, ffi_bytes, ffi_item,
    ffi_operands, ffi_ret, float16_to_float, float_to_bfloat16, float_to_float16,
    pthread_mutex_init, pthread_mutex_t, pthread_mutex_trylock, pthread_mutex_unlock,
)


cdef enum:
    DIRECT = 64 << 10       # bytes from which a leaf among others is reduced where it lies
    TILE = 32               # rows and columns mirrored at a time
    PIECES = 8              # of an array in device memory, at least,
    SMALLEST_PIECE = 1 << 20    # unless that makes them smaller than this

cdef struct Cursor:
    int64_t segment
    int64_t offset

cdef Lane in_host_memory        # all zeros
cdef char *shared_scratch = NULL
cdef pthread_mutex_t scratch_lock
pthread_mutex_init(&scratch_lock, NULL)


cdef char *take_scratch() noexcept nogil:
    """A scratch buffer: the process's own, or a private one while another thread has that."""
    global shared_scratch
    if pthread_mutex_trylock(&scratch_lock) != 0:
        return <char *> malloc(SCRATCH)
    if shared_scratch == NULL:
        shared_scratch = <char *> malloc(SCRATCH)
        if shared_scratch == NULL:
            pthread_mutex_unlock(&scratch_lock)
    return shared_scratch


cdef void give_scratch(char *scratch) noexcept nogil:
    if scratch == shared_scratch:
        pthread_mutex_unlock(&scratch_lock)
    else:
        free(scratch)


cdef Job job_of(
    Frame *frame, Call call, const Comm *comm, const Buffer *buffer, int64_t op, int root,
    int64_t chunk
) noexcept nogil:
    """The job of a frame whose operands have the dtype of `buffer`."""
    cdef Job job
    job.call, job.comm, job.root, job.op = call, comm, root, op
    job.dtype = buffer.dtype
    job.item = job.wire_item = ffi_item(buffer.dtype)
    job.chunk = chunk if chunk > 0 else comm.chunk
    job.n_segments = ffi_operands(frame)
    job.frame = frame
    job.triangle = 0
    job.src = job.dst = NULL
    job.count = 0
    job.lane = &in_host_memory
    if call == BCAST:
        job.wire_type, job.wire_op = constants.byte, 0
        return job
    job.wire_op = mpi_op(op)
    if job.dtype == XLA_FFI_DataType_F16 or job.dtype == XLA_FFI_DataType_BF16:
        job.wire_item = sizeof(float)
        job.wire_type = mpi_type(XLA_FFI_DataType_F32)
    else:
        job.wire_type = mpi_type(job.dtype)
    return job


cdef void segment(
    const Job *job, int64_t index, char **src, char **dst, int64_t *count
) noexcept nogil:
    cdef int64_t n = job.triangle
    cdef int64_t row, offset
    if n > 0:
        row = index % n
        offset = ((index // n) * n * n + row * (n + 1)) * job.item
        src[0], dst[0] = job.src + offset, job.dst + offset
        count[0] = n - row
    elif job.frame == NULL:
        src[0], dst[0], count[0] = job.src, job.dst, job.count
    else:
        src[0] = <char *> ffi_arg(job.frame, index).data
        dst[0] = <char *> ffi_ret(job.frame, index).data
        count[0] = ffi_bytes(ffi_arg(job.frame, index)) // job.item


cdef bint is_staged(const Job *job) noexcept nogil:
    """Whether the segments are in device memory, and MPI must not see it."""
    return job.lane.staged


cdef int64_t direct_bytes(const Job *job, int64_t count) noexcept nogil:
    """Bytes that MPI may be given in device memory; none where this module must touch them."""
    if (job.n_segments > 1 or job.wire_item != job.item or job.call == EXSCAN
            or (not constants.use_in_place and job.call != BCAST)):
        return NEVER
    return count * job.item


cdef int duplicate(const Job *job, char *dst, const char *src, int64_t nbytes) noexcept nogil:
    cdef int code
    if job.lane.stream == NULL:
        memcpy(dst, src, nbytes)
        return 0
    code = copy(job.lane, dst, src, nbytes)
    return code if code != 0 else synchronize(job.lane)


cdef bint is_direct(const Job *job, int64_t count) noexcept nogil:
    """Whether MPI reads and writes a segment where it lies: the same answer on every rank."""
    if is_staged(job) or job.wire_item != job.item:
        return False
    if not constants.use_in_place and job.call != BCAST:
        return False
    if job.triangle > 0:
        return count * job.item >= job.chunk
    return job.n_segments == 1 or count * job.item >= DIRECT


cdef int call_mpi(const Job *job, const char *send, char *recv, int64_t count) noexcept nogil:
    """One MPI call on at most a chunk; equal buffers mean MPI_IN_PLACE."""
    cdef const void *source = send
    if send == recv:
        source = constants.in_place
    count_call(job.call)
    if job.call == BCAST:
        return (<bcast_t> address[<int> BCAST])(
            recv, <int> (count * job.item), job.wire_type, job.root, job.comm.handle)
    if job.call == REDUCE:
        if job.comm.rank != job.root:
            source, recv = send, NULL
        return (<reduce_t> address[<int> REDUCE])(
            source, recv, <int> count, job.wire_type, job.wire_op, job.root, job.comm.handle)
    return (<combine_t> address[<int> job.call])(
        source, recv, <int> count, job.wire_type, job.wire_op, job.comm.handle)


cdef int run_direct(const Job *job, char *src, char *dst, int64_t count) noexcept nogil:
    cdef int64_t step
    cdef int64_t done = 0
    cdef int code = 0
    if count == 0:
        return 0
    if count * job.item <= job.chunk:
        return call_mpi(job, src, dst, count)
    step = max(job.chunk // job.item, 1)
    while done < count and code == 0:
        step = min(step, count - done)
        code = call_mpi(job, src + done * job.item, dst + done * job.item, step)
        done += step
    return code


cdef void widen(const Job *job, const char *src, char *wire, int64_t count) noexcept nogil:
    cdef const uint16_t *narrow = <const uint16_t *> src
    cdef float *wide = <float *> wire
    cdef int64_t i
    if job.wire_item == job.item:
        memcpy(wire, src, count * job.item)
    elif job.dtype == XLA_FFI_DataType_F16:
        for i in range(count):
            wide[i] = float16_to_float(narrow[i])
    else:
        for i in range(count):
            wide[i] = bfloat16_to_float(narrow[i])


cdef void narrow(const Job *job, const char *wire, char *dst, int64_t count) noexcept nogil:
    cdef const float *wide = <const float *> wire
    cdef uint16_t *short_ = <uint16_t *> dst
    cdef int64_t i
    if job.wire_item == job.item:
        memcpy(dst, wire, count * job.item)
    elif job.dtype == XLA_FFI_DataType_F16:
        for i in range(count):
            short_[i] = float_to_float16(wide[i])
    else:
        for i in range(count):
            short_[i] = float_to_bfloat16(wide[i])


cdef int move(
    const Job *job, Cursor *cursor, char *wire, int64_t total, bint to_wire
) noexcept nogil:
    """Copy `total` elements between scratch or staging and the segments that are not direct."""
    cdef int64_t wire_item = job.item if is_staged(job) else job.wire_item
    cdef char *src
    cdef char *dst
    cdef int64_t count
    cdef int64_t step
    cdef int code = 0
    while total > 0 and code == 0:
        segment(job, cursor.segment, &src, &dst, &count)
        if cursor.offset == count or is_direct(job, count):
            cursor.segment += 1
            cursor.offset = 0
            continue
        step = min(count - cursor.offset, total)
        src += cursor.offset * job.item
        dst += cursor.offset * job.item
        if is_staged(job):
            code = (fetch(job.lane, wire, src, step * job.item) if to_wire
                    else put(job.lane, dst, wire, step * job.item))
        elif to_wire:
            widen(job, src, wire, step)
        else:
            narrow(job, wire, dst, step)
        wire += step * wire_item
        cursor.offset += step
        total -= step
    return code


cdef int flush(const Job *job, Cursor *start, char *scratch, int64_t total) noexcept nogil:
    """Send `total` elements from `start` on through scratch, and move `start` behind them."""
    cdef Cursor cursor = start[0]
    cdef char *recv = scratch
    cdef int code
    if not constants.use_in_place:
        recv = scratch + SCRATCH // 2
    if job.call == BCAST:
        recv = scratch
    move(job, &cursor, scratch, total, True)
    code = call_mpi(job, scratch, recv, total)
    if code == 0 and (job.call != REDUCE or job.comm.rank == job.root):
        move(job, start, recv, total, False)
    start[0] = cursor
    return code


cdef int run_packed(const Job *job, int64_t total) noexcept nogil:
    """Send every segment that is not direct; `total` is their number of elements."""
    cdef int64_t room = max(min(job.chunk, SCRATCH // 2) // job.wire_item, 1)
    cdef Cursor start
    cdef char *scratch = take_scratch()
    cdef int code = 0
    start.segment = start.offset = 0
    if scratch == NULL:
        return ERR_NO_MEM
    while total > 0 and code == 0:
        code = flush(job, &start, scratch, min(room, total))
        total -= min(room, total)
    give_scratch(scratch)
    return code


cdef void fill_identity(const Job *job, char *dst, int64_t count) noexcept nogil:
    cdef int64_t i
    for i in range(count):
        memcpy(dst + i * job.item, identity(job.op, job.dtype), job.item)


cdef int run_staged(const Job *job) noexcept nogil:
    """Run a job on device memory through staging memory, a piece at a time.

    The stream does one thing after the other, so a half can be given its next piece as soon as the
    copy of the one before back to the device is queued.
    """
    cdef bint sends = job.call != BCAST or job.comm.rank == job.root
    cdef bint receives = (job.comm.rank != job.root if job.call == BCAST
                          else job.call != REDUCE or job.comm.rank == job.root)
    cdef Job piece = job[0]
    cdef Cursor ahead, behind
    cdef char *src
    cdef char *dst
    cdef char *half = NULL
    cdef char *other
    cdef int64_t total = 0
    cdef int64_t done = 0
    cdef int64_t room, count, i
    cdef int code = 0
    ahead.segment = ahead.offset = behind.segment = behind.offset = 0
    for i in range(job.n_segments):
        segment(job, i, &src, &dst, &count)
        total += count
        if not receives:
            code = code or copy(job.lane, dst, src, count * job.item)
    room = max(total * job.item // PIECES, <int64_t> SMALLEST_PIECE)
    room = max(min(room, job.lane.room) // job.item, 1)
    if job.item > job.lane.room:
        code = ERR_NO_MEM
    i = 0
    piece.lane, piece.frame, piece.n_segments = &in_host_memory, NULL, 1
    while done < total and code == 0:
        half, other = job.lane.staging.half[i % 2], job.lane.staging.half[(i + 1) % 2]
        count = min(room, total - done)
        if sends and i == 0:
            code = move(job, &ahead, half, count, True)
        code = code or synchronize(job.lane)
        if receives and i > 0:
            code = code or move(job, &behind, other, piece.count, False)
        if sends and done + count < total:
            code = code or move(job, &ahead, other, min(room, total - done - count), True)
        piece.src = piece.dst = half
        piece.count = count
        code = code or run(&piece)
        done += count
        i += 1
    if receives and i > 0:
        code = code or move(job, &behind, half, piece.count, False)
    return code


cdef int run(Job *job) noexcept nogil:
    """Run a reduction or broadcast over all its segments; returns a code of MPI or our own."""
    cdef bint reduced = job.call != REDUCE or job.comm.rank == job.root
    cdef char *src
    cdef char *dst
    cdef int64_t count
    cdef int64_t packed = 0
    cdef int64_t i
    cdef int code = 0
    if is_staged(job):
        return run_staged(job)
    for i in range(job.n_segments):
        segment(job, i, &src, &dst, &count)
        if src != dst and (job.call == BCAST or not reduced):
            code = code or duplicate(job, dst, src, count * job.item)
            src = dst
        if not is_direct(job, count):
            packed += count
        elif code == 0:
            code = run_direct(job, src, dst, count)
    if code == 0 and packed > 0:
        code = run_packed(job, packed)
    if code == 0 and job.call == EXSCAN and job.comm.rank == 0:
        for i in range(job.n_segments):
            segment(job, i, &src, &dst, &count)
            fill_identity(job, dst, count)
    return code


cdef void mirror(char *matrix, int64_t n, int dtype, int64_t item) noexcept nogil:
    """Copy the upper triangle to the lower one, conjugated where the elements are complex."""
    cdef int64_t tiles = (n + TILE - 1) // TILE
    cdef int64_t top, left, i, j
    cdef char *to
    for top in range(tiles):
        for left in range(top, tiles):
            for i in range(top * TILE, min((top + 1) * TILE, n)):
                for j in range(max(left * TILE, i + 1), min((left + 1) * TILE, n)):
                    to = matrix + (j * n + i) * item
                    memcpy(to, matrix + (i * n + j) * item, item)
                    if dtype == XLA_FFI_DataType_C64:
                        (<float *> to)[1] = -(<float *> to)[1]
                    elif dtype == XLA_FFI_DataType_C128:
                        (<double *> to)[1] = -(<double *> to)[1]
