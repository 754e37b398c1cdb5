// SPDX-License-Identifier: Apache-2.0
#include "doctor/check.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>

#include "base/error.h"
#include "checkpoint/tensor_hashes.h"
#include "testing/generated_model.h"
#include "testing/planted_faults.h"
#include "testing/temporary_folder.h"

namespace tessera::doctor {

namespace {

const std::string kTiny = std::string(TESSERA_SOURCE_DIR) + "/models/tiny-v4";

struct Copy {
  testing::TemporaryFolder folder;
  testing::EditableCheckpoint checkpoint = testing::EditableCheckpoint::read(kTiny);
  StructureReport write() {
    checkpoint.write(folder.path());
    return check_structure(folder.path());
  }
};

const Finding* find(const std::vector<Finding>& findings, const std::string& kind) {
  for (const Finding& finding : findings) {
    if (finding.kind == kind) return &finding;
  }
  return nullptr;
}

TEST(Check, SoundModel) {
  const StructureReport structure = check_structure(kTiny);
  EXPECT_TRUE(structure.can_run);
  EXPECT_TRUE(structure.findings.empty());
  EXPECT_TRUE(check_scales(structure, nullptr).empty());
  size_t num_checked = 99;
  EXPECT_TRUE(check_hashes(*structure.checkpoint, nullptr, &num_checked).empty());
  EXPECT_EQ(num_checked, 0u) << "there is no hashes.json";
  EXPECT_THROW(check_structure(kTiny + "-nowhere"), Error);
}

TEST(Check, MissingTensorIsNamed) {
  Copy copy;
  copy.checkpoint.erase("layers.3.ffn.shared_experts.w2.weight_scale");
  const StructureReport structure = copy.write();
  EXPECT_FALSE(structure.can_run);
  const Finding* finding = find(structure.findings, "structure");
  ASSERT_NE(finding, nullptr);
  EXPECT_EQ(finding->where, "layers.3.ffn.shared_experts.w2");
}

TEST(Check, UnknownTensorIsAWarning) {
  Copy copy;
  copy.checkpoint.set("layers.3.surprise", {DType::kU8, {1}, {7}});
  const StructureReport structure = copy.write();
  EXPECT_TRUE(structure.can_run);
  const Finding* finding = find(structure.findings, "unknown-tensor");
  ASSERT_NE(finding, nullptr);
  EXPECT_EQ(finding->severity, Severity::kWarning);
  EXPECT_EQ(finding->where, "layers.3.surprise");
}

TEST(Check, RatioThatTheTensorsContradict) {
  Copy copy;
  std::string& config = copy.checkpoint.file("config.json");
  const std::string from = "\"compress_ratios\": [\n  0,\n  128";
  ASSERT_NE(config.find(from), std::string::npos);
  config.replace(config.find(from), from.size(), "\"compress_ratios\": [\n  0,\n  0");
  const StructureReport structure = copy.write();
  const Finding* finding = find(structure.findings, "config");
  ASSERT_NE(finding, nullptr);
  EXPECT_EQ(finding->where, "config.json: compress_ratios[1]");
  EXPECT_EQ(finding->advice, "set it to 128");
}

TEST(Check, ScaleBands) {
  Copy copy;
  auto& nan = copy.checkpoint.tensor("layers.1.attn.wq_a.weight_scale").bytes;
  nan[5] = 0x7F, nan[6] = 0x90;
  auto& top = copy.checkpoint.tensor("layers.2.attn.wq_a.weight_scale").bytes;
  std::fill(top.begin(), top.begin() + static_cast<int64_t>(top.size() / 4), uint8_t{0x7E});
  auto& clipped = copy.checkpoint.tensor("layers.2.attn.wq_b.weight_scale").bytes;
  std::fill(clipped.begin(), clipped.begin() + static_cast<int64_t>(clipped.size() / 4), uint8_t{0x7E});
  auto& codes = copy.checkpoint.tensor("layers.2.attn.wq_b.weight").bytes;
  for (size_t i = 0; i < codes.size() / 4; ++i) codes[i] = i % 8 < 3 ? 0x7F : codes[i];
  auto& zero = copy.checkpoint.tensor("layers.3.attn.wq_a.weight_scale").bytes;
  std::fill(zero.begin(), zero.begin() + static_cast<int64_t>(zero.size() / 4), uint8_t{0});
  copy.checkpoint.tensor("layers.4.attn.wq_a.weight_scale_2").bytes = {0, 0, 0, 0x80};  // -0
  const std::vector<Finding> findings = check_scales(copy.write(), nullptr);
  ASSERT_EQ(findings.size(), 5u);
  EXPECT_EQ(findings[0].where, "layers.1.attn.wq_a.weight_scale");
  EXPECT_NE(findings[0].evidence.find("element 5"), std::string::npos) << findings[0].evidence;
  EXPECT_NE(findings[0].evidence.find("0x7f"), std::string::npos) << findings[0].evidence;
  EXPECT_NE(findings[1].evidence.find("448"), std::string::npos) << findings[1].evidence;
  EXPECT_NE(findings[1].evidence.find("not clipped"), std::string::npos) << findings[1].evidence;
  EXPECT_EQ(findings[2].where, "layers.2.attn.wq_b.weight_scale");
  EXPECT_NE(findings[2].advice.find("clipped"), std::string::npos) << findings[2].advice;
  EXPECT_NE(findings[3].evidence.find("zero"), std::string::npos) << findings[3].evidence;
  EXPECT_EQ(findings[4].where, "layers.4.attn.wq_a.weight_scale_2");
  EXPECT_EQ(findings[4].severity, Severity::kFault);
}

TEST(Check, SoundLayoutsHaveSoundScales) {
  const std::string data = testing::shared_data();
  if (data.empty()) GTEST_SKIP() << "no shared data";
  for (const auto& item : std::filesystem::directory_iterator(data + "/formats")) {
    if (!item.is_directory()) continue;
    SCOPED_TRACE(item.path().string());
    for (const Finding& finding : check_scales(check_structure(item.path().string()), nullptr)) {
      ADD_FAILURE() << finding.kind << " " << finding.where << ": " << finding.evidence;
    }
  }
}

TEST(Check, Mxfp4BlocksThatNvfp4CannotHold) {
  const std::string data = testing::shared_data();
  if (data.empty()) GTEST_SKIP() << "no shared data";
  const testing::TemporaryFolder folder;
  testing::EditableCheckpoint checkpoint = testing::EditableCheckpoint::read(data + "/formats/official");
  auto& scales = checkpoint.tensor("layers.1.ffn.experts.2.w3.scale").bytes;
  scales[3] = 150;
  checkpoint.write(folder.path());
  const std::vector<Finding> findings = check_scales(check_structure(folder.path()), nullptr);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].kind, "scale-range");
  EXPECT_EQ(findings[0].severity, Severity::kFault);
  EXPECT_NE(findings[0].where.find("layers.1.ffn.experts.2."), std::string::npos) << findings[0].where;
  EXPECT_NE(findings[0].evidence.find(" of "), std::string::npos) << findings[0].evidence;
}

