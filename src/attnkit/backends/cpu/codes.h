/* Codes of quantised caches: bytes to numbers where keys and values are read, numbers to bytes where
 * they are written. `kvcache/formats.py` says what the bytes are; every code written here equals
 * that of `kvcache/codecs.py`, and every code read is the same number.
 *
 * Numbers are read as bfloat16, exactly: no code has more than eight significant bits, and the
 * product of a 4-bit code and its block's scale has six. Blocks of vectors read float8 as float16, as
 * exactly, where the processor makes float32 of that. */
#ifndef ATTNKIT_CODES_H
#define ATTNKIT_CODES_H

#include "call.h"
#include "vector.h"

enum kind { E4M3 = 0, E5M2 = 1, INT8 = 2, INT4 = 3, NVFP4 = 4 };

#define BLOCK 16 /* numbers that share a scale of nvfp4 */
#define ONE_NAN 0x7fc00000u

INLINE int64_t code_bytes(int64_t kind, int64_t size) { return kind < INT4 ? size : size / 2; }

/* Bytes of a vector, scales included. */
INLINE int64_t vector_bytes(const struct codes *c, int64_t size) {
  const int64_t scales = c->kind == NVFP4 ? size / BLOCK : c->token_scales ? 4 : 0;
  return code_bytes(c->kind, size) + scales;
}

/* The layer's scale of a head; 1 where there is none. */
INLINE float k_scale(const struct codes *c, int64_t head) {
  return c && c->k_scale ? c->k_scale[head * c->k_stride] : 1.0f;
}
INLINE float v_scale(const struct codes *c, int64_t head) {
  return c && c->v_scale ? c->v_scale[head * c->v_stride] : 1.0f;
}

/* ---- reading ---- */

INLINE uint16_t bf16_of(float exact) { return float_to_bits(exact) >> 16; }

/* A float8 as bfloat16, without branches, so that loops over it vectorise. A normal one is moved and
 * its exponent rebased. A subnormal one is a small integer m, whose logarithm stands in the exponent of
 * (float)m. `inf` is the code of infinity, or above all codes; those above it are NaN, as is 0x7f. */
INLINE uint16_t bf16_of_float8(uint8_t code, const int bits, const int bias, const int inf) {
  const int32_t m = code & 0x7f, normal = ((127 - bias) << 7) + (m << (7 - bits));
  const int32_t subnormal = (int32_t)(float_to_bits((float)m) >> 16) - ((bias + bits - 1) << 7);
  int32_t h = m < (1 << bits) ? subnormal : normal;
  h = m == 0 ? 0 : h;
  h = m == inf ? 0x7f80 : h;
  h = m == 0x7f || m > inf ? 0x7fc0 : h;
  return h | (code & 0x80) << 8;
}
INLINE uint16_t bf16_of_e4m3(uint8_t code) { return bf16_of_float8(code, 3, 7, 0x80); }
INLINE uint16_t bf16_of_e5m2(uint8_t code) { return bf16_of_float8(code, 2, 15, 0x7c); }

#if defined(__AVX512VBMI__)
/* Bytes of the bfloat16 of each magnitude: of E4M3, E5M2 and INT8, low and high. */
static uint8_t code_tables[3][2][128];

__attribute__((constructor)) static void fill_code_tables(void) {
  for (int m = 0; m < 128; ++m) {
    const uint16_t h[3] = {bf16_of_e4m3(m), bf16_of_e5m2(m), bf16_of(m)};
    for (int kind = 0; kind < 3; ++kind) {
      code_tables[kind][0][m] = h[kind];
      code_tables[kind][1][m] = h[kind] >> 8;
    }
  }
}

/* Codes of a byte as bfloat16, those that are `there` of 64: each byte of a result is looked up, where
 * the arithmetic above takes ten times as long. Eights of codes change places first, since bytes are
 * interleaved within quarters. */
