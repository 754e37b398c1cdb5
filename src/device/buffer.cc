// SPDX-License-Identifier: Apache-2.0
#include "device/buffer.h"

#include <fmt/format.h>

#include <new>
#include <utility>

#include "base/error.h"
#include "base/integer_math.h"

namespace tessera::device {

Buffer::Buffer(size_t bytes, MemorySpace& memory) : memory_(&memory), bytes_(bytes) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX - kBufferAlignment) throw std::bad_alloc();
  data_ = memory.allocate(round_up(bytes, kBufferAlignment));
}

Buffer::Buffer(Buffer&& other) noexcept
    : memory_(other.memory_), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ != nullptr) memory_->release(data_, round_up(bytes_, kBufferAlignment));
}

Buffer Buffer::clone() const {
  Buffer copy(bytes_, *memory_);
  memory_->copy(copy.data_, data_, bytes_);
  return copy;
}

Buffer Buffer::clone_into(MemorySpace& memory) const {
  TESSERA_CHECK(memory_->is_host(), "only the host's bytes go elsewhere");
  Buffer copy(bytes_, memory);
  memory.upload(copy.data_, data_, bytes_);
  return copy;
}

Tensor::Tensor(DType dtype, const Shape& shape, MemorySpace& memory) {
  view_ = {nullptr, dtype, shape};
  buffer_ = Buffer(static_cast<size_t>(view_.num_bytes()), memory);
  view_.data = buffer_.data();
}

Tensor Tensor::clone_into(MemorySpace& memory) const {
  Tensor copy;
  copy.buffer_ = buffer_.clone_into(memory);
  copy.view_ = {copy.buffer_.data(), view_.dtype, view_.shape};
  return copy;
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
