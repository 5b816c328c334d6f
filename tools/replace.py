"""replace.py SOURCE TARGET OLD NEW: a copy of a file in which OLD, which must occur exactly once, is NEW."""

import sys

source, target, old, new = sys.argv[1:]
text = open(source).read()
if text.count(old) != 1:
    sys.exit(f"{source} holds {text.count(old)} times, not once: {old}")
open(target, "w").write(text.replace(old, new))
