// SPDX-License-Identifier: Apache-2.0
// The emulated GPU's tensor cores where a pair of thread blocks works together (cta_group::2): products of 256 rows,
// and each rule that only a pair can break, one at a time.
#include <gmock/gmock.h>

#include <array>
#include <cstring>

#include "backends/tcgen05_blocks.h"

namespace tessera {
namespace {

using namespace testing::tcgen05_blocks;
using ::testing::HasSubstr;

class Tcgen05PairsTest : public OperandsTest {};

bool is_odd() {
  return ptx::cluster_rank() % 2 != 0;
}

TEST_F(Tcgen05PairsTest, ProductsAreTheModelsSums) {
  for (const int n : {16, 48, 144, 256}) {
    const Operands operands = random_operands(n, 2);
    std::vector<uint32_t> found(static_cast<size_t>(2 * kM * n));
    const Said said = run_blocks(
        128,
        [&] {
          if (thread() == 0) operands.place(shared());
          allocate<2>();
          if (thread() == 0 && !is_odd()) {
            for (int step = 0; step < kSteps; ++step) copy_scales<2>(step, n), multiply<2>(issue_of<2>(step, n));
            tcgen05::commit<2>(shared().done);
          }
          shared().done.wait(0);
          load_row(n, &found[static_cast<size_t>((ptx::cluster_rank() * kM + thread()) * n)]);
          release<2>();
        },
        2);
    ASSERT_TRUE(said.is_sound) << said.line;
    for (int m = 0; m < 2 * kM; ++m) {
      for (int column = 0; column < n; ++column) {
        ASSERT_EQ(found[static_cast<size_t>(m * n + column)], operands.sum(m, column, kSteps))
            << "N = " << n << ", row " << m << ", column " << column;
      }
    }
  }
}

// Two pairs of a cluster, each with products of its own and told of them alone.
TEST_F(Tcgen05PairsTest, TwoPairsOfAClusterAreApart) {
  constexpr int kN = 48, kPairs = 2;
  const Operands operands[kPairs] = {random_operands(kN, 2), random_operands(kN, 2)};
  std::vector<uint32_t> found(static_cast<size_t>(2 * kPairs * kM * kN));
  const Said said = run_blocks(
      128,
      [&] {
        const int rank = ptx::cluster_rank(), even = rank & ~1;
        if (thread() == 0) operands[rank / 2].place(shared(), rank % 2);
        allocate<2>();
        if (thread() == 0 && !is_odd()) {
          for (int step = 0; step < kSteps; ++step) copy_scales<2>(step, kN), multiply<2>(issue_of<2>(step, kN));
          tcgen05::commit<2>(shared().done, 3u << even);
        }
        shared().done.wait(0);
        load_row(kN, &found[static_cast<size_t>((rank * kM + thread()) * kN)]);
        release<2>();
      },
      2 * kPairs);
  ASSERT_TRUE(said.is_sound) << said.line;
  for (int m = 0; m < 2 * kPairs * kM; ++m) {
    for (int column = 0; column < kN; ++column) {
      ASSERT_EQ(found[static_cast<size_t>(m * kN + column)], operands[m / (2 * kM)].sum(m % (2 * kM), column, kSteps));
    }
  }
}

// Each block of a cluster brings a part for all, and one for those at its place of each pair.
TEST_F(Tcgen05PairsTest, BulkCopiesReachTheBlocksTheyAreFor) {
  constexpr int kPart = 48, kBlocks = 4;
  alignas(16) uint8_t bytes[2 * kBlocks * kPart];
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng_.below(256));
  bool is_same[kBlocks] = {};
  const Said said = run_blocks(
      64,
      [&] {
        Shared& s = shared();
        const int rank = ptx::cluster_rank(), side = rank % 2;
        if (thread() == 0) s.done.init(1);
        ptx::sync_cluster();
        if (thread() == 0) {
          s.done.arrive_and_expect((kBlocks + 2) * kPart);
          ptx::copy_bulk_to(15, s.a + rank * kPart, bytes + rank * kPart, kPart, s.done);
          ptx::copy_bulk_to(5u << side, s.b + rank / 2 * kPart, bytes + (kBlocks + rank) * kPart, kPart, s.done);
        }
        s.done.wait(0);
        if (thread() == 0) {
          is_same[rank] = std::memcmp(s.a, bytes, kBlocks * kPart) == 0;
          for (int pair = 0; pair < 2; ++pair) {
            const uint8_t* const part = bytes + (kBlocks + 2 * pair + side) * kPart;
            is_same[rank] = is_same[rank] && std::memcmp(s.b + pair * kPart, part, kPart) == 0;
          }
        }
        ptx::sync_cluster();
      },
      kBlocks);
  ASSERT_TRUE(said.is_sound) << said.line;
  for (const bool is_one : is_same) EXPECT_TRUE(is_one);
}

alignas(16) const uint8_t kSixteen[16] = {};

constexpr int kN = 144;  // more than one atom of scales is for

void load_eight() {
  uint32_t r[8];
  tcgen05::ld(r, row_address());
  tcgen05::wait_ld(r);
}

// A pair of four warps each with a sound product in it, in the order in which they do it; a test changes a part.
struct Around {
  void (*begin)() = [] { allocate<2>(); };
  void (*product)() = [] { copy_scales<2>(0, kN), multiply<2>(issue_of<2>(0, kN)); };  // one thread of the even block
  void (*commit)() = [] { tcgen05::commit<2>(shared().done); };
  void (*odd)() = [] {};  // a thread of the odd block, meanwhile
  void (*wait)() = [] { shared().done.wait(0); };
  void (*load)() = load_eight;
  void (*after)() = [] {};  // when all of both blocks have loaded; one thread of the even block
  void (*end)() = [] { release<2>(); };
};

TEST_F(Tcgen05PairsTest, RefusesWhatBreaksARuleOfPairs) {
  const Operands operands = random_operands(kN, 2);
  struct Case {
    const char* expected;
    Around around;
  };
  const Case cases[] = {
      {"", {}},
      {"tcgen05.cp: is for the pair's even block to give", {.odd = [] { copy_scales<2>(0, kN); }}},
      {"tcgen05.mma: is for the pair's even block to give", {.odd = [] { multiply<2>(issue_of<2>(0, kN)); }}},
      {"tcgen05.commit: is for the pair's even block to give", {.odd = [] { tcgen05::commit<2>(shared().never); }}},
      {"M is not 128 rows of each thread block",
       {.product = [] { copy_scales<2>(0, kN), multiply<2>(issue_of<1>(0, kN)); }}},
      {"M is not 128 rows of each thread block",
       {.product = [] { copy_scales<2>(0, kN), multiply<1>(issue_of<2>(0, kN)); }}},
      {"in steps of 8 (two thread blocks: 16)",
       {.product = [] { copy_scales<2>(0, kN), multiply<2>(issue_of<2>(0, kN + 8)); }}},
      // Scales that only the even block has copied; those of B's first 128 rows alone.
      {"the scales of B's row 0 in lanes 0 to 31",
       {.product = [] { copy_scales<1>(0, kN), multiply<2>(issue_of<2>(0, kN)); }}},
      {"the scales of B's row 128 in lanes 0 to 31",
       {.product = [] { copy_scales<2>(0, 128), multiply<2>(issue_of<2>(0, kN)); }}},
      // Of more than 128 rows B's scales have more than four columns.
      {"scales of B take columns 508 to 512, which are not all allocated",
       {.product =
            [] {
              copy_scales<2>(0, kN);
              Issue issue = issue_of<2>(0, kN);
              issue.b_scales = shared().memory + 508;
              multiply<2>(issue);
            }}},
      // What one block has of B's scales is not what the other has: a row's, all of the rows behind the first 128.
      {"the scales of B's row 5 in the pair's odd block are not those in its even one",
       {.begin =
            [] {
              if (is_odd() && thread() == 0) shared().b_scales[0][0][ScaleAtom::offset(5, 3)] ^= 1;
              allocate<2>();
            }}},
      {"the scales of B's row 128 in the pair's odd block are not those in its even one",
       {.begin =
            [] {
              if (is_odd() && thread() == 0) std::memset(shared().b_scales[0][1], 0x7F, ScaleAtom::kBytes);
              allocate<2>();
            }}},
      {"where nothing was written", {.product = [] { copy_scales<2>(0, kN), multiply<1>(issue_of<1>(0, kN)); }}},
      {"waits for ever for", {.commit = [] { tcgen05::commit<1>(shared().done); }}},
      {"product",  // that is under way, or that no commit has followed
       {.commit = [] {},
        .wait =
            [] {
              sync_blocks<2>();
              if (!is_odd()) shared().never.wait(0);
            }}},
      {"whose sums nobody has read",
       {.load =
            [] {
              if (!is_odd()) load_row(kN, std::array<uint32_t, kN>().data());
            },
        .after = [] { multiply<2>(issue_of<2>(0, kN)); }}},
      {"of which a load has not been waited for",
       {.load =
            [] {
              uint32_t r[8];
              tcgen05::ld(r, row_address());
              if (!is_odd()) tcgen05::wait_ld(r);
            },
        .after = [] { multiply<2>(issue_of<2>(1, kN)); }}},
      {"overwrites column",
       {.load =
            [] {
              if (!is_odd()) load_row(kN, std::array<uint32_t, kN>().data());
            },
        .after =
            [] { tcgen05::cp_scales<2>(shared().memory, scales_descriptor(ptx::shared_address(shared().a_scales))); }}},
      {"waits for ever for columns that its own block has", {.begin = [] { allocate<2>(is_odd() ? 256 : 512); }}},
      {"before the cluster has met",
       {.begin =
            [] {
              if (thread() < 32) tcgen05::alloc<2>(&shared().memory, 512);
            }}},
      {"a pair's blocks have different columns",
       {.begin =
            [] {
              if (is_odd() && thread() < 32) tcgen05::alloc<1>(&shared().memory, 32);
              sync_blocks<2>();
              if (!is_odd()) allocate<2>();
              if (is_odd()) sync_blocks<2>(), sync_blocks<2>();  // as often as the even block, which allocates between
            }}},
      {"which are not all allocated",
       {.begin =
            [] {
              allocate<1>(is_odd() ? 32 : 512);
              sync_blocks<2>();
            }}},
      {"gives back columns that no allocation gave", {.end = [] { release<2>(is_odd() ? 256 : 512); }}},
      {"512 columns of tensor memory allocated",
       {.end =
            [] {
              if (!is_odd() && thread() < 32) tcgen05::dealloc<2>(shared().memory, 512);
            }}},
      // The odd block gives its columns back and ends; who waits for all of the cluster does not wait for it.
      {"of a block that has ended",
       {.end =
            [] {
              if (is_odd()) return;
              sync_blocks<2>();
              if (thread() == 0) copy_scales<2>(0, kN);
            }}},
      {"of a block that may not have begun",
       {.begin =
            [] {
              if (is_odd() && thread() == 0) ptx::arrive_at(shared().never, 0);
              allocate<2>();
            }}},
      {"the cluster has not met since",
       {.begin =
            [] {
              sync_blocks<2>();
              if (is_odd() && thread() == 0) ptx::arrive_at(shared().never, 0);
              allocate<2>();
            }}},
      {"the cluster has not met since",
       {.begin =
            [] {
              sync_blocks<2>();
              if (thread() == 0) shared().never.init(1);
              __syncthreads();
              if (is_odd() && thread() == 0) ptx::arrive_at(shared().never, 0);
              allocate<2>();
            }}},
      {"is for no block, or for one that the cluster lacks", {.commit = [] { tcgen05::commit<2>(shared().done, 4); }}},
      {"is for no block, or for one that the cluster lacks", {.commit = [] { tcgen05::commit<2>(shared().done, 0); }}},
      {"a bulk copy to no block, or to one that the cluster lacks",
       {.odd = [] { ptx::copy_bulk_to(5, shared().a, kSixteen, 16, shared().never); }}},
      {"a bulk copy to no block, or to one that the cluster lacks",
       {.odd = [] { ptx::copy_bulk_to(0, shared().a, kSixteen, 16, shared().never); }}},
      {"the cluster has not met since",
       {.begin =
            [] {
              sync_blocks<2>();
              if (thread() == 0) shared().never.init(1);
              if (is_odd() && thread() == 0) ptx::copy_bulk_to(3, shared().a, kSixteen, 16, shared().never);
              allocate<2>();
            }}},
      {"of a block that has ended",
       {.end =
            [] {
              if (is_odd()) return;
              sync_blocks<2>();
              if (thread() == 0) ptx::copy_bulk_to(3, shared().a, kSixteen, 16, shared().never);
            }}},
      {"more threads arrive at a barrier than it counts",
       {.after = [] { shared().never.arrive_and_expect(16); },
        .end =
            [] {
              sync_blocks<2>();
              if (is_odd() && thread() == 0) ptx::arrive_at(shared().never, 0);
              release<2>();
            }}},
  };
  for (const Case& one : cases) {
    const Said said = run_blocks(
        128,
        [&] {
          if (thread() == 0) operands.place(shared());
          __syncwarp();
          one.around.begin();
          if (thread() == 0 && !is_odd()) one.around.product(), one.around.commit();
          if (thread() == 0 && is_odd()) one.around.odd();
          __syncwarp();
          one.around.wait();
          one.around.load();
          sync_blocks<2>();
          if (thread() == 0 && !is_odd()) one.around.after();
          __syncwarp();
          one.around.end();
        },
        2);
    EXPECT_EQ(said.is_sound, one.expected[0] == 0) << one.expected << ": " << said.line;
    EXPECT_THAT(said.line, HasSubstr(one.expected));
  }
}

TEST_F(Tcgen05PairsTest, RefusesPairsWithoutAPair) {
  void (*const given[])() = {[] { tcgen05::alloc<2>(&shared().memory, 512); },
                             [] { tcgen05::relinquish_alloc_permit<2>(); },
                             [] { tcgen05::dealloc<2>(shared().memory, 512); },
                             [] {
                               if (thread() == 0) copy_scales<2>(0, kN);
                             },
                             [] {
                               if (thread() == 0) multiply<2>(issue_of<2>(0, kN));
                             },
                             [] {
                               if (thread() == 0) tcgen05::commit<2>(shared().done);
                             }};
  for (const auto& give : given) {
    const Said said = run_blocks(32, [&] {
      shared().memory = 0;
      give();
    });
    EXPECT_FALSE(said.is_sound);
    EXPECT_THAT(said.line, HasSubstr("cta_group::2 without a cluster of pairs"));
  }
}

}  // namespace
}  // namespace tessera
