// SPDX-License-Identifier: Apache-2.0
#include "comm/communicator.h"

#include <fmt/format.h>

#include <vector>

#include "base/error.h"

namespace tessera::comm {

namespace {

void check_that(bool condition, const char* collective, const std::string& expected, const std::string& found) {
  if (condition) return;
  fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected {}, found {}", collective, expected, found));
}

std::string described(const TensorView& view) {
  return fmt::format("{} {}", dtype_name(view.dtype), view.shape.to_string());
}

bool can_sum(const TensorView& view) {
  return view.dtype == DType::kF32 || view.dtype == DType::kBF16;
}

void check_sum(const char* collective, const TensorView& in, const TensorView& out) {
  check_that(can_sum(in) && can_sum(out), collective, "F32 or BF16",
             fmt::format("{} into {}", described(in), described(out)));
}

void check_bytes(const char* collective, const TensorView& view) {
  check_that(dtype_bits(view.dtype) % 8 == 0, collective, "elements of whole bytes", described(view));
}

// `whole` is `part` of every rank.
void check_gathered(const char* collective, const TensorView& part, const TensorView& whole, int world) {
  check_that(whole.shape.num_elements() == world * part.shape.num_elements(), collective,
             fmt::format("{} times the elements of {}", world, described(part)), described(whole));
}

void check_disjoint(const char* collective, const TensorView& a, const TensorView& b) {
  const auto begin = [](const TensorView& view) { return reinterpret_cast<uintptr_t>(view.data); };
  const auto end = [&](const TensorView& view) { return begin(view) + static_cast<uintptr_t>(view.num_bytes()); };
  check_that(end(a) <= begin(b) || end(b) <= begin(a), collective, "arrays that do not overlap", "ones that do");
}

}  // namespace

Communicator::Communicator(int rank, int world) : rank_(rank), world_(world) {
  check_that(world >= 1 && world <= kMaxWorld, "world size", fmt::format("1 to {}", kMaxWorld),
             fmt::format("{}", world));
  check_that(rank >= 0 && rank < world, "rank", fmt::format("0 to {}", world - 1), fmt::format("{}", rank));
}

void Communicator::all_reduce(const TensorView& in, const TensorView& out, device::Queue& queue) {
  check_sum("all_reduce", in, out);
  check_that(in.shape == out.shape, "all_reduce", described(in), described(out));
  if (in.shape.num_elements() == 0) return;
  if (in.data != out.data || in.dtype != out.dtype) check_disjoint("all_reduce", in, out);
  do_all_reduce(in, out, queue);
}

// Whether there is anything to.
bool Communicator::is_to_gather(const TensorView& in, const TensorView& out) const {
  check_bytes("all_gather", in);
  check_that(in.dtype == out.dtype, "all_gather", described(in), described(out));
  check_gathered("all_gather", in, out, world_);
  if (in.shape.num_elements() == 0) return false;
  check_disjoint("all_gather", in, out);
  return true;
}

void Communicator::all_gather(const TensorView& in, const TensorView& out, device::Queue& queue) {
  if (is_to_gather(in, out)) do_all_gather(in, out, queue);
}

void Communicator::all_gather(std::span<const Gathered> arrays, device::Queue& queue) {
  std::vector<Gathered> wanted;
  for (const Gathered& array : arrays) {
    if (is_to_gather(array.in, array.out)) wanted.push_back(array);
  }
  if (!wanted.empty()) do_gather_together(wanted, queue);
}

void Communicator::reduce_scatter(const TensorView& in, const TensorView& out, device::Queue& queue) {
  check_sum("reduce_scatter", in, out);
  check_gathered("reduce_scatter", out, in, world_);
  if (out.shape.num_elements() == 0) return;
  check_disjoint("reduce_scatter", in, out);
  do_reduce_scatter(in, out, queue);
}

void Communicator::check_runs(const Runs& runs, const char* name) const {
  check_that(static_cast<int>(runs.bytes.size()) == world_, "all_to_all", fmt::format("{} runs to {}", world_, name),
             fmt::format("{}", runs.bytes.size()));
  for (const int64_t bytes : runs.bytes) {
    check_that(bytes >= 0, "all_to_all", fmt::format("runs of 0 bytes or more to {}", name), fmt::format("{}", bytes));
  }
}

void Communicator::all_to_all(const Runs& send, const Runs& receive, device::Queue& queue) {
  check_runs(send, "send"), check_runs(receive, "receive");
  const size_t self = static_cast<size_t>(rank_);
  check_that(send.bytes[self] == receive.bytes[self], "all_to_all",
             fmt::format("{} bytes from oneself, as sent", send.bytes[self]), fmt::format("{}", receive.bytes[self]));
  do_all_to_all(send, receive, queue);
}

void Communicator::broadcast(const TensorView& data, int root, device::Queue& queue) {
  check_bytes("broadcast", data);
  check_that(root >= 0 && root < world_, "broadcast", fmt::format("a root from 0 to {}", world_ - 1),
             fmt::format("{}", root));
  if (data.shape.num_elements() == 0) return;
  do_broadcast(data, root, queue);
}

void Communicator::barrier(device::Queue& queue) {
  do_barrier(queue);
}

}  // namespace tessera::comm
