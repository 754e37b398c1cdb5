// SPDX-License-Identifier: Apache-2.0
#include "verify/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <tuple>

#include "base/error.h"
#include "base/strings.h"
#include "verify/cases.h"
#include "verify/run_staged.h"

namespace tessera::verify {

namespace {

constexpr size_t kMostFailures = 5;  // told of one variant

const char* name_of(Fill fill) {
  switch (fill) {
    case Fill::kNormal:
      return "normal values";
    case Fill::kMixed:
      return "heavy tails";
    case Fill::kZero:
      return "zeros";
    case Fill::kDenormal:
      return "denormals";
  }
  return "?";
}

const char* name_of(Form form) {
  switch (form) {
    case Form::kUsual:
      return "";
    case Form::kPicking:
      return ", one weight a row";
    case Form::kOneExpert:
      return ", all to the same experts";
    case Form::kNoneOfSome:
      return ", experts without a token";
    case Form::kBadSizes:
      return ", sizes out of range";
  }
  return "?";
}

template <class Op>
std::string shape_of(const Spec<Op>& spec) {
  return fmt::format("{} {}, {} {}, {}{}", spec.label, spec.desc.to_string(), spec.num_tokens,
                     spec.num_tokens == 1 ? "token" : "tokens", name_of(spec.fill), name_of(spec.form));
}

// The weights of a call as a variant wants them, as long as this lives.
template <class Op>
class PackedWeights {
 public:
  PackedWeights(const ops::Variant<Op>& variant, const typename Op::Desc& desc, typename Op::Args& args) {
    if (layout_for(variant, desc) == nullptr) return;
    pack_of(variant, desc, desc, args);
    if constexpr (requires { desc.routed; }) pack_of(variant, desc, desc.routed, args.routed);
    if constexpr (std::is_same_v<Op, ops::AllExperts>) {
      pack_of(variant, desc, desc.gated, args.gated);
      pack_of(variant, desc, desc.down, args.down);
    }
  }

 private:
  // Those of a call, or of a part of one, whose description is `of`.
  template <class Of, class Args>
  void pack_of(const ops::Variant<Op>& variant, const typename Op::Desc& desc, const Of& of, Args& args) {
    if constexpr (requires { args.weight.tensor_scale; }) {
      packed_.push_back(weight_for(variant, desc, args.weight));
      args.weight = packed_.back().view;
    }
    if constexpr (requires { of.maps; }) {
      for (size_t i = 0; i < of.maps.size(); ++i) {
        packed_.push_back(weight_for(variant, desc, args.weights[i]));
        args.weights[i] = packed_.back().view;
      }
    }
    if constexpr (requires { args.w1; }) {
      for (const ops::WeightView** weights : {&args.w1, &args.w3, &args.w2}) {
        pack(variant, desc, *weights, of.num_local);
      }
    }
    if constexpr (requires { of.num_groups; }) pack(variant, desc, args.weights, of.num_groups);
  }
  // A matrix of each expert.
  void pack(const ops::Variant<Op>& variant, const typename Op::Desc& desc, const ops::WeightView*& weights,
            int64_t count) {
    std::vector<ops::WeightView>& views = views_.emplace_back();
    for (int64_t e = 0; e < count; ++e) {
      packed_.push_back(weight_for(variant, desc, weights[e]));
      views.push_back(packed_.back().view);
    }
    weights = views.data();
  }

  std::deque<VariantWeight> packed_;
  std::deque<std::vector<ops::WeightView>> views_;
};

class Verifier {
 public:
  Verifier(std::span<const ops::Backend* const> backends, const device::Machine& machine, const Options& options,
           ProgressSink* progress)
      : machine_(machine),
        options_(options),
        progress_(progress),
        host_queue_(options.num_threads),
        executor_(device::make_executor(machine, options.num_threads)),
        memory_(*executor_) {
    for (const ops::Backend* backend : backends) {
      std::string why_not;
      if (backend->name == std::string_view("ref")) {
        reference_ = backend;
      } else if (ops::is_usable(*backend, machine, why_not)) {
        usable_.push_back(backend);
      } else {
        report_.unavailable.push_back(fmt::format("{}: {}", backend->name, why_not));
      }
    }
    TESSERA_CHECK(reference_ != nullptr, "no backend is named ref");
    report_.seed = options.seed;
    report_.has_recorded = executor_->can_record();
  }

  Report run() {
    const auto begin = std::chrono::steady_clock::now();
    check_op(static_cast<ops::AllVariants*>(nullptr));
    run_ops(static_cast<ops::AllVariants*>(nullptr));
    report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return std::move(report_);
  }

 private:
  template <class... Ops>
  void run_ops(const ops::VariantLists<Ops...>*) {
    uint64_t total = 0;
    ((total += num_calls<Ops>()), ...);
    if (progress_ != nullptr) progress_->begin("verify", total, "calls");
    (run_op<Ops>(), ...);
    if (progress_ != nullptr) progress_->end();
  }

