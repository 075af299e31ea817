# SPDX-License-Identifier: Apache-2.0
# Files that the program carries inside itself, as C++ raw bytes.
set(task_language ${PROJECT_SOURCE_DIR}/assets/tasks.json)
if(EXISTS ${task_language})
  set(task_language_cc ${PROJECT_BINARY_DIR}/generated/task_language.cc)
  add_custom_command(OUTPUT ${task_language_cc}
    COMMAND ${CMAKE_COMMAND} -D INPUT=${task_language} -D OUTPUT=${task_language_cc} -D NAME=kTaskLanguage
            -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
    DEPENDS ${task_language} ${PROJECT_SOURCE_DIR}/cmake/embed.cmake)
  target_sources(lodestone PRIVATE ${task_language_cc})
endif()
