# SPDX-License-Identifier: Apache-2.0
# The commit that a program is built from, with -dirty behind it where tracked files differ from it: a header that every build
# looks at and writes when it is another one. As a script: cmake -D SOURCE=... -D OUTPUT=... -P commit.cmake
if(NOT CMAKE_SCRIPT_MODE_FILE)
  set(lode_commit_header ${PROJECT_BINARY_DIR}/generated/lodestone_commit.h)
  add_custom_target(lodestone-commit BYPRODUCTS ${lode_commit_header}
    COMMAND ${CMAKE_COMMAND} -D SOURCE=${PROJECT_SOURCE_DIR} -D OUTPUT=${lode_commit_header} -P ${CMAKE_CURRENT_LIST_FILE})
  return()
endif()

set(commit unknown)
if(EXISTS ${SOURCE}/.git)  # not the repository of a folder that the source lies in
  execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude=*
    OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed)
    set(commit ${described})
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#define LODESTONE_COMMIT \"${commit}\"\n" @ONLY)
