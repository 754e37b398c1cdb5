// SPDX-License-Identifier: Apache-2.0
#include "bench/ops/ceilings.h"

#include <fmt/format.h>

#include <atomic>

#include "base/integer_math.h"

namespace tessera::bench {

namespace {

constexpr int64_t kPart = 1 << 17;

void append(const Samples& more, Samples& samples) {
  samples.seconds.insert(samples.seconds.end(), more.seconds.begin(), more.seconds.end());
}

uint64_t sum_words(const uint64_t* words, int64_t count) {
  uint64_t sums[8] = {};
  for (int64_t i = 0; i + 8 <= count; i += 8) {
    // Fetched ahead, since hardware stops at page ends and the kernels do the same.
    __builtin_prefetch(words + i + 256);
    for (int j = 0; j < 8; ++j) sums[j] += words[i + j];
  }
  uint64_t all = 0;
  for (const uint64_t sum : sums) all ^= sum;
  return all;
}

constexpr int64_t kSteps = 200000;  // of a loop of products

void run_loop(float (*loop)(int64_t), device::Queue& queue, Samples& samples) {
  std::atomic<int> sink = 0;
  const auto run = [&](int64_t) {
    queue.parallel_for(queue.num_threads(), 1, [&](int64_t, int64_t) { sink += loop(kSteps) > 0 ? 1 : 0; });
  };
  append(measure_pair(
             run, [](int64_t) {}, 4, 0.05)
             .a,
         samples);
}

double giga_flops(int64_t (*flops)(int64_t), const device::Queue& queue) {
  return static_cast<double>(flops(kSteps)) * queue.num_threads() * 1e-9;
}

}  // namespace

uint64_t read_bytes(const void* data, int64_t bytes, device::Queue& queue) {
  const int64_t parts = ceil_div(bytes, kPart);
  std::atomic<int64_t> next = 0;
  std::atomic<uint64_t> all = 0;
  queue.parallel_for(queue.num_threads(), 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < parts; i = next++) {
      const int64_t begin = i * kPart, size = begin + kPart < bytes ? kPart : bytes - begin;
      all ^= sum_words(reinterpret_cast<const uint64_t*>(static_cast<const char*>(data) + begin), size / 8);
    }
  });
  return all;
}

std::string to_string(const Ceiling& ceiling, int digits, const char* unit) {
  return fmt::format("{:.{}f} {} (p10 {:.{}f})", ceiling.best, digits, unit, ceiling.p10, digits);
}

Ceiling ceiling_of(double amount, const Samples& samples) {
  if (samples.seconds.empty()) return {};
  return {amount / samples.quantile(0), amount / samples.quantile(0.9)};
}

std::string Ceilings::unstable() const {
  std::string names;
  const auto add = [&](const Ceiling& ceiling, const char* name) {
    if (!ceiling.is_stable()) names += (names.empty() ? "" : ", ") + std::string(name);
  };
  add(read_gbs, "read");
  add(read_one_gbs, "read by one thread");
  add(bf16_gflops, "BF16 products");
  add(amx_gflops, "AMX");
  return names;
}

Ceilings measure_ceilings(const device::Machine& machine, const void* data, int64_t bytes, device::Queue& queue) {
  constexpr int kRounds = 5;
  device::Queue one(1);
  std::atomic<uint64_t> sink = 0;
  Samples all_read, one_reads, bf16, amx;
  for (int round = 0; round < kRounds; ++round) {
    const Pair pair = measure_pair([&](int64_t) { sink ^= read_bytes(data, bytes, queue); },
                                   [&](int64_t) { sink ^= read_bytes(data, bytes, one); }, 4, 0.15);
    append(pair.a, all_read);
    append(pair.b, one_reads);
    if (machine.cpu.avx512_bf16) run_loop(avx512_bf16_loop, queue, bf16);
    if (machine.cpu.amx_bf16) run_loop(amx_bf16_loop, queue, amx);
  }
  const double giga_bytes = static_cast<double>(bytes) * 1e-9;
  Ceilings found;
  found.read_gbs = ceiling_of(giga_bytes, all_read);
  found.read_one_gbs = ceiling_of(giga_bytes, one_reads);
  found.bf16_gflops = ceiling_of(giga_flops(avx512_bf16_flops, queue), bf16);
  found.amx_gflops = ceiling_of(giga_flops(amx_bf16_flops, queue), amx);
  return found;
}

}  // namespace tessera::bench
