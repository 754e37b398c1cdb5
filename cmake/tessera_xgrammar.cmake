# SPDX-License-Identifier: Apache-2.0
# XGrammar's C++ core (docs/decisions/0027-grammars.md) as the static library `xgrammar`, from the PyPI source package
# that ./setup fetched; its Python bindings are left out. Only src/text/grammar links it.
set(xgrammar_name xgrammar-0.2.8)
set(xgrammar_hash 8305646fd2b319d6c3003f51a1665e54cbbe9cba1fb636bc41d0b46434ccbb80)  # as in tools/requirements-sources.txt
set(xgrammar_package ${PROJECT_SOURCE_DIR}/.venv/sources/${xgrammar_name}.tar.gz)
if(NOT EXISTS ${xgrammar_package})
  message(FATAL_ERROR "XGrammar's source package is missing: expected ${xgrammar_package}. "
                      "Run ./setup --no-run, which fetches it, then configure again.")
endif()
file(SHA256 ${xgrammar_package} found_hash)
if(NOT found_hash STREQUAL xgrammar_hash)
  message(FATAL_ERROR "${xgrammar_package}: expected SHA-256 ${xgrammar_hash}, found ${found_hash}. "
                      "Remove it and run ./setup --no-run.")
endif()
find_path(DLPACK_INCLUDE dlpack/dlpack.h)
if(NOT DLPACK_INCLUDE)
  message(FATAL_ERROR "dlpack/dlpack.h is missing (Debian's libdlpack-dev). Run ./setup --no-run, then configure again.")
endif()

# In the build folder, at the same relative path in each, so that a compiler cache serves them all.
set(xgrammar_root ${PROJECT_BINARY_DIR}/_sources/${xgrammar_name})
# The stamp's number grows with what is mended.
if(NOT EXISTS ${xgrammar_root}/mended-2)
  file(ARCHIVE_EXTRACT INPUT ${xgrammar_package} DESTINATION ${PROJECT_BINARY_DIR}/_sources
       PATTERNS ${xgrammar_name}/cpp ${xgrammar_name}/include ${xgrammar_name}/3rdparty/picojson)
  # Strings of bounded length may have control characters there, which JSON does not allow.
  set(converter ${xgrammar_root}/cpp/json_schema_converter.cc)
  file(READ ${converter} text)
  string(REPLACE "{'\\r', '\\r'}, {'\\n', '\\n'}}, true);" "{0, 0x1f}}, true);" mended "${text}")
  if(mended STREQUAL text)
    message(FATAL_ERROR "${converter}: expected the characters of a string of bounded length, found none")
  endif()
  # Where its automata fail it would make strings of a pattern without JSON's escapes: what it says here is refused.
  set(text "${mended}")
  set(fallback "  // Keep regex conversion independent. Only")
  string(REPLACE "${fallback}" "  if (json_string) XGRAMMAR_LOG(WARNING) << \"pattern \" << regex << \": expected one that \"\n\
      \"strings without a quote, a backslash or a control character fit, of parts that are known\";\n${fallback}"
         mended "${text}")
  if(mended STREQUAL text)
    message(FATAL_ERROR "${converter}: expected the way out for patterns, found none")
  endif()
  file(WRITE ${converter} "${mended}")
  file(WRITE ${xgrammar_root}/mended-2 "")
endif()
file(GLOB xgrammar_sources ${xgrammar_root}/cpp/*.cc ${xgrammar_root}/cpp/support/*.cc
     ${xgrammar_root}/cpp/converter_ext/*.cc)
add_library(xgrammar STATIC ${xgrammar_sources})
set_target_properties(xgrammar PROPERTIES CXX_STANDARD 17)
target_include_directories(xgrammar SYSTEM PUBLIC ${xgrammar_root}/include ${DLPACK_INCLUDE}
                           PRIVATE ${xgrammar_root}/3rdparty/picojson)
# What it would print goes to src/text/grammar, which has the two functions that take it.
target_compile_definitions(xgrammar PRIVATE XGRAMMAR_LOG_CUSTOMIZE=1 XGRAMMAR_ENABLE_CPPTRACE=0
                           XGRAMMAR_ENABLE_INTERNAL_CHECK=0)
target_compile_options(xgrammar PRIVATE -w)
target_link_libraries(xgrammar PRIVATE Threads::Threads)
if(TESSERA_SANITIZE MATCHES "address")
  # Not "undefined": that is for our own code. Address must be the same everywhere, for containers' bounds.
  target_compile_options(xgrammar PRIVATE -fsanitize=address -fno-omit-frame-pointer)
elseif(TESSERA_SANITIZE)
  target_compile_options(xgrammar PRIVATE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer)
endif()
if(TESSERA_FUZZ)
  target_compile_options(xgrammar PRIVATE -fsanitize=fuzzer-no-link)
endif()
