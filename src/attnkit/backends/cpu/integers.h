/* A block over codes that are integers, in the processor's dot products of bytes (AVX-512 VNNI).
 *
 * In: rows of queries in bfloat16, pointers to rows of K and V in int8. Out: raw scores and sums of
 * weighted values, as from `blocks.h`, which takes twice as many instructions: there each code becomes a
 * float32 first.
 *
 * How: a query is rounded to integers of 15 bits, its largest magnitude being 127 * 128, and the weights of
 * a tile to 16, the row's largest being 65535: both far below a bfloat16's rounding. Each is two bytes, so
 * that two products of bytes, one of them shifted, are one exact sum of integers. One factor of a product
 * has no sign: of scores it is the key, 128 larger, and what that adds is taken off; of values it is the
 * weight. Sums of values stand in the order in which bytes are interleaved ("fours"). */
#ifndef ATTNKIT_INTEGERS_H
#define ATTNKIT_INTEGERS_H

#include "unit.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define ATTNKIT_INTEGERS
#define QUERY_LARGEST (127 * 128)
#define WEIGHT_LARGEST 65535
#define RUN 64            /* channels of a vector of bytes */
#define MOST_CHANNELS 512 /* of a key: what bytes add up to fits 32 bits */

static int64_t integer_floats(const struct job *j) {
  return MAX_ROWS * (j->q_width / 2 + 2 * KEYS) + TILE * j->v_width / 4 + ROWS * TILE / 2;
}

/* Where they lie in a thread's memory from `at` on. */
static void place_integers(const struct job *j, struct unit *u, float *at) {
  struct integers *n = &u->integers;
  n->scale = at, at += MAX_ROWS * KEYS;
  n->offset = (int32_t *)at, at += MAX_ROWS * KEYS;
  n->q = (int8_t *)at, at += MAX_ROWS * j->q_width / 2;
  n->values = (int8_t *)at, at += TILE * j->v_width / 4;
  n->high = (uint8_t *)at, at += ROWS * TILE / 4;
  n->low = (uint8_t *)at;
}

/* Round the unit's queries, which `u->q` has as numbers. One with an infinity or NaN gets a scale of NaN. */
static void round_queries(const struct job *j, struct unit *u) {
  const int64_t width = j->q_width;
  for (int r = 0; r < u->rows; ++r) {
    const float *row = u->q + r * width;
    const uint32_t largest = largest_bits(row, width);
    const float scale = largest >= 0x7f800000 ? bits_to_float(ONE_NAN) : bits_to_float(largest) / QUERY_LARGEST;
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    int8_t *high = u->integers.q + 2 * r * width, *low = high + width;
    int32_t sum = 0;
    for (int64_t d = 0; d < width; ++d) {
      const int32_t n = to_integer(row[d] * inverse), h = (n + 64) >> 7;
      high[d] = h;
      low[d] = n - h * 128;
      sum += n;
    }
    for (int n = r * KEYS; n < (r + 1) * KEYS; ++n) {
      u->integers.scale[n] = scale;
      u->integers.offset[n] = 128 * sum;
    }
  }
}

/* As `sum_lanes`, of LANES vectors of integers. */
INLINE __m512i sum_integers(vec_i *v) {
#define ADD_PAIRS(N, EVEN, ODD) \
  UNROLL                        \
  for (int i = 0; i < N; ++i) v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], EVEN) + SHUFFLE(v[2 * i], v[2 * i + 1], ODD);
  ADD_PAIRS(8, EVEN_LANES, ODD_LANES)
  ADD_PAIRS(4, EVEN_LANES, ODD_LANES)
  ADD_PAIRS(2, EVEN_FOURS, ODD_FOURS)
  ADD_PAIRS(1, EVEN_FOURS, ODD_FOURS)
  return (__m512i)v[0];
}

