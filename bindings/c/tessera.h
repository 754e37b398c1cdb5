/* SPDX-License-Identifier: Apache-2.0 */
/* Tessera's kernels for C: NVFP4 quantisation, linear maps, mixtures of experts and attention of DeepSeek-V4 on the CPU
 * or on a GPU. docs/c_api.md is the guide; src/ops/<op>/<op>.h states each computation.
 *
 * Memory. A context has a device, and every pointer to data that is passed to a function of it is in that device's
 * memory: the host's for "cpu", the GPU's for "cuda:N". Arrays are dense and row-major, the last dimension fastest, and
 * aligned as each function says. Structs and arrays of structs are the host's and may go after the call. Nothing is
 * copied unless a function says so.
 *
 * Order. On a GPU a *_run function queues its work on the context's stream and returns; it neither allocates nor waits,
 * so it may be captured into a CUDA graph. On the CPU the work is done when the function returns. A context serves one
 * thread at a time; different contexts are independent. A call makes its GPU the calling thread's current one.
 *
 * Errors. Functions return TESSERA_OK or another tessera_status, and tessera_error_message() has a sentence about the
 * last failure in the calling thread. A failed call leaves its out-pointers as they were. Data are checked as far as
 * they can be without reading a device's memory: null, size and alignment of everything; values of indices are not.
 */
#ifndef TESSERA_H
#define TESSERA_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TESSERA_API __attribute__((visibility("default")))
#else
#define TESSERA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Errors and versions ------------------------------------------------------------------------------------------
 */

typedef int32_t tessera_status;
enum {
  TESSERA_OK = 0,
  TESSERA_INVALID_ARGUMENT = 1, /* a null or misaligned pointer, an impossible size or name */
  TESSERA_NOT_FOUND = 2,
  TESSERA_DATA_LOSS = 3,
  TESSERA_UNSUPPORTED = 4,        /* well-formed, but no kernel of this device does it; the message lists why */
  TESSERA_RESOURCE_EXHAUSTED = 5, /* out of memory */
  TESSERA_CANCELLED = 6,
  TESSERA_DEVICE_ERROR = 7, /* a GPU or its driver failed, perhaps in work that was queued earlier */
  TESSERA_NOT_FINITE = 8,   /* NaN or infinity where numbers are due */
  TESSERA_INTERNAL = 9      /* a fault of the library's */
};

/* "0.1.0". The string is static. */
TESSERA_API const char* tessera_version(void);

/* Counts up when this header changes in a way that older programs can't be linked with. */
#define TESSERA_ABI_VERSION 1
TESSERA_API int32_t tessera_abi_version(void);

/* What went wrong in the calling thread's last call that failed; "" before any did. Valid until its next failure. */
TESSERA_API const char* tessera_error_message(void);

/* "invalid argument", ...; "unknown" for a number that is no status. The string is static. */
TESSERA_API const char* tessera_status_name(tessera_status status);

/* ---- Context ------------------------------------------------------------------------------------------------------
 */

typedef struct tessera_context tessera_context;

/* Opens `device`: "cpu", "cuda" or "cuda:N" with N as CUDA counts.
 *   stream       a cudaStream_t of that GPU, which stays the caller's and must outlive the context; NULL: a stream of
 * the context's own. The legacy default stream, whose handle is 0, is passed as (void*)0x1 (cudaStreamLegacy). NULL for
 * "cpu". num_threads  of the CPU; 0: one per core TESSERA_BACKENDS and TESSERA_FORCE act as on the program. Errors:
 * INVALID_ARGUMENT, UNSUPPORTED (built without CUDA), DEVICE_ERROR. */
TESSERA_API tessera_status tessera_context_open(const char* device, void* stream, int32_t num_threads,
                                                tessera_context** context);

/* Waits for the context's work and closes it. What was made from it must be destroyed before. NULL is allowed. */
TESSERA_API void tessera_context_close(tessera_context* context);

/* Waits for all that was queued. Errors: DEVICE_ERROR where some of it failed. */
TESSERA_API tessera_status tessera_context_synchronize(tessera_context* context);

/* Memory of the context's device, for callers that have no other way to it: `bytes` > 0, aligned to 128 bytes, zero.
 * Errors: RESOURCE_EXHAUSTED. */
TESSERA_API tessera_status tessera_allocate(tessera_context* context, size_t bytes, void** data);

/* Gives back what tessera_allocate gave. NULL is allowed. Errors: INVALID_ARGUMENT for another address. */
TESSERA_API tessera_status tessera_release(tessera_context* context, void* data);

