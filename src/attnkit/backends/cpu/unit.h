/* A call's job, and a unit of it: some rows of one request and KV head, and where their K and V lie. */
#ifndef ATTNKIT_UNIT_H
#define ATTNKIT_UNIT_H

#include "blocks.h"
#include "codes.h"
#include "visible.h"

#define MAX_ROWS 32     /* rows of a unit: its queries and sums stay in the first-level cache */
#define MATRIX_ROWS 512 /* at most, of many in the matrix unit: keys are packed once for all of them */
#define BESIDE (2 * LANES) /* rows side by side in vectors of many */

/* Who does a unit: vectors, for which many rows stand in lanes; or the matrix unit, for which few rows
 * leave keys where they lie. */
enum path { VECTORS = 0, WIDE = 1, FEW = 2, MANY = 3 };

struct job {
  const struct batch *batch;
  const struct layer *layer;
  struct tensor q, k, v, out;
  int q_dtype, kv_dtype, out_dtype;
  const struct codes *codes; /* NULL: K and V are numbers */
  int widen, row_dtype;      /* K and V rows are converted first, a tile at a time; their dtype then */
  float *lse;
  int64_t lse_stride, block_size;
  int64_t q_width, v_width; /* head sizes rounded up to whole pieces */
  int64_t fetch_bytes;      /* of a K row and the V row behind it; 0: V lies elsewhere */
  int64_t *first_item;      /* (num_served + 1,) */
  int64_t *first_unit;      /* (num_served + 1,) */
  int64_t *first_partial;   /* (num_served,) first row of partial sums; unused by one split */
  int32_t *pending;         /* per unit: splits not yet done */
  float *partials;          /* per row of a split: sums (v_width), largest score, denominator */
  int64_t whole_splits;     /* most splits of a unit that is one item; 0: none has several */
  int matrices;             /* whether the matrix unit is used */
  int wide;                 /* whether vectors have many rows in lanes */
  int integers;             /* whether blocks multiply bytes */
  int64_t many_rows;        /* of a unit of many */
  int whole_sides;          /* SIDE keys from a multiple of it on are never in two blocks */
  float *workspace;         /* workspace_size floats for each thread */
  int64_t workspace_size, next_workspace;
  int64_t num_items, next_item, portion; /* a thread takes so many neighbours at a time */
};

/* What the matrix unit works on: of `many_rows` rows, and of MATRIX_KEYS keys at a time. `few.h` says
 * what left and right sides are. */
struct matrices {
  uint16_t *q;       /* (many_rows / SIDE, q_width / 2, SIDE, 2): right sides */
  uint16_t *k;       /* (MATRIX_KEYS, q_width): left side */
  uint16_t *v;       /* (v_width, MATRIX_KEYS): left side, channels in lane order */
  uint16_t *rows;    /* (MATRIX_KEYS, v_width): values, where those of the cache are copied */
  uint16_t *weights; /* (2, MATRIX_KEYS / 2, SIDE, 2): right sides */
  float *scores;     /* (2, MATRIX_KEYS, SIDE) */
  float *acc;        /* (many_rows / SIDE, v_width, SIDE) */
  float *k_scales, *v_scales; /* (MATRIX_KEYS,) stored beside codes */
};

/* What vectors of many rows work on. */
struct wide {
  float *q;      /* (many_rows / BESIDE, q_width, BESIDE), channels in lane order */
  float *k, *v;  /* (WIDE_KEYS, q_width), (WIDE_KEYS, v_width), likewise */
  float *scores; /* (WIDE_KEYS, BESIDE), then weights */
  uint16_t *codes; /* one row that was codes, as bfloat16 */
};

/* What dot products of bytes work on; `integers.h` says how. */
struct integers {
  int8_t *q;           /* (MAX_ROWS, 2, q_width): high and low bytes of integers */
  float *scale;        /* (MAX_ROWS, KEYS): what 1 stands for, in the lanes of a block */
  int32_t *offset;     /* likewise: what keys without sign add to a score */
  int8_t *values;      /* of a tile, interleaved */
  uint8_t *high, *low; /* (TILE / KEYS, ROWS, KEYS): weights of a block */
};

