/* A unit of many rows, in the processor's matrix unit (AMX): products of whole matrices of bfloat16.
 *
 * In: a unit whose queries are bfloat16, and K and V that are or that are codes. Out: the same sums,
 * largest scores and denominators as by `run_tiles`. Never called where `matrix_unit` is 0.
 *
 * How: keys are the rows of a product's left side and queries the columns of its right one, so that a
 * vector holds one key's scores with SIDE queries, and the weights come out as the right side of the
 * second product, whose left side are values with channels for rows. Sums are float32; weights are
 * rounded to bfloat16, their denominator is not. */
#ifndef ATTNKIT_MATRIX_H
#define ATTNKIT_MATRIX_H

#include "amx.h"
#include "unit.h"

#ifdef ATTNKIT_AMX
#define HALVES 512       /* bfloat16 numbers of a matrix register */
#define MATRIX_KEYS 256  /* keys whose values are summed at a time */
#define LAG 8.0f         /* of what is subtracted behind the largest score, in base 2 */
#define PAIR (2 * SIDE)  /* rows of a unit that are multiplied at a time */

static int64_t matrix_floats(const struct job *j) {
  const int64_t widest = j->q_width > j->v_width ? j->q_width : j->v_width;
  return j->many_rows * (j->q_width / 2 + j->v_width) +
         MATRIX_KEYS * ((j->q_width + j->v_width + widest) / 2 + 3 * SIDE + 2);
}

/* Where the matrices of a thread lie in its memory from `at` on. */
static void place_matrices(const struct job *j, struct unit *u, float *at) {
  struct matrices *m = &u->m;
  m->acc = at, at += j->many_rows * j->v_width;
  m->scores = at, at += 2 * MATRIX_KEYS * SIDE;
  m->k_scales = at, at += MATRIX_KEYS;
  m->v_scales = at, at += MATRIX_KEYS;
  m->q = (uint16_t *)at;
  m->k = m->q + j->many_rows * j->q_width;
  m->v = m->k + MATRIX_KEYS * j->q_width;
  m->weights = m->v + MATRIX_KEYS * j->v_width;
  m->rows = m->weights + 2 * MATRIX_KEYS * SIDE;
}
static void end_matrices(void) { _tile_release(); }

/* Two left sides of SIDE rows, `a` and the one `a_next` numbers behind it, times two right sides: c0 and
 * c1 get the two SIDE x SIDE products with b0 and with b1, or those are added. `steps` registers make a
 * side. */
static void multiply(const uint16_t *a, int64_t a_next, const uint16_t *b0, const uint16_t *b1,
                     float *c0, float *c1, int64_t steps, int add) {
  const int64_t line = 64;
  __asm__ volatile("" ::: "memory"); /* what is read below has been written: gcc does not know */
  if (add) {
    _tile_loadd(0, c0, line);
    _tile_loadd(1, c0 + SIDE * SIDE, line);
    _tile_loadd(2, c1, line);
    _tile_loadd(3, c1 + SIDE * SIDE, line);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(4, a + s * HALVES, line);
    _tile_loadd(6, b0 + s * HALVES, line);
    _tile_loadd(5, a + a_next + s * HALVES, line);
    _tile_loadd(7, b1 + s * HALVES, line);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c0, line);
  _tile_stored(1, c0 + SIDE * SIDE, line);
  _tile_stored(2, c1, line);
  _tile_stored(3, c1 + SIDE * SIDE, line);
}

/* One step of `transpose`: blocks of `side` lanes off the diagonal change places. */
#define EXCHANGE(side, LOW, HIGH)                 \
  UNROLL                                          \
  for (int i = 0; i < SIDE; ++i)                  \
    if (!(i & side)) {                            \
      const vec_u a = v[i], b = v[i + side];      \
      v[i] = LOW(a, b);                           \
      v[i + side] = HIGH(a, b);                   \
    }
