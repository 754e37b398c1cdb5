// SPDX-License-Identifier: Apache-2.0
#include "device/launch_observer.h"

namespace tessera::device {

namespace {

thread_local LaunchObserver* observer = nullptr;

}  // namespace

LaunchObserver::LaunchObserver() : before_(observer) {
  observer = this;
}

LaunchObserver::~LaunchObserver() {
  observer = before_;
}

LaunchObserver* LaunchObserver::of_this_thread() {
  return observer;
}

}  // namespace tessera::device
