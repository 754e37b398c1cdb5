// SPDX-License-Identifier: Apache-2.0
// What `tessera verify` runs: sound variants pass, and a wrong one of any kind is found and named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "backends/registry.h"
#include "base/error.h"
#include "base/log.h"
#include "device/buffer.h"
#include "ops/reference_rows.h"
#include "testing/seed.h"
#include "verify/compare.h"
#include "verify/verify.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

class VerifyTest : public ::testing::Test {
 protected:
  VerifyTest() : seed_(fresh_seed()), trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)) {}
  verify::Report run(std::span<const ops::Backend* const> backends) {
    return verify::verify(backends, device::probe_machine(), {.seed = seed_, .is_quick = true, .num_threads = 2},
                          nullptr);
  }
  uint64_t seed_;
  ::testing::ScopedTrace trace_;
};

const ops::Backend& reference_backend() {
  return *backends::all_backends().back();
}

TEST_F(VerifyTest, EveryOpOfThisMachineAgrees) {
  const verify::Report report = run(backends::all_backends());
  std::set<std::string> names;
  for (const verify::Row& row : report.rows) {
    names.insert(row.op);
    EXPECT_GT(row.num_cases, 0) << row.op;
    for (const verify::Failure& failure : row.failures)
      ADD_FAILURE() << row.op << " " << row.variant << " " << failure.shape << ": " << failure.what;
  }
  EXPECT_EQ(names.size(), std::tuple_size_v<decltype(ops::AllVariants{}.lists)>);
  EXPECT_TRUE(report.is_sound());
}

TEST_F(VerifyTest, OneOpIsEnough) {
  const ops::Backend* const reference[] = {&reference_backend()};
  verify::Options options{.seed = seed_, .is_quick = true, .op = "rms_norm", .num_threads = 2};
  const verify::Report report = verify::verify(reference, device::probe_machine(), options, nullptr);
  ASSERT_EQ(report.rows.size(), 1u);
  EXPECT_EQ(report.rows[0].op, "rms_norm");
  ASSERT_EQ(report.rows[0].calls.size(), static_cast<size_t>(report.num_cases()));
  for (const verify::Call& call : report.rows[0].calls) {
    EXPECT_TRUE(call.is_sound && call.num_values > 0 && call.num_different == 0) << call.shape;
  }
  options.op = "norm";
  try {
    verify::verify(reference, device::probe_machine(), options, nullptr);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("'norm'; there are"));
  }
}

// Variants that do what the reference does, and then something wrong.
template <class Op>
constexpr ops::Variant<Op> planted(const char* name,
                                   void (*run)(const typename Op::Desc&, const typename Op::Args&, device::Queue&)) {
  return {name, [](const typename Op::Desc&, std::string&) { return true; }, nullptr, nullptr, run};
}

// One value of one output, and only where a row is long: others agree.
constexpr ops::Variant<ops::RmsNorm> kOneValueOff[] = {planted<ops::RmsNorm>(
    "one_value_off", [](const ops::RmsNorm::Desc& desc, const ops::RmsNorm::Args& args, device::Queue& queue) {
      ops::rms_norm_reference(desc, args, queue);
      if (desc.width < 100 || args.num_rows < 17) return;
      float value;
      ops::load_floats(args.out, 16 * desc.width + 99, 1, &value);
      value = value * 1.01f + 1e-3f;
      ops::store_floats(args.out, 16 * desc.width + 99, 1, &value);
    })};
constexpr ops::Variant<ops::SwiGlu> kLeavesTheLastRow[] = {planted<ops::SwiGlu>(
    "leaves_the_last_row", [](const ops::SwiGlu::Desc& desc, const ops::SwiGlu::Args& args, device::Queue& queue) {
      ops::SwiGlu::Args fewer = args;
      --fewer.num_tokens;
      ops::swiglu_reference(desc, fewer, queue);
    })};
constexpr ops::Variant<ops::Router> kSwapsExperts[] = {planted<ops::Router>(
    "swaps_experts", [](const ops::Router::Desc& desc, const ops::Router::Args& args, device::Queue& queue) {
      ops::router_reference(desc, args, queue);
      std::swap(args.experts[0], args.experts[1]);
    })};
constexpr ops::Variant<ops::Embedding> kWritesBehind[] = {planted<ops::Embedding>(
    "writes_behind", [](const ops::Embedding::Desc& desc, const ops::Embedding::Args& args, device::Queue& queue) {
      ops::embedding_reference(desc, args, queue);
      args.out.as<uint8_t>()[args.out.num_bytes()] = 0;
    })};
