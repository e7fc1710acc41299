#!/usr/bin/env python3
"""fp8lm data as a user sees it: what is written, every bad input by its message, exit codes, full disks, signals; and that
nothing is left behind by what fails.

Usage: check_data.py FP8LM
Needs nothing but Python's own library."""

import array
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import zlib

FP8LM = os.path.abspath(sys.argv[1])
END = "<|endoftext|>"


def byte_characters():
    """GPT-2's table, written as its authors did."""
    kept = list(range(0x21, 0x7F)) + list(range(0xA1, 0xAD)) + list(range(0xAE, 0x100))
    table, extra = {b: chr(b) for b in kept}, 0
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(0x100 + extra)
            extra += 1
    return table


BYTES = byte_characters()


def vocabulary(*tokens, first=0):
    names = [BYTES[b] for b in range(256)] + list(tokens)
    return {name: first + i for i, name in enumerate(names)}


def shard(tokens, magic=20240520, version=1, count=None, width=2, vocab=0, checksum=None, tail=b""):
    data = array.array("H" if width == 2 else "I", tokens).tobytes()
    numbers = [magic, version, len(tokens) if count is None else count, vocab, checksum is not None, checksum or 0]
    return struct.pack("<6I", *(n & 0xFFFFFFFF for n in numbers)) + b"\0" * 1000 + data + tail


def read_shard(path):
    with open(path, "rb") as file:
        data = file.read()
    magic, version, count, vocab, has_checksum, checksum = struct.unpack("<6I", data[:24])
    assert (magic, version) in ((20240520, 1), (20240801, 7)) and data[24:1024] == b"\0" * 1000
    tokens = array.array("H" if magic == 20240520 else "I", data[1024:])
    assert len(tokens) == count and has_checksum == 1 and zlib.crc32(data[1024:]) == checksum
    assert max(tokens) < vocab
    return tokens.tolist()


# vocab.json, merges.txt, what the message must hold
GOOD_VOCAB = json.dumps(vocabulary("ab", "abc", END)).encode()
BAD_BPE = {
    "empty vocab": (b"", b"", "vocab.json: JSON, byte 0: expected an object, found the end"),
    "an array": (b"[]", b"", "vocab.json: JSON, byte 0: expected an object, found '['"),
    "no token": (b"{}", b"", "vocab.json: the vocabulary is empty"),
    "cut off": (GOOD_VOCAB[:1000], b"", "vocab.json: JSON, byte "),
    "no UTF-8": (b'{"\xff": 1}', b"", "expected UTF-8, found byte 0xff"),
    "text after it": (GOOD_VOCAB + b"x", b"", "expected the end of the text, found 'x'"),
    "negative id": (b'{"a": -1}', b"", "expected a whole number of at least 0, found '-'"),
    "id is a fraction": (b'{"a": 1.5}', b"", "expected a whole number without fraction"),
    "id is a string": (b'{"a": "1"}', b"", "expected a whole number of at least 0"),
    "id too large": (b'{"a": 16777216}', b"", 'token "a" has the id 16777216, expected at most 16777215'),
    "id far too large": (b'{"a": 18446744073709551616}', b"", "expected a number below 2^64"),
    "token twice": (b'{"a": 1, "a": 2}', b"", 'token "a" is there twice'),
    "token twice by escape": (b'{"a": 1, "\\u0061": 2}', b"", 'token "a" is there twice'),
    "id twice": (json.dumps(dict(vocabulary(), ab=7)).encode(), b"", "has the id 7 of another"),
    "a byte is missing": (
        json.dumps({k: v for k, v in vocabulary().items() if k != "\u0120"}).encode(),
        b"",
        "stands for the byte 0x20: a byte-level BPE has all 256",
    ),
    "tokenizer.json": (b'{"version": "1.0", "model": {}}', b"", "expected a whole number of at least 0"),
    "one token in a line": (GOOD_VOCAB, b"#version: 0.2\nab\n", 'merges.txt: line 2, "ab": expected two tokens'),
    "three tokens in a line": (GOOD_VOCAB, b"a b c\n", 'line 1, "a b c": expected two tokens'),
    "two spaces": (GOOD_VOCAB, b"a  b\n", "expected two tokens"),
    "blank line": (GOOD_VOCAB, b"a b\n\nab c\n", "line 2"),
    "unknown left": (GOOD_VOCAB, b"xy b\n", 'line 1, "xy b": the vocabulary lacks the first'),
    "unknown right": (GOOD_VOCAB, b"a xy\n", "the vocabulary lacks the second"),
    "unknown result": (GOOD_VOCAB, b"a c\n", 'line 1, "ac": the vocabulary lacks this, what they merge to'),
    "merge twice": (GOOD_VOCAB, b"a b\nab c\na b\n", 'line 3, "a b": is there twice'),
    "binary merges": (GOOD_VOCAB, b"\0\1\2\xff\n", "line 1"),
}

