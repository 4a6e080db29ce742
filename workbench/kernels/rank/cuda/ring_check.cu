// The step kernel's ring and waits alone, for compute-sanitizer (benchmarks/rank_sanitize.py).
//
//   ring_check 0   the ring as the step uses it: bulk copies, mbarrier "full", named-barrier "free"
//   ring_check 1   every slot is used once, so nothing is ever freed: only the textbook part is
//                  left, one bulk copy, one mbarrier wait by every reading thread
//   ring_check 2   as 1, through CUDA's own C++ interface (cuda::barrier, memcpy_async_tx)
//   ring_check 3   as 1 without the wait for "full": a real race, to see that the tool finds one
//   ring_check 4   as 0, two groups waited for and one of them freed at a time, as the experts'
//                  down projection does
//   ring_check 5   the step's own producer and product (Producer::full_rows, gemv), one block
//   ring_check 6   the same, a block on every SM
//   ring_check 7   as 0, a block on every SM
//   ring_check 8   as 5, in two parts with two barriers of the consumers between: more is ordered
//                  than in 5, so what the tool finds here and not there is no race
// Whether the sums are right is the exit status (0: right).
#include <cuda/barrier>
#include <stdio.h>
#include <stdlib.h>
#include "gemv.cuh"
#include "producer.cuh"

constexpr int ROUNDS = 64;  // groups copied; GROUPS in ring_check 1 to 3

// A thread's place, with the ring's barriers made and patience for a tool's slowness.
DEVICE Context entered() {
  Context c;
  c.smem = shared_address(block_memory);
  c.bars = c.smem + S_BARS;
  c.t = threadIdx.x; c.lane = c.t & 31; c.warp = c.t >> 5;
  if (c.t == 0) {
    for (int i = 0; i < GROUPS; i++) mbar_init(c.bars + 8 * i, 1);
    mbar_fence_init();
    patience(c)[0] = patience(c)[1] = 1u << 31;
  }
  return c;
}

template <bool FREE, int WAIT> __global__ void __launch_bounds__(BLOCK, 1)
ring(const uint32_t* from, u64* sums, unsigned* error, int rounds) {
  const Context c = entered();
  __syncthreads();
  if (c.warp == WARPS) {
    const u64 policy = evict_first();
    for (int k = 0; k < rounds; k++) {
      const int g = k % GROUPS;
      if (FREE && k >= GROUPS) group_free_wait(g);
      if (c.lane == 0) mbar_expect(c.bars + 8 * g, GROUP_SLOTS * ROW_BYTES);
      __syncwarp();
      if (c.lane < GROUP_SLOTS)
        bulk_copy(c.smem + (g * GROUP_SLOTS + c.lane) * SLOT,
                  from + (size_t)(k * GROUP_SLOTS + c.lane) * (ROW_BYTES / 4), ROW_BYTES,
                  c.bars + 8 * g, policy);
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

__global__ void __launch_bounds__(CONSUMERS, 1)
library_ring(const uint32_t* from, u64* sums, int rounds) {
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
      cuda::device::memcpy_async_tx(to, from + (size_t)g * GROUP_SLOTS * (ROW_BYTES / 4),
                                    cuda::aligned_size_t<16>(GROUP_SLOTS * ROW_BYTES), full[g]);
      token = cuda::device::barrier_arrive_tx(full[g], 1, GROUP_SLOTS * ROW_BYTES);
    } else {
      token = full[g].arrive();
    }
    full[g].wait(cuda::std::move(token));
    for (int i = threadIdx.x; i < GROUP_SLOTS * ROW_BYTES / 4; i += CONSUMERS) sum += to[i];
  }
  atomicAdd(sums, sum);
}

// Rows of ones and zeros, so that their products with ones count bits.
constexpr int FIRST_ROWS = 14, PRODUCT_ROWS = 46;

// Rows times a vector of ones by the code of the step; every block has the same rows.
template <bool TWO>
__global__ void __launch_bounds__(BLOCK, 1) product(const bf16* rows, u64* sums) {
  const Context c = entered();
  for (int i = c.t; i < HIDDEN; i += BLOCK) c.at<bf16>(S_X)[i] = __float2bfloat16(1.f);
  __syncthreads();
  if (c.warp == WARPS) {
    const Params none = {};
    Producer<false> producer(none, c);
    if (TWO) producer.full_rows(rows, Rows{0, FIRST_ROWS}, 1);
    producer.full_rows(rows, Rows{TWO ? FIRST_ROWS : 0, PRODUCT_ROWS}, 1);
    return;
  }
  Ring r{0, 0};
  if (TWO) {
    r = gemv(c, r, FIRST_ROWS);
    consumers_sync();
    if (c.t < FIRST_ROWS)
      atomicAdd(sums, (u64)sum_of_warps(c.at<float>(S_PART) + c.t * PART_PITCH));
    consumers_sync();
  }
  const int left = TWO ? PRODUCT_ROWS - FIRST_ROWS : PRODUCT_ROWS;
  gemv(c, r, left);
  consumers_sync();
  if (c.t < left)
    atomicAdd(sums, (u64)sum_of_warps(c.at<float>(S_PART) + c.t * PART_PITCH));
}

// Starts a kernel of `threads` threads with `bytes` of shared memory.
template <class... Parameters, class... Arguments>
static void start(void (*kernel)(Parameters...), int blocks, int threads, int bytes,
                  Arguments... arguments) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  kernel<<<blocks, threads, bytes>>>(arguments...);
}

