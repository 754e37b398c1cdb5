// SPDX-License-Identifier: Apache-2.0
#pragma once
// Every op at the shapes of DeepSeek-V4 Flash and Pro, beside reading as many bytes in the same run.
#include <functional>
#include <string>
#include <vector>

#include "bench/ops/ceilings.h"
#include "bench/ops/timing.h"
#include "ops/precision.h"

namespace tessera::bench {

struct Options {
  std::vector<int64_t> tokens = {1, 4, 64, 256};
  std::string only;  // rows whose name contains this
  ops::InputMode mode = ops::InputMode::kA16;
  std::string device = "cpu";  // device::machine_of
  int num_threads = 0;
  double seconds = 0.5;                     // per row, at least
  int64_t pool_bytes = int64_t{512} << 20;  // of random weights: many times any last-level cache per socket share
  std::vector<std::pair<std::string, std::string>> forced;
};

// Where an op's bytes are when it begins, and so where the read beside it finds its own.
enum class Residence {
  kMemory,  // weights: other ones in each run
  kCache,   // what a step has just written
};

// How the timed calls of a row follow each other on a GPU.
enum class Way {
  kInTurn,  // each may begin while the one before ends
  kAlone,   // behind a small copy, which nothing overlaps; what the copy takes is subtracted
  kChain,   // what a call adds to a chain of kChainCalls; nothing is read beside it
};
constexpr int64_t kChainCalls = 16;

struct Row {
  std::string name, variant;
  int64_t tokens = 0;
  int64_t bytes = 0;  // read and written once, packed; a cache line that is read twice counts once
  int64_t flops = 0;
  Residence residence = Residence::kMemory;
  int64_t calls = 1;        // timed at once, as one recording: a sample is their mean
  Samples time, read_time;  // of the op; of reading as many bytes with all threads in the same run

  // 0 where nothing was read beside it.
  double share_of_read() const { return read_time.quantile(0.5) / time.quantile(0.5); }
  // Of the products that the variant's instructions reach (mma.sync on a GPU, tiles for amx, BF16 pairs for the
  // others); 0 where this machine has none of them.
  double share_of_products(const Ceilings& ceilings) const;
  // Of the ceiling that is nearer.
  double share(const Ceilings& ceilings) const;
  // Whether the share is more than measuring explains: the ceiling was measured while another program ran, or bytes
  // that count as memory's were in a cache.
  bool is_implausible(const Ceilings& ceilings) const { return share(ceilings) > 1.15; }
};

struct Report {
  std::string device;  // "cpu" or the GPU's name
  bool is_on_gpu = false;
  Ceilings ceilings;
  int num_threads = 0;
  std::vector<Row> rows;
};

// What a picture or a table of the report begins with.
std::string ceilings_text(const Report& report);

// `on_row` is called as rows come. Throws kInvalidArgument where no row's name contains `only`, and
// kResourceExhausted with figures where the weights or a row don't fit into memory.
Report run_ops(const Options& options, const std::function<void(const Report&, const Row&)>& on_row);

// Lines to say below a table: unstable ceilings, and what "!" behind a share means; none where all is well.
std::vector<std::string> report_notes(const Report& report);

// A picture of each row's share, coloured by the ceiling that is nearer.
std::string report_svg(const Report& report, const std::string& title);

}  // namespace tessera::bench
