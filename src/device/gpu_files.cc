// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "device/gpu_facts.h"

namespace tessera::device {

namespace {

namespace fs = std::filesystem;

constexpr const char* kNvidiaVendor = "0x10de";
constexpr const char* kLibraryFolders[] = {"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64",
                                           "/usr/local/lib", "/usr/local/nvidia/lib64"};
// The libraries whose release a program notices first.
constexpr const char* kRuntimeLibraries[] = {"libcudart.so.", "libcublas.so.", "libnvrtc.so."};

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Entries of a folder in order; none where it can't be read.
std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> out;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) out.push_back(*at);
  std::sort(out.begin(), out.end());
  return out;
}

bool is_number(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// The version in "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue ...": the first word of digits and at
// least one dot.
std::string module_version(const std::string& line) {
  for (size_t begin = line.find_first_not_of(' '); begin != std::string::npos;) {
    const size_t end = std::min(line.find(' ', begin), line.size());
    const std::string word = line.substr(begin, end - begin);
    if (word.find_first_not_of("0123456789.") == std::string::npos && word.find('.') != std::string::npos) return word;
    begin = line.find_first_not_of(' ', end);
  }
  return "";
}

void read_pci(const fs::path& root, GpuFiles& facts) {
  for (const fs::path& device : entries(root / "sys/bus/pci/devices")) {
    if (first_line(device / "vendor") != kNvidiaVendor) continue;
    const std::string kind = first_line(device / "class").substr(0, 6);
    if (kind == "0x0680") ++facts.num_pci_switches;
    if (!kind.starts_with("0x03")) continue;
    ++facts.num_pci_gpus;
    std::error_code error;
    facts.pci_drivers.push_back(fs::read_symlink(device / "driver", error).filename().string());
  }
}

void read_nodes(const fs::path& root, GpuFiles& facts) {
  const auto check = [&](const fs::path& node) {
    if (access(node.c_str(), R_OK | W_OK) != 0) facts.closed_nodes.push_back("/dev/" + node.filename().string());
  };
  for (const fs::path& node : entries(root / "dev")) {
    const std::string name = node.filename().string();
    const bool is_gpu = name.starts_with("nvidia") && is_number(name.substr(6));
    if (is_gpu) ++facts.num_gpu_nodes;
    if (name == "nvidiactl") facts.has_control_node = true;
    if (name == "nvidia-uvm") facts.has_memory_node = true;
    if (is_gpu || name == "nvidiactl" || name == "nvidia-uvm") check(node);
  }
}

bool is_container(const fs::path& root) {
  std::error_code error;
  if (fs::exists(root / ".dockerenv", error) || fs::exists(root / "run/.containerenv", error)) return true;
  std::ifstream groups(root / "proc/1/cgroup");
  for (std::string line; std::getline(groups, line);) {
    for (const char* sign : {"docker", "kubepods", "containerd", "libpod", "lxc"}) {
      if (line.find(sign) != std::string::npos) return true;
    }
  }
  return false;
}

void find_libraries(const fs::path& root, std::span<const std::string> more_folders, GpuFiles& facts) {
  std::vector<std::string> folders(std::begin(kLibraryFolders), std::end(kLibraryFolders));
  for (const fs::path& toolkit : entries(root / "usr/local")) {
    const std::string name = toolkit.filename().string();
    if (name.starts_with("cuda")) folders.push_back("/usr/local/" + name + "/lib64");
  }
  folders.insert(folders.end(), more_folders.begin(), more_folders.end());
  std::vector<fs::path> seen;
  for (const std::string& folder : folders) {
    std::error_code error;
    const fs::path place = fs::weakly_canonical(root / fs::path(folder).relative_path(), error);
    if (error || std::find(seen.begin(), seen.end(), place) != seen.end()) continue;
    seen.push_back(place);
    for (const fs::path& file : entries(place)) {
      const std::string name = file.filename().string();
      for (const std::string_view library : kRuntimeLibraries) {
        if (name.starts_with(library) && is_number(name.substr(library.size())))
          facts.cuda_libraries.push_back((fs::path(folder) / name).string());
      }
    }
  }
}

}  // namespace

GpuFiles read_gpu_files(const std::string& root, std::span<const std::string> library_folders) {
  const fs::path top(root);
  GpuFiles facts;
  read_pci(top, facts);
  facts.module_version = module_version(first_line(top / "proc/driver/nvidia/version"));
  facts.num_driver_gpus = static_cast<int>(entries(top / "proc/driver/nvidia/gpus").size());
  read_nodes(top, facts);
  facts.is_container = is_container(top);
  find_libraries(top, library_folders, facts);
  return facts;
}

}  // namespace tessera::device
