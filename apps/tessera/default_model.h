// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the bundled model is.
#include <string>

namespace tessera::app {

// TESSERA_MODEL; else share/tessera/models/tiny-v4 beside the program's folder; else the source tree's. Throws
// kNotFound with the places looked at.
std::string default_model();

}  // namespace tessera::app
