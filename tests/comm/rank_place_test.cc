// SPDX-License-Identifier: Apache-2.0
#include "comm/rank_place.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/env.h"
#include "base/error.h"

namespace tessera::comm {
namespace {

std::string refusal_of(const Environment& environment) {
  try {
    place_from(environment);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

void expect_place(const Environment& environment, int rank, int world, int local, const std::string& address,
                  int port) {
  const RankPlace place = place_from(environment);
  EXPECT_EQ(place.rank, rank);
  EXPECT_EQ(place.world, world);
  EXPECT_EQ(place.local_rank, local);
  EXPECT_EQ(place.address, address);
  EXPECT_EQ(place.port, port);
}

TEST(RankPlace, FromEveryLauncher) {
  expect_place({}, 0, 1, 0, "127.0.0.1", 29500);
  expect_place(
      {{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "node0"}, {"MASTER_PORT", "81"}}, 3, 8,
      1, "node0", 81);
  expect_place({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}}, 1,
               2, 1, "127.0.0.1", 29500);
  expect_place({{"SLURM_PROCID", "2"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_LOCALID", "0"}, {"MASTER_ADDR", "n1"}}, 2,
               4, 0, "n1", 29500);
  expect_place({{"LWS_WORKER_INDEX", "1"}, {"LWS_GROUP_SIZE", "2"}, {"LWS_LEADER_ADDRESS", "leader.svc"}}, 1, 2, 0,
               "leader.svc", 29500);
}

TEST(RankPlace, ATaskThatSeesOneGpuHasThatOne) {
  Environment task = {{"SLURM_PROCID", "3"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_LOCALID", "3"}};
  EXPECT_EQ(place_from(task).gpu, 3);
  for (const char* one : {"0", "3", "GPU-3d2a0b7e"}) {
    task["CUDA_VISIBLE_DEVICES"] = one;
    EXPECT_EQ(place_from(task).gpu, 0) << one;
    EXPECT_EQ(place_from(task).local_rank, 3) << one;
  }
  task["CUDA_VISIBLE_DEVICES"] = "0,1,2,3";
  EXPECT_EQ(place_from(task).gpu, 3);
  // Ranks that the program starts must not end up on one GPU.
  EXPECT_EQ(place_from({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"CUDA_VISIBLE_DEVICES", "5"}}).gpu,
            1);
}

TEST(RankPlace, TheFirstLauncherDecides) {
  const Environment both = {{"RANK", "0"},         {"WORLD_SIZE", "2"},
                            {"SLURM_PROCID", "7"}, {"SLURM_STEP_NUM_TASKS", "8"},
                            {"MASTER_ADDR", "a"},  {"LWS_LEADER_ADDRESS", "b"}};
  expect_place(both, 0, 2, 0, "a", 29500);
  EXPECT_EQ(place_from(both).source, "RANK");
}

// As where a job's script exports RANK before srun: all tasks would be rank 0.
TEST(RankPlace, LaunchersThatContradictEachOtherAreRefused) {
  const Environment zero = {{"RANK", "0"}, {"WORLD_SIZE", "2"}};
  const auto with = [&](Environment more) {
    more.insert(zero.begin(), zero.end());
    return more;
  };
  const Environment slurm = with({{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}});
  EXPECT_EQ(refusal_of(slurm),
            "RANK: expected 1, which SLURM_PROCID says of 2 ranks as WORLD_SIZE does, found \"0\"; unset RANK and "
            "WORLD_SIZE, or SLURM_PROCID");
  EXPECT_THAT(refusal_of(with({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}})),
              testing::HasSubstr("RANK: expected 1, which OMPI_COMM_WORLD_RANK says"));
  EXPECT_THAT(refusal_of(with({{"LWS_WORKER_INDEX", "1"}, {"LWS_GROUP_SIZE", "2"}, {"LWS_LEADER_ADDRESS", "a"}})),
              testing::HasSubstr("RANK: expected 1, which LWS_WORKER_INDEX says"));
  // torchrun numbers its workers as they come to it, whichever tasks its agents are.
  Environment torchrun = slurm;
  torchrun["TORCHELASTIC_RUN_ID"] = "none";
  expect_place(torchrun, 0, 2, 0, "127.0.0.1", 29500);
  // Eight workers of each of two tasks; both launchers agree; a variable that nobody asks is wrong.
  expect_place({{"RANK", "3"}, {"WORLD_SIZE", "16"}, {"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}}, 3, 16, 3,
               "127.0.0.1", 29500);
  expect_place({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}}, 1, 2, 1,
               "127.0.0.1", 29500);
  expect_place(with({{"SLURM_PROCID", "x"}, {"SLURM_STEP_NUM_TASKS", "2"}}), 0, 2, 0, "127.0.0.1", 29500);
  // By hand in the first task of two, or in the script of a job of two.
  for (const char* tasks : {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}) {
    expect_place({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"SLURM_PROCID", "0"}, {tasks, "2"}}, 1, 2, 1, "127.0.0.1",
                 29500);
  }
  // mpirun starts its daemons as tasks, one a machine, and numbers its ranks by itself.
  expect_place({{"OMPI_COMM_WORLD_RANK", "0"},
                {"OMPI_COMM_WORLD_SIZE", "2"},
                {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                {"SLURM_PROCID", "1"},
                {"SLURM_STEP_NUM_TASKS", "2"}},
               0, 2, 0, "127.0.0.1", 29500);
}

TEST(RankPlace, SeveralMachinesNeedAnAddress) {
  Environment mpi = {{"OMPI_COMM_WORLD_RANK", "5"}, {"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
  EXPECT_EQ(refusal_of(mpi),
            "MASTER_ADDR: expected the address of rank 0's machine, since OMPI_COMM_WORLD_LOCAL_SIZE is 4 and there "
            "are 8 ranks, found nothing");
  mpi["MASTER_ADDR"] = "node0";
  expect_place(mpi, 5, 8, 0, "node0", 29500);
  mpi["OMPI_COMM_WORLD_LOCAL_SIZE"] = "8";
  mpi.erase("MASTER_ADDR");
  expect_place(mpi, 5, 8, 5, "127.0.0.1", 29500);
  Environment slurm = {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NUM_NODES", "2"}};
  EXPECT_THAT(refusal_of(slurm), testing::HasSubstr("SLURM_STEP_NUM_NODES is 2"));
  slurm["SLURM_STEP_NUM_NODES"] = "1";
  expect_place(slurm, 0, 2, 0, "127.0.0.1", 29500);
  slurm["SLURM_STEP_NUM_NODES"] = "2";
  slurm["SLURM_STEP_NUM_TASKS"] = "1";  // nobody to look for
  expect_place(slurm, 0, 1, 0, "127.0.0.1", 29500);
  EXPECT_EQ(refusal_of({{"LWS_WORKER_INDEX", "1"}, {"LWS_GROUP_SIZE", "2"}}),
            "LWS_LEADER_ADDRESS: expected the address of rank 0's machine, since LWS_GROUP_SIZE is 2 and there are 2 "
            "ranks, found nothing");
}

// sbatch -n 2, without srun in front of the program: its variables are those of a rank 0 but for the step's.
TEST(RankPlace, TheScriptOfAJobIsNoTask) {
  Environment script = {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NTASKS", "2"}};
  expect_place(script, 0, 1, 0, "127.0.0.1", 29500);
  EXPECT_EQ(place_from(script).source, "alone");
  EXPECT_EQ(place_from(script).job_tasks, 2);
  script.erase("SLURM_NTASKS");  // sbatch without a number of tasks
  EXPECT_EQ(place_from(script).job_tasks, 1);
  script["SLURM_NTASKS"] = "2";
  Environment step = script;
  step["SLURM_STEP_NUM_TASKS"] = "2";
  expect_place(step, 0, 2, 0, "127.0.0.1", 29500);
  EXPECT_EQ(place_from(step).job_tasks, 0);
  // A shell of salloc's, which is a step of one task and has the job's SLURM_NTASKS (--preserve-env).
  step["SLURM_STEP_NUM_TASKS"] = "1";
  expect_place(step, 0, 1, 0, "127.0.0.1", 29500);
  // Another launcher in the script.
  script.insert({{"RANK", "1"}, {"WORLD_SIZE", "4"}});
  expect_place(script, 1, 4, 1, "127.0.0.1", 29500);
  EXPECT_EQ(place_from({}).job_tasks, 0);
}

// Who starts processes by hand gives each its rank alone.
TEST(RankPlace, RanksOfOneMachineHaveAGpuEach) {
  Environment hand = {{"RANK", "1"}, {"WORLD_SIZE", "2"}};
  for (const char* address : {"", "127.0.0.1", "127.0.1.1", "localhost", "::1"}) {
    if (*address != 0) hand["MASTER_ADDR"] = address;
    EXPECT_EQ(place_from(hand).local_rank, 1) << address;
    EXPECT_EQ(place_from(hand).gpu, 1) << address;
  }
  hand["MASTER_ADDR"] = "node0";  // a rank for each machine, as far as anybody knows
  EXPECT_EQ(place_from(hand).gpu, 0);
  hand["LOCAL_RANK"] = "1";
  EXPECT_EQ(place_from(hand).gpu, 1);
}

TEST(RankPlace, HalfOfAnAnswerIsRefused) {
  EXPECT_EQ(refusal_of({{"WORLD_SIZE", "2"}}), "WORLD_SIZE is set: expected RANK too, found nothing");
  EXPECT_EQ(refusal_of({{"LWS_GROUP_SIZE", "2"}}),
            "LWS_GROUP_SIZE is set: expected LWS_WORKER_INDEX too, found nothing");
  EXPECT_EQ(refusal_of({{"OMPI_COMM_WORLD_SIZE", "4"}}),
            "OMPI_COMM_WORLD_SIZE is set: expected OMPI_COMM_WORLD_RANK too, found nothing");
  expect_place({{"WORLD_SIZE", "1"}}, 0, 1, 0, "127.0.0.1", 29500);
  EXPECT_EQ(refusal_of({{"SLURM_STEP_NUM_TASKS", "8"}}),
            "SLURM_STEP_NUM_TASKS is set: expected SLURM_PROCID too, found nothing");
  EXPECT_EQ(refusal_of({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}}),
            "SLURM_PROCID is set: expected SLURM_STEP_NUM_TASKS too, found nothing");
  expect_place({{"SLURM_NTASKS", "8"}}, 0, 1, 0, "127.0.0.1", 29500);  // a job's, outside of its steps
  // As scripts of SLURM's jobs set it for PyTorch.
  expect_place({{"WORLD_SIZE", "8"}, {"SLURM_PROCID", "3"}, {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_LOCALID", "3"}}, 3,
               8, 3, "127.0.0.1", 29500);
  EXPECT_EQ(
      refusal_of(
          {{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}, {"MASTER_ADDR", "n"}}),
      "LOCAL_RANK: expected 0 to 1, found \"2\"");
}

TEST(RankPlace, BadValuesAreNamed) {
  EXPECT_EQ(refusal_of({{"RANK", "1"}}), "RANK is set: expected WORLD_SIZE too, found nothing");
  EXPECT_EQ(refusal_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), "RANK: expected 0 to 1, found \"2\"");
  EXPECT_EQ(refusal_of({{"RANK", "1x"}, {"WORLD_SIZE", "2"}}), "RANK: expected 0 to 1, found \"1x\"");
  EXPECT_EQ(refusal_of({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), "WORLD_SIZE: expected 1 to 1024, found \"0\"");
  EXPECT_EQ(refusal_of({{"MASTER_PORT", "70000"}}), "MASTER_PORT: expected 1 to 65535, found \"70000\"");
}

TEST(RankPlace, AnAddressThatIsNoneNamesItsVariable) {
  const Environment two = {{"RANK", "1"}, {"WORLD_SIZE", "2"}};
  for (const char* name : {"MASTER_ADDR", "LWS_LEADER_ADDRESS"}) {
    for (const std::string wrong : {"node0:29500", "http://node0", "[::1]", "a b", "*", "::1::"}) {
      Environment environment = two;
      environment[name] = wrong;
      EXPECT_EQ(refusal_of(environment),
                name + (": expected a host's name or IP address, without a port, found \"" + wrong + "\""));
    }
    for (const char* right : {"node0", "node-0.svc_1.cluster.local", "10.0.0.7", "fe80::1%eth0", "::1"}) {
      Environment environment = two;
      environment[name] = right;
      EXPECT_EQ(refusal_of(environment), "") << right;
      EXPECT_EQ(place_from(environment).address_source, name);
    }
  }
  // Nobody looks for rank 0.
  EXPECT_EQ(refusal_of({{"MASTER_ADDR", "a b"}}), "");
  EXPECT_EQ(refusal_of({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "a b"}}), "");
}

// The program reads no variable that it does not explain.
TEST(RankPlace, EveryVariableIsInTheHelp) {
  for (const char* name : kLauncherVariables) EXPECT_NO_THROW(env_value(name)) << name;
}

}  // namespace
}  // namespace tessera::comm
