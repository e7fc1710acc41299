#!/usr/bin/env python3
"""fp8lm data against the package tokenizers: train-bpe writes the files that ByteLevelBPETokenizer writes, to the byte, and
tokenize gives the same tokens, on the King James Bible and on text made to be difficult.

Usage: test_tokenizers.py FP8LM KJV.TXT.XZ [--speed]. Exits with 77 (skipped) where the package is missing."""

import array
import io
import json
import lzma
import os
import random
import subprocess
import sys
import tempfile
import time
import unittest

# One thread beside one thread, for --speed.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
try:
    from tokenizers import AddedToken, ByteLevelBPETokenizer, pre_tokenizers
except ImportError as missing:
    print("skipped: %s; see tests/interop/requirements.txt" % missing)
    sys.exit(77)

FP8LM = sys.argv[1]
KJV = lzma.open(sys.argv[2]).read().decode()
END = "<|endoftext|>"


def run(*arguments, text=None):
    done = subprocess.run([FP8LM, "data", *arguments], input=text, capture_output=True, timeout=600)
    if done.returncode:
        raise AssertionError("%s: exit status %d, %s" % (arguments[0], done.returncode, done.stderr.decode()))
    return done.stdout


def read_shard(path):
    with open(path, "rb") as file:
        header = array.array("i", file.read(1024))
        tokens = array.array("H" if header[0] == 20240520 else "I", file.read())
    assert (header[0], header[1]) in ((20240520, 1), (20240801, 7)) and header[2] == len(tokens)
    return tokens.tolist()


def code_point(generator):
    kind = generator.random()
    if kind < 0.3:
        return generator.randrange(0x20, 0x7F)
    if kind < 0.4:
        return generator.choice(b"\0\t\n\v\f\r\x1c\x1d\x1e\x1f \x7f")
    if kind < 0.5:
        return generator.choice(
            [0x85, 0xA0, 0x1680, 0x180E, 0x2000, 0x200A, 0x200B, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF, 0xFFFD]
        )
    if kind < 0.6:
        return generator.randrange(0xA0, 0x600)
    if kind < 0.7:
        return generator.choice(
            [
                generator.randrange(0x4E00, 0xA000),
                generator.randrange(0xAC00, 0xD7A4),
                generator.randrange(0x900, 0xE00),
            ]
        )
    if kind < 0.8:
        return generator.choice(
            [
                generator.randrange(0x1F300, 0x1FB00),
                0x200D,
                0xFE0F,
                0x1F3FB,
                0x20E3,
                generator.randrange(0x1F1E6, 0x1F200),
            ]
        )
    while True:
        c = generator.randrange(0x110000)
        if not 0xD800 <= c < 0xE000:
            return c


EMOJI = [
    "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f1ea\U0001f1fa",
    "1\ufe0f\u20e3",
    "\U0001f44d\U0001f3fd",
    "\u2764\ufe0f",
]
PIECES = [
    "don't",
    "we'll",
    "I'VE",
    "they're'd",
    "''s",
    "'tis",
    " 's",
    "x=1;",
    "  \n\n  ",
    "\r\n",
    "\t\tif (a < b) {",
    "3.14159",
    "2026-11-30",
    "https://example.org/a?b=%20c",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "na\u00efve",
    "e\u0301",
    "\u0939\u093f\u0928\u094d\u0926\u0940",
    "\u00bd\u00b2\u2167\u0967",
    END,
    "<|end",
    "oftext|>",
    "\ud55c\uad6d\uc5b4",
    " \u00a0 ",
    "\u3000",
]


