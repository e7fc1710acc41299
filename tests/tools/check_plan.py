#!/usr/bin/env python3
"""fp8lm plan through the command line: its figures against formulas written down again here, against what fp8lm train
allocates, and beside FP8-LM's; searches, and bad input of every kind.

Usage: check_plan.py FP8LM [unittest arguments]
Needs nothing but Python's own library."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

FP8LM = os.path.abspath(sys.argv[1])
PRECISIONS = ["fp32", "bf16", "te", "fp8-o1", "fp8-o2", "fp8-o3"]
STATES = ["master", "exp_avg", "exp_avg_sq"]
CLASSES = ["weights", "gradients", *STATES, "scales", "activations", "workspace"]
KINDS = ["gradients", "weights", "tensor_gather", "tensor_reduce", "pipeline"]
SYSTEM_175B = ["--model", "gpt-175b", "--tensor-model-parallel-size", "8", "--sequence-parallel",
               "--pipeline-model-parallel-size", "4", "--data-parallel-size", "4", "--zero-stage", "1"]
GIB = 2.0 ** 30


def run(*arguments, cwd=None):
    done = subprocess.run([FP8LM, *map(str, arguments)], capture_output=True, cwd=cwd, timeout=120, text=True)
    return done.returncode, done.stdout, done.stderr


def plan(*arguments):
    code, out, message = run("plan", *arguments, "--json")
    assert (code, message) == (0, ""), (arguments, message)
    # Infinities and NaNs are no JSON.
    return json.loads(out, parse_constant=lambda name: 1 / 0)


def has_train():
    return re.search(r"^  train ", run("--help")[1], re.MULTILINE) is not None


class Plan(unittest.TestCase):
    def test_one_rank(self):
        hidden, layers, words = 4096, 32, 50257
        linear = 12 * hidden * hidden * layers
        vectors = 13 * hidden * layers + 2 * hidden
        embedding = words * hidden
        for precision in PRECISIONS:
            found = plan("--model", "gpt-7b", "--precision", precision)
            self.assertEqual(found["model"]["parameters"], linear + vectors + embedding)
            self.assertEqual(found["ranks"], 1)
            fp8 = precision.startswith("fp8")
            wide = 4 if precision == "fp32" else 2
            states = [2, 1, 2] if precision in ("fp8-o2", "fp8-o3") else [4, 4, 4]
            expected = {"weights": (1 if fp8 else wide) * linear + wide * (vectors + embedding),
                        "gradients": linear + 4 * vectors + 2 * embedding if fp8 else 4 * (linear + vectors + embedding)}
            for name, size in zip(STATES, states):
                expected[name] = size * (linear + vectors + embedding)
            for name, value in expected.items():
                self.assertEqual(found["plan"]["memory"][name], {"minimum": value, "maximum": value, "mean": value})
            total = sum(found["plan"]["memory"][name]["maximum"] for name in CLASSES)
            self.assertEqual(found["plan"]["memory"]["total"]["maximum"], total)
            self.assertEqual(found["plan"]["traffic"]["total"]["maximum"], 0)
            self.assertEqual(found["plan"]["balance"], 1)
            self.assertIsNone(found["other_partition"])

    @unittest.skipUnless(has_train(), "a build without fp8lm train")
    def test_as_train(self):
        """What a run allocates, to the byte."""
        folder = tempfile.mkdtemp(prefix="fp8lm-plan-")
        try:
            with open(os.path.join(folder, "text"), "w") as file:
                file.write("what is planned is what is there. " * 400)
            code, _, message = run("data", "tokenize", "--output-prefix", "t", "--val-fraction", "0.1", "text", cwd=folder)
            self.assertEqual(code, 0, message)
            shapes = [["--num-layers", 3, "--hidden-size", 48, "--num-attention-heads", 6, "--num-query-groups", 3,
                       "--seq-length", 40, "--vocab-size", 300],
                      ["--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 2, "--seq-length", 33, "--swiglu",
                       "--normalization", "RMSNorm", "--untie-embeddings-and-output-weights", "--disable-bias-linear"],
                      # Learned positions are those of the longest sequence, here as long as the preset's.
                      ["--num-layers", 1, "--hidden-size", 64, "--num-attention-heads", 4, "--seq-length", 256,
                       "--ffn-hidden-size", 100, "--position-embedding-type", "learned_absolute"]]
            for index, precision in enumerate(PRECISIONS[:-1]):
                shape = shapes[index % 3] + ["--precision", precision, "--micro-batch-size", 2, "--global-batch-size", 4]
                shape += ["--recompute-activations"] if index % 2 else []
                code, out, message = run("train", "--data-path", "t", "--preset", "tiny-gpt", *shape, "--train-iters", 1,
                                         "--threads", 1, "--log-dir", precision, cwd=folder)
                self.assertEqual(code, 0, out + message)
                with open(os.path.join(folder, precision, "log.jsonl")) as file:
                    start = json.loads(file.readline())
                found = plan("--model", "tiny-gpt", *shape)
                for name in ("weights", "gradients", *STATES, "activations"):
                    self.assertEqual(found["plan"]["memory"][name]["maximum"], start["memory"][name], (precision, name))
        finally:
            shutil.rmtree(folder)

    def test_table(self):
        """The table has the object's figures."""
        code, out, message = run("plan", *SYSTEM_175B, "--device-memory", 30)
        self.assertEqual((code, message), (0, ""))
        found = plan(*SYSTEM_175B, "--device-memory", 30)
        self.assertEqual(found["ranks"], 128)
        self.assertIs(found["fits"], True)
        rows = re.findall(r"^  (\S.*?)  +([0-9.]+) +([0-9.]+) +([0-9.]+)", out, re.MULTILINE)
        self.assertEqual(len(rows), len(CLASSES) + 1 + 2 + len(KINDS) + 1)
        expected = [found["plan"]["memory"][name] for name in [*CLASSES, "total"]]
        expected += [found["plan"]["distributed"], found["other_partition"]["distributed"]]
        expected += [found["plan"]["traffic"][name] for name in [*KINDS, "total"]]
        for row, spread in zip(rows, expected):
            for text, name in zip(row[1:], ("minimum", "maximum", "mean")):
                self.assertAlmostEqual(float(text), spread[name] / GIB, delta=0.00051, msg=row[0])
        self.assertIn("device memory 30.00 GiB: fits, ", out)
        self.assertIn("128 ranks: tensor parallel 8 with sequence parallelism, pipeline 4, data parallel 4; ZeRO stage 1, "
                      "whole tensors", out)
        self.assertIn("48 tensors cut", out)
        self.assertTrue(all(len(line) <= 120 and line == line.rstrip() for line in out.splitlines()), out)
        code, out, _ = run("plan", *SYSTEM_175B, "--device-memory", 20)
        self.assertEqual(code, 0)
        self.assertRegex(out, r"device memory 20\.00 GiB: does not fit, \d+\.\d\d GiB are missing")
        self.assertIs(plan(*SYSTEM_175B, "--device-memory", 20)["fits"], False)

    def test_promises(self):
        """Whole tensors are within 5 %, and FP8 sends at least 63 % less than BF16."""
        for partition in ("tensors", "elements"):
            found = plan(*SYSTEM_175B, "--zero-partition", partition)
            mean = found["plan"]["distributed"]["mean"]
            self.assertAlmostEqual(mean, found["other_partition"]["distributed"]["mean"], delta=1e-9 * mean)
            self.assertLessEqual(found["plan"]["balance"], 1.05)
            distributed = found["plan"]["distributed"]
            self.assertLessEqual(distributed["maximum"], 1.05 * distributed["minimum"])
            self.assertEqual(found["plan"]["split_tensors"], 48 if partition == "elements" else 0)
        systems = {"gpt-7b": (1, 1, 32), "gpt-13b": (2, 1, 16), "gpt-175b": (8, 4, 4)}
        for precision in PRECISIONS[3:]:
            for model, (tensor, pipeline, data) in systems.items():
                for stage in range(4):
                    found = plan("--model", model, "--precision", precision, "--tensor-model-parallel-size", tensor,
                                 "--pipeline-model-parallel-size", pipeline, "--data-parallel-size", data,
                                 "--zero-stage", stage)
                    sent = [sum(found[of]["traffic"][kind]["mean"] for kind in ("gradients", "weights"))
                            for of in ("plan", "bf16")]
                    # From stage 3 on weights, which are halved, travel more than once.
                    least = {0: 0.70, 1: 0.63, 2: 0.63, 3: 0.55}[stage]
                    self.assertLessEqual(sent[0], (1 - least) * sent[1], (model, stage, sent))

    def test_paper(self):
        code, out, message = run("plan", "--paper")
        self.assertEqual((code, message), (0, ""))
        self.assertTrue(all(len(line) <= 120 and line == line.rstrip() for line in out.splitlines()), out)
        found = plan("--paper")
        # What is printed, and the figures of tables 7 and 8.
        deviations = [row["deviation_percent"] for row in found["memory"]]
        for row in found["traffic"]:
            deviations += [row[name]["deviation_percent"] for name in ("weights", "activations") if row[name]]
        printed = [float(text) for text in re.findall(r"([-+][0-9.]+) %", out)]
        self.assertEqual(len(printed), len(deviations))
        for text, value in zip(printed, deviations):
            self.assertAlmostEqual(text, value, delta=0.0501)
        self.assertEqual([row["measured"] for row in found["memory"] if row["measured"][0]],
                         [[69.07, 69.63], [76.97, 77.28], [49.06, 49.36], [67.98, 68.18], [73.68, 76.36], [48.45, 48.85],
                          [65.6, 66.12], [69.04, 69.57], [38.64, 40.28]])
        self.assertEqual([row["weights"]["measured"] for row in found["traffic"]], [37.2, 13.9, 34.3, 12.4, 23.4, 8.2])
        self.assertEqual(len(found["memory"]), 12)
        for row in found["memory"]:
            deviation = 100 * (row["planned"][1] / row["measured"][1] - 1)
            self.assertAlmostEqual(row["deviation_percent"], deviation, delta=0.01)
            # A plan never says more than what was measured: it leaves out.
            self.assertTrue(-50 < deviation < 0, row)
        for row in found["traffic"]:
            self.assertTrue(-13 < row["weights"]["deviation_percent"] < 0, row)
            if row["activations"]:
                self.assertLess(abs(row["activations"]["deviation_percent"]), 3)
        # The same from options.
        same = plan(*SYSTEM_175B, "--precision", "fp8-o3", "--make-vocab-size-divisible-by", 128)
        row = [row for row in found["memory"] if row["model"] == "gpt-175b" and row["precision"] == "fp8-o3"][0]
        self.assertAlmostEqual(same["plan"]["memory"]["total"]["maximum"] / GIB, row["planned"][1], delta=0.00051)
        self.assertEqual(same["model"]["padded-vocab-size"], 51200)
        # With an output layer of its own, BF16's traffic is the paper's but for its last digits.
        for model, tensor, data, measured in (("gpt-7b", 1, 32, 37.2), ("gpt-13b", 2, 16, 34.3)):
            untied = plan("--model", model, "--precision", "bf16", "--untie-embeddings-and-output-weights",
                          "--tensor-model-parallel-size", tensor, "--data-parallel-size", data, "--zero-stage", 1)
            sent = sum(untied["plan"]["traffic"][kind]["mean"] for kind in ("gradients", "weights")) / GIB
            self.assertAlmostEqual(sent, measured, delta=0.11)

    def test_document(self):
        """The example of docs/plan.md, and its table of deviations."""
        root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
        with open(os.path.join(root, "docs", "plan.md"), encoding="utf-8") as file:
            text = file.read()
        lines = text.split("```\n")[1].replace("\\\n", "").splitlines()
        self.assertTrue(lines[0].startswith("$ fp8lm plan ") and lines[-1] == "...")
        code, out, message = run(*lines[0].split()[2:])
        self.assertEqual((code, message), (0, ""))
        self.assertEqual(out.splitlines()[:len(lines) - 2], lines[1:-1])
        rows = plan("--paper")
        for row in rows["memory"]:
            self.assertIn("%.1f, %.1f: %+.0f %%" % (row["planned"][1], row["measured"][1], row["deviation_percent"]), text)
        for row in rows["traffic"]:
            for name, digits in (("weights", 1), ("activations", 2)):
                if row[name]:
                    self.assertIn("%.*f, %.1f: %+.1f %%" % (digits, row[name]["planned"], row[name]["measured"],
                                                             row[name]["deviation_percent"]), text)

    def test_search_micro_batch(self):
        options = ["--model", "gpt-7b", "--data-parallel-size", 32, "--zero-stage", 1, "--device-memory", 70]
        for precision in ("bf16", "fp8-o2"):
            found = plan(*options, "--precision", precision, "--search", "micro-batch")
            best = found["options"]["micro-batch-size"]
            self.assertIs(found["fits"], True)
            self.assertEqual(found["search"], "micro-batch")
            for size, fits in ((best, True), (best + 1, False)):
                tried = plan(*options, "--precision", precision, "--micro-batch-size", size)
                self.assertIs(tried["fits"], fits, (precision, size))
            self.assertEqual(plan(*options, "--precision", precision, "--micro-batch-size", best)["plan"], found["plan"])
        # Of those that divide the global batch.
        for sequences in (1, 2, 5, 12, 49):
            tried = []
            for size in range(1, sequences + 1):
                if sequences % size == 0:
                    options = ["--model", "gpt-7b", "--pipeline-model-parallel-size", 4, "--global-batch-size",
                               2 * sequences, "--data-parallel-size", 2]
                    fits = plan(*options, "--micro-batch-size", size, "--device-memory", 40)["fits"]
                    tried += [size] if fits else []
            found = plan(*options, "--search", "micro-batch", "--device-memory", 40)
            self.assertEqual(found["options"]["micro-batch-size"], max(tried))
            self.assertEqual(found["options"]["global-batch-size"], 2 * sequences)

    def test_search_model(self):
        found = plan("--search", "model", "--device-memory", 60)
        self.assertEqual((found["model"]["name"], found["search"]), ("llama-7b", "preset"))
        self.assertIs(plan("--model", "llama-7b", "--device-memory", 60)["fits"], True)
        self.assertIs(plan("--model", "gpt-13b", "--device-memory", 60)["fits"], False)
        # What cannot be divided is passed over: llama-7b's 32 layers are not by 3.
        found = plan("--search", "model", "--device-memory", 60, "--pipeline-model-parallel-size", 3)
        self.assertEqual(found["model"]["num-layers"] % 3, 0)
        options = ["--model", "gpt-7b", "--pipeline-model-parallel-size", 2, "--device-memory", 60]
        found = plan(*options, "--search", "model")
        depth = found["model"]["num-layers"]
        self.assertEqual((depth % 2, found["search"]), (0, "depth"))
        self.assertIs(plan(*options, "--num-layers", depth)["fits"], True)
        self.assertIs(plan(*options, "--num-layers", depth + 2)["fits"], False)

    def test_more_ranks_than_tensors(self):
        # Of what train would take.
        for precision, replicas, expected in (("fp8-o3", 2, 1), ("fp8-o3", 1, 0), ("fp8-o2", 2, 0)):
            code, out, _ = run("plan", "--model", "tiny-gpt", "--data-parallel-size", replicas, "--precision", precision)
            self.assertEqual((code, "ZeRO stage 1" in out), (0, expected == 1), out)
        code, out, message = run("plan", "--model", "tiny-gpt", "--data-parallel-size", 1000, "--zero-stage", 1)
        self.assertEqual((code, message), (0, ""))
        self.assertIn("some ranks have nothing", out)
        found = plan("--model", "tiny-gpt", "--data-parallel-size", 1000, "--zero-stage", 1)
        self.assertIsNone(found["plan"]["balance"])

    def refused(self, code, expected, *arguments):
        got, out, message = run("plan", *arguments)
        self.assertEqual((got, out), (code, ""), "%s: %s" % (arguments, message))
        self.assertIn(expected, message)
        self.assertTrue(message.startswith("fp8lm plan: "), message)
        self.assertNotIn("Sanitizer", message)

    def test_refused(self):
        tensor, pipeline, data = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size",
                                  "--data-parallel-size")
        for expected, arguments in {
            "--num-attention-heads is 32, expected a multiple of --tensor-model-parallel-size, 3": [tensor, 3],
            "--num-query-groups is 2, expected a multiple of --tensor-model-parallel-size, 4":
                [tensor, 4, "--num-query-groups", 2],
            "--ffn-hidden-size is 10001, expected a multiple of --tensor-model-parallel-size, 2":
                [tensor, 2, "--ffn-hidden-size", 10001],
            "--num-layers is 32, expected a multiple of --pipeline-model-parallel-size, 5": [pipeline, 5],
            "--hidden-size is 4096, expected a multiple of --num-attention-heads, 33": ["--num-attention-heads", 33],
            "--num-attention-heads is 32, expected a multiple of --num-query-groups, 5": ["--num-query-groups", 5],
            "--seq-length is 2049, expected a multiple of --tensor-model-parallel-size (with --sequence-parallel), 2":
                [tensor, 2, "--sequence-parallel", "--seq-length", 2049],
            "--global-batch-size is 10, expected a multiple of --micro-batch-size times --data-parallel-size, 8":
                [data, 4, "--micro-batch-size", 2, "--global-batch-size", 10],
            "--global-batch-size is 3, expected a multiple of --micro-batch-size times --data-parallel-size, 4":
                [data, 4, "--search", "micro-batch", "--device-memory", 80, "--global-batch-size", 3],
            "--micro-batch-size is 1048576, expected at most 1048575": ["--micro-batch-size", 1048576],
            "a head has 512 elements": ["--num-attention-heads", 8],
            "--search needs --device-memory": ["--search", "model"],
            "--search is 'all', expected micro-batch or model": ["--search", "all", "--device-memory", 80],
            "--search micro-batch and --micro-batch-size exclude each other":
                ["--search", "micro-batch", "--device-memory", 80, "--micro-batch-size", 1],
            "--search model and --num-layers exclude each other":
                ["--search", "model", "--device-memory", 80, "--num-layers", 1],
            "--paper and --precision exclude each other": ["--paper", "--precision", "bf16"],
            "--device-memory is '0', expected a number from": ["--device-memory", 0],
            "--device-memory is 'inf', expected a number from": ["--device-memory", "inf"],
            "--zero-stage is '4', expected a whole number from 0 to 3": ["--zero-stage", 4],
            "--precision is 'fp8', expected fp32, bf16, te, fp8-o1, fp8-o2 or fp8-o3": ["--precision", "fp8"],
            "--zero-partition is 'x', expected tensors or elements": ["--zero-partition", "x"],
            "--data-parallel-size is '1048577', expected a whole number from 1 to 1048576": [data, 1048577],
            "--num-layers is '99999999999999999999', expected": ["--num-layers", "9" * 20],
            "there is no preset \"gpt-8b\", expected one of gpt-125m": ["--model", "gpt-8b"],
            "unexpected argument 'gpt-7b'": ["gpt-7b"],
            "--swiglu is 'on', expected yes or no": ["--swiglu=on"],
            "unknown or ambiguous option '--tensor-parallel'": ["--tensor-parallel", 2],
            "option '--model' needs a value": ["--model"],
            "option '--json' takes no value": ["--json=yes"],
            "the bytes of a rank pass 2^63 - 1 (layers 10000, hidden 1048576":
                ["--num-layers", 10000, "--hidden-size", 1 << 20, "--num-attention-heads", 1 << 13, "--seq-length", 1 << 20,
                 "--micro-batch-size", 2047],
            "no preset can be divided by --tensor-model-parallel-size 7":
                [tensor, 7, "--search", "model", "--device-memory", 80],
        }.items():
            self.refused(2, expected, *arguments)
        self.refused(1, "a micro-batch of 1 takes 51.668 GiB a rank, more than --device-memory, 2", "--search",
                     "micro-batch", "--device-memory", 2)
        self.refused(1, "the model with one layer a stage takes", "--search", "model", "--model", "gpt-7b",
                     "--device-memory", 2)
        self.refused(1, "the smallest preset, tiny-llama, takes", "--search", "model", "--device-memory", 0.001)

    def test_help(self):
        code, out, message = run("plan", "--help")
        self.assertEqual((code, message), (0, ""))
        self.assertEqual(run("help", "plan")[1], out)
        self.assertEqual(run("plan", "-h")[1], out)
        self.assertTrue(all(len(line) <= 120 and line == line.rstrip() for line in out.splitlines()))
        # Every option that there is.
        _, _, message = run("plan", "--unknown")
        options = re.findall(r"--[a-z-]+", message.split("options are ")[1].split(";")[0])
        self.assertGreater(len(options), 25)
        for option in options:
            self.assertRegex(out, r"(?m)^  %s\b" % option)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
