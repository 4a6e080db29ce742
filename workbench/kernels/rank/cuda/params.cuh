// What the host passes. Mirrored by ctypes structures in persistent.py, which compares the sizes.
#pragma once
#include "shape.cuh"

struct Layer {
  const bf16 *qkvg, *o_proj, *gate_up, *down;
  const float *router, *correction;
  const bf16 *input_norm, *post_attention_norm, *pre_mlp_norm, *post_mlp_norm, *qk_norm, *gate_bias;
  bf16 *k_cache, *v_cache;
  int full, dense, rows, unused;            // rows: of the cache; a sliding layer's is a ring
  float attention_new, attention_old;       // depth-scaled add: 1/sqrt(n), sqrt((n-1)/n)
  float mlp_new, mlp_old;
};
constexpr int LAYER_WORDS = sizeof(Layer) / 8;
static_assert(sizeof(Layer) == 144 && LAYER_WORDS <= 32, "a lane copies one 8-byte word");

struct Params {
  const Layer* layers;                      // in device memory
  const bf16 *embed, *norm, *lm_head, *h_in;  // h_in: instead of the embedding, if not null
  bf16* h_trace;                            // [layers + 1][HIDDEN], or null
  const float* rope;                        // [capacity][HEAD_DIM]: cosines, then sines
  long long *token, *position, *next_token;
  float* logits;
  int* expert_ids;                          // [layers][TOP_K]
  uint32_t* exchange;                       // BUFFERS x exchange_words, see exchange.cuh
  unsigned* released;                       // [MAX_BLOCKS]: see exchange_flags
  unsigned* epoch;                          // running number of the next layer
  unsigned* error;                          // 0, or wait << 16 | block
  unsigned* arrived;                        // blocks that have finished
  u64* best;                                // running argmax of the head
  int first_layer, last_layer, do_head, advance;
  int vocabulary, capacity, renormalise, exchange_words;
  int depth, depth_free, pace;              // groups in flight; cycles between L2 prefetches
  unsigned patience;                        // units of 1024 cycles that a wait may take
  float eps, softcap, routed_scale;         // softcap 0: none
};
