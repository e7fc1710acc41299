#!/usr/bin/env python3
"""tools/quickstart as a newcomer sees it: what it says at its end, and where a failed build can be read.

Usage: check_quickstart.py QUICKSTART FP8LM
Exits with 77 (skipped) without bash or xz."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

QUICKSTART, FP8LM = (os.path.abspath(path) for path in sys.argv[1:3])
if not shutil.which("bash") or not shutil.which("xz"):
    print("skipped: bash or xz is missing")
    sys.exit(77)


class Quickstart(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="fp8lm-quickstart-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def run_script(self, *arguments, expect=0, **environment):
        done = subprocess.run(["bash", QUICKSTART, "--no-install", "--output", os.path.join(self.folder, "out"),
                               *arguments], capture_output=True, timeout=500, env=dict(os.environ, **environment))
        out, message = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
        self.assertEqual(done.returncode, expect, out + message)
        return out, message

    def test_whole(self):
        # Many more threads than most machines have cores: no run has all its threads' time.
        threads = 4 * os.cpu_count()
        out, message = self.run_script("--fp8lm", FP8LM, "--steps", "1", OMP_NUM_THREADS=str(threads),
                                       OMP_WAIT_POLICY="passive")
        self.assertEqual(message, "")
        for precision in ("bf16", "fp8-o2"):
            self.assertRegex(out, r"(?m)^%s +\d\.\d{4} +\d+ +\d+ %%   weights " % re.escape(precision))
        self.assertRegex(out, r"(?m)^note: a run had only \d+ %% of its %d threads' time on the cores: " % threads)
        self.assertRegex(out, r"(?m)^difference of the validation losses: [+-]0\.\d{4} \([+-]\d\.\d\d %\)\n"
                              r"one seed: .* is noise between seeds; docs/results\.md ")
        page, = re.findall(r"(?m)^report: (.*)$", out)
        self.assertTrue(os.path.exists(page))
        self.assertNotIn("== building", out)

    def stub(self, name, text):
        path = os.path.join(self.folder, "bin", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write("#!/bin/sh\n" + text)
        os.chmod(path, 0o755)

    def test_failing_builds(self):
        path = os.path.join(self.folder, "bin") + os.pathsep + os.environ["PATH"]
        self.stub("meson", "echo no compiler here\nexit 3\n")
        _, message = self.run_script(expect=1, PATH=path)
        self.assertIn("no compiler here\ntools/quickstart: meson setup failed; all of its output is in %s/out/setup.log\n"
                      % self.folder, message)
        self.stub("meson", "exit 0\n")
        self.stub("ninja", "echo error: no such thing >&2\nexit 1\n")
        _, message = self.run_script(expect=1, PATH=path)
        self.assertIn("error: no such thing\ntools/quickstart: the build failed; all of its output is in "
                      "%s/out/build.log\n" % self.folder, message)
        # One that went well says so, too.
        self.stub("ninja", "exit 0\n")
        out, _ = self.run_script(expect=127, PATH=path)
        self.assertIn("built; the output is in %s/out/setup.log and %s/out/build.log\n" % (self.folder, self.folder), out)

    def test_failing_run(self):
        self.stub("fp8lm", '[ "$1" = train ] && { echo "fp8lm train: no memory" >&2; exit 1; }\ncat > /dev/null\n')
        out, message = self.run_script("--fp8lm", os.path.join(self.folder, "bin", "fp8lm"), expect=1)
        self.assertEqual(message, "fp8lm train: no memory\n")
        self.assertNotIn("training in fp8-o2", out)

    def test_usage(self):
        for expected, arguments in {
            "--steps is '0', expected a whole number from 1 to 9999999": ["--steps", "0"],
            "--fp8lm needs a value": ["--fp8lm"],
            'unknown argument "--step"': ["--step", "1"],
        }.items():
            _, message = self.run_script(*arguments, expect=2)
            self.assertIn(expected, message)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
