// Which output rows of each projection a block owns: even shares, in pairs, since the words that
// carry results hold two BF16.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

struct Rows {
  int first, last;
  DEVICE int count() const { return last - first; }
};
DEVICE Rows share(int rows) {
  const int pairs = rows / 2, block = blockIdx.x, grid = gridDim.x;
  return {2 * (block * pairs / grid), 2 * ((block + 1) * pairs / grid)};
}
// A share in one register, hidden from the compiler, which would rather divide again in every layer
// than keep it.
struct PackedRows {
  uint32_t bits;
  DEVICE explicit PackedRows(int rows) {
    const Rows r = share(rows);
    bits = r.first << 16 | r.last;
    asm volatile("" : "+r"(bits));
  }
  DEVICE operator Rows() const { return {(int)(bits >> 16), (int)(bits & 0xffff)}; }
};
static_assert(HIDDEN < 1 << 16 && TOP_K * EXPERT_WIDTH < 1 << 16, "16 bits hold a row's number");

struct Shares {
  PackedRows packed_, out_, router_, expert_, dense_;
  DEVICE Shares()
      : packed_(PACKED), out_(HIDDEN), router_(EXPERTS), expert_(TOP_K * EXPERT_WIDTH),
        dense_(DENSE_WIDTH) {}
  DEVICE Rows packed() const { return packed_; }
  DEVICE Rows out() const { return out_; }
  DEVICE Rows router() const { return router_; }
  DEVICE Rows expert() const { return expert_; }
  DEVICE Rows dense() const { return dense_; }
};
DEVICE int slots_of(int rows, int rows_per_slot) {
  return (rows + rows_per_slot - 1) / rows_per_slot;
}
