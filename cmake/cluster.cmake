# SPDX-License-Identifier: Apache-2.0
# Several machines: ranks that MPI starts and connects. Without MPI the program is built all the same, and says what is
# missing when mpirun starts more than one of it.
set(MPI_CXX_SKIP_MPICXX ON)
find_package(MPI QUIET COMPONENTS CXX)
file(GLOB_RECURSE cluster_sources CONFIGURE_DEPENDS src/cluster/*.cc)
if(MPI_CXX_FOUND)
  list(FILTER cluster_sources EXCLUDE REGEX "/no_mpi\\.cc$")
else()
  message(STATUS "Without MPI: install libopenmpi-dev for documents that several machines share")
  list(FILTER cluster_sources EXCLUDE REGEX "/mpi\\.cc$")
endif()
add_library(lodestone-cluster STATIC ${cluster_sources})
target_include_directories(lodestone-cluster PRIVATE src)
target_link_libraries(lodestone-cluster PUBLIC lodestone PRIVATE ${lode_dependencies})
target_compile_options(lodestone-cluster PRIVATE ${lode_warnings})
if(MPI_CXX_FOUND)
  target_link_libraries(lodestone-cluster PRIVATE MPI::MPI_CXX)
endif()
