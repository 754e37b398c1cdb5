// SPDX-License-Identifier: Apache-2.0
#pragma once
// A small file that is there whole or not at all.
#include <string>

#include "base/atomic_file.h"

namespace tessera::convert {

// Replaces `path` by `text` in one step. Throws as AtomicFile does.
inline void write_whole(const std::string& path, const std::string& text) {
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

}  // namespace tessera::convert
