// The producer warp: streams every weight and key that its block owns through the ring, in program
// order. Weights do not depend on activations, so it runs ahead over phases and layers; only the
// experts' addresses wait for the router.
#pragma once
#include "attention_plan.cuh"
#include "ring.cuh"
#include "router.cuh"
#include "rows.cuh"

struct Source { const void* from; uint32_t bytes; };

template <bool LONG> struct Producer {
  const Params& P;
  const Context& c;
  u64 policy;
  int group = 0, issued = 0;  // next group of the ring, and how many groups there were

  DEVICE Producer(const Params& P, const Context& c) : P(P), c(c), policy(evict_first()) {}

  // One group: each lane copies its source (0 bytes: nothing) to `at` bytes behind the group's
  // start. At most `depth` groups of 40 KB are in flight: weights that the next exchange does not
  // depend on only lengthen the queue in front of the exchange's words.
  DEVICE void issue_group(int depth, Source s, uint32_t at) {
    const uint32_t bar = c.bars + 8 * group;
    const uint32_t total = __reduce_add_sync(~0u, s.bytes);
    if (issued >= GROUPS) group_free_wait(group);
    if (issued >= depth) {
      const int earlier = issued - depth;
      wait_copy(c, c.bars + 8 * (earlier % GROUPS), (earlier / GROUPS) & 1);
    }
    issued++;
    if (c.lane == 0) mbar_expect(bar, total);
    __syncwarp();
    if (s.bytes) bulk_copy(c.smem + group * GROUP_SLOTS * SLOT + at, s.from, s.bytes, bar, policy);
    if (++group == GROUPS) group = 0;
  }
  // n slots, up to four a group, a lane each; source(i) says what slot i holds.
  template <class F> DEVICE void issue(int n, int depth, F source) {
#pragma unroll 1
    for (int first = 0; first < n; first += GROUP_SLOTS) {
      Source s = {nullptr, 0};
      if (c.lane < min(GROUP_SLOTS, n - first)) s = source(first + c.lane);
      issue_group(depth, s, c.lane * SLOT);
    }
  }
  DEVICE void full_rows(const bf16* w, Rows rows, int depth) {
    const bf16* from = w + (size_t)rows.first * HIDDEN;
    issue(rows.count(), depth, [&](int i) { return Source{from + (size_t)i * HIDDEN, ROW_BYTES}; });
  }
  // Rows of WIDTH columns, PER_SLOT a slot, in passes of PANEL rows as the consumers take them.
  template <int WIDTH, int PER_SLOT> DEVICE void short_rows(const bf16* w, Rows rows, int depth) {
#pragma unroll 1
    for (int first = rows.first; first < rows.last; first += PANEL) {
      const int n = min(PANEL, rows.last - first);
      issue(slots_of(n, PER_SLOT), depth, [&](int i) {
        return Source{w + (size_t)(first + PER_SLOT * i) * WIDTH,
                      (uint32_t)(min(PER_SLOT, n - PER_SLOT * i) * WIDTH * 2)};
      });
    }
  }
  DEVICE void keys_and_values(const Layer& L, const AttentionPlan& p) {
    auto chunks = [&](const bf16* cache, int first, int n, int depth) {
      issue(n, depth, [&](int i) {
        const int key = (first + i) * CHUNK;
        return Source{cache + (size_t)(p.first_key + key) * HEAD_DIM,
                      (uint32_t)max(1, min(CHUNK, p.keys - key)) * HEAD_DIM * 2};
      });
    };
    if (LONG && p.all) {
#pragma unroll 1
      for (int i = 0; i < 2 * p.count; i += 2 * GROUP_SLOTS) {  // groups of K and of V in turn
        const int first = i / 2, n = min(GROUP_SLOTS, p.count - first);
#pragma unroll 1
        for (int kv = 0; kv < 2; kv++)
          chunks(kv ? L.v_cache : L.k_cache, p.chunk + first, n, P.depth_free);
      }
    } else {
#pragma unroll 1
      for (int kv = 0; kv < 2; kv++)
        chunks(kv ? L.v_cache : L.k_cache, p.chunk, p.count, P.depth);
    }
  }
  // Gate and up rows in turn, so that SwiGLU finds its pair in one block. Row q of all chosen
  // experts' activations is row q % EXPERT_WIDTH of expert number q / EXPERT_WIDTH.
  DEVICE void expert_rows(const Layer& L, const Shares& rows) {
    const int* ids = c.at<int>(S_IDS);
    issue(2 * rows.expert().count(), P.depth_free, [&](int i) {
      const int q = rows.expert().first + (i >> 1), e = q / EXPERT_WIDTH;
      const int r = q - e * EXPERT_WIDTH + (i & 1) * EXPERT_WIDTH;
      return Source{L.gate_up + (size_t)(ids[e] * (2 * EXPERT_WIDTH) + r) * HIDDEN, ROW_BYTES};
    });
  }
  // In half slots of 8 rows, 5 an expert, one expert behind the other, so that the ring holds a
  // panel of all of them. Two halves of a slot that belong to one expert are one copy.
  DEVICE void expert_down(const Layer& L, const Shares& rows) {
    const int* ids = c.at<int>(S_IDS);
#pragma unroll 1
    for (int first = rows.out().first; first < rows.out().last; first += PANEL) {
      const int n = min(PANEL, rows.out().last - first);
#pragma unroll 1
      for (int i = 0; i < 2 * DOWN_SLOTS; i += 2 * GROUP_SLOTS) {
        const int e = (i + c.lane) / DOWN_HALVES, panel = (i + c.lane) - e * DOWN_HALVES;
        const int second = c.lane & 1;
        const int most = second || panel == DOWN_HALVES - 1 ? 8 : 16;
        Source s = {nullptr, 0};
        if (c.lane < 2 * GROUP_SLOTS && !(second && panel))
          s = {L.down + ((size_t)ids[e] * HIDDEN + first + 8 * panel) * EXPERT_WIDTH,
               (uint32_t)max(0, min(most, n - 8 * panel)) * EXPERT_WIDTH * 2};
        issue_group(P.depth_free, s, (c.lane >> 1) * SLOT + second * HALF);
      }
    }
  }
  DEVICE void dense_rows(const Layer& L, const Shares& rows) {
    issue(2 * rows.dense().count(), P.depth_free, [&](int i) {
      return Source{
          L.gate_up + (size_t)(rows.dense().first + (i >> 1) + (i & 1) * DENSE_WIDTH) * HIDDEN,
          ROW_BYTES};
    });
  }
  DEVICE void router_rows(const Layer& L, Rows rows) {  // an FP32 row is two slots
    const float* from = L.router + (size_t)rows.first * HIDDEN;
    issue(2 * rows.count(), P.depth, [&](int i) {
      return Source{from + (size_t)i * (HIDDEN / 2), ROW_BYTES};
    });
  }

  // The next layer's small vectors, by one block: a cold read would sit on the critical path.
  DEVICE void prefetch_vectors(const Layer& next) {
    const void* p = nullptr;
    uint32_t bytes = HIDDEN * 2;
    switch (c.lane) {
      case 0: p = next.input_norm; break;
      case 1: p = next.post_attention_norm; break;
      case 2: p = next.pre_mlp_norm; break;
      case 3: p = next.post_mlp_norm; break;
      case 4: p = next.qk_norm; bytes = 2 * HEAD_DIM * 2; break;
      case 5: p = next.correction; bytes = EXPERTS * 4; break;
    }
    if (p) l2_prefetch(p, bytes);
    if (c.lane == 6) asm volatile("prefetch.global.L2 [%0];" ::"l"(next.gate_bias));
  }
  // The i-th piece of what this block needs of the next layer before its experts.
  DEVICE int pieces(const Shares& rows) const {
    return rows.packed().count() + slots_of(rows.out().count(), O_ROWS) + 2 * rows.router().count();
  }
  DEVICE void prefetch_piece(const Layer& next, const Shares& rows, int i) {
    const int out = slots_of(rows.out().count(), O_ROWS);
    const void* from;
    uint32_t bytes = ROW_BYTES;
    if (i < rows.packed().count()) {
      from = next.qkvg + (size_t)(rows.packed().first + i) * HIDDEN;
    } else if ((i -= rows.packed().count()) < out) {
      from = next.o_proj + (size_t)(rows.out().first + O_ROWS * i) * ATTENTION;
      bytes = min(O_ROWS, rows.out().count() - O_ROWS * i) * ATTENTION * 2;
    } else {
      from = next.router + (size_t)rows.router().first * HIDDEN + (size_t)(i - out) * (HIDDEN / 2);
    }
    l2_prefetch(from, bytes);
  }
  // Wait for the router's logits. Meanwhile, pull this block's share of the next layer into the L2
  // at a steady pace: memory is idle during the dependent part of a layer, and the ring is full.
  DEVICE int experts(const Layer& L, const Layer* next, const Shares& rows, const Exchange& x) {
    const float4 low4 = *(const float4*)(L.correction + c.lane * 8);
    const float4 high4 = *(const float4*)(L.correction + c.lane * 8 + 4);
    const float correction[8] = {low4.x,  low4.y,  low4.z,  low4.w,
                                 high4.x, high4.y, high4.z, high4.w};
    const uint32_t* logits = x.now + X_SCORES + blockIdx.x % SCORE_COPIES * EXPERTS + c.lane * 8;
    const int n = next && P.pace ? pieces(rows) : 0;
    int i = 0;
    uint4 a, b;
    const uint32_t start = (uint32_t)clock();
    uint32_t polls = 0;
    while (true) {
      a = load_relaxed4(logits);
      b = load_relaxed4(logits + 4);
      if (__all_sync(~0u, filled(a) && filled(b))) break;
      if (i < n && (uint32_t)clock() - start > (uint32_t)(i * P.pace)) {
        if (c.lane == 0) prefetch_piece(*next, rows, i);
        i++;
      }
      if (__any_sync(~0u, gave_up<WAIT_SCORES>(c, polls))) break;
    }
    return choose_experts(c, a, b, correction, P.renormalise);
  }

  DEVICE void run(const Shares& rows, int position, unsigned base) {
    const u64* words = (const u64*)P.layers;
    u64 ahead = 0;  // this lane's word of the descriptor two layers on: it comes from memory
    auto fetch = [&](int l) {
      const bool mine = c.lane < LAYER_WORDS && l < P.last_layer;
      return mine ? words[(size_t)l * LAYER_WORDS + c.lane] : 0;
    };
    if (P.first_layer < P.last_layer) ahead = fetch(P.first_layer + 1);
#pragma unroll 1
    for (int l = P.first_layer; l < P.last_layer; l++) {
      const Layer& L = c.at<Layer>(S_LAYERS)[l & 3];
      const bool more = l + 1 < P.last_layer;
      const Layer& next = c.at<Layer>(S_LAYERS)[(l + 1) & 3];
      if (more && c.lane < LAYER_WORDS) ((u64*)&next)[c.lane] = ahead;
      ahead = fetch(l + 2);
      __syncwarp();
      const unsigned number = base + (l - P.first_layer);
      const Exchange x(P, number);
      if (more && blockIdx.x == (l * 37 + 5) % gridDim.x) prefetch_vectors(next);
      full_rows(L.qkvg, rows.packed(), P.depth);
      const AttentionPlan plan = plan_attention<LONG>(position, L.full, L.rows);
      if (plan.count) keys_and_values(L, plan);
      short_rows<ATTENTION, O_ROWS>(L.o_proj, rows.out(), P.depth);
      if (L.dense) {
        exchange_flags(P, c, number);
        dense_rows(L, rows);
        short_rows<DENSE_WIDTH, DENSE_ROWS>(L.down, rows.out(), P.depth_free);
      } else {
        router_rows(L, rows.router());
        exchange_flags(P, c, number);
        const int mine = experts(L, more ? &next : nullptr, rows, x);
        if (blockIdx.x == 0 && c.lane < TOP_K) P.expert_ids[l * TOP_K + c.lane] = mine;
        expert_rows(L, rows);
        expert_down(L, rows);
      }
    }
    if (P.do_head) full_rows(P.lm_head, share(P.vocabulary), P.depth_free);
  }
};
