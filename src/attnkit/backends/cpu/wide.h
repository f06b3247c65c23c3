/* A unit of many rows, in vectors whose lanes are rows: products of whole matrices of float32.
 *
 * In: a unit whose queries are bfloat16, and K and V that are or that are codes. Out: sums of values,
 * largest scores and denominators, as by `run_tiles`. For processors without a matrix unit.
 *
 * How: keys and values of a tile are widened to float32 once for all rows. A score is a sum over channels
 * in order, of TALL keys times SIDES vectors of rows at a time, so nothing is summed up across lanes; and a
 * sum of values is TALL rows times a piece of channels, over the keys in order. Numbers of the one side
 * stand in vectors, those of the other are read one by one for all lanes. */
#ifndef ATTNKIT_WIDE_H
#define ATTNKIT_WIDE_H

#include "unit.h"

#define WIDE_ROWS 128 /* of a unit, at most */
#define WIDE_KEYS 64  /* of a tile, whole ones of TILE */
#if LANES == 16
#define TALL 8 /* 16 sums: as many as the processor has on their way */
#else
#define TALL 4
#endif

static int64_t wide_floats(const struct job *j) {
  return j->many_rows * j->q_width + WIDE_KEYS * (j->q_width + j->v_width + BESIDE) + j->q_width + j->v_width;
}

/* Where the matrices of a thread lie in its memory from `at` on. */
static void place_wide(const struct job *j, struct unit *u, float *at) {
  u->w.q = at, at += j->many_rows * j->q_width;
  u->w.k = at, at += WIDE_KEYS * j->q_width;
  u->w.v = at, at += WIDE_KEYS * j->v_width;
  u->w.scores = at, at += WIDE_KEYS * BESIDE;
  u->w.codes = (uint16_t *)at;
}

/* The unit's queries, channels in lane order: (rows / BESIDE, q_width, BESIDE); rows that do not exist are
 * zeros. */
static void pack_wide_queries(const struct job *j, struct unit *u) {
  const int64_t group = j->layer->num_heads / j->layer->num_kv_heads, width = j->q_width;
  const int64_t first_token = j->batch->query_start_loc[u->req];
  float *row = u->w.k;
  memset(u->w.q, 0, (u->rows + BESIDE - 1) / BESIDE * BESIDE * width * sizeof(float));
  for (int r = 0; r < u->rows; ++r) {
    load_row(j->q.data + (first_token + (u->first_row + r) / group) * j->q.token_stride +
                 u->head[r] * j->q.head_stride,
             BF16, BF16, j->layer->head_size, width, row);
    float *to = u->w.q + r / BESIDE * BESIDE * width + r % BESIDE;
    for (int64_t d = 0; d < width; ++d) to[d * BESIDE] = row[d];
  }
}

/* Rows from..to of a tile as float32 in lane order, zeros for those that are not among them up to `end`;
 * returns whether a number is infinite or NaN. */
static int widen_tile(const struct job *j, const struct unit *u, const char *const *rows, int from,
                      int to, int end, int64_t size, int64_t width, float *buffer) {
  vec_u wild = {0};
  memset(buffer, 0, from * width * sizeof(float));
  for (int t = from; t < to; ++t) {
    float *row = buffer + t * width;
    const char *at = rows[t];
    if (j->codes) {
      read_codes(rows + t, 1, j->codes->kind, size, width, u->w.codes);
      at = (const char *)u->w.codes;
    }
    load_row(at, BF16, BF16, j->codes ? width : size, width, row);
    for (int64_t d = 0; d < width; d += LANES)
      wild |= (vec_u)(((vec_u)load_vec(row + d) & 0x7f800000u) == 0x7f800000u);
  }
  memset(buffer + to * width, 0, (end - to) * width * sizeof(float));
  int any = 0;
  for (int i = 0; i < LANES; ++i) any |= wild[i] != 0;
  return any;
}

