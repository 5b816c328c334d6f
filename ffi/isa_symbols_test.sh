#!/bin/bash
# The loops of each instruction set may define one symbol, their table. An inline function shared with other object files (one of the
# standard library, say) could be linked in everywhere from an AVX-512 object, and crash every other processor.
set -euo pipefail
for library in ffi/libkernel_*.a; do
  defined=$(nm --defined-only --extern-only --demangle "$library" | sed -n 's/^[0-9a-f]* [A-Za-z] //p')
  [[ $defined =~ ^xla_lamb::kLoops_[a-z0-9]+$ ]] || { echo "$library defines: $defined"; exit 1; }
done
