// The consumers' part of both kinds of MLP.
#pragma once
#include "exchange.cuh"
#include "gemv.cuh"
#include "rows.cuh"

// part holds the sums of rows gate, up, gate, up ... of the activations `rows`: SwiGLU, rounded,
// stored as pairs. Gate and up are rounded first, as two BF16 products are.
DEVICE void put_activations(const Context& c, const Exchange& x, Rows rows) {
  const int sums = 2 * rows.count();
  if (c.t < (sums + 31) / 32 * 32) {
    const bool mine = c.t < sums;
    const float v = mine ? round_bf16(sum_of_warps(c.at<float>(S_PART) + c.t * PART_PITCH)) : 0.f;
    const float up = __shfl_xor_sync(~0u, v, 1), a = silu(v) * up;
    const float next = __shfl_xor_sync(~0u, a, 2);
    if (mine && !(c.t & 3))
      store_relaxed(x.now + X_ACTIVATIONS + rows.first / 2 + c.t / 4, pack(a, next));
  }
}
// The words of a block's expert rows, whether this layer is sparse or dense.
DEVICE void clear_activations(const Context& c, const Exchange& x, Rows expert) {
  if (c.t < expert.count() / 2) x.clear(X_ACTIVATIONS + expert.first / 2 + c.t);
}
// All activations into S_X, as the input of the down projection.
DEVICE void get_activations(const Context& c, const Exchange& x, int width) {
  if (c.t < width / 8) {
    const uint4 v = wait4<WAIT_ACTIVATIONS>(c, x.now + X_ACTIVATIONS + c.t * 4);
    *c.at<uint4>(S_X + c.t * 16) = swap_words(v);
  }
  consumers_sync();
}

DEVICE void sparse_mlp(const Context& c, Ring& ring, const Exchange& x, const Shares& rows) {
  ring = gemv(c, ring, 2 * rows.expert().count());
  consumers_sync();
  put_activations(c, x, rows.expert());
  clear_activations(c, x, rows.expert());
  get_activations(c, x, TOP_K * EXPERT_WIDTH);
  // Down projection: a warp takes 8 rows, half a slot, of every second expert. A pair of experts is
  // five slots, so that each pair but the last ends in the group in which the next begins.
  const float* weight = c.at<float>(S_ROUTE);
  float* part = c.at<float>(S_PART);
  const int g = c.lane >> 2, q = c.lane & 3, panel = c.warp >> 1, j = c.warp & 1;
#pragma unroll 1
  for (int first = 0; first < rows.out().count(); first += PANEL) {
    // of the panel's 8; past the end, any that is there
    const int row = max(0, min(g, min(PANEL, rows.out().count() - first) - panel * 8 - 1));
    float acc = 0;
#pragma unroll 1
    for (int i = 0; i < TOP_K / 2; i++) {
      const int e = 2 * i + j, half = e * DOWN_HALVES + panel;
      take(c, ring, 2);
      const uint32_t w = slot(c, ring, (half >> 1) - i * GROUP_SLOTS) + (half & 1) * HALF +
                         row * (EXPERT_WIDTH * 2) + q * 16;
      const uint32_t v = c.smem + S_X + e * (EXPERT_WIDTH * 2) + vector_offset(c.lane);
      acc = fmaf(weight[e], dot_short_rows<EXPERT_WIDTH / 32>(w, v, c.lane), acc);
      drop(ring, i < TOP_K / 2 - 1 ? 1 : 2);
    }
    if (q == (g & 1)) part[(first + panel * 8 + g) * 2 + j] = acc;
  }
  consumers_sync();
}

DEVICE void dense_mlp(const Context& c, Ring& ring, const Exchange& x, const Shares& rows) {
  ring = gemv(c, ring, 2 * rows.dense().count());
  consumers_sync();
  put_activations(c, x, rows.dense());
  clear_activations(c, x, rows.expert());
  get_activations(c, x, DENSE_WIDTH);
  for (int first = 0; first < rows.out().count(); first += PANEL)
    gemv_short<DENSE_WIDTH * 2, DENSE_ROWS>(c, ring, c.smem + S_X, c.at<float>(S_PART) + first * 2,
                                            min(PANEL, rows.out().count() - first));
  consumers_sync();
}
