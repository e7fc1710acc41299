#!/usr/bin/env python3
"""fp8lm train and generate through the command line: every precision learns, resumes bit for bit (also after signals,
full disks and kills), its logs can be read, and bad input of every kind is refused with its message.

Usage: check_train.py FP8LM [unittest arguments]
Needs nothing but Python's own library."""

import glob
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import zlib

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import event_file  # noqa: E402

FP8LM = os.path.abspath(sys.argv[1])
PRECISIONS = ["fp32", "bf16", "te", "fp8-o1", "fp8-o2"]
TINY = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32",
        "--micro-batch-size", "2", "--global-batch-size", "4", "--threads", "1", "--log-interval", "5"]
WORDS = "the sun rose over a quiet hill and all who saw it sang of bread water stone light and rain".split()


def run(*arguments, cwd=None, input=None, preexec=None):
    done = subprocess.run([FP8LM, *(value if isinstance(value, bytes) else str(value) for value in arguments)],
                          capture_output=True, cwd=cwd, timeout=300, input=input, preexec_fn=preexec)
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)


def log_of(folder, torn=False):
    """Of a program that still writes, or was killed as it did, lines may be torn: they are left out where that may be."""
    entries = []
    for line in read(os.path.join(folder, "log.jsonl")).decode().splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            if not torn:
                raise
    return entries


def events(folder, kind, torn=False):
    return [entry for entry in log_of(folder, torn) if entry["event"] == kind]


def checkpoint_files(path):
    return {name: read(os.path.join(path, name)) for name in sorted(os.listdir(path))}


def step(folder, number):
    return os.path.join(folder, "step-%08d" % number)


def steps_of(folder):
    return sorted(int(name[5:]) for name in os.listdir(folder) if re.fullmatch(r"step-\d+", name))


def sign_index(path, change):
    """Changes index.json and makes its checksums right again, so that the next check is reached."""
    name = os.path.join(path, "index.json")
    text = change(read(name).decode())
    for file in ("model.safetensors", "state.safetensors"):
        data = read(os.path.join(path, file))
        text = re.sub(r'("name": "%s", "bytes": )\d+(, "crc32": ")[0-9a-f]{8}' % re.escape(file),
                      lambda found: "%s%d%s%08x" % (found[1], len(data), found[2], zlib.crc32(data)), text)
    head = text[:text.rindex('"crc32": "')]
    write(name, (head + '"crc32": "%08x"\n}\n' % zlib.crc32(head.encode())).encode())


