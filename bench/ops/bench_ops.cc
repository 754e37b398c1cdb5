// SPDX-License-Identifier: Apache-2.0
#include "bench/ops/bench_ops.h"

#include <fmt/format.h>

#include <algorithm>

#include "backends/registry.h"
#include "base/error.h"
#include "base/integer_math.h"
#include "base/plot.h"
#include "base/strings.h"
#include "bench/ops/op_bench.h"
#include "bench/ops/rounds.h"
#include "bench/shapes/published.h"
#include "device/device_choice.h"
#include "numeric/bf16.h"

namespace tessera::bench {

namespace {

constexpr int64_t kAlignment = 128;  // of what is read
// A round of recorded calls reads half of the pool at least where weights are cold: more than twice any GPU's cache.
constexpr int64_t kFewestColdCalls = 4, kMostColdCalls = 256, kWarmCalls = 32;

// Throws kResourceExhausted with figures where `bytes` are not there.
void check_memory(const device::Machine& machine, const std::string& what, int64_t bytes) {
  const uint64_t needed = static_cast<uint64_t>(bytes);
  const uint64_t available = machine.gpu ? machine.gpu->memory_free_bytes : machine.memory_available_bytes;
  if (needed <= available) return;
  fail(ErrorCode::kResourceExhausted, fmt::format("does not fit: {} needs {}, {} has {} available; {} are missing",
                                                  what, format_bytes(needed), machine.gpu ? "the GPU" : "this machine",
                                                  format_bytes(available), format_bytes(needed - available)));
}

int64_t checked_pool_bytes(const device::Machine& machine, int64_t bytes) {
  check_memory(machine, "the pool of random weights", WeightPool::memory_bytes(bytes));
  return bytes;
}

}  // namespace

void OpBench::check_fit(const std::string& name, int64_t tokens, int64_t bytes) const {
  check_memory(device::machine_of(options_.device), fmt::format("{} at {} tokens", name, tokens), bytes);
}

OpBench::OpBench(const Options& options, const std::function<void(const Report&, const Row&)>& on_row)
    : options_(options),
      on_row_(on_row),
      machine_(device::machine_of(options.device)),
      executor_(device::make_executor(machine_, options.num_threads)),
      interleaved_(executor_->interleave()),
      probe_(make_probe(machine_, *executor_)),
      planner_(backends::all_backends(), machine_, options.forced),
      pool_(checked_pool_bytes(machine_, options.pool_bytes), executor_->memory()),
      fence_(2 * kAlignment, executor_->memory()) {
  report_.is_on_gpu = machine_.gpu.has_value();
  report_.device = report_.is_on_gpu ? printable(machine_.gpu->name) : "cpu";
  report_.num_threads = executor_->queue().num_threads();
  report_.ceilings = probe_->ceilings(pool_.codes(), pool_.bytes());
}

device::Tensor OpBench::activations(int64_t tokens, int64_t width) {
  device::Tensor x(DType::kBF16, {tokens, width});
  for (int64_t i = 0; i < tokens * width; ++i) x.as<uint16_t>()[i] = numeric::bf16_from_float(rng_.normal());
  return memory().is_host() ? std::move(x) : x.clone_into(memory());
}

std::vector<float> OpBench::floats(int64_t count, float scale) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = rng_.normal() * scale;
  return values;
}

std::vector<int64_t> OpBench::positions(int64_t first, int64_t count) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < count; ++i) all.push_back(first + i);
  return all;
}

void OpBench::measure(const std::string& name, const std::string& variant, const Case& a_case) {
  const Work& work = a_case.work;
  const int64_t part = std::clamp<int64_t>(work.bytes, 1, pool_.bytes());
  const int64_t spots = work.residence == Residence::kMemory ? pool_.bytes() / part : 1;
  const auto read = [&](int64_t run) {
    for (int64_t left = work.bytes; left > 0; left -= part) {
      probe_->read(pool_.codes() + run % spots * part / kAlignment * kAlignment, std::min(left, part));
    }
  };
  Row row{name, variant, work.tokens, work.bytes, work.flops, work.residence, 1, {}, {}};
  const int64_t cold_calls = std::clamp(ceil_div(pool_.bytes() / 2, part), kFewestColdCalls, kMostColdCalls);
  const int64_t most_calls = work.residence == Residence::kMemory ? cold_calls : kWarmCalls;
  Pair pair;
  switch (work.way) {
    case Way::kInTurn:
      pair = measure_calls(*executor_, a_case.call, read, most_calls, options_.seconds, row.calls);
      break;
    case Way::kAlone: {
      const auto fence = [&] { memory().copy(fence_.data(), fence_.as<char>() + kAlignment, kAlignment); };
      pair = measure_alone(*executor_, a_case.call, read, fence, most_calls, options_.seconds, row.calls);
      break;
    }
    case Way::kChain:
      row.calls = kChainCalls;
      pair.a = measure_chain(*executor_, a_case.call, row.calls, options_.seconds);
      break;
  }
  row.time = std::move(pair.a), row.read_time = std::move(pair.b);
  report_.rows.push_back(std::move(row));
  on_row_(report_, report_.rows.back());
}

