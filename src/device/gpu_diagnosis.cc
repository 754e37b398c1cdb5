// SPDX-License-Identifier: Apache-2.0
#include "device/gpu_diagnosis.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

namespace tessera::device {

namespace {

using Weight = GpuDiagnosis::Weight;
using Finding = std::optional<GpuDiagnosis>;

// CUresult and nvmlReturn_t values that have a cause of their own.
constexpr int kCudaNoDevice = 100, kCudaNotReady = 802, kCudaMismatch = 803, kCudaNoForwardCompatibility = 804;
constexpr int kNvmlMismatch = 18;
constexpr int kNeededCuda = 13000;            // what GPU backends are built with
constexpr const char* kNeededDriver = "580";  // the first branch that speaks it
constexpr size_t kMaxListedPairs = 8;

bool has_gpus(const GpuFiles& files) {
  return files.num_pci_gpus > 0 || files.num_driver_gpus > 0 || files.num_gpu_nodes > 0;
}

bool opened(const CudaDriverFacts& cuda) {
  return cuda.open_error.empty();
}

Finding no_kernel_driver(const GpuFacts& facts) {
  const GpuFiles& files = facts.files;
  if (!files.module_version.empty() || files.num_pci_gpus == 0 || files.num_gpu_nodes > 0) return std::nullopt;
  std::set<std::string> others(files.pci_drivers.begin(), files.pci_drivers.end());
  others.erase("");
  if (others.contains("vfio-pci")) {
    return {{Weight::kProblem,
             fmt::format("{} NVIDIA GPUs are reserved for virtual machines (vfio-pci)", files.num_pci_gpus),
             "run inside the virtual machine that has them, or bind them to the nvidia driver"}};
  }
  if (others.contains("nouveau")) {
    return {{Weight::kProblem, "the nouveau driver holds the GPU, and NVIDIA's is not loaded",
             fmt::format("install NVIDIA's driver, {} or newer, which blocks nouveau, and reboot", kNeededDriver)}};
  }
  return {{Weight::kProblem, fmt::format("{} NVIDIA GPUs, but no NVIDIA kernel module is loaded", files.num_pci_gpus),
           files.is_container
               ? "install or load the driver on the host (modprobe nvidia); a container uses the host's"
               : fmt::format("load it (modprobe nvidia; dmesg says why it fails) or install driver {} or newer",
                             kNeededDriver)}};
}

Finding no_device_nodes(const GpuFacts& facts) {
  const GpuFiles& files = facts.files;
  if (files.module_version.empty() || (files.num_gpu_nodes > 0 && files.has_control_node)) return std::nullopt;
  const std::string missing = files.num_gpu_nodes == 0 ? "/dev/nvidia0" : "/dev/nvidiactl";
  if (files.is_container) {
    return {{Weight::kProblem,
             fmt::format("this container has no access to GPUs: driver {} runs on the host, but {} is missing",
                         files.module_version, missing),
             "start the container with GPU access: docker run --gpus all (NVIDIA Container Toolkit), podman run "
             "--device nvidia.com/gpu=all, or nvidia.com/gpu in the pod's limits"}};
  }
  return {{Weight::kProblem,
           fmt::format("driver {} is loaded, but its device file {} is missing", files.module_version, missing),
           "make the device files: run nvidia-modprobe -c 0 -u, or nvidia-smi once as root"}};
}

Finding fewer_device_nodes(const GpuFacts& facts) {
  const GpuFiles& files = facts.files;
  if (files.num_gpu_nodes == 0 || files.num_gpu_nodes >= files.num_driver_gpus) return std::nullopt;
  return {{Weight::kWarning,
           fmt::format("only {} of the machine's {} GPUs are visible here", files.num_gpu_nodes, files.num_driver_gpus),
           files.is_container ? "give the container more of them (--gpus all) if you want them"
                              : "run nvidia-smi once as root to make the missing /dev/nvidiaN"}};
}

Finding closed_nodes(const GpuFacts& facts) {
  if (facts.files.closed_nodes.empty()) return std::nullopt;
  return {{Weight::kProblem, fmt::format("this user can't open {}", fmt::join(facts.files.closed_nodes, ", ")),
           "join the group that owns it (ls -l shows it; usually video or render) and log in again"}};
}

Finding no_memory_node(const GpuFacts& facts) {
  const GpuFiles& files = facts.files;
  if (files.num_gpu_nodes == 0 || files.has_memory_node) return std::nullopt;
  return {{Weight::kProblem, "/dev/nvidia-uvm is missing, which CUDA needs beside /dev/nvidia0",
           files.is_container ? "run nvidia-modprobe -u -c 0 on the host, then start the container again"
                              : "run nvidia-modprobe -u -c 0 as root"}};
}

Finding no_driver_library(const GpuFacts& facts) {
  if (opened(facts.cuda) || facts.files.num_gpu_nodes == 0) return std::nullopt;
  return {
      {Weight::kProblem, fmt::format("the driver's library can't be opened: {}", facts.cuda.open_error),
       facts.files.is_container
           ? "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility, so that libcuda is put into it"
           : "install the driver's user-space part (libcuda1, or the package with libcuda.so.1) of the same version"}};
}

// A compatibility package's libcuda is newer than the kernel module on purpose.
bool is_compatibility_library(const CudaDriverFacts& cuda) {
  return cuda.library_path.find("compat") != std::string::npos;
}

Finding version_mismatch(const GpuFacts& facts) {
  const CudaDriverFacts& cuda = facts.cuda;
  const std::string& module = facts.files.module_version;
  const bool differs = opened(cuda) && !module.empty() && !cuda.library_version.empty() &&
                       cuda.library_version != module && !is_compatibility_library(cuda);
  const bool is_said = (opened(cuda) && cuda.init_code == kCudaMismatch) ||
                       (facts.nvml.open_error.empty() && facts.nvml.init_code == kNvmlMismatch);
  if (!differs && !is_said) return std::nullopt;
  return {{Weight::kProblem,
           fmt::format("driver and library do not match: kernel module {}, libcuda {}",
                       module.empty() ? "of unknown version" : module,
                       cuda.library_version.empty() ? "of unknown version" : cuda.library_version),
           facts.files.is_container
               ? "start the container again, so that it gets the host's libraries; remove any libcuda of its own"
               : "the driver was updated under the running module: reboot, or unload and load the nvidia modules"}};
}

Finding no_forward_compatibility(const GpuFacts& facts) {
  if (!opened(facts.cuda) || facts.cuda.init_code != kCudaNoForwardCompatibility) return std::nullopt;
  return {{Weight::kProblem,
           fmt::format("CUDA error 804: the compatibility library {} does not work with this GPU or driver {}",
                       facts.cuda.library_path, facts.files.module_version),
           "take the cuda compat folder off LD_LIBRARY_PATH and update the driver instead"}};
}

Finding old_driver(const GpuFacts& facts) {
  const int version = facts.cuda.cuda_version;
  if (!opened(facts.cuda) || version == 0 || version >= kNeededCuda) return std::nullopt;
  return {{Weight::kProblem,
           fmt::format("driver {} speaks CUDA {}.{}; programs of CUDA {} fail with error 35",
                       facts.files.module_version.empty() ? facts.nvml.driver_version : facts.files.module_version,
                       version / 1000, version % 1000 / 10, kNeededCuda / 1000),
           fmt::format("update the driver to {} or newer{}", kNeededDriver,
                       facts.files.is_container ? " on the host" : "")}};
}

Finding fabric_not_running(const GpuFacts& facts) {
  const std::vector<FabricState>& states = facts.nvml.fabric_states;
  const auto has = [&](FabricState state) { return std::find(states.begin(), states.end(), state) != states.end(); };
  const bool is_said = opened(facts.cuda) && facts.cuda.init_code == kCudaNotReady;
  const bool is_waiting = has(FabricState::kInProgress);
  if (!is_said && !is_waiting && !has(FabricState::kNotStarted)) return std::nullopt;
  const std::string version = facts.files.module_version.empty() ? "" : ", version " + facts.files.module_version;
  const std::string what =
      is_said ? "CUDA error 802: the NVLink fabric is not ready" : "the NVLink fabric is not ready";
  const Weight weight = is_said ? Weight::kProblem : Weight::kWarning;
  if (is_waiting) {
    return {{weight, what + ": the fabric manager is still setting it up",
             "wait a minute and try again; then see journalctl -u nvidia-fabricmanager"}};
  }
  return {{weight, what + ": the fabric manager is not running",
           fmt::format("start it{}: systemctl start nvidia-fabricmanager (the driver's exact version{})",
                       facts.files.is_container ? " on the host, then start the container again" : "", version)}};
}

Finding no_device(const GpuFacts& facts) {
  if (!opened(facts.cuda) || facts.cuda.init_code != kCudaNoDevice || facts.files.num_gpu_nodes == 0)
    return std::nullopt;
  return {{Weight::kProblem, "CUDA finds no device (error 100) although device files are here",
           "see whether CUDA_VISIBLE_DEVICES hides them (unset it); else dmesg | grep NVRM says why they failed"}};
}

Finding other_failure(const GpuFacts& facts) {
  static const std::set<int> kExplained = {0, kCudaNoDevice, kCudaNotReady, kCudaMismatch, kCudaNoForwardCompatibility};
  if (!opened(facts.cuda) || kExplained.contains(facts.cuda.init_code) || facts.files.num_gpu_nodes == 0)
    return std::nullopt;
  return {{Weight::kProblem, fmt::format("CUDA can't be started: cuInit gives error {}", facts.cuda.init_code),
           "dmesg | grep -e NVRM -e Xid says why; after an Xid error reset the GPU or reboot"}};
}

Finding no_peer_access(const GpuFacts& facts) {
  const auto& pairs = facts.cuda.pairs_without_peer_access;
  if (pairs.empty()) return std::nullopt;
  std::vector<std::string> names;
  for (const auto& [a, b] : pairs) {
    if (names.size() < kMaxListedPairs) names.push_back(fmt::format("{}->{}", a, b));
  }
  const size_t all = facts.cuda.devices.size() * (facts.cuda.devices.size() - 1);
  return {{Weight::kWarning,
           pairs.size() == all
               ? fmt::format("none of the {} GPUs can reach another's memory: copies go through the host",
                             facts.cuda.devices.size())
               : fmt::format("{} of {} pairs of GPUs can't reach each other's memory: {}{}", pairs.size(), all,
                             fmt::join(names, " "), pairs.size() > names.size() ? " ..." : ""),
           "nvidia-smi topo -p2p r shows why: switch off the IOMMU and ACS, give a virtual machine all GPUs of the "
           "board, or use one GPU"}};
}

Finding mixed_cuda_libraries(const GpuFacts& facts) {
  std::map<int, std::string> by_release;  // one example each
  for (const std::string& path : facts.files.cuda_libraries) {
    by_release.try_emplace(std::atoi(path.c_str() + path.rfind('.') + 1), path);
  }
  by_release.erase(by_release.begin(), by_release.lower_bound(12));  // older ones have other names, and no user
  if (by_release.size() < 2) return std::nullopt;
  std::vector<std::string> found;
  for (const auto& [release, path] : by_release) found.push_back(path);
  return {
      {Weight::kWarning,
       fmt::format("CUDA {} libraries beside {}: {}", by_release.begin()->first, by_release.rbegin()->first,
                   fmt::join(found, ", ")),
       fmt::format("let LD_LIBRARY_PATH name the folder of CUDA {} alone: a process that loads both fails in odd ways",
                   by_release.rbegin()->first)}};
}

}  // namespace

std::vector<GpuDiagnosis> diagnose_gpus(const GpuFacts& facts) {
  std::vector<GpuDiagnosis> out;
  if (!has_gpus(facts.files)) return out;
  for (const auto look : {no_kernel_driver, no_device_nodes, closed_nodes, no_memory_node, no_driver_library,
                          version_mismatch, no_forward_compatibility, old_driver, fabric_not_running, no_device,
                          other_failure, fewer_device_nodes, no_peer_access, mixed_cuda_libraries}) {
    if (Finding finding = look(facts)) out.push_back(*std::move(finding));
  }
  std::stable_sort(out.begin(), out.end(),
                   [](const GpuDiagnosis& a, const GpuDiagnosis& b) { return a.weight < b.weight; });
  return out;
}

}  // namespace tessera::device
