// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends/cpu_common/share.h"
#include "base/integer_math.h"

namespace tessera::backends::cpu_common {

using namespace ops;

namespace {

bool is_wide(DType activation, int64_t width, std::string& why_not) {
  if (activation == DType::kBF16 && width > 0 && width % kRowStep == 0) return true;
  why_not = "needs BF16 rows of a multiple of 16, not " + std::to_string(width);
  return false;
}

// Fewest rows of `width` worth a thread: about 32 KiB of them.
int64_t grain_of(int64_t width) {
  return 1 + 16384 / width;
}

}  // namespace

bool embedding_supports(const Embedding::Desc& desc, std::string& why_not) {
  if (desc.weight == DType::kBF16 && desc.activation == DType::kBF16) return true;
  why_not = "needs weights and activations in BF16";
  return false;
}

void embedding_run(const Embedding::Desc& desc, const Embedding::Args& args, device::Queue& queue) {
  const size_t row_bytes = static_cast<size_t>(desc.hidden) * 2;
  queue.parallel_for(args.num_tokens, grain_of(desc.streams * desc.hidden), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t s = 0; s < desc.streams; ++s) {
        std::memcpy(args.out.as<uint16_t>() + (t * desc.streams + s) * desc.hidden,
                    args.weight.as<uint16_t>() + std::max(args.ids[t], 0) * desc.hidden, row_bytes);
      }
    }
  });
}

bool rms_norm_supports(const RmsNorm::Desc& desc, std::string& why_not) {
  return is_wide(desc.activation, desc.width, why_not);
}

void rms_norm_run(const RowKernels& kernels, const RmsNorm::Desc& desc, const RmsNorm::Args& args,
                  device::Queue& queue) {
  queue.parallel_for(args.num_rows, grain_of(desc.width), [&](int64_t begin, int64_t end) {
    kernels.rms_norm(args.x.as<uint16_t>() + begin * desc.width, args.weight.data, args.weight.dtype == DType::kF32,
                     desc.width, desc.eps, end - begin, args.out.as<uint16_t>() + begin * desc.width);
  });
}

namespace {

constexpr int64_t kMaxRotary = 512;

}  // namespace

bool rope_supports(const Rope::Desc& desc, std::string& why_not) {
  return desc.rope_dim <= kMaxRotary && is_wide(desc.activation, desc.rope_dim, why_not);
}

void rope_run(const RowKernels& kernels, const Rope::Desc& desc, const Rope::Args& args, device::Queue& queue) {
  queue.parallel_for(args.num_tokens, grain_of(desc.vectors * desc.rope_dim), [&](int64_t begin, int64_t end) {
    float cosine[kMaxRotary], sine[kMaxRotary];
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < desc.rope_dim; i += 2) {
        const double angle = static_cast<double>(static_cast<float>(args.positions[t]) * args.frequencies[i / 2]);
        const float c = static_cast<float>(std::cos(angle));
        const float s = static_cast<float>(std::sin(angle)) * (desc.is_inverse ? -1.0f : 1.0f);
        cosine[i] = cosine[i + 1] = c;
        sine[i] = -s, sine[i + 1] = s;
      }
      kernels.rotate(args.x.as<uint16_t>() + (t * desc.vectors + 1) * desc.width - desc.rope_dim, cosine, sine,
                     desc.vectors, desc.width, desc.rope_dim);
    }
  });
}

namespace {

constexpr int kS = kHcStreams;
static_assert(kS == kMixStreams);

float sigmoid(float x) {
  return 1 / (1 + std::exp(-x));
}

// The factor of m: rsqrt(mean(v^2) + eps).
float mix_factor(const MhcDesc& desc, float squares) {
  return 1 / std::sqrt(squares / static_cast<float>(kS * desc.hidden) + desc.norm_eps);
}

// What follows the products m of one token.
void finish_pre(const RowKernels& kernels, const MhcDesc& desc, const MhcPre::Args& args, int64_t t, float squares,
                const float* products) {
  const float factor = mix_factor(desc, squares);
  float m[kHcCoefficients], pre[kS];
  for (int c = 0; c < kHcCoefficients; ++c) m[c] = products[c] * factor;
  for (int j = 0; j < kS; ++j) {
    pre[j] = sigmoid(m[j] * args.scale[0] + args.base[j]) + desc.hc_eps;
    args.post[t * kS + j] = 2 * sigmoid(m[kS + j] * args.scale[1] + args.base[kS + j]);
  }
  float* comb = args.comb + t * kS * kS;
  for (int i = 0; i < kS * kS; ++i) comb[i] = m[2 * kS + i] * args.scale[2] + args.base[2 * kS + i];
  sinkhorn_reference(comb, desc.sinkhorn_iterations, desc.hc_eps);
  kernels.mhc_read(args.x.as<uint16_t>() + t * kS * desc.hidden, pre, desc.hidden,
                   args.y.as<uint16_t>() + t * desc.hidden);
}

}  // namespace