# lines, what the message must hold
BAD_JSONL = {
    "no JSON": (b"hello\n", "documents.jsonl, line 1: JSON, byte 0: expected an object, found 'h'"),
    "an array": (b'["text"]\n', "line 1: JSON, byte 0: expected an object, found '['"),
    "third line": (b'{"text":"a"}\n\n{"text":"b"\n', "line 3: JSON, byte 11: expected ',' or '}', found the end"),
    "no key": (b'{"text":"a"}\n{"body":"a"}\n', 'line 2: there is no key "text"'),
    "key in an object": (b'{"a":{"text":"a"}}\n', 'there is no key "text"'),
    "key twice": (b'{"text":"a","text":"b"}\n', 'the key "text" is there twice'),
    "a number": (b'{"text":1}\n', "expected a string, found '1'"),
    "null": (b'{"text":null}\n', "expected a string, found 'n'"),
    "two objects": (b'{"text":"a"}{"text":"b"}\n', "expected the end of the text, found '{'"),
    "invalid UTF-8": (b'{"text":"\xff"}\n', "expected UTF-8, found byte 0xff"),
    "lone surrogate": (b'{"text":"\\ud800"}\n', "expected the escape of a low surrogate"),
    "control character": (b'{"text":"a\tb"}\n', "expected an escape in place of a control character"),
    "NUL": (b'{"text":"a"}\0\n', "expected the end of the text, found byte 0x00"),
    "cut off": (b'{"text":"a', "expected the closing"),
    "deep": (b'{"a":' + b"[" * 1000 + b"\n", "nested deeper than 64 levels"),
}

GOOD_CHECKSUM = zlib.crc32(array.array("H", [1, 2, 3]).tobytes())
BAD_SHARDS = {
    "empty": (b"", "the file is empty"),
    "three bytes": (b"abc", "not a token shard"),
    "text": (b"In the beginning " * 100, "not a token shard"),
    "cut header": (shard([1])[:1023], "the file has 1023 bytes, its header alone should have 1024: it is cut off"),
    "no tokens": (shard([]), "the header says 0 tokens, expected 1 to 2147483647"),
    "negative count": (shard([1], count=-1), "the header says -1 tokens"),
    "cut off": (shard([1, 2, 3])[:-1], "the file has 1029 bytes, but its header and 3 tokens have 1030: it is cut off"),
    "something follows": (shard([1, 2, 3], tail=b"x"), "have 1030: something follows them"),
    "count beyond the file": (shard([1], count=2**31 - 1), "it is cut off"),
    "version 2": (shard([1], version=2), "version 2 of the format, only 1 can be read"),
    "version 0": (shard([1], version=0), "version 0 of the format, only 1 can be read"),
    "32 bits of version 8": (shard([1], magic=20240801, version=8, width=4), "version 8 of the format, only 7"),
    "evaluation file": (shard([1], magic=20240522), "an evaluation file of llm.c"),
    "model": (shard([1], magic=20240326, version=3), "a model of llm.c"),
    "other byte order": (struct.pack(">256i", 20240520, 1, 1, *[0] * 253) + b"\0\1", "of the other byte order"),
    "Megatron's index": (b"MMIDIDX\0\0" + b"\0" * 2000, "an index of Megatron"),
    "xz": (b"\xfd7zXZ\0" + b"\0" * 2000, "compressed by xz"),
    "zip": (b"PK\3\4" + b"\0" * 2000, "a zip archive"),
    "token beyond its vocabulary": (shard([1, 2, 300], vocab=257), "token 2 is 300, the vocabulary has 257"),
    "checksum": (shard([1, 2, 4], checksum=GOOD_CHECKSUM), "the checksum of the tokens is"),
    "checksum flag": (shard([1])[:16] + struct.pack("<I", 7) + shard([1])[20:], "number 4 of the header is 7"),
}


