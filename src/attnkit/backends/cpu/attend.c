/* Attention over a paged KV cache.
 *
 * In: one batch (lengths, block table), one layer (heads, mask, score), pointers and strides.
 * Out: attention rows in `out`, log-sum-exps in `lse`. `launch.py` is the only caller; `operands.py`
 * mirrors the structs `batch` and `layer`. The same code does decodes, verifies, prompts and encoders:
 * only the number of rows differs.
 *
 * How: a unit is (request, KV head, up to MAX_ROWS query rows: the heads of a group and the tokens
 * of a query are rows of one small matrix). Its keys are cut at multiples of SPLIT_KEYS, so where a
 * cut lies, and with it every bit of the result, depends on the request alone and not on its batch
 * mates, its query length or the number of threads. Threads take portions of (unit, split) items
 * from one counter; the last to finish a unit merges its splits in order. Queries in bfloat16 go to
 * the matrix unit where there is one: few rows leave keys where they lie (`few.h`), many are larger
 * units that pack them (`matrix.h`). Without one, many rows stand in the lanes of vectors (`wide.h`), and
 * few over codes that are integers are products of bytes (`integers.h`). In bfloat16, bits do depend on
 * whether a query has many rows, and in a matrix unit, beyond the first split, on whether it has more
 * than DIVIDED_ROWS, whose keys are not cut. The
 * threads are those torch already has: the host passes the address of GOMP_parallel, so there is no
 * second OpenMP runtime to fight with. */
#include <stdlib.h>

#include "few.h"
#include "tiles.h"
#include "wide.h"

/* Up to so many rows of a KV head threads share a unit's splits; more are enough units for all. */
#define DIVIDED_ROWS 128

/* Divide a unit's sums, join the sink, convert, and write rows of `out` and `lse`. */
static void finish_rows(const struct job *j, const struct unit *u) {
  const struct layer *l = j->layer;
  const int64_t group = l->num_heads / l->num_kv_heads;
  for (int r = 0; r < u->rows; ++r) {
    const int64_t token = j->batch->query_start_loc[u->req] + (u->first_row + r) / group;
    const int64_t head = u->head[r];
    float m = u->largest[r], d = u->denominator[r], factor = 1.0f;
    if (l->sinks && l->sinks[head] != -INFINITY) {
      const float sink = l->sinks[head] * 1.44269504f, best = sink > m ? sink : m;
      factor = exp2_one(m - best);
      d = d * factor + exp2_one(sink - best);
      m = best;
    }
    const float share = d == 0.0f ? 0.0f : factor / d * u->value_scale;
    store_row(u->acc + r * j->v_width, share, u->acc_dtype, l->head_size_v, j->out_dtype,
               j->out.data + token * j->out.token_stride + head * j->out.head_stride);
    if (j->lse)
      j->lse[token * j->lse_stride + head] = d == 0.0f ? -INFINITY : (m + log2f(d)) * 0.693147181f;
  }
}

/* Put away the sums of one split: per row its values, largest score and denominator. */
static void keep_split(const struct job *j, const struct unit *u, float *part) {
  for (int r = 0; r < u->rows; ++r, part += j->v_width + 2) {
    memcpy(part, u->acc + r * j->v_width, j->v_width * sizeof(float));
    part[j->v_width] = u->largest[r];
    part[j->v_width + 1] = u->denominator[r];
  }
}

/* Add up all splits of a unit, in order. Those that saw no key leave no trace, so that it does not
 * matter how many of them there are. */
static void merge_splits(const struct job *j, struct unit *u, const float *parts,
                         int64_t num_splits) {
  const int64_t width = j->v_width, stride = width + 2;
  for (int r = 0; r < u->rows; ++r) {
    float best = -INFINITY, denominator = 0.0f, *acc = u->acc + r * width;
    for (int64_t s = 0; s < num_splits; ++s) {
      const float m = parts[(s * u->rows + r) * stride + width];
      best = m > best ? m : best;
    }
    memset(acc, 0, width * sizeof(float));
    for (int64_t s = 0; s < num_splits; ++s) {
      const float *part = parts + (s * u->rows + r) * stride;
      if (part[width + 1] == 0.0f) continue;
      const float factor = exp2_one(part[width] - best);
      for (int64_t i = 0; i < width; i += LANES) {
        const vec x = load_vec(part + i) * factor;
        store_vec(acc + i, denominator == 0.0f ? x : load_vec(acc + i) + x); /* -0 + 0 is not -0 */
      }
      denominator += part[width + 1] * factor;
    }
    u->largest[r] = best;
    u->denominator[r] = denominator;
  }
}

