/* The tile of keys at hand and those after it: where their rows lie, asked for in time.
 *
 * In: a unit, and the keys it goes through. Out: pointers to rows of K and V, a tile at a time, and
 * rows to be fetched meanwhile: those of the next tile, in the order of memory and spread over the
 * work, since a core waits for few lines of memory at once. Of each page of memory of a later tile the
 * first line is fetched here, so that before its rows are asked for addresses are translated. */
#ifndef ATTNKIT_AHEAD_H
#define ATTNKIT_AHEAD_H

#include "unit.h"

#define AHEAD 4 /* tiles whose rows are known: the one at hand and those after it */
#define MEMORY_PAGE 4096

struct located { const char *keys[TILE], *values[TILE]; };
struct ahead {
  int64_t known; /* rows are located up to here; at first, the first key */
  struct located tiles[AHEAD];
};

INLINE struct located *tile_at(struct ahead *a, int64_t base) {
  return &a->tiles[base / TILE % AHEAD];
}

/* Locate the rows of the tile at `base`, a multiple of TILE, and of those after it. Keys go on to
 * `unit_end`, past the end of a split too: the thread goes on there. */
static void look_ahead(const struct job *j, const struct unit *u, struct ahead *a, int64_t base,
                       int64_t unit_end) {
  const int64_t stride = j->k.token_stride;
  const int page_rows = stride > 0 && stride < MEMORY_PAGE ? MEMORY_PAGE / stride : 1;
  while (a->known < unit_end && a->known < base + AHEAD * TILE) {
    const int64_t at = a->known - a->known % TILE;
    const int lo = a->known - at, hi = unit_end - at < TILE ? unit_end - at : TILE;
    struct located *tile = tile_at(a, at);
    locate_rows(j, u, at, lo, hi, tile->keys, tile->values);
    for (int t = 0; t < lo; ++t) tile->keys[t] = tile->keys[lo];
    for (int t = hi; t < TILE; ++t) tile->keys[t] = tile->keys[hi - 1];
    if (j->fetch_bytes)
      for (int t = 0; t < TILE; t += page_rows) __builtin_prefetch(tile->keys[t], 0, 2);
    a->known = at + TILE;
  }
}

/* Rows of a tile to be fetched, in `parts` parts: so many calls of `fetch_some` fetch all of them. */
struct fetch {
  const char *const *rows; /* TILE of them; NULL: none */
  int64_t bytes;
  int part, parts;
};
INLINE struct fetch fetch_rows(const struct job *j, struct ahead *a, int64_t base, int64_t unit_end,
                               int parts) {
  const char *const *rows = j->fetch_bytes && base < unit_end ? tile_at(a, base)->keys : NULL;
  return (struct fetch){rows, j->fetch_bytes, 0, parts};
}
INLINE void fetch_some(struct fetch *f) {
  if (!f->rows || f->part == f->parts) return;
  const int end = (f->part + 1) * TILE / f->parts;
  for (int t = f->part * TILE / f->parts; t < end; ++t) prefetch_row(f->rows[t], f->bytes);
  ++f->part;
}

#endif
