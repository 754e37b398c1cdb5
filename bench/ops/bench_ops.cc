// SPDX-License-Identifier: Apache-2.0
#include "bench/ops/bench_ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "backends/registry.h"
#include "base/rng.h"
#include "device/buffer.h"
#include "numeric/bf16.h"
#include "ops/packed_layout.h"
#include "ops/planner.h"

namespace tessera::bench {

namespace {

using ops::WeightFormat;

constexpr int64_t kPoolBytes = int64_t{512} << 20;  // many times any last-level cache per socket share

// Random codes and scales from one pool; a weight is a window into it, so that successive runs read other bytes.
class WeightPool {
 public:
  explicit WeightPool(int64_t bytes)
      : codes_(static_cast<size_t>(bytes)),
        scales_(static_cast<size_t>(bytes / 8)),
        block_scales_(1 << 20),
        bf16_(static_cast<size_t>(bytes)) {
    constexpr int64_t kSeedBytes = 1 << 20;
    Rng rng(7);
    std::vector<uint8_t> codes(kSeedBytes), scales(kSeedBytes);
    std::vector<uint16_t> values(kSeedBytes / 2);
    for (auto& code : codes) {
      do code = static_cast<uint8_t>(rng.below(256));
      while ((code & 0x7F) == 0x7F);  // no NaN in E4M3 either
    }
    for (auto& scale : scales) scale = static_cast<uint8_t>(0x20 + rng.below(0x40));
    for (auto& value : values) value = numeric::bf16_from_float(rng.normal());
    for (int64_t at = 0; at < bytes; at += kSeedBytes) {
      std::memcpy(codes_.as<char>() + at, codes.data(), kSeedBytes);
      std::memcpy(bf16_.as<char>() + at, values.data(), kSeedBytes);
    }
    for (int64_t at = 0; at < bytes / 8; at += kSeedBytes) {
      std::memcpy(scales_.as<char>() + at, scales.data(), static_cast<size_t>(std::min(kSeedBytes, bytes / 8 - at)));
    }
    for (size_t i = 0; i < block_scales_.size() / 4; ++i) block_scales_.as<float>()[i] = 0.001f;
  }

  const char* codes() const { return codes_.as<char>(); }
  int64_t bytes() const { return static_cast<int64_t>(codes_.size()); }

  // The `index`-th weight of that shape.
  ops::WeightView weight(WeightFormat format, int64_t rows, int64_t cols, int64_t index) const {
    ops::WeightView view{format, rows, cols};
    const int64_t data = view.data_bytes(), scales = view.scale_bytes();
    const int64_t at = index % (bytes() / data);
    view.data = (format == WeightFormat::kBf16 ? bf16_ : codes_).as<char>() + at * data;
    view.block_scales = format == WeightFormat::kNvfp4      ? scales_.as<char>() + at * scales
                        : format == WeightFormat::kFp8Block ? block_scales_.as<char>()
                                                            : nullptr;
    view.tensor_scale = format == WeightFormat::kNvfp4 ? 1e-4f : 1.0f;
    return view;
  }

 private:
  device::Buffer codes_, scales_, block_scales_, bf16_;
};

class Bench {
 public:
  Bench(const Options& options, const std::function<void(const Report&, const Row&)>& on_row)
      : options_(options),
        on_row_(on_row),
        machine_(device::probe_machine()),
        queue_(options.num_threads),
        planner_(backends::all_backends(), machine_, options.forced),
        pool_(kPoolBytes) {
    report_.num_threads = queue_.num_threads();
    report_.ceilings = measure_ceilings(machine_, pool_.codes(), pool_.bytes(), queue_);
  }

  Report take() { return std::move(report_); }

  void linear(const std::string& name, WeightFormat format, int64_t out, int64_t in, DType output = DType::kBF16) {
    const ops::InputMode mode = format == WeightFormat::kNvfp4 ? options_.mode : ops::InputMode::kA16;
    const ops::Linear::Desc desc{.in = in, .out = out, .format = format, .input = mode, .output = output};
    for (const int64_t tokens : options_.tokens) {
      const std::string full = fmt::format("linear {} {}", name, desc.to_string());
      if (!wanted(full)) continue;
      const auto op = planner_.bind<ops::Linear>(full, desc);
      const device::Buffer workspace(static_cast<size_t>(op.workspace_bytes(tokens)));
      const device::Tensor x = activations(tokens, in), y(output, {tokens, out});
      const ops::WeightView shape = pool_.weight(format, out, in, 0);
      run_row(full, planner_.lines().back().chosen, tokens, shape.data_bytes() + shape.scale_bytes(),
              2 * tokens * in * out, [&](int64_t run) {
                op.run({.x = x,
                        .weight = pool_.weight(format, out, in, run),
                        .y = y,
                        .num_tokens = tokens,
                        .workspace = workspace.data()},
                       queue_);
              });
    }
  }