INLINE int has_many_rows(enum path path) { return path == MANY || path == WIDE; }

/* Rows of a unit up to a whole block. */
INLINE int padded_rows(const struct unit *u) {
  const int block = u->path == MANY ? MAX_ROWS : u->path == WIDE ? BESIDE : u->path == FEW ? 1 : ROWS;
  return (u->rows + block - 1) / block * block;
}

/* Let each row see those keys in `part` that lie in its span or, if `whole`, before the end of it. */
static void show_keys(struct unit *u, struct span part, int whole) {
  for (int r = 0; r < padded_rows(u); ++r) {
    struct span keys = {whole ? 0 : u->span[r].lo, u->span[r].hi};
    if (keys.lo < part.lo) keys.lo = part.lo;
    if (keys.hi > part.hi) keys.hi = part.hi;
    u->keys[r] = keys;
    for (int n = r * u->copies; n < (r + 1) * u->copies; ++n) {
      u->lane.lo[n] = keys.lo;
      u->lane.hi[n] = keys.hi;
    }
  }
}

/* Let a unit take a path: load its queries, find what each row sees. */
static void prepare_rows(const struct job *j, struct unit *u, enum path path) {
  u->path = path;
  u->acc_dtype = path != VECTORS ? BF16 : j->integers ? FOURS : j->row_dtype;
  u->copies = path == VECTORS ? KEYS : path == FEW ? SIDE : 1; /* of a row, in lanes */
  const struct batch *b = j->batch;
  const struct layer *l = j->layer;
  const int64_t group = l->num_heads / l->num_kv_heads;
  const int64_t query_len = b->query_start_loc[u->req + 1] - b->query_start_loc[u->req];
  const int64_t context = (b->block_table ? b->seq_lens[u->req] : query_len) - query_len;
  const int64_t left = query_len * group - u->first_row;
  struct span all = {NO_LIMIT, 0};
  const int64_t most = has_many_rows(path) ? j->many_rows : MAX_ROWS;
  u->rows = left < most ? left : most;
  for (int r = 0; r < padded_rows(u); ++r) {
    const int64_t i = (u->first_row + r) / group;
    const int64_t head = u->kv_head * group + (u->first_row + r) % group;
    const int exists = r < u->rows;
    u->head[r] = head;
    u->span[r] = exists ? visible_keys(b, l, u->req, i) : (struct span){0, 0};
    if (u->path == VECTORS) u->tree[r] = exists ? tree_word(b, u->req, i) : 0;
    for (int n = r * u->copies; n < (r + 1) * u->copies; ++n) {
      u->lane.pos[n] = context + i;
      u->lane.slope[n] = l->slopes && exists ? l->slopes[head] * 1.44269504f : 0.0f;
    }
    if (!exists) continue;
    if (u->path == VECTORS)
      load_row(j->q.data + (b->query_start_loc[u->req] + i) * j->q.token_stride +
                   head * j->q.head_stride,
               j->q_dtype, j->row_dtype, l->head_size, j->q_width, u->q + r * j->q_width);
    if (u->span[r].lo < u->span[r].hi) {
      all.lo = u->span[r].lo < all.lo ? u->span[r].lo : all.lo;
      all.hi = u->span[r].hi > all.hi ? u->span[r].hi : all.hi;
    }
  }
  u->all = all;
  u->prefix = prefix_of(b, l, u->req);
  u->context = context;
  show_keys(u, (struct span){0, NO_LIMIT}, 0);
#ifdef ATTNKIT_INTEGERS
  if (path == VECTORS && j->integers) round_queries(j, u);
#endif
  if (path == WIDE) pack_wide_queries(j, u);
  else if (path != VECTORS) pack_queries(j, u);
}

