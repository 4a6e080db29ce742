// Attention of one token: per-head norms, RoPE or SSMax, the cache write, split softmax(q K) V.
#pragma once
#include "attention_plan.cuh"
#include "exchange.cuh"
#include "gemv.cuh"

constexpr float SCALE_LOG2 = 0.08838834764831845f * 1.4426950408889634f;  // head_dim^-0.5, base 2

// One warp: head vector at word `where` of the packed projection, normed; q and k of sliding layers
// get RoPE, q of full layers the SSMax factor. A lane holds four of the 128 values, packed.
DEVICE uint2 head_vector(const Context& c, const Exchange& x, int where, uint2 weight, bool full,
                         bool query, float eps) {
  const float* rope = c.at<float>(S_ROPE);
  float cs[4], sn[4], v[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {  // before the wait
    const int i = (c.lane * 4 + k) & 63;
    cs[k] = rope[i];
    sn[k] = c.lane < 16 ? -rope[64 + i] : rope[64 + i];
  }
  uint2 d = wait2<WAIT_QKVG>(c, x.now + X_QKVG + where + c.lane * 2);
  const float r = rsqrtf(warp_sum(squares2(d.x, squares2(d.y, 0.f))) * (1.f / HEAD_DIM) + eps);
  d.x = norm2(d.x, r, weight.x);
  d.y = norm2(d.y, r, weight.y);
  v[0] = low(d.x); v[1] = high(d.x); v[2] = low(d.y); v[3] = high(d.y);
  if (!full) {  // the other half of the vector is 16 lanes away
    uint2 o;
    o.x = __shfl_xor_sync(~0u, d.x, 16);
    o.y = __shfl_xor_sync(~0u, d.y, 16);
    v[0] = v[0] * cs[0] + low(o.x) * sn[0];
    v[1] = v[1] * cs[1] + high(o.x) * sn[1];
    v[2] = v[2] * cs[2] + low(o.y) * sn[2];
    v[3] = v[3] * cs[3] + high(o.y) * sn[3];
  } else {
    const float f = query ? rope[HEAD_DIM] : 1.f;
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] *= f;
  }
  return make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
}

constexpr int NEW_KEY = ATTENTION / 2, NEW_VALUE = NEW_KEY + HEAD_DIM / 2;  // words in X_QKVG
constexpr int GATE = NEW_VALUE + HEAD_DIM / 2;

// The new value row into shared memory as FP32, and into the cache by one block.
DEVICE void new_value(const Context& c, const Exchange& x, float* to, bf16* cache) {
  const uint2 d = wait2<WAIT_QKVG>(c, x.now + X_QKVG + NEW_VALUE + c.lane * 2);
  *(float4*)(to + c.lane * 4) = make_float4(low(d.x), high(d.x), low(d.y), high(d.y));
  if (cache) *(uint2*)(cache + c.lane * 4) = d;
}