/* Raw scores of TALL keys with BESIDE rows. */
INLINE void multiply_queries(const float *k, int64_t width, const float *q, float *scores) {
  vec sums[2 * TALL];
  UNROLL
  for (int i = 0; i < 2 * TALL; ++i) sums[i] = (vec){0};
  for (int64_t d = 0; d < width; ++d, q += BESIDE) {
    const vec rows[2] = {load_vec(q), load_vec(q + LANES)};
    UNROLL
    for (int i = 0; i < 2 * TALL; ++i) sums[i] += k[i / 2 * width + d] * rows[i % 2];
  }
  UNROLL
  for (int i = 0; i < 2 * TALL; ++i) store_vec(scores + i * LANES, sums[i]);
}

/* acc[r] += sum over keys from..to of weights[key][r] * a piece of the key's value, of TALL rows. */
INLINE void multiply_weights(const float *weights, const float *v, int64_t width, int from, int to,
                             float *acc) {
  vec sums[2 * TALL];
  UNROLL
  for (int i = 0; i < 2 * TALL; ++i) sums[i] = load_vec(acc + i / 2 * width + i % 2 * LANES);
  for (int t = from; t < to; ++t) {
    const vec piece[2] = {load_vec(v + t * width), load_vec(v + t * width + LANES)};
    UNROLL
    for (int i = 0; i < 2 * TALL; ++i) sums[i] += weights[t * BESIDE + i / 2] * piece[i % 2];
  }
  UNROLL
  for (int i = 0; i < 2 * TALL; ++i) store_vec(acc + i / 2 * width + i % 2 * LANES, sums[i]);
}

/* Turn the raw score `x` of LANES rows from `first` on with key `t` of the tile at `base` into a score. */
INLINE vec wide_score(const struct job *j, const struct unit *u, int64_t base, int t, int first, vec x) {
  const struct layer *l = j->layer;
  const float log2e = 1.44269504f, cap = l->soft_cap;
  x *= cap != 0.0f ? u->score_scale / cap : u->score_scale * log2e;
  if (j->codes && j->codes->token_scales) x *= u->k_scales[t];
  if (cap != 0.0f) x = tanh_safe(x) * (cap * log2e);
  if (l->slopes) {
    vec behind =
        __builtin_convertvector(load_ints(u->lane.pos + first) - ((int32_t)base + t), vec);
    if (l->alibi_sqrt)
      for (int n = 0; n < LANES; ++n) behind[n] = sqrtf(behind[n] > 0.0f ? behind[n] : 0.0f);
    x -= load_vec(u->lane.slope + first) * behind;
  }
  return x;
}

/* Turn raw scores of LANES rows from `first` on with keys from..to of a tile into weights, and rescale
 * their earlier sums. Keys that a row does not see get weight 0. */
static void weigh_wide(const struct job *j, struct unit *u, int64_t base, int from, int to, int first,
                       float *scores) {
  const int token_scales = j->codes && j->codes->token_scales;
  const int plain = !token_scales && j->layer->soft_cap == 0.0f && !j->layer->slopes;
  const float scale = u->score_scale * 1.44269504f;
  const vec_i lo = load_ints(u->lane.lo + first) - (int32_t)base;
  const vec_i hi = load_ints(u->lane.hi + first) - (int32_t)base;
  int all_seen = 1;
  for (int i = 0; i < LANES; ++i) all_seen &= lo[i] <= from && hi[i] >= to;
  vec best[4]; /* of every fourth key: one after another would wait for each other */
  for (int i = 0; i < 4; ++i) best[i] = splat(-INFINITY);
  int t = from;
  if (plain && all_seen)
    for (; t + 4 <= to; t += 4) {
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const vec x = load_vec(scores + (t + i) * BESIDE) * scale;
        best[i] = larger(x, best[i]);
        store_vec(scores + (t + i) * BESIDE, x);
      }
    }
  for (; t < to; ++t) {
    vec x = load_vec(scores + t * BESIDE);
    x = plain ? x * scale : wide_score(j, u, base, t, first, x);
    x = pick((t >= lo) & (t < hi), x, splat(-INFINITY));
    best[0] = larger(x, best[0]);
    store_vec(scores + t * BESIDE, x);
  }
  best[0] = larger(larger(best[0], best[1]), larger(best[2], best[3]));
  const vec before = load_vec(u->lane.largest + first), top = larger(best[0], before);
  /* Before a row has seen a key, 0 is subtracted: -inf - -inf would be NaN. */
  const vec zero = pick(top == -INFINITY, splat(0.0f), top);
  const vec factor = exp2_nonpositive(before - zero);
  vec sums[2] = {load_vec(u->lane.denominator + first) * factor, {0}};
  for (t = from; t < to; ++t) {
    const vec x = load_vec(scores + t * BESIDE), p = exp2_nonpositive(x - zero);
    sums[t % 2] += p;
    /* A scale that is NaN reaches only rows that see its key. */
    store_vec(scores + t * BESIDE, token_scales ? pick(x == -INFINITY, p, p * u->v_scales[t]) : p);
  }
  store_vec(u->lane.largest + first, top);
  store_vec(u->lane.denominator + first, sums[0] + sums[1]);
  for (int r = 0; r < LANES && first + r < u->rows; ++r) {
    float *acc = u->acc + (first + r) * j->v_width;
    if (factor[r] != 1.0f)
      for (int64_t d = 0; d < j->v_width; d += LANES) store_vec(acc + d, load_vec(acc + d) * factor[r]);
  }
}