/* Turn to a unit, unless it is the one at hand: splits of one are neighbours. */
static void take_unit(const struct job *j, struct unit *u, int64_t req, int64_t kv_head,
                      int64_t first_row, enum path path) {
  if (u->req == req && u->kv_head == kv_head && u->first_row == first_row) return;
  u->req = req;
  u->kv_head = kv_head;
  u->first_row = first_row;
  const float unit = path == VECTORS && j->codes ? float8_unit(j->codes->kind) : 1.0f;
  u->score_scale = j->layer->scale * unit * k_scale(j->codes, kv_head);
  u->value_scale = v_scale(j->codes, kv_head) * unit;
  prepare_rows(j, u, path);
}

/* Attend to keys start..end in a row; the unit's go on to `unit_end`. */
static void run_keys(const struct job *j, struct unit *u, int64_t start, int64_t end,
                     int64_t unit_end) {
  if (u->path == MANY) run_matrices(j, u, start, end);
  else if (u->path == WIDE) run_wide(j, u, start, end);
  else if (u->path == FEW) run_few(j, u, start, end, unit_end);
  else run_tiles(j, u, start, end, unit_end);
}

/* The sums of a unit's rows over those keys in start..end that some row sees: the ones below its
 * prefix, and those of the union of the rows' spans. */
static void sum_keys(const struct job *j, struct unit *u, int64_t start, int64_t end) {
  const struct span all = u->all;
  for (int n = 0; n < padded_rows(u) * u->copies; ++n) {
    u->lane.largest[n] = -INFINITY;
    u->lane.denominator[n] = 0.0f;
  }
  if (u->path == MANY) begin_many(j, u);
  else if (u->path == FEW) begin_few(j, u);
  else memset(u->acc, 0, padded_rows(u) * j->v_width * sizeof(float));
  if (end > all.hi) end = all.hi;
  const int64_t prefix = u->prefix < all.hi ? u->prefix : all.hi;
  if (start < prefix) {
    show_keys(u, (struct span){0, prefix}, 1);
    run_keys(j, u, start, end < prefix ? end : prefix, prefix);
    show_keys(u, (struct span){prefix, NO_LIMIT}, 0);
    start = prefix;
  }
  if (start < all.lo) start = all.lo;
  if (start < end) run_keys(j, u, start, end, all.hi);
  if (u->path == MANY) unpack_sums(j, u);
  for (int r = 0; r < u->rows; ++r) {
    u->largest[r] = u->lane.largest[r * u->copies];
    u->denominator[r] = 0.0f;
    for (int n = 0; n < u->copies; ++n) u->denominator[r] += u->lane.denominator[r * u->copies + n];
  }
}

INLINE int64_t rows_of_request(const struct batch *b, const struct layer *l, int64_t req) {
  return (b->query_start_loc[req + 1] - b->query_start_loc[req]) * (l->num_heads / l->num_kv_heads);
}

#define FEW_ROWS 16 /* up to so many leave keys where they lie */

/* Who does the rows of a request. Trees are none of the matrix unit's; and one block of vectors reads
 * integers as they are, in 0.93 of the time that it takes to make them bfloat16. */
INLINE enum path path_of(const struct job *j, int64_t req) {
  if (!(j->matrices || j->wide) || tree_word(j->batch, req, 0)) return VECTORS;
  const int64_t rows = rows_of_request(j->batch, j->layer, req);
  if (j->wide) return rows <= FEW_ROWS ? VECTORS : WIDE;
  if (j->codes && j->codes->kind == INT8 && rows <= ROWS) return VECTORS;
  return rows <= SIDE ? FEW : MANY;
}

/* An item is one split of a unit, whose last one to finish merges them and writes; or, where a
 * request has many rows and so enough units for all threads, all splits of a unit. */
