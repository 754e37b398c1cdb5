// SPDX-License-Identifier: Apache-2.0
// Calls into libcuda and libnvidia-ml, opened at run time. Their few signatures are stated here, so that nothing of
// CUDA is needed to build. The libraries are never closed: the driver does not expect it.
#include <dlfcn.h>
#include <link.h>

#include <array>
#include <filesystem>

#include "device/gpu_facts.h"

namespace tessera::device {

namespace {

constexpr int kComputeMajor = 75, kComputeMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
constexpr int kMissingFunction = -1;                   // our code where a library lacks a function
constexpr int kMaxDevices = 256;

class Library {
 public:
  explicit Library(const std::string& name) : handle_(dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) {
      const char* why = dlerror();
      error_ = why != nullptr ? why : "unknown";
    }
  }
  const std::string& error() const { return error_; }

  // The file behind the name, links followed.
  std::string path() const {
    link_map* map = nullptr;
    if (dlinfo(handle_, RTLD_DI_LINKMAP, static_cast<void*>(&map)) != 0 || map == nullptr) return "";
    std::error_code error;
    const auto real = std::filesystem::canonical(map->l_name, error);
    return error ? map->l_name : real.string();
  }

  // Calls a function that returns a code; kMissingFunction where there is none of that name.
  template <class... Args>
  int call(const char* function, Args... args) const {
    void* address = dlsym(handle_, function);
    if (address == nullptr) return kMissingFunction;
    return reinterpret_cast<int (*)(Args...)>(address)(args...);
  }

 private:
  void* handle_;
  std::string error_;
};

// "580.95.05" of ".../libcuda.so.580.95.05"; nothing for "libcuda.so.1".
std::string version_in_name(const std::string& path) {
  const size_t at = path.rfind(".so.");
  if (at == std::string::npos) return "";
  const std::string version = path.substr(at + 4);
  return version.find('.') == std::string::npos ? "" : version;
}

// nvmlGpuFabricInfo_t.
struct FabricInfo {
  std::array<unsigned char, 16> cluster_uuid{};
  int status = 0;
  unsigned clique_id = 0;
  unsigned char state = 0;
};

}  // namespace

CudaDriverFacts ask_cuda_driver(const std::string& name) {
  CudaDriverFacts facts;
  const Library library(name);
  facts.open_error = library.error();
  if (!facts.open_error.empty()) return facts;
  facts.library_path = library.path();
  facts.library_version = version_in_name(facts.library_path);
  if (library.call("cuDriverGetVersion", &facts.cuda_version) != 0) facts.cuda_version = 0;
  facts.init_code = library.call("cuInit", 0u);
  int count = 0;
  if (facts.init_code != 0 || library.call("cuDeviceGetCount", &count) != 0) return facts;
  std::vector<int> handles;
  for (int i = 0; i < std::min(count, kMaxDevices); ++i) {
    int handle = 0;
    std::array<char, 256> text{};
    size_t bytes = 0;
    GpuDevice device;
    if (library.call("cuDeviceGet", &handle, i) != 0) continue;
    if (library.call("cuDeviceGetName", text.data(), static_cast<int>(text.size() - 1), handle) == 0)
      device.name = text.data();
    if (library.call("cuDeviceTotalMem_v2", &bytes, handle) == 0) device.memory_bytes = bytes;
    library.call("cuDeviceGetAttribute", &device.compute_major, kComputeMajor, handle);
    library.call("cuDeviceGetAttribute", &device.compute_minor, kComputeMinor, handle);
    facts.devices.push_back(std::move(device));
    handles.push_back(handle);
  }
  for (size_t a = 0; a < handles.size(); ++a) {
    for (size_t b = 0; b < handles.size(); ++b) {
      int can_access = 0;
      if (a == b || library.call("cuDeviceCanAccessPeer", &can_access, handles[a], handles[b]) != 0) continue;
      if (can_access == 0) facts.pairs_without_peer_access.emplace_back(static_cast<int>(a), static_cast<int>(b));
    }
  }
  return facts;
}

NvmlFacts ask_nvml(const std::string& name) {
  NvmlFacts facts;
  const Library library(name);
  facts.open_error = library.error();
  if (!facts.open_error.empty()) return facts;
  facts.init_code = library.call("nvmlInit_v2");
  if (facts.init_code != 0) return facts;
  std::array<char, 96> version{};
  if (library.call("nvmlSystemGetDriverVersion", version.data(), static_cast<unsigned>(version.size() - 1)) == 0)
    facts.driver_version = version.data();
  unsigned count = 0;
  if (library.call("nvmlDeviceGetCount_v2", &count) != 0) count = 0;
  for (unsigned i = 0; i < std::min<unsigned>(count, kMaxDevices); ++i) {
    void* device = nullptr;
    FabricInfo info;
    if (library.call("nvmlDeviceGetHandleByIndex_v2", i, &device) != 0) continue;
    if (library.call("nvmlDeviceGetGpuFabricInfo", device, &info) != 0 || info.state > 3) continue;
    facts.fabric_states.push_back(static_cast<FabricState>(info.state));
  }
  library.call("nvmlShutdown");
  return facts;
}

GpuFacts probe_gpus(const std::optional<std::string>& library_path) {
  std::vector<std::string> folders;
  const std::string path = library_path.value_or("");
  for (size_t begin = 0; begin < path.size();) {
    const size_t end = std::min(path.find(':', begin), path.size());
    if (end > begin) folders.push_back(path.substr(begin, end - begin));
    begin = end + 1;
  }
  return {read_gpu_files("/", folders), ask_cuda_driver("libcuda.so.1"), ask_nvml("libnvidia-ml.so.1")};
}

}  // namespace tessera::device
