/* Products of few rows with a weight, y = x W^T + b, in the processor's matrix unit.
 *
 * In: rows of bfloat16, and a weight as oneDNN packs it for that unit: blocks of COLUMNS columns of the
 * result after each other, in each the numbers of PIECE channels after each other, pairs of channels
 * innermost: [columns / 32][channels / 32][16][32][2]. Out: rows of bfloat16, summed up in float32.
 * `launch.py` is the only caller.
 *
 * How: in a decode step weights are read once for a few rows, so the time is the memory's and that of the
 * calls themselves. Each thread reads one run of blocks, as memory delivers fastest; a block is in the
 * second cache when the next rows ask for it. A row's bits do not depend on the other rows. */
#include "amx.h"
#include "call.h"

#define COLUMNS 32 /* of a block */
#define PIECE 32   /* channels of a matrix register */

struct linear {
  const uint16_t *weight, *bias; /* `bias` may be NULL */
  int64_t columns, channels;     /* whole blocks and pieces */
};

#ifdef ATTNKIT_AMX

struct product {
  const struct linear *linear;
  const uint16_t *x;
  uint16_t *y;
  int64_t rows, num_threads, next_thread;
};

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

/* One block of columns, for the rows from `a` on that a register holds, and those from `b` on. */
static void multiply_block(const struct product *p, int64_t block, int64_t a, int64_t b) {
  const struct linear *l = p->linear;
  const int64_t rows = p->rows < SIDE ? p->rows : SIDE, line = l->channels * 2;
  const uint16_t *w = l->weight + block * COLUMNS * l->channels;
  const uint16_t *xa = p->x + a * l->channels, *xb = p->x + b * l->channels;
  float sums[SIDE * COLUMNS] __attribute__((aligned(64)));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < l->channels; k += PIECE, w += PIECE * COLUMNS) {
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
  store_sums(l, sums, rows, block * COLUMNS, p->y + a * l->columns);
  if (a == b) return;
  _tile_stored(2, sums, 4 * COLUMNS);
  _tile_stored(3, sums + SIDE, 4 * COLUMNS);
  store_sums(l, sums, rows, block * COLUMNS, p->y + b * l->columns);
}

/* The last registers begin early enough to be full: some rows come out twice, the same. */
static void multiply_blocks(void *argument) {
  struct product *p = argument;
  const int64_t thread = __atomic_fetch_add(&p->next_thread, 1, __ATOMIC_RELAXED);
  const int64_t blocks = p->linear->columns / COLUMNS, last = p->rows > SIDE ? p->rows - SIDE : 0;
  const int64_t end = blocks * (thread + 1) / p->num_threads;
  begin_registers(p->rows < SIDE ? p->rows : SIDE);
  for (int64_t i = blocks * thread / p->num_threads; i < end; ++i)
    for (int64_t row = 0; row < p->rows; row += 2 * SIDE) {
      const int64_t a = row < last ? row : last;
      multiply_block(p, i, a, a + SIDE < last ? a + SIDE : last);
    }
  _tile_release();
}
#endif

/* `x` has `rows` dense rows of channels and `y` of columns. To be called where there is a matrix unit. */
int64_t attnkit_linear(const struct linear *linear, const uint16_t *x, uint16_t *y, int64_t rows,
                       int64_t num_threads, parallel_fn parallel) {
#ifdef ATTNKIT_AMX
  if (!rows) return OK;
  /* Waking the other threads costs as much as reading this many numbers of a weight. */
  if (!parallel || linear->columns * linear->channels < 50000) num_threads = 1;
  struct product p = {linear, x, y, rows, num_threads, 0};
  if (num_threads > 1) parallel(multiply_blocks, &p, num_threads, 0);
  else multiply_blocks(&p);
#else
  (void)linear, (void)x, (void)y, (void)rows, (void)num_threads, (void)parallel;
#endif
  return OK;
}
