/* Products of rows with weights in codes of 4 or 8 bits, y = x W^T + b, in the processor's dot products
 * of bytes (AVX-512 VNNI).
 *
 * In: rows of any dtype, and weights of blocks of LANES columns of the result after each other, in each
 * the groups of GROUP channels after each other: their codes, fours of channels of a column innermost,
 * then for each column a scale and the number that code 0 stands for, in bfloat16 side by side. With 4
 * bits a byte holds channel i of eight in its low half and channel i + 4 in its high one. Out: rows of
 * the same dtype. `launch.py` is the only caller.
 *
 * How: each group of a row of x is rounded to codes of its own, 127 for its largest magnitude, so that
 * sums over a group are exact integers; groups are summed up in float32, in order. A weight is read once
 * for up to ROWS rows, from one end to the other. A row's bits do not depend on the other rows. */
#include <stdlib.h>

#include "call.h"
#include "vector.h"

#define GROUP 32
#define AHEAD 4096 /* bytes between what is multiplied and what is fetched: without, 0.7 of the speed */
#define ROWS 4 /* with as many sums as registers hold beside the codes of a group */

struct coded {
  const uint8_t *codes;
  const float *bias; /* may be NULL */
  int64_t bits, columns, channels;
};

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define ATTNKIT_CODED

struct coded_product {
  const struct coded *const *weights;
  char *const *y;
  const int8_t *x;            /* codes of rows */
  const float *scales, *sums; /* of their groups; sums of numbers as the codes give them */
  int64_t rows, num_blocks, num_threads, next_thread;
  int dtype;
};

/* Round a group of x to codes. NaN becomes a scale of NaN. */
static void encode_group(const char *x, int dtype, int8_t *codes, float *scale, float *sum) {
  __m512 v[2];
  float numbers[GROUP];
  if (dtype == F32) memcpy(numbers, x, sizeof numbers);
  else
    for (int i = 0; i < GROUP; ++i) numbers[i] = load_scalar(x, i, dtype);
  for (int i = 0; i < 2; ++i) v[i] = _mm512_loadu_ps(numbers + i * LANES);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const float largest = bits_to_float(_mm512_reduce_max_epu32(
      _mm512_max_epu32(_mm512_and_si512((__m512i)v[0], magnitude),
                       _mm512_and_si512((__m512i)v[1], magnitude))));
  *scale = largest / 127 < 0x1p-126f ? 0x1p-126f : largest / 127;
  const __m512 inverse = _mm512_set1_ps(1 / *scale);
  __m512i n[2];
  for (int i = 0; i < 2; ++i) {
    n[i] = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
    _mm_storeu_si128((__m128i *)(codes + i * LANES), _mm512_cvtsepi32_epi8(n[i]));
  }
  *sum = *scale * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(n[0], n[1]));
}

/* Columns of a block for `rows` rows from `row` on, `bits` wide; both are known when this is inlined. */
INLINE void multiply_block(const struct coded_product *p, const struct coded *w, char *y,
                           int64_t block, int64_t row, const int rows, const int bits) {
  const int64_t groups = w->channels / GROUP, bytes = LANES * GROUP / 8 * bits;
  const uint8_t *codes = w->codes + block * groups * (bytes + 4 * LANES);
  const int8_t *x = p->x + row * w->channels;
  const float *scales = p->scales + row * groups, *sums = p->sums + row * groups;
  const __m512i low = _mm512_set1_epi8(15);
  const __m512 bias = w->bias ? _mm512_loadu_ps(w->bias + block * LANES) : _mm512_setzero_ps();
  __m512 total[ROWS];
  for (int r = 0; r < rows; ++r) total[r] = bias;
  for (int64_t g = 0; g < groups; ++g, x += GROUP, codes += bytes + 4 * LANES) {
    __m512i c[GROUP / 4];
    UNROLL
    for (int i = 0; i < GROUP / 4; ++i) {
      const __m512i v = _mm512_loadu_si512(codes + (bits == 4 ? i / 2 : i) * 64);
      if (bits == 8) c[i] = v;
      else c[i] = _mm512_and_si512(i % 2 ? _mm512_srli_epi32(v, 4) : v, low);
    }
    for (int64_t i = 0; i < bytes + 64; i += 64) __builtin_prefetch(codes + AHEAD + i, 0, 2);
    const __m512i both = _mm512_loadu_si512(codes + bytes);
    const __m512 scale = (__m512)_mm512_slli_epi32(both, 16);
    const __m512 least = (__m512)_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000));
    UNROLL
    for (int r = 0; r < rows; ++r) {
      __m512i dot = _mm512_setzero_si512();
      UNROLL
      for (int i = 0; i < GROUP / 4; ++i) {
        int32_t four;
        memcpy(&four, x + r * w->channels + i * 4, sizeof four);
        dot = _mm512_dpbusd_epi32(dot, c[i], _mm512_set1_epi32(four));
      }
      const __m512 scaled = _mm512_mul_ps(scale, _mm512_set1_ps(scales[r * groups + g]));
      total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scaled, total[r]);
      total[r] = _mm512_fmadd_ps(least, _mm512_set1_ps(sums[r * groups + g]), total[r]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    float out[LANES];
    _mm512_storeu_ps(out, total[r]);
    store_row(out, 1.0f, F32, LANES, p->dtype,
              y + ((row + r) * w->columns + block * LANES) * size_of(p->dtype));
  }
}

