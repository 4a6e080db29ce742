// A ring of 20 lines with the step kernel's waits, for compute-sanitizer (benchmarks/rank_sanitize.py).
//
//   ring_check 0   the ring as the step uses it: bulk copies, mbarrier "full", named-barrier "free"
//   ring_check 1   every slot is used once, so nothing is ever freed: only the textbook part is left,
//                  one bulk copy, one mbarrier wait by every reading thread
//   ring_check 2   as 1, through CUDA's own C++ interface (cuda::barrier, memcpy_async_tx)
//   ring_check 3   as 1 without the wait for "full": a real race, to see that the tool finds one
//   ring_check 4   as 0, two groups waited for and one of them freed at a time, as the experts' down
//                  projection does
// Whether the sums are right is the exit status (0: right).
#include <cuda/barrier>
#include <stdio.h>
#include <stdlib.h>
#include "ring.cuh"

constexpr int ROUNDS = 64;  // groups copied; GROUPS in ring_check 1 and 2

template <bool FREE, int WAIT> __global__ void __launch_bounds__(BLOCK, 1)
ring(const uint32_t* from, u64* sums, unsigned* error, int rounds) {
  Context c;
  c.smem = shared_address(block_memory);
  c.bars = c.smem + S_BARS;
  c.error = error;
  c.t = threadIdx.x; c.lane = c.t & 31; c.warp = c.t >> 5;
  if (c.t == 0) {
    for (int i = 0; i < GROUPS; i++) mbar_init(c.bars + 8 * i, 1);
    mbar_fence_init();
    c.at<unsigned>(S_PATIENCE)[0] = c.at<unsigned>(S_PATIENCE)[1] = 1u << 31;
  }
  __syncthreads();
  if (c.warp == WARPS) {
    const u64 policy = evict_first();
    for (int k = 0; k < rounds; k++) {
      const int g = k % GROUPS;
      if (FREE && k >= GROUPS) group_free_wait(g);
      if (c.lane == 0) mbar_expect(c.bars + 8 * g, GROUP_SLOTS * ROW_BYTES);
      __syncwarp();
      if (c.lane < GROUP_SLOTS)
        bulk_copy(c.smem + (g * GROUP_SLOTS + c.lane) * SLOT, from + (size_t)(k * GROUP_SLOTS + c.lane) * (ROW_BYTES / 4), ROW_BYTES, c.bars + 8 * g, policy);
    }
    return;
  }
  Ring r{0, 0};
  u64 sum = 0;
  for (int k = 0; k < rounds; k++) {
    if (WAIT) take(c, r, min(WAIT, rounds - k));
    for (int s = 0; s < GROUP_SLOTS; s++)
      for (int i = c.t; i < ROW_BYTES / 16; i += CONSUMERS) {
        const uint4 v = lds128(slot(c, r, s) + i * 16);
        sum += (u64)v.x + v.y + v.z + v.w;
      }
    if (FREE) drop(r, 1); else step(r);
  }
  atomicAdd(sums, sum);
}

__global__ void __launch_bounds__(CONSUMERS, 1) library_ring(const uint32_t* from, u64* sums, int rounds) {
  using barrier = cuda::barrier<cuda::thread_scope_block>;
#pragma nv_diag_suppress static_var_with_dynamic_init  // init() below
  __shared__ barrier full[GROUPS];
  if (threadIdx.x == 0)
    for (int i = 0; i < GROUPS; i++) init(&full[i], CONSUMERS);
  __syncthreads();
  u64 sum = 0;
  for (int g = 0; g < rounds; g++) {
    barrier::arrival_token token;
    uint32_t* to = (uint32_t*)(block_memory + g * GROUP_SLOTS * ROW_BYTES);
    if (threadIdx.x == 0) {
      cuda::device::memcpy_async_tx(to, from + (size_t)g * GROUP_SLOTS * (ROW_BYTES / 4), cuda::aligned_size_t<16>(GROUP_SLOTS * ROW_BYTES), full[g]);
      token = cuda::device::barrier_arrive_tx(full[g], 1, GROUP_SLOTS * ROW_BYTES);
    } else {
      token = full[g].arrive();
    }
    full[g].wait(cuda::std::move(token));
    for (int i = threadIdx.x; i < GROUP_SLOTS * ROW_BYTES / 4; i += CONSUMERS) sum += to[i];
  }
  atomicAdd(sums, sum);
}

int main(int argc, char** argv) {
  const int mode = argc > 1 ? atoi(argv[1]) : 0, rounds = mode >= 1 && mode <= 3 ? GROUPS : ROUNDS;
  const size_t words = (size_t)rounds * GROUP_SLOTS * (ROW_BYTES / 4);
  uint32_t* host = (uint32_t*)malloc(words * 4);
  u64 wanted = 0;
  for (size_t i = 0; i < words; i++) wanted += host[i] = (uint32_t)(i * 2654435761u);
  uint32_t* from; u64* sums; unsigned* error;
  cudaMalloc(&from, words * 4); cudaMalloc(&sums, 8); cudaMalloc(&error, 4);
  cudaMemcpy(from, host, words * 4, cudaMemcpyHostToDevice);
  cudaMemset(sums, 0, 8); cudaMemset(error, 0, 4);
  auto large = [](auto kernel) { cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S_TOTAL); };
  if (mode == 0) { large(ring<true, 1>); ring<true, 1><<<1, BLOCK, S_TOTAL>>>(from, sums, error, rounds); }
  if (mode == 1) { large(ring<false, 1>); ring<false, 1><<<1, BLOCK, S_TOTAL>>>(from, sums, error, rounds); }
  if (mode == 2) { large(library_ring); library_ring<<<1, CONSUMERS, GROUPS * GROUP_SLOTS * ROW_BYTES>>>(from, sums, rounds); }
  if (mode == 3) { large(ring<false, 0>); ring<false, 0><<<1, BLOCK, S_TOTAL>>>(from, sums, error, rounds); }
  if (mode == 4) { large(ring<true, 2>); ring<true, 2><<<1, BLOCK, S_TOTAL>>>(from, sums, error, rounds); }
  u64 found = 0;
  const cudaError_t status = cudaMemcpy(&found, sums, 8, cudaMemcpyDeviceToHost);
  printf("ring_check %d: %s, sums %s\n", mode, cudaGetErrorString(status), found == wanted ? "right" : "wrong");
  return status != cudaSuccess || found != wanted;
}
