// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the doctor says: findings, each with the place, the evidence and what to do, and a verdict over all of them.
#include <string>
#include <vector>

namespace tessera::doctor {

enum class Severity {
  kNote,     // worth knowing, nothing wrong
  kWarning,  // unusual, or damage without effect on the sample
  kFault,    // the checkpoint is wrong
};

struct Finding {
  Severity severity = Severity::kNote;
  std::string kind;      // stable identifier, such as "nibble-order"; docs/doctor.md lists them
  std::string where;     // tensor, file, field, or layer
  std::string evidence;  // what was expected and what was found, with numbers
  std::string advice;    // what to do
};

std::string_view to_string(Severity severity);  // "note", "warning", "fault"

// The findings, with runs of one kind and the same place but for layer and expert numbers made one (the first keeps its
// evidence, and `where` says how many more there are). Faults first, then warnings, then notes.
std::vector<Finding> condensed(const std::vector<Finding>& findings);

bool has_fault(const std::vector<Finding>& findings);

}  // namespace tessera::doctor
