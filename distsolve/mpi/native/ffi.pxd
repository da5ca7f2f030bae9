"""Declarations of XLA's C FFI, as ``ffi.h`` presents it."""

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
    int64_t ffi_count(const Buffer *buffer)
    int64_t ffi_operands(const Frame *frame)
    Error *ffi_error(Frame *frame, const char *message)

    float bfloat16_to_float(uint16_t half)
    uint16_t float_to_bfloat16(float value)
    float float16_to_float(uint16_t half)
    uint16_t float_to_float16(float value)

    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attributes)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_trylock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
