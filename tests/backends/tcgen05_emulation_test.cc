// SPDX-License-Identifier: Apache-2.0
// The emulated GPU's tensor cores (cuda_common/ptx/emulated/tcgen05.h) themselves: products of operands that
// tcgen05_blocks.h lays out by the ISA's tables, and each rule that they trap on, one broken at a time.
#include <gmock/gmock.h>

#include <array>
#include <bit>
#include <cstring>

#include "backends/tcgen05_blocks.h"

namespace tessera {
namespace {

using namespace testing::tcgen05_blocks;
using ::testing::HasSubstr;

class Tcgen05EmulationTest : public OperandsTest {};

TEST_F(Tcgen05EmulationTest, ProductsAreTheModelsSums) {
  for (const auto& [n, is_fast] : std::vector<std::pair<int, bool>>{
           {8, false}, {16, false}, {40, false}, {128, false}, {136, false}, {256, false}, {40, true}}) {
    const testing::SumsMode mode(is_fast);
    const Operands operands = random_operands(n);
    std::vector<uint32_t> found(static_cast<size_t>(kM * n));
    const Said said = run_blocks(192, [&] {
      Shared& s = shared();
      if (thread() == 0) operands.place(s);
      allocate();
      if (thread() == 160) {
        for (int step = 0; step < kSteps; ++step) copy_scales(step, n), multiply(issue_of(step, n));
        tcgen05::commit(s.done);
      }
      if (thread() < 128) {
        s.done.wait(0);
        load_row(n, &found[static_cast<size_t>(thread() * n)]);
      }
      release();
    });
    ASSERT_TRUE(said.is_sound) << said.line;
    for (int m = 0; m < kM; ++m) {
      for (int column = 0; column < n; ++column) {
        ASSERT_EQ(found[static_cast<size_t>(m * n + column)], operands.sum(m, column, kSteps))
            << "N = " << n << (is_fast ? " in FP32" : "") << ", row " << m << ", column " << column;
      }
    }
  }
}

// The other layouts that a descriptor can name, by their own tables; 64 columns.
TEST_F(Tcgen05EmulationTest, ReadsEverySwizzle) {
  const Operands operands = random_operands(24);
  struct Layout {
    uint64_t swizzle;
    int leading, stride;
    size_t (*offset)(size_t m, size_t kb);
  };
  const Layout layouts[] = {
      {4, 0, 512,
       [](size_t m, size_t kb) { return m / 8 * 512 + m % 8 * 64 + ((kb / 16) ^ (m % 8 / 2)) * 16 + kb % 16; }},
      {6, 0, 256,
       [](size_t m, size_t kb) { return m / 8 * 256 + m % 8 * 32 + ((kb / 16) ^ (m % 8 / 4)) * 16 + kb % 16; }},
      {0, 2048, 128, [](size_t m, size_t kb) { return m / 8 * 128 + m % 8 * 16 + kb / 16 * 2048 + kb % 16; }},
      {0, 128, 256, [](size_t m, size_t kb) { return m / 8 * 256 + m % 8 * 16 + kb / 16 * 128 + kb % 16; }}};
  for (const Layout& layout : layouts) {
    std::vector<uint32_t> found(static_cast<size_t>(kM * 24));
    const Said said = run_blocks(128, [&] {
      Shared& s = shared();
      if (thread() == 0) {
        operands.place(s);
        for (size_t m = 0; m < kM; ++m) {
          for (size_t kb = 0; kb < 32; ++kb) {
            s.a[layout.offset(m, kb)] = operands.a[m * 128 + kb];
            if (m < 24) s.b[layout.offset(m, kb)] = operands.b[m * 128 + kb];
          }
        }
      }
      allocate();
      if (thread() == 0) {
        copy_scales(0, 24);
        Issue issue = issue_of(0, 24);
        const auto descriptor = [&](const uint8_t* at) {
          return shared_descriptor(ptx::shared_address(at), static_cast<uint32_t>(layout.leading),
                                   static_cast<uint32_t>(layout.stride), static_cast<uint32_t>(layout.swizzle));
        };
        issue.a = descriptor(s.a), issue.b = descriptor(s.b);
        multiply(issue);
        tcgen05::commit(s.done);
      }
      s.done.wait(0);
      load_row(24, &found[static_cast<size_t>(thread() * 24)]);
      release();
    });
    ASSERT_TRUE(said.is_sound) << said.line;
    for (int m = 0; m < kM; ++m) {
      for (int column = 0; column < 24; ++column) {
        ASSERT_EQ(found[static_cast<size_t>(m * 24 + column)], operands.sum(m, column, 1)) << layout.swizzle;
      }
    }
  }
}

// Stores and loads of 8 and 16 columns, by every warp in its own lanes.
TEST_F(Tcgen05EmulationTest, StoresComeBack) {
  const Said said = run_blocks(256, [&] {
    allocate(64);
    const int warp = thread() / 32;
    const uint32_t address = row_address() + static_cast<uint32_t>(warp / 4 * 32);
    uint32_t r[8], back[16];
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 8; ++i) r[i] = static_cast<uint32_t>(thread() * 100 + half * 8 + i);
      tcgen05::st(address + static_cast<uint32_t>(8 * half), r);
    }
    tcgen05::wait_st();
    tcgen05::ld(back, address);
    tcgen05::wait_ld(back);
    for (int i = 0; i < 16; ++i) EXPECT_EQ(back[i], static_cast<uint32_t>(thread() * 100 + i));
    release(64);
  });
  EXPECT_TRUE(said.is_sound) << said.line;
}

