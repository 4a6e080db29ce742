// How one layer's keys are divided over the blocks. Producer and consumers compute the same plan.
//
// short: block = (split, query head), SHORT_CHUNKS (sliding layers: SLIDING_CHUNKS) chunks of 40
//        keys a split. K and V are read once a head, from L2 after the first; the combination is
//        done by every block for itself.
// all:   for contexts beyond SHORT_SPLITS such splits. Every block takes its share of the keys for
//        all query heads, so K and V are read once, in groups of 160 keys with an online softmax;
//        COMBINE_TASKS slices are combined by a block each and handed round (one exchange more).
#pragma once
#include "params.cuh"
#include "ptx.cuh"

struct AttentionPlan {
  int first_key;  // cache row of key 0; the others follow
  int keys;       // cached keys; the new token's own key is not among them
  int skip;       // a key not to be seen (the row of the ring that is being replaced), or -1
  int new_row;    // cache row of the new token
  int chunks, splits;
  bool all;       // all query heads in one block
  int chunk, count;  // this block's first chunk and number of chunks (0: it has no part)
  bool owner;     // this block's part includes the new token
};

// Without LONG the host has seen that contexts stay short.
template <bool LONG> DEVICE AttentionPlan plan_attention(int position, int full, int rows) {
  AttentionPlan p;
  const int block = blockIdx.x, grid = gridDim.x;
  p.first_key = 0;
  p.new_row = full ? position : position % rows;
  p.keys = full ? position : min(position, rows);
  p.skip = !full && position >= rows ? p.new_row : -1;  // the ring is full: that row is too old
  p.chunks = max(1, (p.keys + CHUNK - 1) / CHUNK);
  const int each = full ? SHORT_CHUNKS : SLIDING_CHUNKS;
  p.splits = (p.chunks + each - 1) / each;
  p.all = LONG && p.splits > min(SHORT_SPLITS, grid / HEADS);
  int split = block / HEADS, last;
  if (p.all) {
    p.splits = min(grid, p.chunks);
    split = block;
    p.chunk = split * p.chunks / p.splits;
    last = (split + 1) * p.chunks / p.splits;
  } else {
    p.chunk = split * each;
    last = min(p.chunks, p.chunk + each);
  }
  p.count = split < p.splits ? last - p.chunk : 0;
  p.owner = split == p.splits - 1;
  return p;
}
