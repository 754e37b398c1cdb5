// SPDX-License-Identifier: Apache-2.0
#include "default_model.h"

#include <fmt/format.h>

#include <filesystem>

#include "base/env.h"
#include "base/error.h"

namespace tessera::app {

std::string default_model() {
  if (const auto given = env_value("TESSERA_MODEL")) return *given;
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path installed = program.parent_path().parent_path() / "share/tessera/models/tiny-v4";
  const std::filesystem::path source = std::filesystem::path(TESSERA_SOURCE_MODELS) / "tiny-v4";
  for (const auto& path : {installed, source}) {
    if (std::filesystem::is_directory(path, error)) return path.string();
  }
  fail(ErrorCode::kNotFound,
       fmt::format("no bundled model in {} or {}; name one with --model DIR", installed.string(), source.string()));
}

}  // namespace tessera::app
