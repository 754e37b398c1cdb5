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
# Replaces `old`, which must be there, in a file below cpp/.
function(mend_xgrammar name old new)
  set(path ${xgrammar_root}/cpp/${name})
  file(READ ${path} text)
  string(REPLACE "${old}" "${new}" mended "${text}")
  if(mended STREQUAL text)
    message(FATAL_ERROR "${path}: expected what is mended there, found none of: ${old}")
  endif()
  file(WRITE ${path} "${mended}")
endfunction()

# The stamp's number grows with what is mended.
if(NOT EXISTS ${xgrammar_root}/mended-6)
  file(ARCHIVE_EXTRACT INPUT ${xgrammar_package} DESTINATION ${PROJECT_BINARY_DIR}/_sources
       PATTERNS ${xgrammar_name}/cpp ${xgrammar_name}/include ${xgrammar_name}/3rdparty/picojson)
  # Strings of bounded length may have control characters there, which JSON does not allow.
  mend_xgrammar(json_schema_converter.cc "{'\\r', '\\r'}, {'\\n', '\\n'}}, true);" "{0, 0x1f}}, true);")
  # Patterns come in a form of ours (src/text/grammar/pattern.h), made for where they stand: nothing is to be left out of
  # them, and automata are to hold them, in calls too. The way out, a grammar, is too slow for many.
  mend_xgrammar(json_schema_converter.cc "*spec.pattern, /*json_string=*/true" "*spec.pattern")
  mend_xgrammar(json_schema_converter.cc "*spec.pattern, false, /*force_cfg_expansion=*/true" "*spec.pattern")
  mend_xgrammar(json_schema_converter.cc "  // Keep regex conversion independent. Only"
    "  XGRAMMAR_CHECK(force_cfg_expansion) << \"expected a pattern that an automaton holds, found a larger one\";
  // Keep regex conversion independent. Only")
  # Automata that take "997" for \d{1,2}(\.\d{1,2})?: an end that has ways on is no end of the empty text.
  mend_xgrammar(fsm.cc "    fsm.AddEpsilonEdge(start_, ends_.front());
  }
  return FSMWithStartEnd(fsm, start_, ends_);"
    "    const int start = fsm.AddState();
    fsm.AddEpsilonEdge(start, start_);
    std::vector<int32_t> ends = ends_;
    ends.push_back(start);
    return FSMWithStartEnd(fsm, start, std::move(ends));
  }
  return FSMWithStartEnd(fsm, start_, ends_);")
  # And "ab," for (a,*|b){2,}: what is repeated without end begins anew, it does not go on from some end of what was before.
  mend_xgrammar(fsm_builder.cc "    for (int i = 2; i < state.lower_bound; i++) {
      result = FSMWithStartEnd::Concat(std::vector<FSMWithStartEnd>{result, child});
    }
    int end_state"
    "    std::vector<FSMWithStartEnd> copies(std::max(state.lower_bound, 1) - 1, child);
    copies.push_back(child.Plus());
    result = FSMWithStartEnd::Concat(copies);
    if (state.lower_bound == 0) allow_zero_repetitions(&result);
    return ResultOk(std::move(result));
    int end_state")
  # And "xzz" for xz?|x: an end that has been taken for the same as another state is not the same as all other ends.
  mend_xgrammar(fsm.cc "      if (outgoing_count == 0) {
" "      if (outgoing_count == 0) {
        if (union_find_set.Count(i)) continue;
")
  # Calls have one form: a line end before each parameter and behind the last, and two without parameters.
  mend_xgrammar(json_schema_converter.cc "    return GetWhitespacePattern();
  }
  return JSONSchemaConverter::NextSeparator(is_end);"
    "    return json_format_ == JSONFormat::kDeepSeekXML ? \"\\\"\\\\n\\\"\" : GetWhitespacePattern();
  }
  return JSONSchemaConverter::NextSeparator(is_end);")
  mend_xgrammar(json_schema_converter.cc "int32_t empty_content = any_whitespace_"
    "int32_t empty_content = !need_braces ? ByteString(\"\\n\\n\") : any_whitespace_")
  mend_xgrammar(converter_ext/deepseek.cc "    if (!is_string) elements.push_back(WhitespaceExpression());
" "")
  file(WRITE ${xgrammar_root}/mended-6 "")
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
  # Threads' tests compile few grammars.
  target_compile_options(xgrammar PRIVATE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -O0)
endif()
if(TESSERA_FUZZ)
  target_compile_options(xgrammar PRIVATE -fsanitize=fuzzer-no-link)
endif()
