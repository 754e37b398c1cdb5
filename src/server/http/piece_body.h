// SPDX-License-Identifier: Apache-2.0
#pragma once
// A request's body for Beast's parser, in pieces: it grows without being copied, which would hold up the thread that
// serves everybody, and takes no room for bytes that were announced and have not come.
#include <algorithm>
#include <boost/beast/core/buffers_range.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/optional.hpp>
#include <cstddef>
#include <cstdint>
#include <string>

#include "server/service.h"

namespace tessera::server::http {

struct PieceBody {
  using value_type = BodyPieces;

  class reader {
   public:
    static constexpr size_t kPieceBytes = size_t{256} << 10;

    template <bool is_request, class Fields>
    explicit reader(boost::beast::http::header<is_request, Fields>&, value_type& pieces) : pieces_(pieces) {}
    void init(const boost::optional<uint64_t>&, boost::beast::error_code& error) { error = {}; }
    template <class Buffers>
    size_t put(const Buffers& buffers, boost::beast::error_code& error) {
      size_t num_bytes = 0;
      for (const auto buffer : boost::beast::buffers_range_ref(buffers)) {
        append(static_cast<const char*>(buffer.data()), buffer.size());
        num_bytes += buffer.size();
      }
      error = {};
      return num_bytes;
    }
    void finish(boost::beast::error_code& error) { error = {}; }

   private:
    void append(const char* bytes, size_t size) {
      while (size > 0) {
        if (pieces_.empty() || pieces_.back().size() == kPieceBytes) pieces_.emplace_back();
        std::string& last = pieces_.back();
        const size_t count = std::min(size, kPieceBytes - last.size());
        last.append(bytes, count);
        bytes += count, size -= count;
      }
    }

    value_type& pieces_;
  };
};

}  // namespace tessera::server::http