// ---- short contexts: this block's query head over its chunks. Scores on the tensor cores like any
// product of rows and a vector; PV by plain multiply-adds, 16 threads a key.
DEVICE void attend_short(const Context& c, Ring& ring, const Exchange& x, const Layer& L,
                         const AttentionPlan& p, uint2 norm_weight, float eps) {
  const int head = blockIdx.x % HEADS, n = p.count;
  float *scores = c.at<float>(S_SCORES), *value = c.at<float>(S_V), *sums = c.at<float>(S_SUMS);
  float* pv_s = c.at<float>(S_X);  // the input vector is dead here
  if (c.warp < 2 && (c.warp == 0 || p.owner)) {
    const int where = c.warp == 0 ? head * (HEAD_DIM / 2) : NEW_KEY;
    const uint2 v = head_vector(c, x, where, norm_weight, L.full, c.warp == 0, eps);
    uint32_t* w = c.at<uint32_t>(S_Q + c.warp * 256 + (c.lane >> 1) * 16 + (c.lane & 1) * 4);
    w[0] = v.x;
    w[2] = v.y;
    if (c.warp == 1 && head == 0)
      *(uint2*)(L.k_cache + (size_t)p.new_row * HEAD_DIM + c.lane * 4) = v;
  } else if (c.warp == 2 && p.owner) {
    new_value(c, x, value, head == 0 ? L.v_cache + (size_t)p.new_row * HEAD_DIM : nullptr);
  }
  consumers_sync();
#pragma unroll 1
  for (int i0 = 0; i0 < n; i0 += GROUP_SLOTS) {
    const int m = min(GROUP_SLOTS, n - i0), panel = c.warp % 5, g = c.lane >> 2, q = c.lane & 3;
    take(c, ring, 1);
    for (int i = c.warp / 5; i < m; i += 2) {
      const uint32_t k = slot(c, ring, i) + (panel * 8 + g) * (HEAD_DIM * 2) + q * 16;
      const float v = dot_short_rows<4>(k, c.smem + S_Q + vector_offset(c.lane), c.lane);
      const int key = (i0 + i) * CHUNK + panel * 8 + g, row = p.chunk * CHUNK + key;
      if (q == (g & 1)) scores[key] = row < p.keys && row != p.skip ? v * SCALE_LOG2 : -INFINITY;
    }
    drop(ring, 1);
  }
  if (c.warp == WARPS - 1) {  // the new token's key: one score more, behind the others
    const uint2 a = *c.at<uint2>(S_Q + c.lane * 8), b = *c.at<uint2>(S_Q + 256 + c.lane * 8);
    const float v = warp_sum(dot4(a, b));
    if (c.lane == 0) scores[n * CHUNK] = p.owner ? v * SCALE_LOG2 : -INFINITY;
  }
  consumers_sync();
  float m = -INFINITY;
  for (int i = c.lane; i <= n * CHUNK; i += 32) m = fmaxf(m, scores[i]);
  m = warp_max(m);
  // A chunk holds only the skipped key at worst, and then its split has other keys: m is finite.
  const int octet = c.t & 15, row = c.t >> 4;
  float pv[8] = {0, 0, 0, 0, 0, 0, 0, 0}, sum = 0;
#pragma unroll 1
  for (int i = 0; i < n; i++) {
    const int in_group = i % GROUP_SLOTS;
    if (in_group == 0) take(c, ring, 1);
    uint4 w[2];
    w[0] = lds128(slot(c, ring, in_group) + c.t * 16);
    w[1] = lds128(slot(c, ring, in_group) + (c.t + CONSUMERS) * 16);
#pragma unroll
    for (int y = 0; y < 2; y++) {
      const int key = row + 20 * y;
      const float e = exp2f(scores[i * CHUNK + key] - m);
      float v[8];
      sum += e;
      unpack8(w[y], v);
      if ((p.chunk + i) * CHUNK + key < p.keys)  // past the end the slot holds stale bytes
#pragma unroll
        for (int z = 0; z < 8; z++) pv[z] = fmaf(e, v[z], pv[z]);
    }
    if (in_group == GROUP_SLOTS - 1 || i == n - 1) { __syncwarp(); drop(ring, 1); }
  }
#pragma unroll
  for (int z = 0; z < 8; z++) pv[z] += __shfl_xor_sync(~0u, pv[z], 16);
  sum += __shfl_xor_sync(~0u, sum, 16);
  if (c.lane < 16) {
    float4* o = (float4*)(pv_s + c.warp * HEAD_DIM + octet * 8);
    o[0] = make_float4(pv[0], pv[1], pv[2], pv[3]);
    o[1] = make_float4(pv[4], pv[5], pv[6], pv[7]);
  }
  if (c.lane == 0) sums[c.warp] = sum;
  consumers_sync();
  uint32_t* out = x.now + X_PARTIALS + blockIdx.x * BLOCK_PARTIALS;
  if (c.t < HEAD_DIM + 2) {
    const float own = exp2f(scores[n * CHUNK] - m);
    float a[4] = {0, 0, 0, 0};
    if (c.t < HEAD_DIM) {
#pragma unroll
      for (int w = 0; w < WARPS; w++) a[w & 3] += pv_s[w * HEAD_DIM + c.t];
      const float o = (a[0] + a[1]) + (a[2] + a[3]) + (p.owner ? own * value[c.t] : 0.f);
      store_relaxed(out + c.t, __float_as_uint(o));
    } else {
      const float v = c.t == HEAD_DIM ? m : sum_of_warps(sums) + own;
      store_relaxed(out + c.t, __float_as_uint(v));
    }
  }
}

