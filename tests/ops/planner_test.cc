// SPDX-License-Identifier: Apache-2.0
// The planner's choices with backends made for the test.
#include "ops/planner.h"

#include <gtest/gtest.h>

#include <functional>

#include "backends/registry.h"
#include "base/error.h"

namespace tessera::ops {
namespace {

int g_small_calls = 0, g_any_calls = 0;

bool available(const device::Machine&, std::string&) {
  return true;
}
bool unavailable(const device::Machine&, std::string& why_not) {
  why_not = "no such hardware";
  return false;
}
bool small_only(const RmsNorm::Desc& desc, std::string& why_not) {
  why_not = "only widths up to 8";
  return desc.width <= 8;
}
bool any(const RmsNorm::Desc&, std::string&) {
  return true;
}
void run_small(const RmsNorm::Desc&, const RmsNorm::Args&, device::Queue&) {
  ++g_small_calls;
}
void run_any(const RmsNorm::Desc&, const RmsNorm::Args&, device::Queue&) {
  ++g_any_calls;
}

constexpr Variant<RmsNorm> kFast[] = {{"small", small_only, nullptr, nullptr, run_small}};
constexpr Variant<RmsNorm> kPlain[] = {{"any", any, nullptr, nullptr, run_any}};

constexpr AllVariants only(std::span<const Variant<RmsNorm>> list) {
  AllVariants all{};
  std::get<std::span<const Variant<RmsNorm>>>(all.lists) = list;
  return all;
}

constinit const Backend kBackends[] = {{"gone", unavailable, Verification::kCompiledOnly, only(kPlain)},
                                       {"fast", available, Verification::kEmulated, only(kFast)},
                                       {"plain", available, Verification::kRunOnHardware, only(kPlain)}};
const Backend* const kList[] = {&kBackends[0], &kBackends[1], &kBackends[2]};

TEST(Planner, TakesTheFirstThatSupportsAndRemembersWhy) {
  Planner planner(kList, {});
  const auto small = planner.bind<RmsNorm>("a", {.width = 8}), large = planner.bind<RmsNorm>("b", {.width = 9});
  EXPECT_STREQ(small.variant->name, "small");
  EXPECT_STREQ(large.variant->name, "any");
  EXPECT_EQ(planner.lines()[0].chosen, "fast.small");
  ASSERT_EQ(planner.lines()[1].refusals.size(), 1u);
  EXPECT_EQ(planner.lines()[1].refusals[0], "fast.small: only widths up to 8");
  EXPECT_EQ(planner.unavailable()[0], "gone: no such hardware");
}

bool no_dot_products(const device::Machine&, std::string& why_not) {
  why_not = "no dot products";
  return false;
}

TEST(Planner, AVariantMayNeedMoreThanItsBackend) {
  static constexpr Variant<RmsNorm> needy[] = {{"needy", any, nullptr, nullptr, run_small, no_dot_products},
                                               {"any", any, nullptr, nullptr, run_any}};
  static constinit const Backend backend = {"b", available, Verification::kEmulated, make_variants(needy)};
  const Backend* const list[] = {&backend};
  Planner planner(list, {});
  EXPECT_STREQ(planner.bind<RmsNorm>("a", {.width = 8}).variant->name, "any");
  EXPECT_EQ(planner.lines()[0].refusals[0], "b.needy: no dot products");
}

TEST(Planner, OnlyListedBackendsAreUsed) {
  device::Machine machine;
  machine.backends = "plain";
  Planner planner(kList, machine);
  EXPECT_STREQ(planner.bind<RmsNorm>("a", {.width = 8}).variant->name, "any");
  EXPECT_EQ(planner.unavailable()[1], "fast: TESSERA_BACKENDS is plain");
  for (const char* names : {"plain,fsat", "plain,", "Plain"}) {
    machine.backends = names;
    EXPECT_THROW(Planner(kList, machine), Error) << names;
    EXPECT_THROW(unusable_names(kList, machine), Error) << names;
  }
}

TEST(Planner, SaysWhichNamesAreInVain) {
  static constinit const Backend on_gpu = {"gpu", available, Verification::kEmulated, only(kFast), true};
  const Backend* const list[] = {&on_gpu, &kBackends[0], &kBackends[1]};
  device::Machine machine;
  const auto names = [&](const char* listed) {
    machine.backends = listed;
    return unusable_names(list, machine);
  };
  const std::string gone = "TESSERA_BACKENDS names gone, which is not used: no such hardware";
  EXPECT_EQ(names(""), std::vector<std::string>{});
  EXPECT_EQ(names("fast"), std::vector<std::string>{});
  EXPECT_EQ(names("fast,gone"), std::vector<std::string>{gone});
  EXPECT_EQ(names("gpu,fast"), std::vector<std::string>{}) << "a list for both devices";
  EXPECT_EQ(names("gpu,gone").size(), 2u);
  machine.gpu.emplace();
  EXPECT_EQ(names("gpu,fast"), std::vector<std::string>{});
  EXPECT_EQ(names("fast").size(), 1u);
}

TEST(Planner, AForcedVariantRuns) {
  Planner planner(kList, {}, parse_forced("rms_norm=plain.any"));
  const auto bound = planner.bind<RmsNorm>("a", {.width = 2});
  device::Queue queue(1);
  g_small_calls = g_any_calls = 0;
  bound.run({}, queue);
  EXPECT_EQ(g_any_calls, 1);
  EXPECT_EQ(g_small_calls, 0);
}

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Planner, RefusalsAreListed) {
  Planner planner(kList, {}, parse_forced("rms_norm=fast"));
  const std::string message = message_of([&] { planner.bind<RmsNorm>("layers.0.x", {.width = 9}); });
  for (const char* part : {"layers.0.x", "fast.small: only widths up to 8", "plain.any: TESSERA_FORCE asks for fast",
                           "gone: no such hardware"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
}

TEST(Planner, MisspeltForceIsAnError) {
  for (const char* text : {"rms_norm=none", "rmsnorm=plain", "rms_norm=gone", "rms_norm", "=x",
                           "rms_norm=", "rms_norm=plain,rms_norm=fast"}) {
    EXPECT_NE(message_of([&] { Planner(kList, {}, parse_forced(text)); }), "") << text;
  }
}

TEST(Planner, AFusedOpIsOfTheBackendAndVariantOfItsParts) {
  static constexpr Variant<RmsNorm> norms[] = {{"other", small_only, nullptr, nullptr, run_small},
                                               {"simple", any, nullptr, nullptr, run_any}};
  static constexpr Variant<NormRope> fused[] = {
      {"simple", [](const NormRope::Desc&, std::string&) { return true; }, nullptr, nullptr, nullptr}};
  static constinit const Backend both = {"both", available, Verification::kEmulated, make_variants(norms, fused)},
                                 plain = {"plain", available, Verification::kEmulated, only(kPlain)};
  const Backend* const list[] = {&both, &plain};
  Planner planner(list, {});
  const Chosen other = planner.bind<RmsNorm>("a", {.width = 8}).chosen(),
               simple = planner.bind<RmsNorm>("b", {.width = 9}).chosen();
  const auto bind = [](Planner& with, const std::vector<Chosen>& parts) {
    return with.bind_fused<NormRope>("c", {}, parts).is_bound();
  };
  EXPECT_TRUE(bind(planner, {simple, other}));
  EXPECT_EQ(planner.lines().back().chosen, "both.simple");
  const size_t num_lines = planner.lines().size();
  EXPECT_FALSE(bind(planner, {other, simple})) << "the first part has another variant";
  Planner forced(list, {}, parse_forced("rms_norm=plain")), none(list, {}, parse_forced("norm_rope=none"));
  const Chosen slower = forced.bind<RmsNorm>("a", {.width = 8}).chosen();
  EXPECT_FALSE(bind(planner, {simple, slower})) << "another backend computes a part";
  EXPECT_FALSE(bind(planner, {slower}));
  EXPECT_FALSE(bind(none, {simple}));
  EXPECT_EQ(planner.lines().size(), num_lines) << "what is not bound is no line of the plan";
}

TEST(Planner, PartsOfAFusedOpMayBeOfTheBackendThatItsBackendExtends) {
  static constexpr Variant<RmsNorm> norms[] = {{"simple", any, nullptr, nullptr, run_any}},
                                    faster[] = {{"wide", small_only, nullptr, nullptr, run_small}};
  static constexpr auto supports = [](const NormRope::Desc&, std::string&) { return true; };
  static constexpr Variant<NormRope> simple_fused[] = {{"simple", supports, nullptr, nullptr, nullptr}},
                                     wide_fused[] = {{"wide", supports, nullptr, nullptr, nullptr}};
  static constinit const Backend plain = {"plain", available, Verification::kEmulated,
                                          make_variants(norms, simple_fused)},
                                 wider = {.name = "wider",
                                          .available = available,
                                          .verification = Verification::kEmulated,
                                          .variants = make_variants(faster, wide_fused),
                                          .extends = &plain};
  const Backend* const list[] = {&wider, &plain};
  Planner planner(list, {});
  const Chosen wide = planner.bind<RmsNorm>("a", {.width = 8}).chosen(),
               simple = planner.bind<RmsNorm>("b", {.width = 9}).chosen();
  ASSERT_EQ(wide, (Chosen{&wider, "wide"}));
  ASSERT_EQ(simple, (Chosen{&plain, "simple"}));
  const auto bound = [&](const std::vector<Chosen>& parts) {
    return planner.bind_fused<NormRope>("c", {}, parts).is_bound() ? planner.lines().back().chosen : "";
  };
  EXPECT_EQ(bound({wide, simple}), "wider.wide");
  EXPECT_EQ(bound({wide, wide}), "wider.wide");
  EXPECT_EQ(bound({simple, simple}), "plain.simple");
  EXPECT_EQ(bound({simple, wide}), "") << "the slower backend has not the faster one's part";
}

TEST(Registry, ReferenceIsLastAndComputesEveryOp) {
  const auto backends = backends::all_backends();
  ASSERT_FALSE(backends.empty());
  EXPECT_STREQ(backends.back()->name, "ref");
  const bool has_all =
      std::apply([](const auto&... lists) { return (!lists.empty() && ...); }, backends.back()->variants.lists);
  EXPECT_TRUE(has_all);
}

}  // namespace
}  // namespace tessera::ops