INLINE void read_some(const char *row, const __mmask64 there, const int kind, const __m512i *low,
                      const __m512i *high, uint16_t *to) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i sign = _mm512_set1_epi8((char)0x80);
  const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(there, row));
  const __m512i m = kind == INT8 ? _mm512_abs_epi8(codes) : codes;
  const __m512i a = _mm512_permutex2var_epi8(low[0], m, low[1]);
  __m512i b = _mm512_permutex2var_epi8(high[0], m, high[1]);
  b = _mm512_ternarylogic_epi64(b, codes, sign, 0xf8); /* b | codes & sign */
  if (kind == INT8) { /* no table has 128: of -128 the high byte is 0xc3, the low one that of 0 */
    const __m512i least = _mm512_set1_epi8((char)0xc3);
    b = _mm512_mask_blend_epi8(_mm512_cmpeq_epi8_mask(codes, sign), b, least);
  }
  _mm512_mask_storeu_epi16(to, (__mmask32)there, _mm512_unpacklo_epi8(a, b));
  _mm512_mask_storeu_epi16(to + 32, (__mmask32)(there >> 32), _mm512_unpackhi_epi8(a, b));
}

INLINE void read_bytes(const char *const *rows, int n, const int kind, int64_t size, int64_t width,
                       uint16_t *to) {
  __m512i low[2], high[2];
  for (int i = 0; i < 2; ++i) {
    low[i] = _mm512_loadu_si512(code_tables[kind][0] + 64 * i);
    high[i] = _mm512_loadu_si512(code_tables[kind][1] + 64 * i);
  }
  for (int r = 0; r < n; ++r, to += width) {
    int64_t i = 0;
    for (; i + 64 <= size; i += 64) read_some(rows[r] + i, ~0ull, kind, low, high, to + i);
    if (i < size) read_some(rows[r] + i, ~0ull >> (64 - size + i), kind, low, high, to + i);
  }
}
#else
INLINE void read_bytes(const char *const *rows, int n, const int kind, int64_t size, int64_t width,
                       uint16_t *restrict to) {
  for (int r = 0; r < n; ++r, to += width) {
    const uint8_t *restrict from = (const uint8_t *)rows[r];
    int64_t i = 0;
    for (; kind == INT8 && i + LANES <= size; i += LANES) {
      const vec_h h = narrow((vec_u)load_bytes(rows[r] + i) >> 16);
      memcpy(to + i, &h, sizeof h);
    }
    for (; i < size; ++i)
      to[i] = kind == E4M3   ? bf16_of_e4m3(from[i])
              : kind == E5M2 ? bf16_of_e5m2(from[i])
                             : bf16_of((int8_t)from[i]);
  }
}
#endif

/* An e2m1: from 1 on the code stands in a float's exponent and fraction; below it is 0 or 0.5. */
INLINE float from_e2m1(uint32_t code) {
  const uint32_t m = code & 7, size = 0x3f000000 + ((m - (m == 1)) << 22);
  return bits_to_float((size & -(uint32_t)(m != 0)) | (code & 8) << 28);
}

/* One vector of `size` codes of half a byte. */
INLINE void read_vector(const char *row, const int kind, int64_t size, uint16_t *restrict to) {
  const uint8_t *restrict from = (const uint8_t *)row;
  if (kind == INT4)
    for (int64_t i = 0; i < size / 2; ++i) {
      to[2 * i] = bf16_of((from[i] & 15) - 8);
      to[2 * i + 1] = bf16_of((from[i] >> 4) - 8);
    }
  else {
    for (int64_t i = 0; i < size / 2; ++i) {
      to[2 * i] = bf16_of(from_e2m1(from[i] & 15));
      to[2 * i + 1] = bf16_of(from_e2m1(from[i] >> 4));
    }
    for (int64_t b = 0; b < size / BLOCK; ++b, to += BLOCK) {
      const float scale = from_bf16(bf16_of_e4m3(from[size / 2 + b]));
      for (int i = 0; i < BLOCK; i += LANES) {
        vec_h h;
        memcpy(&h, to + i, sizeof h);
        const vec x = (vec)(__builtin_convertvector(h, vec_u) << 16) * scale;
        h = narrow((vec_u)x >> 16);
        memcpy(to + i, &h, sizeof h);
      }
    }
  }
}

