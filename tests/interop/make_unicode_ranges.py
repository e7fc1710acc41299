#!/usr/bin/env python3
"""Writes tools/fp8lm/unicode_ranges.h to standard output (clang-format it afterwards). Needs the package unicodedata2 16.0.0:
Unicode 16 is what the package tokenizers 0.23 goes by."""

import unicodedata2 as u

assert u.unidata_version == "16.0.0", u.unidata_version


def ranges(g):
    out = []
    for c in range(0x110000):
        if u.category(chr(c))[0] == g:
            if out and out[-1][1] == c - 1:
                out[-1][1] = c
            else:
                out.append([c, c])
    return out


def emit(name, comment, rs):
    print("// %s: %d ranges, %d code points." % (comment, len(rs), sum(b - a + 1 for a, b in rs)))
    print("static const uint32_t %s[][2] = {" % name)
    line = "  "
    for a, b in rs:
        item = "{0x%x, 0x%x}, " % (a, b)
        if len(line + item) > 119:
            print(line.rstrip())
            line = "  "
        line += item
    print(line.rstrip() + "\n};\n")


print(
    """// Letters and numbers of Unicode 16.0.0, written by tests/interop/make_unicode_ranges.py from the package unicodedata2.
#ifndef FP8LM_UNICODE_RANGES_H
#define FP8LM_UNICODE_RANGES_H

#include <stdint.h>
"""
)
emit("letter_ranges", "General category L", ranges("L"))
emit("number_ranges", "General category N", ranges("N"))
print("#endif")
