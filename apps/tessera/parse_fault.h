// SPDX-License-Identifier: Apache-2.0
#pragma once
// A command line that was not understood, in one line for people.
#include <string>

namespace CLI {
class App;
class ParseError;
}  // namespace CLI

namespace tessera::app {

// What is wrong, what may have been meant, and which help to ask for.
std::string parse_fault(const CLI::App& app, const CLI::ParseError& error);

}  // namespace tessera::app
