/* J^H (weights * (J V)) in one read of J: products of a few rows with the vectors, then, while the
 * rows are in the cache, their weighted sum.
 *
 * Everything runs on real numbers. A complex row is a real one of twice the length, with real parts
 * at even places, and its product with v needs the sums over even and over odd places of the
 * entrywise products with v and with v whose real and imaginary parts are swapped:
 *
 *     Re(J v) = even(J, v) - odd(J, v),    Im(J v) = even(J, swap v) + odd(J, swap v),
 *     J^H w   = sum over rows of Re(w) conj(J) + Im(w) (i conj(J)).
 *
 * With real v, S = Re(J^H J) needs even(J, (v, v)) + i odd(J, (v, v)) only: half the work.
 *
 * No compiler flag may name an instruction set, because a wheel runs on any machine: the sweep is
 * compiled for each of x86-64, and the machine is asked once a call which one it has. */
#ifndef DISTSOLVE_GRAM_H
#define DISTSOLVE_GRAM_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) /* Clang says so, too */
#define GRAM_X86 1
#else
#define GRAM_X86 0
#endif

enum {
  /* Rows whose sums are in registers together: measured against 1, 2 and 8 on 80 kB rows. */
  GRAM_ROWS = 4,
  GRAM_VECTORS = 2
};

enum gram_field { GRAM_REAL, GRAM_REAL_OF_COMPLEX, GRAM_COMPLEX };
enum gram_instruction { GRAM_BASELINE, GRAM_AVX2, GRAM_AVX512 };

/* `vectors` real vectors v give as many u. The first GRAM_VECTORS are at v[0] and v[1], the next
 * ones `pitch` entries behind. `length` is the number of reals in a row; `weights` may be NULL. */
struct gram {
  enum gram_field field;
  const void *J, *weights;
  int64_t rows, length, vectors, pitch;
  int backward; /* from the last rows to the first */
  void *v[GRAM_VECTORS], *u[GRAM_VECTORS];
  double *norms; /* of each J v, squared */
};

/* The most that may be used; tests lower it. */
static enum gram_instruction gram_limit = GRAM_AVX512;

static inline enum gram_instruction gram_instructions(void) {
  enum gram_instruction found = GRAM_BASELINE;
#if GRAM_X86
  if (__builtin_cpu_supports("avx512f"))
    found = GRAM_AVX512;
  else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    found = GRAM_AVX2;
#endif
  return found < gram_limit ? found : gram_limit;
}

#define REAL float
#if GRAM_X86
#define NAME(x) x##_avx512_f32
#define TARGET __attribute__((target("avx512f,avx2,fma")))
#define BYTES 64
#include "gram_sweep.h"
#undef NAME
#undef TARGET
#undef BYTES
#define NAME(x) x##_avx2_f32
#define TARGET __attribute__((target("avx2,fma")))
#define BYTES 32
#include "gram_sweep.h"
#undef NAME
#undef TARGET
#undef BYTES
#endif
#define NAME(x) x##_baseline_f32
#define TARGET
#define BYTES 16
#include "gram_sweep.h"
#undef NAME
#undef TARGET
#undef BYTES
#define NAME(x) x##_f32
#include "gram_type.h"
#undef NAME
#undef REAL

#define REAL double
#if GRAM_X86
#define NAME(x) x##_avx512_f64
#define TARGET __attribute__((target("avx512f,avx2,fma")))
#define BYTES 64
#include "gram_sweep.h"
#undef NAME
#undef TARGET
#undef BYTES
#define NAME(x) x##_avx2_f64
#define TARGET __attribute__((target("avx2,fma")))
#define BYTES 32
#include "gram_sweep.h"
#undef NAME
#undef TARGET
#undef BYTES
#endif
#define NAME(x) x##_baseline_f64
#define TARGET
#define BYTES 16
#include "gram_sweep.h"
#undef NAME
#undef TARGET
#undef BYTES
#define NAME(x) x##_f64
#include "gram_type.h"
#undef NAME
#undef REAL

#endif
