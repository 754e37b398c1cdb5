# SPDX-License-Identifier: Apache-2.0
# Run by cpack on the files of the package before they are packed, for what Debian's policy wants otherwise: Debian's
# libraries lie where the loader looks for them, and texts are compressed.
set(root ${CPACK_TEMPORARY_DIRECTORY}/ALL_COMPONENTS_IN_ONE)
file(GLOB programs ${root}/usr/bin/*)
foreach(program ${programs})
  file(RPATH_REMOVE FILE ${program})
endforeach()
file(GLOB texts ${root}/usr/share/man/man1/*.1)
foreach(text ${texts} ${root}/usr/share/doc/tessera/changelog)
  execute_process(COMMAND gzip -9nf ${text} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
file(MAKE_DIRECTORY ${root}/usr/share/zsh/vendor-completions)
file(RENAME ${root}/usr/share/zsh/site-functions/_tessera ${root}/usr/share/zsh/vendor-completions/_tessera)
file(REMOVE_RECURSE ${root}/usr/share/zsh/site-functions)
