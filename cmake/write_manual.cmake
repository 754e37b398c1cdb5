# SPDX-License-Identifier: Apache-2.0
# Run when the program is built: cmake -DPROGRAM=... -DFOLDER=... -P write_manual.cmake. Writes tessera.1 and, for each
# verb that it has, tessera-VERB.1.
file(REMOVE_RECURSE ${FOLDER})
file(MAKE_DIRECTORY ${FOLDER})
execute_process(COMMAND ${PROGRAM} man OUTPUT_VARIABLE page COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "\n\\.SS [a-z]+" headings "${page}")
foreach(heading ${headings})
  string(REGEX REPLACE ".* " "" verb "${heading}")
  execute_process(COMMAND ${PROGRAM} man ${verb} OUTPUT_FILE ${FOLDER}/tessera-${verb}.1 COMMAND_ERROR_IS_FATAL ANY)
endforeach()
execute_process(COMMAND ${PROGRAM} man OUTPUT_FILE ${FOLDER}/tessera.1 COMMAND_ERROR_IS_FATAL ANY)
