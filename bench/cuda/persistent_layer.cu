// SPDX-License-Identifier: Apache-2.0
// Is a decode layer of Flash at one token faster as one kernel? Its NVFP4 maps in their order of dependence, with
// stand-ins for what lies between them (layer_phases.cuh), as kernels with programmatic dependent launch and as one
// kernel of blocks that wait for each other, both recorded as a graph of kLayers layers. The programs run in turn; all
// must give the same bits. Prints JSON. docs/performance/hopper.md, "A layer in one kernel".
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bench/cuda/layer_kernels.cuh"
#include "bench/cuda/layer_shape.h"
#include "device/cuda/graph.h"
#include "device/cuda/memory.h"

namespace tessera::bench {

namespace {

using device::cuda::Event;
using device::cuda::Graph;
using device::cuda::Memory;
using device::cuda::StreamQueue;

constexpr int kLayers = 12, kReplays = 240, kBarriers = 2000;
constexpr uint64_t kSeed = 20261124;

using Whole = Plan<16, 44>;  // a multiprocessor
using Half = Plan<8, 19>;    // half of one

struct Program {
  std::string name;
  const Shape* shape;
  bool is_checked;
  std::function<void(StreamQueue&)> queue_layers;
  std::unique_ptr<Graph> graph = nullptr;
  std::vector<float> us = {};  // a layer
  std::array<double, kMostPhases> phase_us = {};
};

class Comparison {
 public:
  // with_words: also (c), whose blocks wait for values themselves.
  explicit Comparison(bool with_words) {
    for (Shape* shape : {&plain_, &folded_}) {
      set_values_ = std::max(set_values_, shape->job.set_values);
      flags_at_ = static_cast<size_t>(kSets * set_values_) * 2;
    }
    state_ = Memory(Memory::Kind::kDevice, flags_at_ + 4096);
    weights_ =
        Memory(Memory::Kind::kDevice, static_cast<size_t>(kLayers * plain_.job.layer_units) * PackedNvfp4::kBytes);
    input_ = Memory(Memory::Kind::kDevice, kStreamValues * sizeof(uint16_t));
    found_ = Memory(Memory::Kind::kDevice, 128);
    begun_ = Memory(Memory::Kind::kDevice, kLayers * kMostPhases * sizeof(uint64_t));
    for (Shape* shape : {&plain_, &folded_}) {
      Job& job = shape->job;
      job.weights = weights_.as<char>(), job.input = input_.as<uint16_t>(), job.sets = state_.as<uint16_t>();
      job.arrived = reinterpret_cast<int*>(state_.as<char>() + flags_at_);
      job.flags = job.arrived + 64;
      job.begun = begun_.as<uint64_t>();
      job.set_values = set_values_;
    }
    launch("fill_units", queue_, fill_units, dim3(1024), 256, 0, weights_.as<char>(), kLayers * plain_.job.layer_units,
           kSeed);
    launch("fill_input", queue_, fill_input, dim3(kStreamValues / 256), 256, 0, input_.as<uint16_t>(), kSeed + 1);
    queue_.synchronize();
    add_programs(with_words);
  }

  void run() {
    cudaDeviceProp gpu{};
    TESSERA_CUDA_CHECK(cudaGetDeviceProperties(&gpu, 0));
    std::printf(
        "{\"gpu\": \"%s\", \"multiprocessors\": %d, \"layers\": %d, \"replays\": %d, \"bytes_of_layer\": %.0f,\n",
        gpu.name, processors_, kLayers, kReplays, layer_bytes());
    const double counter_us = barrier_us<Sync::kCounter>(), flags_us = barrier_us<Sync::kFlags>();
    std::printf(" \"barrier_us\": {\"counter\": %.3f, \"flags\": %.3f},\n", counter_us, flags_us);
    for (Program& program : programs_) record(program);
    std::erase_if(programs_, [](const Program& program) { return program.graph == nullptr; });
    for (int replay = 0; replay < kReplays + 5; ++replay) {
      for (Program& program : programs_) {
        const float us = replay_us(program);
        if (replay < 5) continue;
        program.us.push_back(us);
        add_phases(program);
      }
    }
    std::printf(" \"programs\": [\n");
    for (Program& program : programs_) {
      std::sort(program.us.begin(), program.us.end());
      const auto at = [&](double share) { return program.us[static_cast<size_t>(share * (kReplays - 1))]; };
      const double tb_s = layer_bytes() / at(0.5) * 1e-6;
      std::printf(
          "  {\"name\": \"%s\", \"median_us\": %.2f, \"p10_us\": %.2f, \"p90_us\": %.2f, \"tb_s\": %.3f, "
          "\"share_of_4.56_tb_s\": %.3f,\n   \"phases_us\": [",
          program.name.c_str(), at(0.5), at(0.1), at(0.9), tb_s, tb_s / 4.56);
      for (size_t p = 0; p < program.shape->names.size(); ++p) {
        std::printf("%s[\"%s\", %.2f]", p == 0 ? "" : ", ", program.shape->names[p].c_str(),
                    program.phase_us[p] / kReplays);
      }
      std::printf("]}%s\n", &program == &programs_.back() ? "" : ",");
    }
    std::printf(" ]}\n");
  }

