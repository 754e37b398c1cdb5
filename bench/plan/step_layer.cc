// SPDX-License-Identifier: Apache-2.0
// A layer's maps, streams and experts, and the ends of a step.
#include "bench/plan/step_layer.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/integer_math.h"
#include "model/rank_memory.h"
#include "ops/mhc/mhc.h"

namespace tessera::bench {

namespace {

using model::ParallelPlan, model::WeightRow;

// A value of the streams: products, mixing and writing, 475 us of 67 million. Set by layers and prompts of 4,096 tokens
// (2026-11-29-h200-targets.json, 2026-11-29-h200-x2-shorter-steps.json), so it has passes of a prompt in it that have
// no cost of their own: the kernels of streams take 195 to 250 since their products are on tensor cores.
constexpr double kStreamCycles = 1.7;
// Weights that a stream copies before it waits come while the kernel before runs, if that reads little: of the small
// ones 2.7 to 4.8 us. So wq_b, wo_a and wo_b of a rank of two, whose rings hold all of them, add 4.3 us where bytes and
// products one after the other would take 5.9 (2026-11-29-h200-two-formats.json). Inputs are loaded behind the wait: a
// round of L2. A ring of a whole multiprocessor (sm90/unit_ring.cuh) gains nothing: 6.7 to 7.3 us are those of a chain,
// probably since its blocks have no room beside others.
constexpr double kEarlyUs = 3, kInputsUs = 0.6;
constexpr double kSmallChannels = 4096;  // that kSmallEnd is of; Pro's 7,168 add 4.6 to 5.7 us where no rank waits
constexpr double kCheckEnd = 9'000;      // 4.9 of 6.9 us that it takes to see that logits are finite
constexpr double kRouterEnd = 3'660;     // 2 of 4 us
constexpr const char* kSharedMaps = "shared expert";  // a part, whose maps come behind the routed experts'

// The expected largest of n values of a normal distribution, in deviations.
double largest_of(int64_t n) {
  constexpr std::array kLargest = {0.0, 0.0, 0.564, 0.846, 1.029, 1.163, 1.267, 1.352, 1.424};
  return kLargest[static_cast<size_t>(std::min<int64_t>(n, 8))];
}

}  // namespace

StepLayer::StepLayer(const model::StoredModel& stored, const ParallelPlan& plan, const Target& target,
                     const StepLoad& load, const std::string& prefix)
    : c_(stored.config), plan_(plan), t_(target), load_(load) {
  for (size_t i = 0; i < stored.rows.size(); ++i) {
    const WeightRow& row = stored.rows[i];
    if (row.expert > 0 || !row.name.starts_with(prefix)) continue;
    const model::Shard shard = plan.shard(0);
    const model::WeightSlice slice =
        model::slice_of(row, c_, are_heads_whole() ? model::with_whole_attention(shard) : shard);
    held_[row.name.substr(prefix.size())] = {slice.row_end - slice.row_begin, slice.col_end - slice.col_begin,
                                             stored.formats[i],
                                             static_cast<double>(slice_bytes(row, stored.formats[i], slice))};
  }
}

void StepLayer::experts() {
  streams();
  maps("router", {"ffn.gate"});
  part("router").us += us(pass(0, 0, kRouterEnd));
  routed();
  if (are_experts_together()) {
    shared_with_routed();
  } else {
    maps(kSharedMaps, {"ffn.shared_experts.w1", "ffn.shared_experts.w3", "ffn.shared_experts.w2"});
    const double h = rows() * static_cast<double>(held_.at("ffn.shared_experts.w1").rows);
    // Streams of few tokens gate what they sum.
    const bool is_stream =
        load_.rows() <= kFewRows && (t_.family == Family::kHopper || !has_own_kernels() ||
                                     held_.at("ffn.shared_experts.w1").format != ops::WeightFormat::kNvfp4);
    if (!is_stream) add(kSharedMaps, {pass(4 * h, 2 * h)});
  }
  const double out = 2 * rows() * static_cast<double>(c_.hidden_size);
  if (load_.rows() > kFewRows) {
    add("combine", {pass(out * static_cast<double>(c_.experts_per_token + 1), out)});
  }
}

void StepLayer::ends() {
  const double streams = 2.0 * static_cast<double>(ops::kHcStreams * c_.hidden_size);
  if (plan_.shards_entries) sum(4, DType::kF32);  // all are done with the step before
  add("embedding", {pass(rows() * streams / static_cast<double>(ops::kHcStreams), rows() * streams)});
  add("hyper-connections", {pass(rows() * streams, 0, stream_end()), pass(0, 0, stream_end())});
  if (are_tokens_cut()) gather(rows() * streams / static_cast<double>(plan_.world));
  load_.tokens = 1;                      // each sequence's last token alone has logits
  add("head", {pass(0, 0, kSmallEnd)});  // the norm before it
  maps("head", {"head"});
  if (const int64_t own = held_.at("head").rows; own < c_.vocab_size) gather_logits(own);
  const double logits = 4.0 * rows() * static_cast<double>(c_.vocab_size);
  add("drawing", {pass(logits, 0, kCheckEnd), pass(logits, 0), pass(logits, 0), pass(0, 0)});
}

Kernel StepLayer::pass(double read_bytes, double written_bytes, double end_cycles) const {
  Kernel kernel = pass_kernel("", read_bytes, written_bytes, t_);
  kernel.end_cycles = end_cycles;
  return kernel;
}

Kernel StepLayer::work(double cycles, double memory_bytes, double end_cycles) const {
  Kernel kernel = pass_kernel("", 0, 0, t_);
  kernel.issue_cycles = cycles / t_.multiprocessors;
  kernel.memory_bytes = memory_bytes;
  kernel.is_bulk = false;
  kernel.end_cycles = end_cycles;
  return kernel;
}

Kernel StepLayer::behind_small(const Kernel& stream) const {
  if (stream.early_bytes == 0) return stream;
  Kernel kernel = stream;
  const double rate = (kernel.is_bulk ? t_.memory.low : t_.memory.high) * 1e6;  // bytes/us
  const double early = std::min(kernel.early_bytes, kEarlyUs * rate);
  const double waited_us =
      std::max({kInputsUs, kernel.input_bytes / (t_.l2.low * 1e6), (kernel.first_bytes - early) / rate});
  kernel.issue_cycles += waited_us * t_.clock.low * 1e3;
  kernel.first_bytes = 0;
  kernel.memory_bytes -= early;
  return kernel;
}

CostPart& StepLayer::part(const std::string& name) {
  const auto at = std::find_if(parts_.begin(), parts_.end(), [&](const CostPart& p) { return p.name == name; });
  if (at != parts_.end()) return *at;
  parts_.emplace_back().name = name;
  longest_.push_back(0);
  return parts_.back();
}

void StepLayer::add(const std::string& name, const std::vector<Kernel>& kernels, double factor) {
  CostPart& p = part(name);
  const Estimate e = estimate(kernels, t_, true);
  p.us += factor * e.us;
  double& longest = longest_[static_cast<size_t>(&p - parts_.data())];
  for (const Prediction& prediction : e.parts) {
    if (prediction.us() <= longest) continue;
    longest = prediction.us();
    p.bound =
        prediction.fill_us + prediction.end_us > prediction.hidden_us ? "launch and end" : prediction.limit().name;
  }
}

void StepLayer::need(const std::string& name, double bytes, double flops, bool is_nvfp4) {
  CostPart& p = part(name);
  p.bytes += bytes, p.flops += flops;
  const double slower = is_nvfp4 || t_.family == Family::kHopper ? 1 : 4;
  p.limit_us += roofline_us(bytes, flops * slower, t_);
}

void StepLayer::maps(const std::string& name, const std::vector<const char*>& names, int64_t parts) {
  std::vector<Kernel> streams, others;
  std::vector<ops::Linear::Desc> of_together;
  std::vector<StreamWork> works;  // of the streams
  bool is_input_quantised = false;
  for (const char* map : names) {
    const Held& held = held_.at(map);
    PlanShape shape;
    shape.map = {.in = held.cols, .out = ceil_div(held.rows, parts), .format = held.format};
    if (std::string_view(map) == "attn.wo_a") {
      shape.map.groups = held.rows / c_.o_lora_rank;
      shape.map.out = held.rows / shape.map.groups;
    }
    std::vector<Kernel> kernels;
    // FP8 and BF16 have kernels of their own on Hopper alone.
    const bool is_packed = t_.family == Family::kHopper && held.format != ops::WeightFormat::kF32;
    const bool is_own = held.format == ops::WeightFormat::kNvfp4 && has_own_kernels();
    if (is_packed || is_own) kernels = our_kernels(shape, load_.rows(), t_);
    if (kernels.empty()) kernels = portable_kernels(shape, load_.rows(), t_);
    need(name, held.bytes / static_cast<double>(parts), shape_flops(shape, load_.rows()),
         held.format == ops::WeightFormat::kNvfp4 && has_own_kernels());
    // Of one input and format: wo_a and wo_b, and w2, wait for what is before them.
    const bool waits = std::string_view(map) == "attn.wo_b" || std::string_view(map).ends_with(".w2");
    const bool is_blackwells = is_own && t_.family != Family::kHopper;
    // Inputs of maps in one call are quantised once (sm100/linear.cu, sm120/linear.cu).
    if (is_blackwells && !waits && shape.map.groups == 1) {
      if (is_input_quantised) kernels.erase(kernels.begin());
      is_input_quantised = true;
    }
    const bool is_stream = kernels.size() == 1 && !is_blackwells && load_.rows() <= kMostStreamTokens && !waits;
    const StreamWork work = stream_of(shape.map, load_.rows());
    if (!is_stream) {
      others.insert(others.end(), kernels.begin(), kernels.end());
    } else if (!works.empty() && works.back().format == work.format && works.back().width == work.width) {
      works.back().tiles += work.tiles, of_together.push_back(shape.map);
      streams.back() = few_tokens_kernel(of_together, works.back(), load_.rows(), t_);
    } else {
      works.push_back(work), of_together = {shape.map};
      streams.push_back(kernels[0]);
    }
  }
  if (others.empty()) join_formats(works, load_.rows(), t_, streams);
  // The shared expert's are behind the routed ones', which leave memory no time.
  if (name != kSharedMaps) {
    for (std::vector<Kernel>* kernels : {&streams, &others}) {
      for (Kernel& kernel : *kernels) kernel = behind_small(kernel);
    }
  }
  add(name, streams), add(name, others);
}

double StepLayer::stream_end() const {
  return kSmallEnd * static_cast<double>(c_.hidden_size) / kSmallChannels;
}

void StepLayer::streams() {
  const double values = own_rows() * static_cast<double>(ops::kHcStreams * c_.hidden_size);
  const double weights = 24.0 * 4 * static_cast<double>(ops::kHcStreams * c_.hidden_size);
  // Streams are read for products, mixed, and read and written with what a layer gives.
  const double bytes = values * 2 * 4.5;
  const bool is_cached = bytes < 32e6;
  for (int kernel = 0; kernel < 2; ++kernel) {
    add("hyper-connections",
        {work(kStreamCycles * values / 2, weights / 2 + (is_cached ? 0 : bytes / 2), stream_end())});
  }
  need("hyper-connections", weights, 2 * 24 * values, true);
}

PlanShape StepLayer::routed_shape() const {
  const Held& w1 = held_.at("ffn.experts.0.w1");
  PlanShape shape;
  shape.is_experts = true;
  shape.experts = {.hidden = c_.hidden_size,
                   .inner = w1.rows,
                   .num_local = are_experts_by_id() ? c_.num_experts / plan_.world : c_.num_experts,
                   .num_experts = c_.num_experts,
                   .top_k = c_.experts_per_token,
                   .format = w1.format};
  return shape;
}

bool StepLayer::are_experts_together() const {
  PlanShape shape = routed_shape();
  shape.shared = held_.at("ffn.shared_experts.w1").format;
  for (const char* matrix : {"w3", "w2"}) {
    if (held_.at(std::string("ffn.shared_experts.") + matrix).format != *shape.shared) return false;
  }
  return held_.at("ffn.shared_experts.w1").rows == shape.experts.inner &&
         are_launched_together(shape, load_.rows(), t_);
}

void StepLayer::shared_with_routed() {
  PlanShape shape = routed_shape();
  const double alone = estimate(our_kernels(shape, load_.rows(), t_), t_, true).us;
  shape.shared = held_.at("ffn.shared_experts.w1").format;
  const Estimate both = estimate(our_kernels(shape, load_.rows(), t_), t_, true);
  CostPart& p = part(kSharedPart);
  p.us += both.us - alone;
  p.bound = both.limit.name;
  const auto values = 3 * static_cast<double>(shape.experts.hidden * shape.experts.inner);
  need(kSharedPart, weight_bytes(*shape.shared, values), 2 * rows() * values,
       *shape.shared == ops::WeightFormat::kNvfp4);
}

void StepLayer::routed() {
  const bool is_by_id = are_experts_by_id();
  const PlanShape shape = routed_shape();
  const Held& w1 = held_.at("ffn.experts.0.w1");
  const int64_t n = load_.rows();
  const bool is_own = w1.format == ops::WeightFormat::kNvfp4 && has_own_kernels();
  const double touched = expert_load(shape, n, 1).touched;
  // All ranks wait for the one that has most to do.
  double fullest = 1;
  if (is_by_id && touched > 0) {
    const double share = touched / static_cast<double>(shape.experts.num_local);
    const double deviation = std::sqrt(touched * (1 - share));
    fullest =
        std::min(static_cast<double>(shape.experts.num_local), touched + largest_of(plan_.world) * deviation) / touched;
  }
  add("routed experts", is_own ? our_kernels(shape, n, t_) : portable_kernels(shape, n, t_), fullest);
  need("routed experts",
       weight_bytes(w1.format, 3.0 * static_cast<double>(c_.hidden_size * w1.rows)) * touched * fullest,
       shape_flops(shape, n), is_own);
}

}  // namespace tessera::bench
