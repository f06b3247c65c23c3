/* Products of rows with weights, y = x W^T + b, in vectors of float32: for processors that have no
 * instructions for bfloat16, where its products by oneDNN take longer than those of float32.
 *
 * In: the product that `linear.c` describes. Out: its rows. A number of bfloat16 is the upper half of a
 * float32, so a pair of channels is two vectors by a shift and a mask, which as many rows share as
 * registers hold the sums of. Channels are summed up in order: a row's bits do not depend on the others. */
#ifndef ATTNKIT_ROWS_H
#define ATTNKIT_ROWS_H

#include "product.h"
#include "vector.h"

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512BF16__)
#define ATTNKIT_ROWS
#define PARTS (COLUMNS / LANES) /* vectors of a block's columns */
#if LANES == 16
#define ROWS_AT_ONCE 12 /* 24 sums beside the 4 vectors of a pair of channels */
#else
#define ROWS_AT_ONCE 3
#endif
#define CHUNK_FLOATS (192 << 10) /* of x, that are to stay in the second cache */
#define AHEAD_BYTES 4096         /* between what is multiplied and what is fetched: half as far, 0.9 */

/* Rows first.. of x as float32: groups of `group`, the last of what is left, the rows of a group side by
 * side for each channel. */
static void widen_x(const struct product *p, int64_t first, int64_t rows, int64_t group, float *to) {
  const int64_t channels = p->linears[0]->channels;
  for (int64_t r = 0; r < rows; r += group) {
    const int64_t n = rows - r < group ? rows - r : group;
    for (int64_t i = 0; i < n; ++i) {
      const uint16_t *from = p->x + (first + r + i) * channels;
      float *at = to + r * channels + i;
      for (int64_t k = 0; k < channels; ++k) at[k * n] = from_bf16(from[k]);
    }
  }
}

/* Columns of a block for `rows` rows, which `x` has side by side. */
INLINE void multiply_rows(const struct linear *l, const float *x, uint16_t *y, int64_t block,
                          const int rows) {
  const uint16_t *w = l->weight + block * COLUMNS * l->channels;
  vec sums[ROWS_AT_ONCE * PARTS];
  UNROLL
  for (int i = 0; i < rows * PARTS; ++i) sums[i] = (vec){0};
  for (int64_t k = 0; k < l->channels; k += 2, w += 2 * COLUMNS, x += 2 * rows) {
    vec even[PARTS], odd[PARTS];
    __builtin_prefetch((const char *)w + AHEAD_BYTES, 0, 2);
    __builtin_prefetch((const char *)w + AHEAD_BYTES + 64, 0, 2);
    UNROLL
    for (int i = 0; i < PARTS; ++i) load_pair((const char *)w + i * sizeof(vec), BF16, &even[i], &odd[i]);
    UNROLL
    for (int i = 0; i < rows * PARTS; ++i) sums[i] += x[i / PARTS] * even[i % PARTS];
    UNROLL
    for (int i = 0; i < rows * PARTS; ++i) sums[i] += x[rows + i / PARTS] * odd[i % PARTS];
  }
  UNROLL
  for (int i = 0; i < rows * PARTS; ++i) {
    const int64_t column = block * COLUMNS + i % PARTS * LANES;
    if (l->bias) {
      vec_h h;
      memcpy(&h, l->bias + column, sizeof h);
      sums[i] += (vec)(__builtin_convertvector(h, vec_u) << 16);
    }
    const vec_h h = narrow(round_bf16(sums[i]) >> 16);
    memcpy(y + i / PARTS * l->columns + column, &h, sizeof h);
  }
}

/* One copy per number of rows. */
typedef void (*rows_fn)(const struct linear *, const float *, uint16_t *, int64_t);
#define SPECIALISE_ROWS(N)                                                                       \
  static void rows_##N(const struct linear *l, const float *x, uint16_t *y, int64_t block) {    \
    multiply_rows(l, x, y, block, N);                                                           \
  }
SPECIALISE_ROWS(1)
SPECIALISE_ROWS(2)
SPECIALISE_ROWS(3)
#if ROWS_AT_ONCE > 3
SPECIALISE_ROWS(4)
SPECIALISE_ROWS(5)
SPECIALISE_ROWS(6)
SPECIALISE_ROWS(7)
SPECIALISE_ROWS(8)
SPECIALISE_ROWS(9)
SPECIALISE_ROWS(10)
SPECIALISE_ROWS(11)
SPECIALISE_ROWS(12)
static const rows_fn multiply_some[] = {rows_1, rows_2, rows_3, rows_4,  rows_5,  rows_6,
                                        rows_7, rows_8, rows_9, rows_10, rows_11, rows_12};
#else
static const rows_fn multiply_some[] = {rows_1, rows_2, rows_3};
#endif

INLINE int64_t parts_of(int64_t all, int64_t most) { return (all + most - 1) / most; }

/* Rows of a chunk: those whose numbers stay in the second cache, about as many in each. */
static int64_t rows_of_chunk(int64_t rows, int64_t channels) {
  int64_t most = CHUNK_FLOATS / channels;
  if (most < 2 * ROWS_AT_ONCE) most = 2 * ROWS_AT_ONCE;
  return parts_of(rows, parts_of(rows, most));
}

/* A thread's share: neighbours among the pairs of a chunk of rows and a block of columns. */
static void multiply_pairs(void *argument) {
  struct product *p = argument;
  const int64_t thread = __atomic_fetch_add(&p->next_thread, 1, __ATOMIC_RELAXED);
  const int64_t channels = p->linears[0]->channels;
  const int64_t pairs = parts_of(p->rows, p->chunk) * p->num_blocks;
  float *x = p->workspace + thread * p->chunk * channels;
  int64_t at = -1, which = 0, before = 0, n = 0, group = 0;
  for (int64_t i = pairs * thread / p->num_threads; i < pairs * (thread + 1) / p->num_threads; ++i) {
    const int64_t first = i / p->num_blocks * p->chunk, block = i % p->num_blocks;
    if (first != at) {
      at = first, which = 0, before = 0;
      n = p->rows - first < p->chunk ? p->rows - first : p->chunk;
      group = parts_of(n, parts_of(n, ROWS_AT_ONCE));
      widen_x(p, first, n, group, x);
    }
    while (block - before >= p->linears[which]->columns / COLUMNS)
      before += p->linears[which++]->columns / COLUMNS;
    const struct linear *l = p->linears[which];
    for (int64_t r = 0; r < n; r += group) {
      const int64_t some = n - r < group ? n - r : group;
      multiply_some[some - 1](l, x + r * channels, p->y[which] + (first + r) * l->columns, block - before);
    }
  }
}
#endif

#endif
