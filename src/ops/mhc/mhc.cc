// SPDX-License-Identifier: Apache-2.0
#include "ops/mhc/mhc.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "ops/reference_rows.h"

namespace tessera::ops {

namespace {

constexpr int kS = kHcStreams;
constexpr int64_t kMaxHidden = 8192;
constexpr int64_t kBlock = 256;

float sigmoid(float x) {
  return 1 / (1 + std::exp(-x));
}

// m[c] = (fn[c] . v) * rsqrt(mean(v^2) + eps) for the first `count` rows of fn.
void mix_logits(const MhcDesc& desc, const float* streams, const float* fn, int count, float* m) {
  const int64_t width = kS * desc.hidden;
  const float rr = 1 / std::sqrt(sum_of_squares(streams, width) / static_cast<float>(width) + desc.norm_eps);
  for (int c = 0; c < count; ++c) m[c] = dot(fn + c * width, streams, width) * rr;
}

// out[i] = sum_j pre[j] * streams[j][i], j ascending.
void read_streams(const MhcDesc& desc, const float* streams, const float* pre, const TensorView& out, int64_t row) {
  float y[kBlock];
  for (int64_t i = 0; i < desc.hidden; i += kBlock) {
    const int64_t count = std::min(kBlock, desc.hidden - i);
    std::fill_n(y, count, 0.0f);
    for (int j = 0; j < kS; ++j) {
      for (int64_t n = 0; n < count; ++n) y[n] += pre[j] * streams[j * desc.hidden + i + n];
    }
    store_floats(out, row * desc.hidden + i, count, y);
  }
}

}  // namespace

std::string MhcDesc::to_string() const {
  return fmt::format("{} x {}", kHcStreams, hidden);
}

void sinkhorn_reference(float* c, int iterations, float eps) {
  const auto divide_columns = [&] {
    for (int k = 0; k < kS; ++k) {
      float sum = 0;
      for (int j = 0; j < kS; ++j) sum += c[j * kS + k];
      for (int j = 0; j < kS; ++j) c[j * kS + k] /= sum + eps;
    }
  };
  const auto divide_rows = [&] {
    for (int j = 0; j < kS; ++j) {
      float sum = 0;
      for (int k = 0; k < kS; ++k) sum += c[j * kS + k];
      for (int k = 0; k < kS; ++k) c[j * kS + k] /= sum + eps;
    }
  };
  // The softmax counts as the first division of rows.
  for (int j = 0; j < kS; ++j) {
    float* row = c + j * kS;
    const float max = *std::max_element(row, row + kS);
    float sum = 0;
    for (int k = 0; k < kS; ++k) {
      row[k] = std::exp(row[k] - max);
      sum += row[k];
    }
    for (int k = 0; k < kS; ++k) row[k] = row[k] / sum + eps;
  }
  divide_columns();
  for (int i = 1; i < iterations; ++i) {
    divide_rows();
    divide_columns();
  }
}

bool mhc_reference_supports(const MhcDesc& desc, std::string& why_not) {
  if (desc.hidden <= kMaxHidden) return true;
  why_not = fmt::format("streams of at most {}, not {}", kMaxHidden, desc.hidden);
  return false;
}

void mhc_pre_reference(const MhcDesc& desc, const MhcPre::Args& args, device::Queue& queue) {
  queue.parallel_for(args.num_tokens, 1, [&](int64_t begin, int64_t end) {
    float streams[kS * kMaxHidden], m[kHcCoefficients], pre[kS];
    for (int64_t t = begin; t < end; ++t) {
      load_floats(args.x, t * kS * desc.hidden, kS * desc.hidden, streams);
      mix_logits(desc, streams, args.fn, kHcCoefficients, m);
      for (int j = 0; j < kS; ++j) {
        pre[j] = sigmoid(m[j] * args.scale[0] + args.base[j]) + desc.hc_eps;
        args.post[t * kS + j] = 2 * sigmoid(m[kS + j] * args.scale[1] + args.base[kS + j]);
      }
      float* comb = args.comb + t * kS * kS;
      for (int i = 0; i < kS * kS; ++i) comb[i] = m[2 * kS + i] * args.scale[2] + args.base[2 * kS + i];
      sinkhorn_reference(comb, desc.sinkhorn_iterations, desc.hc_eps);
      read_streams(desc, streams, pre, args.y, t);
    }
  });
}

void mhc_post_reference(const MhcDesc& desc, const MhcPost::Args& args, device::Queue& queue) {
  queue.parallel_for(args.num_tokens, 4, [&](int64_t begin, int64_t end) {
    float streams[kS][kBlock], o[kBlock], written[kBlock];
    for (int64_t t = begin; t < end; ++t) {
      const float *post = args.post + t * kS, *comb = args.comb + t * kS * kS;
      for (int64_t i = 0; i < desc.hidden; i += kBlock) {
        const int64_t count = std::min(kBlock, desc.hidden - i);
        for (int j = 0; j < kS; ++j) load_floats(args.x, (t * kS + j) * desc.hidden + i, count, streams[j]);
        load_floats(args.o, t * desc.hidden + i, count, o);
        for (int k = 0; k < kS; ++k) {
          for (int64_t n = 0; n < count; ++n) {
            float sum = 0;
            for (int j = 0; j < kS; ++j) sum += comb[j * kS + k] * streams[j][n];
            written[n] = post[k] * o[n] + sum;
          }
          store_floats(args.out, (t * kS + k) * desc.hidden + i, count, written);
        }
      }
    }
  });
}

void mhc_head_reference(const MhcDesc& desc, const MhcHead::Args& args, device::Queue& queue) {
  queue.parallel_for(args.num_rows, 1, [&](int64_t begin, int64_t end) {
    float streams[kS * kMaxHidden], m[kS], pre[kS];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = args.rows == nullptr ? i : args.rows[i];
      load_floats(args.x, t * kS * desc.hidden, kS * desc.hidden, streams);
      mix_logits(desc, streams, args.fn, kS, m);
      for (int j = 0; j < kS; ++j) pre[j] = sigmoid(m[j] * args.scale[0] + args.base[j]) + desc.hc_eps;
      read_streams(desc, streams, pre, args.h, i);
    }
  });
}

}  // namespace tessera::ops