static void run_item(struct job *j, struct unit *u, int64_t item) {
  const struct batch *b = j->batch;
  const struct layer *l = j->layer;
  int64_t at = 0;
  for (int64_t above = b->num_served; above - at > 1;) {
    const int64_t middle = (at + above) / 2;
    if (j->first_item[middle] <= item) at = middle;
    else above = middle;
  }
  const int64_t num_units = j->first_unit[at + 1] - j->first_unit[at];
  const int64_t items_per_unit = (j->first_item[at + 1] - j->first_item[at]) / num_units;
  const int64_t index = (item - j->first_item[at]) / items_per_unit;
  const int64_t chunks = num_units / l->num_kv_heads;
  const enum path path = path_of(j, b->served[at]);
  take_unit(j, u, b->served[at], index / chunks,
            index % chunks * (has_many_rows(path) ? j->many_rows : MAX_ROWS), path);

  int64_t num_splits = items_per_unit, split = (item - j->first_item[at]) % items_per_unit;
  int64_t last = split;
  struct cuts cuts;
  float *parts = u->parts;
  if (has_many_rows(path) && items_per_unit == 1) {
    sum_keys(j, u, 0, NO_LIMIT);
    finish_rows(j, u);
    return;
  }
  if (items_per_unit > 1) {
    const int64_t rows = rows_of_request(b, l, u->req);
    const int64_t row = j->first_partial[at] + num_splits * (u->kv_head * rows + u->first_row);
    parts = j->partials + row * (j->v_width + 2);
    cuts = cut_keys(keys_of_request(b, l, u->req), u->prefix);
  } else {
    cuts = cut_keys(u->all, u->prefix);
    num_splits = cuts.num;
    last = num_splits - 1;
  }
  for (; split <= last; ++split) {
    const int64_t start = split_start(cuts, split);
    sum_keys(j, u, start, start + SPLIT_KEYS);
    if (path == FEW && !are_finite(j, u)) {
      prepare_rows(j, u, MANY);
      sum_keys(j, u, start, start + SPLIT_KEYS);
      prepare_rows(j, u, FEW);
    }
    if (num_splits > 1) keep_split(j, u, parts + split * u->rows * (j->v_width + 2));
  }
  if (items_per_unit > 1 &&
      __atomic_sub_fetch(&j->pending[j->first_unit[at] + index], 1, __ATOMIC_ACQ_REL))
    return;
  if (num_splits > 1) merge_splits(j, u, parts, num_splits);
  finish_rows(j, u);
}

INLINE int64_t rows_of_acc(const struct job *j) {
  return j->many_rows > MAX_ROWS ? j->many_rows : MAX_ROWS;
}

static void work(void *argument) {
  struct job *j = argument;
  struct unit u;
  u.req = -1;
  u.q = j->workspace + __atomic_fetch_add(&j->next_workspace, j->workspace_size, __ATOMIC_RELAXED);
  u.scores = u.q + MAX_ROWS * j->q_width;
  u.parts = u.scores + MAX_ROWS * TILE;
  u.acc = u.parts + j->whole_splits * MAX_ROWS * (j->v_width + 2);
  u.wide = u.acc + rows_of_acc(j) * j->v_width;
  float *rest = u.wide + (j->widen ? TILE * (j->q_width + j->v_width) : 0);
#ifdef ATTNKIT_INTEGERS
  place_integers(j, &u, rest);
  if (j->integers) rest += integer_floats(j);
#endif
  if (j->matrices) place_matrices(j, &u, rest);
  else if (j->wide) place_wide(j, &u, rest);
  for (;;) {
    const int64_t first = __atomic_fetch_add(&j->next_item, j->portion, __ATOMIC_RELAXED);
    if (first >= j->num_items) break;
    for (int64_t i = first; i < first + j->portion && i < j->num_items; ++i) run_item(j, &u, i);
  }
  if (j->matrices) end_matrices();
}

