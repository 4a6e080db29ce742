// Who a thread is, and waits that give up.
//
// A wait that outlasts the host's patience records itself in Params::error and sets the block's
// patience to zero. From then on no wait of this block for another block takes time: the block runs
// through the rest of the step on whatever it reads, hands that on, and leaves. So every block
// leaves, control flow never depends on data, and the host finds out from the error word.
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
  unsigned* error;
  int t, lane, warp;
  template <class T> DEVICE T* at(int offset) const { return (T*)(block_memory + offset); }
};

DEVICE uint32_t kilocycles() { return (uint32_t)(clock64() >> 10); }

// Whether a wait that began at `since` has taken too long. Copies from memory have a patience of
// their own (the second word), which failing exchanges leave alone: a block that no longer waits
// for other blocks must still wait for its copies before it reuses their slots.
template <Wait WAIT>
DEVICE bool gave_up(const Context& c, uint32_t since) {
  volatile uint32_t* patience = c.at<volatile uint32_t>(S_PATIENCE);
  const int which = WAIT == WAIT_COPY ? 1 : 0;
  if (kilocycles() - since < patience[which]) return false;
  if (patience[which]) {
    atomicCAS(c.error, 0u, (unsigned)WAIT << 16 | blockIdx.x);
    patience[0] = 0;
    if (WAIT == WAIT_COPY) patience[1] = 0;
  }
  return true;
}
