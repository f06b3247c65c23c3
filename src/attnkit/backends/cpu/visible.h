/* Which keys a query sees, and where the keys of a request are cut.
 *
 * In: a batch and a layer (`operands.py` mirrors both structs). Out: per query one span of keys and, of
 * requests with a prefix that no window hides, what lies below it; and cuts at multiples of
 * SPLIT_KEYS that leave out the gap between the two. */
#ifndef ATTNKIT_VISIBLE_H
#define ATTNKIT_VISIBLE_H

#include <stdint.h>

#define SPLIT_KEYS 1024 /* a multiple of TILE; short requests have one split and no merge */
#define NO_LIMIT ((int64_t)1 << 40) /* beyond any position, and far from overflow */

struct batch {
  int64_t num_served;             /* rows of the batch this call serves */
  const int32_t *served;          /* (num_served,) which */
  const int32_t *query_start_loc; /* (num_reqs + 1,) */
  const int32_t *seq_lens;        /* (num_reqs,) */
  const uint8_t *causal;          /* (num_reqs,) */
  const int32_t *block_table;     /* (num_reqs, table_stride); NULL: keys lie at their tokens */
  int64_t table_stride;
  const int32_t *spans;       /* (num_tokens, 2) keys a token sees beside the layer's mask; or NULL */
  const int32_t *prefix_lens; /* (num_reqs,) keys below are not left of any window; or NULL */
  const int64_t *tree; /* (num_tokens,) bit j: sees its request's j-th new token; or NULL */
};

struct layer {
  int64_t num_heads, num_kv_heads, head_size, head_size_v;
  int64_t window;              /* keys seen on the left, itself included; 0: no window */
  float scale, soft_cap;       /* soft_cap 0: none */
  const float *slopes, *sinks; /* (num_heads,) or NULL */
  int64_t alibi_sqrt;
};

struct span {
  int64_t lo, hi;
}; /* lo <= key < hi, empty where equal */

/* Keys that query i of a request sees, beside those below both its prefix and `hi`. */
static struct span visible_keys(const struct batch *b, const struct layer *l, int64_t req,
                                int64_t i) {
  const int64_t query_len = b->query_start_loc[req + 1] - b->query_start_loc[req];
  const int64_t seq_len = b->block_table ? b->seq_lens[req] : query_len;
  const int64_t window = l->window && l->window < NO_LIMIT ? l->window : NO_LIMIT;
  const int64_t pos = seq_len - query_len + i, right = b->causal[req] ? 1 : window;
  struct span keys = {pos - window + 1, pos + right < seq_len ? pos + right : seq_len};
  if (b->spans) { /* the union has no gap: both hold the token itself */
    const int32_t *span = b->spans + 2 * (b->query_start_loc[req] + i);
    if (span[0] < keys.lo) keys.lo = span[0];
    if (span[1] > keys.hi) keys.hi = span[1] < seq_len ? span[1] : seq_len;
  }
  if (keys.lo < 0) keys.lo = 0;
  if (keys.hi < keys.lo) keys.hi = keys.lo;
  return keys;
}

/* What any query of a request sees, likewise: its first one sees farthest to the left, its last one
 * to the right. */
static inline struct span keys_of_request(const struct batch *b, const struct layer *l,
                                          int64_t req) {
  const int64_t query_len = b->query_start_loc[req + 1] - b->query_start_loc[req];
  return (struct span){visible_keys(b, l, req, 0).lo, visible_keys(b, l, req, query_len - 1).hi};
}

/* The word of query i of a request; 0: the request is no tree. */
static inline uint64_t tree_word(const struct batch *b, int64_t req, int64_t i) {
  return b->tree ? (uint64_t)b->tree[b->query_start_loc[req] + i] : 0;
}

/* End of the keys that no window hides. */
static inline int64_t prefix_of(const struct batch *b, const struct layer *l, int64_t req) {
  return b->prefix_lens && l->window ? b->prefix_lens[req] : 0;
}

/* Splits of the keys that some query of a request or unit sees: first those of its prefix, then
 * those of its span that are not among them. */
struct cuts {
  int64_t num_prefix, first, num; /* splits of the prefix; number of the span's first; all, >= 1 */
};
static inline struct cuts cut_keys(struct span keys, int64_t prefix) {
  struct cuts c = {((prefix < keys.hi ? prefix : keys.hi) + SPLIT_KEYS - 1) / SPLIT_KEYS,
                   keys.lo / SPLIT_KEYS, 0};
  if (c.first < c.num_prefix) c.first = c.num_prefix;
  const int64_t end = keys.lo < keys.hi ? (keys.hi - 1) / SPLIT_KEYS + 1 : c.first;
  c.num = c.num_prefix + (end > c.first ? end - c.first : 0);
  if (c.num < 1) c.num = 1;
  return c;
}
static inline int64_t split_start(struct cuts c, int64_t split) {
  return (split < c.num_prefix ? split : c.first + split - c.num_prefix) * SPLIT_KEYS;
}

/* Whether the table has blocks of the cache for keys lo..hi. */
static int has_blocks(const struct batch *b, int64_t req, struct span keys, int64_t block_size,
                      int64_t table_width, int64_t num_blocks) {
  if (!b->block_table || keys.lo >= keys.hi) return 1;
  const int32_t *table = b->block_table + req * b->table_stride;
  const int64_t last = (keys.hi - 1) / block_size;
  if (last >= table_width) return 0;
  for (int64_t i = keys.lo / block_size; i <= last; ++i)
    if (table[i] < 0 || table[i] >= num_blocks) return 0;
  return 1;
}

#endif
