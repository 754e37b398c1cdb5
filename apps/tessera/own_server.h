// SPDX-License-Identifier: Apache-2.0
#pragma once
// tessera serve as a process of its own, on a free port of 127.0.0.1, for as long as the object lives.
#include <sys/types.h>

#include <string>
#include <vector>

namespace tessera::app {

class OwnServer {
 public:
  // Starts this program's serve with `flags` and waits until it takes requests. What it says on stderr is seen. Throws
  // kInvalidArgument where it ends instead, kCancelled on Ctrl-C.
  explicit OwnServer(const std::vector<std::string>& flags);
  // Asks it to end, and ends it after ten seconds.
  ~OwnServer();
  OwnServer(const OwnServer&) = delete;
  OwnServer& operator=(const OwnServer&) = delete;

  const std::string& url() const { return url_; }

 private:
  void end();

  pid_t process_ = -1;
  std::string url_;
};

}  // namespace tessera::app
