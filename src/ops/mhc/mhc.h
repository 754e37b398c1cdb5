// SPDX-License-Identifier: Apache-2.0
#pragma once
// Manifold-constrained hyper-connections: the residual is `streams` (4) vectors X[4][d] per token. With
// v = the flattened streams, rr = rsqrt(mean(v^2) + norm_eps), m = (fn v) rr:
//   read   pre[j] = sigmoid(m[j] scale[0] + base[j]) + hc_eps;   y = sum_j pre[j] X[j]
//          post[j] = 2 sigmoid(m[4+j] scale[1] + base[4+j])
//          C[j][k] = sinkhorn(m[8+4j+k] scale[2] + base[8+4j+k])
//   write  X'[k] = post[k] o + sum_j C[j][k] X[j]                 (the first index of C: C transposed)
//   head   h = sum_j (sigmoid(m[j] scale[0] + base[j]) + hc_eps) X[j]
// sinkhorn: softmax over k, plus hc_eps; divide columns by (their sum + hc_eps); then iterations - 1 times rows, then
// columns. FP32 throughout; y, X' and h are rounded when stored.
// Source: DeepSeek-V4 report (arXiv 2606.19348); inference/model.py, Block.hc_pre, hc_post, ParallelHead.
#include <cstdint>
#include <string>

#include "ops/variant.h"
#include "tensor/tensor_view.h"

namespace tessera::ops {

constexpr int kHcStreams = 4;
constexpr int kHcCoefficients = 2 * kHcStreams + kHcStreams * kHcStreams;  // 24

struct MhcDesc {
  int64_t hidden = 0;
  int sinkhorn_iterations = 20;
  float hc_eps = 1e-6f;
  float norm_eps = 1e-6f;
  DType activation = DType::kBF16;
  std::string to_string() const;
};

struct MhcPre {
  static constexpr const char* kName = "mhc_pre";
  using Desc = MhcDesc;
  struct Args {
    TensorView x;                  // [tokens, 4, hidden] activation
    const float* fn = nullptr;     // [24, 4 * hidden]
    const float* base = nullptr;   // [24]
    const float* scale = nullptr;  // [3]
    TensorView y;                  // [tokens, hidden] activation
    float* post = nullptr;         // [tokens, 4]
    float* comb = nullptr;         // [tokens, 4, 4]: C[j][k]
    int64_t num_tokens = 0;
    void* workspace = nullptr;
  };
};

struct MhcPost {
  static constexpr const char* kName = "mhc_post";
  using Desc = MhcDesc;
  struct Args {
    TensorView x;                 // [tokens, 4, hidden]: the streams before the read
    TensorView o;                 // [tokens, hidden]: what the sublayer wrote
    const float* post = nullptr;  // [tokens, 4]
    const float* comb = nullptr;  // [tokens, 4, 4]
    TensorView out;               // [tokens, 4, hidden]; may be x
    int64_t num_tokens = 0;
  };
};

struct MhcHead {
  static constexpr const char* kName = "mhc_head";
  using Desc = MhcDesc;
  struct Args {
    TensorView x;                   // [tokens, 4, hidden]
    const int32_t* rows = nullptr;  // [num_rows]: which tokens; null: the first num_rows
    const float* fn = nullptr;      // [4, 4 * hidden]
    const float* base = nullptr;    // [4]
    const float* scale = nullptr;   // [1]
    TensorView h;                   // [num_rows, hidden] activation
    int64_t num_rows = 0;
    void* workspace = nullptr;
  };
};

// In place on C[4][4], see above.
void sinkhorn_reference(float* c, int iterations, float eps);

bool mhc_reference_supports(const MhcDesc& desc, std::string& why_not);
void mhc_pre_reference(const MhcDesc& desc, const MhcPre::Args& args, device::Queue& queue);
void mhc_post_reference(const MhcDesc& desc, const MhcPost::Args& args, device::Queue& queue);
void mhc_head_reference(const MhcDesc& desc, const MhcHead::Args& args, device::Queue& queue);

}  // namespace tessera::ops
