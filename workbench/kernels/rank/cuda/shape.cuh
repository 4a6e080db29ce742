// Sizes: the model's (one TP8 rank of Beam-501B), the block's, and the shared-memory map.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef __nv_bfloat16 bf16;
typedef unsigned long long u64;

// ---- the rank's shapes. One KV head: all query heads share it. The host checks them by name.
constexpr int HIDDEN = 5120, HEADS = 6, HEAD_DIM = 128;
constexpr int PACKED = 2 * (HEADS + 1) * HEAD_DIM;  // rows of the packed q, k, v, gate projection
constexpr int ATTENTION = HEADS * HEAD_DIM;         // width of the attention output
constexpr int EXPERTS = 256, TOP_K = 8, EXPERT_WIDTH = 320, DENSE_WIDTH = 1536, WINDOW = 512;

// ---- the block: 10 fat consumer warps (20 thin ones would spill) and one producer warp
constexpr int WARPS = 10, CONSUMERS = WARPS * 32, BLOCK = CONSUMERS + 32;
static_assert(HIDDEN == 2 * 8 * CONSUMERS, "a consumer holds two times 8 values of the residual");
static_assert(HIDDEN == WARPS * 512, "a warp covers 512 columns of a full row");

// ---- the ring: 5 groups of 4 slots; a slot holds one BF16 row of HIDDEN, 40 keys, ...
// The 64 bytes behind each row shift neighbouring slots to other banks.
constexpr int ROW_BYTES = HIDDEN * 2, SLOT = ROW_BYTES + 64, GROUP_SLOTS = 4, GROUPS = 5;
constexpr int SLOTS = GROUPS * GROUP_SLOTS;
constexpr int CHUNK = ROW_BYTES / (HEAD_DIM * 2);  // 40 keys (or values) a slot
constexpr int GROUP_KEYS = GROUP_SLOTS * CHUNK;    // 160
constexpr int O_ROWS = ROW_BYTES / (ATTENTION * 2);       // 6 rows of o_proj a slot
constexpr int DENSE_ROWS = ROW_BYTES / (DENSE_WIDTH * 2);  // 3 rows of the dense down projection
constexpr int PANEL = 40;        // output rows that a pass over short rows covers: 5 x 8
constexpr int HALF = ROW_BYTES / 2;  // half a slot: 8 rows of an expert's down projection
constexpr int DOWN_HALVES = PANEL / 8;  // of an expert's panel: 5
constexpr int DOWN_SLOTS = TOP_K * DOWN_HALVES / 2;  // of all chosen experts' panels: 20
static_assert(HALF == 8 * EXPERT_WIDTH * 2, "half a slot is 8 rows of an expert's down projection");
static_assert(DOWN_SLOTS == SLOTS, "the ring holds a panel of all chosen experts");
constexpr int HEAD_ROWS = 160;   // rows of the head between two reductions (a multiple of 8)

// ---- short attention: a block takes one query head and up to LONG/SLIDING_CHUNKS chunks
constexpr int SHORT_SPLITS = 16, SHORT_CHUNKS = 8, SLIDING_CHUNKS = 3;
constexpr int PARTIAL = HEAD_DIM + 4;             // words of a partial: 128 sums, max, sum, padding
constexpr int BLOCK_PARTIALS = HEADS * PARTIAL;   // a block's own words: one partial a head
constexpr int COMBINE_WIDTH = 8, COMBINE_TASKS = ATTENTION / COMBINE_WIDTH;

constexpr int MIN_BLOCKS = 32, MAX_BLOCKS = 256;

// ---- shared memory (byte offsets)
constexpr int PART_PITCH = 12;                    // floats: 10 warps' partial sums of a row, padded
constexpr int S_PART = SLOT * SLOTS;              // partial sums, 12,800 bytes
constexpr int S_X = S_PART + 12800;               // the phase's input vector, BF16
constexpr int S_MISC = S_X + ROW_BYTES;
constexpr int S_TOTAL = S_MISC + 1600;
// inside S_PART, while no sums are there
constexpr int S_GATED = S_PART + 4096;            // gated attention output, BF16 x 768
constexpr int S_Q = S_PART + 6144;                // short attention: query, then new key (BF16)
constexpr int S_V = S_Q + 512, S_SCORES = S_V + 512;
constexpr int S_SIGMOID = S_PART + 8960;          // router scores (producer warp)
constexpr int PACKED_SUMS = 3072;                 // bytes of the packed projection's sums
constexpr int S_LONG_Q = S_PART + PACKED_SUMS;    // behind those: warps may still read them
constexpr int S_LONG_K = S_LONG_Q + HEADS * 256, S_LONG_V = S_LONG_K + 256;
constexpr int S_LONG_RED = S_LONG_V + 512;        // warps' maxima, sums: [2][8 heads][PART_PITCH]
constexpr int S_LONG_P = S_LONG_RED + 2 * 8 * PART_PITCH * 4;  // probabilities [key][8 heads]
constexpr int LONG_HEADS = 3;                     // heads whose sums are added up at a time
constexpr int LONG_STAGE_BYTES = LONG_HEADS * WARPS * HEAD_DIM * 4;
constexpr int S_LONG_STAGE = S_X + ROW_BYTES - LONG_STAGE_BYTES;  // ends with S_X, begins before
static_assert((PACKED / MIN_BLOCKS) * PART_PITCH * 4 <= PACKED_SUMS, "the largest block's sums");
static_assert(S_LONG_P + GROUP_KEYS * 32 <= S_PART + 12800, "long attention's scratch");
static_assert(S_LONG_STAGE >= S_LONG_P && S_LONG_STAGE % 16 == 0, "maxima and sums stay");
static_assert(S_LONG_STAGE >= S_GATED + ATTENTION * 2, "other warps may be ahead, gating");
static_assert(GROUP_KEYS == 16 * WARPS && CHUNK % 8 == 0, "16 keys a warp, 8 of them in a slot");
static_assert(HEADS % LONG_HEADS == 0, "all heads in whole turns");
static_assert(HEAD_ROWS * PART_PITCH * 4 <= S_SIGMOID - S_PART, "sums of the head");
// inside S_MISC
constexpr int S_RED = S_MISC, S_SUMS = S_MISC + 192, S_ROPE = S_MISC + 288;
constexpr int S_ROUTE = S_MISC + 816, S_IDS = S_MISC + 848, S_BARS = S_MISC + 896;
constexpr int S_PATIENCE = S_MISC + 944;          // 3 words
constexpr int S_LAYERS = S_MISC + 960;            // 4 layer descriptors of 144 bytes
