// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model shared by several processes (docs/several_gpus.md): what the verbs that can do so do about it.
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "comm/communicator.h"
#include "comm/peer.h"
#include "console.h"
#include "device/executor.h"
#include "interrupt.h"
#include "model/mirrored_runner.h"
#include "model_flags.h"
#include "rank_flags.h"
#include "rank_processes.h"
#include "rank_split.h"

namespace tessera::app {

// One rank's part in the group, or that of a program that is alone. Of the methods all ranks call the same, in the same
// order.
class Ranks final : public comm::LossSink, private comm::JoinWatch {
 public:
  // `model` outlives it. `end_code`: of a program that was told to end before leave_interrupts_to_verb().
  Ranks(const RankFlags& flags, ModelFlags& model, int end_code = kExitCancelled);
  ~Ranks() override;

  bool is_alone() const { return place_.world == 1; }
  bool is_follower() const { return place_.rank > 0 && !is_echo(); }
  int world() const { return place_.world; }
  bool is_echo() const { return flags_.only_last_rank; }
  // How the model is cut; once it is joined.
  const RankSplit& split() const { return split_; }

  // Finds the others (rank 0 of a program without a launcher starts them, `verb` with the same arguments), agrees with
  // them on what is about to be loaded, and sets what this rank holds of it in `load`. A split that nobody named is
  // chosen for so many sequences, the same on all ranks: those that don't know how long one may be are told by rank 0,
  // and count it into what they load. Throws as Bootstrap and agree().
  void join(const char* verb, const ModelFolder& folder, const ModelFlags& model, model::LoadOptions& load,
            const Sequences& sequences);
  // The same without a checkpoint: the ranks agree on `made`, which says what weights they make.
  void join_made(const char* verb, const model::StoredModel& stored, const std::string& made, const ModelFlags& model,
                 model::LoadOptions& load, const Sequences& sequences);
  // Throws where ranks compute with different kernels, or do not reach each other's memory where they have to.
  void agree_on(const model::LoadedModel& loaded);
  // The least of what the ranks say.
  int64_t least(int64_t own);
  // Rank 0: a runner for all, which `own` outlives. Alone the same runner.
  model::Runner& lead(model::Runner& own);
  // Every other rank: does on `own` what rank 0 does, until that ends.
  void follow(model::Runner& own);

  // Reads flags and environment, and sets the device and the threads of this rank in its ModelFlags; nothing else may
  // be asked before. Then work() of this rank, then the end of all. What either throws ends them too, also those that
  // have not met yet, where they can be told: it is said, and the exit code returned; who is alone throws it.
  template <class Work>
  int run(Work&& work) {
    try {
      set_up();
      const int code = work();
      end();
      return code;
    } catch (const std::exception&) {
      if (is_alone()) throw;
      return fail(current_fault());
    }
  }

  // Ends the program with `code`, and the others without a word, whatever they do: for one that was told to end. From
  // any thread, once joined.
  [[noreturn]] void stop(int code) noexcept;
  // Rank 0: from join() on Ctrl-C stops all, also those that it still waits for; from here on the verb deals with it,
  // whose handlers are there already.
  void leave_interrupts_to_verb() {
    interrupts_.reset();
    stops_on_interrupt_ = false;
  }

  // Rank 0: where a rank is lost or has failed, `tell` is called with a line for strangers ("rank 1 was lost") before
  // the program ends, which it must not hold up for more than a second. Null: no more, and no call is under way.
  void tell_of_loss(std::function<void(const std::string&)> tell) {
    const std::lock_guard<std::mutex> hold(tell_lock_);
    tell_ = std::move(tell);
  }

  void lost(int rank, const std::string& message) override;

 private:
  // `stored` is called where the weights' formats decide.
  template <class Stored>
  void choose_split(const model::Config& config, const ModelFlags& model, const model::LoadOptions& load,
                    const Sequences& sequences, const Stored& stored);
  void check_cut(const model::Config& config) const;
  model::Shard shard() const {
    return {.rank = place_.rank,
            .world = place_.world,
            .attention = split_.attention,
            .experts = split_.experts,
            .keeps_all_heads = split_.keeps_all_heads,
            .shards_entries = split_.shards_entries};
  }
  // choose(sequences) cuts the model; weights(), which says what these are, is called once the ranks have met.
  template <class Choose, class Weights>
  void join_on(const char* verb, const ModelFlags& model, model::LoadOptions& load, Sequences sequences,
               const Choose& choose, const Weights& weights);
  void make_echo(const ModelFlags& model);
  std::vector<int64_t> all_of(int64_t own);  // by rank
  void set_up();
  std::string fault() override;
  void meet(const comm::BootstrapOptions& options, comm::Socket listener);
  comm::BootstrapOptions bootstrap_options() const;
  void tell_of_failure(const std::string& why) const;
  std::optional<comm::PeerOptions> peer_options() const;
  double step_seconds() const;
  void end();
  int fail(const Fault& fault);
  int say(const Fault& fault);
  const RankFlags flags_;
  ModelFlags& model_;
  const int end_code_;
  comm::RankPlace place_;
  RankSplit split_;
  const char* flag_name() const { return on_gpus_ ? "--gpus" : "--ranks"; }
  bool on_gpus_ = false, starts_others_ = false;
  bool has_come_ = false;  // to the others, or tried to
  ConsoleLog log_{true};
  RankProcesses others_;
  std::optional<Inheritance> inherited_;  // where rank 0 has started this one
  std::unique_ptr<comm::Bootstrap> bootstrap_;
  std::unique_ptr<device::Executor> executor_;  // in whose memory NCCL's sums lie
  std::unique_ptr<comm::Communicator> comm_;
  std::unique_ptr<model::MirroredRunner> mirrored_;
  std::mutex tell_lock_;
  std::function<void(const std::string&)> tell_;  // held while it is called
  std::atomic<int> stop_code_{-1};                // that it stops with; negative: it does not
  std::atomic<bool> stops_on_interrupt_{false}, has_met_{false};
  std::optional<InterruptWatch> interrupts_;  // goes first
};

}  // namespace tessera::app