class Train(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="fp8lm-train-")
        draw = random.Random(7)
        text = " ".join(draw.choice(WORDS) for _ in range(8000))
        write(os.path.join(cls.folder, "text.txt"), text.encode())
        code, _, message = run("data", "tokenize", "--output-prefix", "t", "--val-fraction", "0.1", "text.txt",
                               cwd=cls.folder)
        assert code == 0, message
        code, _, message = run("train", "--data-path", "t", *TINY, "--train-iters", "12", "--save", "base",
                               "--save-interval", "4", "--keep-last", "0", "--precision", "fp8-o2", cwd=cls.folder)
        assert code == 0, message

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def train(self, *arguments, expect=0, preexec=None):
        code, out, message = run("train", "--data-path", "t", *TINY, *arguments, cwd=self.folder, preexec=preexec)
        self.assertEqual(code, expect, out + message)
        return out, message

    def resume(self, *arguments, expect=0, preexec=None):
        code, out, message = run("train", *arguments, cwd=self.folder, preexec=preexec)
        self.assertEqual(code, expect, out + message)
        return out, message

    def copy(self, source, name):
        shutil.rmtree(self.path(name), ignore_errors=True)
        shutil.copytree(self.path(source), self.path(name))
        return self.path(name)

    def same_checkpoints(self, one, other):
        left, right = checkpoint_files(one), checkpoint_files(other)
        self.assertEqual(list(left), list(right))
        for name in left:
            self.assertTrue(left[name] == right[name], "%s and %s differ in %s" % (one, other, name))

    # Learning.

    def test_every_precision_learns(self):
        for precision in PRECISIONS:
            with self.subTest(precision=precision):
                name = "learn-" + precision
                self.train("--precision", precision, "--train-iters", "80", "--lr", "5e-3", "--save", name,
                           "--eval-interval", "40", "--save-interval", "0")
                losses = [entry["loss"] for entry in events(self.path(name), "step")]
                self.assertEqual(len(losses), 80)
                self.assertAlmostEqual(losses[0], math.log(257), delta=0.3)
                self.assertLess(sum(losses[-5:]) / 5, 2.9)
                validation = events(self.path(name), "validation")
                self.assertEqual([entry["step"] for entry in validation], [40, 80])
                self.assertLess(validation[1]["loss"], validation[0]["loss"])
                self.assertEqual(steps_of(self.path(name)), [80])

    def test_shapes(self):
        shapes = {
            "llama": ["--preset", "tiny-llama", "--num-layers", "1"],
            "gpt2": ["--preset", "tiny-gpt2", "--num-layers", "1"],
            "grouped": ["--num-query-groups", "1", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear",
                        "--untie-embeddings-and-output-weights", "--position-embedding-type", "learned_absolute",
                        "--ffn-hidden-size", "40", "--max-position-embeddings", "50"],
            "recomputed": ["--recompute-activations", "--hidden-dropout", "0.2"],
            "just in time": ["--fp8-recipe", "just-in-time", "--stochastic-rounding"],
            "recent": ["--fp8-amax-compute-algo", "most_recent", "--fp8-amax-history-len", "3", "--fp8-margin", "1"],
        }
        for name, options in shapes.items():
            with self.subTest(shape=name):
                self.train("--train-iters", "3", "--eval-iters", "1", "--save", "shape", "--resume=no", *options)
                code, out, message = run("generate", "--load", "shape", "--max-tokens", "5", "the", cwd=self.folder)
                self.assertEqual(code, 0, message)
                shutil.rmtree(self.path("shape"))

    def test_recomputation(self):
        # By two names, and without an effect on anything but memory.
        names = {"kept": [], "flag": ["--recompute-activations"], "granularity": ["--recompute-granularity", "full"],
                 "off": ["--recompute-activations", "--recompute-granularity", "none"]}
        for name, options in names.items():
            self.train("--train-iters", "3", "--eval-interval", "0", "--save", "recompute-" + name, *options)
        for one, other in (("kept", "off"), ("flag", "granularity")):
            self.same_checkpoints(step(self.path("recompute-" + one), 3), step(self.path("recompute-" + other), 3))
        starts = {name: events(self.path("recompute-" + name), "start")[0] for name in names}
        self.assertEqual([start["options"]["recompute-activations"] for start in starts.values()],
                         [False, True, True, False])
        self.assertLess(starts["flag"]["memory"]["activations"], starts["kept"]["memory"]["activations"])
        kept, flag = (checkpoint_files(step(self.path("recompute-" + name), 3)) for name in ("kept", "flag"))
        self.assertTrue(kept["model.safetensors"] == flag["model.safetensors"])

    def test_threads_do_not_matter(self):
        for threads in ("1", "3"):
            # Nor does it matter whether FP8 tensors are recorded, at every third step here.
            self.train("--train-iters", "4", "--threads", threads, "--save", "threads-" + threads, "--log-fp8-interval",
                       threads)
        self.same_checkpoints(step(self.path("threads-1"), 4), step(self.path("threads-3"), 4))

    def test_schedules(self):
        for style, expected in {
            "constant": [1e-3] * 10,
            "linear": [1e-3 - 9e-4 * i / 9 for i in range(10)],
            "cosine": [1e-4 + 9e-4 * (1 + math.cos(math.pi * i / 9)) / 2 for i in range(10)],
            "WSD": [1e-3] * 6 + [1e-3 - 9e-4 * i / 4 for i in range(1, 5)],
        }.items():
            with self.subTest(style=style):
                self.train("--train-iters", "10", "--lr", "1e-3", "--lr-decay-style", style, "--lr-warmup-iters", "0",
                           "--lr-wsd-decay-iters", "4", "--log-dir", "schedule", "--eval-interval", "0")
                rates = [entry["lr"] for entry in events(self.path("schedule"), "step")]
                for rate, right in zip(rates, expected):
                    self.assertAlmostEqual(rate, right, delta=1e-9)
                shutil.rmtree(self.path("schedule"))

    # Logs.

    def test_logs(self):
        self.train("--train-iters", "10", "--save", "logs", "--eval-interval", "5", "--log-fp8-interval", "5",
                   "--save-interval", "5", "--clip-grad", "0.5")
        entries = log_of(self.path("logs"))
        self.assertEqual([entry["event"] for entry in entries],
                         ["start"] + (["step"] * 4 + ["fp8", "step", "validation", "checkpoint"]) * 2 + ["end"])
        start = entries[0]
        memory = start["memory"]
        parameters = start["parameters"]
        self.assertEqual(memory["exp_avg"], parameters)
        self.assertEqual(memory["master"], 2 * parameters)
        self.assertEqual(memory["exp_avg_sq"], 2 * parameters)
        self.assertEqual(start["options"]["precision"], "fp8-o2")
        self.assertEqual(start["tokens_per_step"], 128)
        for number, entry in enumerate(events(self.path("logs"), "step"), 1):
            self.assertEqual(entry["step"], number)
            self.assertEqual(entry["tokens"], 128 * number)
            self.assertGreater(entry["tokens_per_second"], 0)
            self.assertAlmostEqual(entry["clip_factor"], min(1, 0.5 / entry["grad_norm"]), delta=1e-3)
            self.assertFalse(entry["skipped"])
            self.assertLessEqual(entry["mfu"] or 0, 1)
        self.assertGreaterEqual(entries[-1]["peak_flops"], start["peak_flops"])
        records = events(self.path("logs"), "fp8")
        self.assertEqual([entry["step"] for entry in records], [5, 10])
        names = [tensor["name"] for tensor in records[0]["tensors"]]
        self.assertIn("layers.1.ffn.fc2.output_gradient", names)
        self.assertEqual(len(names), 2 * 4 * 3)
        # Products write weight gradients, and inputs behind a GELU, in FP8 by themselves.
        counted = [tensor["name"] for tensor in records[0]["tensors"] if "saturated_share" in tensor]
        self.assertEqual(counted, [name for name in names
                                   if not name.endswith((".weight_gradient", ".fc2.input"))])
        for tensor in records[0]["tensors"]:
            self.assertGreater(tensor["amax"], 0)
            self.assertGreater(tensor["fill"], 0)
        weights = {tensor["name"]: tensor for tensor in records[0]["weights"]}
        self.assertIn("layers.0.attention.qkv.weight", weights)
        self.assertIn("layers.0.attention.qkv.weight.gradient", weights)
        for tensor in weights.values():
            self.assertLess(tensor["zero_share"], 0.2)
        self.assertEqual(entries[-1]["reason"], "done")
        self.assertGreater(entries[-1]["peak_resident_bytes"], sum(memory.values()))

    def test_event_file(self):
        self.train("--train-iters", "7", "--save", "board", "--eval-interval", "3")
        files = glob.glob(self.path("board", "tensorboard", "events.out.tfevents.*"))
        self.assertEqual(len(files), 1)
        scalars = event_file.scalars(read(files[0]))
        self.assertEqual(sorted(scalars), ["speed/mfu", "speed/tokens_per_second", "train/gradient_norm",
                                           "train/learning_rate", "train/loss", "train/skipped_steps",
                                           "validation/loss"])
        for entry in events(self.path("board"), "step"):
            self.assertAlmostEqual(scalars["train/loss"][entry["step"]], entry["loss"], places=5)
        self.assertEqual(sorted(scalars["validation/loss"]), [3, 6, 7])

    def test_crc32c_of_the_test(self):
        self.assertEqual(event_file.crc32c(b"123456789"), 0xE3069283)

    def test_lines(self):
        out, _ = self.train("--train-iters", "10", "--eval-interval", "0")
        lines = [line for line in out.splitlines() if line.startswith("step ")]
        self.assertEqual(len(lines), 2)
        self.assertRegex(lines[1], r"^step 10/10  loss \d\.\d{4}  lr \S+  norm \S+  \d+ tokens/s  (MFU \S+ % of the measured peak  )?\S+ left$")
        self.assertNotIn("\r", out)

    def test_config_file(self):
        config = {"num_layers": 1, "hidden-size": 16, "num-attention-heads": 2, "seq-length": 16, "train-iters": 2,
                  "data-path": "t", "swiglu": True, "precision": "bf16", "lr": 1e-4, "save": "configured",
                  "micro-batch-size": 1, "global-batch-size": 3}
        write(self.path("config.json"), json.dumps(config).encode())
        self.resume("--config", "config.json", "--lr", "2e-4")
        options = events(self.path("configured"), "start")[0]["options"]
        self.assertEqual(options["num-layers"], 1)
        self.assertEqual(options["global-batch-size"], 3)
        self.assertEqual(options["lr"], 2e-4)
        self.assertEqual(options["ffn-hidden-size"], 64)
        self.assertIs(options["swiglu"], True)
        # Megatron-LM's name of a recipe is read, and written as our own.
        self.train("--train-iters", "1", "--fp8-recipe", "tensorwise", "--save", "tensorwise")
        self.assertEqual(events(self.path("tensorwise"), "start")[0]["options"]["fp8-recipe"], "just-in-time")
        # What the log and the checkpoint say of the options is a configuration, too.
        write(self.path("config.json"), json.dumps(options).encode())
        self.resume("--config", "config.json", "--save", "configured-again")
        self.same_checkpoints(step(self.path("configured"), 2), step(self.path("configured-again"), 2))

    # Resuming.

    def test_resume_is_exact(self):
        for precision in PRECISIONS:
            with self.subTest(precision=precision):
                options = ["--precision", precision, "--train-iters", "10", "--hidden-dropout", "0.1",
                           "--eval-interval", "4", "--stochastic-rounding"]
                self.train(*options, "--save", "whole")
                self.train(*options, "--save", "parts", "--exit-interval", "5")
                self.assertEqual(steps_of(self.path("parts")), [5])
                self.resume("--save", "parts", "--resume")
                self.same_checkpoints(step(self.path("whole"), 10), step(self.path("parts"), 10))
                # From another folder, with all options again, and threads that differ.
                self.train(*options, "--load", step("parts", 5), "--save", "elsewhere", "--threads", "2")
                self.same_checkpoints(step(self.path("whole"), 10), step(self.path("elsewhere"), 10))
                reasons = [entry["reason"] for entry in events(self.path("parts"), "end")]
                self.assertEqual(reasons, ["exit-interval", "done"])
                for name in ("whole", "parts", "elsewhere"):
                    shutil.rmtree(self.path(name))

    def test_resume_begins_where_nothing_is(self):
        self.train("--train-iters", "3", "--save", "fresh", "--resume")
        self.assertEqual(steps_of(self.path("fresh")), [3])
        out, _ = self.resume("--save", "fresh", "--resume")
        self.assertIn("0 steps", out)
        # More steps than were planned.
        self.resume("--save", "fresh", "--resume", "--train-iters", "5")
        self.assertEqual(steps_of(self.path("fresh")), [3, 5])

    def test_keep_last(self):
        self.train("--train-iters", "9", "--save", "kept", "--save-interval", "2", "--keep-last", "2")
        self.assertEqual(steps_of(self.path("kept")), [8, 9])
        self.assertEqual(steps_of(self.path("base")), [4, 8, 12])
        self.assertFalse(glob.glob(self.path("*", "*.tmp")))

    def test_going_back(self):
        # Later checkpoints would be taken for the newest ones.
        self.copy("base", "back")
        _, message = self.resume("--load", step("back", 4), "--save", "back", expect=1)
        self.assertIn("back/step-00000012 is later than back/step-00000004, which is to be continued", message)
        self.assertEqual(steps_of(self.path("back")), [4, 8, 12])
        shutil.rmtree(step(self.path("back"), 12))
        shutil.rmtree(step(self.path("back"), 8))
        self.resume("--load", step("back", 4), "--save", "back", "--save-interval", "4")
        self.same_checkpoints(step(self.path("base"), 8), step(self.path("back"), 8))
        self.same_checkpoints(step(self.path("base"), 12), step(self.path("back"), 12))

    def test_folder_of_another_run(self):
        # Its checkpoints are neither taken for this run's nor removed as old ones.
        self.copy("base", "other")
        shutil.rmtree(step(self.path("other"), 12))
        for load in (step("base", 4), step("base", 12), "base"):
            _, message = self.resume("--load", load, "--save", "other", "--train-iters", "14", "--keep-last", "1",
                                     expect=1)
            self.assertIn("other has checkpoints of a run already, and base/step-", message)
            self.assertEqual(steps_of(self.path("other")), [4, 8])
        # One's own, by other names.
        os.symlink("other", self.path("other-link"))
        os.symlink(self.path("other", "step-00000008"), self.path("link"))
        for load in (self.path("other", "step-00000008") + "//", "link", "other-link/step-00000008"):
            self.resume("--load", load, "--save", "other", "--train-iters", "9", "--keep-last", "0")
            shutil.rmtree(step(self.path("other"), 9))
        code, _, message = run("train", "--load", "step-00000008", "--save", ".", "--train-iters", "9", "--data-path",
                               "../t", cwd=self.path("other"))
        self.assertEqual(code, 0, message)

    def test_keeping_what_is_no_checkpoint(self):
        kept = self.copy("base", "foreign")
        write(os.path.join(kept, "step-00000004", "notes.txt"), b"mine")
        os.makedirs(os.path.join(kept, "step-00000014.tmp"))
        write(os.path.join(kept, "step-00000014.tmp", "notes.txt"), b"mine")
        write(os.path.join(kept, "step-00000014.1.tmp"), b"mine")
        os.makedirs(os.path.join(kept, "step-00000013.1.tmp"))
        write(os.path.join(kept, "step-99999999"), b"mine")
        for name in ("step-8", "step-123", "step-000000123"):
            shutil.copytree(step(kept, 8), os.path.join(kept, name))
        before = {name: checkpoint_files(os.path.join(kept, name))
                  for name in ("step-00000004", "step-8", "step-123", "step-000000123", "step-00000014.tmp")}
        self.resume("--save", "foreign", "--resume", "--train-iters", "14", "--keep-last", "1")
        for name, files in before.items():
            self.assertEqual(checkpoint_files(os.path.join(kept, name)), files, name)
        self.assertEqual(sorted(name for name in os.listdir(kept) if name.startswith("step-")),
                         sorted([*before, "step-00000014", "step-00000014.1.tmp", "step-99999999"]))
        code, _, message = run("generate", "--load", "foreign", "--max-tokens", "2", "the", cwd=self.folder)
        self.assertEqual(code, 0, message)

    def test_going_back_in_steps(self):
        # Refused before a line of a run that never was is in the log.
        self.copy("base", "behind")
        lines = log_of(self.path("behind"))
        _, message = self.resume("--save", "behind", "--resume", "--train-iters", "3", expect=1)
        self.assertIn("behind/step-00000012 has 12 steps already, and --train-iters is 3", message)
        self.assertEqual(log_of(self.path("behind")), lines)

    def test_error_in_the_data(self):
        # A bad token, in a batch or in what validation takes: the steps before it are kept.
        shard = read(self.path("t_train_000000.bin"))
        count = (len(shard) - 1024) // 2
        tokens = bytearray(shard)
        tokens[1024 + 2 * (count // 2):1024 + 2 * (count // 2) + 2] = struct.pack("<H", 60000)
        write(self.path("late_train_000000.bin"), tokens)
        shutil.copy(self.path("t_val_000000.bin"), self.path("late_val_000000.bin"))
        _, message = self.train("--data-path", "late", "--check-data=no", "--train-iters", "1000", "--save", "late",
                                "--save-interval", "0", "--eval-interval", "0", "--num-layers", "1", expect=1)
        self.assertIn("60000", message)
        done = events(self.path("late"), "step")[-1]["step"]
        self.assertEqual(steps_of(self.path("late")), [done])
        self.assertEqual([entry["reason"] for entry in events(self.path("late"), "end")], ["error"])
        self.train("--train-iters", "1000", "--save", "early", "--save-interval", "0", "--eval-interval", "0",
                   "--num-layers", "1", "--exit-interval", str(done))
        for name in ("model.safetensors", "state.safetensors"):
            self.assertTrue(read(os.path.join(step(self.path("late"), done), name)) ==
                            read(os.path.join(step(self.path("early"), done), name)))
        validation = bytearray(read(self.path("t_val_000000.bin")))
        validation[1024 + 200:1024 + 400] = struct.pack("<H", 60000) * 100
        write(self.path("late_val.bin"), validation)
        _, message = self.train("--valid-data-path", "late_val.bin", "--check-data=no", "--train-iters", "10", "--save",
                                "unvalidated", "--save-interval", "0", "--eval-interval", "5", "--eval-iters", "0",
                                expect=1)
        self.assertIn("60000", message)
        self.assertEqual(steps_of(self.path("unvalidated")), [5])

    def test_closed_output(self):
        process = self.start("--train-iters", "8", "--save", "unheard", "--eval-interval", "0", "--log-interval", "1")
        process.stdout.close()
        message = process.stderr.read()
        process.stderr.close()
        self.assertEqual(process.wait(timeout=120), 1)
        self.assertIn(b"cannot write to standard output", message)
        self.assertEqual(steps_of(self.path("unheard")), [8])

    def test_unread_output(self):
        # Lines that nobody reads hold a run up, but not its end.
        process = self.start("--train-iters", "100000", "--save", "unread", "--eval-interval", "0", "--log-interval", "1",
                             "--save-interval", "0")
        self.wait_for_steps(self.path("unread"), 100)
        steps = -1
        while steps != len(events(self.path("unread"), "step", torn=True)):
            steps = len(events(self.path("unread"), "step", torn=True))
            time.sleep(2)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(timeout=120), 130)
        end, = events(self.path("unread"), "end")
        self.assertEqual(end["reason"], "signal")
        self.assertEqual(steps_of(self.path("unread")), [end["step"]])
        out, message = process.communicate()
        self.assertIn(b"ended by a signal after step", message)
        # No line is missing before those that are lost.
        lines = re.findall(rb"^step (\d+)/.*\n", out, re.M)
        self.assertGreater(len(lines), 50)
        self.assertEqual([int(line) for line in lines], list(range(1, len(lines) + 1)))

    def test_missing_streams(self):
        # What is printed does not land in the files that are opened meanwhile.
        arguments = ["--train-iters", "4", "--eval-interval", "0", "--save"]
        for stream, expect in ((0, 0), (1, 1), (2, 0)):
            name = "without-%d" % stream
            out, message = self.train(*arguments, name, expect=expect, preexec=lambda: os.close(stream))
            if stream == 1:
                self.assertIn("cannot write to standard output: Bad file descriptor", message)
            self.assertEqual([entry["event"] for entry in log_of(self.path(name))],
                             ["start"] + ["step"] * 4 + ["checkpoint", "end"])
            self.assertEqual(read(self.path(name, "lock")), b"")
            file, = glob.glob(self.path(name, "tensorboard", "*"))
            self.assertEqual(len(event_file.scalars(read(file))["train/loss"]), 4)
        for arguments in (["--version"], ["--help"], ["data", "check", "t_train_000000.bin"]):
            code, _, message = run(*arguments, cwd=self.folder, preexec=lambda: os.close(1))
            self.assertEqual((code, message), (1, "fp8lm: cannot write to standard output: Bad file descriptor\n"))

    def test_shrinking_data(self):
        shutil.copy(self.path("t_train_000000.bin"), self.path("shrinking.bin"))
        process = subprocess.Popen(
            [FP8LM, "train", "--data-path", "shrinking.bin", *TINY, "--train-iters", "1000000", "--eval-interval", "0",
             "--save-interval", "0", "--save", "shrunk"],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.wait_for_steps(self.path("shrunk"), 2)
        os.truncate(self.path("shrinking.bin"), 2000)
        _, message = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 1, message)
        self.assertRegex(message.decode(), r"fp8lm train: shrinking\.bin: cannot read \d+ bytes at offset \d+: the file "
                                           "became shorter while it was read")
        self.assertEqual(steps_of(self.path("shrunk")), [events(self.path("shrunk"), "step")[-1]["step"]])

    def test_many_shards(self):
        # All are open at once: more than the usual limit lets, and not more than the system does.
        shards = ["many-%d.bin" % i for i in range(30)]
        for name in shards:
            shutil.copy(self.path("t_train_000000.bin"), self.path(name))
        arguments = ["train", "--data-path", " ".join(shards), *TINY, "--train-iters", "1"]
        for most, expect in ((200, 0), (20, 1)):
            code, _, message = run(*arguments, cwd=self.folder,
                                   preexec=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (15, most)))
            self.assertEqual(code, expect, message)
        self.assertRegex(message, r"many-\d+\.bin: cannot open the file: Too many open files")

    def start(self, *arguments):
        return subprocess.Popen([FP8LM, "train", "--data-path", "t", *TINY, *arguments], cwd=self.folder,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def wait_for_steps(self, folder, count, torn=False):
        deadline = time.time() + 120
        while time.time() < deadline:
            try:
                if len(events(folder, "step", torn)) >= count:
                    return
            except (OSError, ValueError):
                pass
            time.sleep(0.02)
        self.fail("no steps within two minutes")

    def test_signals(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=number):
                options = ["--train-iters", "100000", "--eval-interval", "7", "--save-interval", "0"]
                process = self.start(*options, "--save", "ended")
                self.wait_for_steps(self.path("ended"), 3)
                process.send_signal(number)
                _, message = process.communicate(timeout=120)
                self.assertEqual(process.returncode, 130, message)
                self.assertIn(b"ended by a signal after step", message)
                self.assertEqual(events(self.path("ended"), "end")[0]["reason"], "signal")
                done, = steps_of(self.path("ended"))
                self.resume("--save", "ended", "--resume", "--exit-interval", str(done + 3))
                self.train(*options, "--save", "straight", "--exit-interval", str(done + 3))
                self.same_checkpoints(step(self.path("ended"), done + 3), step(self.path("straight"), done + 3))
                shutil.rmtree(self.path("ended"))
                shutil.rmtree(self.path("straight"))

    def test_kills(self):
        # Killed at any moment, also within a checkpoint: what is there under its name can be continued.
        draw = random.Random(5)
        options = ["--train-iters", "100000", "--eval-interval", "0", "--save-interval", "1", "--save", "killed",
                   "--resume", "--keep-last", "2"]
        process = self.start(*options)
        self.wait_for_steps(self.path("killed"), 3)
        for _ in range(6):
            time.sleep(draw.random() * 0.3)
            process.kill()
            process.communicate()
            newest = steps_of(self.path("killed"))[-1]
            process = self.start(*options)
            steps = len(events(self.path("killed"), "step", torn=True))
            self.wait_for_steps(self.path("killed"), steps + 1, torn=True)
            starts = [entry["step"] for entry in events(self.path("killed"), "start", torn=True)]
            self.assertEqual(starts[-1], newest)
        process.kill()
        process.communicate()

    def test_full_disk(self):
        # A limit on the size of files fails as a full disk does: in any file, at any byte.
        self.copy("base", "full")
        shutil.rmtree(step(self.path("full"), 12))
        before = {name: checkpoint_files(step(self.path("full"), name)) for name in (4, 8)}
        sizes = [len(data) for data in before[8].values()]
        for limit in (8192, max(sizes) // 2, max(sizes) - 1):
            def preexec():
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            _, message = self.resume("--load", step("full", 8), "--save", "full", "--log-dir", "full-log",
                                     "--tensorboard-dir", "full-log", expect=1, preexec=preexec)
            self.assertIn("the checkpoint of step 12 could not be written", message)
            self.assertIn("File too large", message)
            self.assertEqual(steps_of(self.path("full")), [4, 8])
            self.assertFalse(glob.glob(self.path("full", "*.tmp")))
            for name in (4, 8):
                self.assertEqual(before[name], checkpoint_files(step(self.path("full"), name)))
            shutil.rmtree(self.path("full-log"))
        self.resume("--save", "full", "--resume")
        self.same_checkpoints(step(self.path("full"), 12), step(self.path("base"), 12))
        # The log alone.
        _, message = self.train("--train-iters", "60", "--log-dir", "full-log", "--eval-interval", "0", expect=1,
                                preexec=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)))
        self.assertIn("full-log/log.jsonl could not be written whole: File too large", message)

    def test_one_writer(self):
        process = self.start("--train-iters", "100000", "--save", "locked", "--save-interval", "0")
        self.wait_for_steps(self.path("locked"), 1)
        _, message = self.train("--train-iters", "2", "--save", "locked", expect=1)
        self.assertIn("another run is writing to this folder", message)
        process.kill()
        process.communicate()

    def test_one_log(self):
        process = self.start("--train-iters", "100000", "--save", "logging", "--log-dir", "one-log", "--save-interval", "0")
        self.wait_for_steps(self.path("one-log"), 1)
        for options in (["--log-dir", "one-log"], ["--save", "one-log"]):
            _, message = self.train("--train-iters", "2", *options, expect=1)
            self.assertIn("one-log/log.jsonl: another run is writing to this log", message)
        process.send_signal(signal.SIGTERM)
        process.communicate()
        self.assertEqual(len(events(self.path("one-log"), "start")), 1)
        self.train("--train-iters", "2", "--log-dir", "one-log", "--eval-interval", "0")
        self.assertEqual(len(events(self.path("one-log"), "start")), 2)

    def test_torn_log(self):
        # A full disk leaves a part of a line, which is the last one for a while.
        arguments = ["--train-iters", "2", "--eval-interval", "0", "--log-dir", "torn"]
        self.train(*arguments)
        whole = read(self.path("torn", "log.jsonl"))
        write(self.path("torn", "log.jsonl"), whole[:-20])
        self.train(*arguments)
        lines = read(self.path("torn", "log.jsonl")).splitlines()
        self.assertEqual(lines[:4], whole[:-20].splitlines())
        self.assertEqual([json.loads(line)["event"] for line in lines[4:]], ["start", "step", "step", "end"])
        _, out, message = run("report", "--output", "torn.html", "torn", cwd=self.folder)
        self.assertEqual(message.count("\n"), 1)
        self.assertIn("warning: torn/log.jsonl: line 4: ", message)
        self.refused(1, "torn/log.jsonl: line 4: ", "report", "--output", "torn.html", "--strict", "torn")

    def test_what_is_no_file(self):
        # None of them is waited for.
        os.mkdir(self.path("odd"))
        for name, folder in (("log.jsonl", ["--log-dir", "odd"]), ("log.jsonl", ["--save", "odd"]),
                             ("lock", ["--save", "odd"])):
            path = self.path("odd", name)
            arguments = ["train", "--data-path", "t", *TINY, "--train-iters", "1", *folder]
            if os.path.exists(path):
                os.unlink(path)
            os.mkfifo(path)
            expected = "odd/%s: is a pipe, socket or device, expected a regular file" % name
            self.refused(1, expected, *arguments)
            os.unlink(path)
            with socket.socket(socket.AF_UNIX) as listener:
                # Its own path may be too long for a socket.
                before = os.getcwd()
                os.chdir(self.path("odd"))
                listener.bind(name)
                os.chdir(before)
                self.refused(1, expected, *arguments)
            os.unlink(path)
            os.symlink("/dev/null", path)
            self.refused(1, expected, *arguments)
            os.unlink(path)
            os.mkdir(path)
            self.refused(1, "odd/%s: is a directory, expected a regular file" % name, *arguments)
            os.rmdir(path)

    # Skipped steps.

    def test_divergence(self):
        out, message = self.train("--train-iters", "100", "--lr", "1e25", "--lr-warmup-iters", "0", "--precision",
                                  "bf16", "--max-skipped", "3", "--save", "diverged", "--eval-interval", "0",
                                  "--log-interval", "1", expect=1)
        self.assertIn("loss nan ", out)
        self.assertNotIn("-nan", out)
        self.assertIn("3 steps in a row were skipped", message)
        entries = events(self.path("diverged"), "step")
        self.assertEqual([entry["skipped"] for entry in entries[-3:]], [True] * 3)
        self.assertEqual(entries[-1]["skipped_steps"], 3)
        self.assertEqual(events(self.path("diverged"), "end")[0]["reason"], "skipped")
        self.assertEqual(steps_of(self.path("diverged")), [])

    def test_divergence_keeps_good_checkpoints(self):
        self.copy("base", "diverging")
        good = checkpoint_files(step(self.path("diverging"), 12))
        options = ["--save", "diverging", "--resume", "--lr", "1e30", "--lr-decay-style", "constant",
                   "--save-interval", "2", "--keep-last", "1", "--eval-interval", "0"]
        self.resume(*options, "--train-iters", "100", "--max-skipped", "10", expect=1)
        self.assertEqual(steps_of(self.path("diverging")), [4, 8, 12])
        self.assertEqual(checkpoint_files(step(self.path("diverging"), 12)), good)
        skipped = [entry["skipped"] for entry in events(self.path("diverging"), "step")]
        self.assertEqual(skipped[-10:], [True] * 10)
        # Nor at the end of one whose last steps were skipped, but not as many.
        _, message = self.resume(*options, "--train-iters", "18", "--max-skipped", "10")
        count = int(re.search(r"the last (\d+) steps were skipped, as the gradients were not finite: the last "
                              r"checkpoint is that of step 12", message)[1])
        self.assertGreater(count, 1)
        self.assertEqual(steps_of(self.path("diverging")), [4, 8, 12])

    # Long enough for the losses to be flat over the 128 steps that are remembered; a handful of sequences is noise.
    POISONED = ["--data-path", "poisoned", "--check-data=no", "--train-iters", "340", "--lr", "5e-3",
                "--lr-decay-style", "constant", "--lr-warmup-iters", "10", "--eval-interval", "0",
                "--save-interval", "0"]

    def poison(self):
        draw = random.Random(3)
        data = bytearray(read(self.path("t_train_000000.bin")))
        middle = 1024 + (len(data) - 1024) // 4 * 2
        data[middle:middle + 260] = struct.pack("<130H", *(draw.randrange(256) for _ in range(130)))
        write(self.path("poisoned_train_000000.bin"), data)
        shutil.copy(self.path("t_val_000000.bin"), self.path("poisoned_val_000000.bin"))

    def test_skipping_spikes(self):
        self.poison()
        self.train(*self.POISONED, "--save", "reporting")
        reported = events(self.path("reporting"), "step")
        first = next(entry["step"] for entry in reported if entry["spike"])
        self.assertGreater(first, 130)
        self.assertFalse(any(entry["skipped"] for entry in reported))
        options = [*self.POISONED, "--spike-action", "skip"]
        out, _ = self.train(*options, "--save", "skipping")
        steps = events(self.path("skipping"), "step")
        self.assertEqual([entry["loss"] for entry in steps[:first]], [entry["loss"] for entry in reported[:first]])
        spikes = [entry["step"] for entry in steps if entry["spike"]]
        self.assertEqual(spikes, [entry["step"] for entry in steps if entry["skipped"]])
        self.assertEqual(spikes[0], first)
        self.assertGreater(len(spikes), 1)
        self.assertIsNone(steps[first - 1]["grad_norm"])
        self.assertEqual(steps[-1]["skipped_steps"], len(spikes))
        self.assertIn("step %d: skipped, as its loss is a spike (1 so far, 1 in a row)\nstep %d: the loss of %.4f is a spike"
                      % (first, first, steps[first - 1]["loss"]), out)
        self.assertNotEqual(steps[first]["loss"], reported[first]["loss"])
        index = json.loads(read(os.path.join(step(self.path("skipping"), 340), "index.json")))
        self.assertEqual((index["skipped_steps"], index["optimizer_steps"]), (len(spikes), 340 - len(spikes)))
        # What the decision goes by is in checkpoints: it is the same after one right before, at, and after a spike. At
        # it, the run goes on to the next step that it can save: a chain of jobs that end there would not get past it.
        for end, saved in ((first - 1, first - 1), (first, first + 1), (spikes[1] - 1, spikes[1] - 1)):
            with self.subTest(end=end):
                self.train(*options, "--save", "chained", "--exit-interval", str(end))
                self.assertEqual(steps_of(self.path("chained")), [saved])
                self.assertEqual(events(self.path("chained"), "end")[0]["reason"], "exit-interval")
                self.resume("--save", "chained", "--resume", "--check-data=no", "--save-interval", "0")
                self.same_checkpoints(step(self.path("skipping"), 340), step(self.path("chained"), 340))
                shutil.rmtree(self.path("chained"))
        # Too many in a row, which a bar near the mean finds soon.
        _, message = self.train("--train-iters", "200", "--lr", "0", "--spike-sigma", "0.1", "--spike-action", "skip",
                                "--max-skipped", "2", "--eval-interval", "0", expect=1)
        self.assertIn("2 steps in a row were skipped, as the gradients were not finite or the loss was a spike", message)

    def test_stopping_before_spikes(self):
        self.poison()
        for recipe in ("delayed", "just-in-time"):
            options = [*self.POISONED, "--spike-action", "stop", "--fp8-recipe", recipe]
            out, message = self.train(*options, "--save", "stopping", expect=1)
            spike, = events(self.path("stopping"), "spike")
            before = spike["step"] - 1
            self.assertEqual(events(self.path("stopping"), "step")[-1]["step"], before)
            self.assertEqual(events(self.path("stopping"), "end")[0]["reason"], "spike")
            self.assertEqual(steps_of(self.path("stopping")), [before])
            self.assertRegex(message, r"^fp8lm train: the loss of step %d, %.4f, is a spike: the steps before had %.4f, "
                                      r"with a deviation of %.4f; the run ends before it, as --spike-action is stop; "
                             % (spike["step"], spike["loss"], spike["mean"], spike["deviation"]))
            # The state is as if the step had not been tried.
            self.train(*options, "--save", "untried", "--exit-interval", str(before))
            self.same_checkpoints(step(self.path("stopping"), before), step(self.path("untried"), before))
            # It comes again as long as nothing changes.
            _, again = self.resume("--save", "stopping", "--resume", "--check-data=no", expect=1)
            self.assertEqual(again, message)
            more = ["--resume", "--check-data=no", "--exit-interval", str(before + 3)]
            self.resume("--save", "stopping", "--spike-action", "skip", *more)
            self.train(*self.POISONED, "--fp8-recipe", recipe, "--spike-action", "skip", "--save", "skipped",
                       "--exit-interval", str(before + 3))
            self.same_checkpoints(step(self.path("stopping"), before + 3), step(self.path("skipped"), before + 3))
            code, out, message = run("report", "--output", "stopping.html", "stopping", cwd=self.folder)
            self.assertEqual((code, message), (0, ""))
            for name in ("stopping", "untried", "skipped"):
                shutil.rmtree(self.path(name))
        _, message = self.train(*options, expect=1)
        self.assertIn("as --spike-action is stop, without a checkpoint, as there is no --save", message)

    def test_checkpoints_without_younger_options(self):
        # They are younger than the format.
        path = step(self.copy("base", "younger"), 12)
        for line in ('    "spike-action": "report",\n', '    "zero-stage": 0,\n', '    "grad-reduce": "auto",\n',
                     '    "grad-scaling": "auto",\n', ',\n    "grad-delayed-scaling": false'):
            self.assertIn(line, read(os.path.join(path, "index.json")).decode())
            sign_index(path, lambda text: text.replace(line, ""))
        self.resume("--save", "younger", "--resume", "--train-iters", "13")

    def test_spike(self):
        # Without learning, losses are scattered about one mean, and a low bar finds many of them above.
        out, _ = self.train("--train-iters", "40", "--lr", "0", "--spike-sigma", "0.1", "--save", "spiky",
                            "--eval-interval", "0")
        spikes = [entry["step"] for entry in events(self.path("spiky"), "step") if entry["spike"]]
        self.assertTrue(spikes)
        self.assertIn("step %d: the loss of" % spikes[0], out)

    # Bad input.

    def refused(self, code, expected, *arguments):
        got, out, message = run(*arguments, cwd=self.folder)
        self.assertEqual(got, code, "%s: %s%s" % (arguments, out, message))
        self.assertIn(expected, message)
        self.assertNotIn("Sanitizer", message)

    def test_usage(self):
        for expected, arguments in {
            "--data-path is missing": [],
            "unknown or ambiguous option '--no-such'": ["--no-such"],
            "option '--lr' needs a value": ["--lr"],
            "unexpected argument 'x'": ["--data-path", "t", "x"],
            "--num-layers is '0', expected a whole number from 1": ["--num-layers", "0"],
            "--lr is '-1', expected a number from 0": ["--lr", "-1"],
            "--lr is 'nan'": ["--lr", "nan"],
            "--lr is '0x10', expected a number from 0 to 1e+30": ["--lr", "0x10"],
            "--lr is '1e-400', expected a number that a double holds, from 0 to 1e+30": ["--lr", "1e-400"],
            "--adam-beta1 is '1', expected a number from 0 to 0.9999999": ["--adam-beta1", "1"],
            "--micro-batch-size is 2147483647, expected at most 16777215: with 128 tokens a sequence":
                ["--data-path", "t", "--micro-batch-size", "2147483647", "--seq-length", "128"],
            "--data-path is '\\xff', expected text in UTF-8": ["--data-path", b"\xff"],
            "--valid-data-path is 'a\\xff', expected text in UTF-8": ["--data-path", "t", "--valid-data-path", b"a\xff"],
            "--swiglu is 'maybe', expected yes or no": ["--swiglu=maybe"],
            "--precision is 'fp4', expected fp32, bf16, te, fp8-o1, fp8-o2 or fp8-o3": ["--precision", "fp4"],
            "--spike-action is 'ignore', expected report, skip or stop": ["--spike-action", "ignore"],
            "--recompute-granularity is 'selective', expected none or full": ["--recompute-granularity", "selective"],
            "there is no preset \"gpt-5\"": ["--data-path", "t", "--preset", "gpt-5"],
            "--hidden-size is 30, expected a multiple of --num-attention-heads, 4": ["--data-path", "t", "--hidden-size", "30"],
            "--num-attention-heads is 4, expected a multiple of --num-query-groups, 3":
                ["--data-path", "t", "--num-query-groups", "3"],
            "expected an even number for rotary positions": ["--data-path", "t", "--hidden-size", "12"],
            "--global-batch-size is 4, expected a multiple of --micro-batch-size, 3":
                ["--data-path", "t", "--micro-batch-size", "3", "--global-batch-size", "4"],
            "by 1 to 2048": ["--data-path", "t", "--micro-batch-size", "1", "--global-batch-size", "2049"],
            "--seq-length is 99, expected at most --max-position-embeddings, 50":
                ["--data-path", "t", "--position-embedding-type", "learned_absolute", "--seq-length", "99",
                 "--max-position-embeddings", "50"],
            "--min-lr is 0.1, expected at most --lr, 0.001": ["--data-path", "t", "--min-lr", "0.1"],
            "--lr-decay-iters is 20, expected at least --lr-warmup-iters, 50":
                ["--data-path", "t", "--train-iters", "20", "--lr-warmup-iters", "50"],
            "--lr-wsd-decay-iters is 16, expected at most what --lr-warmup-iters, 5, leaves of --lr-decay-iters, 20":
                ["--data-path", "t", "--train-iters", "20", "--lr-warmup-iters", "5", "--lr-decay-style", "WSD",
                 "--lr-wsd-decay-iters", "16"],
            "--vocab-file and --merge-file go together": ["--data-path", "t", "--vocab-file", "x"],
            "--resume needs --save": ["--data-path", "t", "--resume"],
            "--resume and --load exclude each other": ["--resume", "--load", "no-such", "--save", "never"],
            "--data-path is empty": ["--data-path", ""],
        }.items():
            with self.subTest(expected=expected):
                self.refused(2, expected, "train", *arguments)

    def test_bad_configuration_files(self):
        for text, expected in {
            "": "byte 0: expected an object, found the end",
            "[]": "byte 0: expected an object, found '['",
            '{"lr": 1e-3': "expected ",
            '{"lr": 1e-3} x': "the end of the text",
            '{"learning": 1}': 'there is no option "learning"',
            '{"lr": 1, "lr": 2}': '"lr" is there twice',
            '{"lr": "high"}': '"lr": JSON, byte 7',
            '{"lr": -1}': '"lr" is -1, expected a number from 0',
            '{"lr": 1e999}': '"lr": JSON, byte 7',
            '{"num-layers": 1.5}': '"num-layers" is 1.5, expected a whole number',
            '{"num-layers": 2147483648}': '"num-layers" is 2147483648, expected a number from 1 to 2147483647',
            '{"seed": 9007199254740992}':
                '"seed" is 9007199254740992, expected a number from 0 to 9007199254740991',
            '{"adam-beta1": 1}': '"adam-beta1" is 1, expected a number from 0 to 0.9999999',
            '{"lr": 0.1e-400}': '"lr" is 0.1e-400, too small for a double',
            '{"swiglu": 1}': '"swiglu": JSON, byte 11',
            '{"precision": "fp4"}': '"precision" is "fp4", expected fp32',
            '{"save": ""}': '"save" is empty',
            '{"save": "a\\u0000b"}': "U+0000",
            '{"config": "x"}': 'there is no option "config"',
        }.items():
            with self.subTest(text=text):
                write(self.path("bad.json"), text.encode())
                self.refused(2, expected, "train", "--data-path", "t", "--config", "bad.json")
        self.refused(1, "no-such.json: cannot open the file", "train", "--config", "no-such.json")
        write(self.path("bad.json"), b" " * 8388609)
        self.refused(1, "expected at most 8388608", "train", "--config", "bad.json")

    def test_bad_data(self):
        self.refused(1, "no-such", "train", "--data-path", "no-such", *TINY)
        self.refused(1, "0.7: there is no such shard; if it is a weight, weights and paths must alternate", "train",
                     "--data-path", "0.7 t 0.3", *TINY)
        self.refused(1, "0x10: there is no such shard", "train", "--data-path", "0x10 t 1 t", *TINY)
        self.refused(1, "vocab", "train", "--data-path", "t", *TINY, "--vocab-size", "50")
        write(self.path("empty.bin"), b"")
        self.refused(1, "empty.bin", "train", "--data-path", "empty.bin", *TINY)
        shard = bytearray(read(self.path("t_train_000000.bin")))
        write(self.path("short.bin"), shard[:-3])
        self.refused(1, "short.bin", "train", "--data-path", "short.bin", *TINY)
        shard[4] = 99
        write(self.path("future.bin"), shard)
        self.refused(1, "future.bin", "train", "--data-path", "future.bin", *TINY)
        # A token beyond the vocabulary, of which the header says nothing.
        header = struct.pack("<256i", 20240520, 1, 1000, *[0] * 253)
        write(self.path("beyond.bin"), header + struct.pack("<1000H", *[65535] * 1000))
        self.refused(1, "65535", "train", "--data-path", "beyond.bin", *TINY)
        # Shorter than a sequence.
        write(self.path("tiny.bin"), struct.pack("<256i", 20240520, 1, 10, *[0] * 253) + struct.pack("<10H", *range(10)))
        self.refused(1, "tiny.bin has 10 tokens for training, a sequence of 32 needs 33", "train", "--data-path", "tiny.bin", *TINY)

    def test_damaged_data(self):
        for part in ("train", "val"):
            with self.subTest(part=part):
                for other in ("train", "val"):
                    shutil.copy(self.path("t_%s_000000.bin" % other), self.path("flipped_%s_000000.bin" % other))
                name = "flipped_%s_000000.bin" % part
                shard = bytearray(read(self.path(name)))
                # Another letter: only the checksum tells.
                shard[1024 + 2 * 100] ^= 1
                write(self.path(name), shard)
                arguments = ["train", "--data-path", "flipped", *TINY, "--train-iters", "1"]
                self.refused(1, name + ": the checksum of the tokens is ", *arguments)
                self.refused(1, name + ": the checksum of the tokens is ", "train", "--data-path", "t",
                             "--valid-data-path", name, *TINY, "--train-iters", "1")
                self.resume(*arguments[1:], "--check-data=no")
        # At the end, which validation takes.
        shard[-2] ^= 1
        write(self.path("flipped.bin"), shard)
        self.refused(1, "flipped.bin: the checksum", "train", "--data-path", "flipped.bin", *TINY)

    def test_no_device(self):
        code, _, message = run("train", "--data-path", "t", *TINY, "--device", "cuda", "--train-iters", "1",
                               cwd=self.folder)
        if code != 0:
            self.assertEqual(code, 1)
            self.assertRegex(message, "CUDA|GPU")

    def test_bad_folders(self):
        self.refused(1, "there from an earlier run", "train", "--data-path", "t", *TINY, "--save", "base")
        write(self.path("file"), b"x")
        self.refused(1, "file: ", "train", "--data-path", "t", *TINY, "--save", "file")
        self.refused(1, "file/x: ", "train", "--data-path", "t", *TINY, "--save", "file/x")
        self.refused(1, "no-such: there is no such folder", "train", "--load", "no-such")
        os.makedirs(self.path("nothing"), exist_ok=True)
        self.refused(1, "nothing: is no checkpoint and holds none", "train", "--load", "nothing")
        self.refused(1, "base/step-00000012 has 12 steps already, and --train-iters is 5", "train", "--load", "base",
                     "--train-iters", "5")

    def test_changed_options(self):
        for option, value in {"hidden-size": "64", "precision": "bf16", "seed": "1", "global-batch-size": "8",
                              "fp8-amax-history-len": "17", "preset": "tiny-llama", "norm-epsilon": "1e-6",
                              "seq-length": "16"}.items():
            with self.subTest(option=option):
                self.refused(2, "--%s is " % option, "train", "--load", "base", "--" + option, value)
        self.refused(2, "but the checkpoint was trained with 32", "train", "--load", "base", "--hidden-size", "64")

    def damaged(self, expected, change, code=1):
        path = step(self.copy("base", "damaged"), 12)
        change(path)
        others = {name: checkpoint_files(step(self.path("damaged"), name)) for name in (4, 8)}
        self.refused(code, expected, "train", "--load", "damaged", "--save", "damaged", "--train-iters", "14")
        self.refused(code, expected, "generate", "--load", "damaged", "the")
        for name in (4, 8):
            self.assertEqual(others[name], checkpoint_files(step(self.path("damaged"), name)))

    def test_damaged_checkpoints(self):
        def edit(name, change):
            def changed(path):
                file = os.path.join(path, name)
                write(file, change(read(file)))
            return changed

        def flip(data):
            data = bytearray(data)
            data[len(data) // 2] ^= 4
            return bytes(data)

        index, model, state = "index.json", "model.safetensors", "state.safetensors"
        for expected, change in {
            "index.json: JSON, byte": edit(index, lambda text: text[:-20]),
            "its checksum does not fit": edit(index, lambda text: text.replace(b'"lr": 0.001', b'"lr": 0.002')),
            "this is a file of something else":
                edit(index, lambda text: text.replace(b"fp8lm checkpoint", b"another checkpoint")),
            "the checkpoint has version 2, this fp8lm reads version 1":
                edit(index, lambda text: text.replace(b'"version": 1', b'"version": 2, "new": 1')),
            "this is no index of a checkpoint": edit(index, lambda text: b'{"architectures": ["GPT"]}'),
            "index.json: JSON, byte 0": edit(index, lambda text: b""),
            "model.safetensors: it has ": edit(model, lambda data: data[:-1]),
            "state.safetensors: it has ": edit(state, lambda data: data + b"\0"),
            "model.safetensors: its checksum is": edit(model, flip),
            "state.safetensors: its checksum is": edit(state, flip),
            "model.safetensors: cannot open the file": lambda path: os.remove(os.path.join(path, model)),
        }.items():
            with self.subTest(expected=expected):
                self.damaged(expected, change)

    def test_checkpoints_of_wrong_content(self):
        """All checksums are right, and what is in the files does not fit."""
        def signed(name, old, new, index=lambda text: text):
            def changed(path):
                file = os.path.join(path, name)
                data = read(file)
                self.assertIn(old, data)
                write(file, data.replace(old, new, 1))
                sign_index(path, index)
            return changed

        def option(old, new):
            def changed(path):
                sign_index(path, lambda text: text.replace(old, new))
            return changed

        model, state = "model.safetensors", "state.safetensors"
        for expected, change in {
            'the tensor "final_norm.weight" is missing':
                signed(model, b'"final_norm.weight"', b'"final_morn.weight"'),
            '"hidden-size" is missing': option('    "hidden-size": 32,\n', ""),
            'there is no option "hidden"': option('"hidden-size"', '"hidden"'),
            '"step" is there twice': option('"step": 12', '"step": 12, "step": 12'),
            "more steps were skipped or taken": option('"optimizer_steps": 12', '"optimizer_steps": 13'),
            'a head has 17 elements, expected an even number': option('"hidden-size": 32', '"hidden-size": 34'),
            '"num-layers" is 1e+18, expected': option('"num-layers": 2', '"num-layers": 1000000000000000000'),
            'checkpoints have no file "../../etc/passwd"':
                option('"name": "model.safetensors"', '"name": "../../etc/passwd"'),
        }.items():
            with self.subTest(expected=expected):
                self.damaged(expected, change)
        path = step(self.copy("base", "damaged"), 12)
        signed(state, b'"layers.0.ffn.fc1.weight.exp_avg":{"dtype":"F8_E4M3"',
               b'"layers.0.ffn.fc1.weight.exp_avg":{"dtype":"F8_E5M2"')(path)
        self.refused(1, 'the tensor "layers.0.ffn.fc1.weight.exp_avg" is F8_E5M2, expected F8_E4M3', "train", "--load",
                     "damaged", "--train-iters", "14")
        # The model of another shape than its tensors'.
        path = step(self.copy("base", "damaged"), 12)
        sign_index(path, lambda text: text.replace('"num-layers": 2', '"num-layers": 1'))
        expected = "model.safetensors: its tensors have "
        self.refused(1, expected, "train", "--load", "damaged", "--train-iters", "14")
        self.refused(1, expected, "generate", "--load", "damaged", "the")
        # Without the memory or the time of the model that the options ask for.
        for old, new, expected in (
            ('"num-layers": 2', '"num-layers": 10000', 'the tensor "layers.9999.attention.qkv.weight" is missing'),
            ('"vocab-size": 257', '"vocab-size": 16777216',
             'the tensor "embedding.token.weight" has another shape than the model\'s'),
            ('"ffn-hidden-size": 128', '"ffn-hidden-size": 4194304',
             'the tensor "layers.1.ffn.fc2.weight" has another shape than the model\'s'),
        ):
            path = step(self.copy("base", "damaged"), 12)
            self.assertIn(old, read(os.path.join(path, "index.json")).decode())
            sign_index(path, lambda text: text.replace(old, new))
            for command in (["train", "--load", "damaged", "--train-iters", "14"],
                            ["generate", "--load", "damaged", "the"]):
                before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
                self.refused(1, expected, *command)
                self.assertLess(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, 5)
        path = step(self.copy("base", "damaged"), 12)
        sign_index(path, lambda text: text.replace('"hidden-size": 32', '"hidden-size": 36'))
        self.refused(1, "has another shape than the model's", "train", "--load", "damaged", "--train-iters", "14")
        # A scale that no state has.
        path = step(self.copy("base", "damaged"), 12)
        data = bytearray(read(os.path.join(path, state)))
        size, = struct.unpack("<Q", data[:8])
        header = json.loads(data[8:8 + size])
        at = 8 + size + header["final_norm.weight.scales"]["data_offsets"][0]
        data[at:at + 4] = struct.pack("<f", float("nan"))
        write(os.path.join(path, state), data)
        sign_index(path, lambda text: text)
        self.refused(1, "the master scale of parameter", "train", "--load", "damaged", "--train-iters", "14")

    def test_scales_and_losses_of_checkpoints(self):
        model, state = "model.safetensors", "state.safetensors"
        weight = "layers.0.ffn.fc1.weight"

        def changed(file, tensor, value, position=0):
            """Of an element of a tensor, and all checksums right."""
            path = step(self.copy("base", "damaged"), 12)
            data = bytearray(read(os.path.join(path, file)))
            size, = struct.unpack("<Q", data[:8])
            at = 8 + size + json.loads(data[8:8 + size])[tensor]["data_offsets"][0] + 4 * position
            old = data[at:at + 4]
            data[at:at + 4] = value(old) if callable(value) else struct.pack("<f", value)
            write(os.path.join(path, file), data)
            sign_index(path, lambda text: text)

        arguments = ["train", "--load", "damaged", "--train-iters", "14"]
        for value in (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-40):
            with self.subTest(inverse=value):
                changed(model, weight + "_scale_inv", value)
                expected = 'model.safetensors: "%s_scale_inv" is ' % weight
                self.refused(1, expected, *arguments)
                self.refused(1, expected, "generate", "--load", "damaged", "the")
        # Another one than the scale's, which is no power of two for rounding to matter.
        changed(model, weight + "_scale_inv", lambda old: struct.pack("<f", 2 * struct.unpack("<f", old)[0]))
        self.refused(1, 'model.safetensors: "%s_scale_inv" is ' % weight, *arguments)
        changed(model, weight + "_scale_inv", lambda old: struct.pack("<I", struct.unpack("<I", old)[0] + 3))
        self.refused(1, ", as the scale of the weight is ", *arguments)
        changed(model, weight + "_scale_inv", lambda old: struct.pack("<I", struct.unpack("<I", old)[0] + 1))
        self.resume(*arguments[1:])
        for value in (math.nan, math.inf, -1.0):
            for position, name in enumerate(("master", "exp_avg", "exp_avg_sq")):
                with self.subTest(amax=value, state=name):
                    changed(state, weight + ".amaxes", value, position)
                    self.refused(1, "the %s amax of parameter" % name, *arguments)
            for position, name in enumerate(("master", "exp_avg", "exp_avg_sq")):
                with self.subTest(scale=value, state=name):
                    changed(state, weight + ".scales", value, position)
                    self.refused(1, "the %s scale of parameter" % name, *arguments)
            changed(state, weight + ".scales", value, 3)
            self.refused(1, "scale", *arguments)
        for value in (math.nan, math.inf):
            changed(state, "trainer.losses", value, 3)
            self.refused(1, 'element 3 of "trainer.losses" is', *arguments)

    # Generation.

    def generate(self, *arguments, input=None, load="base"):
        code, out, message = run("generate", "--load", load, *arguments, cwd=self.folder, input=input)
        self.assertEqual(code, 0, message)
        return out

    def test_generate(self):
        greedy = self.generate("--temperature", "0", "--max-tokens", "20", "the sun")
        self.assertEqual(greedy, self.generate("--top-k", "1", "--max-tokens", "20", "the sun"))
        self.assertEqual(greedy, self.generate("--top-p", "0", "--max-tokens", "20", "the sun", "--threads", "1"))
        self.assertEqual(greedy, self.generate("--temperature", "0", "--max-tokens", "20", input=b"the sun"))
        self.assertEqual(greedy, self.generate("--temperature", "0", "--max-tokens", "20", "-", input=b"the sun"))
        one = self.generate("--seed", "1", "--ignore-eot", "the sun")
        self.assertEqual(one, self.generate("--seed", "1", "--ignore-eot", "the sun"))
        self.assertNotEqual(one, self.generate("--seed", "2", "--ignore-eot", "the sun"))
        # Beyond the sequence of 32, by prompt and by text; no prompt at all; none wanted.
        self.generate("--max-tokens", "100", "--ignore-eot", "x" * 500)
        self.generate("--max-tokens", "4", "")
        self.assertEqual(self.generate("--max-tokens", "0", "the"), "\n")
        # Bytes that are not UTF-8.
        self.generate("--max-tokens", "4", input=b"\xff\xfe\0\x80")

    def test_generated_text_is_learned(self):
        self.train("--train-iters", "300", "--lr", "1e-2", "--save", "fluent", "--eval-interval", "0", "--precision",
                   "fp8-o2")
        text = self.generate("--max-tokens", "200", "--temperature", "0.2", "--ignore-eot", "the sun ", load="fluent")
        words = text.split()[1:-1]
        self.assertGreater(len(words), 20)
        known = sum(word in WORDS for word in words)
        self.assertGreater(known / len(words), 0.7, text)

    def test_generate_usage(self):
        self.refused(2, "--load is missing", "generate", "the")
        self.refused(2, "--top-p is '2', expected a number from 0 to 1", "generate", "--load", "base", "--top-p", "2")
        self.refused(2, "more than one prompt: 'a' and 'b'", "generate", "--load", "base", "a", "b")
        self.refused(2, "go together", "generate", "--load", "base", "--vocab-file", "x", "a")
        self.refused(1, "no-such", "generate", "--load", "no-such", "a")
        self.refused(1, "x: ", "generate", "--load", "base", "--vocab-file", "x", "--merge-file", "y", "a")

    def test_bpe(self):
        warning = ("fp8lm train: warning: the data's tokenizer has 300 tokens, but without --vocab-file checkpoints "
                   "have no tokenizer: 'fp8lm generate' will need --vocab-file\n")
        code, out, message = run("data", "train-bpe", "--help")
        self.assertEqual(code, 0)
        code, out, message = run("data", "train-bpe", "--vocab-size", "300", "--output-folder", "bpe", "text.txt",
                                 cwd=self.folder)
        self.assertEqual(code, 0, message)
        files = ["--vocab-file", "bpe/vocab.json", "--merge-file", "bpe/merges.txt"]
        code, out, message = run("data", "tokenize", "--output-prefix", "b", *files, "text.txt", cwd=self.folder)
        self.assertEqual(code, 0, message)
        options = ["--data-path", "b", "--vocab-size", "320", *TINY, "--train-iters", "4", "--save", "with-bpe"]
        code, out, message = run("train", *options, *files, "--exit-interval", "2", cwd=self.folder)
        self.assertEqual(code, 0, message)
        self.assertEqual(message, "")
        # Without it, generate asks for it.
        options[-1] = "without-bpe"
        code, out, message = run("train", *options, cwd=self.folder)
        self.assertEqual((code, message), (0, warning))
        code, out, message = run("train", "--save", "without-bpe", "--resume", *files, "--train-iters", "5",
                                 cwd=self.folder)
        self.assertEqual((code, message), (0, ""))
        code, out, message = run("train", *options[:-2], cwd=self.folder)
        self.assertEqual((code, message), (0, ""))
        self.refused(1, "its vocabulary has 300 tokens, expected at most --vocab-size, 257", "train", "--data-path", "b",
                     *TINY)
        shutil.rmtree(self.path("bpe"))
        # The checkpoint has the tokenizer, and hands it on.
        self.resume("--save", "with-bpe", "--resume", "--keep-last", "1")
        self.assertEqual(sorted(os.listdir(step(self.path("with-bpe"), 4))),
                         ["index.json", "merges.txt", "model.safetensors", "state.safetensors", "vocab.json"])
        self.generate("--max-tokens", "20", "the sun", load="with-bpe")

    def test_help(self):
        for command in (["train", "--help"], ["help", "train"], ["train", "-h"], ["generate", "--help"],
                        ["generate", "-h"], ["--help"]):
            code, out, message = run(*command)
            self.assertEqual((code, message), (0, ""))
            self.assertTrue(all(len(line) <= 120 and line == line.rstrip() for line in out.splitlines()))
        code, out, _ = run("train", "--help")
        for option in ("--num-layers", "--tensorboard-dir", "--log-fp8-interval", "tiny-llama", "130"):
            self.assertIn(option, out)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