double Row::share_of_products(const Ceilings& ceilings) const {
  const double peak = ceilings.mma_gflops.best > 0  ? ceilings.mma_gflops.best
                      : variant.starts_with("amx.") ? ceilings.amx_gflops.best
                                                    : ceilings.bf16_gflops.best;
  return peak > 0 ? static_cast<double>(flops) * 1e-9 / time.quantile(0.5) / peak : 0;
}

double Row::share(const Ceilings& ceilings) const {
  return std::max(share_of_read(), share_of_products(ceilings));
}

Report run_ops(const Options& options, const std::function<void(const Report&, const Row&)>& on_row) {
  OpBench bench(options, on_row);
  for (const char* name : {"flash", "pro"}) {
    const model::Config config = published_config(name);
    bench_weights(bench, name, config);
    bench_attention(bench, name, config);
    bench_rows(bench, name, config);
    bench_choices(bench, name, config);
  }
  Report report = bench.take();
  if (report.rows.empty()) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("--only: no row's name contains \"{}\"", printable(options.only, 60)));
  }
  return report;
}

std::string ceilings_text(const Report& report) {
  const Ceilings& c = report.ceilings;
  if (report.is_on_gpu) {
    return fmt::format("{}: read {:.0f} GB/s, copy {:.0f} (read + written), mma.sync BF16 {:.0f} GFLOP/s",
                       report.device, c.read_gbs.best, c.copy_gbs.best, c.mma_gflops.best);
  }
  return fmt::format("read {} with {} threads, {} with one; BF16 products {}, AMX {}", to_string(c.read_gbs, 1, "GB/s"),
                     report.num_threads, to_string(c.read_one_gbs, 1, "GB/s"), to_string(c.bf16_gflops, 0, "GFLOP/s"),
                     to_string(c.amx_gflops, 0, "GFLOP/s"));
}

std::vector<std::string> report_notes(const Report& report) {
  std::vector<std::string> notes;
  if (const std::string unstable = report.ceilings.unstable(); !unstable.empty()) {
    notes.push_back(
        fmt::format("Unstable, a tenth of the measurements below 80 % of the best: {}. Shares are of the best; "
                    "measure again on a quiet machine.",
                    unstable));
  }
  if (std::any_of(report.rows.begin(), report.rows.end(),
                  [&](const Row& row) { return row.is_implausible(report.ceilings); })) {
    notes.push_back("! more than 115 %: the read beside was disturbed, or bytes counted as memory's were in a cache.");
  }
  return notes;
}

std::string report_svg(const Report& report, const std::string& title) {
  constexpr int kWidth = 1000, kLeft = 20, kBars = 520, kFull = 340, kStep = 15, kTop = 56;
  SvgPage page(kWidth);
  const Ceilings& c = report.ceilings;
  page.text(kLeft, 18, title, "tessera bench ops");
  page.text(kLeft, 34, ceilings_text(report));
  int y = kTop;
  for (const Row& row : report.rows) {
    const bool is_read = row.share_of_read() >= row.share_of_products(c);
    const double share = row.share(c);
    page.text(kLeft, y + 10, fmt::format("{}, {} tokens", row.name, row.tokens));
    page.bar(kBars, y, std::min(share, 1.25) * kFull, kStep - 4, is_read ? "#35638f" : "#b5533c",
             fmt::format("{}: {:.1f} us", row.variant, row.time.quantile(0.5) * 1e6));
    page.text(kBars + 6 + static_cast<int>(std::min(share, 1.25) * kFull), y + 10,
              fmt::format("{:.0f} %{}", share * 100, row.is_implausible(c) ? " !" : ""));
    y += kStep;
  }
  page.line(kBars + kFull, kTop - 4, kBars + kFull, y);
  page.note(kLeft, y += 14,
            "Share of the nearer ceiling: blue, reading as many bytes (from where the op finds them); red, products. "
            "The line is 100 %.");
  for (const std::string& line : report_notes(report)) page.note(kLeft, y += 14, line);
  return page.finish(y + 26);
}

}  // namespace tessera::bench
