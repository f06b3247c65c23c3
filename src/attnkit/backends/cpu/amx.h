/* The processor's matrix unit (AMX): whether it may be used, and its eight registers.
 *
 * `matrix_unit` is 0 on processors without one, and where the system does not let a process use it. */
#ifndef ATTNKIT_AMX_H
#define ATTNKIT_AMX_H

#include <stdint.h>

#define SIDE 16 /* a matrix register: 16 rows of 16 float32 or 32 bfloat16 */

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define ATTNKIT_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

static int matrix_unit;

__attribute__((constructor)) static void ask_for_matrix_unit(void) {
  enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM */
  matrix_unit = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

/* To be called by each thread, which ends with _tile_release: how many rows registers have, and bytes a
 * row. What they hold is lost. */
static void shape_registers(const uint8_t *rows, const uint16_t *row_bytes) {
  struct {
    uint8_t palette, start_row, none[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int i = 0; i < 8; ++i) config.row_bytes[i] = row_bytes[i], config.rows[i] = rows[i];
  __asm__ volatile("" ::: "memory"); /* gcc believes that only the first word is read */
  _tile_loadconfig(&config);
}

/* Registers 0 to 5, for left sides and results, of `rows` rows, 6 and 7, for right sides, of all. */
static void begin_registers(int n) {
  const uint8_t rows[8] = {n, n, n, n, n, n, SIDE, SIDE};
  const uint16_t row_bytes[8] = {64, 64, 64, 64, 64, 64, 64, 64};
  shape_registers(rows, row_bytes);
}

#else
enum { matrix_unit = 0 };
#endif

#endif