bool mhc_supports(const MhcDesc& desc, std::string& why_not) {
  return is_wide(desc.activation, desc.hidden, why_not);
}

void mhc_pre_run(const RowKernels& kernels, const MhcDesc& desc, const MhcPre::Args& args, device::Queue& queue) {
  const int64_t width = kS * desc.hidden;
  const uint16_t* x = args.x.as<uint16_t>();
  if (args.num_tokens <= kMixTokens) {
    // The coefficients' weights are what must be read: threads take rows of them, and one the squares.
    const int64_t rows_each = queue.num_threads() > kHcCoefficients / 4 ? 1 : 4, pieces = kHcCoefficients / rows_each;
    float squares[kMixTokens], products[(kHcCoefficients + 1) * kMixTokens];
    share(queue, pieces + 1, kHcCoefficients * width * 4, [&](int64_t i) {
      const int64_t first = i * rows_each, rows = i == pieces ? 0 : rows_each;
      kernels.mix(x, args.num_tokens, args.fn + first * width, rows, width, rows == 0 ? squares : nullptr,
                  products + first * kMixTokens);
    });
    for (int64_t t = 0; t < args.num_tokens; ++t) {
      float m[kHcCoefficients];
      for (int64_t c = 0; c < kHcCoefficients; ++c) {
        const int64_t first = c / rows_each * rows_each;
        m[c] = products[first * kMixTokens + t * rows_each + c - first];
      }
      finish_pre(kernels, desc, args, t, squares[t], m);
    }
    return;
  }
  const int64_t blocks = ceil_div<int64_t>(args.num_tokens, kMixTokens);
  queue.parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
    float squares[kMixTokens], m[kMixTokens * kHcCoefficients];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kMixTokens, count = std::min<int64_t>(kMixTokens, args.num_tokens - first);
      kernels.mix(x + first * width, count, args.fn, kHcCoefficients, width, squares, m);
      for (int64_t t = 0; t < count; ++t)
        finish_pre(kernels, desc, args, first + t, squares[t], m + t * kHcCoefficients);
    }
  });
}

void mhc_post_run(const RowKernels& kernels, const MhcDesc& desc, const MhcPost::Args& args, device::Queue& queue) {
  const int64_t width = kS * desc.hidden;
  queue.parallel_for(args.num_tokens, grain_of(2 * width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      kernels.mhc_write(args.x.as<uint16_t>() + t * width, args.o.as<uint16_t>() + t * desc.hidden, args.post + t * kS,
                        args.comb + t * kS * kS, desc.hidden, args.out.as<uint16_t>() + t * width);
    }
  });
}

void mhc_head_run(const RowKernels& kernels, const MhcDesc& desc, const MhcHead::Args& args, device::Queue& queue) {
  const int64_t width = kS * desc.hidden;
  queue.parallel_for(args.num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint16_t* x = args.x.as<uint16_t>() + (args.rows == nullptr ? i : args.rows[i]) * width;
      float squares = 0, m[kS], pre[kS];
      kernels.mix(x, 1, args.fn, kS, width, &squares, m);
      const float factor = mix_factor(desc, squares);
      for (int j = 0; j < kS; ++j) pre[j] = sigmoid(m[j] * factor * args.scale[0] + args.base[j]) + desc.hc_eps;
      kernels.mhc_read(x, pre, desc.hidden, args.h.as<uint16_t>() + i * desc.hidden);
    }
  });
}

bool swiglu_supports(const SwiGlu::Desc& desc, std::string& why_not) {
  return is_wide(desc.activation, desc.inner, why_not);
}

void swiglu_run(const RowKernels& kernels, const SwiGlu::Desc& desc, const SwiGlu::Args& args, device::Queue& queue) {
  queue.parallel_for(args.num_tokens, grain_of(8 * desc.inner), [&](int64_t begin, int64_t end) {
    kernels.swiglu(args.gate.as<uint16_t>() + begin * desc.inner, args.up.as<uint16_t>() + begin * desc.inner,
                   desc.limit, (end - begin) * desc.inner, args.out.as<uint16_t>() + begin * desc.inner);
  });
}

namespace {

constexpr int64_t kMaxAdded = 64;

}  // namespace

bool moe_combine_supports(const MoeCombine::Desc& desc, std::string& why_not) {
  if (desc.top_k < kMaxAdded) return is_wide(desc.activation, desc.hidden, why_not);
  why_not = "needs fewer than 64 experts of a token";
  return false;
}

void moe_combine_run(const RowKernels& kernels, const MoeCombine::Desc& desc, const MoeCombine::Args& args,
                     device::Queue& queue) {
  queue.parallel_for(args.num_tokens, grain_of((desc.top_k + 2) * desc.hidden), [&](int64_t begin, int64_t end) {
    const uint16_t* rows[kMaxAdded];
    for (int64_t t = begin; t < end; ++t) {
      int64_t count = 0;
      if (args.routed.data != nullptr) {
        for (; count < desc.top_k; ++count)
          rows[count] = args.routed.as<uint16_t>() + (t * desc.top_k + count) * desc.hidden;
      }
      if (args.shared.data != nullptr) rows[count++] = args.shared.as<uint16_t>() + t * desc.hidden;
      kernels.add_rows(0, rows, count, desc.hidden, args.out.as<uint16_t>() + t * desc.hidden);
    }
  });
}

