// One instruction each: barriers in shared memory, bulk copies, loads and stores between blocks.
#pragma once
#include "shape.cuh"

#define DEVICE __device__ __forceinline__

DEVICE uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// ---- mbarrier: "the group's bytes have landed"
DEVICE void mbar_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(bar), "r"(count) : "memory");
}
DEVICE void mbar_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbar_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
DEVICE bool mbar_try_wait(uint32_t bar, uint32_t phase) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred P;\nmbarrier.try_wait.parity.shared::cta.b64 P,[%1],%2;\n"
      "selp.u32 %0,1,0,P;\n}"
      : "=r"(done) : "r"(bar), "r"(phase) : "memory");
  return done;
}

// ---- bulk copy of a contiguous run; weights are read once a step, so they leave the L2 first
DEVICE u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0],[%1],%2,[%3],%4;" ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
DEVICE void l2_prefetch(const void* p, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(p), "r"(bytes) : "memory");
}

// ---- named barriers. 1: the consumers among themselves. 2 + g: "group g of the ring is free",
// consumers arrive and the producer waits. An mbarrier operation takes about 7.5 cycles of a unit
// that the whole SM shares; these are nearly free, hence one for every group and warp.
DEVICE void consumers_sync() { asm volatile("bar.sync 1,%0;" ::"n"(CONSUMERS) : "memory"); }
DEVICE void group_free_arrive(int group) {
  asm volatile("barrier.cta.arrive.aligned %0,%1;" ::"r"(2 + group), "n"(BLOCK) : "memory");
}
DEVICE void group_free_wait(int group) {
  asm volatile("barrier.cta.sync.aligned %0,%1;" ::"r"(2 + group), "n"(BLOCK) : "memory");
}

// ---- shared and global loads
DEVICE uint4 lds128(uint32_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
  return v;
}
DEVICE uint2 lds64(uint32_t a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory");
  return v;
}
DEVICE uint4 load_constant(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// ---- between blocks, through the L2
DEVICE void store_relaxed(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void store_relaxed4(uint32_t* p, uint32_t v) {  // the same word four times
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0],{%1,%1,%1,%1};" ::"l"(p), "r"(v) : "memory");
}
DEVICE uint4 load_relaxed4(const uint32_t* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE uint2 load_relaxed2(const uint32_t* p) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p)
               : "memory");
  return v;
}