/* Copies from the host's memory to the device's, and back, in the order of the context's work; both have finished with
 * `host` when they return. */
TESSERA_API tessera_status tessera_upload(tessera_context* context, void* target, const void* host, size_t bytes);
TESSERA_API tessera_status tessera_download(tessera_context* context, void* host, const void* source, size_t bytes);

/* ---- Types of data ------------------------------------------------------------------------------------------------
 */

typedef int32_t tessera_dtype;
enum { TESSERA_F32 = 0, TESSERA_BF16 = 1 };

typedef int32_t tessera_weight_format;
enum {
  TESSERA_WEIGHT_F32 = 0,       /* float [rows, cols] */
  TESSERA_WEIGHT_BF16 = 1,      /* BF16 [rows, cols] */
  TESSERA_WEIGHT_FP8_BLOCK = 2, /* E4M3 [rows, cols]; float scales [ceil(rows/128), ceil(cols/128)] */
  TESSERA_WEIGHT_NVFP4 = 3      /* E2M1 [rows, cols/2], even column in the low nibble; E4M3 scales [rows, cols/16] */
};

/* How a linear map takes its inputs (docs/contracts/numerics.md, section 2). */
typedef int32_t tessera_input_mode;
enum {
  TESSERA_INPUT_F32 = 0, /* FP32, nothing is rounded */
  TESSERA_INPUT_A16 = 1, /* BF16 */
  TESSERA_INPUT_A4 = 2,  /* NVFP4, with NVFP4 weights only */
  TESSERA_INPUT_A8 = 3   /* E4M3 by 128 */
};

/* A matrix as checkpoints have it: value[r][c] = code * block scale * tensor scale. */
typedef struct {
  tessera_weight_format format;
  int64_t rows, cols;       /* output and input features */
  const void* data;         /* aligned to 16 bytes */
  const void* block_scales; /* aligned to 16 bytes; NULL for F32 and BF16 */
  float tensor_scale;       /* of NVFP4, above 0; not looked at for other formats */
} tessera_weight;

/* ---- Quantisation -------------------------------------------------------------------------------------------------
 */

typedef int32_t tessera_nvfp4_rule;
enum {
  TESSERA_NVFP4_ROWS = 0,   /* activations: a global scale per row, amax / 2688 (1 for a row of zeros) */
  TESSERA_NVFP4_TENSOR = 1, /* a weight: one global scale, amax / 2688 */
  TESSERA_NVFP4_TENSOR_FOUR_OVER_SIX =
      2 /* a weight, amax / 1536: each block's largest value becomes 6 or 4, whichever is closer */
};

/* NVFP4 of x [rows, cols] of `dtype`, cols a multiple of 16:
 *   codes    [rows, cols/2] E2M1, even column in the low nibble
 *   scales   [rows, cols/16] E4M3
 *   globals  [rows] float for TESSERA_NVFP4_ROWS, else [1]
 * value = code * scale * global. x aligned to its dtype, globals to 4 bytes; all in the context's memory, and the bytes
 * are the same on every device. On a GPU the work is queued. With TESSERA_NVFP4_ROWS a row that holds NaN or infinity
 * gets NaN as its scales. A weight that does is NOT_FINITE on the CPU; on a GPU, which is not waited for, its scales
 * and its global are NaN. */
TESSERA_API tessera_status tessera_quantize_nvfp4(tessera_context* context, tessera_nvfp4_rule rule,
                                                  tessera_dtype dtype, const void* x, int64_t rows, int64_t cols,
                                                  uint8_t* codes, uint8_t* scales, float* globals);

/* ---- Linear map ---------------------------------------------------------------------------------------------------
 */

typedef struct tessera_linear tessera_linear;

typedef struct {
  int64_t in, out; /* features of one group; NVFP4: in a multiple of 16 */
  int64_t groups;  /* 1, or a block-diagonal map: group g takes inputs [g in, (g+1) in) to outputs [g out, ...) */
  tessera_input_mode input;
  tessera_dtype activation; /* of x: F32 with TESSERA_INPUT_F32, else BF16 */
  tessera_dtype output;     /* of y: as x, or F32 */
} tessera_linear_desc;

/* Chooses the kernel, packs the weight where it wants that (a copy), and takes scratch memory for up to
 * `max_tokens` tokens. `weight` is [groups * out, in]; its arrays must stay until the map is destroyed.
 * Errors: INVALID_ARGUMENT, UNSUPPORTED, RESOURCE_EXHAUSTED, DEVICE_ERROR. */
