// One persistent cooperative kernel for a whole batch-1 decode step of one Beam TP8 rank.
//
//  * One block an SM. Ten consumer warps compute; one producer warp streams every weight byte that
//    the block owns, in program order, through a ring in shared memory (ring.cuh, producer.cuh).
//  * Blocks own output rows. All keep the whole residual stream in registers and recompute the
//    cheap norms (boundary.cuh), so only raw projections travel between blocks, through the L2, in
//    words that are their own flags (exchange.cuh): there is no grid barrier.
//  * A layer: packed q, k, v, gate | attention in splits | combination, gate, o_proj | boundary |
//    router | experts' gate and up | experts' down | boundary. Dense layers have their MLP instead.
//  * Waits give up after the host's patience and say so (waits.cuh).
// Nothing here adds up over ranks: partial sums are used as if they were whole.
#include "attention.cuh"
#include "boundary.cuh"
#include "head.cuh"
#include "mlp.cuh"
#include "producer.cuh"

// The residual stream in front of a layer, for checks.
DEVICE void trace(const Params& P, const Context& c, int layer, const Residual& h) {
  if (!P.h_trace || blockIdx.x) return;
  *(uint4*)(P.h_trace + (size_t)layer * HIDDEN + c.t * 8) = h.a;
  *(uint4*)(P.h_trace + (size_t)layer * HIDDEN + (c.t + CONSUMERS) * 8) = h.b;
}

// LONG: contexts can be so long that all blocks share a layer's keys (attention_plan.cuh). Without
// it the kernel has neither the code for that nor its need of registers.
template <bool LONG>
DEVICE void consume(const Params& P, const Context& c, const Shares& rows, int position,
                    unsigned base, const bf16* input) {
  Ring ring{0, 0};
  Residual h = {load_constant(input + c.t * 8), load_constant(input + (c.t + CONSUMERS) * 8)};
  const Layer* layers = c.at<Layer>(S_LAYERS);
  const bool long_context = plan_attention<LONG>(position, 1, 0).all;  // in the full layers
  trace(P, c, P.first_layer, h);
  const bool any = P.first_layer < P.last_layer;
  first_norm(c, h, any ? layers[P.first_layer & 3].input_norm : P.norm, P.eps);
#pragma unroll 1
  for (int l = P.first_layer; l < P.last_layer; l++) {
    const Layer& L = layers[l & 3];
    const Exchange x(P, base + (l - P.first_layer));
    // Small vectors of this layer, before they are needed.
    uint2 qk_norm = make_uint2(0, 0);
    if (c.warp < 2) qk_norm = *(const uint2*)(L.qk_norm + c.warp * HEAD_DIM + c.lane * 4);
    const float gate_bias = c.t < ATTENTION / 4 ? __bfloat162float(L.gate_bias[c.t >> 5]) : 0.f;

    ring = gemv(c, ring, rows.packed().count());
    consumers_sync();
    if (c.t < (rows.packed().count() + 31) / 32 * 32) {
      const bool mine = c.t < rows.packed().count();
      const float v = mine ? sum_of_warps(c.at<float>(S_PART) + c.t * PART_PITCH) : 0.f;
      const float next = __shfl_xor_sync(~0u, v, 1);
      if (mine && !(c.t & 1)) x.put(X_QKVG + (rows.packed().first + c.t) / 2, pack(v, next));
    }

    const AttentionPlan plan = plan_attention<LONG>(position, L.full, L.rows);
    if (plan.count) {
      if (LONG && plan.all) attend_long(c, ring, x, L, plan, L.qk_norm, P.eps);
      else attend_short(c, ring, x, L, plan, qk_norm, P.eps);
    }
    clear_attention(c, x, LONG && (long_context || l - P.first_layer < BUFFERS / 2));
    NormWeights norms = load_norms(c, L.post_attention_norm, L.pre_mlp_norm);
    if (LONG && plan.all) combine_long(c, x, plan);
    gate_output<LONG>(c, x, plan, gate_bias);
    consumers_sync();

    for (int first = 0; first < rows.out().count(); first += PANEL)
      gemv_short<ATTENTION * 2, O_ROWS>(c, ring, c.smem + S_GATED, c.at<float>(S_PART) + first * 2,
                                        min(PANEL, rows.out().count() - first));
    consumers_sync();
    put_rows(c, x, X_ATTENTION, rows.out().first, rows.out().count(), 1.f);
    h = boundary<WAIT_ATTENTION>(c, x.now + X_ATTENTION, h, norms, L.attention_new,
                                 L.attention_old, P.eps);

    norms = load_norms(c, L.post_mlp_norm,
                       l + 1 < P.last_layer ? layers[(l + 1) & 3].input_norm : P.norm);
    if (L.dense) {
      clear_scores(c, x, rows.router());
      dense_mlp(c, ring, x, rows);
      put_rows(c, x, X_MLP, rows.out().first, rows.out().count(), 1.f);
    } else {
      route(c, ring, x, rows.router());
      sparse_mlp(c, ring, x, rows);
      put_rows(c, x, X_MLP, rows.out().first, rows.out().count(), P.routed_scale);
    }
    h = boundary<WAIT_MLP>(c, x.now + X_MLP, h, norms, L.mlp_new, L.mlp_old, P.eps);
    trace(P, c, l + 1, h);
  }
  const u64 best = P.do_head ? head(c, ring, P, share(P.vocabulary)) : 0;
  if (c.t == 0) finish(P, c, base + (P.last_layer - P.first_layer), best);
}