  // `is_skewed`: token t's experts follow Zipf's law with exponent 1, else all experts alike.
  void experts(const std::string& name, int64_t num, int64_t top_k, int64_t hidden, int64_t inner, bool is_skewed) {
    const ops::MoeExperts::Desc desc{.hidden = hidden,
                                     .inner = inner,
                                     .num_local = num,
                                     .top_k = top_k,
                                     .format = WeightFormat::kNvfp4,
                                     .input = options_.mode,
                                     .swiglu_limit = 10};
    for (const int64_t tokens : options_.tokens) {
      const std::string full = fmt::format("experts {} {}{}", name, desc.to_string(), is_skewed ? " zipf" : "");
      if (!wanted(full)) continue;
      const auto op = planner_.bind<ops::MoeExperts>(full, desc);
      const device::Buffer workspace(static_cast<size_t>(op.workspace_bytes(tokens)));
      const device::Tensor x = activations(tokens, hidden), out(DType::kBF16, {tokens, top_k, hidden});
      // Different choices in every run, so that the experts read are not in cache.
      std::vector<std::vector<int32_t>> choices;
      int64_t distinct = 0;
      for (int64_t i = 0; i < 16; ++i) choices.push_back(choose(num, top_k, tokens, is_skewed, distinct));
      const std::vector<float> routing(static_cast<size_t>(tokens * top_k), 0.25f);
      std::vector<ops::WeightView> w1, w3, w2;
      for (int64_t e = 0; e < num; ++e) {
        w1.push_back(pool_.weight(WeightFormat::kNvfp4, inner, hidden, 3 * e));
        w3.push_back(pool_.weight(WeightFormat::kNvfp4, inner, hidden, 3 * e + 1));
        w2.push_back(pool_.weight(WeightFormat::kNvfp4, hidden, inner, 3 * e + 2));
      }
      const int64_t bytes = 3 * (w1[0].data_bytes() + w1[0].scale_bytes()) * distinct / 16;
      run_row(full, planner_.lines().back().chosen, tokens, bytes, 6 * tokens * top_k * hidden * inner,
              [&](int64_t run) {
                op.run({.x = x,
                        .experts = choices[static_cast<size_t>(run / 2 % 16)].data(),
                        .routing = routing.data(),
                        .w1 = w1.data(),
                        .w3 = w3.data(),
                        .w2 = w2.data(),
                        .out = out,
                        .num_tokens = tokens,
                        .workspace = workspace.data()},
                       queue_);
              });
    }
  }

  // One layer's attention at a full window and `entries` selected entries, the caches as warm as a step leaves them.
  void attention(const std::string& name, int64_t heads, int64_t window, int64_t entries) {
    constexpr int64_t kWidth = 512;
    const ops::EntryLayout layout{ops::EntryFormat::kKvFp8Bf16, kWidth, 64};
    const ops::Attention::Desc desc{
        .heads = heads, .head_dim = kWidth, .window = window, .scale = 0.04f, .layout = layout};
    for (const int64_t tokens : options_.tokens) {
      const std::string full = fmt::format("attention {} {} + {}", name, desc.to_string(), entries);
      if (!wanted(full)) continue;
      const auto op = planner_.bind<ops::Attention>(full, desc);
      const int64_t num_entries = 4 * entries, slots = window + tokens;
      const device::Buffer cache(static_cast<size_t>((slots + num_entries) * layout.entry_bytes()));
      std::vector<float> key(kWidth);
      for (int64_t i = 0; i < slots + num_entries; ++i) {
        for (float& value : key) value = rng_.normal();
        ops::encode_entry(layout, key.data(), cache.as<uint8_t>() + i * layout.entry_bytes());
      }
      std::vector<int64_t> positions;
      std::vector<int32_t> counts(static_cast<size_t>(tokens), static_cast<int32_t>(entries)), selected;
      for (int64_t t = 0; t < tokens; ++t) {
        positions.push_back(4 * num_entries + t);
        for (int64_t i = 0; i < entries; ++i) selected.push_back(static_cast<int32_t>(4 * i + (i + t) % 4));
      }
      const std::vector<float> sink(static_cast<size_t>(heads));
      const device::Tensor q = activations(tokens, heads * kWidth), out(DType::kBF16, {tokens, heads, kWidth});
      const int64_t keys = window + entries;
      run_row(full, planner_.lines().back().chosen, tokens, tokens * keys * layout.entry_bytes(),
              4 * tokens * keys * heads * kWidth, [&](int64_t) {
                op.run({.q = q,
                        .positions = positions.data(),
                        .window_cache = cache.as<uint8_t>(),
                        .window_slots = slots,
                        .entry_cache = cache.as<uint8_t>() + slots * layout.entry_bytes(),
                        .num_entries = counts.data(),
                        .selected = selected.data(),
                        .selected_stride = entries,
                        .sink = sink.data(),
                        .out = out,
                        .num_tokens = tokens},
                       queue_);
              });
    }
  }