struct unit {
  int64_t req, kv_head, first_row; /* req -1: none; rows go by token, then head of the group */
  int rows;
  enum path path;
  struct span span[MATRIX_ROWS];   /* of keys that a row sees, beside those below `prefix` */
  struct span all;                 /* of keys that any row does, likewise */
  int64_t prefix;
  int64_t context;         /* keys before the request's new tokens */
  uint64_t tree[MAX_ROWS]; /* which of those a row sees; all 0: as the spans say. In vectors */
  struct span keys[MATRIX_ROWS]; /* of them, those of the run at hand */
  int64_t head[MATRIX_ROWS];
  float largest[MATRIX_ROWS], denominator[MATRIX_ROWS]; /* of the scores, in base 2 */
  float *q, *acc; /* (MAX_ROWS, q_width), (MAX_ROWS or many_rows, v_width) in lane order */
  int acc_dtype;  /* whose lane order */
  float *scores;  /* (MAX_ROWS / ROWS, TILE / KEYS, GROUP) */
  float *parts;   /* (whole_splits, MAX_ROWS, v_width + 2) */
  struct matrices m;
  struct wide w;
  struct integers integers;
  float *wide;    /* room for (TILE, q_width) and (TILE, v_width), where rows are widened */
  float score_scale, value_scale; /* of raw scores, and of sums of values */
  int copies;
  struct { /* the same per row, `copies` times each, for vectors of scores */
    int32_t lo[MATRIX_ROWS], hi[MATRIX_ROWS], pos[MATRIX_ROWS];
    float slope[MATRIX_ROWS], largest[MATRIX_ROWS], denominator[MATRIX_ROWS];
  } lane;
  /* Scales stored beside the codes of a tile's keys, each in the lanes of its key; one a key, of many. */
  float k_scales[TILE / KEYS * LANES], v_scales[TILE / KEYS * LANES];
};

/* Pointers to the K and V rows of the tile that starts at key `base`. Only keys from..to exist; up
 * to the ends of their groups of KEYS the nearest is repeated, so that groups can be read whole. */
static void locate_rows(const struct job *j, const struct unit *u, int64_t base, int from, int to,
                        const char **keys, const char **values) {
  const struct batch *b = j->batch;
  const char *k = j->k.data + u->kv_head * j->k.head_stride;
  const char *v = j->v.data + u->kv_head * j->v.head_stride;
  int64_t run = to - from, block = 0, offset = b->query_start_loc[u->req] + base + from;
  const int32_t *table = b->block_table ? b->block_table + u->req * b->table_stride : NULL;
  if (table) {
    table += (base + from) / j->block_size;
    offset = (base + from) % j->block_size;
  }
  for (int t = from; t < to; t += run, offset = 0) {
    if (table) {
      block = *table++;
      run = j->block_size - offset < to - t ? j->block_size - offset : to - t;
    }
    const char *k_row = k + block * j->k.block_stride + offset * j->k.token_stride;
    const char *v_row = v + block * j->v.block_stride + offset * j->v.token_stride;
    for (int64_t i = 0; i < run; ++i) {
      keys[t + i] = k_row + i * j->k.token_stride;
      values[t + i] = v_row + i * j->v.token_stride;
    }
  }
  for (int t = from - from % KEYS; t < from; ++t) keys[t] = keys[from], values[t] = values[from];
  for (int t = to; t % KEYS; ++t) keys[t] = keys[to - 1], values[t] = values[to - 1];
}

/* Copy rows to float32 padded with zeros to whole pieces, for head sizes that are not. */
static void widen_rows(const char **rows, int from, int to, int64_t size, int64_t width, int dtype,
                       float *buffer) {
  for (int t = from; t < to; ++t) {
    load_row(rows[t], dtype, F32, size, width, buffer + t * width);
    rows[t] = (const char *)(buffer + t * width);
  }
  for (int t = from - from % KEYS; t < from; ++t) rows[t] = rows[from];
  for (int t = to; t % KEYS; ++t) rows[t] = rows[to - 1];
}

/* The scales that stand `offset` bytes into rows, in the lanes of their keys. */
static void load_scales(const char *const *rows, int from, int to, int64_t offset, float *lanes) {
  float scales[TILE] = {0};
  for (int t = from; t < to; ++t) memcpy(scales + t, rows[t] + offset, 4);
  for (int t = 0; t < TILE; t += KEYS) {
#if defined(__AVX512F__)
    store_vec(lanes + t / KEYS * LANES, (vec)_mm512_broadcast_f32x4(_mm_loadu_ps(scales + t)));
#else
    for (int i = 0; i < LANES; ++i) lanes[t / KEYS * LANES + i] = scales[t + i % KEYS];
#endif
  }
}

/* Copy rows of codes to their `decoded_dtype`, padded likewise. */
static void decode_rows(const struct codes *c, const char **rows, int from, int to, int64_t size,
                        int64_t width, uint16_t *buffer) {
  decode_codes(rows + from, to - from, c->kind, size, width, buffer + from * width);
  for (int t = from; t < to; ++t) rows[t] = (const char *)(buffer + t * width);
  for (int t = from - from % KEYS; t < from; ++t) rows[t] = rows[from];
  for (int t = to; t % KEYS; ++t) rows[t] = rows[to - 1];
}

/* Of keys from..to of the tile at `base`, those that any of `rows` rows from `first` on sees. */
static inline struct span keys_of_rows(const struct unit *u, int64_t base, int from, int to, int first,
                                       int rows) {
  struct span seen = {to, from};
  for (int r = first; r < first + rows; ++r) {
    if (u->keys[r].lo >= u->keys[r].hi) continue;
    if (u->keys[r].lo - base < seen.lo) seen.lo = u->keys[r].lo - base;
    if (u->keys[r].hi - base > seen.hi) seen.hi = u->keys[r].hi - base;
  }
  if (seen.lo < from) seen.lo = from;
  if (seen.hi > to) seen.hi = to;
  return seen;
}

#endif