/* Rows of a unit of many, such that there are units for all threads. Bits do not depend on it. */
static int64_t rows_of_many(const struct job *j, int64_t num_threads) {
  int64_t all = 1;
  for (int64_t i = 0; i < j->batch->num_served; ++i) {
    const int64_t req = j->batch->served[i];
    if (has_many_rows(path_of(j, req)))
      all += rows_of_request(j->batch, j->layer, req) * j->layer->num_kv_heads;
  }
  const int64_t share = (all + num_threads * 4 * MAX_ROWS - 1) / (num_threads * 4 * MAX_ROWS) * MAX_ROWS;
  const int64_t most = j->wide ? WIDE_ROWS : MATRIX_ROWS;
  return share < most ? share : most;
}

/* Attend: returns OK, NO_MEMORY or BAD_BLOCK; nothing has been written unless OK.
 *
 * Strides are in elements. `v` is where V begins in the same or another tensor. Where `codes` is not
 * NULL, K and V are bytes and `kv_dtype` is not looked at. `block_size`, `num_blocks` and
 * `table_width` bound the block table. `lse` may be NULL. */
int64_t attnkit_attend(const struct batch *batch, const struct layer *layer, const char *q,
                       int64_t q_dtype, int64_t q_token, int64_t q_head, const char *k,
                       int64_t k_block, int64_t k_token, int64_t k_head, const char *v,
                       int64_t v_block, int64_t v_token, int64_t v_head, int64_t kv_dtype,
                       const struct codes *codes, int64_t num_blocks, int64_t block_size,
                       int64_t table_width, char *out, int64_t out_dtype, int64_t out_token,
                       int64_t out_head, float *lse, int64_t lse_stride, int64_t num_threads,
                       parallel_fn parallel) {
  const int64_t n = batch->num_served, q_size = size_of(q_dtype), out_size = size_of(out_dtype);
  const int64_t kv_size = codes ? 1 : size_of(kv_dtype);
  const int64_t k_bytes =
      codes ? vector_bytes(codes, layer->head_size) : layer->head_size * kv_size;
  const int64_t v_bytes =
      codes ? vector_bytes(codes, layer->head_size_v) : layer->head_size_v * kv_size;
  int64_t *offsets = malloc((3 * n + 2) * sizeof *offsets);
  if (!offsets) return NO_MEMORY;
  struct job j = {.batch = batch,
                  .layer = layer,
                  .lse = lse,
                  .lse_stride = lse_stride,
                  .q = {(char *)q, 0, q_token * q_size, q_head * q_size},
                  .k = {(char *)k, k_block * kv_size, k_token * kv_size, k_head * kv_size},
                  .v = {(char *)v, v_block * kv_size, v_token * kv_size, v_head * kv_size},
                  .out = {out, 0, out_token * out_size, out_head * out_size},
                  .q_dtype = q_dtype,
                  .kv_dtype = kv_dtype,
                  .codes = codes,
                  .out_dtype = out_dtype,
                  .block_size = block_size,
                  .q_width = (layer->head_size + PIECE - 1) / PIECE * PIECE,
                  .v_width = (layer->head_size_v + PIECE - 1) / PIECE * PIECE,
                  .widen = layer->head_size % PIECE || layer->head_size_v % PIECE,
                  .first_item = offsets,
                  .first_unit = offsets + n + 1,
                  .first_partial = offsets + 2 * n + 2};
  if (codes && codes->kind != INT8) j.widen = 1; /* integers are read as they are */
  j.row_dtype = j.widen ? codes ? decoded_dtype(codes->kind) : F32 : codes ? I8 : kv_dtype;
  if (v - k == k_bytes) j.fetch_bytes = k_bytes + v_bytes;
  else if (v == k) j.fetch_bytes = k_bytes > v_bytes ? k_bytes : v_bytes; /* latents: V in K */
  const int half = q_dtype == BF16 && (codes || kv_dtype == BF16);
  j.matrices = matrix_unit && half;
  j.wide = !matrix_unit && half && LANES >= 8;
#ifdef ATTNKIT_INTEGERS
  j.integers = half && codes && codes->kind == INT8 && codes->token_scales &&
               layer->head_size % RUN == 0 && layer->head_size_v % RUN == 0 &&
               layer->head_size <= MOST_CHANNELS;
#endif
  j.many_rows = rows_of_many(&j, num_threads);
  j.whole_sides = !codes && (!batch->block_table || block_size % SIDE == 0);
  int64_t status = OK, num_units = 0, num_partials = 0, numbers = 0, cost = 0;
  for (int64_t i = 0; i < n && status == OK; ++i) {
    const int64_t req = batch->served[i];
    const int64_t rows = rows_of_request(batch, layer, req);
    const enum path path = path_of(&j, req);
    const int64_t most = has_many_rows(path) ? j.many_rows : MAX_ROWS;
    const struct span keys = keys_of_request(batch, layer, req);
    const int64_t prefix = prefix_of(batch, layer, req);
    const struct span below = {0, prefix < keys.hi ? prefix : keys.hi};
    if (!has_blocks(batch, req, keys, block_size, table_width, num_blocks) ||
        !has_blocks(batch, req, below, block_size, table_width, num_blocks))
      status = BAD_BLOCK;
    const int64_t splits = cut_keys(keys, prefix).num;
    const int64_t units = (rows + most - 1) / most * layer->num_kv_heads;
    j.first_item[i] = j.num_items;
    j.first_unit[i] = num_units;
    j.first_partial[i] = num_partials;
    const int divide = splits > 1 && rows <= DIVIDED_ROWS;
    j.num_items += units * (divide ? splits : 1);
    num_units += units;
    if (divide) num_partials += rows * layer->num_kv_heads * splits;
    else if (!has_many_rows(path) && splits > 1 && splits > j.whole_splits) j.whole_splits = splits;
    const int64_t width = layer->num_kv_heads * (layer->head_size + layer->head_size_v);
    numbers += (keys.hi - keys.lo + below.hi) * width;
    cost += (keys.hi - keys.lo + below.hi + 16) * rows * width;
  }
  j.first_item[n] = j.num_items;
  j.first_unit[n] = num_units;
  /* Waking the other threads costs some microseconds; one thread does so many multiply-adds in 25, and
   * reads so many numbers from memory in 30: SmolLM2's 512 tokens take two threads 0.75 of the time. */
  if (!parallel || j.num_items == 1 || (cost < 1000000 && numbers < 100000)) num_threads = 1;
  j.portion = j.num_items / (num_threads * 16) + 1;
  j.workspace_size = MAX_ROWS * (j.q_width + TILE) + j.whole_splits * MAX_ROWS * (j.v_width + 2) +
                     rows_of_acc(&j) * j.v_width +
                     (j.widen ? TILE * (j.q_width + j.v_width) : 0) +
                     (j.matrices ? matrix_floats(&j) : j.wide ? wide_floats(&j) : 0);
#ifdef ATTNKIT_INTEGERS
  if (j.integers) j.workspace_size += integer_floats(&j);
#endif
  j.workspace_size = (j.workspace_size + 15) / 16 * 16;
  if (status == OK) {
    j.workspace = aligned_alloc(64, num_threads * j.workspace_size * sizeof(float));
    if (!j.workspace) status = NO_MEMORY;
  }
  if (status == OK && num_partials) {
    j.partials = malloc(num_partials * (j.v_width + 2) * sizeof(float));
    j.pending = malloc(num_units * sizeof *j.pending);
    if (!j.partials || !j.pending) status = NO_MEMORY;
  }
  if (status == OK) {
    for (int64_t i = 0; i < n && j.pending; ++i) {
      const int64_t units = j.first_unit[i + 1] - j.first_unit[i];
      for (int64_t u = 0; u < units; ++u)
        j.pending[j.first_unit[i] + u] = (j.first_item[i + 1] - j.first_item[i]) / units;
    }
    if (num_threads > 1) parallel(work, &j, num_threads, 0);
    else work(&j);
  }
  free(j.workspace);
  free(j.pending);
  free(j.partials);
  free(offsets);
  return status;
}

/* Whether queries in bfloat16 are multiplied in a matrix unit. */
int64_t attnkit_has_matrix_unit(void) { return matrix_unit; }
