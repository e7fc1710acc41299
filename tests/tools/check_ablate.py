#!/usr/bin/env python3
"""fp8lm ablate allreduce through the command line: figures computed again from those of each tensor and step,
auto-scaling against its rule and against the scalings that it starts from, training beside that of fp8lm train, files,
and bad input.

Usage: check_ablate.py FP8LM [unittest arguments]
Needs nothing but Python's own library."""

import html.parser
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

FP8LM = os.path.abspath(sys.argv[1])
MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32",
         "--threads", "1"]
RANKS = 4
SHORT = ["--ranks", RANKS, "--train-iters", "8", "--ablate-steps", "6", "--measure-steps", "2",
         "--lr-warmup-iters", "0"]
ONE = ["--ranks", RANKS, "--train-iters", "1", "--ablate-steps", "1"]
WORDS = "the sun rose over a quiet hill and all who saw it sang of bread water stone light and rain".split()
COUNTS = ["saturated_in_cast", "saturated_in_sum", "flushed_to_zero", "lost", "at_maximum"]


def run(*arguments, cwd=None, preexec=None):
    done = subprocess.run([FP8LM, *(str(value) for value in arguments)], capture_output=True, cwd=cwd, timeout=120,
                          preexec_fn=preexec)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def read(path):
    with open(path, "rb") as file:
        return file.read()


def limit_files(size):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


