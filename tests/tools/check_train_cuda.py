#!/usr/bin/env python3
"""fp8lm train and generate with --device cuda: beside the CPU, across checkpoints, and with statistics of FP8 tensors.

Usage: check_train_cuda.py FP8LM [unittest arguments]
Exits with 77 where there is no GPU. Needs nothing but Python's own library. Tests without a GPU put libraries before the
program's own (LD_LIBRARY_PATH) whose CUDA backends run in an emulation (tests/gpu/meson.build)."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest

FP8LM = os.path.abspath(sys.argv[1])
# How far a loss on CUDA may be from the CPU's: by the order of sums, and by roundings that it moves.
BOUNDS = {"fp32": 1e-5, "bf16": 5e-3, "te": 1e-2, "fp8-o1": 2e-2, "fp8-o2": 2e-2}
TINY = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32",
        "--micro-batch-size", "2", "--global-batch-size", "4", "--threads", "1", "--log-interval", "1", "--train-iters", "4"]
WORDS = "the sun rose over a quiet hill and all who saw it sang of bread water stone light and rain".split()


def run(*arguments, cwd=None):
    done = subprocess.run([FP8LM, *map(str, arguments)], capture_output=True, cwd=cwd, timeout=600)
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


class TrainCuda(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="fp8lm-cuda-")
        draw = random.Random(7)
        with open(os.path.join(cls.folder, "text.txt"), "w") as text:
            text.write(" ".join(draw.choice(WORDS) for _ in range(4000)))
        code, _, message = run("data", "tokenize", "--output-prefix", "t", "--val-fraction", "0.1", "text.txt",
                               cwd=cls.folder)
        assert code == 0, message

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def ok(self, *arguments):
        code, out, message = run(*arguments, cwd=self.folder)
        self.assertEqual(code, 0, message)
        return out

    def train(self, save, *arguments):
        return self.ok("train", "--data-path", "t", *TINY, "--save", save, "--save-interval", "2", "--keep-last", "0",
                       "--eval-interval", "2", "--eval-iters", "2", *arguments)

    def events(self, save, kind):
        with open(os.path.join(self.folder, save, "log.jsonl")) as file:
            return [entry for entry in map(json.loads, file) if entry["event"] == kind]

    def checkpoint(self, save, step):
        folder = os.path.join(self.folder, save, "step-%08d" % step)
        files = {}
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name), "rb") as file:
                files[name] = file.read()
        return files

    def test_beside_the_cpu(self):
        shapes = {"fp32": ["--preset", "tiny-gpt2", "--max-position-embeddings", "32"],
                  "bf16": ["--preset", "tiny-llama", "--num-query-groups", "1"],
                  "te": ["--hidden-dropout", "0.1"],
                  "fp8-o1": ["--preset", "tiny-llama", "--num-query-groups", "1", "--recompute-activations"],
                  "fp8-o2": ["--log-fp8-interval", "1"]}
        for precision, shape in shapes.items():
            with self.subTest(precision):
                for device in ("cpu", "cuda"):
                    self.train(device + precision, "--precision", precision, "--device", device, *shape)
                for kind in ("step", "validation"):
                    pairs = list(zip(self.events("cpu" + precision, kind), self.events("cuda" + precision, kind)))
                    self.assertGreater(len(pairs), 1)
                    for one, other in pairs:
                        self.assertLessEqual(abs(other["loss"] / one["loss"] - 1), BOUNDS[precision], (kind, one["step"]))
        # What is known of FP8 tensors is known on both.
        for one, other in zip(self.events("cpufp8-o2", "fp8"), self.events("cudafp8-o2", "fp8")):
            for field in ("tensors", "weights"):
                self.assertEqual([sorted(tensor) for tensor in one[field]], [sorted(tensor) for tensor in other[field]])
        self.assertTrue(self.events("cudafp8-o2", "fp8"))
        self.assertGreater(self.events("cudafp8-o2", "start")[0]["peak_flops"], 0)
        # Which attention, with a reason where it is not cuDNN's.
        self.assertRegex(self.events("cudafp8-o2", "start")[0]["attention"], "^(cuDNN [0-9]|own: cuDNN|own: this build)")
        self.assertEqual(self.events("cudafp32", "start")[0]["attention"], "own: activations are FP32")

    def test_checkpoints(self):
        for precision in ("bf16", "fp8-o2"):
            with self.subTest(precision):
                save = "whole" + precision
                self.train(save, "--precision", precision, "--device", "cuda")
                self.ok("train", "--load", save + "/step-00000002", "--save", save + "-resumed", "--save-interval", "2",
                        "--data-path", "t", "--device", "cuda", "--log-interval", "1")
                whole, resumed = self.checkpoint(save, 4), self.checkpoint(save + "-resumed", 4)
                for name in ("model.safetensors", "state.safetensors"):
                    self.assertEqual(whole[name], resumed[name], name)
                # A checkpoint of one device goes on on the other.
                self.ok("train", "--load", save + "/step-00000002", "--save", save + "-cpu", "--data-path", "t",
                        "--device", "cpu", "--log-interval", "1")
                last, moved = self.events(save, "step")[-1], self.events(save + "-cpu", "step")[-1]
                self.assertLessEqual(abs(moved["loss"] / last["loss"] - 1), BOUNDS[precision])

    def test_generate(self):
        self.train("text", "--precision", "fp8-o2", "--device", "cuda")
        arguments = ["generate", "--load", "text", "--max-tokens", "40", "--temperature", "0", "the sun "]
        texts = [self.ok(*arguments, "--device", device) for device in ("cuda", "cuda", "cpu")]
        self.assertEqual(texts[0], texts[1])
        self.assertGreaterEqual(len(texts[0]), 20)


if __name__ == "__main__":
    code, _, reason = run("bench", "core", "--device", "cuda:0", "--list")
    if code != 0:
        print("skipped:", reason.strip())
        sys.exit(77)
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
