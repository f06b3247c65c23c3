/* Numbers and vectors of `attend.c`: dtypes, 2^x and tanh, sums over lanes, rows in lane order.
 *
 * Vectors are the compiler's generic ones, so AVX-512, AVX2, SSE and NEON come from the same
 * source, but for conversions that it makes badly. A row is kept as float32 in "lane order": in each
 * piece of 2 * LANES elements stand the two vectors that `load_pair` yields. */
#ifndef ATTNKIT_VECTOR_H
#define ATTNKIT_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define KEYS 4   /* keys per step of the score: 4 rows x 4 keys of sums fit in 32 registers */
#define PIECES 2 /* pieces of columns per step of the values: 4 rows x 2 x 2 sums do as well */
#elif defined(__AVX__)
#define LANES 8
#define KEYS 2
#define PIECES 1
#elif defined(__aarch64__)
#define LANES 4
#define KEYS 4
#define PIECES 2
#else
#define LANES 4
#define KEYS 2
#define PIECES 1
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "lane order assumes a little-endian machine"
#endif

#define PIECE (2 * LANES)

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define UNROLL _Pragma("GCC unroll 32")
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vec_i){__VA_ARGS__})
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t vec_i __attribute__((vector_size(4 * LANES)));
typedef uint32_t vec_u __attribute__((vector_size(4 * LANES)));
typedef uint16_t vec_h __attribute__((vector_size(2 * LANES)));
typedef int8_t vec_b __attribute__((vector_size(LANES)));

enum dtype { F32 = 0, BF16 = 1, F16 = 2, I8 = 3 };
/* Beside the lane orders of dtypes, that of channels whose bytes were interleaved by fours. */
enum { FOURS = 4 };

/* ---- numbers ---- */

INLINE int64_t size_of(int64_t dtype) { return dtype == F32 ? 4 : dtype == I8 ? 1 : 2; }
INLINE float bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

INLINE float from_bf16(uint16_t h) { return bits_to_float((uint32_t)h << 16); }

/* Both conversions are branch-free so that loops over them vectorise. 2^112 moves an exponent
 * biased by 15 to one biased by 127, subnormals included. */
