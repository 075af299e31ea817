#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh BUILD_DIR: installs a finished build into an empty folder, then builds and runs a project that uses it from there.
set -euo pipefail
build=$1
consumer=$(dirname "$(realpath "$0")")/consumer
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cmake --install "$build" --prefix "$folder/prefix" >/dev/null
"$folder/prefix/bin/lodestone" --version
cmake -S "$consumer" -B "$folder/consumer" -G Ninja -DCMAKE_BUILD_TYPE=Release -Wno-dev \
  -DCMAKE_PREFIX_PATH="$folder/prefix" >/dev/null
cmake --build "$folder/consumer"
"$folder/consumer/consumer"
