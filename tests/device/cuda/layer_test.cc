// SPDX-License-Identifier: Apache-2.0
// Streams, memory, events, graphs, and what an error says. Skipped on a machine without a GPU.
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/buffer.h"
#include "device/cuda/check.h"
#include "device/cuda/graph.h"
#include "device/cuda/memory.h"
#include "device/gpu_executor.h"

namespace tessera::device::cuda {
namespace {

TEST(CudaWithoutGpu, IsSaidAndNotThrown) {
  std::string why_not;
  EXPECT_FALSE(find_gpu(1 << 20, why_not).has_value());
  EXPECT_FALSE(why_not.empty());
}

TEST(CudaCheck, NamesPlaceCallAndWords) {
  try {
    check(cudaErrorInvalidValue, "cudaSomething(7)", "/anywhere/src/device/cuda/x.cc", 12);
    FAIL() << "not thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDeviceError);
    EXPECT_EQ(std::string(error.what()),
              "src/device/cuda/x.cc:12: cudaSomething(7): cudaErrorInvalidValue (invalid argument)");
  }
}

class CudaLayerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why_not;
    if (!find_gpu(0, why_not).has_value()) GTEST_SKIP() << why_not;
  }
};

TEST_F(CudaLayerTest, CopiesThroughPinnedAndDeviceMemory) {
  constexpr size_t kCount = 100'003;
  const StreamQueue queue;
  EXPECT_NE(queue.stream(), nullptr);
  const Memory pinned(Memory::Kind::kPinnedHost, kCount * 4), one(Memory::Kind::kDevice, kCount * 4);
  Memory two(Memory::Kind::kDevice, kCount * 4);
  std::iota(pinned.as<int32_t>(), pinned.as<int32_t>() + kCount, -5);
  fill(queue, two.data(), 0xEE, kCount * 4);
  copy(queue, one.data(), pinned.data(), kCount * 4);
  copy(queue, two.as<int32_t>() + 1, one.as<int32_t>() + 1, (kCount - 2) * 4);
  std::vector<int32_t> back(kCount);
  const Memory moved = std::move(two);
  EXPECT_EQ(two.data(), nullptr);
  copy(queue, back.data(), moved.data(), kCount * 4);
  queue.synchronize();
  for (size_t i = 0; i < kCount; ++i) {
    const bool is_copied = i > 0 && i + 1 < kCount;
    ASSERT_EQ(back[i], is_copied ? static_cast<int32_t>(i) - 5 : static_cast<int32_t>(0xEEEEEEEE)) << i;
  }
}

TEST_F(CudaLayerTest, MemoryThatDoesNotFitIsAnErrorAndNothingMore) {
  try {
    const Memory all(Memory::Kind::kDevice, size_t{1} << 50);
    FAIL() << "a petabyte";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    EXPECT_NE(std::string(error.what()).find("cudaMalloc"), std::string::npos) << error.what();
  }
  const StreamQueue queue;
  const Memory some(Memory::Kind::kDevice, 64);
  fill(queue, some.data(), 1, 64);
  queue.synchronize();
}

TEST_F(CudaLayerTest, WhatIsReservedIsThereForLater) {
  constexpr size_t kPieces = 16, kPieceBytes = size_t{4} << 20;
  std::string why_not;
  const std::unique_ptr<Executor> executor = make_gpu_executor(find_gpu(0, why_not).value());
  const auto bytes_held = [] {
    cudaMemPool_t pool = nullptr;
    uint64_t bytes = 0;
    TESSERA_CUDA_CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
    TESSERA_CUDA_CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &bytes));
    return bytes;
  };
  executor->memory().reserve(kPieces * kPieceBytes);
  const uint64_t reserved = bytes_held();
  EXPECT_GE(reserved, kPieces * kPieceBytes);
  std::vector<Buffer> pieces;
  for (size_t i = 0; i < kPieces; ++i) pieces.emplace_back(kPieceBytes, executor->memory());
  executor->synchronize();
  EXPECT_EQ(bytes_held(), reserved);
  pieces.clear();
  executor->synchronize();
  EXPECT_EQ(bytes_held(), reserved);
  try {
    executor->memory().reserve(size_t{1} << 50);
    FAIL() << "a petabyte";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
  }
}

TEST_F(CudaLayerTest, NothingBeginsEarlyOnABorrowedStream) {
  int major = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  const StreamQueue own;
  EXPECT_EQ(own.overlaps_kernels(), major >= 9);
  EXPECT_FALSE(StreamQueue(0, own.handle()).overlaps_kernels());
}