TESSERA_API tessera_status tessera_linear_create(tessera_context* context, const tessera_linear_desc* desc,
                                                 const tessera_weight* weight, int64_t max_tokens,
                                                 tessera_linear** linear);

/* y [num_tokens, groups * out] = W x, x [num_tokens, groups * in]; both aligned to 16 bytes, not overlapping.
 * 0 <= num_tokens <= max_tokens. */
TESSERA_API tessera_status tessera_linear_run(tessera_linear* linear, const void* x, void* y, int64_t num_tokens);

/* "avx512.bf16": the kernel that was chosen. Valid until the map is destroyed; NULL for NULL. */
TESSERA_API const char* tessera_linear_kernel(const tessera_linear* linear);

/* NULL is allowed. */
TESSERA_API void tessera_linear_destroy(tessera_linear* linear);

/* ---- Mixture of experts -------------------------------------------------------------------------------------------
 */

typedef struct tessera_moe tessera_moe;

typedef struct {
  int64_t hidden, inner;
  int64_t num_experts;             /* that the router knows */
  int64_t first_expert, num_local; /* those whose weights are here: [first_expert, first_expert + num_local) */
  int64_t top_k;
  tessera_input_mode input;        /* of the experts */
  tessera_input_mode shared_input; /* of the shared expert */
  tessera_dtype activation;        /* F32 with TESSERA_INPUT_F32, else BF16 */
  float swiglu_limit;              /* 0: no clamp */
  float routing_scale;             /* routed_scaling_factor */
  int32_t is_normalized;           /* norm_topk_prob: 0 or 1 */
} tessera_moe_desc;

/* Arrays that are NULL are of parts that are not used. All must stay until the mixture is destroyed. */
typedef struct {
  const tessera_weight* w1;        /* [num_local] gate: [inner, hidden], all of one format */
  const tessera_weight* w3;        /* [num_local] up: [inner, hidden] */
  const tessera_weight* w2;        /* [num_local] down: [hidden, inner] */
  const tessera_weight* router;    /* [num_experts, hidden], F32 or BF16; NULL: tessera_moe_run can't be called */
  const float* router_bias;        /* [num_experts], for a learned choice */
  const int32_t* hash_table;       /* [vocabulary, top_k], for a choice by token id; one of the two */
  const tessera_weight* shared_w1; /* the shared expert; NULL all three: none */
  const tessera_weight* shared_w3;
  const tessera_weight* shared_w2;
} tessera_moe_weights;

/* As tessera_linear_create. */
TESSERA_API tessera_status tessera_moe_create(tessera_context* context, const tessera_moe_desc* desc,
                                              const tessera_moe_weights* weights, int64_t max_tokens,
                                              tessera_moe** moe);

/* The routed experts alone, grouped by expert on the device:
 *   out[t][s] = w2 (silu(min(w1 x, L)) * clamp(w3 x, -L, L) * routing[t][s]) with the expert experts[t][s]
 *   x        [num_tokens, hidden], aligned to 16 bytes
 *   experts  [num_tokens, top_k] ascending in a row; of experts that are not here `out` is 0
 *   routing  [num_tokens, top_k]
 *   out      [num_tokens, top_k, hidden], aligned to 16 bytes */
TESSERA_API tessera_status tessera_moe_experts_run(tessera_moe* moe, const void* x, const int32_t* experts,
                                                   const float* routing, void* out, int64_t num_tokens);

/* The sum of what tessera_moe_experts_run gave: routed [num_tokens, top_k, hidden] to out [num_tokens, hidden], in FP32
 * in ascending slot, rounded once; both aligned to 16 bytes, not overlapping. */
TESSERA_API tessera_status tessera_moe_combine_run(tessera_moe* moe, const void* routed, void* out, int64_t num_tokens);

/* Router, routed experts, shared expert and their sum: x [num_tokens, hidden] to out [num_tokens, hidden], aligned to
 * 16 bytes, not overlapping. The sum is in ascending expert id, then the shared expert. token_ids  [num_tokens], with a
 * hash table; else NULL experts, routing  [num_tokens, top_k]: receive the choice where they are not NULL */
TESSERA_API tessera_status tessera_moe_run(tessera_moe* moe, const void* x, const int32_t* token_ids, void* out,
                                           int32_t* experts, float* routing, int64_t num_tokens);

