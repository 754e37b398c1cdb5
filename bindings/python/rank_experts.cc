// SPDX-License-Identifier: Apache-2.0
// The experts of a group of ranks (ops/rank_experts) on arrays of other libraries, and the group: ranks of one machine
// that find each other by the loopback and exchange rows through their GPUs' memory (comm/expert_exchange.h).
#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"
#include "bindings/c/placed_experts.h"
#include "bindings/python/arrays.h"
#include "bindings/python/module.h"
#include "bindings/python/weight.h"
#include "comm/expert_exchange.h"
#include "comm/tcp.h"
#include "ops/rank_experts/rank_experts.h"

namespace tessera::python {

namespace {

constexpr const char* kLoopback = "127.0.0.1";
constexpr double kJoinSeconds = 60;          // for the others to come
constexpr double kCloseSeconds = 60;         // for them to close too, and for what is queued to end
constexpr double kDropSeconds = 10;          // the same for a group that is dropped
constexpr double kMostCloseSeconds = 86400;  // that a caller may give
constexpr int64_t kMostChoices = 1024;       // experts of a token; kernels take fewer

// Where rank 0 is found.
struct RankListener {
  comm::Socket socket = comm::listen_at(kLoopback, 0);
  const int port = comm::port_of(socket);
};

// Who is lost. What the GPU does then waits for nobody.
class Loss final : public comm::LossSink {
 public:
  void lost(int /*rank*/, const std::string& message) override {
    const std::lock_guard<std::mutex> hold(lock_);
    message_ = message;
    if (exchange_ != nullptr) exchange_->end();
  }
  // Null: nothing any more. Whoever was lost before counts.
  void watch(comm::ExpertExchange* exchange) {
    const std::lock_guard<std::mutex> hold(lock_);
    exchange_ = exchange;
    if (exchange_ != nullptr && !message_.empty()) exchange_->end();
  }
  std::string message() const {
    const std::lock_guard<std::mutex> hold(lock_);
    return message_;
  }

 private:
  mutable std::mutex lock_;
  std::string message_;
  comm::ExpertExchange* exchange_ = nullptr;
};

// Ends an exchange that this outlives for so many seconds: calls of which the others' never came end then.
class Deadline {
 public:
  Deadline(comm::ExpertExchange& exchange, double seconds)
      : thread_([this, &exchange, seconds] {
          std::unique_lock<std::mutex> hold(lock_);
          const std::chrono::duration<double> limit(seconds);
          if (!changed_.wait_for(hold, limit, [this] { return is_over_; })) exchange.end();
        }) {}
  ~Deadline() {
    {
      const std::lock_guard<std::mutex> hold(lock_);
      is_over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool is_over_ = false;
  std::thread thread_;  // last: it uses the others
};

class ExpertGroup {
 public:
  ExpertGroup(DevicePtr device, int rank, int ranks, int port, const std::string& secret, RankListener* listener,
              int64_t max_tokens, int64_t top_k, int64_t hidden)
      : device_(std::move(device)) {
    bindings::check_size(ranks, 2, 65536, "ranks");
    bindings::check_size(rank, 0, ranks - 1, "rank");
    bindings::check_size(port, 1, 65535, "port");
    bindings::check_size(max_tokens, 1, bindings::kMaxTokens, "max_tokens");
    bindings::check_size(top_k, 1, kMostChoices, "top_k");
    bindings::check_size(hidden, 1, ops::kMaxLinearIn, "hidden");
    if (hidden % device::ExpertPeersShape::kValues != 0) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("hidden: expected a multiple of {}, found {}", device::ExpertPeersShape::kValues, hidden));
    }
    if ((listener != nullptr) != (rank == 0)) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("listener: expected {} of rank {}", rank == 0 ? "one" : "None", rank));
    }
    if (listener != nullptr && !listener->socket.is_open()) {
      fail(ErrorCode::kInvalidArgument, "listener: expected one that no group has used, found a used one");
    }
    comm::BootstrapOptions options;
    options.place.rank = rank, options.place.world = ranks;
    options.place.address = kLoopback, options.place.port = port;
    options.secret = secret, options.join_seconds = kJoinSeconds;
    make_current();
    const nb::gil_scoped_release release;
    bootstrap_ = std::make_unique<comm::Bootstrap>(options, nullptr, &loss_,
                                                   listener != nullptr ? std::move(listener->socket) : comm::Socket());
    if (!device_->is_gpu()) {
      why_not_ = "the context is of a CPU";
      return;
    }
    exchange_ =
        comm::make_expert_exchange(*bootstrap_, {.max_tokens = max_tokens, .top_k = top_k, .hidden = hidden}, why_not_);
    loss_.watch(exchange_.get());
  }
  ~ExpertGroup() {
    try {
      close(kDropSeconds);
      free();  // of one that has failed
    } catch (const std::exception&) {
      // What failed on the GPU its context says too.
    }
  }
  ExpertGroup(const ExpertGroup&) = delete;
  ExpertGroup& operator=(const ExpertGroup&) = delete;

