// SPDX-License-Identifier: Apache-2.0
#include "doctor/tokenizer_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "text/chat/prompt.h"

namespace tessera::doctor {

namespace {

constexpr const char* kKind = "tokenizer";
constexpr const char* kAdvice = "take tokenizer.json from the release that the weights come from";

void check_ids(const text::Tokenizer& tokenizer, const model::Config& config, const std::string& path,
               std::vector<Finding>& findings) {
  const auto fault = [&](std::string evidence) {
    findings.push_back({Severity::kFault, kKind, path, std::move(evidence), kAdvice});
  };
  if (tokenizer.vocab_size() > config.vocab_size) {
    fault(fmt::format("it has {} ids, the weights {}: text can become ids that the model has no embedding for",
                      tokenizer.vocab_size(), config.vocab_size));
  } else if (tokenizer.vocab_size() < config.vocab_size) {
    findings.push_back({Severity::kWarning, kKind, path,
                        fmt::format("it has {} ids, the weights {}: perhaps of an older release",
                                    tokenizer.vocab_size(), config.vocab_size),
                        kAdvice});
  }
  const auto expect = [&](std::string_view token, int64_t id, const char* field) {
    const std::optional<int32_t> found = tokenizer.added_token(token);
    if (!found) {
      fault(fmt::format("expected the token {}, found none", token));
    } else if (*found != id) {
      fault(fmt::format("{} is id {}, config.json's {} is {}", token, *found, field, id));
    }
  };
  expect(text::kBosToken, config.bos_id, "bos_token_id");
  if (!config.eos_ids.empty()) expect(text::kEosToken, config.eos_ids.front(), "eos_token_id");
  int32_t num_empty = 0, num_bytes = 0;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    num_empty += tokenizer.token_bytes(id).empty() ? 1 : 0;
    num_bytes += tokenizer.token_bytes(id).size() == 1 ? 1 : 0;
  }
  if (num_bytes < 256) {
    fault(fmt::format("byte-level BPE needs a token for each of the 256 bytes, found {}", num_bytes));
  }
  if (num_empty > tokenizer.vocab_size() / 100) {
    findings.push_back({Severity::kWarning, kKind, path,
                        fmt::format("{} of {} ids have no token", num_empty, tokenizer.vocab_size()), kAdvice});
  }
  if (tokenizer.num_merges_out_of_order() > 0) {
    findings.push_back({Severity::kWarning, kKind, path,
                        fmt::format("the tokens of {} merges have lower ids than that of the merge before, which "
                                    "training never makes: ids were exchanged",
                                    tokenizer.num_merges_out_of_order()),
                        kAdvice});
  }
  try {
    text::check_chat_tokens(tokenizer, path);
  } catch (const Error& error) {
    findings.push_back({Severity::kFault, "chat-template", path, error.what(),
                        "the tokens of DeepSeek-V4's chat format are missing: this tokenizer is of another model"});
  }
}

}  // namespace

TokenizerReport check_tokenizer(const std::string& directory, const model::Config& config) {
  TokenizerReport report;
  const std::string path = (std::filesystem::path(directory) / "tokenizer.json").string();
  if (!file_exists(path)) {
    report.findings.push_back(
        {Severity::kWarning, kKind, path, "no such file: text can't be read or written", kAdvice});
    return report;
  }
  try {
    report.tokenizer = text::Tokenizer::load(path);
  } catch (const Error& error) {
    report.findings.push_back({Severity::kFault, kKind, path, error.what(), kAdvice});
    return report;
  }
  check_ids(*report.tokenizer, config, path, report.findings);
  return report;
}

std::string builtin_sample() {
  return std::string(text::kBosToken) +
         "In the beginning God created the heaven and the earth. And the earth was without form, and void; and "
         "darkness was upon the face of the deep. And the Spirit of God moved upon the face of the waters. And God "
         "said, Let there be light: and there was light. And God saw the light, that it was good: and God divided the "
         "light from the darkness. And God called the light Day, and the darkness he called Night. And the evening and "
         "the morning were the first day.";
}

}  // namespace tessera::doctor