def mixed_text(generator, size):
    words = KJV[:400000].split(" ")
    out = io.StringIO()
    while out.tell() < size:
        kind = generator.random()
        if kind < 0.5:
            start = generator.randrange(len(words) - 40)
            out.write(" ".join(words[start : start + generator.randrange(1, 40)]))
        elif kind < 0.65:
            out.write("".join(chr(code_point(generator)) for _ in range(generator.randrange(1, 30))))
        elif kind < 0.8:
            out.write(generator.choice(PIECES))
        elif kind < 0.9:
            out.write(generator.choice(EMOJI) * generator.randrange(1, 4))
        else:
            out.write(
                generator.choice(" \n\t\u00a0ab1!\u4e00") * generator.choice([1, 2, 3, 23, 24, 25, 47, 48, 49, 50, 300])
            )
        out.write(generator.choice(["", " ", " ", "\n", "  ", "\n\n"]))
    return out.getvalue()


def broken_bytes(generator, text):
    """Text with bytes changed, taken out and put in."""
    data = bytearray(text.encode())
    for _ in range(len(data) // 20):
        place = generator.randrange(len(data))
        kind = generator.random()
        if kind < 0.5:
            data[place] = generator.randrange(256)
        elif kind < 0.75:
            del data[place : place + generator.randrange(1, 4)]
        else:
            data[place:place] = generator.choice(
                [
                    b"\xf0\x9f",
                    b"\xe2\x82",
                    b"\xc0\xaf",
                    b"\xed\xa0\x80",
                    b"\xf4\x90\x80\x80",
                    b"\xff\xfe",
                    b"\x80",
                    b"\xe0\x80\x80",
                    b"\xf8\x88",
                ]
            )
    return bytes(data)


class Tokenizers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.generator = random.Random(20240520)
        cls.mixed = mixed_text(cls.generator, 1500000)
        cls.models = {}
        for name, text, size in (("kjv", KJV, 8192), ("mixed", cls.mixed, 20000)):
            model = ByteLevelBPETokenizer()
            model.train_from_iterator(
                [text], vocab_size=size, min_frequency=2, special_tokens=[END], show_progress=False
            )
            folder = cls.path(name)
            os.mkdir(folder)
            model.save_model(folder)
            # Without the special token, which the trained object looks for in the text.
            cls.models[name] = ByteLevelBPETokenizer(folder + "/vocab.json", folder + "/merges.txt")

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    @classmethod
    def path(cls, name):
        return os.path.join(cls.temporary.name, name)

    def write(self, name, data):
        with open(self.path(name), "wb") as file:
            file.write(data)
        return self.path(name)

    def model_options(self, name):
        return [
            "--tokenizer",
            "gpt2",
            "--vocab-file",
            self.path(name) + "/vocab.json",
            "--merge-file",
            self.path(name) + "/merges.txt",
        ]

    def tokenize(self, model, *arguments, text=None):
        prefix = self.path("out")
        run("tokenize", *self.model_options(model), "--output-prefix", prefix, "--overwrite", *arguments, text=text)
        return read_shard(prefix + "_train_000000.bin")

    def compare(self, tokens, expected, what):
        if tokens != expected:
            first = next(
                (i for i, (a, b) in enumerate(zip(tokens, expected)) if a != b), min(len(tokens), len(expected))
            )
            self.fail(
                "%s: token %d differs: %s, expected %s"
                % (what, first, tokens[first : first + 5], expected[first : first + 5])
            )

    def compare_files(self, folder, expected):
        for name in ("vocab.json", "merges.txt"):
            with open(os.path.join(folder, name), "rb") as ours, open(os.path.join(expected, name), "rb") as theirs:
                self.assertEqual(ours.read(), theirs.read(), name)

    def test_text(self):
        for model in self.models:
            for name, text in (("kjv", KJV), ("mixed", self.mixed), ("fresh", mixed_text(random.Random(7), 1000000))):
                path = self.write("text.txt", text.encode())
                expected = self.models[model].encode(text).ids
                for threads in ("1", "3"):
                    self.compare(
                        self.tokenize(model, "--threads", threads, path), expected, "%s with %s" % (name, model)
                    )
                self.assertEqual(
                    run("decode", *self.model_options(model), self.path("out_train_000000.bin")), text.encode()
                )

    def test_every_code_point(self):
        # As a neighbour of a letter, a number, another character, white space and itself.
        # Of the planes that have neither letters nor numbers, every 61st is enough.
        everything = [chr(c) for c in range(0x40000) if not 0xD800 <= c < 0xE000]
        everything += [chr(c) for c in range(0x40000, 0x110000, 61)]
        for start in range(0, len(everything), 65536):
            text = "".join("a%s1%s!%s %s\n%s%s" % ((c,) * 6) for c in everything[start : start + 65536])
            self.compare(
                self.tokenize("mixed", "-", text=text.encode()),
                self.models["mixed"].encode(text).ids,
                "from U+%04X on" % ord(everything[start]),
            )

    def test_broken_utf8(self):
        for seed in range(4):
            generator = random.Random(seed)
            data = broken_bytes(generator, mixed_text(generator, 300000))
            expected = self.models["mixed"].encode(data.decode(errors="replace")).ids
            self.compare(self.tokenize("mixed", "-", text=data), expected, "seed %d" % seed)
            # Kept bytes come back, and are divided into words as U+FFFD would be: as many words, other tokens.
            self.tokenize("mixed", "--invalid-utf8", "keep", "-", text=data)
            self.assertEqual(run("decode", *self.model_options("mixed"), self.path("out_train_000000.bin")), data)

    def test_long_words(self):
        generator = random.Random(3)
        for text in (
            "a" * 100000,
            "".join(generator.choice("abcde") for _ in range(100000)),
            " " * 70000 + "x",
            "=-" * 50000,
            "\u4e00" * 50000,
            "".join(generator.choice(KJV) for _ in range(100000)).replace(" ", ""),
        ):
            for model in self.models:
                self.compare(
                    self.tokenize(model, "-", text=text.encode()), self.models[model].encode(text).ids, text[:10]
                )

    def test_special_token(self):
        model = ByteLevelBPETokenizer(self.path("mixed") + "/vocab.json", self.path("mixed") + "/merges.txt")
        model.add_special_tokens([AddedToken(END, normalized=False)])
        generator = random.Random(5)
        text = "".join(
            mixed_text(generator, generator.randrange(1, 2000))
            + generator.choice(["", " ", "  \n"])
            + END
            + generator.choice(["", "\n\n", END[:7]])
            for _ in range(500)
        )
        tokens = self.tokenize("mixed", "--parse-special", "-", text=text.encode())
        self.compare(tokens, model.encode(text).ids, "special")
        self.assertIn(0, tokens)
        self.assertNotIn(0, self.tokenize("mixed", "-", text=text.encode()))

    def test_jsonl(self):
        generator = random.Random(11)
        documents = [mixed_text(generator, generator.randrange(0, 5000)) for _ in range(700)] + [""]
        lines = "\n".join(
            json.dumps({"id": i, "text": d, "more": [d]}, ensure_ascii=i % 2 == 0) for i, d in enumerate(documents)
        )
        path = self.write("documents.jsonl", lines.encode())
        expected = []
        for document in documents:
            ids = self.models["mixed"].encode(document).ids
            expected += ids + [0] if ids else []
        self.compare(self.tokenize("mixed", "--append-eod", path), expected, "documents")

    def test_train(self):
        for name, text, size in (("kjv", KJV, 8192), ("mixed", self.mixed, 20000)):
            path = self.write("train.txt", text.encode())
            for threads in ("1", "3"):
                folder = self.path("trained")
                run(
                    "train-bpe",
                    "--output-folder",
                    folder,
                    "--overwrite",
                    "--vocab-size",
                    str(size),
                    "--threads",
                    threads,
                    path,
                )
                self.compare_files(folder, self.path(name))

    def test_train_odd(self):
        # Few different pairs, overlaps, tokens that several ways lead to, and pairs that run out.
        for seed in range(40):
            generator = random.Random(seed)
            alphabet = generator.choice(["a", "ab", "abc", "abcd \n", "a\u00e9\U0001f600 "])
            text = " ".join(
                "".join(generator.choice(alphabet) for _ in range(generator.randrange(1, 40)))
                for _ in range(generator.randrange(1, 300))
            )
            size, frequency = generator.choice([257, 258, 300, 700, 3000]), generator.choice([1, 2, 5])
            model = ByteLevelBPETokenizer()
            model.train_from_iterator(
                [text], vocab_size=size, min_frequency=frequency, special_tokens=[END], show_progress=False
            )
            folder, ours = self.path("odd"), self.path("ours")
            os.makedirs(folder, exist_ok=True)
            model.save_model(folder)
            run(
                "train-bpe",
                "--output-folder",
                ours,
                "--overwrite",
                "--vocab-size",
                str(size),
                "--min-frequency",
                str(frequency),
                "-",
                text=text.encode(),
            )
            with self.subTest(seed=seed, alphabet=alphabet):
                self.compare_files(ours, folder)

    def test_train_by_line(self):
        text = mixed_text(random.Random(13), 400000).replace("\r", "")
        path = self.write("lines.txt", text.encode())
        model = ByteLevelBPETokenizer()
        model.train([path], vocab_size=2000, min_frequency=2, special_tokens=[END], show_progress=False)
        folder, ours = self.path("lines"), self.path("our lines")
        os.makedirs(folder, exist_ok=True)
        model.save_model(folder)
        run("train-bpe", "--output-folder", ours, "--vocab-size", "2000", "--by-line", path)
        self.compare_files(ours, folder)
        # And tokenizers reads what was written.
        loaded = ByteLevelBPETokenizer(ours + "/vocab.json", ours + "/merges.txt")
        self.assertEqual(loaded.decode(loaded.encode(KJV[:100000]).ids), KJV[:100000])

    def test_speed(self):
        if "--speed" not in sys.argv:
            self.skipTest("only with --speed")
        texts = {"kjv": KJV * 3, "mixed": mixed_text(random.Random(17), 6000000)}
        for name, text in texts.items():
            path = self.write("speed.txt", text.encode())
            # By lines and without offsets, which is when tokenizers is fastest.
            lines = text.splitlines(keepends=True)
            megabytes = os.path.getsize(path) / 1e6
            for model in self.models:
                ours, theirs = [], []
                for _ in range(3):
                    summary = json.loads(
                        run(
                            "tokenize",
                            *self.model_options(model),
                            "--output-prefix",
                            self.path("speed"),
                            "--overwrite",
                            "--threads",
                            "1",
                            "--json",
                            path
                        )
                    )
                    ours.append(summary["megabytes_per_second"])
                    start = time.monotonic()
                    self.models[model]._tokenizer.encode_batch_fast(lines)
                    theirs.append(megabytes / (time.monotonic() - start))
                print(
                    "%s by %s: fp8lm %.1f MB/s, tokenizers %.1f MB/s, ratio %.1f"
                    % (name, model, sorted(ours)[1], sorted(theirs)[1], sorted(ours)[1] / sorted(theirs)[1])
                )
                sys.stdout.flush()
        path = self.write("speed.txt", texts["kjv"].encode())
        start = time.monotonic()
        run("train-bpe", "--output-folder", self.path("speed bpe"), "--vocab-size", "32000", "--threads", "1", path)
        ours = time.monotonic() - start
        start = time.monotonic()
        ByteLevelBPETokenizer().train(
            [path], vocab_size=32000, min_frequency=2, special_tokens=[END], show_progress=False
        )
        theirs = time.monotonic() - start
        print(
            "train-bpe of %.0f MB: fp8lm %.2f s, tokenizers %.2f s, ratio %.1f"
            % (len(texts["kjv"].encode()) / 1e6, ours, theirs, theirs / ours)
        )


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + (["Tokenizers.test_speed"] if "--speed" in sys.argv else []), verbosity=2)
