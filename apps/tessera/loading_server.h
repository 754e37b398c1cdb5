// SPDX-License-Identifier: Apache-2.0
#pragma once
// The HTTP server on a thread of its own, from before the weights are there to its end.
#include <atomic>
#include <functional>
#include <thread>

#include "ranks.h"
#include "server/http/http_server.h"

namespace tessera::app {

class LoadingServer {
 public:
  // Serves from now on. Told to end before serve(), it ends the program with kExitOk, and what `ranks` started with it.
  // Both outlive it.
  LoadingServer(server::http::HttpServer& http, Ranks& ranks);
  // Ends the server at once.
  ~LoadingServer();
  LoadingServer(const LoadingServer&) = delete;
  LoadingServer& operator=(const LoadingServer&) = delete;

  // Lets `service` answer, calls `ready`, and returns when the server has ended. False, and nobody is called ready,
  // where it was told to end before.
  bool serve(server::Service& service, const std::function<void()>& ready);

 private:
  void end() noexcept;

  server::http::HttpServer& http_;
  std::atomic<bool> is_loading_{true};
  std::thread thread_;
};

}  // namespace tessera::app