 private:
  double layer_bytes() const { return static_cast<double>(plain_.units) * PackedNvfp4::kBytes; }

  template <class Plan>
  void add_kernels(const char* name, const Shape& shape, unsigned blocks) {
    // Else a kernel with weights finds no place beside it.
    TESSERA_CUDA_CHECK(cudaFuncSetAttribute(light_kernel<Plan>, cudaFuncAttributePreferredSharedMemoryCarveout,
                                            cudaSharedmemCarveoutMaxShared));
    programs_.push_back({name, &shape, true, [this, &shape, blocks](StreamQueue& queue) {
                           for (int layer = 0; layer < kLayers; ++layer) {
                             for (int p = 0; p < shape.job.num_phases; ++p) {
                               if (shape.job.phases[p].kind == PhaseKind::kMap) {
                                 launch("phase_kernel", queue, phase_kernel<Plan>, dim3(blocks), Plan::kThreads,
                                        sizeof(typename Plan::Shared), shape.job, layer, p);
                               } else {
                                 launch("light_kernel", queue, light_kernel<Plan>, dim3(blocks), Plan::kConsumers, 0,
                                        shape.job, layer, p);
                               }
                             }
                           }
                         }});
  }
  // In launches of so many layers.
  template <Sync kSync, bool kMultiplies = true>
  void add_persistent(const char* name, const Shape& shape, int layers, bool overlaps, unsigned blocks) {
    const bool is_checked = kSync != Sync::kNone;
    programs_.push_back({name, &shape, is_checked, [&shape, layers, overlaps, blocks](StreamQueue& queue) {
                           const auto kernel = layer_kernel<Whole, kSync, kMultiplies>;
                           for (int layer = 0; layer < kLayers; layer += layers) {
                             if (overlaps) {
                               launch("layer_kernel", queue, kernel, dim3(blocks), Whole::kThreads,
                                      sizeof(Whole::Shared), shape.job, layer, layer + layers);
                             } else {
                               launch_cooperative("layer_kernel", queue, kernel, blocks, Whole::kThreads,
                                                  sizeof(Whole::Shared), shape.job, layer, layer + layers);
                             }
                           }
                         }});
  }
  void add_programs(bool with_words) {
    const auto all = static_cast<unsigned>(processors_);
    add_kernels<Whole>("a kernels, 1 block of 16 warps", plain_, all);
    add_persistent<Sync::kCounter>("b persistent", plain_, 1, false, all);
    add_kernels<Half>("a kernels, 2 blocks of 8 warps", plain_, 2 * all);
    add_persistent<Sync::kCounter>("b persistent, launches overlap", plain_, 1, true, all);
    add_kernels<Half>("a kernels, 1 block of 8 warps", plain_, all);
    add_persistent<Sync::kCounter>("b persistent, all layers", plain_, kLayers, false, all);
    add_kernels<Whole>("a kernels, 1 block of 16 warps, norms folded", folded_, all);
    add_persistent<Sync::kCounter>("b persistent, norms folded", folded_, 1, false, all);
    add_kernels<Half>("a kernels, 2 blocks of 8 warps, norms folded", folded_, 2 * all);
    add_persistent<Sync::kCounter>("b persistent, norms folded, all layers", folded_, kLayers, false, all);
    add_persistent<Sync::kFlags>("b persistent, a flag for each block", plain_, 1, false, all);
    if (with_words) add_words();
    add_persistent<Sync::kNone>("nobody waits", plain_, kLayers, false, all);
    add_persistent<Sync::kNone>("nobody waits, norms folded", folded_, kLayers, false, all);
    add_persistent<Sync::kNone, false>("nobody waits or multiplies", plain_, kLayers, false, all);
  }

  void add_words() {
    // Only blocks that write outputs: the next layer knows of no others that they are done.
    const unsigned writers = 128;
    add_persistent<Sync::kWords>("c persistent, words", plain_, 1, false, writers);
    add_persistent<Sync::kWords>("c persistent, words, launches overlap", plain_, 1, true, writers);
    add_persistent<Sync::kWords>("c persistent, words, all layers", plain_, kLayers, false, writers);
    add_persistent<Sync::kWords>("c persistent, words, norms folded", folded_, 1, false, writers);
  }

