/* A unit of few rows, in vectors: a tile of keys is scored, weighed, and its values are added.
 *
 * In: a unit whose queries are loaded, and the keys that its rows see. Out: sums of values, largest
 * scores and denominators. */
#ifndef ATTNKIT_TILES_H
#define ATTNKIT_TILES_H

#include "ahead.h"
#include "integers.h"

/* Whether a row of a tree sees a key, as far as the tree is concerned. */
INLINE int in_tree(const struct unit *u, int row, int64_t key) {
  return key < u->context || u->tree[row] >> ((key - u->context) & 63) & 1;
}

/* Turn raw scores of ROWS rows over a tile into weights, and rescale their earlier sums. A lane is
 * one row and one of KEYS neighbouring keys; its denominator counts those keys alone. Rows that do
 * not exist see nothing. */
static void softmax_block(const struct job *j, struct unit *u, int64_t base, int from, int to,
                          int first, float *scores) {
  const struct layer *l = j->layer;
  const float log2e = 1.44269504f, cap = l->soft_cap;
  const float scale = cap != 0.0f ? u->score_scale / cap : u->score_scale * log2e;
  const int token_scales = j->codes && j->codes->token_scales;
  const int in_trees = u->tree[0] && base + TILE > u->context;
  int plain = cap == 0.0f && !l->slopes && from == 0 && to == TILE && !in_trees; /* and all seen */
  for (int r = first; r < first + ROWS && r < u->rows; ++r)
    plain &= u->keys[r].lo <= base && u->keys[r].hi >= base + TILE;
  float factors[GROUP];
  for (int i = 0; i < GROUP; i += LANES) {
    const int lane = first * KEYS + i;
    vec s[TILE / KEYS], best = splat(-INFINITY), other = best;
    vec_i key, lo = load_ints(u->lane.lo + lane), hi = load_ints(u->lane.hi + lane);
    for (int n = 0; n < LANES; ++n) key[n] = (int32_t)base + n % KEYS;
    for (int g = 0; plain && g < TILE / KEYS; ++g) {
      s[g] = load_vec(scores + g * GROUP + i) * scale;
      if (token_scales) s[g] *= load_vec(u->k_scales + g * LANES);
      if (g % 2) other = larger(s[g], other);
      else best = larger(s[g], best);
    }
    for (int g = 0; !plain && g < TILE / KEYS; ++g, key += KEYS) {
      vec x = load_vec(scores + g * GROUP + i) * scale;
      if (token_scales) x *= load_vec(u->k_scales + g * LANES);
      if (cap != 0.0f) x = tanh_safe(x) * (cap * log2e);
      if (l->slopes) {
        vec behind = __builtin_convertvector(load_ints(u->lane.pos + lane) - key, vec);
        if (l->alibi_sqrt)
          for (int n = 0; n < LANES; ++n) behind[n] = sqrtf(behind[n] > 0.0f ? behind[n] : 0.0f);
        x -= load_vec(u->lane.slope + lane) * behind;
      }
      const vec_i in_tile = (key >= (int32_t)base + from) & (key < (int32_t)base + to);
      s[g] = pick((key >= lo) & (key < hi) & in_tile, x, splat(-INFINITY));
      if (in_trees)
        for (int n = 0; n < LANES; ++n) {
          const int row = (lane + n) / KEYS;
          if (row < u->rows && !in_tree(u, row, key[n])) s[g][n] = -INFINITY;
        }
      best = larger(s[g], best);
    }
    const vec before = load_vec(u->lane.largest + lane),
              top = larger(largest_of_keys(larger(best, other)), before);
    /* Before a row has seen a key, 0 is subtracted: -inf - -inf would be NaN. */
    const vec zero = pick(top == -INFINITY, splat(0.0f), top);
    const vec factor = exp2_nonpositive(before - zero);
    vec sums[2] = {load_vec(u->lane.denominator + lane) * factor, {0}};
    for (int g = 0; g < TILE / KEYS; ++g) {
      const vec p = exp2_nonpositive(s[g] - zero);
      store_vec(scores + g * GROUP + i, token_scales ? p * load_vec(u->v_scales + g * LANES) : p);
      sums[g % 2] += p;
    }
    store_vec(u->lane.largest + lane, top);
    store_vec(u->lane.denominator + lane, sums[0] + sums[1]);
    store_vec(factors + i, factor);
  }
  for (int r = 0; r < ROWS && first + r < u->rows; ++r) {
    float *acc = u->acc + (first + r) * j->v_width, factor = factors[r * KEYS];
    if (factor != 1.0f)
      for (int64_t i = 0; i < j->v_width; i += LANES)
        store_vec(acc + i, load_vec(acc + i) * factor);
  }
}

/* The part of `keys` in a tile whose keys from..to exist, counted from the tile's start. */
INLINE struct span in_tile(struct span keys, int64_t base, int from, int to) {
  keys.lo = keys.lo - base > from ? keys.lo - base : from;
  keys.hi = keys.hi - base < to ? keys.hi - base : to;
  return keys.lo < keys.hi ? keys : (struct span){to, to};
}

