/* A unit of few rows, in the processor's matrix unit (AMX), from keys and values where they lie.
 *
 * In: a unit of at most SIDE rows whose queries are bfloat16, and K and V that are or that are codes.
 * Out: sums of values, largest scores and denominators, as by `run_tiles`. Never called where
 * `matrix_unit` is 0.
 *
 * Such a unit reads much and computes little with it, so nothing is packed: SIDE rows of a page are a
 * matrix register as they are. A product of the matrix unit sums up pairs of neighbours: of a left
 * side, whose row i holds a[i][0], a[i][1], ..., and a right side, whose row p holds pairs of b,
 *
 *     c[i][n] += sum over p of a[i][2p] * b[2p][n] + a[i][2p+1] * b[2p+1][n].
 *
 * Scores, keys by rows: keys are the left side, PIECE channels at a time. Queries are the right side,
 * pairs of channels, packed once per unit.
 *
 *     keys (SIDE, PIECE)   k0: d0 d1 d2 ... d31     queries (PIECE / 2, rows)   d0 d1 of r0, of r1, ...
 *                          k1: d0 d1 d2 ... d31                                 d2 d3 of r0, of r1, ...
 *
 * Sums, rows by channels: values are the right side, SIDE keys of PIECE channels. A pair there is two
 * channels of one key where it should be one channel of two keys. So each weight is paired with a zero,
 * before or behind it, and two products give the even and the odd channels. That is "lane order", and
 * no value has been moved.
 *
 *     values (SIDE, PIECE)   k0: d0 d1 d2 ... d31   even (rows, SIDE pairs)   w0 0  w1 0  w2 0  ...
 *                            k1: d0 d1 d2 ... d31   odd                       0 w0  0 w1  0 w2  ...
 *
 * Sums are float32; weights are rounded to bfloat16, their denominator is not. Since 0 times an infinity
 * is no number, a value that is infinite or NaN spoils its neighbour, and rows that do not see it: the
 * caller has a split whose sums are not finite done again by `run_matrices`, which tells them apart.
 *
 * Registers: 0 and 1 scores, 2 queries, 3 weights, 4 and 5 even and odd sums, 6 and 7 keys or values. */
#ifndef ATTNKIT_FEW_H
#define ATTNKIT_FEW_H

#include "ahead.h"
#include "matrix.h"

#ifdef ATTNKIT_AMX
#define SIDES (TILE / SIDE) /* of the keys of a tile: two, each with a register of its own */
#define FOUR 4              /* rows whose scores are put together at a time */
#define COPIES 4            /* of a side's rows, where they are not read where they lie */

/* Of raw scores: a row each, but as many as `rows_of_scores` takes at a time. */
INLINE int score_columns(const struct unit *u) { return u->rows < FOUR ? FOUR : u->rows; }

/* Begin to sum: registers of the unit's rows, no sums. */
static void begin_few(const struct job *j, struct unit *u) {
  const int n = u->rows, columns = 4 * score_columns(u);
  const uint8_t rows[8] = {SIDE, SIDE, SIDE, n, n, n, SIDE, SIDE};
  const uint16_t row_bytes[8] = {columns, columns, columns, 64, 64, 64, 64, 64};
  shape_registers(rows, row_bytes);
  memset(u->acc, 0, n * j->v_width * sizeof(float));
}

/* SIDE rows of whole pieces, `stride` bytes apart. */
struct side {
  const char *data;
  int64_t stride;
};

/* Those of a tile's rows that side `g` has, where they lie or as bfloat16 in `buffer`, with zeros up to
 * `width` and for rows that are not among from..to, which exist. */
static struct side side_of_rows(const struct job *j, const char *const *rows, int g, int from, int to,
                                int64_t size, int64_t width, int64_t stride, uint16_t *buffer,
                                struct fetch *fetch) {
  int lo = from - g * SIDE, hi = to - g * SIDE;
  lo = lo < 0 ? 0 : lo > SIDE ? SIDE : lo;
  hi = hi < lo ? lo : hi > SIDE ? SIDE : hi;
  rows += g * SIDE;
  buffer += g * SIDE * width;
  if (j->whole_sides && size == width && lo == 0 && hi == SIDE) return (struct side){rows[0], stride};
  memset(buffer, 0, lo * width * sizeof *buffer);
  for (int t = lo; t < hi; t += SIDE / COPIES) {
    const int n = hi - t < SIDE / COPIES ? hi - t : SIDE / COPIES;
    fetch_some(fetch);
    copy_rows(j, rows + t, n, size, width, buffer + t * width);
  }
  memset(buffer + hi * width, 0, (SIDE - hi) * width * sizeof *buffer);
  return (struct side){(const char *)buffer, width * sizeof *buffer};
}