/* `n` vectors of `size` codes as bfloat16, `width` numbers apart, zeros up to there. */
static inline void read_codes(const char *const *rows, int n, int64_t kind, int64_t size,
                              int64_t width, uint16_t *to) {
  if (kind == E4M3) read_bytes(rows, n, E4M3, size, width, to);
  else if (kind == E5M2) read_bytes(rows, n, E5M2, size, width, to);
  else if (kind == INT8) read_bytes(rows, n, INT8, size, width, to);
  else
    for (int r = 0; r < n; ++r) {
      if (kind == INT4) read_vector(rows[r], INT4, size, to + r * width);
      else read_vector(rows[r], NVFP4, size, to + r * width);
    }
  for (int r = 0; r < n; ++r)
    for (int64_t i = size; i < width; ++i) to[r * width + i] = 0;
}

/* What blocks of vectors read a float8 as. As a float16 it is a shift away, and a decode whose codes are
 * cached takes half the time (AVX-512, no VBMI). Tables (VBMI) are faster yet. */
#if defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512VBMI__)
#define FLOAT8_DTYPE F16
#else
#define FLOAT8_DTYPE BF16
#endif

/* One vector of `size` float8 as float16. E4M3 has a bias of 7 where float16 has 15, so that 1 stands for
 * `float8_unit`; and of its codes NaN alone carries into the upper half of the exponent when 1 is added. */
INLINE void read_halves(const char *row, const int kind, int64_t size, uint16_t *restrict to) {
  const int8_t *restrict from = (const int8_t *)row;
  int64_t i = 0;
#if defined(__AVX512BW__)
  const __m512i all = _mm512_set1_epi16((short)0xbfff), one = _mm512_set1_epi16(0x80);
  const __m512i carry = _mm512_set1_epi16(0x4000);
  for (; i + 32 <= size; i += 32) {
    const __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(from + i)));
    __m512i h = _mm512_slli_epi16(codes, 8);
    if (kind == E4M3) {
      h = _mm512_and_si512(_mm512_slli_epi16(codes, 7), all);
      h = _mm512_ternarylogic_epi64(h, _mm512_add_epi16(h, one), carry, 0xf8); /* h | sum & carry */
    }
    _mm512_storeu_si512(to + i, h);
  }
#endif
  for (; i < size; ++i) {
    const uint16_t h = from[i] * 128 & 0xbfff;
    to[i] = kind == E4M3 ? h | ((h + 0x80) & 0x4000) : from[i] * 256;
  }
}
INLINE float float8_unit(int64_t kind) { return kind == E4M3 && FLOAT8_DTYPE == F16 ? 256.0f : 1.0f; }

/* What blocks of vectors read codes as, once those that are not integers are decoded. */
INLINE int decoded_dtype(int64_t kind) { return kind <= E5M2 ? FLOAT8_DTYPE : BF16; }

/* `n` vectors of `size` codes as that, `width` numbers apart, zeros up to there. */
static inline void decode_codes(const char *const *rows, int n, int64_t kind, int64_t size,
                                int64_t width, uint16_t *to) {
  if (decoded_dtype(kind) != F16) {
    read_codes(rows, n, kind, size, width, to);
    return;
  }
  for (int r = 0; r < n; ++r, to += width) {
    if (kind == E4M3) read_halves(rows[r], E4M3, size, to);
    else read_halves(rows[r], E5M2, size, to);
    for (int64_t i = size; i < width; ++i) to[i] = 0;
  }
}

/* ---- writing ---- */

/* Nearest float8, ties to even; magnitudes beyond the largest number become that. `bits` are those
 * of the fraction. Adding 2^(23 - the exponent of the least subnormal) leaves exactly a subnormal's
 * code at the low end of the sum. */
