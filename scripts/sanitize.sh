#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# sanitize.sh asan|tsan [FOLDER...]: builds the tests of these folders under a sanitizer preset and runs them.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=${1:?usage: scripts/sanitize.sh asan|tsan [FOLDER...]}
shift
# Compiling is most of the time, so only what these tests link is compiled.
case $preset in
  asan) default=(base io ann kv select attend model cluster fuzz) sources='base;io;text;kernels;ann;kv;select;attend;model;engine;cluster;lab' ;;
  tsan) default=(base ann kv select attend model cluster) sources='base;io;text;kernels;ann;kv;select;attend;model;engine;cluster' ;;
  *) echo "sanitize.sh: expected asan or tsan, found '$preset'" >&2; exit 2 ;;
esac
folders=("$@")
# What the tests of these folders link: few of them need the lab.
[ ${#folders[@]} -eq 0 ] || sources='base;io;text;kernels;ann;kv;select;attend;model;engine;cluster'
[[ ! " ${folders[*]} " =~ \ (eval|fuzz|gpu|report|tasks|train)\  ]] || sources+=';lab'
[ ${#folders[@]} -gt 0 ] || for folder in "${default[@]}"; do
  if compgen -G "tests/$folder/*_test.cc" >/dev/null; then folders+=("$folder"); fi
done

# Not detect_stack_use_after_return: GCC 12 then misplaces variables that are to lie at 64 bytes (GCC bug 110027), so that
# AVX-512 code dies.
export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=0
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
# Open MPI is not instrumented: its own frames alone are left out.
# A long history, so that the frames of Open MPI are still known.
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:history_size=7:suppressions=$PWD/scripts/open_mpi.tsan
export LSAN_OPTIONS=suppressions=$PWD/scripts/open_mpi.lsan:print_suppressions=0
[ "$preset" != tsan ] || export LODESTONE_ISA=scalar  # the others are compiled without it (cmake/isa.cmake)
cmake --preset "$preset" -Wno-dev -DLODESTONE_ONLY="$sources" >/dev/null
cmake --build --preset "$preset" --parallel "$(nproc)" --target "${folders[@]/#/test_}"
pattern=$(IFS='|'; echo "${folders[*]}")
ctest --test-dir "build/$preset" --output-on-failure --parallel "$(nproc)" -R "^($pattern)(_[0-9]+)?\$"
# Frames of a library that is not instrumented are found by the slow way of looking for them alone.
[[ " ${folders[*]} " != *" cluster "* ]] || ASAN_OPTIONS+=:fast_unwind_on_malloc=0 ctest --test-dir "build/$preset" --output-on-failure -R '^cluster_mpi$'
