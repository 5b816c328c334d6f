"""The ways to build code for the emulation: plain, and under sanitizers. The emulation itself fits all of them."""

SANITIZERS = {
    "": [],
    "address_": ["-fsanitize=address,undefined"],
    "thread_": ["-fsanitize=thread"],
}

def sanitized(sanitizers):
    """What one entry of SANITIZERS adds to copts; to linkopts the entry itself is enough."""
    if not sanitizers:
        return []
    return sanitizers + [
        "-fno-sanitize-recover=all",
        "-fno-omit-frame-pointer",
        "-Og",  # -O1 takes four times as long to compile with the address sanitizer
        "-g1",  # lines, for its reports
        "-U_FORTIFY_SOURCE",  # hides overflows from the address sanitizer
    ]
