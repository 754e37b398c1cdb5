// SPDX-License-Identifier: Apache-2.0
#include "loading_server.h"

#include "interrupt.h"
#include "verb.h"

namespace tessera::app {

LoadingServer::LoadingServer(server::http::HttpServer& http, Ranks& ranks) : http_(http) {
  thread_ = std::thread([this, &ranks] {
    http_.run();
    if (!is_loading_) return;
    // Whoever loads may be in the middle of a read of gigabytes or of a copy to a device, and holds nothing that
    // outlives the process.
    ranks.stop(kExitOk);
  });
}

LoadingServer::~LoadingServer() {
  end();
}

void LoadingServer::end() noexcept {
  if (!thread_.joinable()) return;
  is_loading_ = false;
  const bool was_interrupted = interrupted();
  http_.drain();
  http_.drain();
  thread_.join();
  interrupted() = was_interrupted;  // nobody asked for this end
}

bool LoadingServer::serve(server::Service& service, const std::function<void()>& ready) {
  is_loading_ = false;
  const bool is_ready = !http_.has_been_told_to_end();
  if (is_ready) {
    http_.attach(service);
    try {
      ready();
    } catch (...) {
      end();  // the service goes before this does
      throw;
    }
  }
  thread_.join();
  return is_ready;
}

}  // namespace tessera::app
