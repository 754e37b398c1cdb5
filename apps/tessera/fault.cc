// SPDX-License-Identifier: Apache-2.0
#include "fault.h"

#include <new>

#include "base/error.h"

namespace tessera::app {

namespace {

int exit_code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return kExitUsage;
    case ErrorCode::kNotFound:
    case ErrorCode::kDataLoss:
    case ErrorCode::kUnsupported:
      return kExitBadModel;
    case ErrorCode::kResourceExhausted:
      return kExitMemory;
    case ErrorCode::kDeviceError:
      return kExitDevice;
    case ErrorCode::kCancelled:
      return kExitCancelled;
    case ErrorCode::kNotFinite:
      return kExitMismatch;
    case ErrorCode::kInternal:
      return kExitFailure;
  }
  return kExitFailure;
}

}  // namespace

Fault current_fault() {
  try {
    throw;
  } catch (const Error& error) {
    return {exit_code_of(error.code()), error.what()};
  } catch (const std::bad_alloc&) {
    return {kExitMemory, "out of memory: an allocation failed; close other programs or use a smaller model"};
  } catch (const std::exception& error) {
    return {kExitFailure, error.what()};
  }
}

}  // namespace tessera::app
