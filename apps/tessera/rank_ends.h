// SPDX-License-Identifier: Apache-2.0
#pragma once
// How ranks end that one program has started: each hands its last words to rank 0 through a pipe, which says what there
// is to say once, and whose exit code is the cause's.
#include <span>
#include <vector>

#include "fault.h"

namespace tessera::app {

struct RankEnd {
  int rank = 0;
  Fault fault;  // without a message: it has said why by itself
};

// Into the pipe's end. False where nobody reads it, or it is full: this rank has to say it by itself.
bool hand_over(int pipe, const RankEnd& end);
// What has come out of the other end, which does not block.
std::vector<RankEnd> handed_over(int pipe);

struct GroupEnd {
  int code = kExitFailure;
  std::vector<std::string> lines;
};

// Of rank 0, and of what others of `world` have handed over. The lines are those that differ, by rank: who has heard of
// the fault of one that speaks for itself says nothing, and what several found bears no name. The code is the first
// that is not a lost rank's.
GroupEnd end_together(std::vector<RankEnd> ends, int world);

// The line of a rank other than rank 0: "rank 1 of 2: MESSAGE", where that does not begin with the rank.
std::string named(int rank, int world, const std::string& message);

}  // namespace tessera::app
