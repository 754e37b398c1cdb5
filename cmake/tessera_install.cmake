# SPDX-License-Identifier: Apache-2.0
# `cmake --install build/release --prefix DIR` makes a folder that runs on a machine without our packages: bin/ with the
# program, lib/ with libtessera.so and every shared library that both need except glibc's, include/ with its header,
# share/ with the bundled model, the manual page and completion scripts.
set_target_properties(tessera PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
# RPATH, not RUNPATH: it also serves the libraries' own needs (libedit's libtinfo), which carry no path of their own.
target_link_options(tessera PRIVATE -Wl,--disable-new-dtags)
install(TARGETS tessera RUNTIME_DEPENDENCY_SET tessera_libraries RUNTIME DESTINATION bin)
install(TARGETS tessera_c RUNTIME_DEPENDENCY_SET tessera_libraries LIBRARY DESTINATION lib)
install(FILES bindings/c/tessera.h DESTINATION include)
install(FILES ${PROJECT_BINARY_DIR}/bindings/c/tessera.pc DESTINATION lib/pkgconfig)
install(RUNTIME_DEPENDENCY_SET tessera_libraries
        PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|dl|rt|pthread|resolv|util)\\.so"
        POST_EXCLUDE_REGEXES "/ld-linux[^/]*$" "/lib(c|m|dl|rt|pthread|resolv|util)\\.so[^/]*$"
        LIBRARY DESTINATION lib)
install(DIRECTORY models/tiny-v4 DESTINATION share/tessera/models)
install(FILES LICENSE THIRD_PARTY.md DESTINATION share/tessera)
if(NOT TESSERA_SANITIZE)
  set(help_folder ${PROJECT_BINARY_DIR}/apps/tessera/help)
  install(FILES ${help_folder}/tessera.1 DESTINATION share/man/man1)
  install(FILES ${help_folder}/tessera.bash DESTINATION share/bash-completion/completions RENAME tessera)
  install(FILES ${help_folder}/_tessera DESTINATION share/zsh/site-functions)
  install(FILES ${help_folder}/tessera.fish DESTINATION share/fish/vendor_completions.d)
endif()
