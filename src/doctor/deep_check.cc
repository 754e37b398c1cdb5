// SPDX-License-Identifier: Apache-2.0
#include "doctor/deep_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "doctor/check.h"
#include "doctor/config_facts.h"
#include "doctor/examination.h"
#include "doctor/kinship.h"
#include "doctor/router_match.h"
#include "doctor/survey.h"
#include "doctor/tokenizer_check.h"
#include "doctor/trial.h"
#include "doctor/verdict.h"

namespace tessera::doctor {

namespace {

using model::Config;
using model::WeightSource;

// Share of the kinship tests that must show kin, or size of the router's measure: what random weights never reach.
constexpr double kTrained = 0.4, kTrainedRouter = 2.5;

std::vector<int32_t> sample_of(const DeepOptions& options, const Config& config, const TokenizerReport& tokenizer,
                               bool& can_judge_text) {
  std::vector<int32_t> ids = options.sample_ids;
  can_judge_text = true;
  if (ids.empty() && tokenizer.tokenizer) {
    ids = tokenizer.tokenizer->encode(options.sample_text.empty() ? builtin_sample() : options.sample_text);
    // A stale tokenizer may know more ids than the weights: reported already, and kept from stopping the run.
    std::erase_if(ids, [&](int32_t id) { return id >= config.vocab_size; });
  }
  if (ids.size() < 2) {
    can_judge_text = false;
    ids.clear();
    for (int64_t t = 0; t < 48; ++t) ids.push_back(static_cast<int32_t>((3 * t * t + 7 * t + 5) % config.vocab_size));
  }
  const size_t limit = static_cast<size_t>(std::max<int64_t>(2, std::min(options.max_tokens, config.max_positions)));
  if (ids.size() > limit) ids.resize(limit);
  return ids;
}

}  // namespace

DeepReport check_deep(const std::string& directory, const DeepOptions& options,
                      std::span<const ops::Backend* const> backends, const device::Machine& machine,
                      ProgressSink* progress) {
  DeepReport report;
  report.mode = fmt::format("{} x {}", to_string(options.mode.input), to_string(options.mode.cache));
  StructureReport structure = check_structure(directory);
  report.findings = std::move(structure.findings);
  if (!structure.can_run) {
    report.verdict = verdict_of(report);
    return report;
  }
  const Config& config = *structure.config;
  report.uniform = std::log(static_cast<double>(config.vocab_size));
  report.num_experts = config.num_experts;
  const TokenizerReport tokenizer = check_tokenizer(directory, config);
  report.findings.insert(report.findings.end(), tokenizer.findings.begin(), tokenizer.findings.end());

  WeightSource weights(*structure.checkpoint, config, 0, model::Shard{}, nullptr, model::Inexact::kRound);
  Survey survey = survey_weights(weights, model::make_weight_spec(config, 0), progress);
  std::vector<Suspect> suspects = std::move(survey.suspects);
  if (!survey.is_readable) {
    for (const Suspect& suspect : suspects) report.findings.push_back(suspect.finding);
    report.verdict = verdict_of(report);
    return report;
  }
  int64_t num_tests = 0, num_kin = 0;
  double routers = 0;
  std::vector<Suspect> unkin;
  const ResidualKin residual = residual_kin(weights);
  if (progress != nullptr) progress->begin("compare weights", static_cast<uint64_t>(config.num_layers), "layers");
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    KinshipReport kin = test_kinship(weights, residual, layer);
    RouterReport router = test_router(weights, layer);
    num_tests += kin.num_tests, num_kin += kin.num_kin;
    routers = std::max(routers, router.typical);
    std::move(kin.suspects.begin(), kin.suspects.end(), std::back_inserter(unkin));
    std::move(router.suspects.begin(), router.suspects.end(), std::back_inserter(unkin));
    if (progress != nullptr) progress->advance(1);
  }
  if (progress != nullptr) progress->end();
  report.can_judge_weights =
      static_cast<double>(num_kin) > kTrained * static_cast<double>(num_tests) || routers > kTrainedRouter;

  // Where nothing is kin, what looks permuted looks so by chance.
  if (report.can_judge_weights) std::move(unkin.begin(), unkin.end(), std::back_inserter(suspects));

  const std::vector<int32_t> ids = sample_of(options, config, tokenizer, report.can_judge_text);
  report.num_tokens = ids.size();
  Examination examination(*structure.checkpoint, config, backends, machine, options, ids);
  examination.set_deviations(survey.matrices);
  examination.run(report, progress);
  examination.try_suspects(std::move(suspects), report);
  examination.try_config(report);
  examination.scan(report, progress);
  examination.explain_surprise(tokenizer.tokenizer ? &*tokenizer.tokenizer : nullptr, report, progress);
  report.verdict = verdict_of(report);
  return report;
}

}  // namespace tessera::doctor