INLINE uint8_t to_float8(float x, const int bits, const int bias, const float largest,
                         const float least_normal, const float aligner) {
  const uint32_t u = float_to_bits(x), sign = (u >> 24) & 0x80, drop = 23 - bits;
  uint32_t a = u & 0x7fffffff;
  const uint32_t nan = a > 0x7f800000, top = float_to_bits(largest);
  a = a > top ? top : a;
  const uint32_t even = (a >> drop) & 1, half = (1u << (drop - 1)) - 1;
  const uint32_t normal = ((a + half + even) >> drop) - ((127 - bias) << bits);
  const uint32_t subnormal = float_to_bits(bits_to_float(a) + aligner) - float_to_bits(aligner);
  const uint32_t code = a < float_to_bits(least_normal) ? subnormal : normal;
  return nan ? 0x7f : sign | code;
}
INLINE uint8_t to_e4m3(float x) { return to_float8(x, 3, 7, 448.0f, 0x1p-6f, 0x1p14f); }
INLINE uint8_t to_e5m2(float x) { return to_float8(x, 2, 15, 57344.0f, 0x1p-14f, 0x1p7f); }

/* Nearest integer, ties to even, of a number of less than 2^22. */
INLINE int32_t to_integer(float x) {
  return (int32_t)float_to_bits(x + 12582912.0f) - 0x4b400000;
}

INLINE uint8_t to_e2m1(float x) {
  const float a = bits_to_float(float_to_bits(x) & 0x7fffffff);
  return (float_to_bits(x) >> 28 & 8) + (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) +
         (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
}

/* Bits of the largest magnitude; those of a NaN are above those of infinity. */
INLINE uint32_t largest_bits(const float *x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t a = float_to_bits(x[i]) & 0x7fffffff;
    largest = a > largest ? a : largest;
  }
  return largest;
}

/* A quotient within +-largest; NaN becomes 0. */
INLINE float quotient(float x, float scale, float largest) {
  const float q = x / scale;
  return q != q ? 0.0f : q > largest ? largest : q < -largest ? -largest : q;
}

/* Codes of `n` numbers of a vector; `scale` is theirs. Two codes a byte: n is even. */
static inline void write_codes(const float *restrict x, int64_t n, int64_t kind, int token_scales,
                               float scale, uint8_t *restrict to) {
  if (kind == E4M3 && token_scales)
    for (int64_t i = 0; i < n; ++i) to[i] = to_e4m3(quotient(x[i], scale, 448.0f));
  else if (kind == E4M3)
    for (int64_t i = 0; i < n; ++i) to[i] = to_e4m3(x[i] / scale);
  else if (kind == E5M2)
    for (int64_t i = 0; i < n; ++i) to[i] = to_e5m2(x[i] / scale);
  else if (kind == INT8)
    for (int64_t i = 0; i < n; ++i) to[i] = to_integer(quotient(x[i], scale, 127.0f));
  else if (kind == INT4)
    for (int64_t i = 0; i < n; i += 2)
      to[i / 2] = (to_integer(quotient(x[i], scale, 7.0f)) + 8) |
                  (to_integer(quotient(x[i + 1], scale, 7.0f)) + 8) << 4;
  else
    for (int64_t i = 0; i < n; i += 2)
      to[i / 2] = to_e2m1(quotient(x[i], scale, 6.0f)) | to_e2m1(quotient(x[i + 1], scale, 6.0f))
                                                             << 4;
}

/* The scale that is stored beside codes of at most `largest_code`. */
INLINE float token_scale(uint32_t largest, int64_t kind) {
  const float largest_code = kind == INT8 ? 127.0f : kind == INT4 ? 7.0f : 448.0f;
  if (largest > 0x7f800000) return bits_to_float(ONE_NAN);
  const float magnitude = bits_to_float(largest), cap = 0x1p127f, floor = 0x1p-126f;
  const float scale = (magnitude < cap ? magnitude : cap) / largest_code;
  return scale > floor ? scale : floor;
}

/* The code of the scale of a block of nvfp4. */
INLINE uint8_t block_scale(uint32_t largest, float scale) {
  const float wanted = bits_to_float(largest) / (6.0f * scale), floor = 0x1p-9f;
  return to_e4m3(wanted < floor ? floor : wanted);
}

#endif
