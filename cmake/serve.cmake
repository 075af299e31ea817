# SPDX-License-Identifier: Apache-2.0
# The server: HTTP on Boost.Beast, which is headers alone; without it the program is built all the same and `serve` says what
# is missing. The web page lies inside the program.
find_package(Boost 1.81 QUIET)
file(GLOB_RECURSE serve_sources CONFIGURE_DEPENDS src/serve/*.cc)
if(Boost_FOUND)
  list(FILTER serve_sources EXCLUDE REGEX "/no_boost\\.cc$")
else()
  message(STATUS "Without a server: install libboost1.81-dev for one")
  list(FILTER serve_sources EXCLUDE REGEX "/http_server\\.cc$")
endif()
set(page_cc ${PROJECT_BINARY_DIR}/generated/index.html.cc)
add_custom_command(OUTPUT ${page_cc}
  COMMAND ${CMAKE_COMMAND} -D INPUT=${PROJECT_SOURCE_DIR}/assets/web/index.html -D OUTPUT=${page_cc} -D NAME=kWebPage
          -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
  DEPENDS ${PROJECT_SOURCE_DIR}/assets/web/index.html ${PROJECT_SOURCE_DIR}/cmake/embed.cmake)
add_library(lodestone-serve STATIC ${serve_sources} ${page_cc})
target_include_directories(lodestone-serve PRIVATE src)
target_link_libraries(lodestone-serve PUBLIC lodestone lodestone-cluster PRIVATE ${lode_dependencies})
# Not templates of numbers: what Beast and JSON make of -O3 is size alone.
target_compile_options(lodestone-serve PRIVATE ${lode_warnings} $<$<CONFIG:Release>:-O2>)
lode_precompile(lodestone-serve)
if(Boost_FOUND)
  target_include_directories(lodestone-serve SYSTEM PRIVATE ${Boost_INCLUDE_DIRS})
endif()