TEST(Check, FileThatMayNotBeRead) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may read everything";
  Copy copy;
  copy.write();
  std::filesystem::permissions(copy.folder.path() + "/model.safetensors", std::filesystem::perms::none);
  const StructureReport structure = check_structure(copy.folder.path());
  ASSERT_EQ(structure.findings.size(), 1u);
  EXPECT_EQ(structure.findings[0].kind, "no-permission");
}

TEST(Check, HashesNameTheTensorThatChanged) {
  Copy copy;
  StructureReport structure = copy.write();
  write_hashes_of(*structure.checkpoint, nullptr);
  size_t num_checked = 0;
  EXPECT_TRUE(check_hashes(*structure.checkpoint, nullptr, &num_checked).empty());
  EXPECT_EQ(num_checked, copy.checkpoint.tensors().size());

  copy.checkpoint.tensor("layers.5.attn.wkv.weight").bytes[1000] ^= 0x10;
  copy.checkpoint.erase("norm.weight");
  copy.checkpoint.set("zzz", {DType::kU8, {1}, {7}});
  structure = copy.write();
  const std::vector<Finding> findings = check_hashes(*structure.checkpoint, nullptr, nullptr);
  ASSERT_EQ(findings.size(), 3u);
  EXPECT_EQ(findings[0].where, "layers.5.attn.wkv.weight");
  EXPECT_EQ(findings[1].where, "norm.weight");
  EXPECT_EQ(findings[2].where, "zzz");
  EXPECT_EQ(findings[2].severity, Severity::kWarning);
}

TEST(Check, DamagedHashesFile) {
  Copy copy;
  const StructureReport structure = copy.write();
  copy.folder.write("hashes.json", "{\"algorithm\": \"md5\", \"tensors\": {}}");
  const std::vector<Finding> findings = check_hashes(*structure.checkpoint, nullptr, nullptr);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].kind, "hash");
  EXPECT_EQ(findings[0].severity, Severity::kFault);
}

}  // namespace

}  // namespace tessera::doctor