 private:
  bool wanted(const std::string& name) const { return name.find(options_.only) != std::string::npos; }

  device::Tensor activations(int64_t tokens, int64_t width) {
    device::Tensor x(DType::kBF16, {tokens, width});
    for (int64_t i = 0; i < tokens * width; ++i) x.as<uint16_t>()[i] = numeric::bf16_from_float(rng_.normal());
    return x;
  }

  std::vector<int32_t> choose(int64_t num, int64_t top_k, int64_t tokens, bool is_skewed, int64_t& distinct) {
    std::vector<double> cumulative(static_cast<size_t>(num));
    double total = 0;
    for (int64_t e = 0; e < num; ++e) {
      total += is_skewed ? 1.0 / static_cast<double>(e + 1) : 1.0;
      cumulative[static_cast<size_t>(e)] = total;
    }
    std::vector<int32_t> ids;
    std::vector<char> seen(static_cast<size_t>(num));
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<int32_t> mine;
      while (static_cast<int64_t>(mine.size()) < top_k) {
        const double at = static_cast<double>(rng_.uniform()) * total;
        const auto id =
            static_cast<int32_t>(std::upper_bound(cumulative.begin(), cumulative.end() - 1, at) - cumulative.begin());
        if (std::find(mine.begin(), mine.end(), id) == mine.end()) mine.push_back(id);
      }
      std::sort(mine.begin(), mine.end());
      for (const int32_t id : mine) {
        distinct += seen[static_cast<size_t>(id)] == 0 ? 1 : 0;
        seen[static_cast<size_t>(id)] = 1;
        ids.push_back(id);
      }
    }
    return ids;
  }

  void run_row(const std::string& name, const std::string& variant, int64_t tokens, int64_t bytes, int64_t flops,
               const std::function<void(int64_t)>& op) {
    std::atomic<uint64_t> sink = 0;
    const int64_t part = std::min(bytes, pool_.bytes()), spots = pool_.bytes() / part;
    const auto read = [&](int64_t run) {
      for (int64_t left = bytes; left > 0; left -= part) {
        sink ^= read_bytes(pool_.codes() + run % spots * part, std::min(left, part), queue_);
      }
    };
    Pair pair = measure_pair(op, read, 20, options_.seconds);
    report_.rows.push_back({name, variant, tokens, bytes, flops, std::move(pair.a), std::move(pair.b)});
    on_row_(report_, report_.rows.back());
  }

  const Options& options_;
  const std::function<void(const Report&, const Row&)>& on_row_;
  device::Machine machine_;
  device::Queue queue_;
  ops::Planner planner_;
  WeightPool pool_;
  Rng rng_{11};
  Report report_;
};

}  // namespace

Report run_ops(const Options& options, const std::function<void(const Report&, const Row&)>& on_row) {
  Bench bench(options, on_row);
  using enum WeightFormat;
  bench.linear("flash wq_a", kNvfp4, 1024, 4096);
  bench.linear("flash wq_b", kNvfp4, 32768, 1024);
  bench.linear("flash wo_b", kNvfp4, 4096, 8192);
  bench.linear("flash wo_b", kFp8Block, 4096, 8192);
  bench.linear("flash shared w1", kNvfp4, 2048, 4096);
  bench.linear("flash gate", kBf16, 256, 4096, DType::kF32);
  bench.linear("flash head", kBf16, 32320, 4096, DType::kF32);
  bench.linear("pro wq_a", kNvfp4, 1536, 7168);
  bench.linear("pro wo_b", kNvfp4, 7168, 16384);
  bench.experts("flash", 256, 6, 4096, 2048, false);
  bench.experts("flash", 256, 6, 4096, 2048, true);
  bench.experts("pro", 384, 6, 7168, 3072, false);
  bench.attention("flash", 64, 128, 512);
  bench.attention("tiny", 4, 32, 16);
  return bench.take();
}

}  // namespace tessera::bench
