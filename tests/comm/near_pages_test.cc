// SPDX-License-Identifier: Apache-2.0
// Parts of pages brought near: every byte of what is copied, the table of all, and nothing beside, on the host and on a
// GPU.
#include "comm/near_pages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/rng.h"
#include "comm/any_gpu.h"
#include "device/buffer.h"
#include "testing/seed.h"

namespace tessera::comm {
namespace {

constexpr uint8_t kPoison = 0xA5;

// Pages here and there, some sequences near, some far, some of no pages; more of them than a launch takes at times.
void try_random(Rng& rng, device::MemorySpace& memory, device::Queue& queue) {
  const int64_t part_bytes = 16 * (1 + static_cast<int64_t>(rng.below(rng.below(4) == 0 ? 2500 : 40)));
  const int64_t before = 16 * static_cast<int64_t>(rng.below(9)), behind = 16 * static_cast<int64_t>(rng.below(9));
  const int64_t page_bytes = before + part_bytes + behind, stride = 1 + static_cast<int64_t>(rng.below(6));
  const int64_t num_places = 1 + static_cast<int64_t>(rng.below(rng.below(3) == 0 ? 200 : 10));
  std::vector<uint8_t> bytes(static_cast<size_t>(num_places * stride * page_bytes));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng.below(256));
  device::Buffer pages(bytes.size(), memory);
  memory.upload(pages.data(), bytes.data(), bytes.size());
  // Any order of pages.
  std::vector<const uint8_t*> addresses;
  for (int64_t i = 0; i < num_places * stride; ++i) addresses.push_back(pages.as<uint8_t>() + i * page_bytes);
  for (size_t i = addresses.size(); i > 1; --i) std::swap(addresses[i - 1], addresses[rng.below(i)]);
  std::vector<NearSequence> sequences;
  int32_t used = 0;
  for (int32_t place = 0; place < num_places; ++place) {
    if (rng.below(4) == 0) continue;
    const auto count = static_cast<int32_t>(rng.below(static_cast<uint64_t>(stride) + 1));
    const bool is_near = rng.below(2) == 0;
    sequences.push_back({place, count, is_near ? used : int32_t{-1}});
    if (is_near) used += count;
  }
  std::vector<uint8_t*> table(addresses.size(), nullptr), expected_table = table;
  std::vector<uint8_t> room(static_cast<size_t>(used * part_bytes + 16), kPoison), expected_room = room;
  device::Buffer far(addresses.size() * sizeof(void*), memory), near(room.size(), memory),
      found_table(table.size() * sizeof(void*), memory);
  memory.upload(far.data(), addresses.data(), far.size());
  memory.upload(near.data(), room.data(), room.size());
  for (const NearSequence& sequence : sequences) {
    for (int64_t n = 0; n < sequence.num_pages; ++n) {
      const auto at = static_cast<size_t>(sequence.place * stride + n);
      const uint8_t* part = addresses[at] + before;
      expected_table[at] = const_cast<uint8_t*>(part);
      if (sequence.first < 0) continue;
      const int64_t to = (sequence.first + n) * part_bytes;
      expected_table[at] = near.as<uint8_t>() + to;
      std::copy_n(bytes.begin() + (part - pages.as<uint8_t>()), part_bytes, expected_room.begin() + to);
    }
  }
  bring_near({.pages = far.as<const uint8_t*>(),
              .stride = stride,
              .offset = before,
              .part_bytes = part_bytes,
              .table = found_table.as<uint8_t*>(),
              .room = near.as<uint8_t>()},
             sequences, queue);
  memory.download(room.data(), near.data(), room.size());
  memory.download(table.data(), found_table.data(), found_table.size());
  EXPECT_EQ(room, expected_room);
  EXPECT_EQ(table, expected_table);
}

TEST(NearPages, AreCopiesOnTheHost) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  device::Queue queue(1);
  for (int i = 0; i < 40; ++i) try_random(rng, device::host_memory(), queue);
}

TEST(NearPages, AreCopiesOnAGpu) {
  std::string why_not;
  const auto executor = testing::any_gpu(why_not);
  if (executor == nullptr) GTEST_SKIP() << why_not;
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  for (int i = 0; i < 40; ++i) try_random(rng, executor->memory(), executor->queue());
}

}  // namespace
}  // namespace tessera::comm
