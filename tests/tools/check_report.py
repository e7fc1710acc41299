#!/usr/bin/env python3
"""fp8lm report: the page as a parser sees it, figures computed again here, bad logs by their messages.

Usage: check_report.py FP8LM [--slow]
Needs nothing but Python's own library."""

import html.parser
import json
import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unittest

FP8LM = os.path.abspath(sys.argv[1])
SLOW = "--slow" in sys.argv

VOID = {"meta", "br", "link", "img", "input", "hr"}
# Everything that can bring in something from elsewhere.
LOADING = {"link", "img", "iframe", "object", "embed", "video", "audio", "source", "base", "form", "use", "image"}


class Page(html.parser.HTMLParser):
    """Checks that every tag is closed in its order, and keeps what there is."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open = []
        self.tags = []
        self.text = []
        self.scripts = []
        self.feed(text)
        self.close()
        assert not self.open, "not closed: %s" % self.open

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), (tag, names)
        self.tags.append((tag, dict(attributes), list(self.open)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attributes), ""))

    def handle_startendtag(self, tag, attributes):
        assert "svg" in self.open, "%s closes itself outside SVG" % tag
        self.tags.append((tag, dict(attributes), list(self.open)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, "</%s> in %s" % (tag, self.open)
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif not (self.open and self.open[-1] == "style"):
            self.text.append(data)

    def find(self, tag, **wanted):
        return [a for t, a, _ in self.tags if t == tag and all(a.get(k.rstrip("_")) == v for k, v in wanted.items())]

    def classes(self, tag, name):
        return [a for t, a, _ in self.tags if t == tag and name in (a.get("class") or "").split()]

    def values(self):
        return [json.loads(data) for attributes, data in self.scripts if attributes.get("type") == "application/json"]


def line(event, **fields):
    return json.dumps({"event": event, **fields}) + "\n"


def log(steps=300, seed=1, offset=0.0, fp8=True, spikes=(), skipped=(), precision="fp8-o2"):
    """A log as fp8lm train writes it."""
    r = random.Random(seed)
    memory = {"weights": 1000, "gradients": 1000, "master": 2000, "exp_avg": 1000, "exp_avg_sq": 2000}
    memory.update(activations=5000, workspace=300, optimizer_overhead=40)
    options = {"precision": precision, "seed": seed, "lr": 0.001, "swiglu": False}
    text = line("start", step=0, parameters=1000, threads=2, memory=memory, options=options)
    for step in range(1, steps + 1):
        loss = 3 + 3 * math.exp(-step / 60) + offset + r.gauss(0, 0.02) + (4 if step in spikes else 0)
        text += line(
            "step",
            step=step,
            loss=None if step in skipped else loss,
            lr=1e-3,
            grad_norm=0.5 + r.random(),
            skipped=step in skipped,
            tokens_per_second=1000.0 + step,
            mfu=0.25,
        )
        if step % 100 == 0:
            text += line("validation", step=step, loss=3.5 + offset - step / 1000)
        if fp8 and step % 50 == 0:
            tensors = [{"name": "layer%d" % i, "scale": 2.0**i, "amax": 0.5, "fill": i / 8} for i in range(20)]
            weights = [{"name": "w", "scale": 8, "zero_share": 0.25, "saturated_share": 0.001}]
            text += line("fp8", step=step, tensors=tensors, weights=weights)
    return text + line("end", step=steps, reason="done", peak_resident_bytes=3 << 20)


class Reports(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, *parts):
        return os.path.join(self.folder.name, *parts)

    def run_folder(self, name, text):
        os.makedirs(self.path(name), exist_ok=True)
        with open(self.path(name, "log.jsonl"), "wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
        return self.path(name)

    def run_tool(self, *arguments):
        done = subprocess.run([FP8LM, "report", *arguments], capture_output=True, cwd=self.folder.name, timeout=300)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    def report(self, *arguments, warnings=""):
        code, out, err = self.run_tool("--output", "page.html", *arguments)
        self.assertEqual((code, err), (0, warnings))
        self.assertRegex(out, r"\Apage.html: \d+ runs?\n\Z")
        # Nothing but the page is left of the writing.
        self.assertEqual([f for f in os.listdir(self.folder.name) if f.startswith("page")], ["page.html"])
        with open(self.path("page.html"), encoding="utf-8") as file:
            self.source = file.read()
        return Page(self.source)

    def refuse(self, expected, *arguments, code=1):
        result, out, err = self.run_tool("--output", "page.html", *arguments)
        self.assertEqual((result, out), (code, ""), err)
        self.assertIn(expected, err)
        for message in err.splitlines():
            self.assertTrue(message.startswith("fp8lm report: "), message)
        self.assertFalse([f for f in os.listdir(self.folder.name) if f.startswith("page")])


class Structure(Reports):
    def test_one_run(self):
        page = self.report(self.run_folder("a", log()))
        sections = [a["id"] for a in page.find("section")]
        self.assertEqual(
            sections,
            ["runs", "loss", "optimisation", "memory", "throughput", "fp8", "warnings", "configuration"],
        )
        titles = re.findall(r"<figcaption><b>(.*?)</b>", self.source)
        self.assertEqual(
            titles,
            ["Loss", "Validation loss", "Learning rate", "Gradient norm", "Tokens per second", "MFU", "Saturation",
             "Underflow", "Fill"],
        )
        self.assertEqual(len(page.values()), len(titles))
        self.assertIn("a step whose values have grown fills more than 1", self.source)
        # Every drawing has a name for those who don't see it, or is hidden from them.
        for svg in page.find("svg"):
            self.assertTrue(svg.get("aria-label") or svg.get("aria-hidden") == "true", svg)
        self.assertNotIn("nan", " ".join(page.text).lower().split())

    def test_self_contained(self):
        page = self.report(self.run_folder("a", log()))
        for tag, attributes, _ in page.tags:
            self.assertNotIn(tag, LOADING)
            for name in ("src", "srcset", "xlink:href", "style", "onclick"):
                self.assertNotIn(name, attributes)
            if "href" in attributes:
                self.assertTrue(attributes["href"].startswith("#"))
        self.assertEqual(len(page.find("meta", http_equiv_="Content-Security-Policy")), 0)
        policies = [a for t, a, _ in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
        self.assertTrue(policies[0]["content"].startswith("default-src 'none';"))
        for address in re.findall(r"https?://[^\s\"'<)]*", self.source):
            # The name of SVG for the script that makes dots; no address that is fetched.
            self.assertEqual(address, "http://www.w3.org/2000/svg")
        style = self.source[self.source.index("<style>") : self.source.index("</style>")]
        self.assertNotIn("url(", style)
        self.assertNotIn("@import", style)

    def test_several_runs(self):
        runs = [self.run_folder(name, log(seed=i, offset=i / 100, fp8=i > 0)) for i, name in enumerate("abc")]
        page = self.report(*runs)
        titles = re.findall(r"<figcaption><b>(.*?)</b>", self.source)
        self.assertIn("Loss less the first run’s", titles)
        buttons = [a for a in page.find("button") if "data-run" in a]
        self.assertEqual([b["data-run"] for b in buttons], ["0", "1", "2"])
        loss = page.values()[0]
        self.assertEqual(
            [(s["run"], s["kind"]) for s in loss["series"]],
            [(r, kind) for kind in ("training", "smoothed", "validation") for r in range(3)],
        )
        # Differences at step 300: 0.01 and 0.02 of 3.2.
        self.assertIn("+0.0100, +0.31\u202f%", self.source.replace("&#8239;", "\u202f"))
        self.assertIn("+0.0200, +0.63\u202f%", self.source.replace("&#8239;", "\u202f"))
        # Settings: precision is the same, the seed isn't.
        table = self.source[self.source.index('id="configuration"') :]
        self.assertLess(table.index(">seed<"), table.index("the same in all runs"))
        self.assertGreater(table.index(">precision<"), table.index("the same in all runs"))
        # Every run of a drawing can be hidden.
        for tag, attributes, _ in page.tags:
            if "data-run" in attributes:
                self.assertIn(attributes["data-run"], "012")

    def test_many_runs(self):
        runs = [self.run_folder("run%d" % i, log(120, seed=i)) for i in range(30)]
        page = self.report(*runs)
        looks = [(a["class"], a["data-run"]) for a in page.classes("g", "run")]
        pairs = {run: re.search(r"c(\d) d(\d)", look).groups() for look, run in looks}
        self.assertEqual(len({pairs[str(run)] for run in range(24)}), 24)

    def test_figures(self):
        text = log(steps=200, fp8=False)
        page = self.report(self.run_folder("a", text))
        losses = [json.loads(l)["loss"] for l in text.splitlines() if '"step", "step"' in l]
        loss = page.values()[0]["series"]
        self.assertEqual(loss[0]["x"], list(range(1, 201)))
        for drawn, logged in zip(loss[0]["y"], losses):
            self.assertAlmostEqual(drawn, logged, delta=1e-5 * logged)
        # The mean of all steps with weights of exp(-distance/1), as (200 - 1) / 100 rounds down to 1.
        weights = [math.exp(-(200 - step)) for step in range(1, 201)]
        mean = sum(w * l for w, l in zip(weights, losses)) / sum(weights)
        self.assertAlmostEqual(loss[1]["y"][-1], mean, delta=1e-4)
        self.assertIn("<td>%.4f</td>" % mean, self.source)
        self.assertIn("<td>1100</td>", self.source)  # the median of 1001 to 1200 is 1100.5
        self.assertIn("25.0 %", self.source)
        memory = self.source[self.source.index('id="memory"') :]
        self.assertIn("model states 7.00 B/param", memory)
        self.assertIn("3.00 B/param", memory)  # moments
        self.assertIn("0.34 B/param", memory)  # workspace and overhead
        self.assertIn("3.00&nbsp;MiB", memory)  # peak

    def test_same_bytes(self):
        run = self.run_folder("a", log())
        self.report(run)
        first = self.source
        self.report(run)
        self.assertEqual(first, self.source)
        code, out, err = self.run_tool("--output", "-", run)
        self.assertEqual((code, out, err), (0, first, ""))

    def test_no_smoothing(self):
        page = self.report("--smoothing", "0", "--title", "T & <U>", self.run_folder("a", log()))
        kinds = [s["kind"] for s in page.values()[0]["series"]]
        self.assertEqual(kinds, ["training", "validation"])
        self.assertIn("<title>T &amp; &lt;U&gt;</title>", self.source)
        self.assertFalse(page.find("button", id="raw"))

    def test_tensors(self):
        run = self.run_folder("a", log())
        page = self.report(run)
        self.assertEqual(self.source.count('class="spark"'), 20 * 3 + 3)
        # Fullest first, and all but a few folded.
        self.assertLess(self.source.index(">layer19<"), self.source.index(">layer3<"))
        self.assertIn("12 more tensors", self.source)
        self.report("--tensors", "5", run)
        self.assertIn("16 of 21 are not shown", self.source)
        self.report("--tensors", "0", run)
        self.assertNotIn('class="spark"', self.source)
        self.assertEqual(page.classes("table", "tensors")[0]["class"], "tensors")

    def test_missing_fields(self):
        minimal = {
            "loss alone": line("step", step=1, loss=2.0),
            "no names": '{"step": 3, "loss": 2}\n',
            "validation alone": line("validation", step=10, loss=2.5),
            "no loss": line("step", step=1, lr=0.1) + line("step", step=2, lr=0.2),
            "nulls": line("step", step=1, loss=None, lr=None, grad_norm=None, mfu=None, tokens_per_second=None),
            "no end of the line": line("step", step=1, loss=2.0).rstrip("\n"),
            "CRLF and blank lines": "\r\n \r\n" + line("step", step=1, loss=2.0).replace("\n", "\r\n") + "\n",
            "unknown fields": '{"event":"step","step":1,"loss":2,"new":{"a":[1,"x"]}}\n{"future":[]}\n',
            "fp8 without figures": line("step", step=1, loss=2) + line("fp8", step=1, tensors=[{"name": "a"}]),
            "memory without parameters": line("step", step=1, loss=2) + line("memory", weights=5),
            "no parameters": line("step", step=1, loss=2) + line("memory", weights=5, parameters=0),
        }
        for name, text in minimal.items():
            with self.subTest(name):
                page = self.report(self.run_folder("a", text))
                for values in page.values():
                    self.assertTrue(any(y is not None for s in values["series"] for y in s["y"]))
                for absent in ("nan", "inf"):
                    self.assertNotIn(absent, " ".join(page.text).lower().split())
        self.run_folder("full", log())
        for name, text in minimal.items():
            with self.subTest(name + ", beside a full one"):
                self.report(self.path("full"), self.run_folder("a", text))
                self.report(self.path("a"), self.path("full"))

    def test_other_names(self):
        text = (
            '{"type":"config","precision":"bf16"}\n{"type":"memory","parameters":10,"moments":80}\n'
            '{"type":"step","step":1,"loss":2,"learning_rate":0.125,"gradient_norm":3}\n{"type":"eval","step":1,"loss":2.5}\n'
            '{"type":"fp8","step":1,"tensors":[{"name":"t","saturation":0.5,"underflow":0.25}]}\n'
        )
        self.report(self.run_folder("a", text))
        titles = re.findall(r"<figcaption><b>(.*?)</b>", self.source)
        self.assertEqual(titles, ["Loss", "Validation loss", "Learning rate", "Gradient norm", "Saturation", "Underflow"])
        self.assertIn("8.00 B/param", self.source)

    def test_names(self):
        run = self.run_folder("a", log(20))
        other = self.run_folder("x/a", log(20))
        page = self.report(run, other, os.path.join(run, "log.jsonl") + "")
        # Three of one name: each by its path.
        text = "".join(page.text)
        self.assertIn(os.path.join(run, "log.jsonl"), text)
        self.assertIn(os.path.join(other, "log.jsonl"), text)
        os.rename(os.path.join(run, "log.jsonl"), self.path("mine.jsonl"))
        self.report("mine.jsonl", other + "//")
        self.assertIn("<span>mine</span>", self.source)
        self.assertIn("<span>a</span>", self.source)


class Escaping(Reports):
    EVIL = "</script><script>alert(1)</script><!-- \"'& <b>"

    def test_strings(self):
        text = line("start", options={self.EVIL: self.EVIL, "precision": self.EVIL}, **{self.EVIL: [self.EVIL]})
        text += line("step", step=1, loss=1.0)
        text += line("fp8", step=1, tensors=[{"name": self.EVIL, "scale": 1}])
        text += line(self.EVIL, step=1, message=self.EVIL, other=self.EVIL)
        text += '{"event":"step","step":2,"loss":"<b>"}\n'
        name = "<i>&\"'"
        path = self.run_folder(name, text)
        message = "\"loss\": JSON, byte 32: expected a number, found '\"'"
        warning = "fp8lm report: warning: %s/log.jsonl: line 5: %s\n" % (path, message)
        page = self.report("--title", self.EVIL, path, warnings=warning)
        tags = {tag for tag, _, _ in page.tags}
        self.assertFalse(tags & {"b", "i"} - {"b"})
        self.assertEqual([a for a, _ in page.scripts if a.get("type") != "application/json"], [{}])
        self.assertNotIn("alert(1)<", self.source)
        self.assertNotIn("<!--", self.source)
        shown = "".join(page.text)
        self.assertGreaterEqual(shown.count(self.EVIL), 7)
        self.assertIn(name, shown)
        self.assertIn("line 5: " + message, shown)

    def test_control_characters(self):
        text = '{"event":"start","a":"\\u001b[31m\\u0000\\u009b\\u2028"}\n' + line("step", step=1, loss=1)
        self.report(self.run_folder("a", text))
        self.assertNotIn("\x1b", self.source)
        self.assertIn("\\u001b[31m\ufffd\\u009b", self.source)

    def test_bytes_in_a_path(self):
        run = os.fsencode(self.path("a")) + b"\xff\x1b"
        os.mkdir(run)
        with open(run + b"/log.jsonl", "w") as file:
            file.write(line("step", step=1, loss=1))
        self.report(os.fsdecode(run))
        self.assertIn("a\\xff\\u001b", self.source)


class Fill(Reports):
    def test_without_it_nothing_is_explained(self):
        self.report(self.run_folder("a", log().replace('"fill"', '"full"')))
        self.assertIn("Saturation", self.source)
        self.assertNotIn("fills more than 1", self.source)


class Warnings(Reports):
    def test_skipped_and_spikes(self):
        self.report(self.run_folder("a", log(skipped=(41, 42, 43, 90), spikes=(150, 200))))
        part = self.source[self.source.index('id="warnings"') :]
        self.assertIn("<li><b>Skipped</b>: steps 41 to 43, 90</li>", part)
        self.assertRegex(part, r"<li><b>Spike of the loss</b>: step 150 \(7\.\d+ after a mean of 3\.\d+\); step 200 \(")
        self.assertNotIn("not finite", part)
        self.assertIn('<a href="#warnings-0">6</a>', self.source)

    def test_nothing(self):
        self.report(self.run_folder("a", log()))
        self.assertIn("<td>none</td>", self.source)
        self.assertNotIn("Spike", self.source)

    def test_spikes_of_the_log(self):
        text = "".join(line("step", step=s, loss=9.0 if s == 50 else 1.0, spike=s == 60) for s in range(1, 101))
        self.report(self.run_folder("a", text))
        self.assertIn("Spike of the loss</b>: step 60 (", self.source)
        self.assertNotIn("step 50 (", self.source)

    def test_loss_not_finite(self):
        text = line("step", step=1, loss=1) + line("step", step=2, loss=None) + line("step", step=3)
        self.report(self.run_folder("a", text))
        self.assertIn("<li><b>Loss not finite</b>: step 2</li>", self.source)

    def test_resumed(self):
        text = "".join(line("step", step=s, loss=1.0) + line("validation", step=s, loss=1.0) for s in range(1, 11))
        text += "".join(line("step", step=s, loss=2.0) for s in range(6, 9))
        page = self.report(self.run_folder("a", text))
        loss = page.values()[0]["series"]
        self.assertEqual(loss[0]["x"], list(range(1, 9)))
        self.assertEqual(loss[0]["y"], [1] * 5 + [2] * 3)
        self.assertEqual(loss[1]["x"], list(range(1, 6)))
        self.assertIn("line 21 goes back from step 10 to step 6", self.source)


class BadInput(Reports):
    def test_usage(self):
        for arguments, expected in (
            ([], "no run given; see 'fp8lm report --help'"),
            (["--smoothing", "-1", "a"], "--smoothing is '-1', expected a whole number from 0 to 1000000000"),
            (["--tensors", "x", "a"], "--tensors is 'x'"),
            (["--output"], "option '--output' needs a value"),
            (["--colour", "a"], "unknown or ambiguous option '--colour'"),
        ):
            code, out, err = self.run_tool(*arguments)
            self.assertEqual((code, out), (2, ""))
            self.assertIn(expected, err)
        code, out, err = self.run_tool("--help")
        self.assertEqual((code, err), (0, ""))
        for option in ("--output", "--title", "--smoothing", "--tensors", "--strict"):
            self.assertIn(option, out)

    def test_files(self):
        os.mkdir(self.path("empty"))
        self.refuse("empty/log.jsonl: cannot open the file: No such file or directory", self.path("empty"))
        self.refuse("missing: cannot open the file: No such file or directory", "missing")
        os.makedirs(self.path("odd", "log.jsonl"))
        self.refuse("odd/log.jsonl: is a directory, expected a regular file", self.path("odd"))
        # Each of several is named.
        good = self.run_folder("good", log(10))
        code, out, err = self.run_tool("one", good, "two")
        self.assertEqual((code, out), (1, ""))
        self.assertEqual(err.count("cannot open the file"), 2)

    def test_logs(self):
        cases = {
            b"": "is empty",
            b"\n \n": "holds no step and no evaluation in 2 lines",
            b"\0\0\0\n": "line 1: JSON, byte 0: expected an object, found byte 0x00",
            b"hello\n": "holds no step and no evaluation; line 1: JSON, byte 0: expected an object, found 'h'",
            b"{": "in 1 line, of which the last is cut off",
            b"\x93NUMPY\x01\x00\n": "found byte 0x93",
            b'{"event":"start"}\n': "holds no step and no evaluation in 1 line",
            b"[1]\n": "expected an object, found '['",
        }
        for text, expected in cases.items():
            with self.subTest(text):
                self.refuse("a/log.jsonl: ", self.run_folder("a", text))
                self.refuse(expected, self.path("a"))

    BROKEN = {
        '{"event":"step","step":-1,"loss":1}': "\"step\": JSON, byte 23: expected a whole number of at least 0, found '-'",
        '{"event":"step","step":1.5,"loss":1}': "expected a whole number without fraction or exponent",
        '{"event":"step","step":9007199254740993}': '"step": step 9007199254740993 is beyond 2^53',
        '{"event":"step","loss":1}': '"step" is missing',
        '{"event":"step","step":2,"loss":"1"}': '"loss": JSON, byte 32: expected a number',
        '{"event":"step","step":2,"loss":NaN}': '"loss": JSON, byte 32: expected a number, found \'N\'',
        '{"event":"step","step":2,"loss":1e999}': '"loss": JSON, byte 32: expected a number of less than 64 characters',
        '{"event":"step","step":2,"skipped":1}': '"skipped": JSON, byte 35: expected true or false',
        '{"event":"step","step":2} x': "expected the end of the text, found 'x'",
        '{"event":"step","step":2': "expected ',' or '}', found the end",
        '{"event":"fp8","step":2,"tensors":{}}': '"tensors": JSON, byte 34: expected an array',
        '{"event":"fp8","step":2,"tensors":[{"scale":1}]}': '"tensors": a tensor without "name"',
        '{"event":"fp8","step":2,"tensors":[{"name":"a","scale":"b"}]}': "expected a number",
        '{"event":"start","memory":{"weights":"x"}}': '"memory": JSON, byte 37: expected a number',
        '{"event":"start","x":' + "[" * 100 + "]" * 100 + "}": "nested deeper than 64 levels",
        '{"event":"st\udcffep"}': "expected UTF-8, found byte 0xff",
        '{"event":"step","step":2,"loss":1,"loss":9}': 'the key "loss" is there twice',
        '{"event":"step","step":2,"loss":1,"l\\u006fss":1}': 'the key "loss" is there twice',
        '{"event":"step","event":"step","step":2,"loss":1}': 'the key "event" is there twice',
        '{"event":"fp8","step":2,"tensors":[{"name":"a","scale":1,"name":"b"}]}': 'the key "name" is there twice',
        '{"event":"start","options":{"lr":1,"x":[{"y":{"z":1,"z":1}}]}}': 'the key "z" is there twice',
        '{"event":"other",' + "".join('"%d":0,' % i for i in range(1000)) + '"7":0}': 'the key "7" is there twice',
        "": None,
        # Of different objects.
        '{"event":"start","step":0,"memory":{"step":{"step":1},"event":2},"x":[{"a":1},{"a":1}]}': None,
    }

    def test_broken_lines(self):
        good = line("step", step=1, loss=1.0)
        for broken, expected in self.BROKEN.items():
            with self.subTest(broken):
                text = (good + broken + "\n" + line("step", step=5, loss=2.0)).encode(errors="surrogateescape")
                run = self.run_folder("a", text)
                code, out, err = self.run_tool("--output", "page.html", run)
                self.assertEqual(code, 0)
                if expected is None:
                    self.assertEqual(err, "")
                else:
                    self.assertTrue(err.startswith("fp8lm report: warning: %s/log.jsonl: line 2: " % run), err)
                    self.assertIn(expected, err)
                    self.assertEqual(err.count("\n"), 1)
                with open(self.path("page.html"), encoding="utf-8") as file:
                    page = Page(file.read())
                # Without effect.
                self.assertEqual(page.values()[0]["series"][0]["x"], [1, 5])
                os.unlink(self.path("page.html"))
                if expected is not None:
                    self.refuse("a/log.jsonl: line 2: ", "--strict", run)

    def test_many_broken_lines(self):
        run = self.run_folder("a", line("step", step=1, loss=1) + "x\n" * 100)
        code, _, err = self.run_tool(run)
        self.assertEqual(code, 0)
        self.assertEqual(err.count("\n"), 9)
        self.assertIn("92 more lines cannot be read", err)
        with open(self.path("report.html"), encoding="utf-8") as file:
            self.assertIn("100 lines of the log could not be read", file.read())

    def test_cut_off(self):
        run = self.run_folder("a", line("step", step=1, loss=1.0) + '{"event":"step","st')
        warning = "fp8lm report: warning: %s/log.jsonl: line 2 is cut off: the run is still writing it, or died\n" % run
        self.report(run, warnings=warning)
        self.assertIn("The last line is cut off", self.source)
        self.report("--strict", run, warnings=warning)

    def test_long_line(self):
        text = line("step", step=1, loss=1.0) + "x" * (17 << 20) + "\n" + line("step", step=2, loss=1.0)
        code, _, err = self.run_tool("--output", "page.html", self.run_folder("a", text))
        self.assertEqual(code, 0)
        self.assertIn("line 2: longer than 16777216 bytes", err)
        text = '{"event":"step","step":1,"loss":1,"x":"%s"}\n' % ("x" * (5 << 20))
        self.report(self.run_folder("b", text))

    def test_extreme_values(self):
        for values in ([1e308, -1e308, 0.5], [5e-324, 1.0, 1e90], [0.0, 0.0, 0.0], [-3.0, -3.0, -3.0], [1e15, 1e15 + 1, 1e15]):
            with self.subTest(values):
                text = "".join(
                    line("step", step=1 + i, loss=v, lr=v, grad_norm=v, mfu=v, tokens_per_second=v)
                    + line("fp8", step=1 + i, tensors=[{"name": "t", "scale": v, "amax": v, "saturation": v}])
                    for i, v in enumerate(values)
                )
                page = self.report(self.run_folder("a", text))
                for path in page.find("path"):
                    self.assertRegex(path.get("d", ""), r"\A[MLHVmlhvaz0-9. -]*\Z")
                    for number in re.findall(r"\d+(?:\.\d+)?", path.get("d", "")):
                        self.assertLess(float(number), 2000)
        text = line("step", step=0, loss=1) + line("step", step=2**53, loss=2)
        self.report(self.run_folder("a", text))

    def test_output(self):
        run = self.run_folder("a", log(10))
        os.mkdir(self.path("folder"))
        code, _, err = self.run_tool("--output", "folder", run)
        self.assertEqual(code, 1)
        self.assertIn("cannot write folder: is a directory, expected a file", err)
        code, _, err = self.run_tool("--output", "nowhere/page.html", run)
        self.assertEqual(code, 1)
        self.assertIn("cannot write nowhere/page.html: No such file or directory", err)
        code, _, err = self.run_tool("--output", "/dev/full", run)
        self.assertEqual(code, 1)
        self.assertIn("cannot write /dev/full: is a pipe, socket or device, expected a file", err)
        with open("/dev/full", "w") as full:
            done = subprocess.run([FP8LM, "report", "--output", "-", run], stdout=full, stderr=subprocess.PIPE, timeout=60)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"cannot write to standard output", done.stderr)
        # One that is there stays where the new one fails, and has the permissions of new files where it doesn't.
        self.report(run)
        self.assertEqual(os.stat(self.path("page.html")).st_mode & 0o777, 0o666 & ~self.mask())
        before = self.source
        code, _, _ = self.run_tool("--output", "page.html", "missing")
        self.assertEqual(code, 1)
        with open(self.path("page.html"), encoding="utf-8") as file:
            self.assertEqual(file.read(), before)

    def test_file_too_large(self):
        run = self.run_folder("a", log(300))
        done = subprocess.run([FP8LM, "report", "--output", "page.html", run], capture_output=True, timeout=60,
                              cwd=self.folder.name,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)))
        self.assertEqual((done.returncode, done.stderr), (1, b"fp8lm report: cannot write page.html: File too large\n"))
        self.assertEqual(os.listdir(self.folder.name), ["a"])

    def test_signals(self):
        # Long enough for the signal to come within.
        runs = [self.run_folder("run-%d" % i, log(3000, seed=i)) for i in range(12)]
        before = sorted(os.listdir(self.folder.name))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            for attempt in range(20):
                process = subprocess.Popen([FP8LM, "report", "--output", "page.html", *runs], cwd=self.folder.name,
                                           stdout=subprocess.DEVNULL)
                while process.poll() is None and not any("page.html" in name for name in os.listdir(self.folder.name)):
                    pass
                process.send_signal(number)
                code = process.wait(60)
                left = sorted(os.listdir(self.folder.name))
                if code == -number:
                    break
                # It was done sooner.
                self.assertEqual(code, 0)
                os.unlink(self.path("page.html"))
            self.assertIn(left, (before, sorted([*before, "page.html"])))
            self.assertEqual(code, -number)
            if left != before:
                os.unlink(self.path("page.html"))

    @staticmethod
    def mask():
        mask = os.umask(0)
        os.umask(mask)
        return mask

    def test_help(self):
        done = subprocess.run([FP8LM, "help", "report"], capture_output=True, timeout=60)
        self.assertEqual(done.returncode, 0)
        self.assertTrue(done.stdout.startswith(b"Usage: fp8lm report "))


class Thinning(Reports):
    def test_spikes_stay(self):
        count = 50000
        text = "".join(
            '{"event":"step","step":%d,"loss":%s}\n' % (s, {777: "99.5", 31234: "-7.25"}.get(s, "2.5")) for s in range(1, count)
        )
        page = self.report(self.run_folder("a", text))
        raw = page.values()[0]["series"][0]
        self.assertLess(len(raw["x"]), 2500)
        self.assertEqual(raw["x"][0], 1)
        self.assertEqual(raw["x"][-1], count - 1)
        self.assertEqual(raw["x"], sorted(raw["x"]))
        values = dict(zip(raw["x"], raw["y"]))
        self.assertEqual((values[777], values[31234]), (99.5, -7.25))
        self.assertLess(len(self.source), 400000)


@unittest.skipUnless(SLOW, "slow")
class Large(Reports):
    def test_a_million_steps(self):
        os.mkdir(self.path("a"))
        with open(self.path("a", "log.jsonl"), "w") as file:
            for step in range(1, 1000001):
                file.write(
                    '{"event":"step","step":%d,"loss":%.5f,"lr":0.001,"grad_norm":0.5,"skipped":false,"tokens_per_second":9000.5,"mfu":0.4}\n'
                    % (step, 3 + 1 / step)
                )
        start = time.monotonic()
        self.report(self.path("a"))
        self.assertLess(time.monotonic() - start, 60)
        self.assertLess(len(self.source), 1000000)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + (["Large"] if SLOW else []))
