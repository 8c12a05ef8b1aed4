// AMX tile registers. Whoever uses them configures them first (some 100 cycles); the step releases them at its end.
#pragma once
#include "simd.h"

namespace octavo {
namespace OCT_ISA {

#if defined(__AMX_TILE__)
// Registers 0-3: results, 16 rows of 16. 4, 5: 16 rows of a_bytes. 6, 7: a_bytes / 4 rows of 64 bytes. Rows that nobody
// needs are computed and dropped.
static void configure_tiles(int a_bytes) {
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
  config.bytes[4] = config.bytes[5] = (uint16_t)a_bytes;
  config.rows[6] = config.rows[7] = (uint8_t)(a_bytes / 4);
  // Not the intrinsic: GCC 12 takes it to read 8 bytes only, and drops the rest of the stores.
  asm volatile("ldtilecfg %0" : : "m"(config));
}
// A thread with live tiles makes every context switch save 8 KiB.
static void release_tiles() { asm volatile("tilerelease"); }
// The tile intrinsics don't tell the compiler that they touch memory.
OCT_INLINE void tiles_fence() { asm volatile("" : : : "memory"); }
#else
static void release_tiles() {}
#endif

}  // namespace OCT_ISA
}  // namespace octavo
