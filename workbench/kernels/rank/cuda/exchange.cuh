// Vectors that blocks hand to each other, in words that are their own flags.
//
// A word is empty (0xffffffff) until its value is there: packed BF16 pairs and FP32 results are
// never that pattern, since rounding and arithmetic give NaNs as 0x7fff and 0x7fffffff. So a reader
// polls the data itself: one trip through the L2, no barrier of the whole grid.
//
// There are eight buffers, used by layers in turn. In layer n a block fills words of buffer n and
// empties its words of buffer n + 4, which layer n - 4 filled. Two things must be ordered: nobody
// still reads what is emptied, and nobody mistakes words of layer n - 4 for those of n + 4.
// Both follow from one flag a block, which the producer warps hand on once a layer, while they
// would wait for the router's logits anyway (exchange_flags). There, in layer n,
//   acquire: released[all] >= n - 2, so all blocks are through layer n - 3: in layer n + 1 its
//            words may be emptied, and the words of buffer n + 1, emptied in layer n - 3, are empty
//            for everybody;
//   release: released[block] := n - 1, since this block's consumers are through layer n - 2: a
//            layer has more groups than the ring, so groups of layer n - 1 have come back from all
//            warps.
// One fence serves both. Barriers between the warps of a block carry the order on to and from its
// consumers. Between two launches the end of the first orders everything.
#pragma once
#include "waits.cuh"

constexpr uint32_t EMPTY = 0xffffffffu;
constexpr int BUFFERS = 8;
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
        later(P.exchange + (size_t)((layer_number + BUFFERS / 2) % BUFFERS) * P.exchange_words) {}
  DEVICE void put(int i, uint32_t v) const {
    store_relaxed(now + i, v);
    store_relaxed(later + i, EMPTY);
  }
  DEVICE void clear(int i) const { store_relaxed(later + i, EMPTY); }
  DEVICE void clear4(int i) const { store_relaxed4(later + i, EMPTY); }
};

DEVICE bool filled(uint4 v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }
DEVICE bool filled(uint2 v) { return v.x != EMPTY && v.y != EMPTY; }

template <Wait WAIT> DEVICE uint4 wait4(const Context& c, const uint32_t* p) {
  uint32_t polls = 0;
  uint4 v;
  do v = load_relaxed4(p); while (!filled(v) && !gave_up<WAIT>(c, polls));
  return v;
}
template <Wait WAIT> DEVICE uint2 wait2(const Context& c, const uint32_t* p) {
  uint32_t polls = 0;
  uint2 v;
  do v = load_relaxed2(p); while (!filled(v) && !gave_up<WAIT>(c, polls));
  return v;
}

// Producer warp. Layer numbers run on over launches and wrap, so they are compared by difference.
DEVICE void exchange_flags(const Params& P, const Context& c, unsigned layer_number) {
  uint32_t polls = 0;
  const unsigned wanted = layer_number - 2;
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
  } while (late && !gave_up<WAIT_RELEASED>(c, polls));
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  __syncwarp();  // a block that waits in vain does not release either
  if (c.lane == 0) store_relaxed(P.released + blockIdx.x, layer_number - 1);
  __syncwarp();
}
