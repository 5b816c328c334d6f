#!/bin/bash
# must_fail.sh TEXT PROGRAM [ARGUMENT]...: succeeds if the program, which ends with its first failure, says TEXT.
text=$1
shift
output=$(XLA_LAMB_FIRST_FAILURE=1 TSAN_OPTIONS=halt_on_error=1 "$@" 2>&1) && { echo "$1 passed, although its kernel is broken"; exit 1; }
grep -q "$text" <<<"$output" && exit 0
echo "$1 failed as it should, but did not say \"$text\":"
head -50 <<<"$output"
exit 1