  const DevicePtr& device() const { return device_; }
  // Empty: ranks reach each other.
  const std::string& why_not() const { return why_not_; }

  // Throws where no call can be made any more.
  void check() const {
    const std::string lost = loss_.message();
    if (!lost.empty()) fail(ErrorCode::kDeviceError, "exchange of experts' rows: " + lost);
    if (is_closed_) fail(ErrorCode::kInvalidArgument, "group: expected one that lives, found a closed one");
    if (exchange_ == nullptr) fail(ErrorCode::kUnsupported, "group: ranks don't reach each other: " + why_not_);
  }
  // By who holds the context, so that close() waits.
  const device::ExpertPeers& peers() const {
    check();
    return exchange_->peers();
  }

  // All ranks close together: where one does not within so many seconds, its calls and those of the others end as
  // those of a failed group. What was queued before is done when this returns. The seconds are for all waits together;
  // ranks other than 0 wait half as long again for rank 0, who says which rank is missing.
  void close(std::optional<double> given) {
    const double seconds = given.value_or(kCloseSeconds);
    if (!(seconds > 0 && seconds <= kMostCloseSeconds)) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("seconds: expected more than 0, at most {}, found {}", kMostCloseSeconds, seconds));
    }
    if (is_closed_.exchange(true)) return;
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    const auto left = [end] {
      const std::chrono::duration<double> rest = end - std::chrono::steady_clock::now();
      return std::max(1e-3, rest.count());  // 0 would be no limit
    };
    std::string fault;
    std::exception_ptr failed;
    if (exchange_ != nullptr) {
      {
        const nb::gil_scoped_release release;
        fault = meet(left());  // all have queued their last call
        if (!fault.empty()) exchange_->end();
      }
      try {
        const Deadline deadline(*exchange_, left());
        try {
          device_->run([](tessera_context* context) { return tessera_context_synchronize(context); });
        } catch (...) {
          failed = std::current_exception();
        }
        make_current();
        device_->run([this](tessera_context*) {
          exchange_->disconnect();
          return TESSERA_OK;
        });
      } catch (...) {
        if (failed == nullptr) failed = std::current_exception();
      }
    }
    {
      const nb::gil_scoped_release release;
      // Nobody's memory goes while a kernel of another may write into it, or another has it mapped.
      if (exchange_ != nullptr && fault.empty()) fault = meet(left());
      loss_.watch(nullptr);
      if (exchange_ != nullptr) exchange_->end();
      if (fault.empty()) {
        bootstrap_->leave();
      } else {
        bootstrap_->fail("it closed its exchange of experts' rows without the others: " + fault);
      }
    }
    free();
    if (failed != nullptr) std::rethrow_exception(failed);
  }
  // As a rank that is lost, at once: its calls end, the others' do, and nothing here waits for them.
  void fail_with(const std::string& why) {
    if (is_closed_.exchange(true)) return;
    const nb::gil_scoped_release release;
    if (exchange_ != nullptr) exchange_->end();
    bootstrap_->fail(why);
  }

 private:
  void make_current() const {
    device_->run([](tessera_context* context) {
      context->executor->make_current();
      return TESSERA_OK;
    });
  }
  // Of a group that is over.
  void free() {
    loss_.watch(nullptr);
    make_current();
    device_->run([this](tessera_context*) {
      exchange_.reset();
      return TESSERA_OK;
    });
    const nb::gil_scoped_release release;
    bootstrap_.reset();
  }
  // Returns when all ranks have come so far; or why they won't.
  std::string meet(double seconds) {
    try {
      bootstrap_->all_gather({}, seconds);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }

  DevicePtr device_;
  Loss loss_;  // before who tells it
  std::unique_ptr<comm::Bootstrap> bootstrap_;
  std::unique_ptr<comm::ExpertExchange> exchange_;
  std::string why_not_;
  std::atomic<bool> is_closed_{false};
};

