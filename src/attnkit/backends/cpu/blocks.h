/* A block: up to ROWS rows times the keys of a tile, in vectors of float32.
 *
 * In: rows of queries in lane order, pointers to rows of K and V. Out: scores; sums of weighted values.
 * `score_block` and `value_block` hold a copy of both loops per dtype and number of rows: all the
 * arithmetic of a decode that counts. */
#ifndef ATTNKIT_BLOCKS_H
#define ATTNKIT_BLOCKS_H

#include "vector.h"

#define ROWS 4  /* rows per step of the block functions */
#define TILE 32 /* keys scored before their values are summed */

/* The lines that begin in a row, into the second-level cache, which measured 10 % faster than the first.
 * Where rows lie one behind the other that is each line once. */
INLINE void prefetch_row(const char *p, int64_t bytes) {
  for (int64_t i = -(uintptr_t)p & 63; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}
/* Of those the i-th of parts of so many bytes. */
INLINE void prefetch_part(const char *p, int64_t bytes, int64_t part, int64_t i) {
  const int64_t rest = bytes - i * part;
  prefetch_row(p + i * part, rest < part ? rest : part);
}
/* What is read soon, from there into the first: with both 0.95 of the time of one. */
INLINE void bring_near(const char *p, int64_t bytes) {
  for (int64_t i = -(uintptr_t)p & 63; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 3);
}
#define NEAR_KEYS 6 /* between a value that is added and the one that is brought near */

/* Scores and weights of ROWS rows over a tile stand in groups of KEYS keys: group, row, key. */
#define GROUP (ROWS * KEYS)
INLINE int at_key(int j) { return j / KEYS * GROUP + j % KEYS; } /* of row 0; row r: + r * KEYS */

/* The scores of `rows` <= ROWS rows with keys from..to of a tile. Key pointers exist for whole
 * groups. On the way the first half of the next tile is fetched. */
INLINE void score_rows(const int rows, const int dtype, const float *q, int64_t q_stride,
                       const char *const *keys, int64_t num_pieces, int from, int to, float *scores,
                       const char *const *fetch, int64_t fetch_bytes) {
  const int64_t piece_bytes = PIECE * size_of(dtype), part = (fetch_bytes + num_pieces - 1) / num_pieces;
  for (int j = from - from % KEYS; j < to; j += KEYS) {
    vec sums[GROUP], x = {0};
    UNROLL
    for (int i = 0; i < rows * KEYS; ++i) sums[i] = (vec){0};
    const int next = j + KEYS < to ? j + KEYS : j;
    for (int64_t c = 0; c < num_pieces; ++c) {
      const float *row = q + c * PIECE;
      vec a[KEYS], b[KEYS];
      for (int t = 0; fetch && t < KEYS / 2; ++t) prefetch_part(fetch[j / 2 + t], fetch_bytes, part, c);
      UNROLL
      for (int t = 0; t < KEYS; ++t) bring_near(keys[next + t] + c * piece_bytes, piece_bytes);
      UNROLL
      for (int t = 0; t < KEYS; ++t) load_pair(keys[j + t] + c * piece_bytes, dtype, &a[t], &b[t]);
      UNROLL
      for (int i = 0; i < rows * KEYS; ++i) {
        if (i % KEYS == 0) x = load_kept(row + i / KEYS * q_stride);
        sums[i] += x * a[i % KEYS];
      }
      UNROLL
      for (int i = 0; i < rows * KEYS; ++i) {
        if (i % KEYS == 0) x = load_kept(row + i / KEYS * q_stride + LANES);
        sums[i] += x * b[i % KEYS];
      }
    }
    sum_lanes(sums, rows * KEYS, scores + j * ROWS);
  }
}

/* acc[r] += sum over keys from..to of weights[r][j] * value[j] for some columns, in the order of
 * the keys. A row is fetched in the course of `fetch_every` keys. */
INLINE void value_columns(const int rows, const int dtype, const int pieces, const float *weights,
                          const char *const *values, int64_t offset, int from, int to, float *acc,
                          int64_t acc_stride, const char *const *fetch, int fetch_every,
                          int64_t fetch_bytes) {
  const int64_t piece_bytes = PIECE * size_of(dtype);
  const int n = 2 * pieces; /* vectors of a row */
  vec sums[ROWS * 2 * PIECES];
  UNROLL
  for (int i = 0; i < rows * n; ++i) sums[i] = load_vec(acc + i / n * acc_stride + i % n * LANES);
  const int64_t part = (fetch_bytes + fetch_every - 1) / fetch_every;
  for (int j = from, i = 0; j < to; ++j) {
    if (fetch) prefetch_part(*fetch, fetch_bytes, part, i);
    if (fetch && ++i == fetch_every) ++fetch, i = 0;
    vec v[2 * PIECES];
    bring_near(values[j + NEAR_KEYS < to ? j + NEAR_KEYS : j] + offset, pieces * piece_bytes);
    UNROLL
    for (int c = 0; c < pieces; ++c)
      load_pair(values[j] + offset + c * piece_bytes, dtype, &v[2 * c], &v[2 * c + 1]);
    UNROLL
    for (int i = 0; i < rows * n; ++i) sums[i] += weights[at_key(j) + i / n * KEYS] * v[i % n];
  }
  UNROLL
  for (int i = 0; i < rows * n; ++i) store_vec(acc + i / n * acc_stride + i % n * LANES, sums[i]);
}

/* All columns; on the way the second half of the next tile is fetched. */
INLINE void value_rows(const int rows, const int dtype, const float *weights,
                       const char *const *values, int64_t num_pieces, int from, int to, float *acc,
                       int64_t acc_stride, const char *const *fetch, int64_t fetch_bytes) {
  const int64_t passes = (num_pieces + PIECES - 1) / PIECES, share = TILE / 2 / passes;
  if (from >= to) return;
  for (int64_t p = 0; p < passes; ++p) {
    const char *const *rest = fetch && share ? fetch + TILE / 2 + p * share : NULL;
    const int64_t c = p * PIECES, offset = c * PIECE * size_of(dtype);
    if (c + PIECES <= num_pieces)
      value_columns(rows, dtype, PIECES, weights, values, offset, from, to, acc + c * PIECE,
                    acc_stride, rest, 2 * passes, fetch_bytes);
    else
      value_columns(rows, dtype, 1, weights, values, offset, from, to, acc + c * PIECE, acc_stride,
                    rest, 2 * passes, fetch_bytes);
  }
}

/* One copy of both per dtype and number of rows: these hold all the arithmetic that counts. */
typedef void (*score_fn)(const float *, int64_t, const char *const *, int64_t, int, int, float *,
                         const char *const *, int64_t);
typedef void (*value_fn)(const float *, const char *const *, int64_t, int, int, float *, int64_t,
                         const char *const *, int64_t);
#define SPECIALISE(DTYPE, N)                                                                   \
  static void score_##DTYPE##_##N(const float *q, int64_t q_stride, const char *const *keys,   \
                                  int64_t num_pieces, int from, int to, float *scores,         \
                                  const char *const *fetch, int64_t fetch_bytes) {             \
    score_rows(N, DTYPE, q, q_stride, keys, num_pieces, from, to, scores, fetch, fetch_bytes); \
  }                                                                                            \
  static void value_##DTYPE##_##N(                                                             \
      const float *weights, const char *const *values, int64_t num_pieces, int from, int to,   \
      float *acc, int64_t acc_stride, const char *const *fetch, int64_t fetch_bytes) {         \
    value_rows(N, DTYPE, weights, values, num_pieces, from, to, acc, acc_stride, fetch,        \
               fetch_bytes);                                                                   \
  }
#define SPECIALISE_ROWS(DTYPE) \
  SPECIALISE(DTYPE, 1) SPECIALISE(DTYPE, 2) SPECIALISE(DTYPE, 3) SPECIALISE(DTYPE, 4)
SPECIALISE_ROWS(F32)
SPECIALISE_ROWS(BF16)
SPECIALISE_ROWS(F16)
SPECIALISE_ROWS(I8)
#define TABLE(NAME, DTYPE) \
  {NAME##_##DTYPE##_1, NAME##_##DTYPE##_2, NAME##_##DTYPE##_3, NAME##_##DTYPE##_4}
static const score_fn score_block[4][ROWS] = {TABLE(score, F32), TABLE(score, BF16),
                                              TABLE(score, F16), TABLE(score, I8)};
static const value_fn value_block[4][ROWS] = {TABLE(value, F32), TABLE(value, BF16),
                                              TABLE(value, F16), TABLE(value, I8)};

#endif
