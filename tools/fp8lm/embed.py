"""Writes a C header with the files that are given as strings: embed.py HEADER FILE..., report.css as report_css."""

import os
import sys

with open(sys.argv[1], "w", encoding="ascii") as header:
    for path in sys.argv[2:]:
        with open(path, "rb") as file:
            data = file.read()
        header.write("static const char %s[] = {\n" % os.path.basename(path).replace(".", "_"))
        # Character constants: their type holds any byte, whether char is signed or not.
        for start in range(0, len(data), 16):
            header.write("".join("'\\x%02x'," % byte for byte in data[start : start + 16]) + "\n")
        header.write("'\\0'};\n")
