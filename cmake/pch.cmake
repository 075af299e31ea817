# SPDX-License-Identifier: Apache-2.0
# Headers that most files include, parsed once for each target. Sources still include what they use: a build without
# LODESTONE_PCH, the default, compiles all the same.
set(lode_std_headers algorithm array atomic charconv chrono cmath cstdint cstring deque filesystem functional limits map memory mutex
  numeric optional random set span string string_view utility vector)
list(TRANSFORM lode_std_headers PREPEND "$<$<COMPILE_LANGUAGE:CXX>:<")
list(TRANSFORM lode_std_headers APPEND "$<ANGLE-R>>")

function(lode_precompile target)
  if(LODESTONE_PCH)
    target_precompile_headers(${target} PRIVATE ${lode_std_headers})
  endif()
endfunction()

# All tests share one precompiled header: it is compiled with the first.
function(lode_precompile_test target)
  if(NOT LODESTONE_PCH)
    return()
  endif()
  get_property(owner GLOBAL PROPERTY lode_test_pch)
  if(owner)
    target_precompile_headers(${target} REUSE_FROM ${owner})
  else()
    target_precompile_headers(${target} PRIVATE ${lode_std_headers} <gmock/gmock.h> <gtest/gtest.h>)
    set_property(GLOBAL PROPERTY lode_test_pch ${target})
  endif()
endfunction()