// Each of these changes one thing of a sound product; what is said names it.
TEST_F(Tcgen05EmulationTest, RefusesWhatDescriptorsMayNotSay) {
  const Operands operands = random_operands(32);
  struct Case {
    const char* expected;
    void (*change)(Issue&);
  };
  const Case cases[] = {
      {"reserved bits set (0-1, 3, 6, 12 or 24-26)", [](Issue& i) { i.instruction |= 1 << 12; }},
      {"reserved bits set (0-1, 3, 6, 12 or 24-26)", [](Issue& i) { i.instruction |= 1 << 24; }},
      {"sparsity", [](Issue& i) { i.instruction |= 4; }},
      {"types are not E2M1", [](Issue& i) { i.instruction ^= 3 << 7; }},
      {"negates", [](Issue& i) { i.instruction |= 1 << 13; }},
      {"transposes", [](Issue& i) { i.instruction |= 1 << 16; }},
      {"UE8M0", [](Issue& i) { i.instruction |= 1 << 23; }},
      {"selects a byte", [](Issue& i) { i.instruction |= 2 << 29; }},
      {"K = 96", [](Issue& i) { i.instruction |= 1u << 31; }},
      {"M is not 128", [](Issue& i) { i.instruction = nvfp4_instruction(256, 32); }},
      {"N is not 8 to 256", [](Issue& i) { i.instruction = nvfp4_instruction(128, 0); }},
      {"N is not 8 to 256", [](Issue& i) { i.instruction = nvfp4_instruction(128, 264); }},
      {"constant 001", [](Issue& i) { i.a &= ~(uint64_t{1} << 46); }},
      {"reserved bits set (14-15, 30-31 or 53-60)", [](Issue& i) { i.b |= uint64_t{1} << 53; }},
      {"base offset", [](Issue& i) { i.b |= uint64_t{1} << 49; }},
      {"bit 52", [](Issue& i) { i.a |= uint64_t{1} << 52; }},
      {"invalid swizzle", [](Issue& i) { i.a |= uint64_t{1} << 61; }},
      {"32-byte atoms", [](Issue& i) { i.a ^= uint64_t{3} << 61; }},
      {"stride is not 8 swizzled rows", [](Issue& i) { i.b += uint64_t{1} << 32; }},
      {"begins inside a group", [](Issue& i) { i.a = advance_descriptor(i.a, 128); }},
      {"run over the end", [](Issue& i) { i.b = advance_descriptor(i.b, 112); }},
      {"lies beyond shared memory", [](Issue& i) { i.a = codes_descriptor(sizeof(Shared) / 1024 * 1024); }},
      {"sums take columns", [](Issue& i) { i.d += 512 - 24; }},
      {"sums take columns", [](Issue& i) { i.d -= shared().memory; }},  // where they would begin at 0
      {"scales of A take columns", [](Issue& i) { i.a_scales = i.d + 510; }},
      {"scales of B take columns", [](Issue& i) { i.b_scales = i.d + 512; }},
      {"sums do not begin at lane 0", [](Issue& i) { i.d |= 32 << 16; }},
      {"overlap in tensor memory", [](Issue& i) { i.b_scales = i.a_scales; }},
      {"overlap in tensor memory", [](Issue& i) { i.a_scales = i.d + 28; }},
      {"the scales of A's row 0 in lanes 0 to 31", [](Issue& i) { i.a_scales += 128; }},
      {"the scales of B's row 0 in lanes 0 to 31", [](Issue& i) { i.b_scales += 128; }},
      {"where nothing was written", [](Issue& i) { i.adds = true; }},
  };
  for (const Case& one : cases) {
    const Said said = run_blocks(128, [&] {
      Shared& s = shared();
      if (thread() == 0) operands.place(s);
      allocate();
      if (thread() == 0) {
        copy_scales(0, 32);
        Issue issue = issue_of(0, 32);
        one.change(issue);
        multiply(issue);
        tcgen05::commit(s.done);
      }
      s.done.wait(0);
      release();
    });
    EXPECT_FALSE(said.is_sound) << one.expected;
    EXPECT_THAT(said.line, HasSubstr(one.expected));
    EXPECT_THAT(said.line, HasSubstr("tcgen05_blocks.h:")) << "the place that issued it";
  }
}

