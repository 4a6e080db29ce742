// Vectors that blocks hand to each other, in words that are their own flags.
//
// A word is empty (0xffffffff) until its value is there: packed BF16 pairs and FP32 results are
// never that pattern, since rounding and arithmetic give NaNs as 0x7fff and 0x7fffffff. So a reader
// polls the data itself: one trip through the L2, no barrier of the whole grid.
//
// There are four buffers, used by layers in turn. In layer n a block fills words of buffer n and
// empties its words of buffer n + 2, which layer n - 2 filled. Two things must be ordered:
// nobody still reads what is emptied, and nobody mistakes words of layer n - 2 for those of n + 2.
// Both follow from one flag a block and layer, off the critical path, in the producer warps:
//   release(n): when this block's consumers are known to have passed layer n - 1 (a group of layer n
//               came back from all warps), released[block] := n, with release semantics;
//   acquire(n): before its first weights of layer n go into the ring, released[all] >= n - 1, so all
//               blocks are through layer n - 2: its words have been read and may be emptied, and
//               the words of buffer n, emptied in layer n - 2, are empty for everybody.
// Barriers between the warps of a block carry the order on to and from its consumers.
#pragma once
#include "waits.cuh"

constexpr uint32_t EMPTY = 0xffffffffu;
constexpr int BUFFERS = 4;
// Word offsets in a buffer.
constexpr int X_QKVG = 0;                              // packed projection, BF16 pairs
constexpr int X_COMBINED = X_QKVG + PACKED / 2;        // long context: attention output, BF16 pairs
constexpr int X_ATTENTION = X_COMBINED + ATTENTION / 2;  // o_proj's output, BF16 pairs
constexpr int X_SCORES = X_ATTENTION + HIDDEN / 2;     // router logits, FP32, 4 copies
constexpr int SCORE_COPIES = 4;                        // 132 pollers of one line would queue
constexpr int X_ACTIVATIONS = X_SCORES + SCORE_COPIES * EXPERTS;  // SwiGLU's output, BF16 pairs
constexpr int X_MLP = X_ACTIVATIONS + TOP_K * EXPERT_WIDTH / 2;
constexpr int X_PARTIALS = X_MLP + HIDDEN / 2;         // attention partials, BLOCK_PARTIALS a block
static_assert(DENSE_WIDTH <= TOP_K * EXPERT_WIDTH, "dense activations fit");
static_assert(X_PARTIALS % 4 == 0 && X_ATTENTION % 4 == 0 && X_MLP % 4 == 0, "16-byte reads");
static_assert(X_SCORES % 4 == 0 && X_ACTIVATIONS % 4 == 0 && X_COMBINED % 4 == 0, "16-byte reads");

struct Exchange {
  uint32_t *now, *later;  // this layer's buffer, and the one to empty
  DEVICE Exchange(const Params& P, unsigned layer_number)
      : now(P.exchange + (size_t)(layer_number % BUFFERS) * P.exchange_words),
        later(P.exchange + (size_t)((layer_number + 2) % BUFFERS) * P.exchange_words) {}
  DEVICE void put(int i, uint32_t v) const { store_relaxed(now + i, v); store_relaxed(later + i, EMPTY); }
  DEVICE void clear(int i) const { store_relaxed(later + i, EMPTY); }
  DEVICE void clear4(int i) const { store_relaxed4(later + i, EMPTY); }
};

DEVICE bool filled(uint4 v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }
DEVICE bool filled(uint2 v) { return v.x != EMPTY && v.y != EMPTY; }

template <Wait WAIT> DEVICE uint4 wait4(const Context& c, const uint32_t* p) {
  const uint32_t since = kilocycles();
  uint4 v;
  do v = load_relaxed4(p); while (!filled(v) && !gave_up<WAIT>(c, since));
  return v;
}
template <Wait WAIT> DEVICE uint2 wait2(const Context& c, const uint32_t* p) {
  const uint32_t since = kilocycles();
  uint2 v;
  do v = load_relaxed2(p); while (!filled(v) && !gave_up<WAIT>(c, since));
  return v;
}

// Producer warp. Layer numbers run on over launches and wrap, so they are compared by difference.
DEVICE void release_layer(const Params& P, const Context& c, unsigned layer_number) {
  if (c.lane == 0) store_release(P.released + blockIdx.x, layer_number);
}
DEVICE void acquire_layer(const Params& P, const Context& c, unsigned layer_number) {
  const uint32_t since = kilocycles();
  const unsigned wanted = layer_number - 1;
  auto missing = [&](uint4 v, int block) {
    const uint32_t flags[4] = {v.x, v.y, v.z, v.w};
    bool late = false;
#pragma unroll
    for (int i = 0; i < 4; i++) late |= block + i < (int)gridDim.x && (int)(flags[i] - wanted) < 0;
    return late;
  };
  bool late;
  do {
    const uint4 a = load_relaxed4(P.released + c.lane * 4);
    const uint4 b = load_relaxed4(P.released + MAX_BLOCKS / 2 + c.lane * 4);
    late = missing(a, c.lane * 4) || missing(b, MAX_BLOCKS / 2 + c.lane * 4);
  } while (late && !gave_up<WAIT_RELEASED>(c, since));
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  __syncwarp();
}
