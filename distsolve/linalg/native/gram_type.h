/* What gram.h does before and after the sweep, for one element type; included once for each. */

/* Lay out the vectors that the sweep multiplies by, in `scratch` where the operand will not do, and
 * clear its results. `V` holds k vectors, `out` has room for as many. */
static void NAME(prepare)(struct gram *g, REAL *V, int64_t k, REAL *out, REAL *scratch) {
  const int64_t length = g->length, all = k * length;
  g->vectors = k;
  switch (g->field) {
    case GRAM_REAL:
      g->v[0] = V;
      g->u[0] = out;
      break;
    case GRAM_REAL_OF_COMPLEX:
      g->v[0] = scratch;
      g->u[0] = scratch + all;
      for (int64_t p = 0; p < all; ++p) scratch[p] = V[p / 2];
      break;
    case GRAM_COMPLEX:
      g->vectors = 2 * k;
      g->v[0] = V;
      g->v[1] = scratch;
      g->u[0] = out;
      g->u[1] = scratch + all;
      for (int64_t p = 0; p < all; ++p) scratch[p] = V[p ^ 1];
      memset(g->u[1], 0, (size_t)all * sizeof(REAL));
  }
  if (g->field != GRAM_COMPLEX) {
    g->v[1] = (REAL *)g->v[0] + length;
    g->u[1] = (REAL *)g->u[0] + length;
  }
  g->pitch = g->field == GRAM_COMPLEX ? length : GRAM_VECTORS * length;
  memset(g->u[0], 0, (size_t)all * sizeof(REAL));
  memset(g->norms, 0, (size_t)k * sizeof(double));
}

/* Put the results of the even and the odd entries together. */
static void NAME(finish)(const struct gram *g, int64_t k, REAL *out) {
  const int64_t half = k * g->length / 2;
  const REAL *u = (const REAL *)g->u[0], *u_swapped = (const REAL *)g->u[1];
  if (g->field == GRAM_REAL_OF_COMPLEX)
    for (int64_t p = 0; p < half; ++p) out[p] = u[2 * p] + u[2 * p + 1];
  if (g->field == GRAM_COMPLEX)
    for (int64_t p = 0; p < half; ++p) {
      REAL re = u[2 * p] + u_swapped[2 * p + 1];
      out[2 * p + 1] = u_swapped[2 * p] - u[2 * p + 1];
      out[2 * p] = re;
    }
}

static void NAME(product)(
    struct gram *g, void *V, int64_t k, void *out, double *scratch, const void *tail,
    int64_t n_tail) {
  REAL *end = (REAL *)out + k * (g->field == GRAM_REAL_OF_COMPLEX ? g->length / 2 : g->length);
  g->norms = scratch;
  NAME(prepare)(g, (REAL *)V, k, (REAL *)out, (REAL *)(scratch + k));
  switch (gram_instructions()) {
#if GRAM_X86
    case GRAM_AVX512:
      NAME(sweep_avx512)(g);
      break;
    case GRAM_AVX2:
      NAME(sweep_avx2)(g);
      break;
#endif
    default:
      NAME(sweep_baseline)(g);
  }
  NAME(finish)(g, k, (REAL *)out);
  for (int64_t c = 0; c < k; ++c) end[c] = (REAL)g->norms[c];
  if (n_tail > 0) memcpy(end + k, tail, (size_t)n_tail * sizeof(REAL));
}