int main(int argc, char** argv) {
  const int mode = argc > 1 ? atoi(argv[1]) : 0, rounds = mode >= 1 && mode <= 3 ? GROUPS : ROUNDS;
  const size_t words = (size_t)rounds * GROUP_SLOTS * (ROW_BYTES / 4);
  const bool counts = mode == 5 || mode == 6 || mode == 8;
  int sms = 1;
  if (mode == 6 || mode == 7) cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
  uint32_t* host = (uint32_t*)malloc(words * 4);
  u64 wanted = 0;
  for (size_t i = 0; i < words; i++) {
    host[i] = (uint32_t)(i * 2654435761u);
    if (counts) {  // pairs of BF16 ones and zeros
      const uint32_t bits = host[i] >> 16 & 3;
      host[i] = (bits & 1 ? 0x3f80u : 0) | (bits & 2 ? 0x3f800000u : 0);
      if (i < (size_t)PRODUCT_ROWS * HIDDEN / 2) wanted += (bits & 1) + (bits >> 1);
    } else {
      wanted += host[i];
    }
  }
  wanted *= sms;
  uint32_t* from;
  u64* sums;
  unsigned* error;
  cudaMalloc(&from, words * 4);
  cudaMalloc(&sums, 8);
  cudaMalloc(&error, 4);
  cudaMemcpy(from, host, words * 4, cudaMemcpyHostToDevice);
  cudaMemset(sums, 0, 8);
  cudaMemset(error, 0, 4);
  if (mode == 0 || mode == 7) start(ring<true, 1>, sms, BLOCK, S_TOTAL, from, sums, error, rounds);
  if (mode == 1) start(ring<false, 1>, 1, BLOCK, S_TOTAL, from, sums, error, rounds);
  if (mode == 2)
    start(library_ring, 1, CONSUMERS, GROUPS * GROUP_SLOTS * ROW_BYTES, from, sums, rounds);
  if (mode == 3) start(ring<false, 0>, 1, BLOCK, S_TOTAL, from, sums, error, rounds);
  if (mode == 4) start(ring<true, 2>, 1, BLOCK, S_TOTAL, from, sums, error, rounds);
  if (mode == 8) start(product<true>, 1, BLOCK, S_TOTAL, (const bf16*)from, sums);
  else if (counts) start(product<false>, sms, BLOCK, S_TOTAL, (const bf16*)from, sums);
  u64 found = 0;
  const cudaError_t status = cudaMemcpy(&found, sums, 8, cudaMemcpyDeviceToHost);
  printf("ring_check %d: %s, sums %s\n", mode, cudaGetErrorString(status),
         found == wanted ? "right" : "wrong");
  return status != cudaSuccess || found != wanted;
}
