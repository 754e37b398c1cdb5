// SPDX-License-Identifier: Apache-2.0
#pragma once
// A finding together with the repairs that would undo it, for a trial on the sample.
#include <vector>

#include "doctor/finding.h"
#include "doctor/repair.h"

namespace tessera::doctor {

struct Suspect {
  Finding finding;
  std::vector<Repair> repairs;  // empty: nothing to try
  // The weights alone do not prove it: it becomes a fault only where the repairs make the model predict better.
  bool needs_trial = false;
  Severity if_unproved = Severity::kNote;  // what it is where the sample does not confirm it
};

}  // namespace tessera::doctor