#define LOW_1(a, b) SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define HIGH_1(a, b) SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#define LOW_2(a, b) SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH_2(a, b) SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOW_4(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define HIGH_4(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define LOW_8(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HIGH_8(a, b) SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)

INLINE void transpose(vec_u *v) {
  EXCHANGE(1, LOW_1, HIGH_1)
  EXCHANGE(2, LOW_2, HIGH_2)
  EXCHANGE(4, LOW_4, HIGH_4)
  EXCHANGE(8, LOW_8, HIGH_8)
}

INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* The unit's queries as right sides; rows up to a whole side, or pair of them, are zeros. */
static void pack_queries(const struct job *j, struct unit *u) {
  const int num_rows = u->path == FEW ? SIDE : round_up(u->rows, PAIR);
  const int64_t group = j->layer->num_heads / j->layer->num_kv_heads;
  const int64_t first_token = j->batch->query_start_loc[u->req], size = j->layer->head_size;
  uint16_t *to = u->m.q;
  for (int first = 0; first < num_rows; first += SIDE) {
    const char *rows[SIDE] = {0};
    for (int r = first; r < first + SIDE && r < u->rows; ++r)
      rows[r - first] = j->q.data + (first_token + (u->first_row + r) / group) * j->q.token_stride +
                        u->head[r] * j->q.head_stride;
    for (int64_t d = 0; d < j->q_width; d += PIECE, to += HALVES) {
      vec_u v[SIDE];
      for (int i = 0; i < SIDE; ++i) {
        v[i] = (vec_u){0};
        if (!rows[i]) continue;
        if (size - d >= PIECE) memcpy(&v[i], rows[i] + 2 * d, sizeof v[i]);
        else memcpy(&v[i], rows[i] + 2 * d, 2 * (size - d));
      }
      transpose(v);
      memcpy(to, v, sizeof v);
    }
  }
}

/* Rows as whole pieces of bfloat16, one after the other, zeros up to `width`. */
static void copy_rows(const struct job *j, const char *const *rows, int n, int64_t size, int64_t width,
                      uint16_t *to) {
  if (j->codes) read_codes(rows, n, j->codes->kind, size, width, to);
  else
    for (int t = 0; t < n; ++t, to += width) {
      memcpy(to, rows[t], 2 * size);
      for (int64_t d = size; d < width; ++d) to[d] = 0;
    }
}

/* Begin to sum: eight registers of full size, no sums of rows up to a whole pair. */
static void begin_many(const struct job *j, struct unit *u) {
  const int64_t rows = round_up(u->rows, PAIR);
  begin_registers(SIDE);
  memset(u->m.acc, 0, rows * j->v_width * sizeof(float));
}

/* Make rows from..to of a tile whole pieces of bfloat16: what is not is copied to `buffer`. */
static void complete_rows(const struct job *j, const char **rows, int from, int to, int64_t size,
                          int64_t width, uint16_t *buffer) {
  if (!j->codes && size == width) return;
  copy_rows(j, rows + from, to - from, size, width, buffer);
  for (int t = from; t < to; ++t, buffer += width) rows[t] = (const char *)buffer;
}

/* Lanes of a row that hold an infinity or a NaN. */
INLINE vec_u wild_lanes(const char *row, int64_t width) {
  vec_u found = {0};
  for (int64_t d = 0; d < width; d += PIECE) {
    vec_u x;
    memcpy(&x, row + 2 * d, sizeof x);
    found |= (vec_u)((x & 0x7f80u) == 0x7f80u) | (vec_u)((x & 0x7f800000u) == 0x7f800000u);
  }
  return found;
}
INLINE int any_lane(vec_u v) { return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0; }

/* Keys from..to of the tile at `base` as left sides. Values that are infinite or NaN are left out,
 * since a weight of 0 does not hide them: `wild` gets their rows, NULL for the others; returns whether
 * there are any. */
