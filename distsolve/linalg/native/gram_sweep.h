/* The product of gram.h for one element type and one instruction set; included once for each.
 *
 * REAL, NAME(x): the element type, and the ending of the names here.
 * TARGET, BYTES: the function attribute that selects the instruction set, the bytes of a register.
 *
 * GCC and Clang make registers of the vector types; they also fix the order of the sums, which a
 * compiler may not choose by itself. */

#define LANES ((int)(BYTES / sizeof(REAL)))

typedef REAL NAME(vec) __attribute__((vector_size(BYTES)));
/* The same as it lies in an array: aligned like its elements. */
typedef REAL NAME(loose) __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
/* For each row and vector, one number for the even and one for the odd entries. */
typedef REAL NAME(pairs)[GRAM_ROWS][GRAM_VECTORS][2];

/* sums[r][c][parity] = sum of row r times v[c] over the entries of one parity. `rows` and `vectors`
 * are constants at each call, so that the sums stay in registers. */
TARGET static inline __attribute__((always_inline)) void NAME(dots)(
    const int rows, const int vectors, const REAL *J, int64_t length, REAL *const *v,
    NAME(pairs) sums) {
  NAME(vec) sum[GRAM_ROWS][GRAM_VECTORS] = {{{0}}};
  int64_t p = 0;
  for (; p + LANES <= length; p += LANES) {
    for (int r = 0; r < rows; ++r) {
      NAME(vec) row = *(const NAME(loose) *)(J + r * length + p);
      for (int c = 0; c < vectors; ++c) sum[r][c] += row * *(const NAME(loose) *)(v[c] + p);
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < vectors; ++c) {
      REAL parity[2] = {0, 0};
      for (int lane = 0; lane < LANES; ++lane) parity[lane & 1] += sum[r][c][lane];
      for (int64_t q = p; q < length; ++q) parity[q & 1] += J[r * length + q] * v[c][q];
      sums[r][c][0] = parity[0];
      sums[r][c][1] = parity[1];
    }
  }
}

/* u[c] += sum over r of weights[r][c][parity of the entry] * row r. */
TARGET static inline __attribute__((always_inline)) void NAME(adds)(
    const int rows, const int vectors, const REAL *J, int64_t length, NAME(pairs) weights,
    REAL *const *u) {
  NAME(vec) weight[GRAM_ROWS][GRAM_VECTORS];
  int64_t p = 0;
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < vectors; ++c) {
      REAL lanes[LANES];
      for (int lane = 0; lane < LANES; ++lane) lanes[lane] = weights[r][c][lane & 1];
      weight[r][c] = *(const NAME(loose) *)lanes;
    }
  for (; p + LANES <= length; p += LANES) {
    NAME(vec) sum[GRAM_VECTORS];
    for (int c = 0; c < vectors; ++c) sum[c] = *(const NAME(loose) *)(u[c] + p);
    for (int r = 0; r < rows; ++r) {
      NAME(vec) row = *(const NAME(loose) *)(J + r * length + p);
      for (int c = 0; c < vectors; ++c) sum[c] += weight[r][c] * row;
    }
    for (int c = 0; c < vectors; ++c) *(NAME(loose) *)(u[c] + p) = sum[c];
  }
  for (; p < length; ++p)
    for (int c = 0; c < vectors; ++c)
      for (int r = 0; r < rows; ++r) u[c][p] += weights[r][c][p & 1] * J[r * length + p];
}

/* What the sums of a row with one vector, or with the two that stand for a complex one, weigh in
 * the result; returns the squared modulus of the product. */
TARGET static double NAME(weigh)(REAL (*sums)[2], enum gram_field field, double weight) {
  REAL re = sums[0][0], im = sums[0][1];
  switch (field) {
    case GRAM_REAL:
      re += im, im = 0;
      sums[0][0] = sums[0][1] = (REAL)(weight * re);
      break;
    case GRAM_REAL_OF_COMPLEX:
      sums[0][0] = (REAL)(weight * re);
      sums[0][1] = (REAL)(weight * im);
      break;
    case GRAM_COMPLEX:
      re -= im, im = sums[1][0] + sums[1][1];
      sums[0][0] = sums[0][1] = (REAL)(weight * re);
      sums[1][0] = sums[1][1] = (REAL)(weight * im);
  }
  return weight * ((double)re * re + (double)im * im);
}

/* One block of rows with one group of vectors. */
TARGET static inline __attribute__((always_inline)) void NAME(block)(
    const int rows, const int vectors, const struct gram *g, int64_t row, int64_t group) {
  const REAL *J = (const REAL *)g->J + row * g->length;
  const REAL *weights = (const REAL *)g->weights;
  const int step = g->field == GRAM_COMPLEX ? 2 : 1;
  double *norms = g->norms + group * (GRAM_VECTORS / step);
  REAL *v[GRAM_VECTORS], *u[GRAM_VECTORS];
  NAME(pairs) sums = {{{0}}};
  for (int c = 0; c < GRAM_VECTORS; ++c) {
    v[c] = (REAL *)g->v[c] + group * g->pitch;
    u[c] = (REAL *)g->u[c] + group * g->pitch;
  }
  NAME(dots)(rows, vectors, J, g->length, v, sums);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < vectors; c += step)
      norms[c / step] += NAME(weigh)(sums[r] + c, g->field, weights ? weights[row + r] : 1.0);
  NAME(adds)(rows, vectors, J, g->length, sums, u);
}

/* One block of rows with all vectors, one or two at a time: the block stays in the cache. */
TARGET static inline __attribute__((always_inline)) void NAME(blocks)(
    const int rows, const struct gram *g, int64_t row) {
  int64_t group = 0;
  for (; (group + 1) * GRAM_VECTORS <= g->vectors; ++group)
    NAME(block)(rows, GRAM_VECTORS, g, row, group);
  if (group * GRAM_VECTORS < g->vectors) NAME(block)(rows, 1, g, row, group);
}

TARGET static void NAME(sweep)(const struct gram *g) {
  const int64_t end = g->rows / GRAM_ROWS * GRAM_ROWS;
  if (g->backward) {
    for (int64_t row = g->rows - 1; row >= end; --row) NAME(blocks)(1, g, row);
    for (int64_t row = end - GRAM_ROWS; row >= 0; row -= GRAM_ROWS) NAME(blocks)(GRAM_ROWS, g, row);
  } else {
    for (int64_t row = 0; row < end; row += GRAM_ROWS) NAME(blocks)(GRAM_ROWS, g, row);
    for (int64_t row = end; row < g->rows; ++row) NAME(blocks)(1, g, row);
  }
}

#undef LANES
