"""Declarations of XLA's C FFI, as ``ffi.h`` presents it."""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint16_t


cdef extern from "ffi.h" nogil:
    ctypedef struct Error "XLA_FFI_Error":
        pass

    ctypedef struct Frame "XLA_FFI_CallFrame":
        pass

    ctypedef struct Buffer "XLA_FFI_Buffer":
        int dtype
        void *data
        int64_t rank
        int64_t *dims

    bint ffi_answer_metadata(Frame *frame)
    Buffer *ffi_arg(Frame *frame, int64_t index)
    Buffer *ffi_ret(Frame *frame, int64_t index)
    int64_t ffi_int(Frame *frame, int64_t index)
    const int64_t *ffi_ints(Frame *frame, int64_t index)
    int64_t ffi_where(const Frame *frame)
    int64_t ffi_within(const Frame *frame)
    bint ffi_on_device(const Frame *frame)
    bint ffi_stream(Frame *frame, void **stream)
    int ffi_dtype(const Frame *frame, int64_t index)
    int64_t ffi_count(const Buffer *buffer)
    int64_t ffi_counts(const Frame *frame, int64_t first, int64_t n)
    int64_t ffi_item(int dtype)
    int64_t ffi_bytes(const Buffer *buffer)
    int64_t ffi_row(const Buffer *buffer)
    void ffi_carry(Buffer *y, const Buffer *x)
    int64_t ffi_operands(const Frame *frame)
    Error *ffi_error(Frame *frame, const char *message)

    ctypedef unsigned int fp_mode
    fp_mode fp_keep_subnormals()
    void fp_restore(fp_mode mode)

    float bfloat16_to_float(uint16_t half)
    uint16_t float_to_bfloat16(float value)
    float float16_to_float(uint16_t half)
    uint16_t float_to_float16(float value)

    enum:
        XLA_FFI_DataType_S32, XLA_FFI_DataType_S64, XLA_FFI_DataType_F16, XLA_FFI_DataType_BF16
        XLA_FFI_DataType_F32, XLA_FFI_DataType_F64, XLA_FFI_DataType_C64, XLA_FFI_DataType_C128

    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attributes)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_trylock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)


ctypedef Error *(*Handler)(Frame *) noexcept nogil


cdef inline object capsule(Handler handler):
    """A handler as JAX registers it."""
    return PyCapsule_New(<void *> handler, NULL, NULL)