static void multiply_rows(const struct coded_product *p, const struct coded *w, char *y,
                          int64_t block) {
  int64_t row = 0;
  for (; row + ROWS <= p->rows; row += ROWS)
    if (w->bits == 4) multiply_block(p, w, y, block, row, ROWS, 4);
    else multiply_block(p, w, y, block, row, ROWS, 8);
  for (; row < p->rows; ++row)
    if (w->bits == 4) multiply_block(p, w, y, block, row, 1, 4);
    else multiply_block(p, w, y, block, row, 1, 8);
}

static void multiply_share(void *argument) {
  struct coded_product *p = argument;
  const int64_t thread = __atomic_fetch_add(&p->next_thread, 1, __ATOMIC_RELAXED);
  const int64_t end = p->num_blocks * (thread + 1) / p->num_threads;
  int64_t which = 0, before = 0; /* the weight of a block, and the blocks of those before it */
  for (int64_t i = p->num_blocks * thread / p->num_threads; i < end; ++i) {
    while (i - before >= p->weights[which]->columns / LANES)
      before += p->weights[which++]->columns / LANES;
    multiply_rows(p, p->weights[which], p->y[which], i - before);
  }
}
#endif

/* Whether this processor has what the product needs. */
int64_t attnkit_has_code_products(void) {
#ifdef ATTNKIT_CODED
  return 1;
#else
  return 0;
#endif
}

/* The products of `x`, which has `rows` dense rows of channels, with `count` weights of as many channels;
 * `y` have dense rows of columns. To be called where there are such products. */
int64_t attnkit_multiply_codes(const struct coded *const *weights, char *const *y, int64_t count,
                               const char *x, int64_t dtype, int64_t rows, int64_t num_threads,
                               parallel_fn parallel) {
#ifdef ATTNKIT_CODED
  if (!rows) return OK;
  const int64_t channels = weights[0]->channels, groups = rows * channels / GROUP;
  float *scales = malloc(groups * (2 * sizeof(float) + GROUP));
  if (!scales) return NO_MEMORY;
  float *sums = scales + groups;
  int8_t *codes = (int8_t *)(sums + groups);
  for (int64_t g = 0; g < groups; ++g)
    encode_group(x + g * GROUP * size_of(dtype), dtype, codes + g * GROUP, scales + g, sums + g);
  struct coded_product p = {weights, y, codes, scales, sums, rows, 0, num_threads, 0, dtype};
  for (int64_t i = 0; i < count; ++i) p.num_blocks += weights[i]->columns / LANES;
  /* Waking the other threads costs as much as this many products. */
  if (!parallel || p.num_blocks * LANES * channels * rows < 100000) p.num_threads = 1;
  if (p.num_threads > 1) parallel(multiply_share, &p, p.num_threads, 0);
  else multiply_share(&p);
  free(scales);
#else
  (void)weights, (void)y, (void)count, (void)x, (void)dtype, (void)rows, (void)num_threads;
  (void)parallel;
#endif
  return OK;
}
