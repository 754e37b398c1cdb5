// SPDX-License-Identifier: Apache-2.0
#include "server/http/transport.h"

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <utility>

namespace tessera::server::http {

namespace {

using asio::ip::tcp;

auto into(error_code& error) {
  return asio::redirect_error(asio::use_awaitable, error);
}

class PlainTransport final : public Transport {
 public:
  explicit PlainTransport(tcp::socket socket) : socket_(std::move(socket)) {}
  asio::awaitable<void> open(error_code&) override { co_return; }
  asio::awaitable<size_t> read(char* bytes, size_t size, error_code& error) override {
    const size_t count = co_await socket_.async_read_some(asio::buffer(bytes, size), into(error));
    co_return count;
  }
  asio::awaitable<void> write(std::string_view bytes, error_code& error) override {
    co_await asio::async_write(socket_, asio::buffer(bytes.data(), bytes.size()), into(error));
  }
  asio::awaitable<void> finish() override {
    error_code ignored;
    socket_.shutdown(tcp::socket::shutdown_send, ignored);
    co_return;
  }
  void close() override {
    error_code ignored;
    socket_.close(ignored);
  }

 private:
  tcp::socket socket_;
};

class TlsTransport final : public Transport {
 public:
  TlsTransport(tcp::socket socket, asio::ssl::context& context) : stream_(std::move(socket), context) {}
  asio::awaitable<void> open(error_code& error) override {
    co_await stream_.async_handshake(asio::ssl::stream_base::server, into(error));
  }
  asio::awaitable<size_t> read(char* bytes, size_t size, error_code& error) override {
    const size_t count = co_await stream_.async_read_some(asio::buffer(bytes, size), into(error));
    co_return count;
  }
  asio::awaitable<void> write(std::string_view bytes, error_code& error) override {
    co_await asio::async_write(stream_, asio::buffer(bytes.data(), bytes.size()), into(error));
  }
  // Every answer says where it ends, so no client needs close_notify to know; waiting for one would only hold the
  // connection.
  asio::awaitable<void> finish() override {
    error_code ignored;
    stream_.next_layer().shutdown(tcp::socket::shutdown_send, ignored);
    co_return;
  }
  void close() override {
    error_code ignored;
    stream_.next_layer().close(ignored);
  }

 private:
  asio::ssl::stream<tcp::socket> stream_;
};

}  // namespace

std::unique_ptr<Transport> plain_transport(tcp::socket socket) {
  return std::make_unique<PlainTransport>(std::move(socket));
}
std::unique_ptr<Transport> tls_transport(tcp::socket socket, asio::ssl::context& context) {
  return std::make_unique<TlsTransport>(std::move(socket), context);
}

}  // namespace tessera::server::http
