// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/strings.h"
#include "comm/message.h"
#include "comm/rank_sum.h"

namespace tessera::comm {

namespace {

using Parts = std::vector<std::vector<uint8_t>>;  // by rank

class Tcp final : public Communicator {
 public:
  Tcp(Bootstrap& bootstrap, double limit_seconds)
      : Communicator(bootstrap.rank(), bootstrap.world()), bootstrap_(bootstrap), limit_seconds_(limit_seconds) {}
  void abort(const std::string& why) noexcept override { bootstrap_.fail(why); }
  void check() override { bootstrap_.check(); }

 protected:
  void do_all_reduce(const TensorView& in, const TensorView& out, device::Queue&) override {
    const std::string call = described("all_reduce", in, out);
    const int64_t count = in.shape.num_elements(), width = dtype_bits(in.dtype) / 8, piece = most_bytes() / width;
    for (int64_t done = 0; done < count; done += piece) {
      const int64_t part = std::min(piece, count - done);
      sum(gather(call, in.as<uint8_t>() + done * width, part * width), in.dtype, 0, part, out, done);
    }
  }

  void do_all_gather(const TensorView& in, const TensorView& out, device::Queue&) override {
    const int64_t bytes = in.num_bytes(), piece = most_bytes();
    for (int64_t done = 0; done < bytes; done += piece) {
      const int64_t part = std::min(piece, bytes - done);
      const Parts parts = gather(described("all_gather", in, out), in.as<uint8_t>() + done, part);
      for (size_t r = 0; r < parts.size(); ++r) {
        std::memcpy(out.as<uint8_t>() + static_cast<int64_t>(r) * bytes + done, parts[r].data(),
                    static_cast<size_t>(part));
      }
    }
  }

  void do_reduce_scatter(const TensorView& in, const TensorView& out, device::Queue&) override {
    const std::string call = described("reduce_scatter", in, out);
    const int64_t share = out.shape.num_elements(), width = dtype_bits(in.dtype) / 8, piece = most_bytes() / width;
    const int64_t own = rank() * share;
    for (int64_t done = 0; done < share * world(); done += piece) {
      const int64_t part = std::min(piece, share * world() - done);
      const Parts parts = gather(call, in.as<uint8_t>() + done * width, part * width);
      const int64_t begin = std::max(own, done), end = std::min(own + share, done + part);
      if (begin < end) sum(parts, in.dtype, begin - done, end - begin, out, begin - own);
    }
  }

  // Everybody gets everything, and keeps what is for it.
  void do_all_to_all(const Runs& send, const Runs& receive, device::Queue&) override {
    const auto* sizes = reinterpret_cast<const uint8_t*>(send.bytes.data());
    const Parts packed = gather("all_to_all: sizes", sizes, static_cast<int64_t>(send.bytes.size_bytes()));
    std::vector<std::vector<int64_t>> sent;  // [from][to]
    int64_t longest = 0;
    for (const std::vector<uint8_t>& bytes : packed) {
      std::vector<int64_t>& row = sent.emplace_back(send.bytes.size());
      std::memcpy(row.data(), bytes.data(), send.bytes.size_bytes());
      longest = std::max(longest, std::accumulate(row.begin(), row.end(), int64_t{0}));
    }
    const size_t self = static_cast<size_t>(rank());
    for (size_t r = 0; r < sent.size(); ++r) {
      if (sent[r][self] == receive.bytes[r]) continue;
      fail(ErrorCode::kDeviceError, fmt::format("all_to_all: rank {} sends {} bytes to rank {}, which expects {}", r,
                                                sent[r][self], rank(), receive.bytes[r]));
    }
    std::vector<uint8_t> own(static_cast<size_t>(longest));
    const int64_t num_own = std::accumulate(send.bytes.begin(), send.bytes.end(), int64_t{0});
    if (num_own > 0) std::memcpy(own.data(), send.data, static_cast<size_t>(num_own));
    for (int64_t done = 0; done < longest; done += most_bytes()) {
      const int64_t part = std::min(most_bytes(), longest - done);
      const Parts parts = gather("all_to_all", own.data() + done, part);
      auto* to = static_cast<uint8_t*>(receive.data);
      for (size_t r = 0; r < parts.size(); ++r) {
        const auto first = sent[r].begin();
        const int64_t begin = std::accumulate(first, first + rank(), int64_t{0}), end = begin + receive.bytes[r];
        const int64_t from = std::max(begin, done), until = std::min(end, done + part);
        if (from < until) {
          std::memcpy(to + from - begin, parts[r].data() + from - done, static_cast<size_t>(until - from));
        }
        to += receive.bytes[r];
      }
    }
  }

