// SPDX-License-Identifier: Apache-2.0
#include "device/control_group.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <vector>

#include "base/strings.h"

namespace tessera::device {

namespace {

// Where a hierarchy is mounted: paths of /proc/self/cgroup begin at `root` of the mount.
struct Mount {
  std::string root, point;
  bool is_unified = false;               // version 2
  std::vector<std::string> controllers;  // version 1
};

bool has(const std::vector<std::string>& list, const std::string& word) {
  return std::find(list.begin(), list.end(), word) != list.end();
}

std::vector<std::string> words(std::string_view text, char separator) {
  std::vector<std::string> all;
  for (const std::string_view word : split(text, separator)) all.emplace_back(word);
  return all;
}

// "\040" is a space (proc(5), mountinfo).
std::string unescaped(const std::string& text) {
  const auto is_octal = [](char c) { return c >= '0' && c <= '7'; };
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size() && std::all_of(&text[i + 1], &text[i + 4], is_octal)) {
      out += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0'));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

// "ID PARENT DEVICE ROOT POINT OPTIONS [TAGS] - TYPE SOURCE OPTIONS", of which the last has the controllers.
std::vector<Mount> group_mounts(const std::string& root) {
  std::vector<Mount> mounts;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> fields = words(line, ' ');
    const size_t dash = static_cast<size_t>(std::find(fields.begin(), fields.end(), "-") - fields.begin());
    if (dash < 6 || dash + 3 >= fields.size() || !fields[dash + 1].starts_with("cgroup")) continue;
    mounts.push_back(
        {unescaped(fields[3]), unescaped(fields[4]), fields[dash + 1] == "cgroup2", words(fields[dash + 3], ',')});
  }
  return mounts;
}

// Folders of the group `path` and of those around it, as far as the mount shows them. A path outside of the mount's
// root (another namespace's) leaves the mount itself.
std::vector<std::string> folders_of(const std::string& root, const Mount& mount, const std::string& path) {
  const std::string base = mount.root == "/" ? "" : mount.root;
  const bool is_inside = path.starts_with(base + "/") && path.find("/../") == std::string::npos;
  std::string rest = is_inside ? path.substr(base.size()) : "";
  std::vector<std::string> folders;
  while (rest.size() > 1) {
    folders.push_back(root + mount.point + rest);
    rest.resize(rest.rfind('/'));
  }
  folders.push_back(root + mount.point);
  return folders;
}

std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // absent or "max"
}

// The value behind `name` in a file of lines "name value".
uint64_t entry_in(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string found;
  for (uint64_t value = 0; file >> found >> value;) {
    if (found == name) return value;
  }
  return 0;
}

void limit_memory(const std::string& folder, bool is_unified, GroupLimits& limits) {
  const auto limit = number_in(folder + (is_unified ? "/memory.max" : "/memory.limit_in_bytes"));
  if (!limit) return;
  const uint64_t used = number_in(folder + (is_unified ? "/memory.current" : "/memory.usage_in_bytes")).value_or(0);
  const uint64_t idle_files = entry_in(folder + "/memory.stat", is_unified ? "inactive_file" : "total_inactive_file");
  const uint64_t held = used > idle_files ? used - idle_files : 0;
  limits.memory_left_bytes = std::min(limits.memory_left_bytes, *limit > held ? *limit - held : 0);
}

// "200000 100000" is two processors' worth of time, "max 100000" or a quota of -1 no limit.
void limit_processors(const std::string& folder, bool is_unified, GroupLimits& limits) {
  double quota = 0, period = 0;
  if (is_unified) {
    std::ifstream(folder + "/cpu.max") >> quota >> period;
  } else {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  if (quota > 0 && period > 0) limits.processors = std::min(limits.processors, quota / period);
}

}  // namespace

GroupLimits read_group_limits(const std::string& root) {
  GroupLimits limits;
  const std::vector<Mount> mounts = group_mounts(root);
  // "4:memory:/path" of version 1, "0::/path" of version 2.
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::vector<std::string> controllers = words(line.substr(first + 1, second - first - 1), ',');
    const bool is_unified = second == first + 1;
    for (const Mount& mount : mounts) {
      const auto is_for = [&](const char* controller) {
        return is_unified == mount.is_unified &&
               (is_unified || (has(controllers, controller) && has(mount.controllers, controller)));
      };
      if (!is_for("memory") && !is_for("cpu")) continue;
      for (const std::string& folder : folders_of(root, mount, line.substr(second + 1))) {
        if (is_for("memory")) limit_memory(folder, is_unified, limits);
        if (is_for("cpu")) limit_processors(folder, is_unified, limits);
      }
    }
  }
  return limits;
}

}  // namespace tessera::device
