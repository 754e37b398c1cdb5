// SPDX-License-Identifier: Apache-2.0
// Every planted fault must be found and named: the right kind, the right place, and nothing else called wrong.
#include <gtest/gtest.h>

#include <algorithm>

#include "backends/registry.h"
#include "doctor/deep_check.h"
#include "testing/planted_faults.h"
#include "testing/temporary_folder.h"
#include "testing/test_machine.h"

namespace tessera::doctor {

namespace {

const std::string kTiny = std::string(TESSERA_SOURCE_DIR) + "/models/tiny-v4";

std::string listing(const DeepReport& report) {
  std::string text = report.verdict + "\n";
  for (const Finding& finding : report.findings) {
    text += std::string(to_string(finding.severity)) + " " + finding.kind + " " + finding.where + ": " +
            finding.evidence + "\n";
  }
  return text;
}

class FaultTable : public ::testing::TestWithParam<size_t> {};

TEST_P(FaultTable, FoundAndNamed) {
  const testing::PlantedFault fault = testing::planted_faults().at(GetParam());
  SCOPED_TRACE(fault.name);
  const testing::TemporaryFolder folder;
  testing::EditableCheckpoint checkpoint = testing::EditableCheckpoint::read(kTiny);
  fault.plant(checkpoint);
  checkpoint.write(folder.path());
  if (fault.damage) fault.damage(folder.path());

  DeepOptions options;
  options.mode = {ops::InputMode::kF32, ops::CacheMode::kExact};
  options.max_tokens = fault.num_tokens;
  const DeepReport report =
      check_deep(folder.path(), options, backends::all_backends(), testing::test_machine(), nullptr);
  const bool is_named = std::any_of(report.findings.begin(), report.findings.end(), [&](const Finding& finding) {
    return finding.severity == Severity::kFault && finding.kind == fault.kind &&
           finding.where.find(fault.where) != std::string::npos && !finding.advice.empty();
  });
  EXPECT_TRUE(is_named) << listing(report);
  for (const Finding& finding : report.findings) {
    if (finding.severity == Severity::kFault) {
      EXPECT_EQ(finding.kind, fault.kind) << listing(report);
    }
  }
  EXPECT_NE(report.verdict.find("wrong"), std::string::npos) << report.verdict;
  if (report.repaired) {
    EXPECT_LT(*report.repaired, *report.surprise) << listing(report);
  }
}

std::string name_of(const ::testing::TestParamInfo<size_t>& info) {
  std::string name;
  bool starts = true;
  const testing::PlantedFault fault = testing::planted_faults().at(info.param);
  for (const char c : fault.name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) {
      starts = true;
      continue;
    }
    name += starts ? static_cast<char>(std::toupper(c)) : c;
    starts = false;
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Doctor, FaultTable, ::testing::Range<size_t>(0, testing::planted_faults().size()), name_of);

}  // namespace

}  // namespace tessera::doctor
