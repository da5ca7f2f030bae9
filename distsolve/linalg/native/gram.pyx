"""Handler of the product with a Gram matrix: decode the call frame, sweep over the rows. No MPI."""

from libc.stdint cimport int64_t

from distsolve.mpi.native.ffi cimport (
    Buffer, Error, Frame, XLA_FFI_DataType_C64, XLA_FFI_DataType_C128, XLA_FFI_DataType_F32,
    capsule, ffi_answer_metadata, ffi_arg, ffi_count, ffi_ret,
)


cdef extern from "gram.h" nogil:
    cdef enum gram_field:
        GRAM_REAL, GRAM_REAL_OF_COMPLEX, GRAM_COMPLEX

    cdef enum gram_instruction:
        pass

    cdef struct gram:
        gram_field field
        const void *J
        const void *weights
        int64_t rows, length
        int backward

    gram_instruction gram_limit

    gram_instruction gram_instructions()
    void product_f32(
        gram *g, void *V, int64_t k, void *out, double *scratch, const void *tail, int64_t n_tail)
    void product_f64(
        gram *g, void *V, int64_t k, void *out, double *scratch, const void *tail, int64_t n_tail)


# Operands J (n, P), V (k, P), weights (n) or (0), tail, whether to begin with the last rows;
# results: V's products, their k squared norms and the tail in one row of reals, and scratch memory.
cdef Error *gram_product(Frame *frame) noexcept nogil:
    if ffi_answer_metadata(frame):
        return NULL
    cdef Buffer *J = ffi_arg(frame, 0)
    cdef Buffer *V = ffi_arg(frame, 1)
    cdef Buffer *weights = ffi_arg(frame, 2)
    cdef Buffer *tail = ffi_arg(frame, 3)
    cdef Buffer *out = ffi_ret(frame, 0)
    cdef double *scratch = <double *> ffi_ret(frame, 1).data
    cdef bint complex_rows = (
        J.dtype == XLA_FFI_DataType_C64 or J.dtype == XLA_FFI_DataType_C128)
    cdef gram g
    g.J = J.data
    g.weights = weights.data if ffi_count(weights) > 0 else NULL
    g.rows = J.dims[0]
    g.length = J.dims[1] * (2 if complex_rows else 1)
    g.backward = (<unsigned char *> ffi_arg(frame, 4).data)[0]
    if not complex_rows:
        g.field = GRAM_REAL
    else:
        g.field = GRAM_COMPLEX if V.dtype == J.dtype else GRAM_REAL_OF_COMPLEX
    if out.dtype == XLA_FFI_DataType_F32:
        product_f32(&g, V.data, V.dims[0], out.data, scratch, tail.data, ffi_count(tail))
    else:
        product_f64(&g, V.data, V.dims[0], out.data, scratch, tail.data, ffi_count(tail))
    return NULL


def limit_instructions(int level):
    """Use at most the baseline (0), AVX2 (1) or AVX-512 (2); return what is used, for tests."""
    global gram_limit
    gram_limit = <gram_instruction> level
    return <int> gram_instructions()


HANDLERS = {"gram_product": capsule(gram_product)}