constexpr ops::Variant<ops::MoeCombine> kWritesAnInput[] = {planted<ops::MoeCombine>(
    "writes_an_input", [](const ops::MoeCombine::Desc& desc, const ops::MoeCombine::Args& args, device::Queue& queue) {
      ops::moe_combine_reference(desc, args, queue);
      args.shared.as<uint8_t>()[0] ^= 1;
    })};
constexpr ops::Variant<ops::StreamAdd> kThrows[] = {
    planted<ops::StreamAdd>("throws", [](const ops::StreamAdd::Desc&, const ops::StreamAdd::Args&, device::Queue&) {
      fail(ErrorCode::kInternal, "a planted error");
    })};
// The lowest bit of an FP32 output, and only with many tokens: within the bound, but not what few of them give.
constexpr ops::Variant<ops::Linear> kOtherBitsWithMany[] = {
    {"other_bits_with_many",
     [](const ops::Linear::Desc& desc, std::string& why_not) {
       return desc.output == DType::kF32 && ops::linear_reference_supports(desc, why_not);
     },
     nullptr, ops::linear_reference_workspace,
     [](const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue) {
       ops::linear_reference(desc, args, queue);
       if (args.num_tokens > 100) args.y.as<uint32_t>()[desc.groups * desc.out] ^= 1;
     }}};
// The first token's h has one of its block scales one step off: as much as w2's scales of those columns would be.
void run_with_another_scale(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args,
                            device::Queue& queue) {
  ops::moe_experts_reference(desc, args, queue);
  if (desc.inner < 100) return;  // where there are few blocks others notice
  constexpr int64_t kBlock = 16, kOff = 1;
  constexpr uint8_t kMost = 0x7E;  // of E4M3
  std::vector<ops::WeightView> w2(args.w2, args.w2 + desc.num_local);
  std::vector<std::vector<uint8_t>> scales;
  for (ops::WeightView& weight : w2) {
    const auto* from = static_cast<const uint8_t*>(weight.block_scales);
    scales.emplace_back(from, from + weight.scale_bytes());
    for (int64_t row = 0; row < weight.rows; ++row) {
      uint8_t& scale = scales.back()[static_cast<size_t>(row * (weight.cols / kBlock) + kOff)];
      scale = scale == kMost ? kMost - 1 : scale ^ 1;
    }
    weight.block_scales = scales.back().data();
  }
  ops::MoeExperts::Args first = args;
  first.w2 = w2.data(), first.num_tokens = 1;
  ops::moe_experts_reference(desc, first, queue);
}
constexpr ops::Variant<ops::MoeExperts> kAnotherScale[] = {
    {"another_scale",
     [](const ops::MoeExperts::Desc& desc, std::string& why_not) {
       return desc.input == ops::InputMode::kA4 && ops::moe_experts_reference_supports(desc, why_not);
     },
     nullptr, ops::moe_experts_reference_workspace, run_with_another_scale}};
constexpr ops::Backend kPlanted = {"planted", [](const device::Machine&, std::string&) { return true; },
                                   ops::Verification::kCompiledOnly,
                                   ops::make_variants(kOneValueOff, kLeavesTheLastRow, kSwapsExperts, kWritesBehind,
                                                      kWritesAnInput, kThrows, kOtherBitsWithMany, kAnotherScale)};

TEST_F(VerifyTest, WrongVariantsAreFoundAndNamed) {
  const ops::Backend* const backends[] = {&kPlanted, &reference_backend()};
  const verify::Report report = run(backends);
  EXPECT_FALSE(report.is_sound());
  const std::pair<std::string, std::string> wanted[] = {
      {"planted.one_value_off", "out: element"},
      {"planted.leaves_the_last_row", "expected"},
      {"planted.swaps_experts", "experts: element 0 has other bits"},
      {"planted.writes_behind", "wrote outside its arrays"},
      {"planted.writes_an_input", "wrote into an input"},
      {"planted.throws", "a planted error"},
      {"planted.other_bits_with_many", "other bits without the others"},
      {"planted.another_scale", "relative error"},
  };
  size_t found = 0;
  for (const verify::Row& row : report.rows) {
    const auto entry =
        std::find_if(std::begin(wanted), std::end(wanted), [&](const auto& pair) { return pair.first == row.variant; });
    if (entry == std::end(wanted)) {
      EXPECT_EQ(row.num_failed, 0) << row.op << " " << row.variant << ": " << row.failures.front().what;
      continue;
    }
    ++found;
    ASSERT_FALSE(row.failures.empty()) << row.variant;
    EXPECT_THAT(row.failures.front().what, HasSubstr(entry->second)) << row.variant;
    EXPECT_THAT(row.failures.front().shape, HasSubstr("token")) << row.variant;
    if (row.variant == "planted.one_value_off" || row.variant == "planted.other_bits_with_many") {
      EXPECT_LT(row.num_failed, row.num_cases) << "other shapes agree";
    }
    if (row.variant ==
        "planted.another_scale") {  // hardly ever more than a rounding may do, but not where all is exact
      const auto is_exact = [](const verify::Failure& failure) {
        return failure.shape.find("one weight a row") != std::string::npos;
      };
      EXPECT_EQ(std::count_if(row.failures.begin(), row.failures.end(), is_exact), 3);
      EXPECT_LT(row.num_failed, row.num_cases / 2);
    }
  }
  EXPECT_EQ(found, std::size(wanted));
}

