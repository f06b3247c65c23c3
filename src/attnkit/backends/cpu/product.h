/* Products of rows with the weights of linear layers, as the host asks for them. `linear.c` describes both. */
#ifndef ATTNKIT_PRODUCT_H
#define ATTNKIT_PRODUCT_H

#include <stdint.h>

#define COLUMNS 32 /* of a block */

struct linear {
  const uint16_t *weight, *bias; /* `bias` may be NULL */
  int64_t columns, channels;     /* whole blocks and pieces */
};

struct product {
  const struct linear *const *linears;
  uint16_t *const *y;
  const uint16_t *x;
  int64_t rows, num_blocks, num_threads, next_thread;
  float *workspace; /* of vectors: (num_threads, chunk, channels), for rows as float32 */
  int64_t chunk;    /* rows that are widened at a time */
};

#endif