INLINE float from_f16(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = (uint32_t)(h & 0x7fff) << 13;
  uint32_t finite = float_to_bits(bits_to_float(magnitude) * 0x1p112f);
  return bits_to_float(sign | ((h & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : finite));
}

INLINE uint16_t to_bf16(float f) { /* round to nearest even; NaN stays NaN */
  uint32_t u = float_to_bits(f);
  uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded;
}

INLINE uint16_t to_f16(float f) { /* round to nearest even; too large becomes infinity */
  uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  uint32_t normal = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;
  /* Adding 0.5 leaves exactly the ten bits of a half's subnormal at the low end of the fraction. */
  uint32_t subnormal = float_to_bits(bits_to_float(a) + 0.5f) - 0x3f000000;
  uint32_t h = a < 0x38800000 ? subnormal : normal;
  h = a >= 0x477ff000 ? 0x7c00 : h;
  h = a > 0x7f800000 ? 0x7e00 : h;
  return sign | h;
}

INLINE float load_scalar(const char *p, int64_t i, int dtype) {
  if (dtype == F32) return ((const float *)p)[i];
  uint16_t h = ((const uint16_t *)p)[i];
  return dtype == BF16 ? from_bf16(h) : from_f16(h);
}

/* ---- vectors ---- */

INLINE vec load_vec(const float *p) {
  vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
/* A load that is done once: gcc would rather fold it into every use, and loads are what limits. */
INLINE vec load_kept(const float *p) {
  vec v = load_vec(p);
#if defined(__x86_64__)
  __asm__("" : "+v"(v));
#endif
  return v;
}
INLINE void store_vec(float *p, vec v) { memcpy(p, &v, sizeof v); }
INLINE vec_i load_ints(const int32_t *p) {
  vec_i v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec pick(vec_i mask, vec a, vec b) { return (vec)((mask & (vec_i)a) | (~mask & (vec_i)b)); }

/* a > b ? a : b, so NaN where b is. */
INLINE vec larger(vec a, vec b) {
#if defined(__AVX512F__)
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return pick(a > b, a, b);
#endif
}

/* 2^x for x <= 0 (a score minus the largest). Below 2^-126 it is 0; NaN stays NaN. The polynomial
 * is Taylor's for 2^f on [-0.5, 0.5]; its error is below a float's rounding. */
INLINE vec exp2_nonpositive(vec x) {
  vec c = larger(splat(-126.0f), x);
  vec shifted = c + 12582912.0f; /* 1.5 * 2^23: the integer nearest to c in the low bits */
  vec f = c - (shifted - 12582912.0f);
  vec p = 1.54035304e-4f * f + 1.33335581e-3f;
  p = p * f + 9.61812911e-3f;
  p = p * f + 5.55041087e-2f;
  p = p * f + 2.40226507e-1f;
  p = p * f + 6.93147181e-1f;
  p = p * f + 1.0f;
  vec power = (vec)(((vec_u)shifted + 127u) << 23);
#if defined(__AVX512F__)
  const __mmask16 not_tiny = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (vec)_mm512_maskz_mul_ps(not_tiny, (__m512)p, (__m512)power);
#else
  return pick(x < -126.0f, splat(0.0f), p * power);
#endif
}

INLINE float exp2_one(float x) { return exp2_nonpositive(splat(x))[0]; }

/* tanh without overflow: by 2^(-2|x| log2 e) away from 0, by its series near 0, where that cancels.
 */
INLINE vec tanh_safe(vec x) {
  vec a = (vec)((vec_i)x & 0x7fffffff), s = x * x;
  vec e = exp2_nonpositive(a * -2.88539008f);
  vec far = (1.0f - e) / (1.0f + e);
  vec p = -8.86323552e-3f * s + 2.18694885e-2f;
  p = p * s - 5.39682540e-2f;
  p = p * s + 1.33333333e-1f;
  p = p * s - 3.33333333e-1f;
  return pick(a < 0.35f, x + x * s * p, (vec)((vec_u)far | ((vec_u)x & 0x80000000u)));
}

/* Which lanes of two vectors a step of `sum_lanes` adds: neighbours inside each group of four, or
 * neighbouring groups of four. SWAP exchanges the keys of a row in a group of scores. */
#if LANES == 16
#define EVEN_LANES 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define ODD_LANES 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#define EVEN_FOURS 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define ODD_FOURS 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#define SWAP_ONE 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#define SWAP_TWO 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13
#elif LANES == 8
#define EVEN_LANES 0, 2, 8, 10, 4, 6, 12, 14
#define ODD_LANES 1, 3, 9, 11, 5, 7, 13, 15
#define EVEN_FOURS 0, 1, 2, 3, 8, 9, 10, 11
#define ODD_FOURS 4, 5, 6, 7, 12, 13, 14, 15
#define SWAP_ONE 1, 0, 3, 2, 5, 4, 7, 6
#define SWAP_TWO 2, 3, 0, 1, 6, 7, 4, 5
#else
#define EVEN_LANES 0, 2, 4, 6
#define ODD_LANES 1, 3, 5, 7
#define EVEN_FOURS EVEN_LANES
#define ODD_FOURS ODD_LANES
#define SWAP_ONE 1, 0, 3, 2
#define SWAP_TWO 2, 3, 0, 1
#endif

/* One step of `sum_lanes`: n vectors become half as many with sums of twice as many lanes. The
 * loops here and in the block functions are not nested, so that gcc unrolls them while it still can
 * keep arrays in registers. */
INLINE int sum_step(const int fours, vec *v, const int n) {
  UNROLL
  for (int i = 0; i < (n + 1) / 2; ++i) {
    vec a = v[2 * i], b = v[2 * i + 1 < n ? 2 * i + 1 : 2 * i];
    v[i] = fours ? SHUFFLE(a, b, EVEN_FOURS) + SHUFFLE(a, b, ODD_FOURS)
                 : SHUFFLE(a, b, EVEN_LANES) + SHUFFLE(a, b, ODD_LANES);
  }
  return (n + 1) / 2;
}

/* out[i] = sum of the lanes of v[i], for n vectors, which are overwritten; whole vectors are
 * written to out. */
INLINE void sum_lanes(vec *v, int n, float *out) {
  n = sum_step(0, v, n);
  n = sum_step(0, v, n);
  if (LANES > 4) n = sum_step(1, v, n);
  if (LANES > 8) n = sum_step(1, v, n);
  UNROLL
  for (int i = 0; i < n; ++i) store_vec(out + i * LANES, v[i]);
}

/* Each lane gets the largest of the KEYS lanes of its row. */
INLINE vec largest_of_keys(vec v) {
  v = larger(v, SHUFFLE(v, v, SWAP_ONE));
  return KEYS == 2 ? v : larger(v, SHUFFLE(v, v, SWAP_TWO));
}

/* LANES signed bytes. Converted as generic vectors gcc 12 takes them apart one by one. */
INLINE vec load_bytes(const char *p) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
  return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
  vec_b b;
  memcpy(&b, p, sizeof b);
  return __builtin_convertvector(__builtin_convertvector(b, vec_i), vec);
#endif
}

/* LANES float16. */
INLINE vec load_halves(const char *p) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
  vec_h h;
  memcpy(&h, p, sizeof h);
  const vec_u u = __builtin_convertvector(h, vec_u), magnitude = (u & 0x7fff) << 13;
  const vec_u special = (vec_u)(magnitude >= 0x0f800000u);
  const vec_u finite = (vec_u)((vec)magnitude * 0x1p112f);
  return (vec)(((u & 0x8000) << 16) | (special & (magnitude | 0x7f800000u)) | (~special & finite));
#endif
}

/* The low halves of lanes. */
INLINE vec_h narrow(vec_u v) {
#if defined(__AVX512F__)
  return (vec_h)_mm512_cvtepi32_epi16((__m512i)v);
#else
  return __builtin_convertvector(v, vec_h);
#endif
}

/* PIECE elements as two vectors: even and odd ones of bf16 (a shift and a mask, no shuffle), else
 * the first and the second half. */
INLINE void load_pair(const char *p, const int dtype, vec *a, vec *b) {
  if (dtype == F32) {
    *a = load_vec((const float *)p);
    *b = load_vec((const float *)p + LANES);
  } else if (dtype == BF16) {
    vec_u u;
    memcpy(&u, p, sizeof u);
    *a = (vec)(u << 16);
    *b = (vec)(u & 0xffff0000u);
  } else if (dtype == I8) {
    *a = load_bytes(p);
    *b = load_bytes(p + LANES);
  } else {
    *a = load_halves(p);
    *b = load_halves(p + LANES * 2);
  }
}

/* PIECE bfloat16 of even and odd elements: the inverse of `load_pair`, rounding as `to_bf16` does. */
INLINE vec_u round_bf16(vec x) {
  const vec_u u = (vec_u)x, rounded = u + 0x7fffu + (u >> 16 & 1u);
  return (vec_u)pick((vec_i)(u & 0x7fffffffu) > 0x7f800000, (vec)(u | 0x400000u), (vec)rounded);
}
INLINE void store_pair(uint16_t *p, vec even, vec odd) {
  const vec_u both = round_bf16(even) >> 16 | (round_bf16(odd) & 0xffff0000u);
  memcpy(p, &both, sizeof both);
}

/* Where element i of a row stands in lane order. */
INLINE int64_t lane_index(int64_t i, const int dtype) {
  int64_t in = i % PIECE;
  if (dtype == FOURS) return i / 64 * 64 + i % 16 / 4 * 16 + i % 64 / 16 * 4 + i % 4;
  return dtype == BF16 ? i - in + (in & 1) * LANES + in / 2 : i;
}

/* A row of `size` elements as float32 in lane order, zeros up to `width`. */
INLINE void load_row(const char *from, int from_dtype, const int dtype, int64_t size, int64_t width,
                     float *to) {
  if (dtype == BF16 && from_dtype == BF16 && size == width) {
    for (int64_t d = 0; d < width; d += PIECE) {
      vec a, b;
      load_pair(from + d * 2, BF16, &a, &b);
      store_vec(to + d, a);
      store_vec(to + d + LANES, b);
    }
    return;
  }
  for (int64_t d = 0; d < size; ++d) to[lane_index(d, dtype)] = load_scalar(from, d, from_dtype);
  for (int64_t d = size; d < width; ++d) to[lane_index(d, dtype)] = 0.0f;
}

/* The inverse: `row` in lane order times `factor`, converted. */
INLINE void store_row(const float *row, float factor, int dtype, int64_t size, int to_dtype,
                      char *to) {
  if (dtype == BF16 && to_dtype == BF16 && size % PIECE == 0) {
    for (int64_t d = 0; d < size; d += PIECE)
      store_pair((uint16_t *)to + d, load_vec(row + d) * factor, load_vec(row + d + LANES) * factor);
    return;
  }
  for (int64_t d = 0; d < size; ++d) {
    float x = row[lane_index(d, dtype)] * factor;
    if (to_dtype == F32) ((float *)to)[d] = x;
    else ((uint16_t *)to)[d] = to_dtype == BF16 ? to_bf16(x) : to_f16(x);
  }
}

#endif