/* Raw scores of `rows` rows from `first` on with keys from..to of a tile, as by `score_rows`. */
INLINE void score_integers(const struct job *j, const struct unit *u, int first, const int rows,
                           const char *const *keys, int from, int to, float *scores,
                           const char *const *fetch) {
  const int64_t width = j->q_width;
  const int8_t *q = u->integers.q + 2 * first * width;
  const __m512i flip = _mm512_set1_epi8((char)0x80);
  const __m512i offset = _mm512_loadu_si512(u->integers.offset + first * KEYS);
  const __m512 scale = _mm512_loadu_ps(u->integers.scale + first * KEYS);
  for (int t = from - from % KEYS; t < to; t += KEYS) {
    vec_i sums[GROUP];
    UNROLL
    for (int i = 0; i < GROUP; ++i) sums[i] = (vec_i){0};
    for (int i = 0; t + 2 * KEYS < to && i < KEYS; ++i)
      bring_near(keys[t + 2 * KEYS + i], j->fetch_bytes); /* of rows that are elsewhere, nothing */
    for (int part = 0; part < 2; ++part) {
      const int shift = part ? 7 : 0;
      if (fetch) prefetch_row(fetch[t / 2 + part], j->fetch_bytes);
      UNROLL
      for (int i = 0; i < rows * KEYS; ++i) sums[i] <<= shift;
      for (int64_t d = 0; d < width; d += RUN) {
        __m512i k[KEYS];
        UNROLL
        for (int i = 0; i < KEYS; ++i) k[i] = _mm512_xor_si512(_mm512_loadu_si512(keys[t + i] + d), flip);
        UNROLL
        for (int i = 0; i < rows * KEYS; ++i) {
          const __m512i x = _mm512_loadu_si512(q + (2 * (i / KEYS) + part) * width + d);
          sums[i] = (vec_i)_mm512_dpbusd_epi32((__m512i)sums[i], k[i % KEYS], x);
        }
      }
    }
    const __m512i exact = _mm512_sub_epi32(sum_integers(sums), offset);
    _mm512_storeu_ps(scores + t * ROWS, _mm512_mul_ps(_mm512_cvtepi32_ps(exact), scale));
  }
}

/* Weights of a block's rows over keys from..to of a tile, in bytes; returns what one of them stands for, in
 * the lanes of its row. A weight that is NaN makes that NaN. */
INLINE vec round_weights(const struct unit *u, const float *weights, int from, int to) {
  vec largest = {0}, sum = {0};
  const int begin = from - from % KEYS;
  for (int t = begin; t < to; t += KEYS) {
    const vec w = load_vec(weights + t * ROWS);
    largest = larger(largest, w);
    sum += w;
  }
  largest = largest_of_keys(largest);
  sum += SHUFFLE(sum, sum, SWAP_ONE);
  sum += SHUFFLE(sum, sum, SWAP_TWO);
  largest += sum * 0.0f;
  const vec inverse = pick(largest > 0.0f, WEIGHT_LARGEST / largest, splat(0.0f));
  for (int t = begin; t < to; t += KEYS) {
    const __m512i n = _mm512_cvtps_epi32((__m512)(load_vec(weights + t * ROWS) * inverse));
    _mm_storeu_si128((__m128i *)(u->integers.high + t * ROWS), _mm512_cvtepi32_epi8(_mm512_srli_epi32(n, 8)));
    _mm_storeu_si128((__m128i *)(u->integers.low + t * ROWS), _mm512_cvtepi32_epi8(n));
  }
  return largest * (1.0f / WEIGHT_LARGEST);
}

