#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_format.sh [--fix]: are all C++ files as .clang-format wants them? --fix makes them so.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t files < <(find apps examples fuzz include python src tests \( -name '*.h' -o -name '*.cc' -o -name '*.cu' \
  -o -name '*.cuh' \) 2>/dev/null | sort)
if [ "${1:-}" = --fix ]; then
  clang-format -i "${files[@]}"
  exit
fi
if ! wrong=$(printf '%s\0' "${files[@]}" | xargs -0 -n 8 -P "$(nproc)" clang-format --dry-run -Werror 2>&1); then
  # One line a file is enough: the fix is mechanical.
  grep -oE '^[^:]+:[0-9]+' <<<"$wrong" | sort -t: -u -k1,1 >&2
  echo "These files are not formatted (first place of each). Fix: scripts/check_format.sh --fix" >&2
  exit 1
fi