  template <class... Ops>
  void check_op(const ops::VariantLists<Ops...>*) const {
    if (options_.op.empty() || (... || (options_.op == Ops::kName))) return;
    const char* const names[] = {Ops::kName...};
    fail(ErrorCode::kInvalidArgument,
         fmt::format("no op is named '{}'; there are {}", printable(options_.op), fmt::join(names, ", ")));
  }
  template <class Op>
  bool is_wanted() const {
    return options_.op.empty() || options_.op == Op::kName;
  }

  template <class Op>
  void run_op() {
    for (const Spec<Op>& spec : specs_of(Op{}, options_.is_quick)) {
      if (!report_.stopped.empty()) return;
      if (is_wanted<Op>()) run_spec(spec);
      ++stream_;
    }
  }

  template <class Op>
  bool does_support(const ops::Variant<Op>& variant, const typename Op::Desc& desc) const {
    std::string why_not;
    return (variant.runs_on == nullptr || variant.runs_on(machine_, why_not)) && variant.supports(desc, why_not);
  }

  // Who is held against the reference there: a spec makes one call of each.
  template <class Op>
  struct Candidate {
    const ops::Variant<Op>& variant;
    const char* backend;
    bool is_reference = false;
  };
  template <class Op>
  std::vector<Candidate<Op>> candidates(const Spec<Op>& spec) const {
    const ops::Variant<Op>& reference = reference_->variants_of<Op>().front();
    std::vector<Candidate<Op>> found;
    if (!does_support(reference, spec.desc)) return found;
    for (const ops::Backend* backend : usable_) {
      for (const ops::Variant<Op>& variant : backend->template variants_of<Op>()) {
        if (does_support(variant, spec.desc)) found.push_back({variant, backend->name});
      }
    }
    if (found.empty() && !machine_.gpu.has_value()) found.push_back({reference, "ref", true});
    return found;
  }

  template <class Op>
  uint64_t num_calls() const {
    uint64_t count = 0;
    if (!is_wanted<Op>()) return 0;
    for (const Spec<Op>& spec : specs_of(Op{}, options_.is_quick)) count += candidates(spec).size();
    return count;
  }

  template <class Op>
  void run_spec(const Spec<Op>& spec) {
    const std::vector<Candidate<Op>> all = candidates(spec);
    if (all.empty()) return;
    const ops::Variant<Op>& reference = reference_->variants_of<Op>().front();
    Rng rng(options_.seed, stream_);
    Case<Op> one = make_case(rng, spec);
    const std::vector<std::vector<unsigned char>> expected = expected_of(reference, spec, one);
    for (const Candidate<Op>& candidate : all) {
      const std::string name = fmt::format("{}.{}", candidate.backend, candidate.variant.name);
      judge(row_of(Op::kName, name, candidate.is_reference), candidate.variant, spec, one, expected);
      if (!report_.stopped.empty()) return;
      if (progress_ != nullptr) progress_->advance(1);
    }
  }

  // What the reference writes, output by output.
  template <class Op>
  std::vector<std::vector<unsigned char>> expected_of(const ops::Variant<Op>& reference, const Spec<Op>& spec,
                                                      Case<Op>& one) {
    device::Buffer workspace;
    if constexpr (requires { one.args.workspace; }) {
      if (reference.workspace_bytes != nullptr) {
        workspace = device::Buffer(static_cast<size_t>(reference.workspace_bytes(spec.desc, spec.num_tokens)));
      }
      one.args.workspace = workspace.data();
    }
    reference.run(spec.desc, one.args, host_queue_);
    if constexpr (requires { one.args.workspace; }) one.args.workspace = nullptr;
    std::vector<std::vector<unsigned char>> expected;
    for (const Output& output : one.arrays.outputs()) {
      const auto* data = output.view.as<unsigned char>();
      expected.emplace_back(data, data + output.view.num_bytes());
    }
    return expected;
  }

