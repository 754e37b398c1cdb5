// SPDX-License-Identifier: Apache-2.0
// Ops by themselves. The targets are the project's for one H200.
#include <algorithm>

#include "bench/shapes/published.h"
#include "bench/targets/target_rows.h"

namespace tessera::bench {

namespace {

using ops::WeightFormat;
using enum WeightFormat;

constexpr double kReadOfOne = 0.85, kReadOfFlash = 0.75, kReadOfPro = 0.84;
constexpr double kChainBytesPerSecond = 0.8 * 4.5e12, kGroupedTflops = 640;
constexpr int64_t kSmallPool = int64_t{4} << 20, kSmallEntries = 96;

// Rows in the making: their part of the table, and the target of so many tokens.
class Part {
 public:
  Part(const TargetOptions& options, const TakeTargetRow& take) : options_(options), take_(take) {}

  template <class TargetOf>
  void begin(const std::string& name, const TargetOf& target_of) {
    name_ = name, target_of_ = target_of;
  }
  void begin(const std::string& name) {
    begin(name, [](const Row&) { return Target{}; });
  }
  void take(const Row& row) const {
    take_({name_,
           row.name,
           row.variant,
           row.tokens,
           row.bytes,
           row.flops,
           row.calls,
           row.time,
           row.read_time,
           options_.is_small ? Target{} : target_of_(row),
           {}});
  }
  TokenCounts tokens(TokenCounts all) const {
    return options_.is_small ? TokenCounts{1, std::min<int64_t>(all.back(), 5)} : all;
  }

 private:
  const TargetOptions& options_;
  const TakeTargetRow& take_;
  std::string name_;
  std::function<Target(const Row&)> target_of_;
};

// Of the rows' tokens in order.
auto microseconds(const TokenCounts& tokens, const std::vector<double>& us) {
  return [=](const Row& row) {
    const auto at = std::find(tokens.begin(), tokens.end(), row.tokens) - tokens.begin();
    return Target{.us = at < std::ssize(us) ? us[static_cast<size_t>(at)] : 0};
  };
}
auto read_share(double share) {
  return [=](const Row&) { return Target{.share_of_read = share}; };
}

// Shapes and how rows call them.
struct Shape {
  std::string name;
  model::Config config;
};

void experts(OpBench& bench, Part& part, const Shape& flash, const Shape& pro) {
  const TokenCounts few = {4, 16, 64}, one = {1};
  part.begin("experts", read_share(kReadOfFlash));
  expert_rows(bench, flash.name, flash.config, false, part.tokens(one));
  part.begin("experts", microseconds(few, {90, 300, 740}));
  expert_rows(bench, flash.name, flash.config, false, part.tokens(few));
  part.begin("experts");
  expert_rows(bench, flash.name, flash.config, false, part.tokens({256}));
  part.begin("experts, 256 rows each", [](const Row&) { return Target{.tflops = kGroupedTflops}; });
  expert_rows(bench, flash.name, flash.config, false,
              part.tokens({256 * flash.config.num_experts / flash.config.experts_per_token + 1}));
  part.begin("experts", read_share(kReadOfPro));
  expert_rows(bench, pro.name, pro.config, false, part.tokens({1, 8, 32}));
  part.begin("experts' sublayer", microseconds(few, {102, 312, 755}));
  sublayer_rows(bench, flash.name, flash.config, part.tokens({1, 4, 16, 64}));
}

void maps(OpBench& bench, Part& part, const Shape& shape) {
  const model::Config& c = shape.config;
  const int64_t d = c.hidden_size, low = c.o_groups * c.o_lora_rank;
  const auto chain = [](const Row& row) {
    return Target{.us = static_cast<double>(row.bytes) / kChainBytesPerSecond * 1e6};
  };
  const std::vector<MapShape> shapes = {{shape.name + " wq_a", kNvfp4, c.q_lora_rank, d},
                                        {shape.name + " wq_b", kNvfp4, c.num_heads * c.head_dim, c.q_lora_rank},
                                        {shape.name + " wo_b", kNvfp4, d, low},
                                        {shape.name + " shared w1", kNvfp4, c.expert_inner, d}};
  for (const WeightFormat format : {kNvfp4, kFp8Block, kBf16}) {
    for (MapShape map : shapes) {
      map.format = format;
      part.begin("linear, alone", read_share(kReadOfOne));
      map.way = Way::kAlone;
      linear_rows(bench, map, {1});
      part.begin("linear, chain", chain);
      map.way = Way::kChain;
      linear_rows(bench, map, {1});
    }
    for (const size_t wide : {size_t{1}, size_t{2}}) {
      MapShape map = shapes[wide];
      map.format = format;
      part.begin("linear, many tokens");
      linear_rows(bench, map, part.tokens({64, 256, 1024, 4096}));
    }
  }
}

void keys(OpBench& bench, Part& part, const Shape& flash, const Shape& pro, bool is_small) {
  part.begin("attention");
  for (const Shape* shape : {&flash, &pro}) {
    attention_rows(bench, shape->name, shape->config, shape->config.index_topk, part.tokens({1, 8, 32, 128}));
  }
  // A key for each 4 tokens of 128K and of 1M; of a prefill as many tokens as have 32 MiB of scores.
  for (const int64_t context : {int64_t{1} << 17, int64_t{1} << 20}) {
    const int64_t entries = is_small ? kSmallEntries : context / 4, tokens = (int64_t{8} << 20) / (context / 4);
    const std::string name = flash.name + (context >> 20 > 0 ? " 1M" : " 128K");
    part.begin("indexer");
    index_score_rows(bench, name, flash.config, entries, part.tokens({1, tokens}));
    top_k_rows(bench, name, flash.config, entries, part.tokens({1, tokens}));
  }
}

}  // namespace

void add_op_targets(const TargetOptions& options, Ceilings& ceilings, const TakeTargetRow& take) {
  Options ops{.only = options.only, .device = options.device, .seconds = options.seconds, .forced = options.forced};
  if (options.is_small) ops.pool_bytes = kSmallPool;
  const auto shape = [&](const char* name) {
    const std::string chosen = options.is_small ? "small" : name;
    return Shape{chosen, published_config(chosen)};
  };
  const Shape flash = shape("flash"), pro = shape("pro");
  Part part(options, take);
  const std::function<void(const Report&, const Row&)> on_row = [&](const Report&, const Row& row) { part.take(row); };
  OpBench bench(ops, on_row);
  experts(bench, part, flash, pro);
  maps(bench, part, flash);
  keys(bench, part, flash, pro, options.is_small);
  ceilings = bench.take().ceilings;
}

}  // namespace tessera::bench
