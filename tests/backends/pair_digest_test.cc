// SPDX-License-Identifier: Apache-2.0
// Digests by which two blocks of a pair compare scales: the same for the same ones in whichever order rows come, others
// where one bit differs, where rows are exchanged, and where a block has fewer.
#include "backends/cuda_common/ptx/emulated/pair_digest.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "testing/seed.h"

namespace tessera {
namespace {

using backends::cuda_common::ptx::emulated::PairDigest, backends::cuda_common::ptx::emulated::digest_of_scales;

uint32_t digest_of(const std::vector<uint32_t>& scales) {
  uint32_t sum = 0;
  for (size_t row = scales.size(); row-- > 0;) sum += digest_of_scales(static_cast<uint32_t>(row), scales[row]);
  return sum;
}

bool agree(const std::vector<uint32_t>& even, const std::vector<uint32_t>& odd) {
  return PairDigest::agrees(PairDigest::bits_of(digest_of(even)), digest_of(odd));
}

TEST(PairDigest, WhoComesFirstIsRight) {
  for (const uint32_t digest : {0u, 1u, 2u, ~0u}) {
    EXPECT_TRUE(PairDigest::agrees(PairDigest::kNone, digest));
    EXPECT_NE(PairDigest::bits_of(digest), PairDigest::kNone);
    EXPECT_TRUE(PairDigest::agrees(PairDigest::bits_of(digest), digest));
  }
  EXPECT_FALSE(PairDigest::agrees(PairDigest::bits_of(0), 2));
}

TEST(PairDigest, EachBitAndEachPlaceCounts) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Rng rng(seed);
  for (const size_t n : {16, 144, 256}) {
    std::vector<uint32_t> scales(n, 0x38383838);
    EXPECT_TRUE(agree(scales, scales));
    std::vector<uint32_t> other = scales;
    std::set<uint32_t> digests{digest_of(scales)};
    for (size_t row = 0; row < n; ++row) {
      for (int bit = 0; bit < 32; ++bit) {
        other[row] ^= uint32_t{1} << bit;
        ASSERT_FALSE(agree(scales, other)) << "row " << row << ", bit " << bit;
        digests.insert(digest_of(other));
        other[row] = scales[row];
      }
    }
    EXPECT_GT(digests.size(), 32 * n * 99 / 100);  // not a few values over and over
    for (uint32_t& word : scales) word = static_cast<uint32_t>(rng.below(uint64_t{1} << 32));
    EXPECT_TRUE(agree(scales, scales));
    other = scales;
    std::swap(other[1], other[n - 1]);
    EXPECT_FALSE(agree(scales, other));
    other = scales;
    other.pop_back();
    EXPECT_FALSE(agree(scales, other));
  }
}

}  // namespace
}  // namespace tessera
