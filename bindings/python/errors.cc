// SPDX-License-Identifier: Apache-2.0
#include "bindings/python/errors.h"

#include <exception>

#include "base/error.h"

namespace tessera::python {

namespace {

void raise(const Error& error) {
  const nb::object made =
      nb::module_::import_("tessera._errors")
          .attr("make")(nb::str(std::string(to_string(error.code())).c_str()), nb::str(error.what()));
  PyErr_SetObject(made.type().ptr(), made.ptr());
}

ErrorCode code_of(tessera_status status) {
  switch (status) {
    case TESSERA_INVALID_ARGUMENT:
      return ErrorCode::kInvalidArgument;
    case TESSERA_NOT_FOUND:
      return ErrorCode::kNotFound;
    case TESSERA_DATA_LOSS:
      return ErrorCode::kDataLoss;
    case TESSERA_UNSUPPORTED:
      return ErrorCode::kUnsupported;
    case TESSERA_RESOURCE_EXHAUSTED:
      return ErrorCode::kResourceExhausted;
    case TESSERA_CANCELLED:
      return ErrorCode::kCancelled;
    case TESSERA_DEVICE_ERROR:
      return ErrorCode::kDeviceError;
    case TESSERA_NOT_FINITE:
      return ErrorCode::kNotFinite;
    default:
      return ErrorCode::kInternal;
  }
}

}  // namespace

void register_errors() {
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void*) {
        try {
          std::rethrow_exception(thrown);
        } catch (const Error& error) {
          raise(error);
        }
      },
      nullptr);
}

void check(tessera_status status) {
  if (status != TESSERA_OK) fail(code_of(status), tessera_error_message());
}

void SignalCheck::look() {
  const nb::gil_scoped_acquire hold;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace tessera::python
