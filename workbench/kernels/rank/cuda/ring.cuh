// The consumers' side of the ring: groups of four slots that the producer warp fills in program
// order with bulk copies, ahead of the phases that need them.
#pragma once
#include "waits.cuh"

struct Ring { int group; uint32_t phase; };

DEVICE int wrapped(int group) { return group >= GROUPS ? group - GROUPS : group; }
DEVICE void step(Ring& r) { if (++r.group == GROUPS) { r.group = 0; r.phase ^= 1; } }

DEVICE void wait_copy(const Context& c, uint32_t bar, uint32_t phase) {
  if (mbar_try_wait(bar, phase)) return;
  const uint32_t since = kilocycles();
  while (!mbar_try_wait(bar, phase)) {
    const uint32_t most = patience(c)[1];
    if (kilocycles() - since < most) continue;
    if (most) give_up(c, WAIT_COPY);
    return;
  }
}
// Wait for the next n groups. Every lane waits itself: the copy engine's writes become visible to
// the thread that observed the barrier, not to its neighbours.
DEVICE void take(const Context& c, Ring r, int n) {
#pragma unroll 1
  for (int i = 0; i < n; i++) { wait_copy(c, c.bars + 8 * r.group, r.phase); step(r); }
  __syncwarp();
}
// This warp has used what it read of the next n groups; the slots are refilled once all warps have
// said so. Used, not only asked for: an arrival does not wait for loads that are under way
// (benchmarks/rank_releases.py looks into the machine code).
DEVICE void drop(Ring& r, int n) {
#pragma unroll 1
  for (int i = 0; i < n; i++) { group_free_arrive(r.group); step(r); }
}
// Address of the i-th slot from here.
DEVICE uint32_t slot(const Context& c, const Ring& r, int i) {
  return c.smem + (wrapped(r.group + i / GROUP_SLOTS) * GROUP_SLOTS + i % GROUP_SLOTS) * SLOT;
}
