// Logits of this rank's vocabulary, the next token, and the end of the step.
#pragma once
#include "gemv.cuh"
#include "rows.cuh"

// A logit and its id as one integer: larger logits are larger, lower ids among equals.
DEVICE u64 candidate(float logit, int id) {
  uint32_t u = __float_as_uint(logit);
  u ^= ((int)u >> 31) | 0x80000000u;
  return (u64)u << 32 | (uint32_t)~id;
}

// Stores the softcapped logits of `rows`; returns the block's best, with its id, in thread 0.
DEVICE u64 head(const Context& c, Ring& ring, const Params& P, Rows rows) {
  const float* part = c.at<float>(S_PART);
  u64 best = 0;
#pragma unroll 1
  for (int first = rows.first; first < rows.last; first += HEAD_ROWS) {
    const int n = min(HEAD_ROWS, rows.last - first);
    ring = gemv(c, ring, n);
    consumers_sync();
    if (c.t < n) {
      float v = round_bf16(sum_of_warps(part + c.t * PART_PITCH));
      if (P.softcap > 0.f) v = P.softcap * tanhf(v / P.softcap);
      P.logits[first + c.t] = v;
      best = max(best, candidate(v, first + c.t));
    }
    consumers_sync();
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) best = max(best, __shfl_xor_sync(~0u, best, o));
  u64* each = c.at<u64>(S_PART);
  if (c.lane == 0) each[c.warp] = best;
  consumers_sync();
  if (c.t == 0)
    for (int w = 1; w < WARPS; w++) best = max(best, each[w]);
  return best;
}

// One thread a block, last. The block that arrives last knows that all others have read the token,
// the position and the layer counter, and moves them on; after a failed wait it leaves the token.
DEVICE void finish(const Params& P, const Context& c, unsigned layer_number, u64 best) {
  if (const unsigned failed = patience(c)[2]) atomicCAS(P.error, 0u, failed);
  if (P.do_head) atomicMax(P.best, best);
  __threadfence();
  if (atomicAdd(P.arrived, 1u) != gridDim.x - 1) return;
  __threadfence();
  *P.arrived = 0;
  *P.epoch = layer_number;
  if (!P.do_head) return;
  best = atomicExch(P.best, 0ull);
  if (!P.advance || *(volatile unsigned*)P.error) return;
  const long long id = (uint32_t)~(uint32_t)best, next = *P.position + 1;
  *P.next_token = id;
  *P.token = id;
  *P.position = next < P.capacity ? next : P.capacity - 1;
}