/* Values of keys from..to of a tile, KEYS of a channel side by side: (v_width / RUN, TILE / KEYS, 4, RUN). */
INLINE void interleave_values(const struct job *j, const struct unit *u, const char *const *values, int from,
                              int to, const char *const *fetch) {
  for (int t = from - from % KEYS; t < to; t += KEYS) {
    for (int i = 0; fetch && i < KEYS / 2; ++i)
      prefetch_row(fetch[TILE / 2 + t / 2 + i], j->fetch_bytes);
    for (int64_t d = 0; d < j->v_width; d += RUN) {
      __m512i v[KEYS];
      UNROLL
      for (int i = 0; i < KEYS; ++i) v[i] = _mm512_loadu_si512(values[t + i] + d);
      const __m512i a = _mm512_unpacklo_epi8(v[0], v[1]), b = _mm512_unpackhi_epi8(v[0], v[1]);
      const __m512i c = _mm512_unpacklo_epi8(v[2], v[3]), e = _mm512_unpackhi_epi8(v[2], v[3]);
      int8_t *to_bytes = u->integers.values + d * TILE + t * RUN;
      _mm512_storeu_si512(to_bytes, _mm512_unpacklo_epi16(a, c));
      _mm512_storeu_si512(to_bytes + 64, _mm512_unpackhi_epi16(a, c));
      _mm512_storeu_si512(to_bytes + 128, _mm512_unpacklo_epi16(b, e));
      _mm512_storeu_si512(to_bytes + 192, _mm512_unpackhi_epi16(b, e));
    }
  }
}

/* A weight's byte of KEYS keys of a row, for all channels. */
INLINE __m512i four_weights(const uint8_t *bytes, int t, int row) {
  int32_t four;
  memcpy(&four, bytes + t * ROWS + row * KEYS, sizeof four);
  return _mm512_set1_epi32(four);
}

/* Add the interleaved values of keys from..to to the sums of `rows` rows, two at most. */
INLINE void add_integers(const struct job *j, const struct unit *u, int row, const int rows, int from, int to,
                         const float *stands_for, float *acc) {
  for (int64_t d = 0; d < j->v_width; d += RUN) {
    const int8_t *v = u->integers.values + d * TILE;
    __m512i high[2 * KEYS], low[2 * KEYS];
    UNROLL
    for (int i = 0; i < rows * KEYS; ++i) high[i] = low[i] = _mm512_setzero_si512();
    for (int t = from - from % KEYS; t < to; t += KEYS) {
      UNROLL
      for (int i = 0; i < rows * KEYS; ++i) {
        const __m512i x = _mm512_loadu_si512(v + t * RUN + i % KEYS * 64);
        high[i] = _mm512_dpbusd_epi32(high[i], four_weights(u->integers.high, t, row + i / KEYS), x);
        low[i] = _mm512_dpbusd_epi32(low[i], four_weights(u->integers.low, t, row + i / KEYS), x);
      }
    }
    UNROLL
    for (int i = 0; i < rows * KEYS; ++i) {
      float *sums = acc + i / KEYS * j->v_width + d + i % KEYS * LANES;
      const __m512i all = _mm512_add_epi32(_mm512_slli_epi32(high[i], 8), low[i]);
      const __m512 one = _mm512_set1_ps(stands_for[(row + i / KEYS) * KEYS]);
      _mm512_storeu_ps(sums, _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), one, _mm512_loadu_ps(sums)));
    }
  }
}

/* Scores of a block, as `score_block`. */
static void score_block_integers(const struct job *j, const struct unit *u, int first, int rows,
                                 const char *const *keys, int from, int to, float *scores,
                                 const char *const *fetch) {
  if (rows == 1) score_integers(j, u, first, 1, keys, from, to, scores, fetch);
  else if (rows == 2) score_integers(j, u, first, 2, keys, from, to, scores, fetch);
  else if (rows == 3) score_integers(j, u, first, 3, keys, from, to, scores, fetch);
  else score_integers(j, u, first, 4, keys, from, to, scores, fetch);
}

/* Add the weighted values of a block. A key that a row does not see has weight 0. */
static void add_block_integers(const struct job *j, const struct unit *u, int first, int rows,
                               const float *weights, int from, int to) {
  float stands_for[LANES], *acc = u->acc + first * j->v_width;
  store_vec(stands_for, round_weights(u, weights, from, to));
  int r = 0;
  for (; r + 2 <= rows; r += 2) add_integers(j, u, r, 2, from, to, stands_for, acc + r * j->v_width);
  if (r < rows) add_integers(j, u, r, 1, from, to, stands_for, acc + r * j->v_width);
}

#endif
#endif
