// FP32 router: logits by the consumers of all blocks, the choice of experts by each producer warp.
#pragma once
#include "exchange.cuh"
#include "gemv.cuh"
#include "rows.cuh"

// Logits of this block's experts, two rows (a group of the ring: 4 slots of half an FP32 row) at a
// time, by FP32 multiply-adds.
DEVICE void route(const Context& c, Ring& ring, const Exchange& x, Rows rows) {
  float* part = c.at<float>(S_PART);
#pragma unroll 1
  for (int row = rows.first; row < rows.last; row += 2) {
    float acc[4] = {0, 0, 0, 0};
    uint4 w[8];
    take(c, ring, 1);
#pragma unroll
    for (int k = 0; k < 8; k++)
      w[k] = lds128(slot(c, ring, k >> 1) + (c.t + (k & 1) * CONSUMERS) * 16);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int u = c.t + (k & 1) * CONSUMERS;  // four columns, half k >> 1 of the row
      const int at = ((k >> 1) & 1) * HIDDEN + (u >> 1) * 16 + (u & 1) * 4;
      const uint32_t* v = c.at<uint32_t>(S_X + at);
      const uint32_t x0 = v[0], x1 = v[2];
      float& a = acc[k >> 1];
      a = fmaf(__uint_as_float(w[k].w), high(x1), a);
      a = fmaf(__uint_as_float(w[k].z), low(x1), a);
      a = fmaf(__uint_as_float(w[k].y), high(x0), a);
      a = fmaf(__uint_as_float(w[k].x), low(x0), a);
    }
    drop(ring, 1);
    const float r0 = warp_sum(acc[0] + acc[1]), r1 = warp_sum(acc[2] + acc[3]);
    if (c.lane == 0) { part[c.warp] = r0; part[PART_PITCH + c.warp] = r1; }
    consumers_sync();
    if (c.t < 2 * SCORE_COPIES) {
      const float logit = sum_of_warps(part + (c.t & 1) * PART_PITCH);
      x.put(X_SCORES + (c.t >> 1) * EXPERTS + row + (c.t & 1), __float_as_uint(logit));
    }
    consumers_sync();
  }
}
DEVICE void clear_scores(const Context& c, const Exchange& x, Rows rows) {
  for (int i = c.t; i < SCORE_COPIES * rows.count(); i += CONSUMERS)
    x.clear(X_SCORES + i % SCORE_COPIES * EXPERTS + rows.first + i / SCORE_COPIES);
}

// One warp. A lane holds the logits of experts 8 lane ... 8 lane + 7. Scores are sigmoids; the
// eight largest of score + correction are chosen; the weights are the scores without correction,
// divided by their sum if the model says so. The warp's lanes 0 to 7 get the ids in order, and
// shared memory the ids and weights.
// A key is the biased score as an orderable integer, its low three bits replaced by the place in
// the lane (id % 8). So scores that differ in those bits only count as equal; of equals the lower
// place comes first, then the lower id.
DEVICE int choose_experts(const Context& c, uint4 logits_a, uint4 logits_b,
                          const float (&correction)[8], bool renormalise) {
  float* sigmoids = c.at<float>(S_SIGMOID);
  const uint32_t bits[8] = {logits_a.x, logits_a.y, logits_a.z, logits_a.w,
                            logits_b.x, logits_b.y, logits_b.z, logits_b.w};
  uint32_t key[8];
  float score[8];
#pragma unroll
  for (int k = 0; k < 8; k++) {
    score[k] = sigmoid(__uint_as_float(bits[k]));
    uint32_t u = __float_as_uint(score[k] + correction[k]);
    u ^= ((int)u >> 31) | 0x80000000u;
    key[k] = (u & ~7u) | (7 - k);
  }
  *(float4*)(sigmoids + c.lane * 8) = make_float4(score[0], score[1], score[2], score[3]);
  *(float4*)(sigmoids + c.lane * 8 + 4) = make_float4(score[4], score[5], score[6], score[7]);
  // Sort the lane's eight, then take the largest of all lanes' first, eight times.
  auto order = [&](int i, int j) {
    const uint32_t a = max(key[i], key[j]), b = min(key[i], key[j]);
    key[i] = a;
    key[j] = b;
  };
  order(0, 1); order(2, 3); order(4, 5); order(6, 7);
  order(0, 2); order(1, 3); order(4, 6); order(5, 7); order(1, 2); order(5, 6);
  order(0, 4); order(1, 5); order(2, 6); order(3, 7); order(2, 4); order(3, 5);
  order(1, 2); order(3, 4); order(5, 6);
  int mine = 0;
#pragma unroll 1
  for (int e = 0; e < TOP_K; e++) {
    const uint32_t best = __reduce_max_sync(~0u, key[0]);
    const int source = __ffs(__ballot_sync(~0u, key[0] == best)) - 1;
    if (c.lane == e) mine = source * 8 + 7 - (best & 7);
    const bool won = c.lane == source;
#pragma unroll
    for (int k = 0; k < 7; k++) key[k] = won ? key[k + 1] : key[k];
    if (won) key[7] = 0;
  }
  const float w = c.lane < TOP_K ? sigmoids[mine] : 0.f;
  float total = w;
#pragma unroll
  for (int o = TOP_K / 2; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
  if (c.lane < TOP_K) {
    c.at<float>(S_ROUTE)[c.lane] = renormalise ? __fdividef(w, total) : w;
    c.at<int>(S_IDS)[c.lane] = mine;
  }
  __syncwarp();
  return mine;
}
