// SPDX-License-Identifier: Apache-2.0
// bench_cuda: linear maps of Flash on a GPU, beside what the memory gives in the same run. Every call reads another
// copy of the weight, and the copies together are larger than any cache; a round over them is one graph.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <nlohmann/json.hpp>

#include "backends/registry.h"
#include "base/integer_math.h"
#include "base/rng.h"
#include "bench/cuda/read.h"
#include "device/cuda/graph.h"
#include "device/cuda/memory.h"
#include "device/gpu_executor.h"
#include "device/machine.h"
#include "numeric/bf16.h"
#include "ops/backend.h"

namespace tessera::bench {

namespace {

using device::cuda::Event, device::cuda::Graph, device::cuda::Memory, device::cuda::StreamQueue;
using ops::WeightFormat;

constexpr int64_t kColdBytes = int64_t{256} << 20, kCeilingBytes = int64_t{1} << 30;

struct Shape {
  const char* name;
  int64_t in, out, groups;
  WeightFormat format;
};
constexpr Shape kFlash[] = {
    {"wq_a", 4096, 1024, 1, WeightFormat::kNvfp4},      {"wq_b", 1024, 32768, 1, WeightFormat::kNvfp4},
    {"wkv", 4096, 512, 1, WeightFormat::kNvfp4},        {"wo_a", 4096, 1024, 8, WeightFormat::kNvfp4},
    {"wo_b", 8192, 4096, 1, WeightFormat::kNvfp4},      {"shared w1", 4096, 2048, 1, WeightFormat::kNvfp4},
    {"shared w2", 2048, 4096, 1, WeightFormat::kNvfp4}, {"wq_b", 1024, 32768, 1, WeightFormat::kFp8Block},
    {"wo_b", 8192, 4096, 1, WeightFormat::kFp8Block},   {"wo_b", 8192, 4096, 1, WeightFormat::kBf16},
    {"head", 4096, 129280, 1, WeightFormat::kBf16},
};

struct Settings {
  std::vector<int64_t> tokens = {1, 4, 16, 64, 512};
  std::string only, variant;
  int repeats = 7;
  bool is_json = false;
};

// Device memory full of copies of one random megabyte whose words make(rng) gives.
template <class Make>
Memory random_memory(const StreamQueue& queue, int64_t bytes, Make&& make) {
  constexpr int64_t kPart = int64_t{1} << 20;
  Rng rng(7);
  std::vector<uint32_t> part(kPart / 4);
  for (uint32_t& word : part) word = make(rng);
  Memory memory(Memory::Kind::kDevice, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
  for (int64_t at = 0; at < bytes; at += kPart) {
    device::cuda::copy(queue, memory.as<char>() + at, part.data(), static_cast<size_t>(std::min(kPart, bytes - at)));
  }
  queue.synchronize();
  return memory;
}

uint32_t random_bf16_pair(Rng& rng) {
  const auto half = [&] { return static_cast<uint32_t>(numeric::bf16_from_float(rng.normal())); };
  const uint32_t low = half();
  return low | half() << 16;
}

// Codes and scales of moderate size.
uint32_t random_codes(WeightFormat format, Rng& rng) {
  if (format == WeightFormat::kBf16) return random_bf16_pair(rng);
  const auto word = static_cast<uint32_t>(rng.next_u64());
  return format == WeightFormat::kFp8Block ? word & 0xBFBFBFBF : word;  // never NaN
}
uint32_t random_scales(WeightFormat format, Rng& rng) {
  if (format == WeightFormat::kFp8Block) return __builtin_bit_cast(uint32_t, 0.01f + 0.01f * rng.uniform());
  return (static_cast<uint32_t>(rng.next_u64()) & 0x0F0F0F0F) | 0x30303030;
}

// Seconds that `work`, recorded as a graph, takes: the median.
double measure(const StreamQueue& queue, int repeats, const std::function<void()>& work) {
  const Graph graph(queue, work);
  graph.launch(queue);  // unmeasured
  std::vector<double> seconds;
  for (int i = 0; i < repeats; ++i) {
    Event begin, end;
    begin.record(queue);
    graph.launch(queue);
    end.record(queue);
    end.wait();
    seconds.push_back(static_cast<double>(Event::milliseconds_between(begin, end)) * 1e-3);
  }
  std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
  return seconds[static_cast<size_t>(repeats / 2)];
}

class Run {
 public:
  explicit Run(const Settings& settings) : settings_(settings), machine_(device::probe_machine()) {
    std::string why_not;
    machine_.gpu = device::find_gpu(0, why_not);
    if (!machine_.gpu.has_value()) throw std::runtime_error(why_not);
    const Memory from = random_memory(queue_, kCeilingBytes, [](Rng& rng) { return random_bf16_pair(rng); });
    const Memory to(Memory::Kind::kDevice, static_cast<size_t>(kCeilingBytes));
    const double bytes = static_cast<double>(kCeilingBytes) * 1e-9;
    read_gbs_ = bytes / measure(queue_, settings.repeats,
                                [&] { read_device_memory(from.data(), from.size(), to.as<unsigned>(), queue_); });
    copy_gbs_ = 2 * bytes / measure(queue_, settings.repeats, [&] {
                  device::cuda::copy(queue_, to.data(), from.data(), from.size());
                });
    out_ = {{"gpu", machine_.gpu->name},
            {"read_gbs", read_gbs_},
            {"copy_gbs", copy_gbs_},
            {"rows", nlohmann::ordered_json::array()}};
    if (settings.is_json) return;
    std::printf("%s: read %.0f GB/s, copy %.0f GB/s (read + written)\n%-10s %-6s %16s %-12s %6s %10s %8s %8s %9s\n",
                machine_.gpu->name.c_str(), read_gbs_, copy_gbs_, "linear", "format", "shape", "variant", "tokens",
                "us", "GB/s", "of read", "TFLOP/s");
  }

  void shape(const Shape& s) {
    const ops::Linear::Desc desc{.in = s.in, .out = s.out, .groups = s.groups, .format = s.format};
    ops::WeightView weight{.format = s.format, .rows = s.groups * s.out, .cols = s.in, .tensor_scale = 0.01f};
    const int64_t data_step = round_up<int64_t>(weight.data_bytes(), 256);
    const int64_t scale_step = round_up<int64_t>(weight.scale_bytes(), 256);
    const int64_t packed = weight.data_bytes() + weight.scale_bytes(), copies = ceil_div(kColdBytes, packed);
    const Memory data =
        random_memory(queue_, copies * data_step, [&](Rng& rng) { return random_codes(s.format, rng); });
    const Memory scales =
        random_memory(queue_, copies * scale_step, [&](Rng& rng) { return random_scales(s.format, rng); });
    for (const ops::Backend* backend : backends::all_backends()) {
      std::string why_not;
      if (!backend->is_on_gpu || !ops::is_usable(*backend, machine_, why_not)) continue;
      for (const ops::Variant<ops::Linear>& variant : backend->variants_of<ops::Linear>()) {
        const std::string name = std::string(backend->name) + "." + variant.name;
        if (name.find(settings_.variant) == std::string::npos || !variant.supports(desc, why_not)) continue;
        for (const int64_t tokens : settings_.tokens) {
          const Memory x = random_memory(queue_, tokens * s.groups * s.in * 2, random_bf16_pair);
          const Memory y(Memory::Kind::kDevice, static_cast<size_t>(tokens * weight.rows * 2));
          const int64_t scratch = variant.workspace_bytes == nullptr ? 0 : variant.workspace_bytes(desc, tokens);
          const Memory workspace(Memory::Kind::kDevice, static_cast<size_t>(std::max<int64_t>(scratch, 1)));
          const double seconds = measure(queue_, settings_.repeats, [&] {
            for (int64_t i = 0; i < copies; ++i) {
              weight.data = data.as<char>() + i * data_step;
              weight.block_scales = scale_step == 0 ? nullptr : scales.as<char>() + i * scale_step;
              variant.run(desc,
                          {.x = {x.data(), DType::kBF16, {tokens, s.groups * s.in}},
                           .weight = weight,
                           .y = {y.data(), DType::kBF16, {tokens, weight.rows}},
                           .num_tokens = tokens,
                           .workspace = workspace.data()},
                          queue_);
            }
          });
          row(s, name, tokens, packed, copies, seconds / static_cast<double>(copies));
        }
      }
    }
  }

  void finish() const {
    if (settings_.is_json) std::printf("%s\n", out_.dump().c_str());
  }

 private:
  void row(const Shape& s, const std::string& variant, int64_t tokens, int64_t bytes, int64_t copies, double seconds) {
    const double gbs = static_cast<double>(bytes) / seconds * 1e-9;
    const double tflops = 2e-12 * static_cast<double>(tokens * s.in * s.out * s.groups) / seconds;
    out_["rows"].push_back({{"name", s.name},
                            {"format", ops::to_string(s.format)},
                            {"in", s.in},
                            {"out", s.out},
                            {"groups", s.groups},
                            {"variant", variant},
                            {"tokens", tokens},
                            {"packed_bytes", bytes},
                            {"copies", copies},
                            {"us", seconds * 1e6},
                            {"gbs", gbs},
                            {"share_of_read", gbs / read_gbs_},
                            {"tflops", tflops}});
    if (settings_.is_json) return;
    std::printf("%-10s %-6s %16s %-12s %6ld %10.2f %8.0f %7.0f%% %9.2f\n", s.name,
                std::string(ops::to_string(s.format)).c_str(), fmt::format("{}x{}x{}", s.groups, s.out, s.in).c_str(),
                variant.c_str(), static_cast<long>(tokens), seconds * 1e6, gbs, 100 * gbs / read_gbs_, tflops);
    std::fflush(stdout);
  }

  const Settings& settings_;
  device::Machine machine_;
  StreamQueue queue_;
  double read_gbs_ = 0, copy_gbs_ = 0;
  nlohmann::ordered_json out_;
};

void run(const Settings& settings) {
  Run all(settings);
  for (const Shape& s : kFlash) {
    const std::string name = std::string(s.name) + " " + std::string(ops::to_string(s.format));
    if (name.find(settings.only) != std::string::npos) all.shape(s);
  }
  all.finish();
}

}  // namespace

}  // namespace tessera::bench

int main(int argc, char** argv) {
  tessera::bench::Settings settings;
  CLI::App app("Linear maps of Flash on the first GPU: time, and bytes of packed weights per second");
  app.add_option("--tokens", settings.tokens, "Tokens per call, comma-separated")
      ->delimiter(',')
      ->check(CLI::Range(1, 65536));
  app.add_option("--only", settings.only, "Rows whose name and format contain this, such as \"wo_b nvfp4\"");
  app.add_option("--variant", settings.variant, "Variants whose name contains this, such as mma");
  app.add_option("--repeats", settings.repeats, "Rounds; the median is shown")->check(CLI::Range(1, 1000));
  app.add_flag("--json", settings.is_json, "One JSON object");
  CLI11_PARSE(app, argc, argv);
  try {
    tessera::bench::run(settings);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_cuda: %s\n", error.what());
    return 1;
  }
  return 0;
}
