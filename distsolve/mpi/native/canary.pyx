"""The canary of check mode: some elements of the operands, whose sum the result must show.

Both are read while subnormal numbers are kept: between `enter` and `leave` of a call.
"""

from libc.math cimport NAN, fabs, isfinite
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdio cimport snprintf

from distsolve.mpi.native.abi cimport ALLREDUCE, BCAST, REDUCE, Comm
from distsolve.mpi.native.device cimport Lane, driver_error, fetch, synchronize
from distsolve.mpi.native.ffi cimport (
    XLA_FFI_DataType_C128, XLA_FFI_DataType_C64, XLA_FFI_DataType_F32, XLA_FFI_DataType_F64,
    XLA_FFI_DataType_S32, XLA_FFI_DataType_S64, Buffer, Error, Frame, ffi_arg, ffi_count,
    ffi_error, ffi_item, ffi_ret,
)
from distsolve.mpi.native.hashing cimport mixed
from distsolve.mpi.native.recorder cimport Entry, site_text


cdef enum:
    SUM = 0


cdef int reals_of(int dtype) noexcept nogil:
    """Real numbers in an element of those dtypes that are sampled; 0 for others."""
    if dtype == XLA_FFI_DataType_C64 or dtype == XLA_FFI_DataType_C128:
        return 2
    return dtype in (
        XLA_FFI_DataType_F32, XLA_FFI_DataType_F64, XLA_FFI_DataType_S32, XLA_FFI_DataType_S64)


cdef double real_at(const void *data, int dtype, int64_t place) noexcept nogil:
    if dtype == XLA_FFI_DataType_F32 or dtype == XLA_FFI_DataType_C64:
        return (<const float *> data)[place]
    if dtype == XLA_FFI_DataType_S32:
        return (<const int32_t *> data)[place]
    if dtype == XLA_FFI_DataType_S64:
        return <double> (<const int64_t *> data)[place]
    return (<const double *> data)[place]


cdef int read(
    Lane *lane, const Buffer *buffer, int dtype, const Canary *canary, double *values
) noexcept nogil:
    """Read the elements of a buffer; what cannot be read is not a number."""
    cdef int64_t size = ffi_item(dtype) // reals_of(dtype)
    cdef const char *data = <const char *> buffer.data
    cdef char *half
    cdef int code = 0
    cdef int i
    if lane.stream == NULL:
        for i in range(canary.n):
            values[i] = real_at(data, dtype, canary.place[i])
        return 0
    half = lane.staging.half[0]
    for i in range(canary.n):
        code = code or fetch(lane, half + i * size, data + canary.place[i] * size, size)
    code = code or synchronize(lane)
    for i in range(canary.n):
        values[i] = real_at(half, dtype, i) if code == 0 else NAN
    return code


cdef int sample(
    Frame *frame, const Comm *comm, const Entry *entry, Lane *lane, Canary *canary
) noexcept nogil:
    """Note some elements of this rank's operand: the last one, others at random."""
    cdef int64_t reals = 0
    cdef bint gives = entry.call == BCAST and comm.rank == entry.peer
    cdef uint64_t random = <uint64_t> entry.number
    cdef int i
    canary.n = 0
    if entry.count > 0:
        reals = ffi_count(ffi_arg(frame, 0)) * reals_of(entry.dtype)
    if reals == 0:
        return 0
    if (entry.call == ALLREDUCE or entry.call == REDUCE) and entry.op == SUM:
        gives = True
    elif entry.call != BCAST:
        return 0
    canary.n = SAMPLES
    for i in range(SAMPLES):
        random = mixed(random, i)
        canary.place[i] = <int64_t> (random % <uint64_t> reals) if i > 0 else reals - 1
        canary.value[i] = 0
    return read(lane, ffi_arg(frame, 0), entry.dtype, canary, canary.value) if gives else 0


cdef Error *verify(
    Frame *frame, const Comm *comm, const Entry *entry, Lane *lane, const Canary *canary
) noexcept nogil:
    """Answer an error unless the elements of the result are what the operands add up to."""
    cdef char text[600]
    cdef double values[SAMPLES]
    cdef double found, rounding
    cdef int i
    if canary.n == 0 or (entry.call == REDUCE and comm.rank != entry.peer):
        return NULL
    if read(lane, ffi_ret(frame, 0), entry.dtype, canary, values) != 0:
        return ffi_error(frame, driver_error())
    for i in range(canary.n):
        found = values[i]
        rounding = 4.0 * comm.size * canary.size[i]
        if entry.dtype == XLA_FFI_DataType_F32 or entry.dtype == XLA_FFI_DataType_C64:
            rounding *= 2.0 ** -24
        else:
            rounding *= 2.0 ** -53
        if not isfinite(found) or not isfinite(canary.size[i]):
            continue
        if entry.dtype == XLA_FFI_DataType_S32 and canary.size[i] >= 2.0 ** 31:
            continue        # it may have wrapped around
        if entry.dtype == XLA_FFI_DataType_S64 and canary.size[i] >= 2.0 ** 63:
            continue
        if fabs(found - canary.value[i]) > rounding:
            snprintf(text, sizeof(text), "The result of an MPI call is wrong on rank %d of %d "
                     "(DISTSOLVE_CHECK): number %lld is %.17g, but the operands before the call "
                     "give %.17g: stale or doubled data. Try DISTSOLVE_NO_IN_PLACE=1, and another "
                     "MPI. The call is at %s.", comm.rank, comm.size,
                     <long long> canary.place[i], found, canary.value[i],
                     site_text(entry.where))
            return ffi_error(frame, text)
    return NULL
