#!/usr/bin/env python3
"""Compiles the C of an adoption guide as a reader would who types it in order: includes and functions at the top, all
else in one function, which has the guide's own names and, as parameters, those that it leaves to the reader. A block with
a main() is a program of its own.

Usage: check_guides.py GUIDE.md PARAMETERS COMPILER... -- [OPTION...]
PARAMETERS: declarations, separated by commas; may be empty."""

import os
import re
import subprocess
import sys
import tempfile


def blocks(text):
    return re.findall(r"^```c\n(.*?)^```$", text, re.M | re.S)


def is_outside(block):
    """Whether a block defines functions, rather than being a piece of one."""
    return re.search(r"^static\b[^;]*\{$", block, re.M) is not None


def is_program(block):
    return re.search(r"^int main\b[^;]*\{$", block, re.M) is not None


def compile_text(text, guide, command):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "guide.c")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        if subprocess.run([*command, path]).returncode:
            sys.exit("%s: its C does not compile:\n%s" % (guide, text))


def main():
    guide, parameters = sys.argv[1:3]
    end = sys.argv.index("--")
    compiler, options = sys.argv[3:end], sys.argv[end + 1:]
    with open(guide, encoding="utf-8") as file:
        found = blocks(file.read())
    if not found:
        sys.exit("%s: no C in it, expected a block" % guide)
    includes, functions, body = [], [], []
    command = [*compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *options]
    for block in found:
        if is_program(block):
            compile_text(block, guide, command)
            continue
        includes += re.findall(r"^#include .*$", block, re.M)
        rest = re.sub(r"^#include .*\n", "", block, flags=re.M)
        (functions if is_outside(rest) else body).append(rest)
    text = "\n".join(includes) + "\n" + "\n".join(functions)
    if body:
        text += "\nvoid guide(%s);\nvoid guide(%s) {\n%s}\n" % ((parameters or "void",) * 2 + ("\n".join(body),))
    compile_text(text, guide, command)
    print("%s: %d blocks compile" % (guide, len(found)))


if __name__ == "__main__":
    main()
