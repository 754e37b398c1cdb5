// SPDX-License-Identifier: Apache-2.0
#pragma once
// Arrays of other libraries (DLPack, buffers) on their way to the C interface, and results on their way back.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python/errors.h"

namespace tessera::python {

// Of an array's elements. BF16 may come as uint16, its bits, for libraries that do not have it; E2M1 and E4M3 as uint8.
enum class Element { kF32, kBf16, kByte, kE4m3, kI32, kI64 };

// A context of the C interface, which serves one thread at a time. What is made from it shares it.
class Device {
 public:
  Device(const std::string& name, uintptr_t stream, int num_threads);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Calls call(context), a function of the C interface, without the GIL and alone; throws what it said.
  template <class Call>
  void run(Call&& call) const;

  const std::string& name() const { return name_; }
  bool is_gpu() const { return ordinal_ >= 0; }
  int ordinal() const { return ordinal_; }  // -1: the CPU

 private:
  std::string name_;
  int ordinal_ = -1;
  tessera_context* context_ = nullptr;
  mutable std::mutex lock_;
};

using DevicePtr = std::shared_ptr<Device>;

// A dense row-major array of the device; keeps what owns the memory alive.
struct Array {
  nb::ndarray<nb::ro> owner;
  Element element = Element::kByte;
  std::vector<int64_t> shape;

  void* data() const { return const_cast<void*>(owner.data()); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data());
  }
};

enum class Access { kRead, kWrite };

constexpr int64_t kAny = -1;

// `object` as an array of one of `elements` and of `shape`, where kAny stands for any size. Throws TypeError where it
// is no array, ValueError (kInvalidArgument) naming it, what was expected and what was found where it is another one,
// not contiguous, on another device, or read-only where it is written.
Array read_array(const Device& device, nb::handle object, const char* name, std::initializer_list<Element> elements,
                 std::initializer_list<int64_t> shape, Access access = Access::kRead);

// A new array for a result: of the library that `like` is of (NumPy, PyTorch; another: any that takes DLPack). NumPy
// has no BF16 and gets its bits as uint16.
nb::object make_array(const DevicePtr& device, nb::handle like, Element element, const std::vector<int64_t>& shape);

// `out` as it is given, or a new array; and where to write. Of two or three dimensions.
std::pair<nb::object, Array> output(const DevicePtr& device, nb::handle out, nb::handle like, Element element,
                                    const std::vector<int64_t>& shape);

// "[3, 16]".
std::string shape_text(const std::vector<int64_t>& shape);

template <class Call>
void Device::run(Call&& call) const {
  const nb::gil_scoped_release release;
  const std::lock_guard<std::mutex> hold(lock_);
  check(call(context_));
}

}  // namespace tessera::python
