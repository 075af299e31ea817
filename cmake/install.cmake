# SPDX-License-Identifier: Apache-2.0
# Program, library, headers, CMake package (`find_package(lodestone)`, target lodestone::lodestone), and the shipped model
# and document, which the program finds at ../share/lodestone.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lodestone)

install(TARGETS lodestone EXPORT lodestone-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/lodestone DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET lodestone-cli)
  install(TARGETS lodestone-cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  foreach(shipped models demo suites)
    if(EXISTS ${PROJECT_SOURCE_DIR}/${shipped})
      install(DIRECTORY ${shipped} DESTINATION ${CMAKE_INSTALL_DATADIR}/lodestone)
    endif()
  endforeach()
endif()
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

install(EXPORT lodestone-targets NAMESPACE lodestone:: DESTINATION ${package_dir})
configure_package_config_file(cmake/lodestone-config.cmake.in ${PROJECT_BINARY_DIR}/generated/lodestone-config.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/generated/lodestone-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/generated/lodestone-config.cmake
  ${PROJECT_BINARY_DIR}/generated/lodestone-config-version.cmake DESTINATION ${package_dir})
