/* What the calls of the host have in common: how they end, where a tensor lies, how a quantised
 * cache stores numbers, whose threads run them. `operands.py` mirrors the structs. */
#ifndef ATTNKIT_CALL_H
#define ATTNKIT_CALL_H

#include <stdint.h>

enum status { OK = 0, NO_MEMORY = 1, BAD_BLOCK = 2, BAD_SLOT = 3 };

struct tensor { /* strides in bytes */
  char *data;
  int64_t block_stride, token_stride, head_stride;
};

/* A vector of K or V is its codes and, right behind them, the scales stored beside them. */
struct codes {
  int64_t kind;                   /* an `enum kind` of codes.h */
  int64_t token_scales;           /* a float32 stands behind the codes of every vector */
  const float *k_scale, *v_scale; /* the layer's; NULL: it has no part in this format */
  int64_t k_stride, v_stride;     /* to the next KV head's; 0: one for all */
};

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);

#endif
