// SPDX-License-Identifier: Apache-2.0
#include "device/buffer.h"

#include <fmt/format.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/integer_math.h"
#include "base/test_seams.h"

namespace tessera::device {

namespace {

constexpr size_t kLargePage = size_t{2} << 20;

// A fault and a translation per 2 MiB instead of 4 KiB, for weights that every token reads. What doesn't fill a large
// page stays on small ones, so nothing is wasted; a system that won't is no error.
void prefer_large_pages(void* data, size_t bytes) {
#if defined(__linux__)
  if (bytes >= kLargePage) madvise(data, bytes / kLargePage * kLargePage, MADV_HUGEPAGE);
#endif
}

}  // namespace

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX - kBufferAlignment || seams::is_failing_allocation()) throw std::bad_alloc();
  const size_t whole = round_up(bytes, kBufferAlignment);
  if (posix_memalign(&data_, whole >= kLargePage ? kLargePage : kBufferAlignment, whole) != 0) {
    data_ = nullptr;
    throw std::bad_alloc();
  }
  prefer_large_pages(data_, whole);
  std::memset(data_, 0, whole);
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Buffer::~Buffer() {
  std::free(data_);
}

Buffer Buffer::clone() const {
  Buffer copy(bytes_);
  if (bytes_ > 0) std::memcpy(copy.data_, data_, bytes_);
  return copy;
}

Tensor::Tensor(DType dtype, const Shape& shape) {
  view_ = {nullptr, dtype, shape};
  buffer_ = Buffer(static_cast<size_t>(view_.num_bytes()));
  view_.data = buffer_.data();
}

size_t arena_bytes(DType dtype, const Shape& shape) {
  return round_up(static_cast<size_t>(TensorView{nullptr, dtype, shape}.num_bytes()), kBufferAlignment);
}

TensorView Arena::take(DType dtype, const Shape& shape) {
  const size_t bytes = arena_bytes(dtype, shape);
  TESSERA_CHECK(bytes <= buffer_.size() - used_,
                fmt::format("{} of {} bytes used, {} wanted", used_, buffer_.size(), bytes));
  TensorView view{buffer_.as<char>() + used_, dtype, shape};
  used_ += bytes;
  return view;
}

}  // namespace tessera::device
