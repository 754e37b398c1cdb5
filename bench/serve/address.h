// SPDX-License-Identifier: Apache-2.0
#pragma once
// A server to ask, and one question to it.
#include <sys/socket.h>

#include <stdexcept>
#include <string>
#include <string_view>

namespace tessera::bench {

// No server answers there: not what was asked for is wrong, but what is there to ask.
class Unreachable : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An http:// URL, its host resolved.
class Address {
 public:
  // "http://HOST[:PORT][/]". Throws kInvalidArgument, naming `flag`, for anything else (https too) and for unknown
  // hosts.
  static Address parse(std::string_view url, std::string_view flag);

  const std::string& url() const { return url_; }    // without a slash at the end
  const std::string& host() const { return host_; }  // with the port, as a Host field has it
  // A socket that does not block, whose connecting has begun. Throws Unreachable.
  int connect() const;

 private:
  std::string url_, host_;
  sockaddr_storage storage_{};
  socklen_t size_ = 0;
};

// A request as bytes: `key` empty sends none. The connection ends with the answer.
std::string request_bytes(const Address& address, std::string_view method, std::string_view path, std::string_view key,
                          std::string_view body);

struct Got {
  int status = 0;
  std::string body;
};
// Asks and waits, at most `seconds`. Throws Unreachable where nothing whole comes back, kDataLoss for what is no HTTP.
Got get(const Address& address, std::string_view path, std::string_view key, double seconds);

}  // namespace tessera::bench
