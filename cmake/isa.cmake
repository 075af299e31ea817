# SPDX-License-Identifier: Apache-2.0
# A block of weights stands for the same bits on every machine (src/kernels/dequantise.cc): no fused operations of the compiler's choice.
set_source_files_properties(src/kernels/dequantise.cc PROPERTIES COMPILE_OPTIONS -ffp-contract=off SKIP_PRECOMPILE_HEADERS ON)
# GCC vectorises its loops of comparisons only with -fno-trapping-math, which changes no result: a row takes 1.9 us in place of 8.4.
set_source_files_properties(src/kernels/q4_rows.cc PROPERTIES COMPILE_OPTIONS "-fno-trapping-math;-ffp-contract=off" SKIP_PRECOMPILE_HEADERS ON)
# One translation unit per instruction set, each with its own flags; everything else is built for the baseline, so that the
# program starts on any x86-64 and chooses at run time. Never -march=native.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  foreach(entry
      "avx2|-mavx2 -mfma -mf16c"
      "avx512|-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c"
      "avx512vnni|-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c"
      "avx512vpopcntdq|-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vpopcntdq -mavx2 -mfma -mf16c"
      "avx512bf16|-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx2 -mfma -mf16c"
      "amx|-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx2 -mfma -mf16c -mamx-tile -mamx-bf16")
    string(REPLACE "|" ";" entry "${entry}")
    list(GET entry 0 isa)
    list(GET entry 1 flags)
    separate_arguments(flags)
    # Fused operations only where the source says so: the compiler's choice may differ between two instances of one template,
    # whose results must have the same bits.
    list(APPEND flags -ffp-contract=off)
    # GCC takes many minutes for them under the thread sanitizer, whose tests run the scalar kernels (scripts/sanitize.sh).
    if(CMAKE_CXX_FLAGS MATCHES "-fsanitize=thread")
      list(APPEND flags -fno-sanitize=thread)
    endif()
    # Nor is a kernel what a fuzzer looks at; clang takes minutes for each.
    if(LODESTONE_FUZZERS)
      list(APPEND flags -fno-sanitize=all)
    endif()
    file(GLOB_RECURSE isa_sources src/kernels/cpu/*_${isa}.cc)
    if(isa_sources)
      set_source_files_properties(${isa_sources} PROPERTIES COMPILE_OPTIONS "${flags}" SKIP_PRECOMPILE_HEADERS ON)
      # These take GCC over ten minutes each under the address sanitizer.
      set(unrolled ${isa_sources})
      list(FILTER unrolled INCLUDE REGEX "tiled_product_")
      if(unrolled AND CMAKE_CXX_FLAGS MATCHES "-fsanitize=address")
        set_source_files_properties(${unrolled} PROPERTIES COMPILE_OPTIONS "${flags};-fno-sanitize=all")
      endif()
    endif()
  endforeach()
endif()
