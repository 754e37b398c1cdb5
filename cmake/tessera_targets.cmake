# SPDX-License-Identifier: Apache-2.0
# tessera_kernels(FILES...): marks kernel sources of this folder; the emulated GPU's are compiled as C++.
function(tessera_kernels)
  if(TESSERA_CUDA_EMULATED)
    set_source_files_properties(${ARGN} PROPERTIES LANGUAGE CXX
      COMPILE_OPTIONS "-x;c++;-include;cuda_runtime.h;-Wno-unknown-pragmas;-Wno-sign-compare")
  endif()
endfunction()

# tessera_room(NAME SOURCES files... [ROOMS rooms...] [LIBS libraries...] [COMPUTES])
# One static library per room, named tessera_NAME. ROOMS are rooms below it, LIBS third-party targets. Of a room that
# COMPUTES the tests' time is that of its loops; of the others, under sanitizers, that of compiling them.
function(tessera_room name)
  cmake_parse_arguments(ROOM "COMPUTES" "" "SOURCES;ROOMS;LIBS" ${ARGN})
  add_library(tessera_${name} STATIC ${ROOM_SOURCES})
  if(TESSERA_SANITIZE AND NOT TESSERA_FUZZ AND NOT ROOM_COMPUTES)
    target_compile_options(tessera_${name} PRIVATE -O0)
  endif()
  list(TRANSFORM ROOM_ROOMS PREPEND tessera_)
  target_link_libraries(tessera_${name} PUBLIC tessera_flags ${ROOM_ROOMS} PRIVATE ${ROOM_LIBS})
endfunction()

# tessera_test(ROOM SOURCES files... [ROOMS rooms...] [LIBS libraries...] [COMPUTES])
# One GoogleTest program per folder of tests/, named test_ROOM; each TEST becomes a ctest entry. `./test --quick`
# leaves out suites whose names begin with "Slow".
function(tessera_test name)
  cmake_parse_arguments(TEST "COMPUTES" "" "SOURCES;ROOMS;LIBS" ${ARGN})
  add_executable(test_${name} ${TEST_SOURCES})
  list(TRANSFORM TEST_ROOMS PREPEND tessera_)
  target_include_directories(test_${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(test_${name} PRIVATE TESSERA_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
                             TESSERA_BINARY_DIR="${PROJECT_BINARY_DIR}")
  # The tests' own code is full of assertions: to optimise it takes half of the time of compiling it. Some COMPUTES much.
  if(TESSERA_SANITIZE AND NOT TEST_COMPUTES)
    target_compile_options(test_${name} PRIVATE -O0)
  elseif(CMAKE_BUILD_TYPE STREQUAL "Release")
    target_compile_options(test_${name} PRIVATE -O1)
  endif()
  # Checks of its arithmetic cost the same; this follows the rooms' own flags, which turn them on.
  add_library(test_${name}_flags INTERFACE)
  if(TESSERA_SANITIZE MATCHES "undefined")
    target_compile_options(test_${name}_flags INTERFACE -fno-sanitize=undefined)
  endif()
  target_link_libraries(test_${name} PRIVATE ${TEST_ROOMS} ${TEST_LIBS} tessera_flags GTest::gtest GTest::gmock
                        GTest::gtest_main test_${name}_flags)
  gtest_discover_tests(test_${name} TEST_FILTER "-Slow*:*/Slow*" DISCOVERY_TIMEOUT 60
                       PROPERTIES LABELS ${name} TIMEOUT 900)
  gtest_discover_tests(test_${name} TEST_FILTER "Slow*:*/Slow*" TEST_LIST slow_${name} DISCOVERY_TIMEOUT 60
                       PROPERTIES LABELS ${name} TIMEOUT 1800)
endfunction()
