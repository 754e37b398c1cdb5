// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ranks that are threads of this process and know each other through sockets of it.
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/bootstrap.h"

namespace tessera::testing {

// Calls work(bootstrap) on a thread for each rank; what each threw ("" for nothing), when all have ended. `sink` is
// rank 0's.
template <class Work>
std::vector<std::string> run_joined(int world, const Work& work, comm::LossSink* sink = nullptr) {
  comm::Socket listener = comm::listen_at("127.0.0.1", 0);
  const int port = comm::port_of(listener);
  std::vector<std::string> errors(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      comm::BootstrapOptions options;
      options.place.rank = rank, options.place.world = world, options.place.port = port;
      options.secret = "a secret of the ranks";
      options.join_seconds = 60;
      try {
        comm::Bootstrap bootstrap(options, nullptr, rank == 0 ? sink : nullptr,
                                  rank == 0 ? std::move(listener) : comm::Socket());
        work(bootstrap);
      } catch (const Error& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

}  // namespace tessera::testing
