"""Moments of samples over ranks in one reduction, by an operation of our own that merges them.

An operand is a list of tiles along its last axis, all of the same length. A tile has, as numbers of
the operand's dtype: how many samples there are, the numbers of its rows and columns, the means of
the rows and of the columns, what rounding has left of these means, and the centred sums of the
products of each row with each conjugated column. Without columns they are the sums of the squares
of real rows. To MPI a tile is one element, so that messages are cut between tiles only.

Reference: Chan, Golub and LeVeque (1983), doi:10.1080/00031305.1983.10483115.
"""

from libc.stdint cimport int64_t

from distsolve.mpi.native.abi cimport (
    ALLREDUCE, OP_CREATE, TYPE_COMMIT, TYPE_CONTIGUOUS, TYPE_FREE, Comm, Handle, address,
    contiguous_t, mpi_type, op_create_t, type_t,
)
from distsolve.mpi.native.calls cimport NO_OP, NO_PEER, Visit, check, enter, leave, ready
from distsolve.mpi.native.device cimport NEVER
from distsolve.mpi.native.engine cimport Job, job_of, run
from distsolve.mpi.native.ffi cimport (
    Buffer, Error, Frame, XLA_FFI_DataType_C64, XLA_FFI_DataType_C128, XLA_FFI_DataType_F32,
    XLA_FFI_DataType_F64, capsule, ffi_arg, ffi_count, ffi_int,
)

ctypedef fused real:
    float
    double

cdef enum:
    HEAD = 3        # numbers before the means
    N_DTYPES = 64

cdef Handle merging[N_DTYPES]       # operations by XLA's number of the dtype


cdef inline real apart(const real *a, const real *b, int64_t i, int64_t n) noexcept nogil:
    """How far mean i of `b` is from that of `a`; the large parts, near each other, cancel first."""
    return (b[i] - a[i]) + (b[n + i] - a[n + i])


cdef inline void merge_mean(
    const real *b, real *a, int64_t i, int64_t n, real share, int order
) noexcept nogil:
    """Move mean i from that of more samples, or of as many the smaller one, towards the other."""
    cdef bint first = order > 0 or order == 0 and (
        a[i] < b[i] or a[i] == b[i] and a[n + i] <= b[n + i])
    cdef const real *start = <const real *> a if first else b
    cdef const real *end = b if first else <const real *> a
    cdef real mean = start[i]
    cdef real step = share * apart(start, end, i, n)
    # The sum with its rounding error (Knuth), then the rest in its place.
    cdef real total = mean + step
    cdef real moved = total - mean
    cdef real rest = start[n + i] + ((mean - (total - moved)) + (step - moved))
    a[i] = total + rest
    a[n + i] = rest - (a[i] - total)


cdef int64_t merge(const real *b, real *a, int parts) noexcept nogil:
    """Merge tile `b` into `a`, and return their length; a number has one real part or two.

    Exchanging the tiles changes no bit, so that all ranks get the same result.
    """
    cdef int64_t rows = <int64_t> a[parts]
    cdef int64_t columns = <int64_t> a[2 * parts]
    cdef int64_t n = parts * (rows + columns)
    cdef const real *theirs = b + parts * HEAD
    cdef real *ours = a + parts * HEAD
    cdef const real *more = theirs + 2 * n
    cdef real *sums = ours + 2 * n
    cdef real count = a[0] + b[0] if a[0] + b[0] > 1 else 1
    cdef real weight = a[0] * b[0] / count
    cdef real share = (a[0] if a[0] < b[0] else b[0]) / count
    cdef int order = (a[0] > b[0]) - (a[0] < b[0])
    cdef real x, y, x_imag, y_imag
    cdef int64_t i, j
    if columns == 0:
        for i in range(rows):
            x = apart(ours, theirs, i, n)
            sums[i] = (sums[i] + more[i]) + (weight * x) * x
        sums += rows
    elif parts == 1:
        for i in range(rows):
            x = weight * apart(ours, theirs, i, n)
            for j in range(columns):
                sums[j] = (sums[j] + more[j]) + x * apart(ours, theirs, rows + j, n)
            sums += columns
            more += columns
    else:
        for i in range(rows):
            x = weight * apart(ours, theirs, 2 * i, n)
            x_imag = weight * apart(ours, theirs, 2 * i + 1, n)
            for j in range(columns):
                y = apart(ours, theirs, 2 * (rows + j), n)
                y_imag = apart(ours, theirs, 2 * (rows + j) + 1, n)
                sums[2 * j] = (sums[2 * j] + more[2 * j]) + (x * y + x_imag * y_imag)
                sums[2 * j + 1] = (sums[2 * j + 1] + more[2 * j + 1]) + (x_imag * y - x * y_imag)
            sums += 2 * columns
            more += 2 * columns
    for i in range(n):
        merge_mean(theirs, ours, i, n, share, order)
    a[0] += b[0]
    return sums - a


cdef void merge_all(const real *b, real *a, int n, int parts) noexcept nogil:
    cdef int64_t length
    for _ in range(n):
        length = merge(b, a, parts)
        b += length
        a += length


cdef void merge_f32(const void *b, void *a, const int *n, const void *dtype) noexcept nogil:
    merge_all(<const float *> b, <float *> a, n[0], 1)


cdef void merge_f64(const void *b, void *a, const int *n, const void *dtype) noexcept nogil:
    merge_all(<const double *> b, <double *> a, n[0], 1)


cdef void merge_c64(const void *b, void *a, const int *n, const void *dtype) noexcept nogil:
    merge_all(<const float *> b, <float *> a, n[0], 2)


cdef void merge_c128(const void *b, void *a, const int *n, const void *dtype) noexcept nogil:
    merge_all(<const double *> b, <double *> a, n[0], 2)


def make_operations():
    """Make what tiles are merged with, once MPI is bound; local to this rank."""
    cdef op_create_t create = <op_create_t> address[<int> OP_CREATE]
    cdef int code = create(merge_f32, True, &merging[<int> XLA_FFI_DataType_F32])
    code = code or create(merge_f64, True, &merging[<int> XLA_FFI_DataType_F64])
    code = code or create(merge_c64, True, &merging[<int> XLA_FFI_DataType_C64])
    code = code or create(merge_c128, True, &merging[<int> XLA_FFI_DataType_C128])
    if code != 0:
        raise RuntimeError(f"MPI could not make the operations that merge moments: code {code}.")


# chunk, comm
cdef Error *merge_moments(Frame *frame) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, ALLREDUCE, 1, &comm, &error):
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef int64_t length = x.dims[x.rank - 1]
    cdef int64_t count = ffi_count(x)
    cdef Job job = job_of(frame, ALLREDUCE, comm, x, 0, 0, ffi_int(frame, 0))
    cdef Handle tile = 0
    cdef Visit visit
    cdef int code
    # Never MPI on device memory: the operation is one of the host's.
    if not enter(frame, ALLREDUCE, comm, count, NO_PEER, NO_OP, NEVER, &visit, &error):
        return error
    job.lane = &visit.lane
    code = (<contiguous_t> address[<int> TYPE_CONTIGUOUS])(<int> length, mpi_type(x.dtype), &tile)
    if code == 0:
        code = (<type_t> address[<int> TYPE_COMMIT])(&tile)
        job.item = job.wire_item = length * job.item
        job.wire_type, job.wire_op = tile, merging[x.dtype]
        code = code or run(&job)
        (<type_t> address[<int> TYPE_FREE])(&tile)
    code = leave(&visit, code)
    return check(frame, ALLREDUCE, code, comm, count, NO_PEER)


HANDLERS = {"merge_moments": capsule(merge_moments)}
