// SPDX-License-Identifier: Apache-2.0
#include "record_head.h"

#include <fmt/format.h>

#include <ctime>
#include <fstream>
#include <vector>

#include "base/env.h"
#include "base/strings.h"
#include "commit.h"
#include "device/gpu_facts.h"
#include "device/machine.h"
#include "program_identity.h"

namespace tessera::app {

namespace {

// As it was given, but for the program's folder and for bytes that no JSON holds.
std::vector<std::string> command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(printable(word, 1000));
  if (!words.empty()) words[0] = words[0].substr(words[0].rfind('/') + 1);
  return words;
}

}  // namespace

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02}", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday);
}

nlohmann::ordered_json record_head(std::string_view what, std::string_view device_flag) {
  const device::Machine machine = device::probe_machine();
  nlohmann::ordered_json head = {{"what", what},
                                 {"commit", TESSERA_COMMIT},
                                 {"program", program_identity()},
                                 {"command", command_line()},
                                 {"date", today()},
                                 {"versions", {{"tessera", TESSERA_VERSION}, {"compiler", __VERSION__}}},
                                 {"cpu", machine.cpu_name},
                                 {"cores", machine.num_cores}};
  if (!device_flag.starts_with("cuda")) return head;
  const device::GpuFacts facts = device::probe_gpus(env_value("LD_LIBRARY_PATH"));
  head["driver"] = facts.files.module_version.empty() ? facts.nvml.driver_version : facts.files.module_version;
  head["versions"]["cuda"] = facts.cuda.cuda_version;
  return head;
}

}  // namespace tessera::app
