// SPDX-License-Identifier: Apache-2.0
#include "text/chat/effort.h"

#include <filesystem>

#include "base/error.h"
#include "base/file.h"

namespace tessera::text {

namespace {

constexpr std::string_view kTextA =
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, "
    "and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n";
constexpr std::string_view kTextB =
    "Reasoning Effort: Beyond maximum \u2014 exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause "
    "rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that "
    "no assumption remains unchecked and no error remains undiscovered.\n\n";
constexpr std::string_view kTextBOpening = "Reasoning Effort: Beyond maximum";

}  // namespace

std::string_view effort_text(Effort effort, EffortTable table) {
  if (table == EffortTable::kPreview && effort == Effort::kLow) {
    fail(ErrorCode::kInvalidArgument, "reasoning effort: expected high or max for a preview release, found low");
  }
  if (effort == Effort::kMax) return table == EffortTable::kPreview ? kTextA : kTextB;
  if (effort == Effort::kHigh && table == EffortTable::kOfficial) return kTextA;
  return "";
}

std::optional<Effort> effort_from_name(std::string_view name) {
  for (const Effort effort : {Effort::kDefault, Effort::kLow, Effort::kHigh, Effort::kMax}) {
    if (name == to_string(effort)) return effort;
  }
  return std::nullopt;
}

std::optional<EffortTable> effort_table_from_name(std::string_view name) {
  for (const EffortTable table : {EffortTable::kPreview, EffortTable::kOfficial}) {
    if (name == to_string(table)) return table;
  }
  return std::nullopt;
}

std::string_view to_string(Effort effort) {
  switch (effort) {
    case Effort::kDefault:
      return "default";
    case Effort::kLow:
      return "low";
    case Effort::kHigh:
      return "high";
    case Effort::kMax:
      return "max";
  }
  return "";
}

std::string_view to_string(EffortTable table) {
  return table == EffortTable::kPreview ? "preview" : "official";
}

std::optional<Effort> effort_from_api_name(std::string_view name, EffortTable table) {
  const bool is_preview = table == EffortTable::kPreview;
  if (name == "minimal" || name == "low") return is_preview ? Effort::kHigh : Effort::kLow;
  if (name == "medium" || name == "high") return Effort::kHigh;
  if (name == "xhigh") return is_preview ? Effort::kMax : Effort::kHigh;
  if (name == "max" || name == "ultra") return Effort::kMax;
  return std::nullopt;
}

EffortTable effort_table_of_model(const std::string& directory) {
  const std::filesystem::path folder(directory);
  const std::string encoder = (folder / "encoding" / "encoding_dsv4.py").string();
  if (file_exists(encoder)) {
    const bool is_official = read_file(encoder, 1 << 20).find(kTextBOpening) != std::string::npos;
    return is_official ? EffortTable::kOfficial : EffortTable::kPreview;
  }
  // "models/X/" names X as "models/X" does.
  const std::string name =
      folder.has_filename() ? folder.filename().string() : folder.parent_path().filename().string();
  const bool is_official = name.find("0731") != std::string::npos || name.find("0813") != std::string::npos;
  return is_official ? EffortTable::kOfficial : EffortTable::kPreview;
}

}  // namespace tessera::text
