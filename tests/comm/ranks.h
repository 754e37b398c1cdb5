// SPDX-License-Identifier: Apache-2.0
#pragma once
// A thread for each rank, and what ranks do together.
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "base/rng.h"
#include "comm/communicator.h"

namespace tessera::testing {

// Calls work(communicator, queue) on a thread for each rank; what each threw ("" for nothing), when all have ended.
template <class Work>
std::vector<std::string> run_ranks(std::vector<std::unique_ptr<comm::Communicator>>& ranks, const Work& work) {
  std::vector<std::string> errors(ranks.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        device::Queue queue(1);
        work(*ranks[r], queue);
      } catch (const std::exception& error) {
        errors[r] = error.what();
        ranks[r]->abort("rank " + std::to_string(r) + " failed: " + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// What every collective leaves, one array after the other.
inline std::vector<float> run_all(comm::Communicator& comm, device::Queue& queue, int64_t count) {
  Rng rng(static_cast<uint64_t>(comm.rank() + 1));
  const int world = comm.world();
  std::vector<float> in(static_cast<size_t>(count * world)), result;
  for (float& value : in) value = static_cast<float>(rng.normal());
  const auto view = [](std::vector<float>& values, int64_t n) { return TensorView{values.data(), DType::kF32, {n}}; };
  const auto keep = [&](const std::vector<float>& values) {
    result.insert(result.end(), values.begin(), values.end());
  };
  std::vector<float> sum(in.size()), share(static_cast<size_t>(count)), gathered(in.size()), exchanged(in.size());
  comm.all_reduce(view(in, count * world), view(sum, count * world), queue);
  comm.reduce_scatter(view(in, count * world), view(share, count), queue);
  std::vector<float> own(in.begin(), in.begin() + count);
  comm.all_gather(view(own, count), view(gathered, count * world), queue);
  std::vector<float> again(in.size()), all(in.size() * static_cast<size_t>(world));
  const comm::Communicator::Gathered arrays[] = {{view(in, count * world), view(all, count * world * world)},
                                                 {view(own, 0), view(again, 0)},
                                                 {view(own, count), view(again, count * world)}};
  comm.all_gather(arrays, queue);
  const std::vector<int64_t> bytes(static_cast<size_t>(world), count * 4);
  comm.all_to_all({in.data(), bytes}, {exchanged.data(), bytes}, queue);
  comm.broadcast(view(own, count), world - 1, queue);
  comm.barrier(queue);
  comm.check();
  for (const auto* values : {&sum, &share, &gathered, &again, &all, &exchanged, &own}) keep(*values);
  comm.all_reduce(view(in, count * world), view(in, count * world), queue);
  keep(in);
  return result;
}

}  // namespace tessera::testing