static int pack_keys(const struct job *j, struct unit *u, int64_t base, int from, int to,
                     const char **wild) {
  const struct layer *l = j->layer;
  const char *keys[MATRIX_KEYS] = {0}, *values[MATRIX_KEYS] = {0};
  for (int t = from - from % TILE; t < to; t += TILE)
    locate_rows(j, u, base + t, from > t ? from - t : 0, to - t < TILE ? to - t : TILE, keys + t,
                values + t);
  if (j->codes && j->codes->token_scales)
    for (int t = from; t < to; ++t) {
      memcpy(u->m.k_scales + t, keys[t] + code_bytes(j->codes->kind, l->head_size), 4);
      memcpy(u->m.v_scales + t, values[t] + code_bytes(j->codes->kind, l->head_size_v), 4);
    }
  complete_rows(j, keys, from, to, l->head_size, j->q_width, u->m.rows);
  const int end = round_up(to, PAIR);
  for (int t = 0; t < end; ++t)
    for (int64_t d = 0; d < j->q_width; d += PIECE) {
      vec_u x = {0};
      if (t >= from && t < to) memcpy(&x, keys[t] + 2 * d, sizeof x);
      memcpy(u->m.k + (t / SIDE * j->q_width + d) * SIDE + t % SIDE * PIECE, &x, sizeof x);
    }
  complete_rows(j, values, from, to, l->head_size_v, j->v_width, u->m.rows);
  vec_u found = {0};
  for (int t = from; t < to; ++t) found |= wild_lanes(values[t], j->v_width);
  const int any_wild = any_lane(found);
  for (int t = 0; t < end; ++t) {
    const int exists = t >= from && t < to;
    wild[t] = exists && any_wild && any_lane(wild_lanes(values[t], j->v_width)) ? values[t] : NULL;
    if (!exists || wild[t]) values[t] = NULL;
  }
  for (int first = 0; first < end; first += PAIR)
    for (int64_t d = 0; d < j->v_width; d += PIECE) {
      vec_u even[SIDE], odd[SIDE];
      for (int i = 0; i < SIDE; ++i) {
        const char *const *row = values + first + 2 * i;
        vec_u a = {0}, b = {0};
        if (row[0]) memcpy(&a, row[0] + 2 * d, sizeof a);
        if (row[1]) memcpy(&b, row[1] + 2 * d, sizeof b);
        even[i] = (a & 0xffffu) | b << 16;
        odd[i] = a >> 16 | (b & 0xffff0000u);
      }
      transpose(even);
      transpose(odd);
      uint16_t *at = u->m.v + d * MATRIX_KEYS + first * SIDE;
      memcpy(at, even, sizeof even);
      memcpy(at + SIDE * MATRIX_KEYS, odd, sizeof odd);
    }
  return any_wild;
}

/* Turn products of SIDE rows with keys from..to of a tile into scores. */
static void score_keys(const struct job *j, const struct unit *u, int64_t base, int from, int to,
                       int first, float *scores) {
  const struct layer *l = j->layer;
  const float log2e = 1.44269504f, cap = l->soft_cap;
  const float scale = cap != 0.0f ? u->score_scale / cap : u->score_scale * log2e;
  const vec_i pos = load_ints(u->lane.pos + first);
  const vec slope = load_vec(u->lane.slope + first);
  for (int t = from; t < to; ++t) {
    vec x = load_vec(scores + t * SIDE) * scale;
    if (j->codes && j->codes->token_scales) x *= u->m.k_scales[t];
    if (cap != 0.0f) x = tanh_safe(x) * (cap * log2e);
    if (l->slopes) {
      vec behind = __builtin_convertvector(pos - ((int32_t)base + t), vec);
      if (l->alibi_sqrt) behind = (vec)_mm512_sqrt_ps((__m512)larger(behind, splat(0.0f)));
      x -= slope * behind;
    }
    store_vec(scores + t * SIDE, x);
  }
}

