// SPDX-License-Identifier: Apache-2.0
#include "bench/ops/bench_ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>

#include "backends/registry.h"
#include "base/error.h"
#include "base/plot.h"
#include "base/strings.h"
#include "bench/ops/op_bench.h"
#include "bench/shapes/published.h"
#include "numeric/bf16.h"

namespace tessera::bench {

namespace {

constexpr int64_t kPoolBytes = int64_t{512} << 20;  // many times any last-level cache per socket share

}  // namespace

OpBench::OpBench(const Options& options, const std::function<void(const Report&, const Row&)>& on_row)
    : options_(options),
      on_row_(on_row),
      machine_(device::probe_machine()),
      interleaved_(placement_.interleave()),
      queue_(options.num_threads, placement_),
      planner_(backends::all_backends(), machine_, options.forced),
      pool_(kPoolBytes) {
  report_.num_threads = queue_.num_threads();
  report_.ceilings = measure_ceilings(machine_, pool_.codes(), pool_.bytes(), queue_);
}

device::Tensor OpBench::activations(int64_t tokens, int64_t width) {
  device::Tensor x(DType::kBF16, {tokens, width});
  for (int64_t i = 0; i < tokens * width; ++i) x.as<uint16_t>()[i] = numeric::bf16_from_float(rng_.normal());
  return x;
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

void OpBench::measure(const std::string& name, const Case& a_case) {
  const Work& work = a_case.work;
  std::atomic<uint64_t> sink = 0;
  const int64_t part = std::clamp<int64_t>(work.bytes, 1, pool_.bytes());
  const int64_t spots = work.residence == Residence::kMemory ? pool_.bytes() / part : 1;
  const auto read = [&](int64_t run) {
    for (int64_t left = work.bytes; left > 0; left -= part) {
      sink ^= read_bytes(pool_.codes() + run % spots * part, std::min(left, part), queue_);
    }
  };
  Pair pair = measure_pair(a_case.call, read, 20, options_.seconds);
  report_.rows.push_back({name, planner_.lines().back().chosen, work.tokens, work.bytes, work.flops, work.residence,
                          std::move(pair.a), std::move(pair.b)});
  on_row_(report_, report_.rows.back());
}

double Row::share_of_products(const Ceilings& ceilings) const {
  const double peak = variant.starts_with("amx.") ? ceilings.amx_gflops : ceilings.bf16_gflops;
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

std::string report_svg(const Report& report, const std::string& cpu_name) {
  constexpr int kWidth = 1000, kLeft = 20, kBars = 520, kFull = 340, kStep = 15, kTop = 56;
  SvgPage page(kWidth);
  const Ceilings& c = report.ceilings;
  page.text(kLeft, 18, fmt::format("{}, {} threads", cpu_name, report.num_threads), "tessera bench ops");
  page.text(kLeft, 34,
            fmt::format("read {:.1f} GB/s (one thread {:.1f}), BF16 products {:.0f} GFLOP/s, tiles {:.0f}", c.read_gbs,
                        c.read_one_gbs, c.bf16_gflops, c.amx_gflops));
  int y = kTop;
  for (const Row& row : report.rows) {
    const bool is_read = row.share_of_read() >= row.share_of_products(c);
    const double share = row.share(c);
    page.text(kLeft, y + 10, fmt::format("{}, {} tokens", row.name, row.tokens));
    page.bar(kBars, y, std::min(share, 1.25) * kFull, kStep - 4, is_read ? "#35638f" : "#b5533c",
             fmt::format("{}: {:.1f} us", row.variant, row.time.quantile(0.5) * 1e6));
    page.text(kBars + 6 + static_cast<int>(std::min(share, 1.25) * kFull), y + 10,
              fmt::format("{:.0f} %", share * 100));
    y += kStep;
  }
  page.line(kBars + kFull, kTop - 4, kBars + kFull, y);
  page.note(kLeft, y + 14,
            "Share of the nearer ceiling: blue, reading as many bytes (from where the op finds them); red, products. "
            "The line is 100 %.");
  return page.finish(y + 26);
}

}  // namespace tessera::bench