class Page(html.parser.HTMLParser):
    """Checks that every tag is closed in its order; keeps the data of charts."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.charts, self.rows, self.text = [], [], 0, ""
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        if tag == "script":
            self.json = dict(attributes).get("type") == "application/json"
        self.rows += tag == "tr"
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            if self.json:
                self.charts.append(json.loads(data))
        elif "style" not in self.open:
            self.text += data


class Ablate(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="fp8lm-ablate-")
        draw = random.Random(7)
        with open(os.path.join(cls.folder, "text.txt"), "w") as file:
            file.write(" ".join(draw.choice(WORDS) for _ in range(8000)))
        code, _, message = run("data", "tokenize", "--output-prefix", "t", "--val-fraction", "0.1", "text.txt",
                               cwd=cls.folder)
        assert code == 0, message
        cls.out = cls.ablate_once("base.json", *SHORT, "--output", "base.html")
        cls.base = cls.load("base.json")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    @classmethod
    def load(cls, name):
        return json.loads(read(os.path.join(cls.folder, name)))

    @classmethod
    def ablate_once(cls, name, *arguments):
        code, out, message = run("ablate", "allreduce", "--data-path", "t", *MODEL, *arguments, "--json", name,
                                 cwd=cls.folder)
        assert code == 0, message
        assert message == "", message
        return out

    def path(self, name):
        return os.path.join(self.folder, name)

    def ablate(self, *arguments):
        self.ablate_once("other.json", *arguments)
        return self.load("other.json")

    def refused(self, expected, text, *arguments, data=("--data-path", "t"), preexec=None):
        code, out, message = run("ablate", "allreduce", *data, *MODEL, *arguments, cwd=self.folder, preexec=preexec)
        self.assertEqual(code, expected, out + message)
        self.assertIn(text, message)
        self.assertTrue(message.startswith("fp8lm ablate allreduce: "), message)
        return out

    def nothing_left(self):
        left = [name for name in os.listdir(self.folder) if ".json." in name or ".html." in name or "gradients" in name]
        self.assertEqual(left, [])

    @staticmethod
    def reducer(entry, algorithm, scaling):
        return next(one for one in entry["reducers"] if (one["algorithm"], one["scaling"]) == (algorithm, scaling))

    # Figures.

    def test_groups_are_the_sums_of_their_tensors(self):
        measured = 2
        blocks = [group for group in self.base["groups"] if group["name"].startswith("block ")]
        self.assertEqual([group["name"] for group in self.base["groups"]],
                         ["block 0", "block 1", "all blocks", "others", "all"])
        self.assertEqual(len(blocks), 2)
        for group in self.base["groups"]:
            name = group["name"]
            tensors = [tensor for tensor in self.base["tensors"]
                       if name == "all" or tensor["name"].startswith("layers.") == (name != "others")
                       and (not name.startswith("block ") or tensor["name"].startswith("layers.%s." % name[6:]))]
            self.assertEqual(group["tensors"], len(tensors))
            elements = sum(tensor["elements"] for tensor in tensors)
            self.assertEqual(group["elements"], elements)
            for one in group["reducers"]:
                steps = [step for tensor in tensors
                         for step in self.reducer(tensor, one["algorithm"], one["scaling"])["steps"][-measured:]]
                total = {key: sum(step[key] for step in steps) for key in COUNTS + ["signal", "noise"]}
                values = elements * measured * RANKS
                self.assertAlmostEqual(one["snr"], total["signal"] / total["noise"], delta=1e-9 * one["snr"])
                self.assertAlmostEqual(one["snr_db"], 10 * math.log10(one["snr"]), places=9)
                self.assertAlmostEqual(one["underflow"], total["flushed_to_zero"] / values, places=15)
                self.assertAlmostEqual(one["overflow"],
                                       (total["saturated_in_cast"] + total["saturated_in_sum"]) / values, places=15)
                self.assertAlmostEqual(one["lost"], total["lost"] / (elements * measured), places=15)
        parameters = sum(tensor["elements"] for tensor in self.base["tensors"])
        self.assertEqual(self.base["groups"][-1]["elements"], parameters)
        self.assertIn("%d parameters; %d ranks of 1 x 32 tokens" % (parameters, RANKS), self.out)

    def test_scalings_differ_as_they_must(self):
        all_tensors = self.base["groups"][-1]
        pre, post = self.reducer(all_tensors, "native", "pre"), self.reducer(all_tensors, "native", "post")
        auto = self.reducer(all_tensors, "native", "auto")
        # No sum of ranks codes, each a ranks-th of the range, can saturate.
        self.assertEqual(pre["overflow"], 0)
        self.assertGreater(post["overflow"], 1e-4)
        self.assertLess(post["underflow"], pre["underflow"])
        self.assertLessEqual(auto["overflow"], 5e-4)
        self.assertGreater(auto["snr"], post["snr"])
        for scaling in ("auto", "pre", "post"):
            two_shot = self.reducer(all_tensors, "two-shot", scaling)
            # Two roundings of three bits of mantissa: 31.5 dB each.
            self.assertTrue(20 < two_shot["snr_db"] < 32, two_shot)
            self.assertGreater(two_shot["snr"], self.reducer(all_tensors, "native", scaling)["snr"])
            self.assertIsNone(two_shot["at_maximum"])
        for tensor in self.base["tensors"]:
            # The same casts of the same values.
            for scaling in ("pre", "post"):
                for one, other in zip(self.reducer(tensor, "native", scaling)["steps"],
                                      self.reducer(tensor, "two-shot", scaling)["steps"]):
                    self.assertEqual(one["flushed_to_zero"], other["flushed_to_zero"])
                    self.assertEqual(one["signal"], other["signal"])

    def test_mu_follows_the_rule(self):
        halved = 0
        for tensor in self.base["tensors"]:
            for algorithm in ("native", "two-shot"):
                steps = self.reducer(tensor, algorithm, "auto")["steps"]
                self.assertEqual([step["step"] for step in steps], [3, 4, 5, 6, 7, 8])
                self.assertEqual(steps[0]["mu"], 1)
                for step, following in zip(steps, steps[1:]):
                    share = (step["saturated_in_cast"] / RANKS + step["saturated_in_sum"]) / tensor["elements"]
                    expected = step["mu"] * (0.5 if share > 1e-5 else 2 ** 0.001)
                    self.assertAlmostEqual(following["mu"], expected, places=12)
                    halved += share > 1e-5
                self.assertEqual(len(self.reducer(tensor, algorithm, "pre")["steps"]), 2)
        self.assertGreater(halved, 0)
        for entry in self.base["auto"]:
            for index, step in enumerate(entry["steps"]):
                mus = sorted(self.reducer(tensor, entry["algorithm"], "auto")["steps"][index]["mu"]
                             for tensor in self.base["tensors"])
                middle = (mus[(len(mus) - 1) // 2] + mus[len(mus) // 2]) / 2
                self.assertEqual((step["mu_least"], step["mu_most"]), (mus[0], mus[-1]))
                self.assertAlmostEqual(step["mu_median"], middle, places=12)

    def test_auto_begins_as_what_its_factor_says(self):
        for mu, scaling in ((1, "post"), (1 / RANKS, "pre")):
            for wire in ("e4m3", "e5m2"):
                found = self.ablate(*ONE, "--mu-initial", mu, "--wire-dtype", wire)
                for tensor in found["tensors"]:
                    for algorithm in ("native", "two-shot"):
                        auto = self.reducer(tensor, algorithm, "auto")["steps"][0]
                        other = self.reducer(tensor, algorithm, scaling)["steps"][0]
                        self.assertEqual(auto["mu"], mu)
                        self.assertEqual({key: auto[key] for key in COUNTS + ["signal", "noise"]},
                                         {key: other[key] for key in COUNTS + ["signal", "noise"]})

    def test_options_of_auto_scaling(self):
        found = self.ablate(*SHORT, "--backoff", "0.25", "--growth-steps", "10", "--mu-min", "0.125", "--mu-max", "2",
                            "--mu-initial", "2", "--saturation-threshold", "0.01")
        for tensor in found["tensors"]:
            steps = self.reducer(tensor, "native", "auto")["steps"]
            self.assertEqual(steps[0]["mu"], 2)
            for step, following in zip(steps, steps[1:]):
                share = (step["saturated_in_cast"] / RANKS + step["saturated_in_sum"]) / tensor["elements"]
                expected = step["mu"] * (0.25 if share > 0.01 else 2 ** 0.1)
                self.assertAlmostEqual(following["mu"], min(2, max(0.125, expected)), places=12)
        options = found["ablation"]
        self.assertEqual((options["backoff"], options["growth-steps"], options["mu-max"]), (0.25, 10, 2))

    def test_results_depend_neither_on_threads_nor_on_where_gradients_are(self):
        self.ablate_once("again.json", *SHORT, "--threads", "3", "--scratch", ".")
        self.assertEqual(read(self.path("base.json")), read(self.path("again.json")))
        self.nothing_left()

    # Training.

    def test_training_is_that_of_fp8lm_train(self):
        for precision in ("bf16", "fp8-o2"):
            options = [*MODEL, "--precision", precision, "--micro-batch-size", "2", "--train-iters", "8",
                       "--lr", "1e-2", "--lr-warmup-iters", "0"]
            folder = "train-" + precision
            code, _, message = run("train", "--data-path", "t", *options, "--global-batch-size", 2 * RANKS,
                                   "--save", folder, "--eval-interval", "0", cwd=self.folder)
            self.assertEqual(code, 0, message)
            log = [json.loads(line) for line in read(self.path(folder + "/log.jsonl")).decode().splitlines()]
            losses = [line["loss"] for line in log if line["event"] == "step"]
            self.ablate_once("other.json", "--ranks", RANKS, *options, "--ablate-steps", "2", "--measure-steps", "1")
            found = self.load("other.json")
            self.assertEqual(found["step"], 8)
            # Sums of other roundings; the model has learned meanwhile.
            self.assertAlmostEqual(found["loss"], losses[-1], delta=0.02)
            self.assertLess(losses[-1], losses[0] - 0.5)
            linear = next(t for t in found["tensors"] if t["name"] == "layers.0.attention.qkv.weight")
            self.assertEqual(linear["dtype"].lower(), "fp32" if precision == "bf16" else "e4m3")
            # And it goes on from there, with one rank's batch of another size.
            self.ablate_once("loaded.json", "--load", folder, "--ranks", "3", "--micro-batch-size", "3",
                             "--train-iters", "10", "--ablate-steps", "1", "--measure-steps", "1")
            loaded = self.load("loaded.json")
            self.assertEqual((loaded["first_step"], loaded["step"]), (8, 10))
            self.assertLess(loaded["loss"], losses[-1] + 0.3)

    def test_load_needs_steps_that_are_left(self):
        code, _, message = run("train", "--data-path", "t", *MODEL, "--train-iters", "2", "--save", "two",
                               "--eval-interval", "0", "--precision", "bf16", cwd=self.folder)
        self.assertEqual(code, 0, message)
        self.refused(2, "has 2 steps, and --train-iters is 2: expected at least --ablate-steps, 16, more",
                     "--load", "two")
        self.refused(1, "nowhere: there is no such folder", "--load", "nowhere")

    # Output.

    def test_table(self):
        for text in ("native ", "two-shot ", "SNR, dB", "underflow, %", "overflow, %", "block 0", "block 1",
                     "all blocks", "others", "step 8/8  loss "):
            self.assertIn(text, self.out)
        line = next(line for line in self.out.splitlines() if line.startswith("  block 1"))
        figures = [self.reducer(self.base["groups"][1], "native", scaling) for scaling in ("auto", "pre", "post")]
        expected = (["%.2f" % one["snr_db"] for one in figures] +
                    ["%.4f" % (100 * one["underflow"]) for one in figures] +
                    ["%.4f" % (100 * one["overflow"]) for one in figures] + ["%.5f" % figures[0]["mu"]])
        self.assertEqual(line.split()[2:], expected)

    def test_page(self):
        text = read(self.path("base.html")).decode()
        page = Page(text)
        # But for the name of SVG, there is no address in it.
        self.assertEqual(re.findall(r"https?://[^\"]*", text), ["http://www.w3.org/2000/svg"])
        blocks = [chart for chart in page.charts if chart.get("name") == "block"]
        self.assertEqual(len(blocks), 7)
        snr = {series["run"]: series["y"] for chart in blocks[:2] for series in chart["series"]}
        for index, one in enumerate(self.base["groups"][0]["reducers"]):
            self.assertAlmostEqual(snr[index][0], one["snr_db"], delta=1e-4)
        mu = next(chart for chart in page.charts if "name" not in chart)
        self.assertEqual(mu["series"][2]["y"][0], 1)
        self.assertEqual(page.rows, 1 + 6 * 5)
        for name in ("native auto", "two-shot post", "2 blocks of width 32", "num-layers"):
            self.assertIn(name, page.text)
        self.ablate_once("other.json", *ONE, "--output", "title.html", "--title", "<b>&\"")
        self.assertIn("<h1>&lt;b&gt;&amp;&quot;</h1>", read(self.path("title.html")).decode())
        Page(read(self.path("title.html")).decode())

    def test_help(self):
        for arguments in (["ablate", "allreduce", "--help"], ["help", "ablate", "allreduce"]):
            code, out, _ = run(*arguments)
            self.assertEqual(code, 0)
            for text in ("--ranks", "--ablate-steps", "--measure-steps", "--wire-dtype", "--saturation-threshold",
                         "--backoff", "--growth-steps", "--mu-initial", "--mu-min", "--mu-max", "--scratch", "--json",
                         "--output", "--title", "--num-layers", "--load", "--config", "Presets: ", "Exit codes: "):
                self.assertIn(text, out)
            for text in ("--save DIR", "--tensorboard-dir", "--device", "--global-batch-size", "--eval-iters", "--zero-stage",
                         "--data-parallel-size", "--grad-reduce", "Ranks, as mpirun"):
                self.assertNotIn(text, out)
            self.assertLessEqual(max(map(len, out.splitlines())), 120)
            listed = run("ablate", "allreduce", "--nonsense")[2].split("options are ")[1].split(";")[0].split(", ")
            self.assertGreater(len(listed), 40)
            for option in listed:
                self.assertRegex(out, r"\n  %s\b" % option)
        self.assertIn("allreduce", run("ablate", "--help")[1])
        self.assertIn("ablate ", run("--help")[1])
        code, _, message = run("ablate")
        self.assertEqual(code, 2)
        self.assertIn("no ablation given; ablations are allreduce", message)
        code, _, message = run("ablate", "gather")
        self.assertEqual(code, 2)
        self.assertIn("unknown ablation 'gather'", message)

    # Bad input.

    def test_bad_options(self):
        cases = [
            (["--ranks", "1"], "--ranks is '1', expected a whole number from 2 to 1024"),
            (["--ranks", "2000"], "--ranks is '2000', expected a whole number from 2 to 1024"),
            (["--ranks", "x"], "--ranks is 'x'"),
            (["--ablate-steps", "0"], "--ablate-steps is '0'"),
            (["--ablate-steps", "9", "--train-iters", "8"], "--ablate-steps is 9, expected at most --train-iters, 8"),
            (["--ablate-steps", "3", "--measure-steps", "4"],
             "--measure-steps is 4, expected at most --ablate-steps, 3"),
            (["--wire-dtype", "bf16"], "--wire-dtype is 'bf16', expected e4m3 or e5m2"),
            (["--saturation-threshold", "1.5"], "--saturation-threshold is '1.5', expected a number from 0 to 1"),
            (["--backoff", "1"], "--backoff is '1', expected a number from 1e-06 to 0.999999"),
            (["--growth-steps", "0.5"], "--growth-steps is '0.5'"),
            (["--mu-initial", "0"], "--mu-initial is '0'"),
            (["--mu-initial", "32"],
             "--mu-initial is 32, expected a number from --mu-min, 1.52587891e-05, to --mu-max, 16"),
            (["--mu-min", "2"], "--mu-initial is 1, expected a number from --mu-min, 2,"),
            (["--json", ""], "--json is empty"),
            (["--json", "same", "--output", "same"], "--json and --output are both same, expected two files"),
            (["--scratch", ""], "--scratch is empty"),
            (["--precision", "fp9"], "--precision is 'fp9'"),
            (["--save", "x"], "unknown or ambiguous option '--save'"),
            (["--device", "cuda"], "unknown or ambiguous option '--device'"),
            (["--zero-stage", "1"], "unknown or ambiguous option '--zero-stage'"),
            (["--grad-scaling", "pre"], "unknown or ambiguous option '--grad-scaling'"),
            (["--ranks"], "option '--ranks' needs a value"),
            (["more"], "unexpected argument 'more'"),
        ]
        for arguments, text in cases:
            with self.subTest(arguments=arguments):
                self.refused(2, text, *arguments)
        with open(self.path("cuda.json"), "w") as file:
            file.write('{"device": "cuda"}')
        self.refused(2, '"device" is cuda, expected cpu', "--config", "cuda.json")

    def test_no_data(self):
        self.refused(2, "--data-path is missing", data=())
        self.refused(1, "nothing", *ONE, data=("--data-path", "nothing"))
        with open(self.path("broken.bin"), "wb") as file:
            file.write(b"x" * 3000)
        self.refused(1, "broken.bin", *ONE, "--json", "no.json", data=("--data-path", "broken.bin"))
        self.assertFalse(os.path.exists(self.path("no.json")))
        self.nothing_left()

    def test_files_that_cannot_be_written(self):
        for option in ("--json", "--output"):
            out = self.refused(1, "cannot write nowhere/x: No such file", *ONE, option, "nowhere/x")
            # Known before anything is computed.
            self.assertEqual(out, "")
            self.refused(1, "cannot write .: is a directory", *ONE, option, ".")
            self.refused(1, "cannot write /dev/full: is a pipe, socket or device", *ONE, option, "/dev/full")
            with open(self.path("old"), "w") as file:
                file.write("old")
            # The disk is full when it is written.
            self.refused(1, "cannot write old: File too large", *ONE, option, "old", preexec=limit_files(4096))
            self.assertEqual(read(self.path("old")), b"old")
        with open("/dev/full", "w") as full:
            done = subprocess.run([FP8LM, "ablate", "allreduce", "--data-path", "t", *MODEL, *map(str, ONE)],
                                  stdout=full, stderr=subprocess.PIPE, cwd=self.folder, timeout=120)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"cannot write to standard output", done.stderr)
        self.nothing_left()

    def test_gradients_that_have_no_room(self):
        self.refused(1, "nowhere: cannot create a file of ", *ONE, "--scratch", "nowhere")
        self.refused(1, ": File too large", *ONE, "--scratch", ".", preexec=limit_files(100000))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # A model so large that its gradients, 1024 times, are more than all memory.
        words = memory // (1024 * 4 * 32) + 1
        if words < 1 << 20:
            self.refused(1, "MiB of memory: use --scratch, fewer --ranks or a smaller model", "--ranks", "1024",
                         "--vocab-size", words)
        self.nothing_left()

    def test_a_signal_leaves_nothing(self):
        arguments = [FP8LM, "ablate", "allreduce", "--data-path", "t", *MODEL, "--ranks", "2",
                     "--train-iters", "100000", "--log-interval", "1", "--json", "s.json", "--output", "s.html"]
        process = subprocess.Popen(arguments, cwd=self.folder, stdout=subprocess.PIPE)
        for line in process.stdout:
            if line.startswith(b"step 1/"):
                break
        self.assertEqual(len([name for name in os.listdir(self.folder) if name.startswith("s.")]), 2)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(60), -signal.SIGTERM)
        process.stdout.close()
        self.assertEqual([name for name in os.listdir(self.folder) if name.startswith("s.")], [])
        self.nothing_left()


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
