# SPDX-License-Identifier: Apache-2.0
# `cmake --install build/release --prefix DIR` makes a folder that runs on a machine without our packages: bin/ with the
# program, lib/ with libtessera.so and every shared library that both need except glibc's, include/ with its header,
# share/ with the bundled model, the manual page and completion scripts.
set_target_properties(tessera PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
# RPATH, not RUNPATH: it also serves the libraries' own needs (libedit's libtinfo), which carry no path of their own.
target_link_options(tessera PRIVATE -Wl,--disable-new-dtags)
install(TARGETS tessera RUNTIME_DEPENDENCY_SET tessera_libraries RUNTIME DESTINATION bin COMPONENT program)
install(TARGETS tessera_c EXPORT tessera_c RUNTIME_DEPENDENCY_SET tessera_libraries
        LIBRARY DESTINATION lib COMPONENT library)
install(RUNTIME_DEPENDENCY_SET tessera_libraries
        PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|dl|rt|pthread|resolv|util)\\.so"
        POST_EXCLUDE_REGEXES "/ld-linux[^/]*$" "/lib(c|m|dl|rt|pthread|resolv|util)\\.so[^/]*$"
        LIBRARY DESTINATION lib COMPONENT dependencies)
install(DIRECTORY models/tiny-v4 DESTINATION share/tessera/models COMPONENT model)
install(FILES LICENSE THIRD_PARTY.md DESTINATION share/tessera COMPONENT notices)

# What is inside, in SPDX's form: of the folder, and of the Debian package and the wheel, where it goes too.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(sbom ${PROJECT_BINARY_DIR}/tessera.spdx.json)
add_custom_target(tessera_sbom BYPRODUCTS ${sbom}
                  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/make_sbom --version ${PROJECT_VERSION}
                          --output ${sbom} $<$<BOOL:${TESSERA_CUDA}>:--gpu> $<$<BOOL:${TESSERA_PYTHON}>:--python>
                  COMMAND_EXPAND_LISTS VERBATIM)
add_dependencies(tessera tessera_sbom)
install(FILES ${sbom} DESTINATION share/tessera COMPONENT notices)

# The C interface for find_package(tessera) and pkg-config. Before 1.0 a minor version may change it.
include(CMakePackageConfigHelpers)
set(package_folder lib/cmake/tessera)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tessera-config-version.cmake COMPATIBILITY SameMinorVersion)
install(EXPORT tessera_c FILE tessera-config.cmake NAMESPACE tessera:: DESTINATION ${package_folder} COMPONENT library)
install(FILES ${PROJECT_BINARY_DIR}/tessera-config-version.cmake DESTINATION ${package_folder} COMPONENT library)
install(FILES bindings/c/tessera.h DESTINATION include COMPONENT library)
install(FILES ${PROJECT_BINARY_DIR}/bindings/c/tessera.pc DESTINATION lib/pkgconfig COMPONENT library)
if(NOT TESSERA_SANITIZE)
  set(help_folder ${PROJECT_BINARY_DIR}/apps/tessera/help)
  install(DIRECTORY ${help_folder}/man1 DESTINATION share/man COMPONENT program)
  install(FILES ${help_folder}/tessera.bash DESTINATION share/bash-completion/completions RENAME tessera
          COMPONENT program)
  install(FILES ${help_folder}/_tessera DESTINATION share/zsh/site-functions COMPONENT program)
  install(FILES ${help_folder}/tessera.fish DESTINATION share/fish/vendor_completions.d COMPONENT program)
endif()