bool stream_add_supports(const StreamAdd::Desc& desc, std::string& why_not) {
  return is_wide(desc.activation, desc.hidden, why_not);
}

void stream_add_run(const RowKernels& kernels, const StreamAdd::Desc& desc, const StreamAdd::Args& args,
                    device::Queue& queue) {
  queue.parallel_for(args.num_tokens * desc.streams, grain_of(3 * desc.hidden), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint16_t* rows[] = {args.z.as<uint16_t>() + row * desc.hidden,
                                args.e.as<uint16_t>() + row / desc.streams * desc.hidden};
      kernels.add_rows(-0.0f, rows, 2, desc.hidden, args.out.as<uint16_t>() + row * desc.hidden);
    }
  });
}

bool hadamard_supports(const Hadamard::Desc& desc, std::string& why_not) {
  constexpr int64_t kMaxWidth = 512;
  if (!hadamard_reference_supports(desc, why_not)) return false;
  if (desc.width > kMaxWidth) {
    why_not = "needs a width of at most 512, not " + std::to_string(desc.width);
    return false;
  }
  return is_wide(desc.activation, desc.width, why_not);
}

void hadamard_run(const RowKernels& kernels, const Hadamard::Desc& desc, const Hadamard::Args& args,
                  device::Queue& queue) {
  const float factor = static_cast<float>(1 / std::sqrt(static_cast<double>(desc.width)));
  queue.parallel_for(args.num_rows, grain_of(8 * desc.width), [&](int64_t begin, int64_t end) {
    kernels.hadamard(args.x.as<uint16_t>() + begin * desc.width, desc.width, factor, desc.is_fp4, end - begin);
  });
}

bool cache_write_supports(const CacheWrite::Desc& desc, std::string& why_not) {
  const EntryFormat format = desc.layout.format;
  if (format != EntryFormat::kKvFp8Bf16 && format != EntryFormat::kBf16) {
    why_not = "needs entries in FP8 or BF16";
    return false;
  }
  return is_wide(desc.activation, desc.layout.width, why_not);
}

void cache_write_run(const RowKernels& kernels, const CacheWrite::Desc& desc, const CacheWrite::Args& args,
                     device::Queue& queue) {
  const int64_t width = desc.layout.width, entry_bytes = desc.layout.entry_bytes();
  const int64_t nope = desc.layout.format == EntryFormat::kBf16 ? 0 : desc.layout.nope_dim();
  const int64_t tail_bytes = (width - nope) * 2, used_bytes = nope + tail_bytes + nope / kKvGroup;
  queue.parallel_for(args.num_rows, grain_of(8 * width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint16_t* row = args.rows.as<uint16_t>() + i * width;
      if (args.slots[i] < 0) continue;
      uint8_t* entry = args.cache.of_row(i).at(args.slots[i], entry_bytes);
      kernels.encode_e4m3(row, nope, entry, entry + nope + tail_bytes);
      std::memcpy(entry + nope, row + nope, static_cast<size_t>(tail_bytes));
      std::memset(entry + used_bytes, 0, static_cast<size_t>(entry_bytes - used_bytes));
    }
  });
}

bool compressor_pool_supports(const CompressorPool::Desc& desc, std::string& why_not) {
  return is_wide(desc.activation, desc.width, why_not);
}

void compressor_pool_run(const RowKernels& kernels, const CompressorPool::Desc& desc, const CompressorPool::Args& args,
                         device::Queue& queue) {
  const auto kernel = desc.ratio == 4 ? kernels.pool_overlap : kernels.pool_online;
  for (int64_t s = 0; s < args.num_slices; ++s) {
    const CompressorSlice& slice = args.slices[s];
    if (slice.num_rows == 0) continue;
    const int64_t at = slice.first_row * desc.row_width(), made = most_completed(desc.ratio, slice.num_rows);
    const int64_t completed = entries_completed(desc.ratio, slice.first_position, slice.num_rows);
    uint16_t* entries = args.entries.as<uint16_t>() + slice.first_entry * desc.width;
    const PoolJob job{desc.ratio,
                      desc.width,
                      slice.first_position,
                      slice.num_rows,
                      args.values + at,
                      args.gates + at,
                      args.ape,
                      args.state.of_place(slice.place),
                      entries};
    const int64_t grain = std::max<int64_t>(1, 1024 / std::max<int64_t>(1, slice.num_rows));
    queue.parallel_for(desc.width / kRowStep, grain,
                       [&](int64_t begin, int64_t end) { kernel(job, begin * kRowStep, end * kRowStep); });
    std::fill(entries + completed * desc.width, entries + made * desc.width, uint16_t{0});
  }
}

}  // namespace tessera::backends::cpu_common