ops::RankExperts::Desc desc_of(int64_t hidden, int64_t inner, int64_t num_local, int64_t top_k, int rank, int ranks,
                               float swiglu_limit) {
  bindings::check_size(hidden, 1, ops::kMaxLinearIn, "hidden");
  bindings::check_size(inner, 1, ops::kMaxLinearIn, "inner");
  bindings::check_size(ranks, 2, 65536, "ranks");
  bindings::check_size(rank, 0, ranks - 1, "rank");
  bindings::check_size(num_local, 1, 65536, "num_local");
  bindings::check_size(top_k, 1, num_local * ranks, "top_k");
  if (!(swiglu_limit >= 0)) {
    fail(ErrorCode::kInvalidArgument, fmt::format("swiglu_limit: expected at least 0, found {}", swiglu_limit));
  }
  return {.routed = {.hidden = hidden,
                     .inner = inner,
                     .first_expert = rank * num_local,
                     .num_local = num_local,
                     .num_experts = ranks * num_local,
                     .top_k = top_k,
                     .swiglu_limit = swiglu_limit},
          .world = ranks};
}

class RankExperts {
 public:
  RankExperts(const WeightPtr& w1, const WeightPtr& w3, const WeightPtr& w2, int64_t top_k, int rank, int ranks,
              float swiglu_limit, int64_t max_tokens)
      : kept_{w1, w3, w2}, device_(w1->device()), max_tokens_(max_tokens) {
    for (const auto& [weight, name] : {std::pair{w1, "w1"}, std::pair{w3, "w3"}, std::pair{w2, "w2"}}) {
      if (const std::string format = weight->format(); format != "nvfp4") {
        fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected nvfp4, found {}", name, format));
      }
    }
    const ops::RankExperts::Desc desc = desc_of(w1->cols(), w1->rows(), w1->count(), top_k, rank, ranks, swiglu_limit);
    bindings::check_size(max_tokens, 1, bindings::kMaxTokens, "max_tokens");
    check_device(device_, w3, "w3"), check_device(device_, w2, "w2");
    for (const auto& [weight, name] : {std::pair{w3, "w3"}, std::pair{w2, "w2"}}) {
      if (weight->count() != w1->count()) {
        fail(ErrorCode::kInvalidArgument,
             fmt::format("{}: expected {} matrices, found {}", name, w1->count(), weight->count()));
      }
    }
    device_->run([&](tessera_context* context) {
      context->executor->make_current();
      ops::Planner planner = context->planner();
      made_.op = planner.bind<ops::RankExperts>("experts of ranks", desc);
      kernel_ = planner.lines().back().chosen;
      made_.weights = bindings::PlacedExperts(*context, made_.op, desc.routed, w1->views().data(), w3->views().data(),
                                              w2->views().data());
      made_.workspace = device::Buffer(static_cast<size_t>(made_.op.workspace_bytes(max_tokens)), context->memory());
      return TESSERA_OK;
    });
  }
  ~RankExperts() {
    try {
      device_->run([this](tessera_context* context) {
        context->executor->make_current();
        made_ = {};
        return TESSERA_OK;
      });
    } catch (const std::exception&) {
      // The device has failed: its memory goes with the process.
    }
  }
  RankExperts(const RankExperts&) = delete;
  RankExperts& operator=(const RankExperts&) = delete;

  nb::object run(const ExpertGroup& group, nb::handle x, nb::handle experts, nb::handle routing, nb::handle out,
                 std::optional<int64_t> most_tokens) const {
    const ops::MoeExperts::Desc& routed = made_.op.desc.routed;
    if (group.device() != device_) fail(ErrorCode::kInvalidArgument, "group: expected one of this context");
    const Array in = read_array(*device_, x, "x", {Element::kBf16}, {kAny, routed.hidden});
    const int64_t num_tokens = in.shape[0], most = most_tokens.value_or(max_tokens_);
    bindings::check_size(most, 1, max_tokens_, "most_tokens");
    bindings::check_size(num_tokens, 0, most, "x: tokens");
    const Array ids = read_array(*device_, experts, "experts", {Element::kI32}, {num_tokens, routed.top_k});
    const Array weights = read_array(*device_, routing, "routing", {Element::kF32}, {num_tokens, routed.top_k});
    const auto [made, y] = output(device_, out, x, Element::kBf16, {num_tokens, routed.hidden});
    if (num_tokens > 0) {
      bindings::check_pointer(in.data(), bindings::kDataAlignment, "x");
      bindings::check_pointer(y.data(), bindings::kDataAlignment, "out");
    }
    ops::RankExperts::Args args;
    args.routed.x = {in.data(), routed.activation, {num_tokens, routed.hidden}};
    args.routed.experts = ids.as<int32_t>(), args.routed.routing = weights.as<float>();
    args.routed.w1 = made_.weights.w1(), args.routed.w3 = made_.weights.w3(), args.routed.w2 = made_.weights.w2();
    args.out = {y.data(), routed.activation, {num_tokens, routed.hidden}};
    args.num_tokens = num_tokens, args.most_tokens = most;
    args.workspace = made_.workspace.data();
    device_->run([&](tessera_context* context) {
      args.peers = &group.peers();
      context->executor->make_current();
      made_.op.run(args, context->queue());
      return TESSERA_OK;
    });
    return made;
  }
  const std::string& kernel() const { return kernel_; }

