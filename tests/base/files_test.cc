// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "base/atomic_file.h"
#include "base/env.h"
#include "base/error.h"
#include "base/file.h"
#include "base/test_seams.h"
#include "testing/temporary_folder.h"

namespace tessera {
namespace {

TEST(File, ReadsExactlyAndNamesWhatIsWrong) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("a", "hello");
  const File file = File::open_read(path);
  char text[3] = {};
  file.read_at(1, text, 3);
  EXPECT_EQ(std::string(text, 3), "ell");
  EXPECT_THROW(file.read_at(3, text, 3), Error) << "past the end";
  EXPECT_THROW(File::open_read(folder.path()), Error) << "a folder is no file";
  for (const uint64_t offset : {uint64_t{0}, uint64_t{3}, uint64_t{1} << 40}) {  // hints change nothing
    file.will_read(offset, 0);
    file.will_read(offset, 1 << 20);
  }
  EXPECT_EQ(read_file(path, 5), "hello");
  try {
    read_file(path, 4);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(path), std::string::npos);
  }
  try {
    File::open_read(folder.file("none"));
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
  }
}

TEST(File, WhatCannotBeSeenIsNotCalledMissing) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("a", "hello");
  EXPECT_TRUE(file_exists(path));
  EXPECT_FALSE(folder_exists(path));
  EXPECT_TRUE(folder_exists(folder.path()));
  EXPECT_FALSE(file_exists(folder.file("none")));
  EXPECT_FALSE(file_exists(path + "/below"));
  const std::string loop = folder.file("loop");
  ASSERT_EQ(symlink("loop", loop.c_str()), 0);
  for (const auto& exists : {file_exists, folder_exists}) {
    try {
      exists(loop);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
      EXPECT_NE(std::string(error.what()).find("loop: cannot look for it: "), std::string::npos) << error.what();
    }
  }
}

TEST(AtomicFile, AppearsWholeOrNotAtAll) {
  const testing::TemporaryFolder folder;
  {
    AtomicFile file(folder.file("out"));
    file.write("abc", 3);
  }
  EXPECT_EQ(folder.listing(), "") << "without commit nothing stays";
  AtomicFile file(folder.file("out"));
  file.write("abc", 3);
  file.commit();
  EXPECT_EQ(folder.listing(), "out\n");
  EXPECT_EQ(read_file(folder.file("out"), 10), "abc");
  EXPECT_THROW(AtomicFile(folder.file("no/such/folder")), Error);
  const std::string longest(255, 'x');
  AtomicFile long_name(folder.file(longest));
  long_name.commit();
  EXPECT_EQ(folder.listing(), "out\n" + longest + "\n");
}

TEST(AtomicFile, LeavesNothingWhereTheProcessIsKilled) {
  const testing::TemporaryFolder folder;
  const pid_t child = fork();
  if (child == 0) {
    AtomicFile file(folder.file("out"));
    file.write("abc", 3);
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  if (!File::create_unnamed(folder.file("out"))) GTEST_SKIP() << "no files without names in " << folder.path();
  EXPECT_EQ(folder.listing(), "");
}

TEST(AtomicFile, FollowsLinksAndSparesDevices) {
  const testing::TemporaryFolder folder;
  const std::string target = folder.write("target", "old"), link = folder.file("link");
  ASSERT_EQ(::symlink(target.c_str(), link.c_str()), 0);
  AtomicFile file(link);
  file.write("new", 3);
  file.commit();
  EXPECT_TRUE(std::filesystem::is_symlink(link)) << "the link stays";
  EXPECT_EQ(read_file(target, 10), "new");
  const std::string pipe = folder.file("pipe"), dangling = folder.file("dangling");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  ASSERT_EQ(::symlink("nowhere", dangling.c_str()), 0);
  for (const std::string& path : {pipe, dangling, folder.path(), std::string("/dev/null"), std::string(5000, 'x')}) {
    try {
      AtomicFile refused(path);
      ADD_FAILURE() << path;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    }
  }
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
}

TEST(File, DoesNotWaitForAPipe) {
  const testing::TemporaryFolder folder;
  const std::string pipe = folder.file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THROW(File::open_read(pipe), Error);
}

#ifdef TESSERA_TEST_SEAMS
TEST(AtomicFile, LeavesNothingBehindWhereAnyCallFails) {
  for (int64_t nth = 2; nth <= 5; ++nth) {  // the first makes it
    const testing::TemporaryFolder folder;
    folder.write("out", "old");
    seams::fail_file_call(nth);
    EXPECT_THROW(
        {
          AtomicFile file(folder.file("out"));
          file.write("new", 3);
          file.commit();
        },
        Error)
        << nth;
    seams::fail_file_call(0);
    EXPECT_EQ(folder.listing(), "out\n") << nth;
    EXPECT_EQ(read_file(folder.file("out"), 10), "old") << nth;
  }
}

// Where no file without a name can be made, it has a temporary one.
TEST(AtomicFile, HasATemporaryNameWhereItMust) {
  for (const bool is_committed : {false, true}) {
    const testing::TemporaryFolder folder;
    {
      seams::fail_file_call(1);
      AtomicFile file(folder.file("out"));
      seams::fail_file_call(0);
      file.write("new", 3);
      EXPECT_THAT(folder.listing(), ::testing::MatchesRegex("out\\.tmp-[0-9a-f]{16}\n"));
      if (is_committed) file.commit();
    }
    EXPECT_EQ(folder.listing(), is_committed ? "out\n" : "");
  }
}
#endif

TEST(Env, OnlyListedVariablesAreRead) {
  EXPECT_THROW(env_value("TESSERA_NO_SUCH"), Error);
  EXPECT_GE(env_variables().size(), 4u);
}

}  // namespace
}  // namespace tessera