/* Add weighted values of keys from..to of the tile at `base` to the sums of BESIDE rows from `first` on. */
static void add_wide(const struct job *j, struct unit *u, int64_t base, int from, int to, int first,
                     int any_wild) {
  const int64_t width = j->v_width;
  if (any_wild) { /* 0 * NaN must not be: row by row, what each sees */
    for (int r = first; r < first + BESIDE && r < u->rows; ++r)
      for (int t = from; t < to; ++t) {
        if (base + t < u->keys[r].lo || base + t >= u->keys[r].hi) continue;
        const float weight = u->w.scores[t * BESIDE + r - first];
        for (int64_t d = 0; d < width; d += LANES)
          store_vec(u->acc + r * width + d,
                    load_vec(u->acc + r * width + d) + weight * load_vec(u->w.v + t * width + d));
      }
    return;
  }
  for (int r = 0; r < BESIDE && first + r < u->rows; r += TALL)
    for (int64_t d = 0; d < width; d += PIECE)
      multiply_weights(u->w.scores + r, u->w.v + d, width, from, to,
                       u->acc + (first + r) * width + d);
}

/* Attend from a unit's rows to keys start..end. */
static void run_wide(const struct job *j, struct unit *u, int64_t start, int64_t end) {
  const struct layer *l = j->layer;
  const char *keys[WIDE_KEYS], *values[WIDE_KEYS];
  for (int64_t base = start - start % WIDE_KEYS; base < end; base += WIDE_KEYS) {
    const int from = start > base ? start - base : 0;
    const int to = end - base < WIDE_KEYS ? end - base : WIDE_KEYS;
    for (int t = from - from % TILE; t < to; t += TILE)
      locate_rows(j, u, base + t, from > t ? from - t : 0, to - t < TILE ? to - t : TILE, keys + t,
                  values + t);
    if (j->codes && j->codes->token_scales)
      for (int t = from; t < to; ++t) {
        memcpy(u->k_scales + t, keys[t] + code_bytes(j->codes->kind, l->head_size), 4);
        memcpy(u->v_scales + t, values[t] + code_bytes(j->codes->kind, l->head_size_v), 4);
      }
    const int whole = (to + TALL - 1) / TALL * TALL;
    widen_tile(j, u, keys, from, to, whole, l->head_size, j->q_width, u->w.k);
    const int any_wild = widen_tile(j, u, values, from, to, to, l->head_size_v, j->v_width, u->w.v);
    for (int first = 0; first < u->rows; first += BESIDE) {
      const struct span seen = keys_of_rows(u, base, from, to, first, BESIDE);
      if (seen.lo >= seen.hi) continue;
      for (int t = seen.lo - seen.lo % TALL; t < seen.hi; t += TALL)
        multiply_queries(u->w.k + t * j->q_width, j->q_width, u->w.q + first * j->q_width,
                         u->w.scores + t * BESIDE);
      for (int i = 0; i < BESIDE; i += LANES)
        weigh_wide(j, u, base, seen.lo, seen.hi, first + i, u->w.scores + i);
      add_wide(j, u, base, seen.lo, seen.hi, first, any_wild);
    }
  }
}

#endif