/* Weights of two neighbouring keys, rounded to nearest even. */
INLINE void store_weights(uint16_t *p, vec even, vec odd) {
  const __m512i by_key = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  const __m512i order = (__m512i)(vec_u){0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005,
                                         0x160006, 0x170007, 0x180008, 0x190009, 0x1a000a, 0x1b000b,
                                         0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(order, by_key));
}

/* Weights 2^(score - zero) of keys, times their scales if those are not NULL; returns sums without. A
 * scale that is NaN reaches only rows that see its key. */
INLINE vec weigh(const float *scores, int num_keys, const vec zero, const float *scales,
                 uint16_t *weights) {
  vec sums[2] = {{0}, {0}}, p[2];
  for (int t = 0; t < num_keys; t += 2) {
    UNROLL
    for (int i = 0; i < 2; ++i) {
      const vec x = load_vec(scores + (t + i) * SIDE);
      p[i] = exp2_nonpositive(x - zero);
      sums[i] += p[i];
      if (scales) p[i] = pick(x == -INFINITY, p[i], p[i] * scales[t + i]);
    }
    store_weights(weights + t * SIDE, p[0], p[1]);
  }
  return sums[0] + sums[1];
}

/* Turn scores of SIDE rows with keys from..to of a tile into weights, and rescale their earlier sums;
 * keys up to a whole pair get weight 0. */
static void weigh_keys(const struct job *j, struct unit *u, int64_t base, int from, int to,
                       int first, float *scores, uint16_t *weights) {
  const int token_scales = j->codes && j->codes->token_scales, end = round_up(to, PAIR);
  float scale = u->score_scale * 1.44269504f;
  if (token_scales || j->layer->soft_cap != 0.0f || j->layer->slopes) {
    score_keys(j, u, base, from, to, first, scores);
    scale = 1.0f;
  }
  const vec_i lo = load_ints(u->lane.lo + first) - (int32_t)base;
  const vec_i hi = load_ints(u->lane.hi + first) - (int32_t)base;
  vec best[4]; /* of every fourth key: one after another would wait for each other */
  for (int i = 0; i < 4; ++i) best[i] = splat(-INFINITY);
  if (to < end || from > 0 || any_lane((vec_u)(lo > 0)) || any_lane((vec_u)(hi < to)))
    for (int t = 0; t < end; ++t) {
      const vec_i seen = (t >= lo) & (t < hi) & (t >= from && t < to ? -1 : 0);
      const vec x = pick(seen, load_vec(scores + t * SIDE) * scale, splat(-INFINITY));
      best[0] = larger(x, best[0]);
      store_vec(scores + t * SIDE, x);
    }
  else
    for (int t = 0; t < end; t += 4) {
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const vec x = load_vec(scores + (t + i) * SIDE) * scale;
        best[i] = (vec)_mm512_max_ps((__m512)x, (__m512)best[i]);
        store_vec(scores + (t + i) * SIDE, x);
      }
    }
  best[0] = larger(larger(best[0], best[1]), larger(best[2], best[3]));
  /* What is subtracted need not be the largest score: it stays until one is LAG larger, so that sums
   * are seldom rescaled. Before a row has seen a key it is 0: -inf - -inf would be NaN. */
  const vec before = load_vec(u->lane.largest + first);
  const vec top = pick(best[0] > before + LAG, best[0], before);
  const vec zero = pick(top == -INFINITY, splat(0.0f), top);
  const vec factor = exp2_nonpositive(before - zero);
  vec sum = load_vec(u->lane.denominator + first) * factor;
  sum += token_scales ? weigh(scores, end, zero, u->m.v_scales, weights)
                      : weigh(scores, end, zero, NULL, weights);
  store_vec(u->lane.largest + first, top);
  store_vec(u->lane.denominator + first, sum);
  float *acc = u->m.acc + first * j->v_width;
  if (any_lane((vec_u)(factor != 1.0f)))
    for (int64_t d = 0; d < j->v_width; ++d)
      store_vec(acc + d * SIDE, load_vec(acc + d * SIDE) * factor);
}

