#!/bin/bash
# must_fail.sh PROGRAM TEXT: succeeds if the program fails and says TEXT.
output=$("$1" quick 2>&1) && { echo "$1 passed, although its kernel is broken"; exit 1; }
grep -q "$2" <<<"$output" && exit 0
echo "$1 failed as it should, but did not say \"$2\":"
head -50 <<<"$output"
exit 1
