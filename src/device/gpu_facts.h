// SPDX-License-Identifier: Apache-2.0
#pragma once
// What can be found out about NVIDIA GPUs without linking CUDA: files of the kernel and the driver, and calls into the
// driver's libraries where they can be opened. Facts alone; device/gpu_diagnosis.h says what they mean.
// Source: NVIDIA's driver README ("/proc/driver/nvidia"), CUDA Driver API and NVML reference manuals.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera::device {

// What files say. Gathered under a root folder, so that tests can make a machine out of files.
struct GpuFiles {
  int num_pci_gpus = 0;                   // NVIDIA display controllers in /sys/bus/pci/devices
  int num_pci_switches = 0;               // NVIDIA bridges there (NVSwitch)
  std::vector<std::string> pci_drivers;   // kernel driver of each such GPU; empty: none
  std::string module_version;             // of the loaded kernel module, such as "580.95.05"; empty: none
  int num_driver_gpus = 0;                // folders in /proc/driver/nvidia/gpus
  int num_gpu_nodes = 0;                  // /dev/nvidia0, /dev/nvidia1, ...
  bool has_control_node = false;          // /dev/nvidiactl
  bool has_memory_node = false;           // /dev/nvidia-uvm
  std::vector<std::string> closed_nodes;  // of these nodes, those that this user can't open for reading and writing
  bool is_container = false;
  std::vector<std::string>
      cuda_libraries;  // paths of CUDA runtime libraries, "/usr/local/cuda-12.4/lib64/libcudart.so.12"
};

// Looks at `root` ("/" on a real machine) and, for CUDA libraries, at the usual folders under it and `library_folders`
// (absolute, also taken under `root`). What can't be read counts as absent.
GpuFiles read_gpu_files(const std::string& root, std::span<const std::string> library_folders);

struct GpuDevice {
  std::string name;
  int compute_major = 0, compute_minor = 0;
  uint64_t memory_bytes = 0;
  int ordinal = 0;                 // as CUDA counts them
  uint64_t memory_free_bytes = 0;  // only of a GPU that find_gpu() returned
  std::string uuid;                // "GPU-" and 32 hexadecimal digits: no other GPU anywhere has it; likewise
};

// What the CUDA driver library (libcuda) answers. Codes are CUresult values.
struct CudaDriverFacts {
  std::string open_error;       // why the library could not be opened; empty: it was
  std::string library_path;     // symbolic links followed
  std::string library_version;  // from its file name, "580.95.05"; empty where the name has none
  int init_code = 0;            // of cuInit
  int cuda_version = 0;         // 13000 for CUDA 13.0; 0: not known
  std::vector<GpuDevice> devices;
  // Pairs (a, b) with a != b of which a can't reach the memory of b.
  std::vector<std::pair<int, int>> pairs_without_peer_access;
};

// Opens `library` ("libcuda.so.1") and asks. Never throws for what the driver does.
CudaDriverFacts ask_cuda_driver(const std::string& library);

enum class FabricState { kNotSupported = 0, kNotStarted = 1, kInProgress = 2, kCompleted = 3 };

// What the management library (libnvidia-ml) answers. Codes are nvmlReturn_t values.
struct NvmlFacts {
  std::string open_error;  // empty: it was opened
  int init_code = 0;
  std::string driver_version;
  std::vector<FabricState> fabric_states;  // one per GPU that told it
};

NvmlFacts ask_nvml(const std::string& library);

struct GpuFacts {
  GpuFiles files;
  CudaDriverFacts cuda;
  NvmlFacts nvml;
};

// All of this machine. `library_path` is the value of LD_LIBRARY_PATH, where it is set.
GpuFacts probe_gpus(const std::optional<std::string>& library_path);

}  // namespace tessera::device
