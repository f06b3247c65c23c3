/* Codes of quantised caches: bytes to numbers where keys and values are read, numbers to bytes where
 * they are written. `kvcache/formats.py` says what the bytes are; every code written here equals
 * that of `kvcache/codecs.py`, and every code read is the same number.
 *
 * Numbers are read as bfloat16, exactly: no code has more than eight significant bits, and the
 * product of a 4-bit code and its block's scale has six. */
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

/* Both are branch-free so that loops over them vectorise. */
INLINE uint16_t bf16_of_e4m3(uint8_t code) {
  const uint16_t m = code & 0x7f;
  uint16_t subnormal = m > 1 ? 0x3b00 + (m << 6) : m ? 0x3b00 : 0; /* m / 512 */
  subnormal = m > 3 ? 0x3b80 + (m << 5) : subnormal;
  uint16_t h = m > 7 ? 0x3c00 + (m << 4) : subnormal;
  h = m == 0x7f ? 0x7fc0 : h;
  return h | (code & 0x80) << 8;
}

INLINE uint16_t bf16_of_e5m2(uint8_t code) {
  const uint16_t m = code & 0x7f;
  const uint16_t subnormal = m == 3 ? 0x3840 : m == 2 ? 0x3800 : m ? 0x3780 : 0; /* m / 65536 */
  uint16_t h = m > 3 ? 0x3800 + (m << 5) : subnormal;
  h = m >= 0x7c ? 0x7f80 + ((m & 3) << 5) : h;
  return h | (code & 0x80) << 8;
}

static const float e2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

INLINE uint16_t bf16_of(float exact) { return float_to_bits(exact) >> 16; }

/* A vector of `size` codes as bfloat16, zeros up to `width`. */
static inline void read_codes(const uint8_t *restrict from, int64_t kind, int64_t size,
                              int64_t width, uint16_t *restrict to) {
  if (kind == E4M3)
    for (int64_t i = 0; i < size; ++i) to[i] = bf16_of_e4m3(from[i]);
  else if (kind == E5M2)
    for (int64_t i = 0; i < size; ++i) to[i] = bf16_of_e5m2(from[i]);
  else if (kind == INT8)
    for (int64_t i = 0; i < size; ++i) to[i] = bf16_of((int8_t)from[i]);
  else if (kind == INT4)
    for (int64_t i = 0; i < size / 2; ++i) {
      to[2 * i] = bf16_of((from[i] & 15) - 8);
      to[2 * i + 1] = bf16_of((from[i] >> 4) - 8);
    }
  else
    for (int64_t b = 0; b < size / BLOCK; ++b) {
      const float scale = from_bf16(bf16_of_e4m3(from[size / 2 + b]));
      for (int64_t i = b * BLOCK / 2; i < (b + 1) * BLOCK / 2; ++i) {
        to[2 * i] = bf16_of(e2m1[from[i] & 15] * scale);
        to[2 * i + 1] = bf16_of(e2m1[from[i] >> 4] * scale);
      }
    }
  for (int64_t i = size; i < width; ++i) to[i] = 0;
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
