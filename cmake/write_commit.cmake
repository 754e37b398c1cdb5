# SPDX-License-Identifier: Apache-2.0
# Run at every build: cmake -DSOURCE=... -DHEADER=... -P write_commit.cmake. Writes the commit that is being built, with
# "+" where files differ from it; without git it is "unknown". The header only changes when its content does.
execute_process(COMMAND git -C ${SOURCE} rev-parse --short=12 HEAD OUTPUT_VARIABLE commit
                OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed OR commit STREQUAL "")
  set(commit unknown)
else()
  execute_process(COMMAND git -C ${SOURCE} diff --quiet HEAD RESULT_VARIABLE differs ERROR_QUIET)
  if(differs)
    string(APPEND commit "+")
  endif()
endif()
file(CONFIGURE OUTPUT ${HEADER} CONTENT "#define TESSERA_COMMIT \"${commit}\"\n")
