/* The write of K and V into their pages: copied, or encoded.
 *
 * In: K and V of a step, the slot of each token, pointers and strides. Out: the bytes of those slots
 * and no others. `launch.py` is the only caller. */
#include "codes.h"

#define PORTION 64 /* tokens a thread takes at a time */
#define CHUNK 128  /* numbers converted at a time; a multiple of BLOCK */

struct write_job {
  struct tensor k, v, cache;
  const int64_t *slots;
  int64_t num_tokens, num_heads, block_size, next;
  int64_t k_bytes, v_bytes;        /* of vectors in the cache */
  const struct codes *codes;       /* NULL: vectors are copied */
  int64_t head_size, head_size_v; /* where they are encoded */
  int dtype;                       /* of K and V then */
};

/* Encode a vector of one head. */
static void encode_vector(const char *from, int dtype, int64_t size, const struct codes *c,
                          float scale, uint8_t *to) {
  float x[CHUNK];
  uint8_t *scales = to + code_bytes(c->kind, size);
  if (c->token_scales) {
    uint32_t largest = 0;
    for (int64_t at = 0; at < size; at += CHUNK) {
      const int64_t n = size - at < CHUNK ? size - at : CHUNK;
      load_row(from + at * size_of(dtype), dtype, F32, n, n, x);
      const uint32_t here = largest_bits(x, n);
      largest = here > largest ? here : largest;
    }
    scale = token_scale(largest, c->kind);
    memcpy(scales, &scale, 4);
  }
  for (int64_t at = 0; at < size; at += CHUNK) {
    const int64_t n = size - at < CHUNK ? size - at : CHUNK;
    load_row(from + at * size_of(dtype), dtype, F32, n, n, x);
    if (c->kind != NVFP4) {
      write_codes(x, n, c->kind, c->token_scales, scale, to + code_bytes(c->kind, at));
      continue;
    }
    for (int64_t b = 0; b < n; b += BLOCK) {
      const uint8_t own = block_scale(largest_bits(x + b, BLOCK), scale);
      scales[(at + b) / BLOCK] = own;
      write_codes(x + b, BLOCK, NVFP4, 0, from_bf16(bf16_of_e4m3(own)) * scale, to + (at + b) / 2);
    }
  }
}

static void write_tokens(void *argument) {
  struct write_job *w = argument;
  const struct codes *c = w->codes;
  for (;;) {
    const int64_t first = __atomic_fetch_add(&w->next, PORTION, __ATOMIC_RELAXED);
    if (first >= w->num_tokens) return;
    const int64_t end = first + PORTION < w->num_tokens ? first + PORTION : w->num_tokens;
    for (int64_t t = first; t < end; ++t) {
      const int64_t slot = w->slots[t];
      if (slot < 0) continue;
      char *to = w->cache.data + slot / w->block_size * w->cache.block_stride +
                 slot % w->block_size * w->cache.token_stride;
      for (int64_t h = 0; h < w->num_heads; ++h, to += w->cache.head_stride) {
        const char *k = w->k.data + t * w->k.token_stride + h * w->k.head_stride;
        const char *v = w->v.data + t * w->v.token_stride + h * w->v.head_stride;
        if (c) {
          encode_vector(k, w->dtype, w->head_size, c, k_scale(c, h), (uint8_t *)to);
          encode_vector(v, w->dtype, w->head_size_v, c, v_scale(c, h),
                        (uint8_t *)to + w->k_bytes);
        } else {
          memcpy(to, k, w->k_bytes);
          memcpy(to + w->k_bytes, v, w->v_bytes);
        }
      }
    }
  }
}

/* Write K and V of each token to its slot, K first; -1 is skipped. Returns OK or BAD_SLOT; nothing
 * has been written unless OK. Two tokens must not share a slot. Strides are in bytes; `dtype` is that
 * of K and V, and the cache's where `codes` is NULL. */
int64_t attnkit_write_kv(const char *k, int64_t k_token, int64_t k_head, const char *v,
                         int64_t v_token, int64_t v_head, int64_t dtype, int64_t head_size,
                         int64_t head_size_v, char *cache, int64_t block_stride,
                         int64_t token_stride, int64_t head_stride, const struct codes *codes,
                         const int64_t *slots, int64_t num_tokens, int64_t num_heads,
                         int64_t num_blocks, int64_t block_size, int64_t num_threads,
                         parallel_fn parallel) {
  for (int64_t t = 0; t < num_tokens; ++t)
    if (slots[t] < -1 || slots[t] >= num_blocks * block_size) return BAD_SLOT;
  struct write_job w = {
      .k = {(char *)k, 0, k_token, k_head},
      .v = {(char *)v, 0, v_token, v_head},
      .cache = {cache, block_stride, token_stride, head_stride},
      .slots = slots,
      .num_tokens = num_tokens,
      .num_heads = num_heads,
      .block_size = block_size,
      .k_bytes = codes ? vector_bytes(codes, head_size) : head_size * size_of(dtype),
      .v_bytes = codes ? vector_bytes(codes, head_size_v) : head_size_v * size_of(dtype),
      .codes = codes,
      .head_size = head_size,
      .head_size_v = head_size_v,
      .dtype = dtype};
  /* A number that is encoded costs as much as some ten bytes that are copied. */
  const int64_t cost = codes ? 10 * (head_size + head_size_v) : w.k_bytes + w.v_bytes;
  if (num_threads > 1 && parallel && num_tokens * num_heads * cost > 1000000)
    parallel(write_tokens, &w, num_threads, 0);
  else write_tokens(&w);
  return OK;
}
