// Matrix-vector products on the tensor cores, from rows in the ring and a vector in shared memory.
//
// They use mma only to save instructions. One m16n8k16 takes 8 weight rows x 32 columns: a lane
// loads 16 bytes of its row (row = lane / 4) and uses them as all four A registers, so a0 and a2
// are row g of the 16-row tile and a1, a3 pose as row g + 8. The vector enters as B with the two
// halves of those 32 columns in the even and in the odd columns of B; row g of the product is then
// d0 + d3, the same in all four lanes of the row. One LDS.128 and one HMMA for 512 bytes of
// weights. For that the vector lies in shared memory with words 1 and 2 of every 16 bytes swapped.
#pragma once
#include "exchange.cuh"
#include "ring.cuh"

DEVICE uint4 swap_words(uint4 v) { return make_uint4(v.x, v.z, v.y, v.w); }

DEVICE void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}
DEVICE void mma_row(float (&d)[4], uint4 w, uint2 x) { mma(d, w.x, w.y, w.z, w.w, x); }

// Where a lane reads the vector, in bytes from the start of its 64-byte block.
DEVICE uint32_t vector_offset(int lane) { return (lane & 3) * 16 + ((lane >> 2) & 1) * 8; }

// 8 rows x STEPS * 32 columns; `w` is the address of this lane's row plus (lane & 3) * 16.
template <int STEPS> DEVICE float dot_rows(uint32_t w, const uint2* x) {
  uint4 a[STEPS];
  float d0[4] = {0, 0, 0, 0}, d1[4] = {0, 0, 0, 0};
#pragma unroll
  for (int s = 0; s < STEPS; s++) a[s] = lds128(w + s * 64);  // all in flight before the first use
#pragma unroll
  for (int s = 0; s < STEPS; s++) mma_row(s & 1 ? d1 : d0, a[s], x[s]);
  return (d0[0] + d1[0]) + (d0[3] + d1[3]);
}
// The same for rows whose pitch is a multiple of 128 bytes. Odd rows go through the 64-byte blocks
// in pairs swapped, so that no two rows meet in a bank, and the vector in that order is in columns
// 2 and 3 of B. Row g of the product is in lane g & 1 of the row's four.
template <int STEPS> DEVICE float dot_short_rows(uint32_t w, uint32_t x, int lane) {
  uint4 a[STEPS];
  uint2 b[STEPS];
  float d0[4] = {0, 0, 0, 0}, d1[4] = {0, 0, 0, 0};
  const int swap_a = (lane >> 2) & 1, swap_b = (lane >> 3) & 1;
#pragma unroll
  for (int s = 0; s < STEPS; s++) b[s] = lds64(x + (s ^ swap_b) * 64);
#pragma unroll
  for (int s = 0; s < STEPS; s++) a[s] = lds128(w + (s ^ swap_a) * 64);
#pragma unroll
  for (int s = 0; s < STEPS; s++) mma_row(s & 1 ? d1 : d0, a[s], b[s]);
  return (d0[0] + d1[0]) + (d0[3] + d1[3]);
}

// n rows of HIDDEN columns, one a slot, times the vector at S_X; warp w covers columns 512 w to
// 512 w + 511. Leaves part[row * PART_PITCH + warp].
DEVICE Ring gemv(const Context& c, Ring r, int n) {
  const int g = c.lane >> 2, q = c.lane & 3;
  uint2 x[16];
#pragma unroll
  for (int s = 0; s < 16; s++)
    x[s] = lds64(c.smem + S_X + c.warp * 1024 + vector_offset(c.lane) + s * 64);
  float* part = c.at<float>(S_PART) + g * PART_PITCH + c.warp;
#pragma unroll 1
  for (int i = 0; i < n; i += 8) {
    const int m = min(8, n - i), groups = (m + GROUP_SLOTS - 1) / GROUP_SLOTS;
    take(c, r, groups);
    const float v = dot_rows<16>(slot(c, r, min(g, m - 1)) + c.warp * 1024 + q * 16, x);
    drop(r, groups);
    if (q == 0) part[i * PART_PITCH] = v;
  }
  return r;
}

// n <= PANEL rows of BYTES bytes, ROWS of them a slot, times the vector at `vector`; a warp takes
// 8 rows and half of the columns. Leaves part[row * 2 + half].
template <int BYTES, int ROWS>
DEVICE void gemv_short(const Context& c, Ring& r, uint32_t vector, float* part, int n) {
  const int g = c.lane >> 2, q = c.lane & 3, panel = c.warp >> 1, half = c.warp & 1;
  const int row = min(panel * 8 + g, n - 1), slots = (n + ROWS - 1) / ROWS;
  const int groups = (slots + GROUP_SLOTS - 1) / GROUP_SLOTS;
  take(c, r, groups);
  const uint32_t w = slot(c, r, row / ROWS) + (row % ROWS) * BYTES + half * (BYTES / 2) + q * 16;
  const uint32_t x = vector + half * (BYTES / 2) + vector_offset(c.lane);
  const float v = dot_short_rows<BYTES / 128>(w, x, c.lane);
  drop(r, groups);
  if (q == (g & 1)) part[(panel * 8 + g) * 2 + half] = v;
}

// Rows first .. first + n (n even) of a vector between blocks from part[row * 2 + half].
DEVICE void put_rows(const Context& c, const Exchange& x, int where, int first, int n,
                     float scale) {
  const float* part = c.at<float>(S_PART);
  if (c.t < (n + 31) / 32 * 32) {
    const float2 v = c.t < n ? *(const float2*)(part + c.t * 2) : make_float2(0, 0);
    const float a = (v.x + v.y) * scale, b = __shfl_xor_sync(~0u, a, 1);
    if (c.t < n && !(c.t & 1)) x.put(where + (first + c.t) / 2, pack(a, b));
  }
}
