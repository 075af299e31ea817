# SPDX-License-Identifier: Apache-2.0
install(TARGETS lodestone EXPORT lodestone-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/lodestone DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET lodestone-cli)
  install(TARGETS lodestone-cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