TEST_F(CudaLayerTest, EventsOrderQueues) {
  const StreamQueue first, second;
  constexpr size_t kBytes = size_t{256} << 20;
  const Memory memory(Memory::Kind::kDevice, kBytes);
  Event start, done;
  start.record(first);
  for (unsigned char value = 0; value < 20; ++value) fill(first, memory.data(), value, kBytes);
  done.record(first);
  done.hold_back(second);
  std::vector<unsigned char> last(16);
  copy(second, last.data(), memory.as<unsigned char>() + kBytes - 16, 16);
  second.synchronize();
  EXPECT_EQ(last, std::vector<unsigned char>(16, 19));
  done.wait();
  EXPECT_GT(Event::milliseconds_between(start, done), 0);
}

TEST_F(CudaLayerTest, GraphReplaysAndNamesWhatCannotBeRecorded) {
  const StreamQueue queue;
  const Memory memory(Memory::Kind::kDevice, 4);
  std::vector<unsigned char> seen(4);
  const Graph graph(queue, [&] { fill(queue, memory.data(), 7, 4); });
  fill(queue, memory.data(), 1, 4);
  copy(queue, seen.data(), memory.data(), 4);
  queue.synchronize();
  EXPECT_EQ(seen, std::vector<unsigned char>(4, 1)) << "recorded, not run";
  graph.launch(queue);
  copy(queue, seen.data(), memory.data(), 4);
  queue.synchronize();
  EXPECT_EQ(seen, std::vector<unsigned char>(4, 7));
  const auto record = [&](auto&& work) -> std::string {
    try {
      const Graph refused(queue, work);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(record([&] { queue.synchronize(); }).find("cudaStreamSynchronize"), std::string::npos);
  EXPECT_NE(record([] { const Memory more(Memory::Kind::kDevice, 1 << 20); }).find("cudaMalloc"), std::string::npos);
  const Graph empty(queue, [] {});
  empty.launch(queue);
  fill(queue, memory.data(), 3, 4);  // the queue works on
  copy(queue, seen.data(), memory.data(), 4);
  queue.synchronize();
  EXPECT_EQ(seen, std::vector<unsigned char>(4, 3));
}

// Also what CUDA would take: memory of the graph's own, a copy of what the host's memory holds at each launch.
TEST_F(CudaLayerTest, ExecutorNamesTheOpThatCannotBeRecorded) {
  std::string why_not;
  const std::unique_ptr<Executor> executor = make_gpu_executor(find_gpu(0, why_not).value());
  MemorySpace& memory = executor->memory();
  const Buffer there(64, memory);
  std::vector<char> here(64);
  const auto message_of = [&](auto&& deed) -> std::string {
    try {
      executor->record([&] {
        executor->queue().begin_op({"linear", "mma", "layers.3.attn.wq_a"});
        deed();
        executor->queue().end_op();
      });
    } catch (const Error& error) {
      return error.what();
    }
    return "recorded";
  };
  const auto expect = [&](const char* what, auto&& deed) {
    const std::string message = message_of(deed);
    EXPECT_EQ(message.rfind("while recording layers.3.attn.wq_a (linear, mma): ", 0), 0u) << message;
    EXPECT_NE(message.find(what), std::string::npos) << message;
    // The queue works on.
    memory.upload(there.data(), here.data(), here.size());
    memory.download(here.data(), there.data(), here.size());
  };
  expect("an allocation of GPU memory", [&] { const Buffer more(1 << 20, memory); });
  expect("page-locked", [&] { const Buffer more(1 << 20, executor->staging()); });
  expect("a copy from the host", [&] { memory.upload(there.data(), here.data(), here.size()); });
  expect("a copy to the host", [&] { memory.download(here.data(), there.data(), here.size()); });
  expect("a wait", [&] { executor->synchronize(); });
  expect("cudaMalloc", [] { const Memory more(Memory::Kind::kDevice, 1 << 20); });
  auto lost = std::make_unique<Buffer>(64, memory);
  expect("giving GPU memory back", [&] { lost.reset(); });
  expect("not checked", [&] { cudaStreamSynchronize(static_cast<cudaStream_t>(executor->queue().stream())); });
  EXPECT_EQ(message_of([&] { memory.copy(there.data(), there.as<char>() + 32, 32); }), "recorded");
}

}  // namespace
}  // namespace tessera::device::cuda