/* Raw scores of a tile's keys: (SIDES, SIDE, score_columns). */
static void multiply_keys(const struct job *j, struct unit *u, const char *const *keys, int from, int to,
                          struct fetch *fetch) {
  struct side k[SIDES];
  for (int g = 0; g < SIDES; ++g)
    k[g] = side_of_rows(j, keys, g, from, to, j->layer->head_size, j->q_width, j->k.token_stride, u->m.k,
                        fetch);
  __asm__ volatile("" ::: "memory"); /* what is read below has been written: gcc does not know */
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t d = 0; d < j->q_width; d += PIECE) {
    _tile_loadd(2, u->m.q + d * SIDE, 64);
    _tile_loadd(6, k[0].data + 2 * d, k[0].stride);
    _tile_loadd(7, k[1].data + 2 * d, k[1].stride);
    fetch_some(fetch);
    _tile_dpbf16ps(0, 6, 2);
    fetch_some(fetch);
    _tile_dpbf16ps(1, 7, 2);
    fetch_some(fetch);
  }
  const int columns = score_columns(u);
  _tile_stored(0, u->m.scores, 4 * columns);
  _tile_stored(1, u->m.scores + SIDE * columns, 4 * columns);
}

/* Raw scores of the keys of side `g` with FOUR rows from `first` on, a vector each. */
INLINE void rows_of_scores(const struct unit *u, int g, int first, vec *rows) {
  const int columns = score_columns(u);
  const float *raw = u->m.scores + g * SIDE * columns + first;
  if (columns > FOUR) {
    const vec_i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int i = 0; i < FOUR && first + i < columns; ++i)
      rows[i] = (vec)_mm512_i32gather_ps((__m512i)(lane * columns + i), raw, 4);
    return;
  }
  vec key[FOUR], halves[FOUR]; /* four keys by FOUR rows; two rows of eight keys */
  for (int i = 0; i < FOUR; ++i) key[i] = load_vec(raw + i * LANES);
  for (int i = 0; i < 2; ++i) {
    const vec a = key[2 * i], b = key[2 * i + 1];
    halves[i] = SHUFFLE(a, b, 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    halves[2 + i] = SHUFFLE(a, b, 2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
  }
  for (int i = 0; i < 2; ++i) {
    rows[2 * i] = LOW_8(halves[2 * i], halves[2 * i + 1]);
    rows[2 * i + 1] = HIGH_8(halves[2 * i], halves[2 * i + 1]);
  }
}

/* Turn raw scores `x` of row `r` with the keys of side `g` of the tile at `base` into scores; those it
 * does not see are -inf. */
INLINE vec score_side(const struct job *j, const struct unit *u, int64_t base, int g, int from, int to,
                      int all_seen, int r, vec x) {
  const struct layer *l = j->layer;
  const float log2e = 1.44269504f, cap = l->soft_cap;
  const vec_i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vec_i in_tile = lane + g * SIDE, key = in_tile + (int32_t)base;
  x *= cap != 0.0f ? u->score_scale / cap : u->score_scale * log2e;
  if (j->codes && j->codes->token_scales) x *= load_vec(u->m.k_scales + g * SIDE);
  if (cap != 0.0f) x = tanh_safe(x) * (cap * log2e);
  if (l->slopes) {
    vec behind = __builtin_convertvector(load_ints(u->lane.pos + r * SIDE) - key, vec);
    if (l->alibi_sqrt) behind = (vec)_mm512_sqrt_ps((__m512)larger(behind, splat(0.0f)));
    x -= load_vec(u->lane.slope + r * SIDE) * behind;
  }
  if (all_seen) return x;
  const vec_i lo = load_ints(u->lane.lo + r * SIDE), hi = load_ints(u->lane.hi + r * SIDE);
  return pick((key >= lo) & (key < hi) & (in_tile >= from) & (in_tile < to), x, splat(-INFINITY));
}

/* Turn raw scores of a tile's keys into weights, the left sides (SIDES, 2, SIDE, SIDE pairs), and
 * rescale earlier sums. As in `weigh_keys`, what is subtracted stays until a score is LAG larger. */
static void weigh_tile(const struct job *j, struct unit *u, int64_t base, int from, int to, int all_seen,
                       struct fetch *fetch) {
  const int token_scales = j->codes && j->codes->token_scales;
  vec raw[SIDES][FOUR];
  for (int r = 0; r < u->rows; ++r) {
    vec s[SIDES], best = splat(-INFINITY);
    for (int g = 0; g < SIDES && r % FOUR == 0; ++g) rows_of_scores(u, g, r, raw[g]);
    for (int g = 0; g < SIDES; ++g) {
      s[g] = score_side(j, u, base, g, from, to, all_seen, r, raw[g][r % FOUR]);
      best = larger(s[g], best);
    }
    float *largest = u->lane.largest + r * SIDE, *denominator = u->lane.denominator + r * SIDE;
    vec top = load_vec(largest), sum = load_vec(denominator);
    if (any_lane((vec_u)(best > top + LAG))) {
      const vec here = splat(_mm512_reduce_max_ps((__m512)best));
      const vec factor = exp2_nonpositive(top - here);
      float *acc = u->acc + r * j->v_width;
      for (int64_t d = 0; d < j->v_width; d += LANES) store_vec(acc + d, load_vec(acc + d) * factor);
      sum *= factor;
      top = here;
      store_vec(largest, top);
    }
    const vec zero = pick(top == -INFINITY, splat(0.0f), top);
    for (int g = 0; g < SIDES; ++g) {
      fetch_some(fetch);
      vec p = exp2_nonpositive(s[g] - zero);
      sum += p;
      if (token_scales) p = pick(s[g] == -INFINITY, p, p * load_vec(u->m.v_scales + g * SIDE));
      const __m512i w = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)p));
      uint16_t *left = u->m.weights + (2 * g * SIDE + r) * PIECE;
      _mm512_storeu_si512(left, w);
      _mm512_storeu_si512(left + SIDE * PIECE, _mm512_slli_epi32(w, 16));
    }
    store_vec(denominator, sum);
  }
}

