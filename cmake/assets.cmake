# SPDX-License-Identifier: Apache-2.0
# Files that the program carries inside itself, as C++ raw bytes: the task language and the grammar of the built-in prose.
foreach(asset "tasks.json|kTaskLanguage" "prose.json|kProse")
  string(REPLACE "|" ";" asset "${asset}")
  list(GET asset 0 file)
  list(GET asset 1 name)
  set(asset_cc ${PROJECT_BINARY_DIR}/generated/${file}.cc)
  add_custom_command(OUTPUT ${asset_cc}
    COMMAND ${CMAKE_COMMAND} -D INPUT=${PROJECT_SOURCE_DIR}/assets/${file} -D OUTPUT=${asset_cc} -D NAME=${name}
            -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
    DEPENDS ${PROJECT_SOURCE_DIR}/assets/${file} ${PROJECT_SOURCE_DIR}/cmake/embed.cmake)
  target_sources(lodestone-lab PRIVATE ${asset_cc})
endforeach()
