// SPDX-License-Identifier: Apache-2.0
// GPUs that are not there: machines made of files, a made driver library, and every diagnosis from made facts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <random>

#include "device/gpu_diagnosis.h"
#include "device/gpu_facts.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"

namespace tessera::device {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// ---- files

struct MadeMachine {
  testing::TemporaryFolder folder;
  void write(const std::string& path, const std::string& content) const {
    fs::create_directories(fs::path(folder.file(path)).parent_path());
    folder.write(path, content);
  }
  void link(const std::string& path, const std::string& target) const {
    fs::create_directories(fs::path(folder.file(path)).parent_path());
    fs::create_symlink(target, folder.file(path));
  }
  void add_pci(const std::string& address, const std::string& kind, const std::string& driver) const {
    write("sys/bus/pci/devices/" + address + "/vendor", "0x10de\n");
    write("sys/bus/pci/devices/" + address + "/class", kind + "\n");
    if (!driver.empty()) link("sys/bus/pci/devices/" + address + "/driver", "../../../bus/pci/drivers/" + driver);
  }
  GpuFiles read(const std::vector<std::string>& folders = {}) const { return read_gpu_files(folder.path(), folders); }
};

TEST(GpuFiles, NothingOnAnEmptyMachine) {
  const GpuFiles files = MadeMachine().read();
  EXPECT_EQ(files.num_pci_gpus, 0);
  EXPECT_EQ(files.module_version, "");
  EXPECT_EQ(files.num_gpu_nodes, 0);
  EXPECT_FALSE(files.is_container);
  EXPECT_TRUE(files.cuda_libraries.empty());
  EXPECT_EQ(read_gpu_files("/no/such/folder", {}).num_gpu_nodes, 0);
}

TEST(GpuFiles, AWholeMachineIsRead) {
  MadeMachine machine;
  machine.add_pci("0000:19:00.0", "0x030200", "nvidia");
  machine.add_pci("0000:3b:00.0", "0x030000", "");
  machine.add_pci("0000:07:00.0", "0x068000", "nvidia-nvswitch");
  machine.add_pci("0000:19:00.1", "0x040300", "snd_hda_intel");
  machine.write("sys/bus/pci/devices/0000:00:1f.0/vendor", "0x8086\n");
  machine.write(
      "proc/driver/nvidia/version",
      "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (builder@host)  Tue\n"
      "GCC version:  gcc version 12.2.0\n");
  machine.write("proc/driver/nvidia/gpus/0000:19:00.0/information", "Model: made\n");
  machine.write("proc/driver/nvidia/gpus/0000:3b:00.0/information", "Model: made\n");
  for (const char* node : {"nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"})
    machine.write(std::string("dev/") + node, "");
  const GpuFiles files = machine.read();
  EXPECT_EQ(files.num_pci_gpus, 2);
  EXPECT_EQ(files.num_pci_switches, 1);
  EXPECT_THAT(files.pci_drivers, ElementsAre("nvidia", ""));
  EXPECT_EQ(files.module_version, "580.95.05");
  EXPECT_EQ(files.num_driver_gpus, 2);
  EXPECT_EQ(files.num_gpu_nodes, 2);
  EXPECT_TRUE(files.has_control_node);
  EXPECT_TRUE(files.has_memory_node);
  EXPECT_TRUE(files.closed_nodes.empty());
  EXPECT_FALSE(files.is_container);
  machine.write("proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n");
  EXPECT_EQ(machine.read().module_version, "550.54.15");
  machine.write("proc/driver/nvidia/version", std::string(100000, ' ') + "\x00\xff nonsense");
  EXPECT_EQ(machine.read().module_version, "");
}

TEST(GpuFiles, ContainersAreSeen) {
  MadeMachine docker, podman, pod, host;
  docker.write(".dockerenv", "");
  podman.write("run/.containerenv", "");
  pod.write("proc/1/cgroup", "0::/\n1:name=x:/kubepods/besteffort/pod1\n");
  host.write("proc/1/cgroup", "0::/init.scope\n");
  EXPECT_TRUE(docker.read().is_container);
  EXPECT_TRUE(podman.read().is_container);
  EXPECT_TRUE(pod.read().is_container);
  EXPECT_FALSE(host.read().is_container);
}

TEST(GpuFiles, ClosedNodesAreNamed) {
  MadeMachine machine;
  machine.link("dev/nvidia0", "nothing");  // even root can't open it
  machine.write("dev/nvidia1", "");
  EXPECT_THAT(machine.read().closed_nodes, ElementsAre("/dev/nvidia0"));
}

TEST(GpuFiles, LibrariesAreFoundOnce) {
  MadeMachine machine;
  machine.write("usr/local/cuda-12.4/lib64/libcudart.so.12", "");
  machine.write("usr/local/cuda-12.4/lib64/libcudart.so.12.4.99", "");
  machine.write("usr/local/cuda-13.0/lib64/libcublas.so.13", "");
  machine.write("opt/other/libnvrtc.so.11", "");
  machine.link("usr/local/cuda", "cuda-13.0");
  EXPECT_THAT(machine.read({"/opt/other", "/opt/other", "/opt/none"}).cuda_libraries,
              ElementsAre("/usr/local/cuda/lib64/libcublas.so.13", "/usr/local/cuda-12.4/lib64/libcudart.so.12",
                          "/opt/other/libnvrtc.so.11"));
}

// ---- calls

struct Setting {
  Setting(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Setting() { unsetenv(name_); }
  const char* name_;
};

TEST(GpuDriver, AMissingLibraryIsAFact) {
  EXPECT_THAT(ask_cuda_driver("libno-such-driver.so.1").open_error, HasSubstr("libno-such-driver"));
  EXPECT_THAT(ask_nvml("libno-such-driver.so.1").open_error, HasSubstr("libno-such-driver"));
}

TEST(GpuDriver, ALibraryWithoutTheFunctionsIsAFact) {
  const CudaDriverFacts facts = ask_cuda_driver("libm.so.6");
  EXPECT_EQ(facts.open_error, "");
  EXPECT_NE(facts.init_code, 0);
  EXPECT_NE(ask_nvml("libm.so.6").init_code, 0);
}

TEST(GpuDriver, DevicesAndPeersAreAsked) {
  const CudaDriverFacts facts = ask_cuda_driver(FAKE_DRIVER);
  EXPECT_EQ(facts.open_error, "");
  EXPECT_EQ(facts.library_version, "580.95.05") << facts.library_path;
  EXPECT_EQ(facts.init_code, 0);
  EXPECT_EQ(facts.cuda_version, 13000);
  ASSERT_EQ(facts.devices.size(), 2u);
  EXPECT_EQ(facts.devices[0].name, "Made GPU A");
  EXPECT_EQ(facts.devices[1].memory_bytes, uint64_t{11} << 30);
  EXPECT_EQ(facts.devices[0].compute_major, 9);
  EXPECT_EQ(facts.devices[0].compute_minor, 1);
  EXPECT_THAT(facts.pairs_without_peer_access, ElementsAre(std::pair(1, 0)));
}

TEST(GpuDriver, FailuresAreCodes) {
  const Setting not_ready("FAKE_CUDA_INIT", "802"), mismatch("FAKE_NVML_INIT", "18");
  const CudaDriverFacts facts = ask_cuda_driver(FAKE_DRIVER);
  EXPECT_EQ(facts.init_code, 802);
  EXPECT_TRUE(facts.devices.empty());
  EXPECT_EQ(ask_nvml(FAKE_DRIVER).init_code, 18);
}

TEST(GpuDriver, FabricStatesAreAsked) {
  const Setting waiting("FAKE_FABRIC", "2");
  const NvmlFacts facts = ask_nvml(FAKE_DRIVER);
  EXPECT_EQ(facts.driver_version, "580.95.05");
  EXPECT_THAT(facts.fabric_states, ElementsAre(FabricState::kInProgress, FabricState::kInProgress));
}

// ---- diagnoses

// A machine of 8 GPUs with NVSwitches on which all is well.
GpuFacts healthy() {
  GpuFacts facts;
  facts.files.num_pci_gpus = facts.files.num_driver_gpus = facts.files.num_gpu_nodes = 8;
  facts.files.num_pci_switches = 4;
  facts.files.pci_drivers.assign(8, "nvidia");
  facts.files.module_version = "580.95.05";
  facts.files.has_control_node = facts.files.has_memory_node = true;
  facts.files.cuda_libraries = {"/usr/local/cuda-13.0/lib64/libcudart.so.13"};
  facts.cuda.library_path = "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05";
  facts.cuda.library_version = "580.95.05";
  facts.cuda.cuda_version = 13000;
  facts.cuda.devices.assign(8, {"GPU", 9, 0, uint64_t{141} << 30});
  facts.nvml.driver_version = "580.95.05";
  facts.nvml.fabric_states.assign(8, FabricState::kCompleted);
  return facts;
}

// The one diagnosis of these facts; its texts are lines.
GpuDiagnosis only(const GpuFacts& facts) {
  const std::vector<GpuDiagnosis> all = diagnose_gpus(facts);
  EXPECT_EQ(all.size(), 1u);
  for (const GpuDiagnosis& one : all) {
    EXPECT_FALSE(one.finding.empty() || one.advice.empty());
    EXPECT_EQ((one.finding + one.advice).find('\n'), std::string::npos);
    if (all.size() > 1) ADD_FAILURE() << one.finding;
  }
  return all.empty() ? GpuDiagnosis{} : all[0];
}

void expect_problem(const GpuFacts& facts, const std::string& finding, const std::string& advice) {
  const GpuDiagnosis one = only(facts);
  EXPECT_EQ(one.weight, GpuDiagnosis::Weight::kProblem);
  EXPECT_THAT(one.finding, HasSubstr(finding));
  EXPECT_THAT(one.advice, HasSubstr(advice));
}

void expect_warning(const GpuFacts& facts, const std::string& finding, const std::string& advice) {
  const GpuDiagnosis one = only(facts);
  EXPECT_EQ(one.weight, GpuDiagnosis::Weight::kWarning);
  EXPECT_THAT(one.finding, HasSubstr(finding));
  EXPECT_THAT(one.advice, HasSubstr(advice));
}

// Driver facts of a machine on which libcuda is not to be found.
GpuFacts without_libraries(GpuFacts facts) {
  facts.cuda = {};
  facts.nvml = {};
  facts.cuda.open_error = facts.nvml.open_error = "libcuda.so.1: cannot open shared object file";
  return facts;
}

TEST(GpuDiagnosis, NothingToSay) {
  EXPECT_TRUE(diagnose_gpus(healthy()).empty());
  EXPECT_TRUE(diagnose_gpus(without_libraries({})).empty()) << "no GPU";
}

TEST(GpuDiagnosis, NoKernelDriver) {
  GpuFacts facts = without_libraries({});
  facts.files.num_pci_gpus = 2;
  facts.files.pci_drivers = {"", ""};
  expect_problem(facts, "no NVIDIA kernel module", "modprobe nvidia");
  facts.files.pci_drivers = {"nouveau", ""};
  expect_problem(facts, "nouveau", "580");
  facts.files.pci_drivers = {"vfio-pci", "vfio-pci"};
  expect_problem(facts, "virtual machines", "nvidia driver");
  facts.files.pci_drivers = {"", ""};
  facts.files.is_container = true;
  expect_problem(facts, "no NVIDIA kernel module", "on the host");
}

TEST(GpuDiagnosis, ContainerWithoutGpuAccess) {
  GpuFacts facts = without_libraries(healthy());
  facts.files.num_gpu_nodes = 0;
  facts.files.has_control_node = facts.files.has_memory_node = false;
  facts.files.is_container = true;
  expect_problem(facts, "this container has no access to GPUs", "--gpus all");
  facts.files.is_container = false;
  expect_problem(facts, "/dev/nvidia0", "nvidia-modprobe");
}

TEST(GpuDiagnosis, MissingAndClosedNodes) {
  GpuFacts facts = healthy();
  facts.files.has_memory_node = false;
  expect_problem(facts, "/dev/nvidia-uvm", "nvidia-modprobe -u");
  facts = healthy();
  facts.files.closed_nodes = {"/dev/nvidia0", "/dev/nvidiactl"};
  expect_problem(facts, "/dev/nvidia0, /dev/nvidiactl", "group");
  facts = healthy();
  facts.files.num_gpu_nodes = 3;
  facts.files.is_container = true;
  expect_warning(facts, "only 3 of the machine's 8", "--gpus all");
}

TEST(GpuDiagnosis, NoDriverLibrary) {
  GpuFacts facts = without_libraries(healthy());
  expect_problem(facts, "libcuda.so.1", "libcuda1");
  facts.files.is_container = true;
  expect_problem(facts, "libcuda.so.1", "NVIDIA_DRIVER_CAPABILITIES");
}

TEST(GpuDiagnosis, DriverAndLibraryDoNotMatch) {
  GpuFacts facts = healthy();
  facts.cuda.library_version = "575.57.08";
  facts.cuda.init_code = 803;
  facts.nvml.init_code = 18;
  expect_problem(facts, "kernel module 580.95.05, libcuda 575.57.08", "reboot");
  facts.cuda.init_code = 0;  // seen before anything fails
  facts.nvml.init_code = 0;
  expect_problem(facts, "575.57.08", "reboot");
  facts = healthy();
  facts.nvml.init_code = 18;
  expect_problem(facts, "do not match", "reboot");
  facts.files.is_container = true;
  expect_problem(facts, "do not match", "start the container again");
}

TEST(GpuDiagnosis, CompatibilityLibrary) {
  GpuFacts facts = healthy();
  facts.cuda.library_path = "/usr/local/cuda-13.1/compat/libcuda.so.590.44.01";
  facts.cuda.library_version = "590.44.01";
  EXPECT_TRUE(diagnose_gpus(facts).empty()) << "newer on purpose";
  facts.cuda.init_code = 804;
  expect_problem(facts, "/usr/local/cuda-13.1/compat", "LD_LIBRARY_PATH");
}

TEST(GpuDiagnosis, OldDriver) {
  GpuFacts facts = healthy();
  facts.files.module_version = facts.cuda.library_version = facts.nvml.driver_version = "550.54.15";
  facts.cuda.cuda_version = 12040;
  expect_problem(facts, "driver 550.54.15 speaks CUDA 12.4", "580");
}

TEST(GpuDiagnosis, FabricManager) {
  GpuFacts facts = healthy();
  facts.cuda.init_code = 802;
  facts.nvml.fabric_states.assign(8, FabricState::kNotStarted);
  expect_problem(facts, "CUDA error 802", "systemctl start nvidia-fabricmanager");
  EXPECT_THAT(only(facts).advice, HasSubstr("580.95.05"));
  facts.nvml.fabric_states.clear();  // an old NVML does not tell
  expect_problem(facts, "the fabric manager is not running", "nvidia-fabricmanager");
  facts.files.is_container = true;
  expect_problem(facts, "CUDA error 802", "on the host");
  facts.nvml.fabric_states.assign(8, FabricState::kInProgress);
  expect_problem(facts, "still setting it up", "wait");
  facts.cuda.init_code = 0;
  facts.nvml.fabric_states.assign(8, FabricState::kNotStarted);
  expect_warning(facts, "not running", "nvidia-fabricmanager");
  facts.nvml.fabric_states.assign(8, FabricState::kNotSupported);
  EXPECT_TRUE(diagnose_gpus(facts).empty()) << "GPUs without a fabric";
}

TEST(GpuDiagnosis, OtherFailuresOfCuda) {
  GpuFacts facts = healthy();
  facts.cuda.devices.clear();
  facts.cuda.init_code = 100;
  expect_problem(facts, "error 100", "CUDA_VISIBLE_DEVICES");
  facts.cuda.init_code = 999;
  expect_problem(facts, "error 999", "Xid");
}

TEST(GpuDiagnosis, PeerAccess) {
  GpuFacts facts = healthy();
  facts.cuda.pairs_without_peer_access = {{0, 7}, {7, 0}};
  expect_warning(facts, "2 of 56 pairs of GPUs can't reach each other's memory: 0->7 7->0", "topo -p2p");
  facts.cuda.devices.resize(2);
  facts.cuda.pairs_without_peer_access = {{0, 1}, {1, 0}};
  expect_warning(facts, "none of the 2 GPUs", "IOMMU");
}

TEST(GpuDiagnosis, TwoReleasesOfCuda) {
  GpuFacts facts = healthy();
  facts.files.cuda_libraries = {"/usr/lib/x86_64-linux-gnu/libcudart.so.12",
                                "/usr/local/cuda-13.0/lib64/libcudart.so.13",
                                "/usr/local/cuda-12.4/lib64/libcublas.so.12"};
  expect_warning(facts,
                 "CUDA 12 libraries beside 13: /usr/lib/x86_64-linux-gnu/libcudart.so.12, "
                 "/usr/local/cuda-13.0/lib64/libcudart.so.13",
                 "CUDA 13 alone");
  facts.files.cuda_libraries = {"/a/libnvrtc.so.13", "/b/libcudart.so.13"};
  EXPECT_TRUE(diagnose_gpus(facts).empty());
}

// Problems come before warnings, and no made-up machine makes it throw.
TEST(GpuDiagnosis, AnyFactsGiveWholeLines) {
  const unsigned seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto flip = [&] { return random() % 2 == 0; };
  for (int i = 0; i < 2000; ++i) {
    GpuFacts facts = healthy();
    facts.files.num_pci_gpus = static_cast<int>(random() % 3);
    facts.files.pci_drivers.assign(static_cast<size_t>(facts.files.num_pci_gpus), flip() ? "nouveau" : "");
    facts.files.num_gpu_nodes = static_cast<int>(random() % 3);
    facts.files.has_control_node = flip(), facts.files.has_memory_node = flip(), facts.files.is_container = flip();
    if (flip()) facts.files.module_version.clear();
    if (flip()) facts.cuda.library_version = "575.1";
    if (flip()) facts.cuda.open_error = "none";
    facts.cuda.init_code = std::vector{0, 100, 802, 803, 804, 999, -1}[random() % 7];
    facts.cuda.cuda_version = std::vector{0, 12040, 13000}[random() % 3];
    facts.nvml.fabric_states.assign(random() % 3, static_cast<FabricState>(random() % 4));
    if (flip()) facts.cuda.pairs_without_peer_access.assign(random() % 20, {0, 1});
    const std::vector<GpuDiagnosis> all = diagnose_gpus(facts);
    for (size_t at = 0; at < all.size(); ++at) {
      EXPECT_FALSE(all[at].finding.empty() || all[at].advice.empty());
      EXPECT_EQ((all[at].finding + all[at].advice).find('\n'), std::string::npos);
      if (at > 0) {
        EXPECT_LE(static_cast<int>(all[at - 1].weight), static_cast<int>(all[at].weight));
      }
    }
  }
}

}  // namespace
}  // namespace tessera::device
