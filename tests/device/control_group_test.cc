// SPDX-License-Identifier: Apache-2.0
// Limits of control groups, of processes made of files.
#include "device/control_group.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "testing/temporary_folder.h"

namespace tessera::device {
namespace {

constexpr uint64_t kGib = uint64_t{1} << 30;
constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();

class GroupLimitsTest : public ::testing::Test {
 protected:
  void write(const std::string& path, const std::string& content) {
    const std::filesystem::path file = folder_.path() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << content << "\n";
  }
  void write(const std::string& path, uint64_t value) { write(path, std::to_string(value)); }
  GroupLimits limits() { return read_group_limits(folder_.path()); }
  // A process of version 2 in `path`; the mount shows groups from `root` on.
  void unified(const std::string& path, const std::string& root = "/") {
    write("/proc/self/cgroup", "0::" + path);
    write("/proc/self/mountinfo",
          "22 28 0:21 / /sys rw shared:7 - sysfs sysfs rw\n"
          "31 22 0:26 " +
              root + " /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate");
  }

  testing::TemporaryFolder folder_;
};

TEST_F(GroupLimitsTest, NothingIsNoLimit) {
  EXPECT_EQ(limits().memory_left_bytes, kNone);
  EXPECT_TRUE(std::isinf(limits().processors));
  unified("/");
  EXPECT_EQ(limits().memory_left_bytes, kNone);
  write("/sys/fs/cgroup/memory.max", "max");
  write("/sys/fs/cgroup/cpu.max", "max 100000");
  EXPECT_EQ(limits().memory_left_bytes, kNone);
  EXPECT_TRUE(std::isinf(limits().processors));
}

TEST_F(GroupLimitsTest, AContainerSeesItsOwnRoot) {
  unified("/");
  write("/sys/fs/cgroup/memory.max", 8 * kGib);
  write("/sys/fs/cgroup/memory.current", 3 * kGib);
  write("/sys/fs/cgroup/cpu.max", "250000 100000");
  EXPECT_EQ(limits().memory_left_bytes, 5 * kGib);
  EXPECT_EQ(limits().processors, 2.5);
  // What was read from files may go.
  write("/sys/fs/cgroup/memory.stat", "anon 5\ninactive_file " + std::to_string(2 * kGib) + "\nactive_file 7");
  EXPECT_EQ(limits().memory_left_bytes, 7 * kGib);
  write("/sys/fs/cgroup/memory.current", 20 * kGib);
  EXPECT_EQ(limits().memory_left_bytes, 0u);
}

TEST_F(GroupLimitsTest, EveryGroupAroundCounts) {
  unified("/system.slice/job.service/part");
  const std::string slice = "/sys/fs/cgroup/system.slice", job = slice + "/job.service";
  write(job + "/part/memory.max", "max");
  write(job + "/part/memory.current", kGib);
  write(job + "/memory.max", 10 * kGib);
  write(job + "/memory.current", kGib);
  write(job + "/cpu.max", "400000 100000");
  EXPECT_EQ(limits().memory_left_bytes, 9 * kGib);
  EXPECT_EQ(limits().processors, 4);
  write(slice + "/memory.max", 12 * kGib);
  write(slice + "/memory.current", 11 * kGib);
  EXPECT_EQ(limits().memory_left_bytes, kGib) << "others use up what is around";
  // A neighbour, and a name that only begins alike.
  write(slice + "/job.service/other/memory.max", 1);
  write(slice + "/job/memory.max", 1);
  EXPECT_EQ(limits().memory_left_bytes, kGib);
}

// Without a namespace of its own a container has the host's path and a mount that shows its own group only.
TEST_F(GroupLimitsTest, AMountMayShowOneGroup) {
  unified("/docker/abc/inner", "/docker/abc");
  write("/sys/fs/cgroup/memory.max", 4 * kGib);
  write("/sys/fs/cgroup/inner/memory.max", 6 * kGib);
  EXPECT_EQ(limits().memory_left_bytes, 4 * kGib);
  write("/sys/fs/cgroup/inner/memory.max", 2 * kGib);
  EXPECT_EQ(limits().memory_left_bytes, 2 * kGib);
  for (const char* elsewhere : {"/../other", "/docker/abcd", "/docker/abc/../../x"}) {
    unified(elsewhere, "/docker/abc");
    EXPECT_EQ(limits().memory_left_bytes, 4 * kGib) << elsewhere;
  }
}

TEST_F(GroupLimitsTest, VersionOneHasAMountForEachController) {
  write("/proc/self/cgroup", "9:name=systemd:/\n4:memory:/batch/17\n2:cpu,cpuacct:/batch\n0::/ignored");
  write("/proc/self/mountinfo",
        "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 / /groups/of\\040memory rw shared:3 - cgroup cgroup rw,memory\n"
        "broken line -\n");
  const std::string memory = "/groups/of memory";
  write(memory + "/memory.limit_in_bytes", uint64_t{9223372036854771712u});  // as without a limit
  write(memory + "/memory.usage_in_bytes", 30 * kGib);
  write(memory + "/batch/memory.limit_in_bytes", 16 * kGib);
  write(memory + "/batch/memory.usage_in_bytes", 12 * kGib);
  write(memory + "/batch/17/memory.limit_in_bytes", 8 * kGib);
  write(memory + "/batch/17/memory.usage_in_bytes", 2 * kGib);
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1");
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000");
  write("/sys/fs/cgroup/cpu,cpuacct/batch/cpu.cfs_quota_us", "150000");
  write("/sys/fs/cgroup/cpu,cpuacct/batch/cpu.cfs_period_us", "50000");
  EXPECT_EQ(limits().memory_left_bytes, 4 * kGib);
  EXPECT_EQ(limits().processors, 3);
  write(memory + "/batch/memory.stat", "inactive_file 1\ntotal_inactive_file " + std::to_string(kGib));
  EXPECT_EQ(limits().memory_left_bytes, 5 * kGib);
}

}  // namespace
}  // namespace tessera::device
