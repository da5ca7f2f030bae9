"""The canary of check mode: some elements of the operands, whose sum the result must show.

Both are read while subnormal numbers are kept: between `enter` and `leave` of a call.
"""

from libc.math cimport fabs, isfinite
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdio cimport snprintf

from distsolve.mpi.native.abi cimport ALLREDUCE, BCAST, REDUCE, Comm
from distsolve.mpi.native.ffi cimport (
    XLA_FFI_DataType_C128, XLA_FFI_DataType_C64, XLA_FFI_DataType_F32, XLA_FFI_DataType_F64,
    XLA_FFI_DataType_S32, XLA_FFI_DataType_S64, Error, Frame, ffi_arg, ffi_count, ffi_error,
    ffi_on_device, ffi_ret,
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


cdef void sample(
    Frame *frame, const Comm *comm, const Entry *entry, Canary *canary
) noexcept nogil:
    """Note some elements of this rank's operand in host memory: the last one, others at random."""
    cdef int64_t reals = 0
    cdef bint gives = entry.call == BCAST and comm.rank == entry.peer
    cdef uint64_t random = <uint64_t> entry.number
    cdef int i
    canary.n = 0
    if entry.count > 0 and not ffi_on_device(frame):
        reals = ffi_count(ffi_arg(frame, 0)) * reals_of(entry.dtype)
    if reals == 0:
        return
    if (entry.call == ALLREDUCE or entry.call == REDUCE) and entry.op == SUM:
        gives = True
    elif entry.call != BCAST:
        return
    canary.n = SAMPLES
    for i in range(SAMPLES):
        random = mixed(random, i)
        canary.place[i] = <int64_t> (random % <uint64_t> reals) if i > 0 else reals - 1
        canary.value[i] = 0
        if gives:
            canary.value[i] = real_at(ffi_arg(frame, 0).data, entry.dtype, canary.place[i])


cdef Error *verify(
    Frame *frame, const Comm *comm, const Entry *entry, const Canary *canary
) noexcept nogil:
    """Answer an error unless the elements of the result are what the operands add up to."""
    cdef char text[600]
    cdef double found, rounding
    cdef int i
    if canary.n == 0 or (entry.call == REDUCE and comm.rank != entry.peer):
        return NULL
    for i in range(canary.n):
        found = real_at(ffi_ret(frame, 0).data, entry.dtype, canary.place[i])
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