/* Add the values of one key that has infinite or NaN ones to those of SIDE rows that see it. */
static void add_wild(const struct job *j, struct unit *u, int64_t key, int t, int first,
                     const char *row, const uint16_t *weights) {
  float *acc = u->m.acc + first * j->v_width;
  for (int i = 0; i < SIDE; ++i) {
    if (key < u->lane.lo[first + i] || key >= u->lane.hi[first + i]) continue;
    const float weight = from_bf16(weights[(t / 2 * SIDE + i) * 2 + t % 2]);
    for (int64_t d = 0; d < j->v_width; ++d)
      acc[lane_index(d, BF16) * SIDE + i] += weight * load_scalar(row, d, BF16);
  }
}

/* Attend from a unit's rows to keys start..end. */
static void run_matrices(const struct job *j, struct unit *u, int64_t start,
                         int64_t end) {
  const char *wild[MATRIX_KEYS];
  for (int64_t base = start - start % MATRIX_KEYS; base < end; base += MATRIX_KEYS) {
    const int from = start > base ? start - base : 0;
    const int to = end - base < MATRIX_KEYS ? end - base : MATRIX_KEYS;
    const int any_wild = pack_keys(j, u, base, from, to, wild);
    for (int first = 0; first < u->rows; first += PAIR) {
      const struct span seen = keys_of_rows(u, base, from, to, first, PAIR);
      if (seen.lo >= seen.hi) continue;
      const int count = round_up(seen.hi, PAIR);
      const int64_t next = MATRIX_KEYS * SIDE;
      const uint16_t *q = u->m.q + first * j->q_width;
      float *acc = u->m.acc + first * j->v_width;
      for (int t = 0; t < count; t += PAIR)
        multiply(u->m.k + t * j->q_width, SIDE * j->q_width, q, q + SIDE * j->q_width,
                 u->m.scores + t * SIDE, u->m.scores + next + t * SIDE, j->q_width / PIECE, 0);
      for (int i = 0; i < 2; ++i)
        weigh_keys(j, u, base, seen.lo, seen.hi, first + i * SIDE, u->m.scores + i * next,
                   u->m.weights + i * next);
      for (int64_t d = 0; d < j->v_width; d += PAIR)
        multiply(u->m.v + d * MATRIX_KEYS, next, u->m.weights, u->m.weights + next, acc + d * SIDE,
                 acc + (j->v_width + d) * SIDE, count / PIECE, 1);
      for (int t = 0; any_wild && t < to; ++t)
        for (int i = 0; wild[t] && i < 2; ++i)
          add_wild(j, u, base + t, t, first + i * SIDE, wild[t], u->m.weights + i * next);
    }
  }
}

/* Put the sums where those of `run_tiles` stand. */
static void unpack_sums(const struct job *j, struct unit *u) {
  for (int first = 0; first < u->rows; first += SIDE)
    for (int64_t d = 0; d < j->v_width; d += SIDE) {
      vec_u v[SIDE];
      memcpy(v, u->m.acc + first * j->v_width + d * SIDE, sizeof v);
      transpose(v);
      for (int i = 0; i < SIDE && first + i < u->rows; ++i)
        memcpy(u->acc + (first + i) * j->v_width + d, &v[i], sizeof v[i]);
    }
}

#else
static inline int64_t matrix_floats(const struct job *j) { return (void)j, 0; }
static inline void place_matrices(const struct job *j, struct unit *u, float *at) {
  (void)j, (void)u, (void)at;
}
static inline void end_matrices(void) {}
static inline void pack_queries(const struct job *j, struct unit *u) { (void)j, (void)u; }
static inline void begin_many(const struct job *j, struct unit *u) { (void)j, (void)u; }
static inline void run_matrices(const struct job *j, struct unit *u, int64_t start, int64_t end) {
  (void)j, (void)u, (void)start, (void)end;
}
static inline void unpack_sums(const struct job *j, struct unit *u) { (void)j, (void)u; }
#endif

#endif