// ---- long contexts: all six query heads over this block's chunks, 160 keys at a time, of which a
// warp takes 16, with an online softmax of its own: no warp waits for another until the end.
// Scores: A is K as it lies, B the six queries (columns 6 and 7 are zero). A lane's 16 bytes of a
// key hold k = 8 q ... 8 q + 7 of 32; words 0, 1 feed one mma and 2, 3 the next, with the queries
// read in the same order, so nothing is shuffled. A lane gets heads 2 q and 2 q + 1 of keys g and
// g + 8.
DEVICE void attend_long(const Context& c, Ring& ring, const Exchange& x, const Layer& L,
                        const AttentionPlan& p, const bf16* qk_norm, float eps) {
  float* probability = c.at<float>(S_LONG_P) + c.warp * 16 * 8;
  float *tops = c.at<float>(S_LONG_RED), *sums = tops + 8 * PART_PITCH;
  float *value = c.at<float>(S_LONG_V), *staged = c.at<float>(S_LONG_STAGE);
  const int g = c.lane >> 2, q = c.lane & 3;
  if (c.warp <= HEADS) {  // six queries and the new key
    const bool query = c.warp < HEADS;
    const uint2 weight = *(const uint2*)(qk_norm + (query ? 0 : HEAD_DIM) + c.lane * 4);
    const uint2 v = head_vector(c, x, c.warp * (HEAD_DIM / 2), weight, L.full, query, eps);
    *c.at<uint2>(S_LONG_Q + c.warp * 256 + c.lane * 8) = v;  // S_LONG_K lies behind the queries
    if (!query && p.owner) *(uint2*)(L.k_cache + (size_t)p.new_row * HEAD_DIM + c.lane * 4) = v;
  } else if (c.warp == HEADS + 1) {
    new_value(c, x, value, p.owner ? L.v_cache + (size_t)p.new_row * HEAD_DIM : nullptr);
  }
  consumers_sync();
  float top0 = -INFINITY, top1 = -INFINITY, sum0 = 0, sum1 = 0;  // of heads 2 q and 2 q + 1
  float pv[HEADS][4];  // columns 4 lane ... 4 lane + 3 over this warp's keys
  const bool starts = p.owner && c.warp == 0;  // with the new token, which the copied rows lack
#pragma unroll
  for (int h = 0; h < HEADS; h++)
#pragma unroll
    for (int z = 0; z < 4; z++) pv[h][z] = starts ? value[c.lane * 4 + z] : 0.f;
  if (starts) {
#pragma unroll 1
    for (int h = 0; h < HEADS; h++) {
      const uint2 a = *c.at<uint2>(S_LONG_Q + h * 256 + c.lane * 8);
      const uint2 b = *c.at<uint2>(S_LONG_K + c.lane * 8);
      const float v = warp_sum(dot4(a, b));
      if (q == h >> 1) { if (h & 1) top1 = v * SCALE_LOG2; else top0 = v * SCALE_LOG2; }
    }
    if (g == 0) sum0 = sum1 = 1.f;
  }
#pragma unroll 1
  for (int i0 = 0; i0 < p.count; i0 += GROUP_SLOTS) {
    const int n = min(p.count - i0, GROUP_SLOTS);
    const int valid = min(n * CHUNK, p.keys - (p.chunk + i0) * CHUNK);  // keys of this group
    // keys 16 warp + g and + 8; 8-key panels never cross a slot
    const int panel0 = c.warp * 16, panel1 = panel0 + 8;
    const uint32_t at0 = panel0 % CHUNK * (HEAD_DIM * 2), at1 = panel1 % CHUNK * (HEAD_DIM * 2);
    take(c, ring, 1);
    const uint32_t k0 = slot(c, ring, panel0 / CHUNK) + at0 + g * (HEAD_DIM * 2) + q * 16;
    const uint32_t k1 = slot(c, ring, panel1 / CHUNK) + at1 + g * (HEAD_DIM * 2) + q * 16;
    float d[4] = {0, 0, 0, 0};
    {
      const uint32_t queries = c.smem + S_LONG_Q + g * 256 + q * 16;  // column g of B
#pragma unroll
      for (int s = 0; s < 4; s++) {
        const uint4 a = lds128(k0 + s * 64), b = lds128(k1 + s * 64);
        const uint4 v = g < HEADS ? lds128(queries + s * 64) : make_uint4(0, 0, 0, 0);
        mma(d, a.x, b.x, a.y, b.y, make_uint2(v.x, v.y));
        mma(d, a.z, b.z, a.w, b.w, make_uint2(v.z, v.w));
      }
    }
    drop(ring, 1);
    // Keys past the end read stale bytes.
    const bool in0 = panel0 + g < valid, in1 = panel1 + g < valid;
    const float s00 = in0 ? d[0] * SCALE_LOG2 : -INFINITY;
    const float s01 = in0 ? d[1] * SCALE_LOG2 : -INFINITY;
    const float s10 = in1 ? d[2] * SCALE_LOG2 : -INFINITY;
    const float s11 = in1 ? d[3] * SCALE_LOG2 : -INFINITY;
    float now0 = fmaxf(s00, s10), now1 = fmaxf(s01, s11);
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) {
      now0 = fmaxf(now0, __shfl_xor_sync(~0u, now0, o));
      now1 = fmaxf(now1, __shfl_xor_sync(~0u, now1, o));
    }
    now0 = fmaxf(now0, top0);
    now1 = fmaxf(now1, top1);
    const float m0 = now0 == -INFINITY ? 0.f : now0;  // no key yet: not inf - inf
    const float m1 = now1 == -INFINITY ? 0.f : now1;
    const float f0 = exp2f(top0 - m0), f1 = exp2f(top1 - m1);
    top0 = now0;
    top1 = now1;
    const float p00 = exp2f(s00 - m0), p10 = exp2f(s10 - m0);
    const float p01 = exp2f(s01 - m1), p11 = exp2f(s11 - m1);
    sum0 = fmaf(sum0, f0, p00 + p10);
    sum1 = fmaf(sum1, f1, p01 + p11);
    *(float2*)(probability + g * 8 + 2 * q) = make_float2(p00, p01);
    *(float2*)(probability + (g + 8) * 8 + 2 * q) = make_float2(p10, p11);
    if (__any_sync(~0u, f0 != 1.f || f1 != 1.f)) {
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        const float f = __shfl_sync(~0u, h & 1 ? f1 : f0, h >> 1);
#pragma unroll
        for (int z = 0; z < 4; z++) pv[h][z] *= f;
      }
    }
    take(c, ring, 1);  // and orders the probabilities
    auto add = [&](uint32_t key, const float* each) {
      const uint2 w = lds64(key);
      const float v[4] = {low(w.x), high(w.x), low(w.y), high(w.y)};
      const float4 e = *(const float4*)each;
      const float2 f = *(const float2*)(each + 4);
      const float weight[HEADS] = {e.x, e.y, e.z, e.w, f.x, f.y};
#pragma unroll
      for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int z = 0; z < 4; z++) pv[h][z] = fmaf(weight[h], v[z], pv[h][z]);
    };
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
      const int panel = half ? panel1 : panel0;
      const uint32_t keys = slot(c, ring, panel / CHUNK) + (half ? at1 : at0) + c.lane * 8;
      const float* each = probability + half * 64;
      if (panel + 8 <= valid) {
#pragma unroll
        for (int j = 0; j < 8; j++) add(keys + j * (HEAD_DIM * 2), each + j * 8);
      } else {
#pragma unroll 1
        for (int j = 0; panel + j < valid; j++) add(keys + j * (HEAD_DIM * 2), each + j * 8);
      }
    }
    __syncwarp();
    drop(ring, 1);
  }
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) {
    sum0 += __shfl_xor_sync(~0u, sum0, o);
    sum1 += __shfl_xor_sync(~0u, sum1, o);
  }
  if (g == 0) {
    tops[2 * q * PART_PITCH + c.warp] = top0;
    tops[(2 * q + 1) * PART_PITCH + c.warp] = top1;
    sums[2 * q * PART_PITCH + c.warp] = sum0;
    sums[(2 * q + 1) * PART_PITCH + c.warp] = sum1;
  }
  consumers_sync();
  float top = -INFINITY, factor = 0, sum = 0;  // lane h: head h, over the block
  if (c.lane < HEADS) {
    const float *each = tops + c.lane * PART_PITCH, *part = sums + c.lane * PART_PITCH;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, each[w]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float f = exp2f(each[w] - top);
      sum = fmaf(f, part[w], sum);
      if (w == c.warp) factor = f;
    }
  }
  uint32_t* out = x.now + X_PARTIALS + blockIdx.x * BLOCK_PARTIALS;
  if (c.warp == 0 && c.lane < HEADS) {
    store_relaxed(out + c.lane * PARTIAL + HEAD_DIM, __float_as_uint(top));
    store_relaxed(out + c.lane * PARTIAL + HEAD_DIM + 1, __float_as_uint(sum));
  }
