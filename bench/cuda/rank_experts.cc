// SPDX-License-Identifier: Apache-2.0
// How long do the experts of a group of GPUs take, each with its own tokens and its share of the experts
// (ops/rank_experts)? Ranks are threads of this process.
//   rank_experts flash|pro GPUS [TOKENS_OF_A_RANK,...] [even|skewed|one-rank]     one JSON line for each number of
//   tokens
// Tokens choose any experts alike; expert e as often as 1 / (e + 1), most of them the first rank's; or of the first
// rank's alone.
// A sample is kCalls calls behind each other, of other tokens each, on every GPU; its time is that of the slowest.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/registry.h"
#include "base/error.h"
#include "bench/ops/weight_pool.h"
#include "bench/shapes/published.h"
#include "comm/bootstrap.h"
#include "comm/expert_exchange.h"
#include "device/device_choice.h"
#include "device/executor.h"
#include "numeric/bf16.h"
#include "ops/rank_experts/rank_experts.h"

namespace tessera::bench {
namespace {

constexpr int kCalls = 24, kSamples = 9;
constexpr int64_t kPoolBytes = int64_t{3} << 30;

const ops::Variant<ops::RankExperts>& hopper_variant() {
  for (const ops::Backend* backend : backends::all_backends()) {
    if (std::string(backend->name) == "sm90") return backend->variants_of<ops::RankExperts>().front();
  }
  fail(ErrorCode::kUnsupported, "rank_experts: this program has no backend sm90");
}

template <class Value>
device::Buffer placed(const std::vector<Value>& values, device::MemorySpace& memory) {
  device::Buffer buffer(values.size() * sizeof(Value), memory);
  memory.upload(buffer.data(), values.data(), buffer.size());
  return buffer;
}

enum class Choices { kEven, kSkewed, kOneRank };

Choices choices_of(const std::string& name) {
  if (name == "even") return Choices::kEven;
  if (name == "skewed") return Choices::kSkewed;
  if (name == "one-rank") return Choices::kOneRank;
  fail(ErrorCode::kInvalidArgument, "choices are even, skewed or one-rank, not " + name);
}

// Ascending ids of `count` different experts of the first `num_experts`, by chance: the largest of u^(1 / weight) are a
// sample without replacement (Efraimidis and Spirakis 2006).
std::vector<int32_t> choose(std::mt19937_64& random, Choices choices, int64_t num_experts, int64_t count) {
  std::uniform_real_distribution<double> uniform;
  std::vector<std::pair<double, int32_t>> keys;
  for (int32_t e = 0; e < num_experts; ++e) {
    const double weight = choices == Choices::kSkewed ? 1.0 / (e + 1) : 1;
    keys.emplace_back(std::log(uniform(random)) / weight, e);
  }
  std::partial_sort(keys.begin(), keys.begin() + count, keys.end(), std::greater<>());
  std::vector<int32_t> ids;
  for (int64_t k = 0; k < count; ++k) ids.push_back(keys[static_cast<size_t>(k)].second);
  std::sort(ids.begin(), ids.end());
  return ids;
}

// What is timed.
struct Load {
  std::string shape;
  int world;
  int64_t tokens;
  std::string choices;
};

// Of one call of a rank.
struct Inputs {
  device::Buffer x, ids, routing;