  void do_broadcast(const TensorView& data, int root, device::Queue&) override {
    const std::string call = fmt::format("{} from rank {}", described("broadcast", data, data), root);
    const int64_t bytes = data.num_bytes(), piece = most_bytes();
    for (int64_t done = 0; done < bytes; done += piece) {
      const int64_t part = std::min(piece, bytes - done);
      const Parts parts = gather(call, data.as<uint8_t>() + done, rank() == root ? part : 0);
      const std::vector<uint8_t>& from = parts[static_cast<size_t>(root)];
      if (rank() != root) std::memcpy(data.as<uint8_t>() + done, from.data(), static_cast<size_t>(part));
    }
  }

  void do_barrier(device::Queue&) override { gather("barrier", nullptr, 0); }

 private:
  static constexpr int64_t kMostCallBytes = 160;  // of the words that say which collective it is

  static std::string described(const char* name, const TensorView& in, const TensorView& out) {
    return fmt::format("{} of {} {} into {}", name, in.shape.num_elements(), dtype_name(in.dtype),
                       dtype_name(out.dtype));
  }

  // Of one rank in one message, a multiple of 16.
  int64_t most_bytes() const {
    return (static_cast<int64_t>(kMaxPayloadBytes) / world() - kMostCallBytes - 16) / 16 * 16;
  }

  // `bytes` of every rank, which is in the same collective of the same order: what is sent ends with its words.
  Parts gather(const std::string& call, const uint8_t* data, int64_t bytes) {
    std::vector<uint8_t> own;
    own.reserve(static_cast<size_t>(bytes + kMostCallBytes));
    if (bytes > 0) own.assign(data, data + bytes);
    const std::string words = fmt::format("{} of order {}", call, bootstrap_.num_orders());
    own.insert(own.end(), words.begin(), words.end());
    append_u32(own, static_cast<uint32_t>(words.size()));
    Parts parts = gather_or_name(call, own);
    for (size_t r = 0; r < parts.size(); ++r) {
      std::vector<uint8_t>& part = parts[r];
      const std::string theirs = words_of(part);
      if (theirs != words) {
        const std::string other = theirs.empty() ? fmt::format("no collective ({} bytes)", part.size()) : theirs;
        fail(ErrorCode::kDeviceError,
             fmt::format("rank {} calls {}, rank {} calls {}", r, printable(other, 160), rank(), words));
      }
      part.resize(part.size() - theirs.size() - sizeof(uint32_t));
    }
    return parts;
  }

  Parts gather_or_name(const std::string& call, const std::vector<uint8_t>& own) {
    try {
      return bootstrap_.all_gather(own, limit_seconds_);
    } catch (const Error& error) {
      fail(error.code(), fmt::format("{}: {}", call, error.what()));
    }
  }

  // Empty: the rank is in no collective, but hands numbers or facts round through the bootstrap.
  static std::string words_of(const std::vector<uint8_t>& part) {
    if (part.size() < sizeof(uint32_t)) return "";
    size_t at = part.size() - sizeof(uint32_t);
    const size_t end = at, size = read_u32(part, at);
    if (size > end) return "";
    return {part.begin() + static_cast<ptrdiff_t>(end - size), part.begin() + static_cast<ptrdiff_t>(end)};
  }

  // out[at...] = sum over ranks of their elements [first, first + count).
  static void sum(const Parts& parts, DType in, int64_t first, int64_t count, const TensorView& out, int64_t at) {
    const bool in_bf16 = in == DType::kBF16, out_bf16 = out.dtype == DType::kBF16;
    for (int64_t i = 0; i < count; ++i) {
      const auto value_of = [&](int r) { return load_value(parts[static_cast<size_t>(r)].data(), in_bf16, first + i); };
      store_value(out.data, out_bf16, at + i, sum_in_order(static_cast<int>(parts.size()), value_of));
    }
  }

  Bootstrap& bootstrap_;
  const double limit_seconds_;
};

}  // namespace

std::unique_ptr<Communicator> make_tcp(Bootstrap& bootstrap, double limit_seconds) {
  return std::make_unique<Tcp>(bootstrap, limit_seconds);
}

}  // namespace tessera::comm
