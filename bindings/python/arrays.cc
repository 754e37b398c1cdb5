// SPDX-License-Identifier: Apache-2.0
#include "bindings/python/arrays.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>

#include "base/error.h"

namespace tessera::python {

namespace {

using nb::dlpack::dtype_code;

struct ElementType {
  Element element;
  dtype_code code;
  int bits, lanes;
};

// What may come; the first of an element is what goes back.
constexpr ElementType kElementTypes[] = {
    {Element::kF32, dtype_code::Float, 32, 1},         {Element::kBf16, dtype_code::Bfloat, 16, 1},
    {Element::kBf16, dtype_code::UInt, 16, 1},         {Element::kByte, dtype_code::UInt, 8, 1},
    {Element::kByte, dtype_code::Float4_E2M1FN, 4, 2}, {Element::kE4m3, dtype_code::Float8_E4M3FN, 8, 1},
    {Element::kI32, dtype_code::Int, 32, 1},           {Element::kI64, dtype_code::Int, 64, 1},
};

const char* name_of(Element element) {
  switch (element) {
    case Element::kF32:
      return "float32";
    case Element::kBf16:
      return "bfloat16 (or its bits as uint16)";
    case Element::kByte:
      return "uint8";
    case Element::kE4m3:
      return "float8_e4m3fn";
    case Element::kI32:
      return "int32";
    case Element::kI64:
      return "int64";
  }
  return "";
}

std::string describe(nb::dlpack::dtype dtype) {
  constexpr const char* kNames[] = {"int", "uint", "float", "", "bfloat", "complex", "bool"};
  const std::string name = dtype.code < std::size(kNames) ? kNames[dtype.code] : fmt::format("type {} of ", dtype.code);
  return name == "bool" ? name : fmt::format("{}{}{}", name, dtype.bits, dtype.lanes > 1 ? " in lanes" : "");
}

[[noreturn]] void fail_array(const char* name, const std::string& expected, const std::string& found) {
  fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected {}, found {}", name, expected, found));
}

Element element_of(const char* name, nb::dlpack::dtype dtype, std::initializer_list<Element> allowed) {
  std::vector<std::string> expected;
  for (const Element element : allowed) {
    for (const ElementType& type : kElementTypes) {
      const bool is_same = dtype.code == static_cast<uint8_t>(type.code) && dtype.bits == type.bits &&
                           std::max<int>(dtype.lanes, 1) == type.lanes;
      if (type.element == element && is_same) return element;
    }
    expected.emplace_back(name_of(element));
  }
  fail_array(name, fmt::format("{}", fmt::join(expected, " or ")), describe(dtype));
}

bool is_contiguous(const nb::ndarray<nb::ro>& array) {
  if (array.size() == 0) return true;
  int64_t stride = 1;
  for (size_t i = array.ndim(); i-- > 0;) {
    const auto size = static_cast<int64_t>(array.shape(i));
    if (size > 1 && array.stride(i) != stride) return false;
    stride *= size;
  }
  return true;
}

void check_shape(const char* name, const std::vector<int64_t>& found, std::initializer_list<int64_t> expected) {
  bool is_right = found.size() == expected.size();
  std::vector<std::string> words;
  size_t at = 0;
  for (const int64_t size : expected) {
    if (is_right && size != kAny && size != found[at]) is_right = false;
    words.push_back(size == kAny ? "any" : std::to_string(size));
    ++at;
  }
  if (!is_right) {
    fail_array(name, fmt::format("shape [{}]", fmt::join(words, ", ")), shape_text(found));
  }
}

void check_place(const Device& device, const char* name, const nb::ndarray<nb::ro>& array) {
  const int type = array.device_type();
  const bool is_host = type == nb::device::cpu::value || type == nb::device::cuda_host::value;
  const bool is_gpu = type == nb::device::cuda::value || type == nb::device::cuda_managed::value;
  const std::string found = is_host  ? "the CPU's"
                            : is_gpu ? fmt::format("cuda:{}'s", array.device_id())
                                     : fmt::format("that of a device of DLPack's type {}", type);
  if (device.is_gpu() ? is_gpu && array.device_id() == device.ordinal() : is_host) return;
  fail_array(name, fmt::format("memory of {}", device.name()), found);
}

bool is_of(nb::handle object, const char* library) {
  const nb::object module = nb::getattr(object.type(), "__module__", nb::str(""));
  return std::string_view(nb::str(module).c_str()).starts_with(library);
}

// Memory of a result.
struct Owned {
  DevicePtr device;
  void* data = nullptr;
};

template <class... Kind>
nb::object wrap(const Owned& owned, nb::handle owner, const std::vector<size_t>& shape, nb::dlpack::dtype dtype) {
  const bool is_gpu = owned.device->is_gpu();
  return nb::cast(nb::ndarray<Kind...>(owned.data, shape.size(), shape.data(), owner, nullptr, dtype,
                                       is_gpu ? nb::device::cuda::value : nb::device::cpu::value,
                                       is_gpu ? owned.device->ordinal() : 0));
}

}  // namespace

Device::Device(const std::string& name, uintptr_t stream, int num_threads) : name_(name) {
  {
    const nb::gil_scoped_release release;
    check(tessera_context_open(name.c_str(), reinterpret_cast<void*>(stream), num_threads, &context_));
  }
  if (name == "cpu") return;
  ordinal_ = 0;
  const size_t colon = name.find(':');
  if (colon != std::string::npos) std::from_chars(name.data() + colon + 1, name.data() + name.size(), ordinal_);
}

Device::~Device() {
  tessera_context_close(context_);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

Array read_array(const Device& device, nb::handle object, const char* name, std::initializer_list<Element> elements,
                 std::initializer_list<int64_t> shape, Access access) {
  Array array;
  if (!nb::try_cast(object, array.owner, false)) {
    throw nb::type_error(fmt::format("{}: expected an array (NumPy, PyTorch, or any with DLPack), found {}", name,
                                     nb::type_name(object.type()).c_str())
                             .c_str());
  }
  array.element = element_of(name, array.owner.dtype(), elements);
  for (size_t i = 0; i < array.owner.ndim(); ++i) array.shape.push_back(static_cast<int64_t>(array.owner.shape(i)));
  check_shape(name, array.shape, shape);
  if (!is_contiguous(array.owner)) fail_array(name, "a contiguous array", "one with gaps or another order");
  check_place(device, name, array.owner);
  nb::ndarray<> writable;
  if (access == Access::kWrite && !nb::try_cast(object, writable, false)) {
    fail_array(name, "an array that can be written", "a read-only one");
  }
  return array;
}

nb::object make_array(const DevicePtr& device, nb::handle like, Element element, const std::vector<int64_t>& shape) {
  const bool is_numpy = is_of(like, "numpy");
  nb::dlpack::dtype dtype;
  for (const ElementType& type : kElementTypes) {
    const bool is_lacking = is_numpy && type.code == dtype_code::Bfloat;
    if (type.element != element || is_lacking) continue;
    dtype = {static_cast<uint8_t>(type.code), static_cast<uint8_t>(type.bits), static_cast<uint16_t>(type.lanes)};
    break;
  }
  size_t bytes = dtype.bits / 8;
  std::vector<size_t> sizes;
  for (const int64_t size : shape) {
    sizes.push_back(static_cast<size_t>(size));
    bytes *= sizes.back();
  }
  auto owned = std::make_unique<Owned>(Owned{device});
  device->run(
      [&](tessera_context* context) { return tessera_allocate(context, std::max<size_t>(bytes, 1), &owned->data); });
  const Owned& kept = *owned;
  const nb::capsule owner(owned.release(), [](void* object) noexcept {
    const std::unique_ptr<Owned> gone(static_cast<Owned*>(object));
    try {
      gone->device->run([&](tessera_context* context) { return tessera_release(context, gone->data); });
    } catch (const std::exception&) {
      // The device has failed: its memory goes with the process.
    }
  });
  if (is_numpy) return wrap<nb::numpy>(kept, owner, sizes, dtype);
  if (is_of(like, "torch")) return wrap<nb::pytorch>(kept, owner, sizes, dtype);
  return wrap<>(kept, owner, sizes, dtype);
}

std::pair<nb::object, Array> output(const DevicePtr& device, nb::handle out, nb::handle like, Element element,
                                    const std::vector<int64_t>& shape) {
  const nb::object made = out.is_none() ? make_array(device, like, element, shape) : nb::borrow(out);
  Array array = shape.size() == 2
                    ? read_array(*device, made, "out", {element}, {shape[0], shape[1]}, Access::kWrite)
                    : read_array(*device, made, "out", {element}, {shape[0], shape[1], shape[2]}, Access::kWrite);
  return {made, std::move(array)};
}

}  // namespace tessera::python