  template <class Op>
  void judge(Row& row, const ops::Variant<Op>& variant, const Spec<Op>& spec, const Case<Op>& one,
             std::vector<std::vector<unsigned char>> expected) {
    for (const Output& output : one.arrays.outputs()) output.restore();
    typename Op::Args args = one.args;
    const PackedWeights<Op> packed(variant, spec.desc, args);
    std::vector<std::string> faults;
    Call call{shape_of(spec)};
    const auto begin = std::chrono::steady_clock::now();
    try {
      faults = run_staged(memory_, variant, spec.desc, args);
    } catch (const Error& error) {
      faults.push_back(error.what());
      if (error.code() == ErrorCode::kDeviceError) report_.stopped = fmt::format("{} of {}", row.variant, row.op);
    }
    row.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    ++row.num_cases;
    for (size_t i = 0; i < expected.size() && report_.stopped.empty(); ++i) {
      const Output& output = one.arrays.outputs()[i];
      if (!output.is_compared) continue;
      TensorView wanted = output.view;
      wanted.data = expected[i].data();
      // The reference's own results are the same bits wherever they are made.
      const Rule rule = row.is_reference ? Rule::kBits : output.rule;
      const Difference difference = compare(output.view, wanted, rule, output.bound);
      if (!difference.what.empty()) faults.push_back(fmt::format("{}: {}", output.name, difference.what));
      note_error(row, difference.error, rule == Rule::kBits ? 0 : output.bound, spec);
      call.num_values += output.view.shape.num_elements();
      call.num_different += difference.num_different;
    }
    if (faults.empty()) check_alone(variant, spec, args, faults);
    call.is_sound = faults.empty();
    row.calls.push_back(call);
    if (call.is_sound) return;
    ++row.num_failed;
    if (row.failures.size() < kMostFailures) {
      row.failures.push_back({call.shape, fmt::format("{}", fmt::join(faults, "; ")), stream_});
    }
  }

  // The first tokens of `args`, whose outputs are there, have the same bits without the others.
  template <class Op>
  void check_alone(const ops::Variant<Op>& variant, const Spec<Op>& spec, const typename Op::Args& args,
                   std::vector<std::string>& faults) {
    constexpr int64_t kAlone = 5, kMany = 17;
    if (spec.num_tokens <= kMany) return;
    typename Op::Args few = args;
    TensorView* output = nullptr;
    if constexpr (std::is_same_v<Op, ops::Linear>) output = &few.y;
    if constexpr (std::is_same_v<Op, ops::MoeExperts>) output = &few.out;
    if constexpr (std::is_same_v<Op, ops::Linear> || std::is_same_v<Op, ops::MoeExperts>) {
      const void* const all = output->data;
      few.num_tokens = kAlone;
      few.x.shape = {kAlone, few.x.shape[1]};
      if constexpr (std::is_same_v<Op, ops::Linear>) output->shape = {kAlone, output->shape[1]};
      if constexpr (std::is_same_v<Op, ops::MoeExperts>) {
        output->shape = {kAlone, output->shape[1], output->shape[2]};
      }
      const device::Buffer alone(static_cast<size_t>(output->num_bytes()));
      output->data = alone.data();
      try {
        for (const std::string& fault : run_staged(memory_, variant, spec.desc, few)) {
          faults.push_back(fmt::format("{} tokens of them: {}", kAlone, fault));
        }
      } catch (const Error& error) {
        faults.push_back(error.what());
        if (error.code() == ErrorCode::kDeviceError) report_.stopped = fmt::format("{} of {}", variant.name, Op::kName);
        return;
      }
      if (std::memcmp(alone.data(), all, alone.size()) == 0) return;
      faults.push_back(fmt::format("the first {} tokens have other bits without the others", kAlone));
    }
  }

  // Keeps the error that used up most of its bound.
  template <class Op>
  void note_error(Row& row, double error, double bound, const Spec<Op>& spec) {
    const auto used = [](double of, double allowed) { return allowed > 0 ? of / allowed : of > 0 ? of : -1; };
    const bool is_first = row.worst_shape.empty();
    if (!is_first && !(used(error, bound) > used(row.error, row.bound))) return;
    row.error = error, row.bound = bound, row.worst_shape = shape_of(spec);
  }

  Row& row_of(const char* op, const std::string& variant, bool is_reference) {
    const auto found = std::find_if(report_.rows.begin(), report_.rows.end(),
                                    [&](const Row& row) { return row.op == op && row.variant == variant; });
    if (found != report_.rows.end()) return *found;
    Row& row = report_.rows.emplace_back();
    row.op = op, row.variant = variant, row.is_reference = is_reference;
    return row;
  }

  const device::Machine& machine_;
  const Options& options_;
  ProgressSink* progress_;
  device::Queue host_queue_;
  std::unique_ptr<device::Executor> executor_;
  StageMemory memory_;
  const ops::Backend* reference_ = nullptr;
  std::vector<const ops::Backend*> usable_;
  uint64_t stream_ = 0;
  Report report_;
};

}  // namespace

int Report::num_cases() const {
  int count = 0;
  for (const Row& row : rows) count += row.num_cases;
  return count;
}

bool Report::is_sound() const {
  return stopped.empty() && std::all_of(rows.begin(), rows.end(), [](const Row& row) { return row.num_failed == 0; });
}

Report verify(std::span<const ops::Backend* const> backends, const device::Machine& machine, const Options& options,
              ProgressSink* progress) {
  return Verifier(backends, machine, options, progress).run();
}

}  // namespace tessera::verify
