# SPDX-License-Identifier: Apache-2.0
# `cpack` in a release build folder makes a Debian package (docs/packages.md): the program, its manual pages and shell
# completions, and a systemd service. Libraries come from Debian; the bundled model is left out.
set(debian_files ${PROJECT_SOURCE_DIR}/packaging/debian)
set(debian COMPONENT debian EXCLUDE_FROM_ALL)
install(FILES ${debian_files}/tessera.service DESTINATION /lib/systemd/system ${debian})
install(FILES ${debian_files}/tessera.default DESTINATION /etc/default RENAME tessera ${debian})
install(FILES ${debian_files}/copyright DESTINATION share/doc/tessera ${debian})
install(FILES ${debian_files}/changelog DESTINATION share/doc/tessera ${debian})

install(FILES ${sbom} DESTINATION share/doc/tessera ${debian})

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME tessera)
set(CPACK_PACKAGE_CONTACT "Tessera developers <tessera@localhost.invalid>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
# For what lies outside /usr.
set(CPACK_SET_DESTDIR ON)
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL program debian)
set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/cmake/finish_debian.cmake)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
    OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${debian_files}/conffiles ${debian_files}/postinst ${debian_files}/prerm
    ${debian_files}/postrm)
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION "native NVFP4 inference engine for DeepSeek-V4
Tessera runs DeepSeek-V4 with NVFP4 weights: it answers on a terminal and
over OpenAI's and Anthropic's HTTP APIs, and converts and checks models.

This package is the CPU build without a model.")
include(CPack)
