// Who a thread is, and waits that give up.
//
// A wait that outlasts the host's patience leaves its name in shared memory and sets the block's
// patience to zero; the block's last thread hands the name on to Params::error (finish). From then
// on no wait of this block for another block takes time: the block runs through the rest of the
// step on whatever it reads, hands that on, and leaves. So every block leaves, control flow never
// depends on data, and the host finds out from the error word.
//
// Waits for other blocks count their polls: each is a trip through the L2, which takes about the
// 1024 cycles that patience is given in. Reading clocks would lengthen the way from a word's
// arrival to its use. Copies from memory are waited for in shared memory, and have a clock.
#pragma once
#include "numbers.cuh"
#include "params.cuh"

// Named in persistent.py, in this order.
enum Wait {
  WAIT_RELEASED = 1, WAIT_QKVG, WAIT_PARTIALS, WAIT_COMBINED, WAIT_ATTENTION, WAIT_SCORES,
  WAIT_ACTIVATIONS, WAIT_MLP, WAIT_COPY
};

extern __shared__ __align__(128) unsigned char block_memory[];

struct Context {
  uint32_t smem, bars;  // shared-memory addresses: of block_memory and of the ring's barriers
  int t, lane, warp;
  template <class T> DEVICE T* at(int offset) const { return (T*)(block_memory + offset); }
};

DEVICE uint32_t kilocycles() { return (uint32_t)(clock64() >> 10); }

// Three words: patience with other blocks, patience with copies from memory (which failing
// exchanges leave alone: a block that no longer waits for other blocks must still wait for its
// copies before it reuses their slots), and the wait that failed, or 0.
DEVICE volatile uint32_t* patience(const Context& c) { return c.at<volatile uint32_t>(S_PATIENCE); }
DEVICE void give_up(const Context& c, Wait wait) {
  patience(c)[0] = 0;
  if (wait == WAIT_COPY) patience(c)[1] = 0;
  patience(c)[2] = (unsigned)wait << 16 | blockIdx.x;
}
// Whether a wait for other blocks has taken too long with this poll; it counts them.
template <Wait WAIT> DEVICE bool gave_up(const Context& c, uint32_t& polls) {
  const uint32_t most = patience(c)[0];
  if (++polls < most) return false;
  if (most) give_up(c, WAIT);
  return true;
}