// A block of four warps with a sound product in it; `before`, `between` and `after` it are the test's.
struct Around {
  void (*before)() = [] {};
  void (*product)() = [] { copy_scales(0, 32), multiply(issue_of(0, 32)); };
  void (*commit)() = [] { tcgen05::commit(shared().done); };
  void (*wait)() = [] { shared().done.wait(0); };
  void (*after)() = [] {
    uint32_t r[8];
    tcgen05::ld(r, row_address());
    tcgen05::wait_ld(r);
  };
  void (*end)() = [] { release(); };
};

alignas(16) constexpr uint8_t kSource[64] = {};

// One lane of each warp goes another way.
void part() {
  static volatile int s_lanes = 0;
  if (thread() % 32 == 7) s_lanes = s_lanes + 1;
}

TEST_F(Tcgen05EmulationTest, RefusesWrongUseOfTensorMemory) {
  const Operands operands = random_operands(32);
  struct Case {
    const char* expected;
    Around around;
  };
  const Case cases[] = {
      {"", {}},
      {"no commit has followed",
       {.commit = [] {},
        .wait =
            [] {
              for (int i = 0; i < 200; ++i) __syncthreads();  // it is made some time
            }}},
      // Another thread's, which waits for nothing of this one's.
      {"no commit has followed",
       {.commit = [] {},
        .wait =
            [] {
              for (int i = 0; i < 200; ++i) __syncthreads();
              if (thread() == 33) tcgen05::commit(shared().done);
              __syncwarp();
              shared().done.wait(0);
            }}},
      // Behind so many commits it is made at once by no chance; the reader comes before it.
      {"product that is under way",
       {.product =
            [] {
              shared().never.init(64);
              for (int i = 0; i < 63; ++i) tcgen05::commit(shared().never);
              copy_scales(0, 32), multiply(issue_of(0, 32));
            },
        .wait = [] { __syncthreads(); }}},
      {"waits for ever for a barrier in shared memory", {.commit = [] { tcgen05::commit(shared().never); }}},
      {"waits for a barrier that nobody has made", {.wait = [] { shared().unmade.wait(0); }}},
      {"arrives at a barrier that nobody has made", {.commit = [] { shared().unmade.arrive_and_expect(16); }}},
      {"1 of 1 arrivals missing, 0 bytes announced", {.commit = [] { tcgen05::commit(shared().never); }}},
      {"-16 bytes announced and not copied",
       {.product =
            [] {
              ptx::copy_bulk(shared().b, kSource, 64, shared().never);
              shared().never.arrive_and_expect(48);
              shared().never.wait(0);
            }}},
      {"a bulk copy is misaligned", {.product = [] { ptx::copy_bulk(shared().b + 8, kSource, 16, shared().never); }}},
      {"a bulk copy is misaligned", {.product = [] { ptx::copy_bulk(shared().b, kSource + 8, 16, shared().never); }}},
      {"a bulk copy is misaligned", {.product = [] { ptx::copy_bulk(shared().b, kSource, 24, shared().never); }}},
      {"reaches lanes 32 to 63 alone, and not those from 0",
       {.after =
            [] {
              uint32_t r[8];
              if (thread() / 32 == 1) tcgen05::ld(r, shared().memory);
            }}},
      {"are not allocated",
       {.after =
            [] {
              uint32_t r[8];
              tcgen05::ld(r, row_address() + 508);
            }}},
      {"where nothing was written",
       {.after =
            [] {
              uint32_t r[8];
              tcgen05::ld(r, row_address() + 32);
              tcgen05::wait_ld(r);
            }}},
      {"different addresses",
       {.after =
            [] {
              uint32_t r[8];
              tcgen05::ld(r, row_address() + static_cast<uint32_t>(thread() % 32 / 31));
            }}},
      {"lanes of its warp",
       {.after =
            [] {
              uint32_t r[8];
              if (thread() != 5) tcgen05::ld(r, row_address());
              __syncthreads();
            }}},
      {"tcgen05.ld: lanes of a warp have parted",
       {.after =
            [] {
              part();
              uint32_t r[8];
              tcgen05::ld(r, row_address());
            }}},
      {"tcgen05.wait::ld: lanes of a warp have parted",
       {.after =
            [] {
              uint32_t r[8];
              tcgen05::ld(r, row_address());
              part();
              tcgen05::wait_ld(r);
            }}},
      {"",
       {.after =
            [] {
              part();
              __syncwarp();
              uint32_t r[8];
              tcgen05::ld(r, row_address());
              tcgen05::wait_ld(r);
            }}},
      {"whose sums nobody has read",
       {.after =
            [] {
              if (thread() == 0) multiply(issue_of(0, 32));
            }}},
      {"of which a load has not been waited for",
       {.after =
            [] {
              uint32_t r[8];
              if (thread() < 32) tcgen05::ld(r, row_address());
              if (thread() == 0) multiply(issue_of(1, 32));
            }}},
      {"gives back columns while a load reads them",
       {.after =
            [] {
              uint32_t r[8];
              tcgen05::ld(r, row_address());
            }}},
      {"overwrites column",
       {.after =
            [] {
              if (thread() == 0)
                tcgen05::cp_scales(shared().memory, scales_descriptor(ptx::shared_address(shared().a_scales)));
            }}},
      {"its source's stride",
       {.after =
            [] {
              const uint32_t at = ptx::shared_address(shared().a_scales);
              if (thread() == 0) tcgen05::cp_scales(shared().memory + 300, shared_descriptor(at, 16, 256, 0));
            }}},
      {"its source is swizzled",
       {.after =
            [] {
              if (thread() == 0)
                tcgen05::cp_scales(shared().memory + 300, codes_descriptor(ptx::shared_address(shared().a)));
            }}},
      {"scales take columns",
       {.after =
            [] {
              if (thread() == 0) {
                tcgen05::cp_scales(shared().memory + 509, scales_descriptor(ptx::shared_address(shared().a_scales)));
              }
            }}},
      // Scales that one warp alone stores are in its 32 lanes only.
      {"in lanes 32 to 63, column",
       {.product =
            [] {
              copy_scales(0, 32);
              Issue issue = issue_of(0, 32);
              issue.b_scales = shared().memory + 320;
              multiply(issue);
            }}},
      {"are not those of lanes 0 to 31",
       {.product =
            [] {
              copy_scales(0, 32);
              Issue issue = issue_of(0, 32);
              issue.b_scales = shared().memory + 352;
              multiply(issue);
            }}},
      {"512 columns of tensor memory allocated", {.end = [] {}}},
      {"gives back columns that no allocation gave", {.end = [] { release(256); }}},
      {"no power of two from 32 to 512",
       {.before =
            [] {
              if (thread() < 32) tcgen05::alloc(&shared().memory, 96);
            }}},
      {"columns that its own block has",
       {.after =
            [] {
              if (thread() < 32) tcgen05::alloc(&shared().memory, 32);
            }}},
      {"given up its right",
       {.after =
            [] {
              if (thread() < 32) tcgen05::relinquish_alloc_permit();
              if (thread() < 32) tcgen05::alloc(&shared().memory, 32);
            }}},
      {"work of the tensor cores was under way",
       {.after =
            [] {
              uint32_t r[8];
              tcgen05::ld(r, row_address());
              tcgen05::wait_ld(r);
              release();
              // By chance some are made at once.
              for (int i = 0; thread() == 0 && i < 64; ++i) tcgen05::commit(shared().never), shared().never.init(64);
            },
        .end = [] {}}},
  };
  for (const Case& one : cases) {
    const Said said = run_blocks(128, [&] {
      Shared& s = shared();
      if (thread() == 0) operands.place(s);
      __syncwarp();
      one.around.before();
      allocate();
      uint32_t r[8] = {0x30303030u, 0, 0, 0, 0, 0, 0, 0};
      if (thread() < 32) tcgen05::st(row_address() + 320, r);
      r[0] += static_cast<uint32_t>(thread() / 64);
      tcgen05::st(row_address() + 352, r);
      tcgen05::wait_st();
      __syncthreads();
      if (thread() == 0) one.around.product(), one.around.commit();
      __syncwarp();
      one.around.wait();
      one.around.after();
      one.around.end();
    });
    EXPECT_EQ(said.is_sound, one.expected[0] == 0) << one.expected << ": " << said.line;
    EXPECT_THAT(said.line, HasSubstr(one.expected));
  }
}

// That the last commit's has come says nothing of the others', by chance.
TEST_F(Tcgen05EmulationTest, ABlockMayNotEndBeforeItsCommitsHaveArrived) {
  const auto end_after = [](bool waits_for_both) {
    return run_blocks(32, [waits_for_both] {
      Shared& s = shared();
      if (thread() == 0) s.done.init(1), s.never.init(1);
      __syncthreads();
      if (thread() == 0) tcgen05::commit(s.never), tcgen05::commit(s.done);
      s.done.wait(0);
      if (waits_for_both) s.never.wait(0);
    });
  };
  int num_found = 0;
  for (int run = 0; run < 100; ++run) {
    const Said sound = end_after(true), said = end_after(false);
    EXPECT_TRUE(sound.is_sound) << sound.line;
    if (said.is_sound) continue;
    ++num_found;
    EXPECT_THAT(said.line, HasSubstr("ended while a commit's arrival was under way"));
  }
  EXPECT_GT(num_found, 0);
}

}  // namespace
}  // namespace tessera
