# SPDX-License-Identifier: Apache-2.0
# The CUDA backend: built where nvcc is, left out elsewhere (src/gpu/no_cuda.cc then says so at run time). The runtime is linked
# statically, cuBLASLt is opened at run time and the driver's own calls are asked of the runtime: a program built here starts on
# machines without any of them.
set(LODESTONE_CUDA OFF CACHE STRING "ON, OFF, or AUTO: on where nvcc is")
set_property(CACHE LODESTONE_CUDA PROPERTY STRINGS AUTO ON OFF)
set(LODESTONE_CUDA_ARCHITECTURES "80-real;90a-real;90-virtual" CACHE STRING
  "Machine code for sm_80 (runs on 86 and 89 too) and sm_90a, and PTX for what comes after")

set(lode_cuda OFF)
if(NOT LODESTONE_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER)
    find_program(lode_nvcc nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda/bin)
    if(lode_nvcc)
      set(CMAKE_CUDA_COMPILER ${lode_nvcc})
    endif()
  endif()
  set(CMAKE_CUDA_ARCHITECTURES ${LODESTONE_CUDA_ARCHITECTURES})
  if(CMAKE_CUDA_COMPILER OR LODESTONE_CUDA STREQUAL "ON")
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(lode_cuda ON)
    set(CMAKE_CUDA_STANDARD 20)
    # CMake 3.25 does not know the dialects of newer nvcc.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
  endif()
endif()

# lode_cuda_sources(TARGET): the kernels, compiled for this target.
function(lode_cuda_sources target)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${LODE_CUDA_DIR}/*.cu)
  target_sources(${target} PRIVATE ${sources})
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${LODESTONE_CUDA_ARCHITECTURES}")
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xcompiler=-Wall,-Wno-unused-parameter -Wno-deprecated-gpu-targets>)
  target_link_libraries(${target} PRIVATE CUDA::cudart_static ${CMAKE_DL_LIBS})
endfunction()
