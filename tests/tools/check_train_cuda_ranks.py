#!/usr/bin/env python3
"""fp8lm train with --device cuda on several ranks, which are processes with torchrun's variables: every stage of ZeRO
beside the CPU and beside each other, across checkpoints, and where a rank has no GPU.

Usage: check_train_cuda_ranks.py FP8LM [unittest arguments]
Exits with 77 where there is no GPU, or fp8lm has no transport between processes. Ranks share a GPU where there are
fewer than ranks. Needs nothing but Python's own library. Tests without a GPU put libraries before the program's own
(LD_LIBRARY_PATH) whose CUDA backends run in an emulation (tests/gpu/meson.build)."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "multirank"))
from ranks import end_in_order, finish, finish_train, running

FP8LM = os.path.abspath(sys.argv[1])
EMULATED = "FP8_FAKE_DEVICES" in os.environ
# How far a loss on CUDA may be from the CPU's: by the order of sums, and by roundings that it moves.
BOUNDS = {"fp32": 1e-5, "bf16": 5e-3, "fp8-o2": 2e-2}
RANKS = 2
TINY = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16", "--threads", "1",
        "--micro-batch-size", "1", "--log-interval", "1", "--data-path", "t", "--lr", "3e-3"]
WORDS = "the sun rose over a quiet hill and all who saw it sang of bread water stone light and rain".split()


class CudaRanks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="fp8lm-cuda-ranks-")
        draw = random.Random(7)
        with open(os.path.join(cls.folder, "text.txt"), "w") as file:
            file.write(" ".join(draw.choice(WORDS) for _ in range(4000)))
        subprocess.run([FP8LM, "data", "tokenize", "--output-prefix", "t", "--val-fraction", "0.1", "text.txt"],
                       cwd=cls.folder, check=True, capture_output=True)
        with cls.start(2, *TINY, "--train-iters", "1", "--eval-interval", "0", "--device", "cpu", "--global-batch-size",
                       "2") as started:
            ends = finish(started)
        if any("no transport" in errors for _, _, errors in ends):
            print("fp8lm has no transport between processes: skipped")
            sys.exit(77)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    @classmethod
    def start(cls, ranks, *arguments, settings=None):
        """Settings are variables of single ranks."""
        return running([[FP8LM, "train", *arguments]] * ranks, [cls.folder] * ranks, settings=settings)

    def train(self, save, *arguments, ranks=RANKS, device="cuda", expect=0, settings=None, base=TINY):
        with self.start(ranks, *base, "--device", device, "--save", save, *arguments, settings=settings) as started:
            return finish_train(self, started, expect)

    def events(self, save, kind):
        with open(os.path.join(self.folder, save, "log.jsonl")) as file:
            return [entry for entry in map(json.loads, file) if entry["event"] == kind]

    def losses(self, save):
        return [entry["loss"] for kind in ("step", "validation") for entry in self.events(save, kind)]

    def checkpoint(self, save, step):
        folder = os.path.join(self.folder, save, "step-%08d" % step)
        files = {}
        for name in sorted(os.listdir(folder)):
            if name.endswith(".safetensors"):
                with open(os.path.join(folder, name), "rb") as file:
                    files[name] = file.read()
        return files

    # assertEqual() takes minutes to tell how files differ.
    def same(self, one, other):
        self.assertEqual(sorted(one), sorted(other))
        for name in one:
            self.assertTrue(one[name] == other[name], name)

    def close(self, one, other, bound):
        self.assertEqual(len(one), len(other))
        self.assertGreater(len(one), 1)
        for expected, found in zip(one, other):
            self.assertLessEqual(abs(found / expected - 1), bound, (one, other))

    def test_stages(self):
        """A micro-batch each: all stages have the same bits, and are near the CPU's."""
        shape = ["--precision", "fp8-o2", "--global-batch-size", RANKS, "--train-iters", 3, "--save-interval", 3,
                 "--eval-interval", 3, "--eval-iters", 2]
        self.train("cpu", *shape, "--zero-stage", 1, device="cpu")
        self.assertEqual(self.events("cpu", "start")[0]["device_path"], "none")
        models = []
        for stage in range(4):
            save = "stage%d" % stage
            ends = self.train(save, *shape, "--zero-stage", stage)
            begun = self.events(save, "start")[0]
            self.assertEqual((begun["ranks"], begun["zero_stage"]), (RANKS, stage))
            told = {"nccl": "GPUs over NCCL", "ucx": "over ucx, GPUs too", "staged": "GPUs by way of the host"}
            self.assertIn(told[begun["device_path"]], ends[0][1])
            self.close(self.losses("cpu"), self.losses(save), BOUNDS["fp8-o2"])
            self.assertEqual(self.losses(save), self.losses("stage0"))
            models.append(self.checkpoint(save, 3))
        for stage in range(4):
            self.assertEqual(len(models[stage]), 2 if stage == 0 else 1 + RANKS)
            self.assertTrue(models[stage]["model.safetensors"] == models[0]["model.safetensors"], stage)
            # States are divided alike.
            if stage > 1:
                self.same(models[1], models[stage])

    def test_micro_batches(self):
        """Several of each rank: added up where gradients lie, or by their owners."""
        for precision, stages in (("fp32", (1, 3)), ("bf16", (2,)), ("fp8-o2", (0, 2))):
            shape = ["--precision", precision, "--global-batch-size", 3 * RANKS, "--train-iters", 2, "--eval-interval", 0,
                     "--save-interval", 0, "--hidden-dropout", "0.1", "--log-fp8-interval", 1]
            for stage in stages:
                with self.subTest(precision=precision, stage=stage):
                    names = [device + precision + str(stage) for device in ("cpu", "cuda")]
                    for device, name in zip(("cpu", "cuda"), names):
                        self.train(name, *shape, "--zero-stage", stage, device=device)
                    self.close(self.losses(names[0]), self.losses(names[1]), BOUNDS[precision])
                    # What is known of FP8 tensors is known on both.
                    seen = [[sorted(tensor) for entry in self.events(name, "fp8") for tensor in entry["tensors"]]
                            for name in names]
                    self.assertEqual(seen[0], seen[1])
                    self.assertEqual(bool(seen[1]), precision == "fp8-o2")

    def test_checkpoints(self):
        shape = ["--precision", "fp8-o2", "--global-batch-size", 2 * RANKS, "--train-iters", 4, "--save-interval", 2,
                 "--eval-interval", 0, "--keep-last", 0, "--zero-stage", 3]
        self.train("whole", *shape)
        begin = ["--data-path", "t", "--threads", 1, "--log-interval", 1, "--eval-interval", 0]
        continued = [*begin, "--load", "whole/step-00000002"]
        self.train("resumed", *continued, "--save-interval", 2, "--zero-stage", 3, base=[])
        self.same(self.checkpoint("whole", 4), self.checkpoint("resumed", 4))
        last = self.losses("whole")[2:]
        # On another device, in another stage; and alone.
        self.train("moved", *continued, "--zero-stage", 1, device="cpu", base=[])
        self.close(last, self.losses("moved"), BOUNDS["fp8-o2"])
        self.train("alone", *continued, ranks=1, base=[])
        self.close(last, self.losses("alone"), BOUNDS["fp8-o2"])
        # And back, from one file of states to those of ranks.
        self.train("back", *begin, "--load", "moved/step-00000004", "--train-iters", 5, base=[])
        self.assertEqual(len(self.losses("back")), 1)

    def test_no_gpu(self):
        """A rank that sees none ends the run on all, and says so."""
        none = {"FP8_FAKE_DEVICES": "0"} if EMULATED else {"CUDA_VISIBLE_DEVICES": ""}
        ends = self.train("none", "--global-batch-size", RANKS, "--train-iters", 1, expect=1, settings={1: none})
        self.assertRegex(ends[1][2], "^fp8lm train: rank 1 of 2: .*(CUDA|GPU)")
        self.assertRegex(ends[0][2], "^fp8lm train: rank 0 of 2: rank 1 failed: .*(CUDA|GPU)")

    @unittest.skipUnless(EMULATED, "of GPUs that are played")
    def test_gpu_of_each_rank(self):
        """The second of two GPUs is too old: who gets it tells."""
        old = {"FP8_FAKE_DEVICES": "2", "FP8_FAKE_CAPABILITY": "90,70"}
        numbers = lambda first, second, name="LOCAL_RANK": {0: dict(old, **{name: first}), 1: dict(old, **{name: second})}
        for settings, failed in (({0: old, 1: old}, 1), (numbers("0", "1"), 1), (numbers("1", "0"), 0),
                                 (numbers("1", "0", "SLURM_LOCALID"), 0), (numbers("1", "2", "OMPI_COMM_WORLD_LOCAL_RANK"), 0),
                                 # Of a job around it, or nonsense: the ranks count.
                                 (numbers("0", "0", "SLURM_LOCALID"), 1), (numbers("1", "x"), 1)):
            with self.subTest(settings=settings):
                ends = self.train("old", "--global-batch-size", RANKS, "--train-iters", 1, expect=1, settings=settings)
                self.assertRegex(ends[failed][2], "^fp8lm train: rank %d of 2: (?!rank).*CUDA device 1 has compute capability 7" % failed)
                self.assertRegex(ends[1 - failed][2], "^fp8lm train: rank %d of 2: rank %d failed: .*CUDA device 1 has" % (1 - failed, failed))
        # Both have the first.
        alone = {0: dict(old, FP8_FAKE_DEVICES="1"), 1: dict(old, FP8_FAKE_DEVICES="1")}
        self.train("shared", "--global-batch-size", RANKS, "--train-iters", 1, "--eval-interval", 0, settings=alone)
        self.assertEqual(self.events("shared", "start")[0]["device_path"], "staged")


if __name__ == "__main__":
    end_in_order()
    done = subprocess.run([FP8LM, "bench", "core", "--device", "cuda:0", "--list"], capture_output=True, text=True)
    if done.returncode != 0:
        print("skipped:", done.stderr.strip())
        sys.exit(77)
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
