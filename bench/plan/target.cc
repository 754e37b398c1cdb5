// SPDX-License-Identifier: Apache-2.0
#include "bench/plan/target.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "base/error.h"
#include "base/strings.h"

namespace tessera::bench {

namespace {

constexpr std::string_view kSpec = "data sheet", kAllEntries = "not known: what enters all multiprocessors";
constexpr std::string_view kSlowRate =
    "N/2 cycles for a product of M = 128 and 32 bytes of K (SemiAnalysisAI/microbench-blackwell), and the data sheet";
constexpr std::string_view kWarpRate = "4,095 measured on an RTX 5090 (Neroued/ninfer#160)";
constexpr std::string_view kEntry = "unknown: 64 as on Hopper, or as wide as shared memory";
constexpr std::string_view kCompete = "unknown: whether copies take turns with operands at shared memory's 128 bytes";
constexpr std::string_view kShared = "128 (SemiAnalysisAI/microbench-blackwell)";
constexpr std::string_view kOwnLaunch = "smallest kernels of a graph on an H200 (2026-11-22-h200-packed.json)";
constexpr std::string_view kAsHopper = "as on an H200: not known";
constexpr std::string_view kClustered =
    "unknown: all, or a cluster less in each of eight parts of the GPU with two that are left over";
constexpr std::string_view kNoClusters = "no kernel of ours asks";
constexpr double kNone = 1e6;  // a limit that is none
constexpr std::string_view kAsCollective = "two H200: all-reduce of 8 KB (NCCL); of more GPUs a guess";
constexpr std::string_view kAsPeerSum = "two H200: 8 KiB in 2.8 us (2026-11-23-h200-x2-peers.json)";
constexpr std::string_view kAsPeerRate = "two H200: 256 KiB in 3.6 us, 1 MiB in 5.6, 2 in 9.1, 8 in 29.6";
constexpr std::string_view kNoPeers = "none reaches another's memory";
constexpr std::string_view kNvlinkShare = "the data sheet's, at the 87 % that a copy between two H200 reaches";

constexpr Target kH200 = {
    .name = "h200",
    .gpu = "H200",
    .family = Family::kHopper,
    .multiprocessors = 132,
    .clustered = {132, "", kNoClusters},
    .clock = {1.83, "GHz", "data sheet: 989 TFLOP/s of BF16 over 132 x 4,096"},
    .product_rate = {4096, "FLOP/cycle", "64.3 cycles a wgmma m64n128k16 (2026-11-22-h200-hopper.json)"},
    .power_flops = {0.77, "PFLOP/s", "cuBLAS BF16, 8,192^3: 769 to 798 (PyTorch on this machine)"},
    .shared_port = {128, "byte/cycle", kSpec},
    .copies_share = {1, "", "they share a port"},
    .entry_port = {64, "byte/cycle", kSpec},
    .l2 = {8.2, "TB/s", "set by rows: Flash's wq_b, wo_b (2026-11-23-h200-many-tokens.json)"},
    .memory = {4.2, 4.56, "TB/s", "bulk copies alone; plain loads (2026-11-22-h200-hopper.json)"},
    .launch = {1.0, "us", kOwnLaunch},
    .latency = {1.0, "us", "a copy of cold bytes, 600 to 800 ns and its barrier"},
    .capacity = {150.75, "GB", "143,771 MiB, as the driver says"},
    .link = {392, "GB/s", "copy between two of them, 450 on the data sheet"},
    .collective = {20, 11.6, "us", kAsCollective},
    .peer_sum = {2.8, "us", kAsPeerSum},
    .peer_rate = {330, "GB/s", kAsPeerRate}};

// As an H200 but for its memory: the same chip. What was measured was measured on an H200.
constexpr Target h100() {
  Target target = kH200;
  target.name = "h100", target.gpu = "H100";
  target.memory = {2.93, 3.18, "TB/s", "3.35 on the data sheet, at the shares that an H200 reaches"};
  target.capacity = {85.52, "GB", "81,559 MiB, as the driver of the 80 GB form says"};
  target.link = {392, "GB/s", "as between two H200"};
  return target;
}

constexpr Target kTargets[] = {
    kH200,
    h100(),
    {.name = "b200",
     .gpu = "B200",
     .family = Family::kTensorMemory,
     .multiprocessors = 148,
     .clustered = {132, 148, "", kClustered},
     .clock = {1.85, "GHz", "data sheet: 9.0 PFLOP/s"},
     .product_rate = {32768, "FLOP/cycle", kSlowRate},
     .power_flops =
         {6.32, "PFLOP/s",
          "set by one row: 8,192^3 in 176.5 us, 2 of them launch and first bytes, 0.6 the last tile's stores "
          "(cfregly/ai-performance-engineering#33), at 1,000 W"},
     .shared_port = {128, "byte/cycle", kShared},
     .copies_share = {1, 0, "", kCompete},
     .entry_port = {64, 128, "byte/cycle", kEntry},
     .l2 =
         {14.05, 35, "TB/s",
          "at least what that row's pairs ask for, 36,864 bytes a multiprocessor and stage; at most what enters all at "
          "128 bytes a cycle"},
     .memory = {7.26, "TB/s", "read with TMA (SemiAnalysisAI/microbench-blackwell)"},
     .launch = {1.0, "us", kAsHopper},
     .latency = {1.0, "us", kAsHopper},
     .capacity = {180, "GB", kSpec},
     .link = {784, "GB/s", kNvlinkShare},
     .collective = {20, 11.6, "us", kAsCollective},
     .peer_sum = {2.8, "us", kAsPeerSum},
     .peer_rate = {330, "GB/s", kAsPeerRate}},
    {.name = "b300",
     .gpu = "B300, GB300",
     .family = Family::kTensorMemory,
     .multiprocessors = 148,
     .clustered = {132, 148, "", kClustered},
     .clock = {1.92, "GHz", "data sheet: 14 PFLOP/s with K = 96; 2.06 at most"},
     .product_rate = {32768, "FLOP/cycle", kSlowRate},
     .power_flops = {8.85, "PFLOP/s",
                     "6.32 PFLOP/s of a B200 at 1,000 W, at 1,400 W (facebookexperimental/triton#2023)"},
     .shared_port = {128, "byte/cycle", kShared},
     .copies_share = {1, 0, "", kCompete},
     .entry_port = {64, 128, "byte/cycle", kEntry},
     .l2 = {14.05, 35, "TB/s", "as B200"},
     .memory = {7.26, "TB/s", "as B200: the same 8 TB/s on the data sheet"},
     .launch = {1.0, "us", kAsHopper},
     .latency = {1.0, "us", kAsHopper},
     .capacity = {288, "GB", kSpec},
     .link = {784, "GB/s", kNvlinkShare},
     .collective = {20, 11.6, "us", kAsCollective},
     .peer_sum = {2.8, "us", kAsPeerSum},
     .peer_rate = {330, "GB/s", kAsPeerRate}},
    {.name = "rtx6000",
     .gpu = "RTX PRO 6000",
     .family = Family::kWarpProducts,
     .multiprocessors = 188,
     .clustered = {188, "", kNoClusters},
     .clock =
         {2.17, "GHz",
          "under load: BF16 8,192^3 at 417 TFLOP/s of 1,024 FLOP a cycle (zzc0721/torch-performance-test-data#162); "
          "the data sheet's 2.62 is its boost"},
     .product_rate = {4096, "FLOP/cycle", kWarpRate},
     .power_flops = {kNone, "PFLOP/s", "in the clock"},
     .shared_port = {128, "byte/cycle", kSpec},
     .copies_share = {1, "", "they share a port"},
     .entry_port = {64, "byte/cycle", kAsHopper},
     .l2 = {26, "TB/s", kAllEntries},
     .memory = {1.6, "TB/s", "1.79 on the data sheet, at 90 %"},
     .launch = {1.0, "us", kAsHopper},
     .latency = {1.0, "us", kAsHopper},
     .capacity = {96, "GB", kSpec},
     .link = {50, "GB/s", "PCIe 5.0 x16, 64 on the data sheet: a guess"},
     .collective = {40, 30, "us", "a guess: through PCIe"},
     .peer_sum = {0, "us", kNoPeers},
     .peer_rate = {0, "GB/s", kNoPeers}},
    {.name = "gb10",
     .gpu = "GB10",
     .family = Family::kWarpProducts,
     .multiprocessors = 48,
     .clustered = {48, "", kNoClusters},
     .clock = {2.5, "GHz", kSpec},
     .product_rate = {4096, "FLOP/cycle", kWarpRate},
     .power_flops = {kNone, "PFLOP/s", "not known"},
     .shared_port = {128, "byte/cycle", kSpec},
     .copies_share = {1, "", "they share a port"},
     .entry_port = {64, "byte/cycle", kAsHopper},
     .l2 = {7.7, "TB/s", kAllEntries},
     .memory = {0.231, "TB/s", "measured: antirez/ds4#773"},
     .launch = {1.0, "us", kAsHopper},
     .latency = {1.0, "us", kAsHopper},
     .capacity = {120, "GB", "128 on the data sheet, less 8 for the system: a guess"},
     .link = {20, "GB/s", "200 Gbit/s Ethernet: a guess"},
     .collective = {60, 40, "us", "a guess: through a network"},
     .peer_sum = {0, "us", kNoPeers},
     .peer_rate = {0, "GB/s", kNoPeers}},
};

}  // namespace

std::span<const Target> targets() {
  return kTargets;
}

const Target& target_of(std::string_view name) {
  const auto* const found =
      std::find_if(std::begin(kTargets), std::end(kTargets), [&](const Target& t) { return t.name == name; });
  if (found != std::end(kTargets)) return *found;
  std::string names;
  for (const Target& target : kTargets) names += fmt::format("{}{}", names.empty() ? "" : ", ", target.name);
  fail(ErrorCode::kInvalidArgument,
       fmt::format("--target: expected one of {}, found \"{}\"", names, printable(name, 60)));
}

namespace {

bool has_word(std::string_view text, std::string_view word) {
  const auto is_part = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  for (size_t at = text.find(word); at != std::string_view::npos; at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || !is_part(text[at - 1])) && (end == text.size() || !is_part(text[end]))) return true;
  }
  return false;
}

}  // namespace

const Target* target_of_gpu(std::string_view gpu_name) {
  const Target* found = nullptr;
  for (const Target& target : kTargets) {
    // Each of "B300, GB300", as words: a GH200 is no H200.
    for (size_t begin = 0; begin < target.gpu.size();) {
      const size_t end = std::min(target.gpu.find(", ", begin), target.gpu.size());
      if (has_word(gpu_name, target.gpu.substr(begin, end - begin))) found = &target;
      begin = end + 2;
    }
  }
  return found;
}

std::array<NamedFigure, 16> figures_of(const Target& t) {
  return {{{"those of clusters of four", t.clustered},
           {"clock", t.clock},
           {"products", t.product_rate},
           {"power", t.power_flops},
           {"shared memory", t.shared_port},
           {"copies that compete there", t.copies_share},
           {"bytes into a multiprocessor", t.entry_port},
           {"L2", t.l2},
           {"memory", t.memory},
           {"launch", t.launch},
           {"latency", t.latency},
           {"capacity", t.capacity},
           {"link between GPUs", t.link},
           {"small collective", t.collective},
           {"small sum over peers", t.peer_sum},
           {"sums over peers", t.peer_rate}}};
}

}  // namespace tessera::bench
