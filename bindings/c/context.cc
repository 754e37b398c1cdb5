// SPDX-License-Identifier: Apache-2.0
// Contexts and their memory.
#include "base/error.h"
#include "bindings/c/boundary.h"
#include "device/device_choice.h"
#include "device/gpu_executor.h"

using namespace tessera;
using namespace tessera::bindings;

extern "C" {

tessera_status tessera_context_open(const char* device, void* stream, int32_t num_threads, tessera_context** context) {
  return guarded([&] {
    check_not_null(device, "device");
    check_not_null(context, "context");
    check_size(num_threads, 0, 4096, "num_threads");
    auto opened = std::make_unique<tessera_context>();
    opened->machine = device::machine_of(device);
    if (opened->machine.gpu.has_value()) {
      opened->executor = device::make_gpu_executor(*opened->machine.gpu, stream);
    } else {
      check_flag(stream == nullptr, "stream", "NULL on the CPU", static_cast<int64_t>(stream != nullptr));
      opened->executor = device::make_executor(opened->machine, num_threads);
    }
    opened->planner();  // malformed TESSERA_FORCE and TESSERA_BACKENDS are errors here
    *context = opened.release();
  });
}

void tessera_context_close(tessera_context* context) {
  if (context == nullptr) return;
  tessera_context_synchronize(context);
  context->allocations.clear();  // before the memory that they lie in
  delete context;
}

tessera_status tessera_context_synchronize(tessera_context* context) {
  return guarded([&] {
    check_not_null(context, "context");
    context->executor->make_current();
    context->executor->synchronize();
  });
}

tessera_status tessera_allocate(tessera_context* context, size_t bytes, void** data) {
  return guarded([&] {
    check_not_null(context, "context");
    check_not_null(data, "data");
    check_flag(bytes > 0, "bytes", "more than 0", 0);
    context->executor->make_current();
    device::Buffer buffer(bytes, context->memory());
    void* const address = buffer.data();
    context->allocations.emplace(address, std::move(buffer));
    *data = address;
  });
}

tessera_status tessera_release(tessera_context* context, void* data) {
  return guarded([&] {
    check_not_null(context, "context");
    if (data == nullptr) return;
    context->executor->make_current();
    if (context->allocations.erase(data) == 0) {
      fail(ErrorCode::kInvalidArgument, "data: expected an address that tessera_allocate gave");
    }
  });
}

tessera_status tessera_upload(tessera_context* context, void* target, const void* host, size_t bytes) {
  return guarded([&] {
    check_not_null(context, "context");
    if (bytes == 0) return;
    check_not_null(target, "target");
    check_not_null(host, "host");
    context->executor->make_current();
    context->memory().upload(target, host, bytes);
    context->executor->synchronize();
  });
}

tessera_status tessera_download(tessera_context* context, void* host, const void* source, size_t bytes) {
  return guarded([&] {
    check_not_null(context, "context");
    if (bytes == 0) return;
    check_not_null(host, "host");
    check_not_null(source, "source");
    context->executor->make_current();
    context->memory().download(host, source, bytes);
    context->executor->synchronize();
  });
}
}