/* The kernel of the routed experts; otherwise as tessera_linear_kernel. */
TESSERA_API const char* tessera_moe_kernel(const tessera_moe* moe);
TESSERA_API void tessera_moe_destroy(tessera_moe* moe);

/* ---- Attention ----------------------------------------------------------------------------------------------------
 */

typedef struct tessera_attention tessera_attention;

typedef int32_t tessera_cache_format;
enum {
  TESSERA_CACHE_F32 = 0,
  TESSERA_CACHE_BF16 = 1,
  /* head_dim - rope_dim E4M3 codes | rope_dim BF16 | a UE8M0 scale per 64 codes | padding to 8: 584 bytes at 448 + 64
   */
  TESSERA_CACHE_FP8 = 2
};

typedef struct {
  int64_t heads, head_dim; /* head_dim at most 512 */
  int64_t rope_dim;        /* of it, the last ones, never quantised */
  int64_t window;          /* a token attends the last `window` positions, itself included */
  float scale;             /* head_dim^-0.5 */
  tessera_cache_format cache;
  tessera_dtype activation; /* F32 with TESSERA_CACHE_F32, else BF16 */
} tessera_attention_desc;

/* A vector of head_dim values per position serves as key and as value of every head. As tessera_linear_create. */
TESSERA_API tessera_status tessera_attention_create(tessera_context* context, const tessera_attention_desc* desc,
                                                    int64_t max_tokens, tessera_attention** attention);

/* Bytes of one entry of a cache; 0 for NULL. */
TESSERA_API int64_t tessera_attention_entry_bytes(const tessera_attention* attention);

/* Encodes rows [num_rows, head_dim] (aligned to 16 bytes) into entries slots[i] of `cache` (aligned to 16 bytes); slots
 * are distinct, and a row whose slot is -1 is left out. */
TESSERA_API tessera_status tessera_attention_store(tessera_attention* attention, const void* rows, const int64_t* slots,
                                                   int64_t num_rows, uint8_t* cache);

/* One step of attention for tokens of one sequence. */
typedef struct {
  const void* q;               /* [num_tokens, heads, head_dim], aligned to 16 bytes */
  const int64_t* positions;    /* [num_tokens] */
  const uint8_t* window_cache; /* a ring: position p is entry p mod window_slots; holds the tokens themselves already */
  int64_t window_slots;        /* at least window - 1 + num_tokens */
  const uint8_t* entry_cache;  /* compressed entries by index; NULL: none */
  const int32_t* num_entries;  /* [num_tokens]: entries [0, n) are visible, or the length of the token's list */
  const int32_t* selected;     /* [num_tokens, selected_stride] ascending entries; NULL: all that are visible */
  int64_t selected_stride;
  const float* sink; /* [heads]: logits that take part in the softmax and have no value */
  void* out;         /* [num_tokens, heads, head_dim], aligned to 16 bytes */
  int64_t num_tokens;
} tessera_attention_step;

TESSERA_API tessera_status tessera_attention_run(tessera_attention* attention, const tessera_attention_step* step);

/* The same for tokens of several sequences, each with caches of its own: the tables and `places` lie in the context's
 * memory, like everything that tokens index. A table's addresses are of that memory too, aligned to 16 bytes. */
typedef struct {
  tessera_attention_step step;         /* window_cache and entry_cache are NULL; window_slots holds for every ring and
                                          is at least window - 1 plus the tokens of any one sequence */
  const uint8_t* const* window_caches; /* by place: the ring of each sequence */
  const uint8_t* const* entry_caches;  /* by place: compressed entries; NULL: none */
  const int32_t* places;               /* [num_tokens]: the place of the token's sequence in the tables */
} tessera_attention_batch;

TESSERA_API tessera_status tessera_attention_run_batch(tessera_attention* attention,
                                                       const tessera_attention_batch* batch);

/* tessera_attention_store into several caches: row i goes to slot slots[i] of caches[places[i]]. Slots are distinct
 * within a cache. `caches` and `places` [num_rows] as above. */
TESSERA_API tessera_status tessera_attention_store_batch(tessera_attention* attention, const void* rows,
                                                         const int64_t* slots, const int32_t* places, int64_t num_rows,
                                                         uint8_t* const* caches);

TESSERA_API const char* tessera_attention_kernel(const tessera_attention* attention);
TESSERA_API void tessera_attention_destroy(tessera_attention* attention);

#ifdef __cplusplus
}
#endif

#endif