 private:
  struct Made {
    ops::Bound<ops::RankExperts> op;
    bindings::PlacedExperts weights;
    device::Buffer workspace;
  };

  std::array<WeightPtr, 3> kept_;  // what is not packed is read where it is
  DevicePtr device_;
  int64_t max_tokens_;
  std::string kernel_;
  Made made_;
};

// Why no kernel here computes a share of such experts with NVFP4 weights; empty: one does.
std::string why_no_kernel(const DevicePtr& device, int64_t hidden, int64_t inner, int64_t num_local, int64_t top_k,
                          int rank, int ranks) {
  const ops::RankExperts::Desc desc = desc_of(hidden, inner, num_local, top_k, rank, ranks, 0);
  std::string why_not;
  device->run([&](tessera_context* context) {
    try {
      context->planner().bind<ops::RankExperts>("experts of ranks", desc);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      why_not = error.what();
    }
    return TESSERA_OK;
  });
  return why_not;
}

}  // namespace

void add_rank_experts(nb::module_& m) {
  using nb::arg;
  nb::class_<RankListener>(m, "RankListener").def(nb::init<>()).def_ro("port", &RankListener::port);
  // Groups that live when the process ends: what they had queued ends first, while what it uses is there.
  const nb::object living = nb::module_::import_("weakref").attr("WeakSet")();
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([living] {
    for (nb::handle group : nb::list(living)) nb::cast<ExpertGroup&>(group).fail_with("its process ends");
  }));
  nb::class_<ExpertGroup>(m, "ExpertGroup", nb::is_weak_referenceable())
      .def(
          "__init__",
          [living](nb::pointer_and_handle<ExpertGroup> self, DevicePtr context, int rank, int ranks, int port,
                   const std::string& secret, RankListener* listener, int64_t max_tokens, int64_t top_k,
                   int64_t hidden) {
            new (self.p)
                ExpertGroup(std::move(context), rank, ranks, port, secret, listener, max_tokens, top_k, hidden);
            living.attr("add")(self.h);
          },
          arg("context"), nb::kw_only(), arg("rank"), arg("ranks"), arg("port"), arg("secret"),
          arg("listener").none() = nb::none(), arg("max_tokens"), arg("top_k"), arg("hidden"))
      .def_prop_ro("why_not", &ExpertGroup::why_not)
      .def("check", &ExpertGroup::check)
      .def("fail", &ExpertGroup::fail_with, arg("why"))
      .def("close", &ExpertGroup::close, arg("seconds") = nb::none());
  nb::class_<RankExperts>(m, "RankExperts")
      .def(nb::init<const WeightPtr&, const WeightPtr&, const WeightPtr&, int64_t, int, int, float, int64_t>(),
           arg("w1"), arg("w3"), arg("w2"), nb::kw_only(), arg("top_k"), arg("rank"), arg("ranks"),
           arg("swiglu_limit") = 0.0f, arg("max_tokens") = 256)
      .def("__call__", &RankExperts::run, arg("group"), arg("x"), arg("experts"), arg("routing"),
           arg("out") = nb::none(), arg("most_tokens") = nb::none())
      .def_prop_ro("kernel", &RankExperts::kernel)
      .def_static("why_not", &why_no_kernel, arg("context"), nb::kw_only(), arg("hidden"), arg("inner"),
                  arg("num_local"), arg("top_k"), arg("rank"), arg("ranks"));
}

}  // namespace tessera::python
