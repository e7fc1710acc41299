#!/usr/bin/env python3
"""Runs the commands of the README's "Try it" as they are typed there, in a folder where `build` is the build's and `data`
the tree's.

Usage: check_readme.py README.md BUILD
Exits with 77 (skipped) without bash or xz."""

import os
import re
import shutil
import subprocess
import sys
import tempfile


def main():
    readme, build = (os.path.abspath(path) for path in sys.argv[1:3])
    if not shutil.which("bash") or not shutil.which("xz"):
        print("skipped: bash or xz is missing")
        sys.exit(77)
    with open(readme, encoding="utf-8") as file:
        part = re.search(r"^## Try it\n(.*?)^## ", file.read(), re.M | re.S)[1]
    commands = re.findall(r"^```\n(.*?)^```$", part, re.M | re.S)[0]
    for command in ("data tokenize", "train", "generate", "report", "inspect"):
        if " %s " % command not in commands:
            sys.exit("the README's \"Try it\" lacks `fp8lm %s`" % command)
    with tempfile.TemporaryDirectory(prefix="fp8lm-readme-") as folder:
        os.symlink(build, os.path.join(folder, "build"))
        os.symlink(os.path.join(os.path.dirname(readme), "data"), os.path.join(folder, "data"))
        done = subprocess.run(["bash", "-eux", "-o", "pipefail", "-c", commands], cwd=folder)
        if done.returncode:
            sys.exit("exit status %d" % done.returncode)
        if not os.path.getsize(os.path.join(folder, "report.html")):
            sys.exit("report.html is empty")


if __name__ == "__main__":
    main()
