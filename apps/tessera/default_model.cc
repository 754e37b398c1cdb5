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
  // In a build folder it is a link to the sources, so that the program holds no path of the machine that built it.
  const std::filesystem::path model = program.parent_path().parent_path() / "share/tessera/models/tiny-v4";
  if (std::filesystem::is_directory(model, error)) return model.string();
  fail(ErrorCode::kNotFound, fmt::format("no bundled model in {}; name one with --model DIR", model.string()));
}

}  // namespace tessera::app
