// Where a key or value of a token stands in the cache. The same on every instruction set, so a block that was swapped
// out under one set can come back under another.
//
// A block is [layer][kv head][piece]. With a block size that is a multiple of 16 the piece is block_size / 16 tiles of
// 16 tokens, else the tokens one after the other ("flat"), which the attention gathers into tiles as it goes.
//
//   tile   K [dims / group][16 tokens][group] | V [16 / group tokens][dims][group] | scales
//   flat   K [block_size][dims]               | V [block_size][dims]               | scales
//
// dims is head_size rounded up to 16 (the rest is zero); group, the number of elements in a 32-bit lane: 1 for f32, 2
// for 16-bit types and fp8 (a 16-bit lane there), 4 for int8. int8 has one f32 scale per token for K, then for V:
// value = scale * integer. fp8 has none: values are rounded as they are and saturate.
#pragma once
#include <stdint.h>

#include "kernels.h"

namespace octavo {

constexpr int kTile = 16;  // tokens
constexpr int kMaxHeadSize = 512;

inline int kv_element_bytes(int dtype) { return dtype == OCT_F32 ? 4 : dtype == OCT_BF16 || dtype == OCT_F16 ? 2 : 1; }
inline int kv_group(int dtype) { return dtype == OCT_F32 ? 1 : dtype == OCT_I8 ? 4 : 2; }

struct KvLayout {
  int dtype, block_size, head_size, dims, element, group;
  bool tiled;
  int64_t k_bytes, v_offset, scale_offset, piece_bytes;  // of a tile, or of a whole flat piece
  int64_t head_bytes, layer_bytes, block_bytes;

  KvLayout(const oct_spec& spec, int block_size, int dtype) : dtype(dtype), block_size(block_size) {
    head_size = spec.head_size;
    dims = (head_size + 15) / 16 * 16;
    element = kv_element_bytes(dtype);
    group = kv_group(dtype);
    tiled = block_size % kTile == 0;
    int tokens = tiled ? kTile : block_size;
    k_bytes = (int64_t)tokens * dims * element;
    v_offset = k_bytes;
    scale_offset = 2 * k_bytes;
    piece_bytes = (scale_offset + (dtype == OCT_I8 ? 2 * 4 * tokens : 0) + 63) / 64 * 64;
    head_bytes = piece_bytes * (tiled ? block_size / kTile : 1);
    layer_bytes = head_bytes * spec.kv_heads;
    block_bytes = layer_bytes * spec.layers;
  }

  // The tile or flat piece of `block` that holds token `slot` of the block.
  uint8_t* piece(const oct_kv& kv, int64_t block, int layer, int head, int slot) const {
    uint8_t* p = (uint8_t*)kv.data + block * block_bytes + layer * layer_bytes + head * head_bytes;
    return tiled ? p + slot / kTile * piece_bytes : p;
  }
};

}  // namespace octavo