/* Add a tile's weighted values. Those that only some rows of a block see are added row by row,
 * since 0 * NaN must not be; each row still adds its keys in order, so it gets the bits it has
 * alone. */
static void add_values(const struct job *j, const struct unit *u, int64_t base, int from, int to,
                       int first, int rows, const float *weights, const char *const *values,
                       const char *const *fetch) {
  const int64_t pieces = j->v_width / PIECE, width = j->v_width;
  const value_fn one_row = value_block[j->row_dtype][0];
  struct span seen[ROWS], all = {from, to};
  for (int r = 0; r < rows; ++r) {
    seen[r] = in_tile(u->keys[first + r], base, from, to);
    all.lo = seen[r].lo > all.lo ? seen[r].lo : all.lo;
    all.hi = seen[r].hi < all.hi ? seen[r].hi : all.hi;
  }
  if (all.lo > all.hi) all.lo = all.hi = to;
  float *acc = u->acc + first * width;
  if (u->tree[0] && base + TILE > u->context) {
    for (int r = 0; r < rows; ++r)
      for (int t = seen[r].lo, end; t < seen[r].hi; t = end + 1) {
        for (end = t; end < seen[r].hi && in_tree(u, first + r, base + end);) ++end;
        one_row(weights + r * KEYS, values, pieces, t, end, acc + r * width, width, NULL, 0);
      }
    return;
  }
  for (int r = 0; r < rows; ++r)
    one_row(weights + r * KEYS, values, pieces, seen[r].lo,
            seen[r].hi < all.lo ? seen[r].hi : all.lo, acc + r * width, width, NULL, 0);
  value_block[j->row_dtype][rows - 1](weights, values, pieces, all.lo, all.hi, acc, width, fetch,
                                      j->fetch_bytes);
  for (int r = 0; r < rows; ++r)
    one_row(weights + r * KEYS, values, pieces, all.hi, seen[r].hi, acc + r * width, width, NULL,
            0);
}

/* Attend from a unit's rows to keys start..end of its keys, which go on to `unit_end`. */
static void run_tiles(const struct job *j, struct unit *u, int64_t start, int64_t end,
                      int64_t unit_end) {
  const struct layer *l = j->layer;
  struct ahead ahead;
  ahead.known = start;
  for (int64_t base = start - start % TILE; base < end; base += TILE) {
    const int from = start > base ? start - base : 0, to = end - base < TILE ? end - base : TILE;
    look_ahead(j, u, &ahead, base, unit_end);
    const char *const *fetch = fetch_rows(j, &ahead, base + TILE, unit_end, 1).rows;
    const char **keys = tile_at(&ahead, base)->keys, **values = tile_at(&ahead, base)->values;
    if (j->codes && j->codes->token_scales) {
      load_scales(keys, from, to, code_bytes(j->codes->kind, l->head_size), u->k_scales);
      load_scales(values, from, to, code_bytes(j->codes->kind, l->head_size_v), u->v_scales);
    }
    if (j->codes && j->widen) {
      uint16_t *buffer = (uint16_t *)u->wide;
      decode_rows(j->codes, keys, from, to, l->head_size, j->q_width, buffer);
      decode_rows(j->codes, values, from, to, l->head_size_v, j->v_width,
                  buffer + TILE * j->q_width);
    } else if (j->widen) {
      widen_rows(keys, from, to, l->head_size, j->q_width, j->kv_dtype, u->wide);
      widen_rows(values, from, to, l->head_size_v, j->v_width, j->kv_dtype,
                 u->wide + TILE * j->q_width);
    }
#ifdef ATTNKIT_INTEGERS
    if (j->integers) {
      for (int r = 0; r < u->rows; r += ROWS) {
        const int n = u->rows - r < ROWS ? u->rows - r : ROWS;
        score_block_integers(j, u, r, n, keys, from, to, u->scores, r ? NULL : fetch);
        softmax_block(j, u, base, from, to, r, u->scores);
        if (r == 0) interleave_values(j, u, values, from, to, fetch);
        add_block_integers(j, u, r, n, u->scores, from, to);
      }
      continue;
    }
#endif
    for (int r = 0; r < u->rows; r += ROWS) { /* the first block fetches */
      const int n = u->rows - r < ROWS ? u->rows - r : ROWS;
      float *block = u->scores + r * TILE;
      score_block[j->row_dtype][n - 1](u->q + r * j->q_width, j->q_width, keys, j->q_width / PIECE,
                                       from, to, block, r ? NULL : fetch, j->fetch_bytes);
      softmax_block(j, u, base, from, to, r, block);
    }
    for (int r = 0; r < u->rows; r += ROWS)
      add_values(j, u, base, from, to, r, u->rows - r < ROWS ? u->rows - r : ROWS,
                 u->scores + r * TILE, values, r ? NULL : fetch);
  }
}

#endif