template <bool LONG>
__global__ void __launch_bounds__(BLOCK, 1) rank_step(const __grid_constant__ Params P) {
  Context c;
  c.smem = shared_address(block_memory);
  c.bars = c.smem + S_BARS;
  c.t = threadIdx.x;
  c.lane = c.t & 31;
  c.warp = c.t >> 5;
  // All asked for at once: each is a trip to memory.
  const unsigned failed = *P.error, base = *P.epoch;
  const int position = (int)*P.position;
  const bf16* input = P.h_in ? P.h_in : P.embed + (size_t)*P.token * HIDDEN;
  u64 word = 0;
  const bool describes =
      P.first_layer < P.last_layer && c.warp == WARPS - 1 && c.lane < LAYER_WORDS;
  if (describes) word = ((const u64*)(P.layers + P.first_layer))[c.lane];
  if (failed) return;  // an earlier step failed: its words are still in the exchange
  if (c.t == 0) {
    for (int i = 0; i < GROUPS; i++) mbar_init(c.bars + 8 * i, 1);
    mbar_fence_init();
    patience(c)[0] = P.patience;
    patience(c)[1] = min(P.patience, ~0u / 16) * 16;  // by a clock: surely more than the polls take
    patience(c)[2] = 0;
  }
  float* rope = c.at<float>(S_ROPE);
  if (c.t < HEAD_DIM) rope[c.t] = P.rope[(size_t)position * HEAD_DIM + c.t];
  if (c.t == HEAD_DIM) rope[HEAD_DIM] = powf(1.f + (float)(position + 1) / 2048.f, 0.1f);  // SSMax
  if (describes) ((u64*)(c.at<Layer>(S_LAYERS) + (P.first_layer & 3)))[c.lane] = word;
  __syncthreads();
  const Shares rows;
  if (c.warp == WARPS) Producer<LONG>(P, c).run(rows, position, base);
  else consume<LONG>(P, c, rows, position, base, input);
}

// ---- what ctypes calls
extern "C" int rank_params_size() { return sizeof(Params); }
extern "C" int rank_layer_size() { return sizeof(Layer); }
extern "C" int rank_exchange_words(int grid) { return X_PARTIALS + grid * BLOCK_PARTIALS; }
extern "C" int rank_shared_bytes() { return S_TOTAL; }
extern "C" const char* rank_error(int code) { return cudaGetErrorString((cudaError_t)code); }
// Whether a sequence that fills the cache needs long attention; a step's launches are of one kind.
static bool is_long(int capacity, int grid) {
  const int splits = (capacity + SHORT_CHUNKS * CHUNK - 1) / (SHORT_CHUNKS * CHUNK);
  const int most = grid / HEADS;
  return splits > (most < SHORT_SPLITS ? most : SHORT_SPLITS);
}
// Raises the kernels' shared-memory limit and returns a CUDA error; *resident: blocks an SM holds.
extern "C" int rank_prepare(int* resident) {
  constexpr auto LIMIT = cudaFuncAttributeMaxDynamicSharedMemorySize;
  int other = 0;
  cudaError_t e = cudaFuncSetAttribute(rank_step<false>, LIMIT, S_TOTAL);
  if (!e) e = cudaFuncSetAttribute(rank_step<true>, LIMIT, S_TOTAL);
  if (!e)
    e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(resident, rank_step<false>, BLOCK, S_TOTAL);
  if (!e)
    e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&other, rank_step<true>, BLOCK, S_TOTAL);
  if (other < *resident) *resident = other;
  return e;
}
extern "C" int rank_launch(const Params* params, int grid, void* stream) {
  void* arguments[] = {(void*)params};
  void* kernel = is_long(params->capacity, grid) ? (void*)rank_step<true> : (void*)rank_step<false>;
  return cudaLaunchCooperativeKernel(kernel, dim3(grid), dim3(BLOCK), arguments, S_TOTAL,
                                     (cudaStream_t)stream);
}