TEST_F(VerifyTest, ASeedRepeatsARun) {
  const ops::Backend* const backends[] = {&kPlanted, &reference_backend()};
  const verify::Report once = run(backends), again = run(backends);
  ASSERT_EQ(once.rows.size(), again.rows.size());
  for (size_t i = 0; i < once.rows.size(); ++i) {
    ASSERT_EQ(once.rows[i].failures.size(), again.rows[i].failures.size());
    for (size_t j = 0; j < once.rows[i].failures.size(); ++j)
      EXPECT_EQ(once.rows[i].failures[j].what, again.rows[i].failures[j].what);
  }
}

// The bar's total is the number of calls that the report counts, whatever computes.
TEST_F(VerifyTest, ProgressCountsCalls) {
  class Counter final : public ProgressSink {
   public:
    void begin(std::string_view, uint64_t of, std::string_view) override { total = of; }
    void advance(uint64_t amount) override { done += amount; }
    void end() override { has_ended = true; }
    uint64_t total = 0, done = 0;
    bool has_ended = false;
  };
  const ops::Backend* const reference[] = {&reference_backend()};
  for (const std::span<const ops::Backend* const> backends :
       {backends::all_backends(), std::span<const ops::Backend* const>(reference)}) {
    Counter counter;
    const verify::Report report = verify::verify(backends, device::probe_machine(),
                                                 {.seed = seed_, .is_quick = true, .num_threads = 2}, &counter);
    EXPECT_GT(report.num_cases(), 0);
    EXPECT_EQ(counter.total, static_cast<uint64_t>(report.num_cases()));
    EXPECT_EQ(counter.done, counter.total);
    EXPECT_TRUE(counter.has_ended);
  }
}

TEST(Compare, JudgesValuesByTheirRowAndTheWhole) {
  std::vector<float> expected(200, 1000.0f), found(expected);
  for (size_t i = 100; i < 200; ++i) expected[i] = found[i] = 1;
  const auto compare = [&](verify::Rule rule, double bound) {
    device::Tensor a(DType::kBF16, {2, 100}), b(DType::kBF16, {2, 100});
    ops::store_floats(a, 0, 200, found.data());
    ops::store_floats(b, 0, 200, expected.data());
    return verify::compare(a, b, rule, bound);
  };
  EXPECT_EQ(compare(verify::Rule::kBits, 0).what, "");
  found[150] = 1.02f;  // nothing beside the loud row, but too far for a value of its own row
  EXPECT_EQ(compare(verify::Rule::kNorm, verify::kBf16Bound).what, "");
  EXPECT_EQ(compare(verify::Rule::kRows, verify::kBf16Bound).what, "");
  EXPECT_THAT(compare(verify::Rule::kValues, verify::kBf16Bound).what, HasSubstr("value 150"));
  EXPECT_THAT(compare(verify::Rule::kBits, 0).what, HasSubstr("element 150"));
  found[151] = found[152] = found[153] = found[154] = found[155] = found[156] = found[157] = found[158] = 1.05f;
  EXPECT_EQ(compare(verify::Rule::kNorm, verify::kBf16Bound).what, "");
  EXPECT_THAT(compare(verify::Rule::kRows, verify::kBf16Bound).what, HasSubstr("row 1"));
  found[150] = std::nanf("");
  EXPECT_THAT(compare(verify::Rule::kNorm, verify::kBf16Bound).what, HasSubstr("value 150 is nan"));
  expected[150] = std::nanf("");
  EXPECT_EQ(compare(verify::Rule::kNorm, verify::kBf16Bound).what, "") << "the reference left it alone too";
  found[0] = 1020;
  EXPECT_EQ(compare(verify::Rule::kNorm, verify::kBf16Bound).what, "");
  found[1] = found[2] = found[3] = 1100;
  EXPECT_THAT(compare(verify::Rule::kNorm, verify::kBf16Bound).what, HasSubstr("worst at"));
}

}  // namespace
}  // namespace tessera
