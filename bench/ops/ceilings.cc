// SPDX-License-Identifier: Apache-2.0
#include "bench/ops/ceilings.h"

#include <atomic>

#include "base/integer_math.h"
#include "bench/ops/timing.h"

namespace tessera::bench {

namespace {

constexpr int64_t kPart = 1 << 17;

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

double gflops(float (*loop)(int64_t), int64_t (*flops)(int64_t), device::Queue& queue) {
  constexpr int64_t kSteps = 200000;
  std::atomic<int> sink = 0;
  const auto run = [&](int64_t) {
    queue.parallel_for(queue.num_threads(), 1, [&](int64_t, int64_t) { sink += loop(kSteps) > 0 ? 1 : 0; });
  };
  const Pair pair = measure_pair(
      run, [](int64_t) {}, 10, 0.2);
  return static_cast<double>(flops(kSteps)) * queue.num_threads() / pair.a.quantile(0.5) * 1e-9;
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

Ceilings measure_ceilings(const device::Machine& machine, const void* data, int64_t bytes, device::Queue& queue) {
  Ceilings found;
  device::Queue one(1);
  std::atomic<uint64_t> sink = 0;
  const Pair pair = measure_pair([&](int64_t) { sink ^= read_bytes(data, bytes, queue); },
                                 [&](int64_t) { sink ^= read_bytes(data, bytes, one); }, 10, 0.5);
  found.read_gbs = static_cast<double>(bytes) / pair.a.quantile(0.5) * 1e-9;
  found.read_one_gbs = static_cast<double>(bytes) / pair.b.quantile(0.5) * 1e-9;
  if (machine.cpu.avx512_bf16) found.bf16_gflops = gflops(avx512_bf16_loop, avx512_bf16_flops, queue);
  if (machine.cpu.amx_bf16) found.amx_gflops = gflops(amx_bf16_loop, amx_bf16_flops, queue);
  return found;
}

}  // namespace tessera::bench