class Data(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.maxDiff = None

    def tearDown(self):
        self.folder.cleanup()

    def path(self, *names):
        return os.path.join(self.folder.name, *names)

    def write(self, name, data):
        with open(self.path(name), "wb") as file:
            file.write(data)
        return self.path(name)

    def run_data(self, *arguments, text=b"", **more):
        done = subprocess.run([FP8LM, "data", *arguments], input=text, capture_output=True, timeout=120, **more)
        return done.returncode, done.stdout, done.stderr.decode()

    def good(self, *arguments, text=b""):
        code, out, errors = self.run_data(*arguments, text=text)
        self.assertEqual((code, errors), (0, ""), arguments)
        return out

    def bad(self, code, message, *arguments, text=b"", **more):
        result, out, errors = self.run_data(*arguments, text=text, **more)
        self.assertEqual(result, code, errors)
        self.assertIn(message, errors)
        self.assertEqual(out, b"")
        self.assertEqual(errors.count("\n"), 1, errors)
        self.assertTrue(errors.startswith("fp8lm data"), errors)

    def tokenize(self, *arguments, text=b"", prefix="out"):
        out = self.good("tokenize", "--json", "--output-prefix", self.path(prefix), *arguments, text=text)
        return json.loads(out)

    def tokens(self, split="train", prefix="out"):
        names = sorted(n for n in os.listdir(self.folder.name) if n.startswith("%s_%s_" % (prefix, split)))
        return [read_shard(self.path(name)) for name in names]

    def bpe(self, vocab=GOOD_VOCAB, merges=b"a b\nab c\n"):
        return ["--vocab-file", self.write("vocab.json", vocab), "--merge-file", self.write("merges.txt", merges)]

    # What is written.

    def test_bytes(self):
        everything = bytes(range(256)) * 3
        summary = self.tokenize("-", text=everything)
        self.assertEqual(self.tokens(), [list(everything)])
        self.assertEqual((summary["tokenizer"], summary["vocabulary"], summary["end_of_text"]), ("bytes", 257, 256))
        self.assertEqual((summary["bytes"], summary["tokens"], summary["documents"]), (768, 768, 1))
        self.assertEqual(summary["train"], {"tokens": 768, "shards": [self.path("out_train_000000.bin")]})
        self.assertEqual(self.good("decode", self.path("out_train_000000.bin")), everything)
        self.assertIn(
            b"768 tokens of 16 bits, vocabulary 257, checksum right",
            self.good("check", self.path("out_train_000000.bin")),
        )

    def test_bpe(self):
        summary = self.tokenize(*self.bpe(), "-", text=b"abcab a\xff\n")
        self.assertEqual(self.tokens(), [[257, 256, 32, 97, *"\ufffd".encode(), 10]])
        self.assertEqual((summary["tokenizer"], summary["replaced"]), ("gpt2", 1))
        self.tokenize(*self.bpe(), "--invalid-utf8", "keep", "-", text=b"a\xff", prefix="kept")
        self.assertEqual(self.tokens(prefix="kept"), [[97, 255]])

    def test_documents(self):
        files = [self.write(name, data) for name, data in (("a.txt", b"one"), ("b.txt", b""), ("c.TXT", b"two"))]
        lines = self.write("d.jsonl", b'{"text":"three"}\r\n\r\n  \n{"id":0,"text":""}\n{"text":"\\u00e9","n":[1]}')
        summary = self.tokenize("--append-eod", *files, lines)
        self.assertEqual(self.tokens(), [[*b"one", 256, *b"two", 256, *b"three", 256, *"é".encode(), 256]])
        self.assertEqual((summary["files"], summary["documents"], summary["empty_documents"]), (4, 6, 2))
        self.tokenize("--input-format", "jsonl", "--json-keys", "body", "-", text=b'{"body":"x"}', prefix="keys")
        self.assertEqual(self.tokens(prefix="keys"), [[120]])
        self.tokenize("--input-format", "text", lines, prefix="plain")
        with open(lines, "rb") as file:
            self.assertEqual(self.tokens(prefix="plain"), [list(file.read())])
        self.tokenize("--parse-special", "-", text=b"a<|endoftext|>b", prefix="special")
        self.assertEqual(self.tokens(prefix="special"), [[97, 256, 98]])

    def test_shards_and_validation(self):
        text = bytes(random.Random(1).randrange(256) for _ in range(10007))
        self.tokenize("--shard-size", "1000", "--val-fraction", "0.25", "-", text=text)
        train, validation = self.tokens(), self.tokens("val")
        self.assertEqual([len(s) for s in train], [1000] * 7 + [506])
        self.assertEqual([len(s) for s in validation], [1000, 1000, 501])
        self.assertEqual(bytes(sum(train + validation, [])), text)
        lines = b"".join(b'{"text":"%d,"}\n' % i for i in range(3000))
        path = self.write("lines.jsonl", lines)
        results = []
        for threads, seed in (("1", "5"), ("4", "5"), ("1", "6")):
            summary = self.tokenize(
                "--val-fraction",
                "0.1",
                "--val-by",
                "document",
                "--seed",
                seed,
                "--threads",
                threads,
                "--overwrite",
                path,
            )
            train, validation = (bytes(sum(self.tokens(s), [])).decode().split(",")[:-1] for s in ("train", "val"))
            self.assertEqual(sorted(map(int, train + validation)), list(range(3000)))
            self.assertEqual(list(map(int, validation)), sorted(map(int, validation)))
            self.assertEqual(summary["validation_documents"], len(validation))
            self.assertTrue(230 < len(validation) < 370, len(validation))
            results.append(validation)
        self.assertEqual(results[0], results[1])
        self.assertNotEqual(results[0], results[2])

    def test_threads_and_pieces(self):
        generator = random.Random(2)
        text = " ".join(
            "".join(generator.choice("abc.\n") for _ in range(generator.randrange(1, 9))) for _ in range(900000)
        ).encode()
        path = self.write("large.txt", text)
        options = self.bpe()
        reference = None
        for threads in ("1", "2", "5"):
            self.tokenize("--threads", threads, "--overwrite", *options, path)
            tokens = self.tokens()
            reference = reference or tokens
            self.assertEqual(tokens, reference)
        self.assertEqual(self.good("decode", *options, self.path("out_train_000000.bin")), text)
        # From a pipe that gives little at a time.
        process = subprocess.Popen(
            [FP8LM, "data", "tokenize", *options, "--output-prefix", self.path("pipe"), "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        for start in range(0, len(text), 99991):
            process.stdin.write(text[start : start + 99991])
            process.stdin.flush()
        process.stdin.close()
        self.assertEqual(process.wait(60), 0)
        self.assertEqual(self.tokens(prefix="pipe"), reference)

    def test_wide_vocabulary(self):
        vocab = dict(vocabulary(), **{"ab": 65536})
        self.tokenize(*self.bpe(json.dumps(vocab).encode(), b"a b\n"), "-", text=b"abc")
        self.assertEqual(self.tokens(), [[65536, 99]])
        self.assertIn(b"2 tokens of 32 bits, vocabulary 65537", self.good("check", self.path("out_train_000000.bin")))
        vocab["ab"] = 65535
        self.tokenize(*self.bpe(json.dumps(vocab).encode(), b"a b\n"), "-", text=b"abc", prefix="narrow")
        self.assertIn(
            b"2 tokens of 16 bits, vocabulary 65536", self.good("check", self.path("narrow_train_000000.bin"))
        )

    def test_overwrite(self):
        self.tokenize("--shard-size", "2", "--val-fraction", "0.3", "-", text=b"0123456789")
        before = sorted(os.listdir(self.folder.name))
        self.bad(
            1,
            "are there already: --overwrite replaces them",
            "tokenize",
            "--output-prefix",
            self.path("out"),
            "-",
            text=b"x",
        )
        self.assertEqual(sorted(os.listdir(self.folder.name)), before)
        self.tokenize("--shard-size", "4", "--overwrite", "-", text=b"abcdef")
        self.assertEqual(sorted(os.listdir(self.folder.name)), ["out_train_000000.bin", "out_train_000001.bin"])
        self.assertEqual(self.tokens(), [list(b"abcd"), list(b"ef")])

    def test_train(self):
        text = b"low low low low low lower lower newest newest newest newest newest newest widest widest widest"
        out = json.loads(
            self.good("train-bpe", "--json", "--output-folder", self.path("new"), "--vocab-size", "263", "-", text=text)
        )
        with open(self.path("new", "merges.txt")) as file:
            self.assertEqual(file.read(), "#version: 0.2\ne s\nes t\nl o\nlo w\ne w\nn ew\n")
        with open(self.path("new", "vocab.json"), "rb") as file:
            vocab = json.load(file)
        self.assertEqual(vocab[END], 0)
        self.assertEqual(list(vocab.values()), list(range(263)))
        self.assertEqual((out["vocabulary"], out["merges"], out["bytes"]), (263, 6, len(text)))
        # Pairs run out.
        out = json.loads(
            self.good(
                "train-bpe", "--json", "--output-folder", self.path("more"), "--end-of-text", "last", "-", text=text
            )
        )
        self.assertLess(out["vocabulary"], 320)
        with open(self.path("more", "vocab.json"), "rb") as file:
            self.assertEqual(json.load(file)[END], out["vocabulary"] - 1)
        self.bad(1, "vocab.json is there already", "train-bpe", "--output-folder", self.path("more"), "-", text=text)
        self.tokenize(
            "--vocab-file",
            self.path("more", "vocab.json"),
            "--merge-file",
            self.path("more", "merges.txt"),
            "--append-eod",
            "-",
            text=text,
        )
        self.assertEqual(self.tokens()[0][-1], out["vocabulary"] - 1)

    # What fails leaves nothing.

    def nothing_written(self):
        self.assertEqual([n for n in os.listdir(self.folder.name) if n.startswith("out")], [])

    def bad_tokenize(self, code, message, *arguments, **more):
        self.bad(code, message, "tokenize", "--output-prefix", self.path("out"), *arguments, **more)
        self.nothing_written()

    def test_bad_tokenizers(self):
        for what, (vocab, merges, message) in BAD_BPE.items():
            with self.subTest(what):
                self.bad_tokenize(1, message, *self.bpe(vocab, merges), "-", text=b"abc")
        self.bad_tokenize(
            1,
            "none.json: cannot open the file: No such file",
            "--vocab-file",
            self.path("none.json"),
            "--merge-file",
            "x",
            "-",
        )
        self.bad_tokenize(1, "is a directory", "--vocab-file", self.folder.name, "--merge-file", "x", "-")
        options = self.bpe(json.dumps(vocabulary("ab")).encode(), b"a b\n")
        self.bad_tokenize(
            1, "has no token <|endoftext|>, which --append-eod needs", *options, "--append-eod", "-", text=b"abc"
        )

    def test_bad_jsonl(self):
        for what, (lines, message) in BAD_JSONL.items():
            with self.subTest(what):
                path = self.write("documents.jsonl", lines)
                self.bad_tokenize(1, message, path)
                self.bad(1, message, "train-bpe", "--output-folder", self.path("out"), path)
                self.nothing_written()
        # Late, after much that is good.
        path = self.write("documents.jsonl", b'{"text":"%s"}\n' % (b"x" * 1000) * 5000 + b"{\n")
        self.bad_tokenize(1, "documents.jsonl, line 5001: JSON", "--shard-size", "1000", "--val-fraction", "0.1", path)

    def test_bad_text(self):
        good = self.write("good.txt", b"x" * 3000000)
        self.bad_tokenize(
            1, "none.txt: cannot open the file: No such file", "--shard-size", "1000", good, self.path("none.txt")
        )
        self.bad_tokenize(1, "is a directory, expected a file", good, self.folder.name)
        self.bad_tokenize(1, "the input has no text: nothing was written", "-")
        self.bad_tokenize(1, "the input has no text", self.write("empty.jsonl", b'\n{"text":""}\n'))
        self.bad(1, "the input has no text", "train-bpe", "--output-folder", self.path("out"), "-")
        self.bad_tokenize(
            1,
            "standard input: byte 5 of the text, 0xff, is not UTF-8",
            "--invalid-utf8",
            "refuse",
            "-",
            text=b"hello\xff",
        )
        text = b"word " * 500000
        self.bad_tokenize(
            1,
            "byte 2500000 of the text, 0xc3, is not UTF-8",
            "--invalid-utf8",
            "refuse",
            *self.bpe(),
            "-",
            text=text + b"\xc3"
        )
        self.bad_tokenize(1, "leaves nothing for validation", "--val-fraction", "0.01", "-", text=b"short")
        self.bad_tokenize(
            1, "leaves nothing for", "--val-fraction", "0.5", "--val-by", "document", "-", text=b"one document"
        )
        # Words without an end.
        self.bad_tokenize(1, "a word of more than 16777216 bytes", *self.bpe(), "-", text=b"a" * 17000000)
        self.bad_tokenize(1, "with no end of a word in them", *self.bpe(), "-", text=b"a" * 40000000)

    def test_bad_shards(self):
        good = self.write("good.bin", shard([1, 2, 3], vocab=257, checksum=GOOD_CHECKSUM))
        for what, (data, message) in BAD_SHARDS.items():
            with self.subTest(what):
                path = self.write("bad.bin", data)
                self.bad(1, message, "check", path)
                code, out, errors = self.run_data("check", path, good)
                self.assertEqual((code, out.count(b"\n")), (1, 1))
                self.assertIn("bad.bin: ", errors)
        self.bad(1, "cannot open the file", "check", self.path("none.bin"))
        self.bad(1, "token 2 is 3, the vocabulary has 3", "check", "--vocab-size", "3", good)
        self.assertIn(b"no checksum", self.good("check", self.write("plain.bin", shard([50256, 1]))))
        # Tokens that the vocabulary lacks.
        code, out, errors = self.run_data("decode", self.write("large.bin", shard([104, 105, 257])))
        self.assertEqual((code, out), (1, b"hi"))
        self.assertIn("large.bin: token 2 is 257, which the vocabulary lacks", errors)

    def test_places_that_cannot_be_written(self):
        self.bad(
            1,
            "cannot read the folder: No such file",
            "tokenize",
            "--output-prefix",
            self.path("no", "out"),
            "-",
            text=b"x",
        )
        self.bad(1, "cannot make the folder", "train-bpe", "--output-folder", self.path("no", "out"), "-", text=b"x y")
        os.mkdir(self.path("bpe"))
        self.bad(
            1,
            "vocab.json.tmp: cannot write: File too large",
            "train-bpe",
            "--output-folder",
            self.path("bpe"),
            "-",
            text=b"ab ab",
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
        )
        self.assertEqual(os.listdir(self.path("bpe")), [])

    def test_what_lies_at_temporary_names(self):
        # Neither waited for, nor written to, nor removed, nor renamed.
        os.mkdir(self.path("bpe"))
        target = self.write("target", b"mine")
        kinds = {
            "is a pipe, socket or device, expected a regular file": os.mkfifo,
            "is a symbolic link, expected a regular file": lambda path: os.symlink(target, path),
            "is a directory, expected a regular file": os.mkdir,
        }
        tokenize = ["tokenize", "--val-fraction", "0.5", "--output-prefix", self.path("out"), "-"]
        calls = {
            "out_train_000000.bin.tmp": tokenize,
            "out_val_000000.bin.tmp": tokenize,
            "out.spool.tmp": tokenize,
            "bpe/vocab.json.tmp": ["train-bpe", "--output-folder", self.path("bpe"), "-"],
            "bpe/merges.txt.tmp": ["train-bpe", "--output-folder", self.path("bpe"), "-"],
        }
        for name, arguments in calls.items():
            for expected, make in kinds.items():
                with self.subTest(name=name, expected=expected):
                    make(self.path(name))
                    before = os.lstat(self.path(name))
                    self.bad(1, "%s: %s" % (name, expected), *arguments, text=b"ab ab")
                    after = os.lstat(self.path(name))
                    self.assertEqual((before.st_ino, before.st_mode), (after.st_ino, after.st_mode))
                    (os.rmdir if make is os.mkdir else os.unlink)(self.path(name))
                    self.assertEqual(sorted(os.listdir(self.folder.name)), ["bpe", "target"])
                    self.assertEqual(os.listdir(self.path("bpe")), [])
        with open(target, "rb") as file:
            self.assertEqual(file.read(), b"mine")
        # What an interrupted run left is written over.
        self.write("out_train_000000.bin.tmp", b"x" * 100000)
        self.tokenize("-", text=b"after")
        self.assertEqual(self.tokens(), [list(b"after")])
        os.unlink(self.path("out_train_000000.bin"))
        # Several shards, of which a later one fails; those of before stay.
        self.tokenize("-", text=b"before", prefix="out")
        os.mkfifo(self.path("out_train_000002.bin.tmp"))
        self.bad(
            1,
            "out_train_000002.bin.tmp: is a pipe, socket or device",
            "tokenize",
            "--overwrite",
            "--shard-size",
            "10",
            "--output-prefix",
            self.path("out"),
            "-",
            text=b"x" * 100,
        )
        os.unlink(self.path("out_train_000002.bin.tmp"))
        self.assertEqual(sorted(os.listdir(self.folder.name)), ["bpe", "out_train_000000.bin", "target"])
        self.assertEqual(self.tokens(), [list(b"before")])

    def test_full_disk(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000))

        for fraction in ("0", "0.5"):
            self.bad_tokenize(
                1,
                "cannot write: File too large",
                "--val-fraction",
                fraction,
                "-",
                text=b"x" * 2000000,
                preexec_fn=limit,
            )
        os.mkdir(self.path("disk"))
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", self.path("disk")], stderr=subprocess.DEVNULL
        )
        if mounted.returncode:
            return
        try:
            self.bad(
                1,
                "cannot write: No space left on device",
                "tokenize",
                "--output-prefix",
                self.path("disk", "out"),
                "-",
                text=b"x" * 2000000,
            )
            self.assertEqual(os.listdir(self.path("disk")), [])
            self.good("tokenize", "--output-prefix", self.path("disk", "out"), "-", text=b"x" * 200000)
        finally:
            subprocess.run(["umount", self.path("disk")], check=True)

    def test_standard_output(self):
        path = self.write("shard.bin", shard([104, 105]))
        for arguments in (["decode", path], ["check", path], ["--help"], ["tokenize", "--help"]):
            with open("/dev/full", "wb") as full:
                done = subprocess.run([FP8LM, "data", *arguments], stdout=full, stderr=subprocess.PIPE)
            self.assertEqual(done.returncode, 1)
            self.assertIn(b"cannot write to standard output", done.stderr)

    def test_signals(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process = subprocess.Popen(
                [
                    FP8LM,
                    "data",
                    "tokenize",
                    "--threads",
                    "1",
                    "--shard-size",
                    "1000",
                    "--output-prefix",
                    self.path("out"),
                    "-",
                ],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            process.stdin.write(b"x" * 3000000)
            process.stdin.flush()
            for _ in range(600):
                if any(name.endswith(".tmp") for name in os.listdir(self.folder.name)):
                    break
                time.sleep(0.05)
            process.send_signal(number)
            self.assertEqual(process.wait(60), 1)
            self.assertIn(b"interrupted", process.stderr.read())
            process.stdin.close()
            process.stderr.close()
            self.nothing_written()

    # Usage.

    def test_usage(self):
        out = ["--output-prefix", self.path("out")]
        self.bad(2, "no command given; commands are tokenize, train-bpe, check, decode")
        self.bad(2, "unknown command 'x'", "x")
        self.bad(2, "no --output-prefix given", "tokenize", "-")
        self.bad_tokenize(2, "no file given ('-' is standard input)")
        self.bad_tokenize(2, "the tokenizer gpt2 needs --vocab-file and --merge-file", "--tokenizer", "gpt2", "-")
        self.bad_tokenize(2, "needs --vocab-file and --merge-file", "--vocab-file", "x", "-")
        self.bad_tokenize(
            2, "are for the tokenizer gpt2, not for bytes", "--tokenizer", "bytes", "--vocab-file", "x", "-"
        )
        self.bad_tokenize(2, "--tokenizer is 'llama', expected bytes or gpt2", "--tokenizer", "llama", "-")
        self.bad_tokenize(2, "--val-by is 'x', expected tail or document", "--val-by", "x", "-")
        self.bad_tokenize(2, "--invalid-utf8 is 'x', expected replace, keep or refuse", "--invalid-utf8", "x", "-")
        for option, values in (
            ("--shard-size", ("0", "2147483648", "x", "")),
            ("--val-fraction", ("1", "-0.1", "nan", "x")),
            ("--threads", ("0", "1025")),
            ("--seed", ("-1",)),
        ):
            for value in values:
                self.bad_tokenize(2, "%s is '%s', expected a" % (option, value), option, value, "-")
        self.bad_tokenize(2, "unknown or ambiguous option '--x'", "--x", "-")
        self.bad_tokenize(2, "option '--seed' needs a value", "--seed")
        self.bad(2, "no --output-folder given", "train-bpe", "-")
        self.bad(2, "no file given", "train-bpe", "--output-folder", self.path("out"))
        self.bad(
            2,
            "--vocab-size is '256', expected a whole number from 257 to 16777216",
            "train-bpe",
            "--vocab-size",
            "256",
            "-",
        )
        self.bad(2, "no shard given", "check")
        self.bad(2, "no shard given", "decode")
        self.bad(2, "--vocab-size is '0'", "check", "--vocab-size", "0", "x")
        self.assertEqual(len(out), 2)

    def test_help(self):
        for command in ("tokenize", "train-bpe", "check", "decode"):
            text = self.good(command, "--help").decode()
            self.assertTrue(text.startswith("Usage: fp8lm data %s" % command))
            self.assertLessEqual(max(map(len, text.splitlines())), 120)
            done = subprocess.run([FP8LM, "help", "data", command], capture_output=True)
            self.assertEqual(done.stdout.decode(), text)
            # Every option is described.
            _, _, errors = self.run_data(command, "--no-such-option")
            for option in errors.split("options are ")[1].split("; see")[0].split(", "):
                self.assertIn("  %s" % option, text)
            self.assertIn(command, self.good("--help").decode())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