/* Add a tile's weighted values. */
static void multiply_values(const struct job *j, struct unit *u, const char *const *values, int from,
                            int to, struct fetch *fetch) {
  const uint16_t *weights = u->m.weights;
  struct side v[SIDES];
  for (int g = 0; g < SIDES; ++g)
    v[g] = side_of_rows(j, values, g, from, to, j->layer->head_size_v, j->v_width, j->v.token_stride,
                        u->m.rows, fetch);
  __asm__ volatile("" ::: "memory");
  for (int64_t d = 0; d < j->v_width; d += PIECE) {
    _tile_loadd(4, u->acc + d, 4 * j->v_width);
    _tile_loadd(5, u->acc + d + LANES, 4 * j->v_width);
    _tile_loadd(6, v[0].data + 2 * d, v[0].stride);
    _tile_loadd(3, weights, 64);
    _tile_dpbf16ps(4, 3, 6);
    _tile_loadd(3, weights + SIDE * PIECE, 64);
    _tile_dpbf16ps(5, 3, 6);
    fetch_some(fetch);
    _tile_loadd(7, v[1].data + 2 * d, v[1].stride);
    _tile_loadd(3, weights + 2 * SIDE * PIECE, 64);
    fetch_some(fetch);
    _tile_dpbf16ps(4, 3, 7);
    _tile_loadd(3, weights + 3 * SIDE * PIECE, 64);
    fetch_some(fetch);
    _tile_dpbf16ps(5, 3, 7);
    _tile_stored(4, u->acc + d, 4 * j->v_width);
    _tile_stored(5, u->acc + d + LANES, 4 * j->v_width);
  }
}

/* Attend from a unit's rows to keys start..end of its keys, which go on to `unit_end`. */
static void run_few(const struct job *j, struct unit *u, int64_t start, int64_t end, int64_t unit_end) {
  const struct layer *l = j->layer;
  const int parts = 3 * (j->q_width + j->v_width) / PIECE + SIDES * u->rows +
                    (j->whole_sides ? 0 : 2 * SIDES * COPIES);
  struct span by_all = u->keys[0];
  for (int r = 1; r < u->rows; ++r) {
    if (u->keys[r].lo > by_all.lo) by_all.lo = u->keys[r].lo;
    if (u->keys[r].hi < by_all.hi) by_all.hi = u->keys[r].hi;
  }
  struct ahead ahead;
  ahead.known = start;
  for (int64_t base = start - start % TILE; base < end; base += TILE) {
    const int from = start > base ? start - base : 0, to = end - base < TILE ? end - base : TILE;
    const int whole = from == 0 && to == TILE;
    look_ahead(j, u, &ahead, base, unit_end);
    const struct located *tile = tile_at(&ahead, base);
    struct fetch fetch = fetch_rows(j, &ahead, base + TILE, unit_end, parts);
    if (j->codes && j->codes->token_scales)
      for (int t = from; t < to; ++t) {
        memcpy(u->m.k_scales + t, tile->keys[t] + code_bytes(j->codes->kind, l->head_size), 4);
        memcpy(u->m.v_scales + t, tile->values[t] + code_bytes(j->codes->kind, l->head_size_v), 4);
      }
    multiply_keys(j, u, tile->keys, from, to, &fetch);
    weigh_tile(j, u, base, from, to, whole && by_all.lo <= base && base + TILE <= by_all.hi, &fetch);
    multiply_values(j, u, tile->values, from, to, &fetch);
  }
}

/* Whether all sums of a unit's rows are numbers. */
static int are_finite(const struct job *j, const struct unit *u) {
  vec_u found = {0};
  for (int64_t i = 0; i < u->rows * j->v_width; i += LANES)
    found |= (vec_u)(((vec_u)load_vec(u->acc + i) & 0x7f800000u) == 0x7f800000u);
  return !any_lane(found);
}

#else
static inline void begin_few(const struct job *j, struct unit *u) { (void)j, (void)u; }
static inline void run_few(const struct job *j, struct unit *u, int64_t start, int64_t end,
                           int64_t unit_end) {
  (void)j, (void)u, (void)start, (void)end, (void)unit_end;
}
static inline int are_finite(const struct job *j, const struct unit *u) { return (void)j, (void)u, 1; }
#endif

#endif
