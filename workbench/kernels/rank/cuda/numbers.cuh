// BF16 pairs in 32-bit words, and sums over a warp or over the block's warps.
#pragma once
#include "ptx.cuh"

DEVICE float low(uint32_t pair) { return __uint_as_float(pair << 16); }
DEVICE float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE float round_bf16(float f) { return __bfloat162float(__float2bfloat16_rn(f)); }
DEVICE uint32_t pack(float a, float b) {  // a in the low half
  __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *(uint32_t*)&v;
}
DEVICE void unpack8(uint4 v, float (&f)[8]) {
  f[0] = low(v.x); f[1] = high(v.x); f[2] = low(v.y); f[3] = high(v.y);
  f[4] = low(v.z); f[5] = high(v.z); f[6] = low(v.w); f[7] = high(v.w);
}
DEVICE uint32_t add2(uint32_t a, uint32_t b) {
  __nv_bfloat162 v = __hadd2(*(__nv_bfloat162*)&a, *(__nv_bfloat162*)&b);
  return *(uint32_t*)&v;
}
DEVICE uint32_t scale2(uint32_t a, float f) { return pack(low(a) * f, high(a) * f); }
DEVICE uint32_t norm2(uint32_t a, float r, uint32_t w) {
  return pack(low(a) * r * low(w), high(a) * r * high(w));
}
DEVICE float squares2(uint32_t a, float s) {
  return fmaf(low(a), low(a), fmaf(high(a), high(a), s));
}
DEVICE float dot4(uint2 a, uint2 b) {
  return low(a.x) * low(b.x) + high(a.x) * high(b.x) + low(a.y) * low(b.y) + high(a.y) * high(b.y);
}

DEVICE uint4 add8(uint4 a, uint4 b) {
  return make_uint4(add2(a.x, b.x), add2(a.y, b.y), add2(a.z, b.z), add2(a.w, b.w));
}
DEVICE uint4 scale8(uint4 h, float c) {
  return make_uint4(scale2(h.x, c), scale2(h.y, c), scale2(h.z, c), scale2(h.w, c));
}
DEVICE uint4 norm8(uint4 a, float r, uint4 w) {
  return make_uint4(norm2(a.x, r, w.x), norm2(a.y, r, w.y), norm2(a.z, r, w.z), norm2(a.w, r, w.w));
}
DEVICE float squares8(uint4 a) {
  return squares2(a.x, squares2(a.y, 0.f)) + squares2(a.z, squares2(a.w, 0.f));
}

DEVICE float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
DEVICE float warp_max(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
DEVICE float sum_of_warps(const float* p) {  // the 10 warps' partial sums of one row
  float4 a = *(const float4*)p, b = *(const float4*)(p + 4);
  float2 e = *(const float2*)(p + 8);
  return ((a.x + b.x) + (a.y + b.y)) + ((a.z + b.z) + (a.w + b.w)) + (e.x + e.y);
}
DEVICE float silu(float v) { return __fdividef(v, 1.f + __expf(-v)); }
DEVICE float sigmoid(float v) { return __fdividef(1.f, 1.f + __expf(-v)); }
