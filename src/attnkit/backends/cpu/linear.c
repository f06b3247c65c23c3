/* Products of few or many rows with weights, y = x W^T + b.
 *
 * In: rows of bfloat16, and weights in blocks of COLUMNS columns of the result after each other, in each
 * pairs of channels after each other, pairs of numbers innermost: [columns / 32][channels / 2][32][2]. So
 * oneDNN packs them for a matrix unit, where channels are whole pieces. Out: rows of bfloat16, summed up
 * in float32. `launch.py` is the only caller.
 *
 * How: in a decode step weights are read once for a few rows, so the time is the memory's and that of the
 * calls themselves. Weights of the same rows are one call. Each thread reads one run of blocks, as memory
 * delivers fastest; a block is in the second cache when the next rows ask for it. A row's bits do not
 * depend on the other rows. Here is the matrix unit's work, in `rows.h` that of vectors. */
#include <stdlib.h>

#include "amx.h"
#include "call.h"
#include "rows.h"

#define PIECE_CHANNELS 32 /* of a matrix register */

#ifdef ATTNKIT_AMX
/* Round a register's rows of two halves of a block, and put them into rows of `y`. */
static void store_sums(const struct linear *l, const float *sums, int64_t rows, int64_t column,
                       uint16_t *y) {
  __m512 bias[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int i = 0; l->bias && i < 2; ++i) {
    const __m256i h = _mm256_loadu_si256((const __m256i *)(l->bias + column + i * SIDE));
    bias[i] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }
  for (int64_t r = 0; r < rows; ++r, sums += COLUMNS) {
    const __m512 low = _mm512_add_ps(_mm512_loadu_ps(sums), bias[0]);
    const __m512 high = _mm512_add_ps(_mm512_loadu_ps(sums + SIDE), bias[1]);
    _mm512_storeu_si512(y + r * l->columns + column, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

/* One block of columns of `y`, for the rows from `a` on that a register holds, and those from `b` on. */
static void multiply_block(const struct product *p, const struct linear *l, uint16_t *y, int64_t block,
                           int64_t a, int64_t b) {
  const int64_t rows = p->rows < SIDE ? p->rows : SIDE, line = l->channels * 2;
  const uint16_t *w = l->weight + block * COLUMNS * l->channels;
  const uint16_t *xa = p->x + a * l->channels, *xb = p->x + b * l->channels;
  float sums[SIDE * COLUMNS] __attribute__((aligned(64)));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < l->channels; k += PIECE_CHANNELS, w += PIECE_CHANNELS * COLUMNS) {
    _tile_loadd(6, w, 4 * COLUMNS);
    _tile_loadd(7, w + 2 * SIDE, 4 * COLUMNS);
    _tile_loadd(4, xa + k, line);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (a == b) continue;
    _tile_loadd(5, xb + k, line);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 4 * COLUMNS);
  _tile_stored(1, sums + SIDE, 4 * COLUMNS);
  store_sums(l, sums, rows, block * COLUMNS, y + a * l->columns);
  if (a == b) return;
  _tile_stored(2, sums, 4 * COLUMNS);
  _tile_stored(3, sums + SIDE, 4 * COLUMNS);
  store_sums(l, sums, rows, block * COLUMNS, y + b * l->columns);
}

/* The last registers begin early enough to be full: some rows come out twice, the same. */
static void multiply_blocks(void *argument) {
  struct product *p = argument;
  const int64_t thread = __atomic_fetch_add(&p->next_thread, 1, __ATOMIC_RELAXED);
  const int64_t end = p->num_blocks * (thread + 1) / p->num_threads;
  const int64_t last = p->rows > SIDE ? p->rows - SIDE : 0;
  int64_t which = 0, before = 0; /* the weight of a block, and the blocks of those before it */
  begin_registers(p->rows < SIDE ? p->rows : SIDE);
  for (int64_t i = p->num_blocks * thread / p->num_threads; i < end; ++i) {
    while (i - before >= p->linears[which]->columns / COLUMNS)
      before += p->linears[which++]->columns / COLUMNS;
    for (int64_t row = 0; row < p->rows; row += 2 * SIDE) {
      const int64_t a = row < last ? row : last, b = a + SIDE < last ? a + SIDE : last;
      multiply_block(p, p->linears[which], p->y[which], i - before, a, b);
    }
  }
  _tile_release();
}
#endif

/* Whether vectors multiply rows: any number of them. Without, a matrix unit may multiply few. */
int64_t attnkit_has_vector_products(void) {
#ifdef ATTNKIT_ROWS
  return 1;
#else
  return 0;
#endif
}

/* The products of `x`, which has `rows` dense rows of channels, with `count` weights of as many channels;
 * `y` have dense rows of columns. To be called where there is a matrix unit or vectors multiply. */
int64_t attnkit_linear(const struct linear *const *linears, uint16_t *const *y, int64_t count,
                       const uint16_t *x, int64_t rows, int64_t num_threads, parallel_fn parallel) {
  if (!rows) return OK;
  const int64_t channels = linears[0]->channels;
  struct product p = {linears, y, x, rows, 0, num_threads, 0, NULL, 0};
  for (int64_t i = 0; i < count; ++i) p.num_blocks += linears[i]->columns / COLUMNS;
  /* Waking the other threads costs as much as reading this many numbers of a weight. */
  if (!parallel || p.num_blocks * COLUMNS * channels < 50000) p.num_threads = 1;
  void (*work)(void *) = NULL;
#ifdef ATTNKIT_ROWS
  work = multiply_pairs;
  p.chunk = rows_of_chunk(rows, channels);
  p.workspace = aligned_alloc(64, num_threads * (p.chunk * channels + 15) / 16 * 64);
  if (!p.workspace) return NO_MEMORY;
#elif defined(ATTNKIT_AMX)
  work = multiply_blocks;
#endif
  if (!work) return OK;
  if (p.num_threads > 1) parallel(work, &p, p.num_threads, 0);
  else work(&p);
  free(p.workspace);
  return OK;
}