  Inputs(std::mt19937_64& random, const model::Config& c, const Load& load, device::MemorySpace& memory) {
    const Choices choices = choices_of(load.choices);
    const int64_t num_experts = choices == Choices::kOneRank ? c.num_experts / load.world : c.num_experts;
    std::normal_distribution<float> normal;
    std::vector<uint16_t> rows;
    for (int64_t i = 0; i < load.tokens * c.hidden_size; ++i) rows.push_back(numeric::bf16_from_float(normal(random)));
    std::vector<int32_t> chosen;
    for (int64_t t = 0; t < load.tokens; ++t) {
      const std::vector<int32_t> mine = choose(random, choices, num_experts, c.experts_per_token);
      chosen.insert(chosen.end(), mine.begin(), mine.end());
    }
    x = placed(rows, memory), ids = placed(chosen, memory);
    routing = placed(std::vector<float>(chosen.size(), 1.0f / static_cast<float>(c.experts_per_token)), memory);
  }
};

// Seconds of each sample of a rank.
std::vector<double> run_rank(comm::Bootstrap& bootstrap, const model::Config& c, const Load& load) {
  const int64_t tokens = load.tokens;
  const ops::Variant<ops::RankExperts>& variant = hopper_variant();
  const int rank = bootstrap.rank(), world = bootstrap.world();
  const auto executor = device::make_executor(device::machine_of("cuda:" + std::to_string(rank)), 1);
  device::MemorySpace& memory = executor->memory();
  const int64_t num_local = c.num_experts / world;
  const ops::RankExperts::Desc desc{.routed = {.hidden = c.hidden_size,
                                               .inner = c.expert_inner,
                                               .first_expert = rank * num_local,
                                               .num_local = num_local,
                                               .num_experts = c.num_experts,
                                               .top_k = c.experts_per_token,
                                               .swiglu_limit = static_cast<float>(c.swiglu_limit)},
                                    .world = world};
  std::string why_not;
  if (!variant.supports(desc, why_not)) fail(ErrorCode::kUnsupported, "rank_experts: " + why_not);
  const auto exchange = comm::make_expert_exchange(
      bootstrap, {.max_tokens = tokens, .top_k = c.experts_per_token, .hidden = c.hidden_size}, why_not);
  if (exchange == nullptr) fail(ErrorCode::kUnsupported, "rank_experts: " + why_not);

  const WeightPool pool(kPoolBytes, memory);
  std::vector<ops::WeightView> views[3];
  for (int64_t e = 0; e < num_local; ++e) {
    for (int m = 0; m < 3; ++m) {
      const bool is_down = m == 2;
      views[m].push_back(pool.weight(ops::WeightFormat::kNvfp4, is_down ? c.hidden_size : c.expert_inner,
                                     is_down ? c.expert_inner : c.hidden_size, 3 * e + m));
    }
  }
  const device::Buffer w1 = placed(views[0], memory), w3 = placed(views[1], memory), w2 = placed(views[2], memory);
  const device::Buffer workspace(static_cast<size_t>(variant.workspace_bytes(desc, tokens)), memory);
  const device::Tensor out(DType::kBF16, {tokens, c.hidden_size}, memory);
  std::mt19937_64 random(static_cast<uint64_t>(rank) + 1);
  std::vector<Inputs> inputs;
  for (int i = 0; i < kCalls; ++i) inputs.emplace_back(random, c, load, memory);

  std::vector<double> seconds;
  for (int sample = -1; sample < kSamples; ++sample) {  // the first one only warms up
    executor->synchronize();
    bootstrap.all_gather({});
    const auto begin = std::chrono::steady_clock::now();
    for (const Inputs& one : inputs) {
      ops::RankExperts::Args args;
      args.routed.x = {one.x.data(), DType::kBF16, {tokens, c.hidden_size}};
      args.routed.experts = one.ids.as<int32_t>(), args.routed.routing = one.routing.as<float>();
      args.routed.w1 = w1.as<ops::WeightView>(), args.routed.w3 = w3.as<ops::WeightView>();
      args.routed.w2 = w2.as<ops::WeightView>();
      args.out = out.view(), args.num_tokens = tokens, args.peers = &exchange->peers();
      args.workspace = workspace.data();
      variant.run(desc, args, executor->queue());
    }
    executor->synchronize();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (sample >= 0) seconds.push_back(took.count() / kCalls);
  }
  bootstrap.all_gather({});
  bootstrap.leave();
  return seconds;
}

void run_group(const Load& load) {
  const model::Config config = published_config(load.shape);
  const int world = load.world;
  comm::Socket listener = comm::listen_at("127.0.0.1", 0);
  const int port = comm::port_of(listener);
  std::vector<std::vector<double>> seconds(static_cast<size_t>(world));
  std::vector<std::string> errors(static_cast<size_t>(world));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto at = static_cast<size_t>(rank);
      try {
        comm::BootstrapOptions options;
        options.place.rank = rank, options.place.world = world, options.place.port = port;
        options.secret = "of threads of one process", options.join_seconds = 60;
        comm::Bootstrap bootstrap(options, nullptr, nullptr, rank == 0 ? std::move(listener) : comm::Socket());
        seconds[at] = run_rank(bootstrap, config, load);
      } catch (const std::exception& error) {
        errors[at] = error.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const std::string& error : errors) {
    if (!error.empty()) fail(ErrorCode::kUnsupported, error);
  }
  std::vector<double> samples = seconds.front();
  for (const std::vector<double>& of_rank : seconds) {
    for (size_t i = 0; i < samples.size(); ++i) samples[i] = std::max(samples[i], of_rank[i]);
  }
  std::string list;
  for (const double sample : samples) list += fmt::format("{}{:.3f}", list.empty() ? "" : ", ", sample * 1e6);
  std::sort(samples.begin(), samples.end());
  fmt::print(
      "{{\"shape\": \"{}\", \"gpus\": {}, \"tokens_of_a_rank\": {}, \"choices\": \"{}\", \"median_us\": {:.1f}, "
      "\"us\": [{}]}}\n",
      load.shape, world, load.tokens, load.choices, samples[samples.size() / 2] * 1e6, list);
  std::fflush(stdout);
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fputs("usage: rank_experts flash|pro GPUS [TOKENS_OF_A_RANK,...] [even|skewed|one-rank]\n", stderr);
    return 2;
  }
  try {
    const int world = std::atoi(argv[2]);
    if (world < 2) tessera::fail(tessera::ErrorCode::kInvalidArgument, "GPUS: at least 2");
    std::istringstream counts(argc > 3 ? argv[3] : "8,32,128,1024,4096");
    for (std::string count; std::getline(counts, count, ',');) {
      tessera::bench::run_group({argv[1], world, std::atoll(count.c_str()), argc > 4 ? argv[4] : "even"});
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank_experts: %s\n", error.what());
    return 1;
  }
}