#pragma unroll
  for (int first = 0; first < HEADS; first += LONG_HEADS) {
#pragma unroll
    for (int y = 0; y < LONG_HEADS; y++) {
      const float f = __shfl_sync(~0u, factor, first + y);
      const float(&v)[4] = pv[first + y];
      *(float4*)(staged + (y * WARPS + c.warp) * HEAD_DIM + c.lane * 4) =
          make_float4(v[0] * f, v[1] * f, v[2] * f, v[3] * f);
    }
    consumers_sync();
    for (int i = c.t; i < LONG_HEADS * HEAD_DIM; i += CONSUMERS) {
      const float* mine = staged + i / HEAD_DIM * (WARPS * HEAD_DIM) + i % HEAD_DIM;
      float a[2] = {0, 0};
#pragma unroll
      for (int w = 0; w < WARPS; w++) a[w & 1] += mine[w * HEAD_DIM];
      store_relaxed(out + (first + i / HEAD_DIM) * PARTIAL + i % HEAD_DIM,
                    __float_as_uint(a[0] + a[1]));
    }
    if (first + LONG_HEADS < HEADS) consumers_sync();
  }
}

// Slices of COMBINE_WIDTH outputs over all splits, for long contexts: two threads a split.
DEVICE void combine_long(const Context& c, const Exchange& x, const AttentionPlan& p) {
  constexpr int COLUMNS = COMBINE_WIDTH / 4;
  float *tops = c.at<float>(S_RED), *parts = c.at<float>(S_PART);
  const int column = c.t % COLUMNS;  // four outputs
#pragma unroll 1
  for (int task = blockIdx.x; task < COMBINE_TASKS; task += gridDim.x) {
    const int head = task / (HEAD_DIM / COMBINE_WIDTH), slice = task % (HEAD_DIM / COMBINE_WIDTH);
    const uint32_t* source = x.now + X_PARTIALS + head * PARTIAL;
    float top = -INFINITY, sum = 0, o[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int split = c.t / COLUMNS; split < p.splits; split += CONSUMERS / COLUMNS) {
      const uint32_t* w = source + (size_t)split * BLOCK_PARTIALS;
      uint32_t polls = 0;
      uint2 e;
      uint4 d;
      do {
        e = load_relaxed2(w + HEAD_DIM);
        d = load_relaxed4(w + slice * COMBINE_WIDTH + column * 4);
      } while ((!filled(e) || !filled(d)) && !gave_up<WAIT_PARTIALS>(c, polls));
      const float now = fmaxf(top, __uint_as_float(e.x));
      const float f = exp2f(top - now), k = exp2f(__uint_as_float(e.x) - now);
      top = now;
      sum = fmaf(k, __uint_as_float(e.y), sum * f);
      o[0] = fmaf(k, __uint_as_float(d.x), o[0] * f);
      o[1] = fmaf(k, __uint_as_float(d.y), o[1] * f);
      o[2] = fmaf(k, __uint_as_float(d.z), o[2] * f);
      o[3] = fmaf(k, __uint_as_float(d.w), o[3] * f);
    }
    const float warp_top = warp_max(top);
    if (c.lane == 0) tops[c.warp] = warp_top;
    consumers_sync();
    float all = tops[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) all = fmaxf(all, tops[w]);
    const float f = exp2f(top - all);  // 0 where this thread had no split
    float v[5] = {o[0] * f, o[1] * f, o[2] * f, o[3] * f, sum * f};
#pragma unroll
    for (int s = COLUMNS; s < 32; s <<= 1)
#pragma unroll
      for (int z = 0; z < 5; z++) v[z] += __shfl_xor_sync(~0u, v[z], s);
    if (c.lane < COLUMNS)
#pragma unroll
      for (int z = 0; z < 5; z++) parts[(column * 5 + z) * PART_PITCH + c.warp] = v[z];
    consumers_sync();
    if (c.t < COMBINE_WIDTH / 2) {  // two outputs, one word, a thread
      const float* mine = parts + ((c.t >> 1) * 5 + (c.t & 1) * 2) * PART_PITCH;
      const float total = sum_of_warps(parts + ((c.t >> 1) * 5 + 4) * PART_PITCH);
      const float inverse = __fdividef(1.f, total);
      const uint32_t w =
          pack(sum_of_warps(mine) * inverse, sum_of_warps(mine + PART_PITCH) * inverse);
      store_relaxed(x.now + X_COMBINED + task * (COMBINE_WIDTH / 2) + c.t, w);
    }
    consumers_sync();
  }
}

