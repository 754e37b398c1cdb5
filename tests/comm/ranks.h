// SPDX-License-Identifier: Apache-2.0
#pragma once
// A thread for each rank.
#include <exception>
#include <string>
#include <thread>
#include <vector>

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

}  // namespace tessera::testing
