// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lines of a chat that begin with a slash.
#include <string>

#include "chat_session.h"

namespace tessera::app {

// What the loop does after a command.
enum class ChatStep { kGoOn, kAnswerAgain, kQuit };

// True for "/clear" and the like; "//" begins ordinary text with one slash.
bool is_chat_command(const std::string& line);

// Runs a command; what it has to say goes to the screen as notes. Throws kInvalidArgument for an unknown command or
// argument, and what saving and loading throw.
ChatStep run_chat_command(const std::string& line, ChatSession& session, const ChatScreen& screen);

// One line per command: name, arguments, meaning.
std::string chat_command_help();

}  // namespace tessera::app
