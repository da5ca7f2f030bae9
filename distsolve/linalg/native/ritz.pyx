"""Handler of a step of the running Ritz values: `plain` of ritz.py, compiled once. No MPI."""

from libc.float cimport DBL_EPSILON, DBL_MAX, DBL_MIN, FLT_EPSILON, FLT_MAX, FLT_MIN
from libc.math cimport isfinite
from libc.stdint cimport int64_t

from distsolve.mpi.native.ffi cimport (
    Buffer, Error, Frame, XLA_FFI_DataType_F32, capsule, ffi_answer_metadata, ffi_arg, ffi_carry,
    ffi_count, ffi_ret,
)

ctypedef fused real:
    float
    double

cdef enum:
    # Of a state: its numbers, and after them the first of its three rows.
    UNIT, PIVOT, BETA, LEAST, GREATEST, ROWS
    # Shifts taken together; their number is a multiple of it.
    LANES = 16


cdef void step(
        real *state, real alpha, real beta, const real *shifts, int64_t n) noexcept nogil:
    cdef real epsilon = FLT_EPSILON if real is float else DBL_EPSILON
    cdef real tiny = FLT_MIN if real is float else DBL_MIN
    cdef real limit = FLT_MAX if real is float else DBL_MAX
    cdef real *excess = state + ROWS
    cdef real *delta = excess + n
    cdef real *weight = delta + n
    cdef real low[LANES]
    cdef real high[LANES]
    cdef real d, e, w, ratio, quotient
    cdef int64_t i, block
    cdef int lane
    if not (alpha > 0 and beta >= 0 and isfinite(alpha) and isfinite(beta)):
        return

    cdef real coupling = state[BETA] * state[PIVOT]
    cdef real last_pivot = state[PIVOT]
    cdef real last_beta = state[BETA]
    state[UNIT] = state[UNIT] if state[UNIT] > 0 else alpha
    cdef real pivot = state[UNIT] / alpha
    cdef real rounding = epsilon * (pivot + coupling)
    state[PIVOT], state[BETA] = pivot, beta
    for lane in range(LANES):
        low[lane], high[lane] = state[LEAST], state[GREATEST]
    # Without branches, so that compilers make vector instructions of the inner loop.
    for block in range(n // LANES):
        i = block * LANES
        for lane in range(LANES):
            ratio = last_pivot / delta[i + lane]
            w = weight[i + lane] / (weight[i + lane] + last_beta * (ratio * ratio))
            w = w if w > tiny else tiny
            e = coupling * (excess[i + lane] / delta[i + lane]) - shifts[i + lane]
            d = e + pivot
            d = rounding if (d if d > 0 else -d) < rounding else d
            excess[i + lane], delta[i + lane], weight[i + lane] = e, d, w
            quotient = shifts[i + lane] + d * w
            quotient = quotient if quotient > <real> 0.25 * shifts[i + lane] else low[lane]
            quotient = quotient if quotient < limit else low[lane]
            low[lane] = quotient if quotient < low[lane] else low[lane]
            high[lane] = quotient if quotient > high[lane] else high[lane]
    for lane in range(LANES):
        state[LEAST] = low[lane] if low[lane] < state[LEAST] else state[LEAST]
        state[GREATEST] = high[lane] if high[lane] > state[GREATEST] else state[GREATEST]


# Operands states (..., length), alpha (...), beta (...), shifts (n); result: states.
cdef Error *ritz_update(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    cdef Buffer *alpha = ffi_arg(frame, 1)
    cdef Buffer *beta = ffi_arg(frame, 2)
    cdef Buffer *shifts = ffi_arg(frame, 3)
    cdef Buffer *states = ffi_ret(frame, 0)
    cdef int64_t n = ffi_count(shifts)
    cdef int64_t length = ROWS + 3 * n
    cdef int64_t i
    ffi_carry(states, ffi_arg(frame, 0))
    for i in range(ffi_count(alpha)):
        if states.dtype == XLA_FFI_DataType_F32:
            step[float](
                <float *> states.data + i * length, (<float *> alpha.data)[i],
                (<float *> beta.data)[i], <float *> shifts.data, n)
        else:
            step[double](
                <double *> states.data + i * length, (<double *> alpha.data)[i],
                (<double *> beta.data)[i], <double *> shifts.data, n)
    return NULL


HANDLERS = {"ritz_update": capsule(ritz_update)}
