# SPDX-License-Identifier: Apache-2.0
# Options, language level and the flags that every target shares.
option(TESSERA_TESTS "build the tests" ON)
option(TESSERA_TEST_SEAMS "let tests fail the n-th allocation and the n-th file call" OFF)
option(TESSERA_FUZZ "build the libFuzzer targets (clang only)" OFF)
option(TESSERA_PYTHON "build Python's extension; needs Python's headers and nanobind" OFF)
option(TESSERA_CUDA "build the GPU backends; needs CUDA 13's nvcc" OFF)
option(TESSERA_CUDA_EMULATED "build the GPU backends for a GPU that is emulated on the CPU; needs no CUDA" OFF)
option(TESSERA_SM100_EMULATED "build the backend sm100 for this build's GPUs, tcgen05 in software: a test on Hopper" OFF)
option(TESSERA_SM120_EMULATED "build the backend sm120 for this build's GPUs, its products in software: a test on Hopper" OFF)
option(TESSERA_CCACHE "compile through ccache where it is installed" ON)
set(TESSERA_SANITIZE "" CACHE STRING "comma-separated sanitizers: address,undefined or thread")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

# What one checkout has compiled serves every other: paths in the source folder do not count, where it is built neither.
if(TESSERA_CCACHE)
  find_program(TESSERA_CCACHE_PROGRAM ccache)
  mark_as_advanced(TESSERA_CCACHE_PROGRAM)
  foreach(language C CXX CUDA)
    if(TESSERA_CCACHE_PROGRAM AND NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
                                              CCACHE_NOHASHDIR=1 CCACHE_DEPEND=1 ${TESSERA_CCACHE_PROGRAM})
    endif()
  endforeach()
endif()

add_library(tessera_flags INTERFACE)
target_include_directories(tessera_flags INTERFACE ${PROJECT_SOURCE_DIR}/src)
# -ffp-contract=off: a fused multiply-add would make results depend on the compiler (docs/contracts/numerics.md, 4).
set(cxx_flags -Wall -Wextra -Wpedantic -Wshadow -Wno-unused-parameter -ffp-contract=off -fno-fast-math)
target_compile_options(tessera_flags INTERFACE "$<$<COMPILE_LANGUAGE:C,CXX>:${cxx_flags}>")
if(TESSERA_CUDA_EMULATED)
  # Kernels are compiled as C++ (docs/decisions/0019-emulated-gpu.md).
  set(TESSERA_CUDA ON)
  target_include_directories(tessera_flags INTERFACE ${PROJECT_SOURCE_DIR}/src/device/cuda/emulated/include)
  target_compile_definitions(tessera_flags INTERFACE TESSERA_CUDA_EMULATED=1)
  find_package(Boost 1.81 CONFIG REQUIRED COMPONENTS context)
elseif(TESSERA_CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  enable_language(CUDA)
  find_package(CUDAToolkit 13.0 REQUIRED)
  # cudart is linked statically and opens the driver's libcuda when first called, so the program starts without one.
  # --fmad=false: the portable kernels compute the reference's bits (docs/decisions/0014-cuda.md).
  set(cuda_flags --fmad=false -Werror=all-warnings
                 -Xcompiler=-Wall,-Wextra,-Wno-unused-parameter,-ffp-contract=off,-fno-fast-math)
  target_compile_options(tessera_flags INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_flags}>")
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # False alarms about std::string concatenation (GCC bug 105651).
  target_compile_options(tessera_flags INTERFACE -Wno-restrict)
endif()
# A header and no compile definition: what does not include it is the same object with seams and without.
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/base/test_seams_config.h CONTENT "#cmakedefine TESSERA_TEST_SEAMS\n")
target_include_directories(tessera_flags INTERFACE ${PROJECT_BINARY_DIR}/generated)
if(TESSERA_SANITIZE)
  target_compile_options(tessera_flags INTERFACE -fsanitize=${TESSERA_SANITIZE} -fno-sanitize-recover=all
                         -fno-omit-frame-pointer)
  target_link_options(tessera_flags INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()
if(TESSERA_FUZZ)
  target_compile_options(tessera_flags INTERFACE -fsanitize=fuzzer-no-link)  # coverage of the parsers, not of the targets alone
endif()

# What users run is the same bytes wherever it was built (tools/check_reproducible): messages name files as seen from the
# repository, whether the compiler is given absolute paths or, by ccache, relative ones. Preset cpu has it too, so that it
# takes from ccache what the release build has compiled.
if(CMAKE_BUILD_TYPE STREQUAL "Release")
  file(RELATIVE_PATH source_from_build ${PROJECT_BINARY_DIR} ${PROJECT_SOURCE_DIR})
  # "../../" inside the repository, but "../../w/m" outside.
  string(REGEX REPLACE "([^/])$" "\\1/" source_from_build "${source_from_build}")
  foreach(prefix ${PROJECT_SOURCE_DIR}/ ${source_from_build} ${PROJECT_BINARY_DIR}/)
    add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-ffile-prefix-map=${prefix}=>")
  endforeach()
endif()

find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
# The library and not the header-only form, which costs seconds in every file that includes it.
find_package(fmt REQUIRED)
target_link_libraries(tessera_flags INTERFACE fmt::fmt)
pkg_check_modules(LIBEDIT REQUIRED IMPORTED_TARGET libedit)
pkg_check_modules(HWLOC REQUIRED IMPORTED_TARGET hwloc)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