// Words of the later buffer that the layer which filled it can have filled: a head's partial, or,
// where contexts are long or that layer belongs to an earlier launch (`whole`), all of the block's.
DEVICE void clear_attention(const Context& c, const Exchange& x, bool whole) {
  if (c.t < (whole ? BLOCK_PARTIALS : PARTIAL) / 4)
    x.clear4(X_PARTIALS + blockIdx.x * BLOCK_PARTIALS + c.t * 4);
  if (whole && c.t < COMBINE_WIDTH / 2)
    for (int task = blockIdx.x; task < COMBINE_TASKS; task += gridDim.x)
      x.clear(X_COMBINED + task * (COMBINE_WIDTH / 2) + c.t);
}

// Attention output of all heads, gated, into S_GATED: 6 warps, a head each, 4 values a thread.
template <bool LONG>
DEVICE void gate_output(const Context& c, const Exchange& x, const AttentionPlan& p,
                        float gate_bias) {
  if (c.t >= ATTENTION / 4) return;
  const int head = c.t >> 5;
  float o[4] = {0, 0, 0, 0};
  // Asked for now, looked at behind the wait for the attention: it has been there for long by then.
  uint2 gate = load_relaxed2(x.now + X_QKVG + GATE + c.t * 2);
  if (LONG && p.all) {
    const uint2 w = wait2<WAIT_COMBINED>(c, x.now + X_COMBINED + c.t * 2);
    o[0] = low(w.x); o[1] = high(w.x); o[2] = low(w.y); o[3] = high(w.y);
  } else {
    constexpr int BATCH = 5;  // splits in flight
    const uint32_t* source = x.now + X_PARTIALS + head * BLOCK_PARTIALS;
    float top = -INFINITY, sum = 0;
#pragma unroll 1
    for (int s0 = 0; s0 < p.splits; s0 += BATCH) {
      uint4 d[BATCH];
      uint2 e[BATCH];
      bool again;
      uint32_t polls = 0;
      do {
        again = false;
#pragma unroll
        for (int k = 0; k < BATCH; k++) if (s0 + k < p.splits) {
          const uint32_t* w = source + (s0 + k) * HEADS * BLOCK_PARTIALS;
          d[k] = load_relaxed4(w + c.lane * 4);
          e[k] = load_relaxed2(w + HEAD_DIM);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++)
          if (s0 + k < p.splits) again |= !filled(d[k]) || !filled(e[k]);
      } while (again && !gave_up<WAIT_PARTIALS>(c, polls));
      float now = top;
#pragma unroll
      for (int k = 0; k < BATCH; k++)
        if (s0 + k < p.splits) now = fmaxf(now, __uint_as_float(e[k].x));
      float f = exp2f(top - now);
      sum *= f;
      o[0] *= f; o[1] *= f; o[2] *= f; o[3] *= f;
      top = now;
#pragma unroll
      for (int k = 0; k < BATCH; k++) if (s0 + k < p.splits) {
        f = exp2f(__uint_as_float(e[k].x) - top);
        sum = fmaf(f, __uint_as_float(e[k].y), sum);
        o[0] = fmaf(f, __uint_as_float(d[k].x), o[0]);
        o[1] = fmaf(f, __uint_as_float(d[k].y), o[1]);
        o[2] = fmaf(f, __uint_as_float(d[k].z), o[2]);
        o[3] = fmaf(f, __uint_as_float(d[k].w), o[3]);
      }
    }
    const float inverse = __fdividef(1.f, sum);
#pragma unroll
    for (int z = 0; z < 4; z++) o[z] = round_bf16(o[z] * inverse);
  }
  if (!filled(gate)) gate = wait2<WAIT_QKVG>(c, x.now + X_QKVG + GATE + c.t * 2);
  const float gates[4] = {low(gate.x), high(gate.x), low(gate.y), high(gate.y)};
#pragma unroll
  for (int z = 0; z < 4; z++) o[z] *= round_bf16(sigmoid(round_bf16(gates[z] + gate_bias)));
  uint32_t* w = c.at<uint32_t>(S_GATED + (c.t >> 1) * 16 + (c.t & 1) * 4);
  w[0] = pack(o[0], o[1]);
  w[2] = pack(o[2], o[3]);
}
