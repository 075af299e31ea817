#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compares the bits of every method's answers and logits on the pocket model (CPU, f32 and bf16 keys) with those
# recorded in tests/golden/answer_bits.json for this kind of machine, or records them anew:
#   scripts/answer_bits.sh [compare|record] [build/release]
# Record before work that must not change a bit, and compare behind it; commit a new record only with the change that
# explains it.
set -eu
cd "$(dirname "$0")/.."
what=${1:-compare} build=${2:-build/release}
case $what in
  compare) ;;
  record) export LODESTONE_RECORD_BITS=1 ;;
  *) echo "answer_bits.sh: expected compare or record, found '$what'" >&2; exit 2 ;;
esac
exec "$build/tests/test_engine" --gtest_filter='AnswerBits.*' --gtest_brief=1
