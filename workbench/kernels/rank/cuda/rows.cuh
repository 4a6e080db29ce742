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
struct Shares {
  Rows packed, out, router, expert, dense, head;
  DEVICE explicit Shares(const Params& P)
      : packed(share(PACKED)), out(share(HIDDEN)), router(share(EXPERTS)),
        expert(share(TOP_K * EXPERT_WIDTH)), dense(share(DENSE_WIDTH)), head(share(P.vocabulary)) {}
};
DEVICE int slots_of(int rows, int rows_per_slot) { return (rows + rows_per_slot - 1) / rows_per_slot; }
