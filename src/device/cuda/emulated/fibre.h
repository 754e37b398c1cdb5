// SPDX-License-Identifier: Apache-2.0
#pragma once
// Stacks on which threads of the emulated GPU run, and switching between them and their scheduler.
#include <boost/context/detail/fcontext.hpp>
#include <cstddef>

namespace tessera::device::emulated {

// Owns a stack with a page below it that nobody may touch.
class Fibre {
 public:
  Fibre();
  ~Fibre();
  Fibre(const Fibre&) = delete;
  Fibre& operator=(const Fibre&) = delete;

  // The next resume() calls entry(), on this stack. Whatever ran on it before is forgotten.
  void start(void (*entry)());
  // Runs the fibre until it calls pause() or has returned from entry(); called by the scheduler.
  void resume();
  // Back to the scheduler; called on the fibre.
  void pause();
  bool has_ended() const { return has_ended_; }

 private:
  static void enter(boost::context::detail::transfer_t from);

  char* stack_;  // lowest address, after the guard page
  boost::context::detail::fcontext_t context_ = nullptr, scheduler_ = nullptr;
  void (*entry_)() = nullptr;
  bool has_ended_ = true;
  // For AddressSanitizer, which must know on which stack the program is.
  void *fake_stack_ = nullptr, *scheduler_fake_stack_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_size_ = 0;
};

}  // namespace tessera::device::emulated
