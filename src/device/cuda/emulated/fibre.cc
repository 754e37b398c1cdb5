// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/emulated/fibre.h"

#include <sys/mman.h>

#include <new>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace tessera::device::emulated {

namespace {

constexpr size_t kGuardBytes = 4096;
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStackBytes = 512 << 10;  // its frames are larger
#else
constexpr size_t kStackBytes = 128 << 10;
#endif

// Before and after a switch. `keep` is null where the stack that is left ends.
void begin_switch([[maybe_unused]] void** keep, [[maybe_unused]] const void* stack, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(keep, stack, bytes);
#endif
}
void end_switch([[maybe_unused]] void* kept, [[maybe_unused]] const void** from, [[maybe_unused]] size_t* bytes) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(kept, from, bytes);
#endif
}

}  // namespace

Fibre::Fibre() {
  void* pages = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  mprotect(pages, kGuardBytes, PROT_NONE);
  stack_ = static_cast<char*>(pages) + kGuardBytes;
}

Fibre::~Fibre() {
  munmap(stack_ - kGuardBytes, kGuardBytes + kStackBytes);
}

void Fibre::start(void (*entry)()) {
#ifdef __SANITIZE_ADDRESS__
  if (!has_ended_) __asan_unpoison_memory_region(stack_, kStackBytes);  // frames that were left without an end
#endif
  entry_ = entry;
  has_ended_ = false;
  fake_stack_ = nullptr;
  context_ = boost::context::detail::make_fcontext(stack_ + kStackBytes, kStackBytes, enter);
}

void Fibre::enter(boost::context::detail::transfer_t from) {
  Fibre& self = *static_cast<Fibre*>(from.data);
  end_switch(nullptr, &self.scheduler_stack_, &self.scheduler_stack_size_);
  self.scheduler_ = from.fctx;
  self.entry_();
  self.has_ended_ = true;
  begin_switch(nullptr, self.scheduler_stack_, self.scheduler_stack_size_);
  boost::context::detail::jump_fcontext(self.scheduler_, nullptr);
}

void Fibre::resume() {
  begin_switch(&scheduler_fake_stack_, stack_, kStackBytes);
  context_ = boost::context::detail::jump_fcontext(context_, this).fctx;
  end_switch(scheduler_fake_stack_, nullptr, nullptr);
}

void Fibre::pause() {
  begin_switch(&fake_stack_, scheduler_stack_, scheduler_stack_size_);
  scheduler_ = boost::context::detail::jump_fcontext(scheduler_, nullptr).fctx;
  end_switch(fake_stack_, &scheduler_stack_, &scheduler_stack_size_);
}

}  // namespace tessera::device::emulated
