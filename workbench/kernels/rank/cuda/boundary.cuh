// Between two sublayers: post-norm, depth-scaled add to the residual stream, next pre-norm.
//
// Every block keeps the whole residual stream in registers (two times 8 BF16 values a consumer
// thread) and recomputes this cheap part, so that only raw projections travel between blocks.
#pragma once
#include "gemv.cuh"

struct Residual { uint4 a, b; };                    // values t * 8 ... and (t + CONSUMERS) * 8 ...
struct NormWeights { uint4 post_a, post_b, pre_a, pre_b; };

// Loaded a phase early: they come from memory and would otherwise be waited for here.
DEVICE NormWeights load_norms(const Context& c, const bf16* post, const bf16* pre) {
  NormWeights w;
  w.post_a = load_constant(post + c.t * 8);
  w.post_b = load_constant(post + (c.t + CONSUMERS) * 8);
  w.pre_a = load_constant(pre + c.t * 8);
  w.pre_b = load_constant(pre + (c.t + CONSUMERS) * 8);
  return w;
}
DEVICE float block_sum(const Context& c, float v, float* scratch) {
  v = warp_sum(v);
  if (c.lane == 0) scratch[c.warp] = v;
  consumers_sync();
  return sum_of_warps(scratch);
}
DEVICE float inverse_rms(const Context& c, const Residual& h, float* scratch, float eps) {
  return rsqrtf(block_sum(c, squares8(h.a) + squares8(h.b), scratch) * (1.f / HIDDEN) + eps);
}
DEVICE void put_input(const Context& c, uint4 a, uint4 b) {
  *c.at<uint4>(S_X + c.t * 16) = swap_words(a);
  *c.at<uint4>(S_X + (c.t + CONSUMERS) * 16) = swap_words(b);
  consumers_sync();
}
// The norm in front of the first layer (or of the head).
DEVICE void first_norm(const Context& c, const Residual& h, const bf16* weight, float eps) {
  const uint4 a = load_constant(weight + c.t * 8);
  const uint4 b = load_constant(weight + (c.t + CONSUMERS) * 8);
  const float r = inverse_rms(c, h, c.at<float>(S_RED), eps);
  put_input(c, norm8(h.a, r, a), norm8(h.b, r, b));
}
template <Wait WAIT>
DEVICE Residual boundary(const Context& c, const uint32_t* source, Residual h, const NormWeights& w,
                         float scale_new, float scale_old, float eps) {
  h.a = scale8(h.a, scale_old);  // before the wait
  h.b = scale8(h.b, scale_old);
  Residual p;
  uint32_t polls = 0;
  do {
    p.a = load_relaxed4(source + c.t * 4);
    p.b = load_relaxed4(source + (c.t + CONSUMERS) * 4);
  } while ((!filled(p.a) || !filled(p.b)) && !gave_up<WAIT>(c, polls));
  float r = inverse_rms(c, p, c.at<float>(S_RED), eps);
  h.a = add8(scale8(norm8(p.a, r, w.post_a), scale_new), h.a);
  h.b = add8(scale8(norm8(p.b, r, w.post_b), scale_new), h.b);
  r = inverse_rms(c, h, c.at<float>(S_RED) + 24, eps);
  put_input(c, norm8(h.a, r, w.pre_a), norm8(h.b, r, w.pre_b));
  return h;
}
