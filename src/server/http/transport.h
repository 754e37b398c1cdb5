// SPDX-License-Identifier: Apache-2.0
#pragma once
// A connection's bytes, with or without TLS. Included by the .cc files of this folder alone: Asio costs seconds.
#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <cstddef>
#include <memory>
#include <string_view>

namespace tessera::server::http {

namespace asio = boost::asio;
using boost::system::error_code;

// Used by one thread; one read and one write may be under way at once.
class Transport {
 public:
  virtual ~Transport() = default;
  // TLS' handshake, where there is TLS.
  virtual asio::awaitable<void> open(error_code& error) = 0;
  // At least one byte, or an error.
  virtual asio::awaitable<size_t> read(char* bytes, size_t size, error_code& error) = 0;
  // All of it, or an error.
  virtual asio::awaitable<void> write(std::string_view bytes, error_code& error) = 0;
  // Says that nothing more will be written, as politely as the kind allows.
  virtual asio::awaitable<void> finish() = 0;
  // Ends what is under way.
  virtual void close() = 0;
};

std::unique_ptr<Transport> plain_transport(asio::ip::tcp::socket socket);
// `context` must outlive it.
std::unique_ptr<Transport> tls_transport(asio::ip::tcp::socket socket, asio::ssl::context& context);

}  // namespace tessera::server::http