  void poison() { fill(queue_, state_.data(), 0xFF, state_.size()); }

  // As a graph, and checked; a program that the GPU refuses is told and left out.
  void record(Program& program) {
    try {
      program.graph = std::make_unique<Graph>(queue_, [&] { program.queue_layers(queue_); });
      replay_us(program);
      if (program.is_checked) check(program);
    } catch (const std::exception& error) {
      std::printf(" \"refused: %s\": \"%s\",\n", program.name.c_str(), error.what());
      program.graph.reset();
    }
  }

  float replay_us(const Program& program) {
    Event begin, end;
    poison();
    begin.record(queue_);
    program.graph->launch(queue_);
    end.record(queue_);
    queue_.synchronize();
    return Event::milliseconds_between(begin, end) * 1e3f / kLayers;
  }

  // From a phase's begin to the next one's, in the first block: the mean over layers.
  void add_phases(Program& program) {
    std::array<uint64_t, kLayers * kMostPhases> begun;
    copy(queue_, begun.data(), begun_.data(), sizeof begun);
    queue_.synchronize();
    const int num_phases = program.shape->job.num_phases;
    for (int layer = 0; layer + 1 < kLayers; ++layer) {
      for (int p = 0; p < num_phases; ++p) {
        const int at = layer * kMostPhases + p, next = p + 1 < num_phases ? at + 1 : (layer + 1) * kMostPhases;
        program.phase_us[static_cast<size_t>(p)] +=
            static_cast<double>(begun[static_cast<size_t>(next)] - begun[static_cast<size_t>(at)]) * 1e-3 /
            (kLayers - 1);
      }
    }
  }

  // The last two layers' outputs of all maps against the first program's, and maps of one input by another loop.
  void check(const Program& program) {
    const Job& job = program.shape->job;
    std::vector<uint16_t> all(static_cast<size_t>(kSets * set_values_)), values;
    copy(queue_, all.data(), state_.data(), all.size() * 2);
    queue_.synchronize();
    unsigned differing = 0;
    fill(queue_, found_.data(), 0, 4);
    for (int layer = kLayers - 2; layer < kLayers; ++layer) {
      for (int p = 0; p < job.num_phases; ++p) {
        const Phase& phase = job.phases[p];
        if (phase.kind != PhaseKind::kMap) continue;
        const auto* first = all.data() + layer % kSets * set_values_ + phase.out_at;
        values.insert(values.end(), first, first + phase.num_out);
        if (phase.routed_tiles > 0 || phase.mixes_first) continue;
        launch("count_differences", queue_, count_differences, dim3(static_cast<unsigned>(phase.tiles)),
               threads_for(kChunk << phase.log2_chunks), 0, job, layer, p, found_.as<unsigned>());
      }
    }
    copy(queue_, &differing, found_.data(), 4);
    queue_.synchronize();
    if (expected_.empty()) expected_ = values;
    size_t others = 0, unwritten = 0;
    double magnitude = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      others += values[i] != expected_[i], unwritten += values[i] == 0xFFFF;
      magnitude += std::abs(numeric::bf16_to_float(values[i])) / static_cast<double>(values.size());
    }
    std::printf(
        " \"check: %s\": \"%zu values of mean magnitude %.3f: %zu unwritten, %zu not the first program's, %u not "
        "the other loop's\",\n",
        program.name.c_str(), values.size(), magnitude, unwritten, others, differing);
    std::fflush(stdout);
  }

  template <Sync kSync>
  double barrier_us() {
    double us = 0;
    for (int turn = 0; turn < 2; ++turn) {
      Event begin, end;
      poison();
      begin.record(queue_);
      launch_cooperative("barrier_kernel", queue_, barrier_kernel<Whole, kSync>, static_cast<unsigned>(processors_),
                         Whole::kThreads, sizeof(Whole::Shared), plain_.job, kBarriers);
      end.record(queue_);
      queue_.synchronize();
      us = Event::milliseconds_between(begin, end) * 1e3 / kBarriers;
    }
    return us;
  }

  StreamQueue queue_;
  Shape plain_{false}, folded_{true};
  int processors_ = multiprocessors();
  int64_t set_values_ = 0;
  size_t flags_at_ = 0;
  Memory state_, weights_, input_, found_, begun_;
  std::vector<Program> programs_;
  std::vector<uint16_t> expected_;
};

}  // namespace

}  // namespace tessera::bench

int main(int argc, char** argv) {
  try {
    tessera::bench::Comparison(argc > 1 && std::string_view(argv[1]) == "words").run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
