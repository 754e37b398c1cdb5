// SPDX-License-Identifier: Apache-2.0
// Ranks that find each other through sockets of this machine, and how each learns that one is lost.
#include "comm/bootstrap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "comm/connection.h"
#include "comm/joined_ranks.h"
#include "comm/joining.h"
#include "comm/tcp.h"
#include "testing/temporary_folder.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kSecret = "a secret of the ranks";

// Where rank 0 listens: open from the first, so that nobody else takes its port.
struct Door {
  Socket listener = listen_at("127.0.0.1", 0);
  int port = port_of(listener);
};

// A port that stays taken, and where nobody listens.
Socket closed_door(int& port) {
  Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET, address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::bind(socket.descriptor(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  port = port_of(socket);
  return socket;
}

BootstrapOptions options_for(int rank, int world, int port) {
  BootstrapOptions options;
  options.place.rank = rank, options.place.world = world, options.place.port = port;
  options.secret = kSecret;
  options.join_seconds = 100, options.heartbeat_seconds = 0.05, options.lost_seconds = 10;
  return options;
}

class Lines final : public LogSink {
 public:
  void write(LogLevel, std::string_view message) override {
    const std::lock_guard lock(lock_);
    lines_.emplace_back(message);
  }
  std::vector<std::string> lines() {
    const std::lock_guard lock(lock_);
    return lines_;
  }

 private:
  std::mutex lock_;
  std::vector<std::string> lines_;
};

// What a constructor throws.
std::string refusal_of(const BootstrapOptions& options, Socket listener = {}) {
  try {
    Bootstrap bootstrap(options, nullptr, nullptr, std::move(listener));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

class BootstrapWorlds : public ::testing::TestWithParam<int> {};

TEST_P(BootstrapWorlds, BytesOfEachReachAll) {
  const int world = GetParam();
  Door door;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      Bootstrap bootstrap(options_for(rank, world, door.port), nullptr, nullptr,
                          rank == 0 ? std::move(door.listener) : Socket());
      for (int round = 0; round < 3; ++round) {
        const std::vector<uint8_t> own(static_cast<size_t>(rank * 1000 + round), static_cast<uint8_t>(rank));
        const auto all = bootstrap.all_gather(own);
        ASSERT_EQ(all.size(), static_cast<size_t>(world));
        for (int r = 0; r < world; ++r) {
          EXPECT_EQ(all[static_cast<size_t>(r)],
                    std::vector<uint8_t>(static_cast<size_t>(r * 1000 + round), static_cast<uint8_t>(r)));
        }
      }
      const std::vector<uint8_t> word = {1, 2, 3};
      EXPECT_EQ(bootstrap.broadcast(rank == 0 ? std::span<const uint8_t>(word) : std::span<const uint8_t>()), word);
      bootstrap.leave();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Worlds, BootstrapWorlds, ::testing::Values(1, 2, 3, 8));

TEST(Bootstrap, WhatIsWrongIsNamed) {
  Door door;
  BootstrapOptions alone = options_for(0, 3, door.port);
  alone.join_seconds = 0.2;
  EXPECT_THAT(refusal_of(alone, std::move(door.listener)), HasSubstr("ranks 1, 2 of 3 did not come to 127.0.0.1 port"));
  BootstrapOptions lonely = options_for(1, 2, 0);
  const Socket nobody = closed_door(lonely.place.port);
  lonely.join_seconds = 3;
  lonely.place.address_source = "MASTER_ADDR";
  EXPECT_THAT(refusal_of(lonely),
              AllOf(HasSubstr("rank 0 at 127.0.0.1 port"), HasSubstr("refused, for 3 s (MASTER_ADDR "
                                                                     "says where)")));
  BootstrapOptions open = options_for(0, 2, lonely.place.port);
  open.secret = "short";
  EXPECT_THAT(refusal_of(open), HasSubstr("expected at least 16 characters, found 5"));
  BootstrapOptions elsewhere = options_for(0, 2, lonely.place.port);
  elsewhere.place.address = "192.0.2.1";  // of nobody
  elsewhere.place.address_source = "MASTER_ADDR";
  const std::string of_nobody = "expected an address of this machine, found \"192.0.2.1\": ";
  EXPECT_THAT(refusal_of(elsewhere), HasSubstr("MASTER_ADDR: " + of_nobody));
  elsewhere.listen_address = "192.0.2.1", elsewhere.listen_source = "--rank-listen";
  EXPECT_THAT(refusal_of(elsewhere), HasSubstr("--rank-listen: " + of_nobody));
  elsewhere.listen_address = "no-such-name.invalid";
  EXPECT_THAT(refusal_of(elsewhere),
              HasSubstr("--rank-listen: expected an address of this machine, found \"no-such-name.invalid\": "));
  Door taken;
  EXPECT_THAT(refusal_of(options_for(0, 2, taken.port)), HasSubstr("MASTER_PORT: can't listen at 127.0.0.1 port"));
}

// Noise, half a message, a wrong secret, a rank that is there twice, another world size: a line each, and the group
// comes together all the same.
TEST(Bootstrap, StrangersCostALine) {
  Door door;
  const int port = door.port;
  Lines log;
  std::thread root([&] {
    Bootstrap bootstrap(options_for(0, 3, port), &log, nullptr, std::move(door.listener));
    bootstrap.all_gather({});
  });
  const auto send_bytes = [&](const std::string& bytes) {
    std::string why;
    Socket socket;
    while (!socket.is_open()) socket = connect_to("127.0.0.1", port, 1000, why);
    if (!bytes.empty()) write_some(socket, {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
    shut_down_writing(socket);
    std::vector<uint8_t> rest(4096);
    while (read_some(socket, rest) >= 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  send_bytes("GET / HTTP/1.1\r\n\r\n");
  send_bytes(std::string(100000, '\xff'));
  send_bytes("TSRC\x01");
  send_bytes("");
  BootstrapOptions wrong = options_for(1, 3, port);
  wrong.secret = "another secret of 22 b";
  EXPECT_THAT(refusal_of(wrong), HasSubstr("do both know the same secret?"));
  EXPECT_THAT(refusal_of(options_for(1, 2, port)), HasSubstr("rank 1 is one of 2, rank 0 one of 3"));
  std::thread first([&] {
    while (true) {
      try {
        return Bootstrap(options_for(1, 3, port), nullptr, nullptr).all_gather({}), void();
      } catch (const Error&) {  // the second had its place for a while
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      }
    }
  });
  std::string twice;
  while (twice.find("there already") == std::string::npos) {  // until the first is in, the second may take its place
    BootstrapOptions second = options_for(1, 3, port);
    second.join_seconds = 5;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    twice = refusal_of(second);
  }
  EXPECT_THAT(twice, HasSubstr("rank 1 is there already, from 127.0.0.1"));
  std::thread last([&] { Bootstrap(options_for(2, 3, port), nullptr, nullptr).all_gather({}); });
  root.join(), first.join(), last.join();
  EXPECT_GE(log.lines().size(), 7u) << ::testing::PrintToString(log.lines());
  EXPECT_THAT(log.lines(), ::testing::Each(HasSubstr("dropped a connection from 127.0.0.1 port")));
}

// A rank that ends before all are there leaves its place to another.
TEST(Bootstrap, APlaceIsFreedByWhoGoes) {
  Door door;
  const int port = door.port;
  Lines log;
  std::thread root([&] { Bootstrap(options_for(0, 3, port), &log, nullptr, std::move(door.listener)).all_gather({}); });
  BootstrapOptions early = options_for(1, 3, port);
  early.join_seconds = 10;
  EXPECT_THAT(refusal_of(early), HasSubstr("did not send word that all ranks are there in time"));
  while (log.lines().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_THAT(log.lines().front(), AllOf(HasSubstr("rank 1 (127.0.0.1"), HasSubstr("has gone before all were there")));
  std::thread first([&] { Bootstrap(options_for(1, 3, port), nullptr, nullptr).all_gather({}); });
  std::thread last([&] { Bootstrap(options_for(2, 3, port), nullptr, nullptr).all_gather({}); });
  root.join(), first.join(), last.join();
}

enum class Arrival { kNever, kBefore, kAfter };

// Nobody waits for a rank that says that it can't come, whenever it comes itself.
TEST(Bootstrap, ARankThatDoesNotComeSaysWhy) {
  for (const Arrival others : {Arrival::kNever, Arrival::kBefore, Arrival::kAfter}) {
    Door door;
    const int port = door.port;
    std::string said[2];
    // It may come as the last one: then all are there before it has spoken.
    const auto wait = [&](int rank, Socket listener) {
      try {
        Bootstrap(options_for(rank, 3, port), nullptr, nullptr, std::move(listener)).all_gather({});
      } catch (const Error& error) {
        said[rank] = error.what();
      }
    };
    std::vector<std::thread> waiting;
    waiting.emplace_back([&] { wait(0, std::move(door.listener)); });
    const auto let_come = [&] {
      waiting.emplace_back([&] { wait(1, {}); });
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    };
    if (others == Arrival::kBefore) let_come();
    tell_others(options_for(2, 3, port), "no such file");
    if (others == Arrival::kAfter) let_come();
    for (std::thread& thread : waiting) thread.join();
    EXPECT_EQ(said[0], "rank 2 of 3 failed: no such file");
    if (others != Arrival::kNever) {
      EXPECT_THAT(said[1], HasSubstr("rank 2 of 3 failed: no such file"));
    }
  }
}

// No more than all have to come: who has said that it can't is not waited for.
TEST(Bootstrap, RanksThatAllFailEndAtOnce) {
  Door door;
  const int port = door.port;
  std::string said;
  std::thread root([&] { said = refusal_of(options_for(0, 3, port), std::move(door.listener)); });
  std::thread first([&] { tell_others(options_for(1, 3, port), "no such file"); });
  const auto begin = std::chrono::steady_clock::now();
  tell_others(options_for(2, 3, port), "no such file");
  first.join(), root.join();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
  EXPECT_THAT(said, HasSubstr(" of 3 failed: no such file"));
}

// Rank 0 opens its own door here: the port may be another's meanwhile, then once more.
TEST(Bootstrap, ARank0ThatDoesNotComeSaysWhy) {
  for (const Arrival others : {Arrival::kBefore, Arrival::kAfter}) {
    std::string said[3];
    for (int n = 0; n < 3 && said[1].find("failed:") == std::string::npos; ++n) {
      const int port = Door().port;
      std::vector<std::thread> waiting;
      const auto let_come = [&] {
        for (const int rank : {1, 2}) {
          waiting.emplace_back([&, rank] {
            BootstrapOptions options = options_for(rank, 3, port);
            options.join_seconds = 20;
            said[rank] = refusal_of(options);
          });
        }
      };
      if (others == Arrival::kBefore) let_come();
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      std::thread root([&] { tell_others(options_for(0, 3, port), "no such file"); });
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      if (others == Arrival::kAfter) let_come();
      for (std::thread& thread : waiting) thread.join();
      root.join();
    }
    for (const int rank : {1, 2}) {
      EXPECT_THAT(said[rank],
                  AllOf(HasSubstr("rank 0 at 127.0.0.1 port"), HasSubstr("rank 0 of 3 failed: no such file")));
    }
  }
}

// It does not wait longer for those who don't come, and says nothing to those who don't know the secret.
TEST(Bootstrap, ARank0ThatDoesNotComeWaitsForALittleWhile) {
  std::string said;
  for (int n = 0; n < 3 && said.find("welcome") == std::string::npos; ++n) {  // the port may be another's
    const auto begin = std::chrono::steady_clock::now();
    const int port = Door().port;
    std::thread root([&] { tell_others(options_for(0, 2, port), "no such file"); });
    BootstrapOptions wrong = options_for(1, 2, port);
    wrong.secret = "another secret of 22 b";
    wrong.join_seconds = 20;
    said = refusal_of(wrong);
    root.join();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  }
  EXPECT_THAT(said, AllOf(HasSubstr("its welcome"), ::testing::Not(HasSubstr("no such file"))));
}

TEST(Bootstrap, WhoDoesNotKnowTheSecretEndsNobody) {
  Door door;
  const int port = door.port;
  Lines log;
  std::thread root([&] { Bootstrap(options_for(0, 2, port), &log, nullptr, std::move(door.listener)).all_gather({}); });
  BootstrapOptions wrong = options_for(1, 2, port);
  wrong.secret = "another secret of 22 b";
  tell_others(wrong, "no such file");
  Bootstrap(options_for(1, 2, port), nullptr, nullptr).all_gather({});
  root.join();
  EXPECT_THAT(log.lines(), ::testing::Contains(HasSubstr("dropped a connection from")));
}

TEST(Bootstrap, AFarewellIsNoLoss) {
  Door door;
  std::thread other([&] { Bootstrap(options_for(1, 2, door.port), nullptr, nullptr).leave(); });
  Bootstrap bootstrap(options_for(0, 2, door.port), nullptr, nullptr, std::move(door.listener));
  other.join();
  try {
    bootstrap.all_gather({});
    ADD_FAILURE() << "bytes of a rank that has left";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "rank 1 of 2 has left");
  }
}

// Whose word it is goes to all, whoever it is.
TEST(Bootstrap, AReasonReachesEveryRank) {
  for (const int failing : {0, 1, 2}) {
    const auto errors = tessera::testing::run_joined(3, [&](Bootstrap& bootstrap) {
      bootstrap.all_gather({});
      if (bootstrap.rank() == failing) return bootstrap.fail("out of\nmemory");
      bootstrap.all_gather({});
    });
    for (int rank = 0; rank < 3; ++rank) {
      const std::string expected = "rank " + std::to_string(failing) + " of 3 failed: out of\\x0amemory";
      EXPECT_EQ(errors[static_cast<size_t>(rank)], rank == failing ? "" : expected) << rank;
    }
  }
}

TEST(Bootstrap, OrdersComeInOrderAndApart) {
  const auto errors = tessera::testing::run_joined(3, [&](Bootstrap& bootstrap) {
    const std::vector<uint8_t> own(1000, static_cast<uint8_t>(bootstrap.rank()));
    for (uint8_t n = 0; n < 200; ++n) {
      const std::vector<uint8_t> order(1 + 700 * n, n);
      if (bootstrap.rank() == 0) bootstrap.send_order(order);
      if (n % 50 == 0) bootstrap.all_gather(own);
    }
    for (uint8_t n = 0; n < 200 && bootstrap.rank() > 0; ++n) {
      EXPECT_EQ(bootstrap.take_order(), std::vector<uint8_t>(1 + 700 * n, n));
    }
    bootstrap.all_gather({});
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

// Who waits learns for whom: from rank 0 where that gives up, or by itself.
TEST(Bootstrap, WaitingRanksLearnWhoIsMissing) {
  Door door;
  const int port = door.port;
  BootstrapOptions root = options_for(0, 4, port), second = options_for(1, 4, port), third = options_for(2, 4, port);
  root.join_seconds = 20, third.join_seconds = 10;
  std::string said[3];
  std::thread waiting[] = {std::thread([&] { said[0] = refusal_of(root, std::move(door.listener)); }),
                           std::thread([&] { said[1] = refusal_of(second); }),
                           std::thread([&] { said[2] = refusal_of(third); })};
  for (std::thread& thread : waiting) thread.join();
  EXPECT_THAT(said[0], HasSubstr("3 of 4 did not come to 127.0.0.1 port"));
  EXPECT_THAT(said[1], AllOf(HasSubstr("rank 0 at"), HasSubstr("3 of 4 did not come to")));
  EXPECT_THAT(said[2], AllOf(HasSubstr("rank 0 at"), HasSubstr("in time; of 4 ranks it misses")));
}

// Whoever has rank 0's port and not the secret: its words are no reason to wait, nor to end.
TEST(Bootstrap, WhoHasNotProvedItselfSaysNothing) {
  for (const MessageKind kind : {MessageKind::kWaiting, MessageKind::kLost}) {
    Door door;
    std::thread impostor([&] {
      std::string peer;
      Socket socket;
      while (!socket.is_open()) socket = accept_one(door.listener, peer);
      Connection connection(std::move(socket), peer, challenge_key(), Direction::kFromRoot, 256);
      for (bool is_open = true; is_open; is_open = connection.flush() && connection.fill()) {
        connection.send(kind, lost_payload(1, "you may go"));
        connection.forget_heard();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    BootstrapOptions options = options_for(1, 2, door.port);
    options.join_seconds = 30;
    EXPECT_THAT(refusal_of(options), HasSubstr("expected its challenge, found another message"));
    impostor.join();
  }
}

// The limit of a call is one for all ranks, and names the one that was late.
TEST(Bootstrap, TheLateRankIsNamed) {
  const auto errors = tessera::testing::run_joined(4, [&](Bootstrap& bootstrap) {
    bootstrap.all_gather({});
    constexpr int kLate[] = {0, 700, 3000, 0};  // ms
    std::this_thread::sleep_for(std::chrono::milliseconds(kLate[bootstrap.rank()]));
    try {
      bootstrap.all_gather({}, 1);
    } catch (const Error& error) {
      bootstrap.fail(error.what());
      throw;
    }
  });
  const std::string late = "rank 2 of 4 stalls: nothing came from it within 1 s";
  EXPECT_EQ(errors[0], late);
  EXPECT_EQ(errors[1], "rank 0 of 4 failed: " + late);
  EXPECT_EQ(errors[3], errors[1]);
}

// Who waits for the end waits for a silent rank no longer than 5 s.
TEST(Bootstrap, ASilentRankDoesNotHoldUpTheEnd) {
  Door door;
  std::atomic<bool> is_ending{false}, is_over{false};
  BootstrapOptions root = options_for(0, 2, door.port), silent = options_for(1, 2, door.port);
  root.lost_seconds = silent.heartbeat_seconds = silent.lost_seconds = 1000;
  root.is_ending = &is_ending;
  std::thread other([&] {
    const Bootstrap bootstrap(silent, nullptr, nullptr);
    while (!is_over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  });
  Bootstrap bootstrap(root, nullptr, nullptr, std::move(door.listener));
  const auto begin = std::chrono::steady_clock::now();
  is_ending = true;
  std::string said;
  try {
    bootstrap.all_gather({}, 100);
  } catch (const Error& error) {
    said = error.what();
  }
  is_over = true;
  other.join();
  EXPECT_THAT(said, AllOf(HasSubstr("lost rank 1 of 2"), HasSubstr("silent for")));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(50));
}

class NobodyComes final : public JoinWatch {
 public:
  std::string fault() override { return "rank 1 of 2 ended with exit code 3"; }
};

TEST(Bootstrap, ARankThatCannotComeIsNotWaitedFor) {
  NobodyComes watch;
  Door door;
  BootstrapOptions root = options_for(0, 2, door.port);
  root.watch = &watch;
  EXPECT_EQ(refusal_of(root, std::move(door.listener)), "rank 1 of 2 ended with exit code 3");
}

// More silent connections than there are places, all the time: ranks come in all the same.
TEST(Bootstrap, StrangersDoNotFillThePlaces) {
  Door door;
  const int port = door.port;
  Lines log;
  std::thread root([&] { Bootstrap(options_for(0, 2, port), &log, nullptr, std::move(door.listener)).all_gather({}); });
  std::vector<Socket> strangers;
  std::string why;
  while (strangers.size() < 150) {
    Socket socket = connect_to("127.0.0.1", port, 1000, why);
    if (socket.is_open()) strangers.push_back(std::move(socket));
  }
  Bootstrap(options_for(1, 2, port), nullptr, nullptr).all_gather({});
  root.join();
  ASSERT_FALSE(log.lines().empty());
  EXPECT_THAT(log.lines(), ::testing::Contains(HasSubstr("too many connections from there")));
}

// Rank 0 opens its own door here: the port may be another's meanwhile, then once more.
TEST(Bootstrap, EveryNetworkHasThisMachines) {
  std::string refusal = "can't listen at";
  for (int n = 0; n < 10 && refusal.find("can't listen at") != std::string::npos; ++n) {
    BootstrapOptions root = options_for(0, 2, Door().port);
    root.listen_address = "*";
    std::thread other([&] {
      BootstrapOptions options = options_for(1, 2, root.place.port);
      options.join_seconds = 20;
      try {
        Bootstrap(options, nullptr, nullptr).all_gather({});
      } catch (const Error&) {  // rank 0 says why
      }
    });
    try {
      refusal.clear();
      Bootstrap(root, nullptr, nullptr).all_gather({});
    } catch (const Error& error) {
      refusal = error.what();
    }
    other.join();
  }
  EXPECT_EQ(refusal, "");
  for (const char* address : {"localhost", "127.0.0.1", "127.0.1.1", "::1", "192.0.2.1", "no-such-name.invalid"}) {
    EXPECT_FALSE(leads_to_loopback(address)) << address;
  }
}

// A program that ends as tessera's does, where a rank is lost: says so and exits with 5.
class Exit final : public LossSink {
 public:
  explicit Exit(std::string file) : file_(std::move(file)) {}
  void lost(int, const std::string& message) override {
    std::ofstream(file_) << message;
    _exit(5);
  }

 private:
  std::string file_;
};

enum class Harm { kKill, kStop, kCut };

// Three processes; harm comes to one. The others end by themselves, naming it.
class LostRank : public ::testing::TestWithParam<std::tuple<Harm, int>> {
 protected:
  static constexpr int kWorld = 3;

  std::string file_of(int rank) const {
    return (std::filesystem::path(folder_.path()) / std::to_string(rank)).string();
  }

  pid_t start(int rank, Door& door) const {
    const pid_t child = fork();
    if (child != 0) return child;
    alarm(120);  // it does not outlive a test that fails
    Socket listener = std::move(door.listener);
    if (rank != 0) listener.close();
    try {
      Exit exit(file_of(rank) + ".said");
      Bootstrap bootstrap(options_for(rank, kWorld, door.port), nullptr, &exit, std::move(listener));
      bootstrap.all_gather({});
      // Before the file: who sees that sends the signal.
      std::signal(SIGUSR1, [](int) {
        const int before = errno;
        for (int descriptor = 3; descriptor < 64; ++descriptor) ::shutdown(descriptor, SHUT_RDWR);
        errno = before;
      });
      std::ofstream(file_of(rank) + ".ready") << "ready";
      while (true) std::this_thread::sleep_for(std::chrono::seconds(1));
    } catch (...) {
      _exit(1);
    }
  }

  testing::TemporaryFolder folder_;
};

TEST_P(LostRank, AllOthersEndNamingIt) {
  const auto [harm, victim] = GetParam();
  Door door;
  std::vector<pid_t> children;
  for (int rank = 0; rank < kWorld; ++rank) children.push_back(start(rank, door));
  door.listener.close();
  for (int rank = 0; rank < kWorld; ++rank) {
    while (!std::filesystem::exists(file_of(rank) + ".ready")) {
      ASSERT_EQ(waitpid(children[static_cast<size_t>(rank)], nullptr, WNOHANG), 0) << "rank " << rank << " has ended";
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  const pid_t child = children[static_cast<size_t>(victim)];
  kill(child, harm == Harm::kKill ? SIGKILL : harm == Harm::kStop ? SIGSTOP : SIGUSR1);
  for (int rank = 0; rank < kWorld; ++rank) {
    if (rank == victim && harm != Harm::kCut) continue;
    int status = 0;
    ASSERT_EQ(waitpid(children[static_cast<size_t>(rank)], &status, 0), children[static_cast<size_t>(rank)]);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 5) << rank;
    std::ifstream file(file_of(rank) + ".said");
    const std::string said{std::istreambuf_iterator<char>(file), {}};
    // Connections are cut one after the other: rank 0, cut off, may still have told one rank that the other is lost.
    const bool is_named = rank != victim && !(harm == Harm::kCut && victim == 0);
    EXPECT_THAT(said, HasSubstr(is_named ? "lost rank " + std::to_string(victim) + " of 3" : "lost rank")) << rank;
    EXPECT_THAT(said, HasSubstr(harm == Harm::kStop ? "silent for" : "without a farewell")) << rank;
  }
  if (harm != Harm::kCut) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Harms, LostRank,
                         ::testing::Combine(::testing::Values(Harm::kKill, Harm::kStop, Harm::kCut),
                                            ::testing::Values(0, 1)));

}  // namespace
}  // namespace tessera::comm
