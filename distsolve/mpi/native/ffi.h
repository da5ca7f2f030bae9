/* What the handlers need of XLA's C FFI, and the small pieces of C that Cython cannot say.
 *
 * Only field accesses that mean the same in every header from FFI 0.0 on are used, and no type name
 * that was renamed since (the extension structs were), so that one source builds against the whole
 * range of jaxlib, and a build against a new header loads in an older jaxlib. */
#ifndef DISTSOLVE_FFI_H
#define DISTSOLVE_FFI_H

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

/* XLA asks each handler once for its version and traits, through the same entry point. */
static inline int ffi_answer_metadata(XLA_FFI_CallFrame *frame) {
  if (frame->extension_start == NULL ||
      frame->extension_start->type != XLA_FFI_Extension_Metadata)
    return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
  metadata->api_version.major_version = 0;
  metadata->api_version.minor_version = 3; /* that of jaxlib 0.10 */
  metadata->traits = 0;
  return 1;
}

static inline XLA_FFI_Buffer *ffi_arg(XLA_FFI_CallFrame *frame, int64_t index) {
  return (XLA_FFI_Buffer *)frame->args.args[index];
}

static inline XLA_FFI_Buffer *ffi_ret(XLA_FFI_CallFrame *frame, int64_t index) {
  return (XLA_FFI_Buffer *)frame->rets.rets[index];
}

/* Attributes arrive sorted by name; `index` counts in that order. */
static inline int64_t ffi_int(XLA_FFI_CallFrame *frame, int64_t index) {
  return *(int64_t *)((XLA_FFI_Scalar *)frame->attrs.attrs[index])->value;
}

static inline const int64_t *ffi_ints(XLA_FFI_CallFrame *frame, int64_t index) {
  return (const int64_t *)((XLA_FFI_Array *)frame->attrs.attrs[index])->data;
}

/* Where in the user's program a call is, within which compiled program, and whether its buffers are
 * in a GPU's memory: the three attributes of every MPI call that sort last. */
static inline int64_t ffi_where(const XLA_FFI_CallFrame *frame) {
  return *(int64_t *)((XLA_FFI_Scalar *)frame->attrs.attrs[frame->attrs.size - 3])->value;
}

static inline int64_t ffi_within(const XLA_FFI_CallFrame *frame) {
  return *(int64_t *)((XLA_FFI_Scalar *)frame->attrs.attrs[frame->attrs.size - 2])->value;
}

static inline int ffi_on_device(const XLA_FFI_CallFrame *frame) {
  return 0 != *(int64_t *)((XLA_FFI_Scalar *)frame->attrs.attrs[frame->attrs.size - 1])->value;
}

/* Find the stream that the program runs on; 0 on a platform without streams. */
static inline int ffi_stream(XLA_FFI_CallFrame *frame, void **stream) {
  XLA_FFI_Stream_Get_Args args = {0};
  args.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
  args.ctx = frame->ctx;
  XLA_FFI_Error *error = frame->api->XLA_FFI_Stream_Get(&args);
  if (error != NULL) {
    XLA_FFI_Error_Destroy_Args destroy = {0};
    destroy.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
    destroy.error = error;
    frame->api->XLA_FFI_Error_Destroy(&destroy);
    return 0;
  }
  *stream = args.stream;
  return 1;
}

/* The dtype of an operand, that of a token included; 0 where there is none. */
static inline int ffi_dtype(const XLA_FFI_CallFrame *frame, int64_t index) {
  return frame->args.size > index ? (int)((XLA_FFI_Buffer *)frame->args.args[index])->dtype : 0;
}

static inline int64_t ffi_count(const XLA_FFI_Buffer *buffer) {
  int64_t count = 1;
  for (int64_t axis = 0; axis < buffer->rank; ++axis) count *= buffer->dims[axis];
  return count;
}

/* Elements of `n` operands together. */
static inline int64_t ffi_counts(const XLA_FFI_CallFrame *frame, int64_t first, int64_t n) {
  int64_t total = 0;
  for (int64_t i = first; i < first + n; ++i)
    total += ffi_count((const XLA_FFI_Buffer *)frame->args.args[i]);
  return total;
}

/* Bytes per element; bool, 8-bit integers and 8-bit floats are all that is left over. */
static inline int64_t ffi_item(int dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_C128:
      return 16;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64:
      return 8;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      return 4;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    default:
      return 1;
  }
}

static inline int64_t ffi_bytes(const XLA_FFI_Buffer *buffer) {
  return ffi_count(buffer) * ffi_item(buffer->dtype);
}

/* Bytes in one element of the leading axis. */
static inline int64_t ffi_row(const XLA_FFI_Buffer *buffer) {
  int64_t size = ffi_item(buffer->dtype);
  for (int64_t axis = 1; axis < buffer->rank; ++axis) size *= buffer->dims[axis];
  return size;
}

/* Give an operand back as the result; XLA has usually put both in one place. */
static inline void ffi_carry(XLA_FFI_Buffer *y, const XLA_FFI_Buffer *x) {
  if (y->data != x->data) memcpy(y->data, x->data, (size_t)ffi_bytes(x));
}

/* Arguments that carry data: the ordering token, where there is one, comes last. */
static inline int64_t ffi_operands(const XLA_FFI_CallFrame *frame) {
  int64_t n = frame->args.size;
  if (n > 0 && ((XLA_FFI_Buffer *)frame->args.args[n - 1])->dtype == XLA_FFI_DataType_TOKEN) --n;
  return n;
}

static inline XLA_FFI_Error *ffi_error(XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {0};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = XLA_FFI_Error_Code_INTERNAL;
  return frame->api->XLA_FFI_Error_Create(&args);
}

/* XLA's threads flush subnormal numbers to zero. MPI must not while it computes on the user's data:
 * the mode of the thread is set to IEEE's, and set back afterwards. */
#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned int fp_mode;
static inline fp_mode fp_keep_subnormals(void) {
  fp_mode mode = _mm_getcsr();
  _mm_setcsr(mode & ~0x8040u); /* flush to zero, denormals are zero */
  return mode;
}
static inline void fp_restore(fp_mode mode) { _mm_setcsr(mode); }
#else
typedef uint64_t fp_mode;
static inline fp_mode fp_keep_subnormals(void) {
  fp_mode mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  __asm__ volatile("msr fpcr, %0" : : "r"(mode & ~((fp_mode)1 << 24)));
  return mode;
}
static inline void fp_restore(fp_mode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#endif

/* 16-bit floats travel as float32. Rounding is to nearest, ties to even; NaN stays NaN. */
static inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static inline float bfloat16_to_float(uint16_t half) { return bits_to_float((uint32_t)half << 16); }

static inline uint16_t float_to_bfloat16(float value) {
  uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float float16_to_float(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
  uint32_t rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest >= 0x0400u) return bits_to_float(sign | ((rest << 13) + 0x38000000u));
  /* Subnormal: rest * 2^-24 is exact in float32. */
  float magnitude = (float)rest * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

static inline uint16_t float_to_float16(float value) {
  uint32_t bits = float_to_bits(value);
  uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to 65536 or more */
  if (bits < 0x38800000u) {
    /* Subnormal result: adding 0.5 leaves the value in units of 2^-24 in the low bits,
     * rounded to nearest even by the addition itself. */
    return (uint16_t)(sign | (float_to_bits(bits_to_float(bits) + 0.5f) - 0x3f000000u));
  }
  return (uint16_t)(sign | ((bits - 0x38000000u + 0x0fffu + ((bits >> 13) & 1u)) >> 13));
}

#endif
