// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a service manager (systemd) is told of this process, where one asked: protocol of sd_notify(3).
#include <string_view>

namespace tessera::app {

// "READY=1" and the like, sent to the socket that NOTIFY_SOCKET names; nothing where it is unset. Failing to send
// changes nothing: the manager then waits until its own time limit.
void notify_service_manager(std::string_view state);

}  // namespace tessera::app
