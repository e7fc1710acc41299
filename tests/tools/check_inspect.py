#!/usr/bin/env python3
"""fp8lm inspect and the command around it: every malformed file by its message, figures against formats.py, exit codes.

Usage: check_inspect.py FP8LM [--slow]
Needs nothing but Python's own library."""

import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import formats  # noqa: E402

FP8LM = sys.argv[1]
SLOW = "--slow" in sys.argv


def run(*arguments, cwd=None):
    done = subprocess.run([FP8LM, *arguments], capture_output=True, cwd=cwd, timeout=600)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


# More come with the libraries that they need.
COMMANDS = ("ablate, " if "\n  ablate " in run("--help")[1] else "") + "bench, data, "


def safetensors(header, data=b"", length=None):
    header = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(dtype="F32", shape="[1]", offsets="[0,4]"):
    return '{"dtype":"%s","shape":%s,"data_offsets":%s}' % (dtype, shape, offsets)


def one(**fields):
    return '{"a":%s}' % entry(**fields)


def npy(header, data=b"", version=(1, 0), length=None, magic=b"\x93NUMPY"):
    header = header if isinstance(header, bytes) else header.encode()
    count = len(header) if length is None else length
    size = struct.pack("<H", count & 0xFFFF) if version[0] == 1 else struct.pack("<I", count)
    return magic + bytes(version) + size + header + data


def npy_header(descr="'<f4'", order="False", shape="(1,)"):
    return "{'descr': %s, 'fortran_order': %s, 'shape': %s, }     \n" % (descr, order, shape)


F4 = b"\0" * 4
F8 = b"\0" * 8

# bytes, what the message must hold
BAD_SAFETENSORS = {
    "empty file": (b"", "has 0 bytes"),
    "seven bytes": (b"\2\0\0\0\0\0\0", "has 7 bytes"),
    "length 0": (safetensors(""), "header length is 0"),
    "length 0 with data": (safetensors("", b"{}"), "header length is 0"),
    "length 1": (safetensors("{"), "header length is 1"),
    "length beyond the file": (safetensors("{}", length=3), "header length is 3, but only 2 bytes follow"),
    "length of 100 MB and one": (
        safetensors("{}", length=100000001),
        "header length is 100000001, expected at most 100000000",
    ),
    "length 2^63": (safetensors("{}", length=2**63), "header length is 9223372036854775808, expected at most"),
    "length 2^64 - 1": (safetensors("{}", length=2**64 - 1), "header length is 18446744073709551615, expected at most"),
    "length wraps with the 8 bytes": (safetensors("{}", length=2**64 - 8), "expected at most"),
    "leading space": (safetensors(" {}"), "header begins with byte 0x20, expected '{'"),
    "byte order mark": (safetensors(b"\xef\xbb\xbf{}"), "header begins with byte 0xef"),
    "an array": (safetensors("[]"), "header begins with byte 0x5b"),
    "text after the header": (safetensors("{} x"), "byte 3: expected the end of the text, found 'x'"),
    "NUL padding": (safetensors("{}\0"), "byte 2: expected the end of the text, found byte 0x00"),
    "cut off": (safetensors("{  "), "byte 3: expected a key in double quotes, found the end"),
    "comma first": (safetensors("{,}"), "byte 1: expected a key in double quotes, found ','"),
    "trailing comma": (safetensors("{%s,}" % one()[1:-1], F4), "expected a key in double quotes, found '}'"),
    "no colon": (safetensors('{"a" 1}'), "expected ':', found '1'"),
    "single quotes": (safetensors("{'a':1}"), "expected a key in double quotes"),
    "a comment": (safetensors("{/**/}"), "expected a key in double quotes, found '/'"),
    "tensor is an array": (safetensors('{"a":[]}'), "byte 5: expected an object, found '['"),
    "tensor is null": (safetensors('{"a":null}'), "expected an object, found 'n'"),
    "control character in a name": (
        safetensors('{"a\nb":%s}' % entry(), F4),
        "expected an escape in place of a control character",
    ),
    "invalid UTF-8": (safetensors(b'{"\xff":1}'), "byte 2: expected UTF-8, found byte 0xff"),
    "overlong UTF-8": (safetensors(b'{"\xc0\xaf":1}'), "expected UTF-8"),
    "UTF-8 of a surrogate": (safetensors(b'{"\xed\xa0\x80":1}'), "expected UTF-8"),
    "UTF-8 beyond U+10FFFF": (safetensors(b'{"\xf4\x90\x80\x80":1}'), "expected UTF-8"),
    "cut UTF-8": (safetensors(b'{"\xe2\x82'), "expected UTF-8"),
    "lone high surrogate": (safetensors('{"\\ud800":1}'), "expected the escape of a low surrogate"),
    "lone low surrogate": (safetensors('{"\\udc00":1}'), "expected no low surrogate without a high one"),
    "bad escape": (safetensors('{"\\x41":1}'), "expected an escape of JSON, found 'x'"),
    "bad hexadecimal": (safetensors('{"\\u00g0":1}'), "expected four hexadecimal digits"),
    "unfinished string": (safetensors('{"abc'), "expected the closing '\"' of a string, found the end"),
    "NUL in a name": (
        safetensors('{"a\\u0000b":%s}' % entry(), F4),
        'tensor "a\\u0000b": its name holds the character U+0000',
    ),
    "duplicate name": (
        safetensors('{"a":%s,"a":%s}' % (entry(), entry(offsets="[4,8]")), F8),
        'tensor "a" is there twice',
    ),
    "duplicate name, same bytes": (
        safetensors('{"a":%s,"a":%s}' % (entry(), entry()), F4),
        'tensor "a" is there twice',
    ),
    "duplicate name by escape": (
        safetensors('{"a":%s,"\\u0061":%s}' % (entry(), entry(offsets="[4,8]")), F8),
        'tensor "a" is there twice',
    ),
    "duplicate empty tensors": (
        safetensors('{"a":%s,"b":%s,"a":%s}' % ((entry(shape="[0]", offsets="[0,0]"),) * 3)),
        'tensor "a" is there twice',
    ),
    "duplicate dtype": (
        safetensors('{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', F4),
        'tensor "a": "dtype" is there twice',
    ),
    "duplicate shape": (
        safetensors('{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}', F4),
        '"shape" is there twice',
    ),
    "duplicate offsets": (
        safetensors('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"data_offsets":[0,4]}}', F4),
        '"data_offsets" is there twice',
    ),
    "no dtype": (safetensors('{"a":{"shape":[1],"data_offsets":[0,4]}}', F4), 'tensor "a": "dtype" is missing'),
    "no shape": (safetensors('{"a":{"dtype":"F32","data_offsets":[0,4]}}', F4), 'tensor "a": "shape" is missing'),
    "no offsets": (safetensors('{"a":{"dtype":"F32","shape":[1]}}', F4), 'tensor "a": "data_offsets" is missing'),
    "unknown dtype": (safetensors(one(dtype="F99"), F4), 'tensor "a": unknown dtype "F99", expected one of F8_E4M3, F8_E5M2, BF16'),
    "dtype in small letters": (safetensors(one(dtype="f32"), F4), 'unknown dtype "f32"'),
    "empty dtype": (safetensors(one(dtype=""), F4), 'unknown dtype ""'),
    "dtype is a number": (
        safetensors('{"a":{"dtype":1,"shape":[1],"data_offsets":[0,4]}}', F4),
        "expected a string, found '1'",
    ),
    "shape is a number": (safetensors(one(shape="1"), F4), "expected an array, found '1'"),
    "negative size": (safetensors(one(shape="[-1]"), F4), "expected a whole number of at least 0, found '-'"),
    "fraction": (safetensors(one(shape="[1.0]"), F4), "expected a whole number without fraction or exponent"),
    "exponent": (safetensors(one(shape="[1e0]"), F4), "expected a whole number without fraction or exponent"),
    "leading zero": (safetensors(one(shape="[01]"), F4), "expected no digits after a leading 0"),
    "size as string": (safetensors(one(shape='["1"]'), F4), "expected a whole number"),
    "comma at the shape's end": (
        safetensors(one(shape="[1,]"), F4),
        "expected a whole number of at least 0, found ']'",
    ),
    "size 2^64": (safetensors(one(shape="[18446744073709551616]"), F4), "expected a number below 2^64, found 18446744073709551616"),
    "size of 200 digits": (safetensors(one(shape="[%s]" % ("7" * 200)), F4), "found %s..." % ("7" * 40)),
    "product overflows": (
        safetensors(one(shape="[4294967296,4294967296]", offsets="[0,0]")),
        'tensor "a": its shape [4294967296, 4294967296] of F32 has 2^63 bytes or more',
    ),
    "bytes overflow": (safetensors(one(shape="[4611686018427387904]", offsets="[0,0]")), "2^63 bytes or more"),
    "bytes wrap to the right size": (safetensors(one(shape="[4611686018427387905]"), F4), "2^63 bytes or more"),
    "shape too large": (
        safetensors(one(shape="[2]"), F4),
        'tensor "a": its shape takes 8 bytes of F32, but data_offsets [0, 4] hold 4',
    ),
    "shape too small": (
        safetensors(one(offsets="[0,8]"), F8),
        "its shape takes 4 bytes of F32, but data_offsets [0, 8] hold 8",
    ),
    "scalar without data": (safetensors(one(shape="[]", offsets="[0,0]")), "its shape takes 4 bytes"),
    "empty shape with data": (safetensors(one(shape="[0]"), F4), "its shape takes 0 bytes"),
    "half a byte": (
        safetensors(one(dtype="F4", shape="[3]", offsets="[0,2]"), b"\0\0"),
        "3 elements of F4 end within a byte",
    ),
    "six bits": (
        safetensors(one(dtype="F6_E2M3", shape="[2]", offsets="[0,2]"), b"\0\0"),
        "2 elements of F6_E2M3 end within a byte",
    ),
    "no offset": (safetensors(one(offsets="[]"), F4), 'tensor "a": data_offsets have fewer than two numbers'),
    "one offset": (safetensors(one(offsets="[0]"), F4), "fewer than two numbers"),
    "three offsets": (safetensors(one(offsets="[0,4,8]"), F4), "more than two numbers"),
    "offsets reversed": (
        safetensors(one(offsets="[4,0]"), F4),
        'tensor "a": data_offsets [4, 0] end before they begin',
    ),
    "negative offset": (safetensors(one(offsets="[-4,0]"), F4), "expected a whole number of at least 0"),
    "past the end": (
        safetensors(one(), b"\0" * 3),
        'tensor "a": data_offsets [0, 4] reach past the end: the file has 3 bytes of data',
    ),
    "no data": (safetensors(one()), "the file has 0 bytes of data"),
    "offset 2^64 - 1": (
        safetensors(one(offsets="[18446744073709551611,18446744073709551615]"), F4),
        "reach past the end",
    ),
    "trailing bytes": (safetensors(one(), b"\0" * 6), "2 bytes after the last tensor belong to no tensor"),
    "only trailing bytes": (safetensors("{}", b"xx"), "2 bytes after the last tensor belong to no tensor"),
    "overlap": (
        safetensors('{"a":%s,"b":%s}' % (entry(), entry(offsets="[2,6]")), b"\0" * 6),
        'tensor "b" overlaps tensor "a": it begins at 2 of the data, which the other fills up to 4',
    ),
    "two names for one place": (
        safetensors('{"a":%s,"b":%s}' % (entry(), entry()), F4),
        'tensor "b" overlaps tensor "a"',
    ),
    "one inside another": (
        safetensors('{"b":%s,"a":%s}' % (entry(offsets="[4,8]"), entry(shape="[3]", offsets="[0,12]")), b"\0" * 12),
        'tensor "b" overlaps tensor "a"',
    ),
    "empty inside another": (
        safetensors('{"b":%s,"a":%s}' % (entry(shape="[0]", offsets="[2,2]"), entry()), F4),
        'tensor "b" overlaps tensor "a"',
    ),
    "hole at the start": (
        safetensors(one(offsets="[4,8]"), F8),
        'bytes 0 to 4 of the data, before tensor "a", belong to no tensor',
    ),
    "hole between": (
        safetensors('{"a":%s,"b":%s}' % (entry(), entry(offsets="[8,12]")), b"\0" * 12),
        'bytes 4 to 8 of the data, before tensor "b", belong to no tensor',
    ),
    "metadata is an array": (safetensors('{"__metadata__":[]}'), "expected an object, found '['"),
    "metadata with a number": (safetensors('{"__metadata__":{"a":1}}'), "expected a string, found '1'"),
    "metadata nested": (safetensors('{"__metadata__":{"a":{"b":"c"}}}'), "expected a string, found '{'"),
    "metadata twice": (safetensors('{"__metadata__":{},"__metadata__":{}}'), '"__metadata__" is there twice'),
    "metadata key twice": (safetensors('{"__metadata__":{"k":"1","k":"2"}}'), 'the key "k" is there twice'),
    "deep nesting": (safetensors('{"a":{"x":%s}}' % ("[" * 100000 + "]" * 100000)), "nested deeper than 64 levels"),
    "unknown key with bad JSON": (safetensors('{"a":{"x":[1,}}'), "expected a value, found '}'"),
    "unknown key with a bad number": (safetensors('{"a":{"x":-}}'), "expected a digit, found '}'"),
    "unknown key with a bad fraction": (safetensors('{"a":{"x":1.}}'), "expected a digit, found '}'"),
    "unknown key with a bad word": (safetensors('{"a":{"x":nul}}'), "expected a value, found 'n'"),
    "NaN is not JSON": (safetensors('{"a":{"x":NaN}}'), "expected a value, found 'N'"),
}

# bytes, {name: (dtype, shape, elements)}
GOOD_SAFETENSORS = {
    "nothing": (safetensors("{}"), {}),
    "padding": (safetensors("{}      "), {}),
    "other white space": (safetensors("{\t\r\n}\n"), {}),
    "metadata alone": (safetensors('{"__metadata__":{"format":"pt","":""}}'), {}),
    "metadata null": (safetensors('{"__metadata__":null}'), {}),
    "rank 0": (safetensors(one(shape="[]"), F4), {"a": ("F32", [], 1)}),
    "no elements": (safetensors(one(shape="[0,8]", offsets="[0,0]")), {"a": ("F32", [0, 8], 0)}),
    "no elements of a large shape": (
        safetensors(one(shape="[4294967296,4294967296,0]", offsets="[0,0]")),
        {"a": ("F32", [2**32, 2**32, 0], 0)},
    ),
    "empty at the end": (
        safetensors('{"a":%s,"b":%s}' % (entry(), entry(shape="[0]", offsets="[4,4]")), F4),
        {"a": ("F32", [1], 1), "b": ("F32", [0], 0)},
    ),
    "empty before another": (
        safetensors('{"b":%s,"a":%s}' % (entry(), entry(shape="[0]", offsets="[0,0]")), F4),
        {"a": ("F32", [0], 0), "b": ("F32", [1], 1)},
    ),
    "header out of order": (
        safetensors('{"b":%s,"a":%s}' % (entry(offsets="[4,8]"), entry()), F8),
        {"a": ("F32", [1], 1), "b": ("F32", [1], 1)},
    ),
    "misaligned": (
        safetensors('{"a":%s,"b":%s}' % (entry("U8", "[1]", "[0,1]"), entry("F64", "[1]", "[1,9]")) + " ", b"\0" * 9),
        {"a": ("U8", [1], 1), "b": ("F64", [1], 1)},
    ),
    "unknown key": (
        safetensors(
            '{"a":{"x":[{"y":[1,-2.5e+3,true,false,null,"z"]},{}],"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', F4
        ),
        {"a": ("F32", [1], 1)},
    ),
    "no name": (safetensors('{"":%s}' % entry(), F4), {"": ("F32", [1], 1)}),
    "escapes": (
        safetensors('{"\\ud83d\\ude00\\n\\"\\/\\u00e9":%s}' % entry(), F4),
        {'\U0001f600\n"/\u00e9': ("F32", [1], 1)},
    ),
    "UTF-8": (safetensors('{"\u00e9\u6f22\U0001f600":%s}' % entry(), F4), {"\u00e9\u6f22\U0001f600": ("F32", [1], 1)}),
    "sub-byte elements": (
        safetensors('{"a":%s,"b":%s}' % (entry("F4", "[2,2]", "[0,2]"), entry("F6_E3M2", "[4]", "[2,5]")), b"\0" * 5),
        {"a": ("F4", [2, 2], 4), "b": ("F6_E3M2", [4], 4)},
    ),
    "zeros as -0 would be": (safetensors(one(shape="[1,1,1,1,1,1,1,1]"), F4), {"a": ("F32", [1] * 8, 1)}),
}

ALL_DTYPES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}

BAD_NPY = {
    "empty file": (b"", "the file is empty, expected the magic"),
    "other magic": (npy(npy_header(), F4, magic=b"\x92NUMPY"), 'begins with "\\x92NUMPY", not with the magic'),
    "short": (b"\x1b[", 'begins with "\\u001b[", not with the magic'),
    "magic alone": (b"\x93NUMPY", "has 6 bytes"),
    "no header length": (b"\x93NUMPY\1\0\5", "has 9 bytes"),
    "no header length of version 2": (b"\x93NUMPY\2\0\5\0\0", "has 11 bytes"),
    "version 0.0": (npy(npy_header(), F4, (0, 0)), "format version 0.0"),
    "version 1.1": (npy(npy_header(), F4, (1, 1)), "format version 1.1"),
    "version 4.0": (npy(npy_header(), F4, (4, 0)), "format version 4.0"),
    "header beyond the file": (npy("{}", length=100), "header length is 100, but only 2 bytes follow"),
    "header of 4 GiB": (npy("{}", version=(2, 0), length=2**32 - 1), "header length is 4294967295, but only 2"),
    "header over 1 MiB": (npy(npy_header() + " " * (1 << 20), F4, (2, 0)), "expected at most 1048576"),
    "no header": (npy("", F4), "expected a dictionary, found the end"),
    "no dictionary": (npy("[]", F4), "expected a dictionary, found '['"),
    "NUL": (npy("\0" * 10, F4), "expected a dictionary, found byte 0x00"),
    "unfinished": (npy("{'descr': '<f4'", F4), "expected ',' or '}', found the end"),
    "unfinished string": (npy("{'descr': '<f4", F4), "expected the end of a string"),
    "text after it": (npy(npy_header() + "x", F4), "expected the end of the header, found 'x'"),
    "no descr": (npy("{'fortran_order': False, 'shape': (1,)}", F4), "the key descr is missing"),
    "no fortran_order": (npy("{'descr': '<f4', 'shape': (1,)}", F4), "the key fortran_order is missing"),
    "no shape": (npy("{'descr': '<f4', 'fortran_order': False}", F4), "the key shape is missing"),
    "key twice": (
        npy("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", F4),
        "the key descr is there twice",
    ),
    "unknown key": (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}", F4), 'unknown key "x"'),
    "key without quotes": (npy("{descr: '<f4'}", F4), "expected a string, found 'd'"),
    "no colon": (npy("{'descr' '<f4'}", F4), "expected ':'"),
    "order is a number": (npy(npy_header(order="0"), F4), "expected True or False for fortran_order"),
    "order is a string": (npy(npy_header(order="'False'"), F4), "expected True or False"),
    "shape is a number": (npy(npy_header(shape="(1)"), F4), "shape: (1) is a number, expected the tuple (1,)"),
    "shape is a list": (npy(npy_header(shape="[1]"), F4), "expected a tuple of sizes"),
    "negative size": (npy(npy_header(shape="(-1,)"), F4), "expected a size of at least 0, found '-'"),
    "size is a fraction": (npy(npy_header(shape="(1.0,)"), F4), "expected ',' or ')', found '.'"),
    "two commas": (npy(npy_header(shape="(1,,1)"), F4), "expected a size of at least 0, found ','"),
    "only a comma": (npy(npy_header(shape="(,)"), F4), "expected a size of at least 0, found ','"),
    "size 2^63": (npy(npy_header(shape="(9223372036854775808,)"), F4), 'expected a size below 2^63, found "9223372036854775808"'),
    "huge size": (npy(npy_header(shape="(%s,)" % ("9" * 200)), F4), 'expected a size below 2^63, found "99999'),
    "product overflows": (
        npy(npy_header(shape="(4294967296, 4294967296)"), F4),
        "shape: [4294967296, 4294967296] of fp32 has 2^63 bytes or more",
    ),
    "bytes wrap": (npy(npy_header(shape="(4611686018427387905,)"), F4), "2^63 bytes or more"),
    "many sizes": (npy(npy_header(shape="(%s)" % ("1000000," * 60)), F4), ", ...] of fp32 has 2^63 bytes or more"),
    "65 dimensions": (npy(npy_header(shape="(%s)" % ("1," * 65)), F4), "shape: 65 dimensions, expected at most 64"),
    "70 dimensions": (npy(npy_header(shape="(%s)" % ",".join(["1"] * 70)), F4), "shape: 70 dimensions"),
    "NUL in a word": (npy(npy_header(order="Fa\0se"), F4), "expected True or False for fortran_order, found byte 0x00"),
    "half a word": (npy("{'fortran_order': Tru", F4), "expected True or False for fortran_order, found the end"),
    "too few bytes": (npy(npy_header(shape="(2,)"), F4), "2 elements take 8 bytes, but 4 follow the header"),
    "too many bytes": (npy(npy_header(), F8), "1 elements take 4 bytes, but 8 follow the header"),
    "structured": (npy(npy_header(descr="[('a', '<f4')]"), F4), "structured dtypes are not read"),
    "pickle": (npy(npy_header(descr="'|O'"), F4), 'descr: "|O" holds pickled Python objects, which are never read'),
    "integers": (npy(npy_header(descr="'<i4'"), F4), 'descr: "<i4" is not read'),
    "complex": (npy(npy_header(descr="'<c8'"), F8), 'descr: "<c8" is not read'),
    "long double": (npy(npy_header(descr="'<f16'"), F8 + F8), 'descr: "<f16" is not read'),
    "booleans": (npy(npy_header(descr="'|b1'"), b"\0"), 'descr: "|b1" is not read'),
    "text": (npy(npy_header(descr="'<U1'"), F4), 'descr: "<U1" is not read'),
    "dates": (npy(npy_header(descr="'<M8[ns]'"), F8), 'descr: "<M8[ns]" is not read'),
    "no type": (npy(npy_header(descr="''"), F4), 'descr: "" is no NumPy type'),
    "order alone": (npy(npy_header(descr="'<'"), F4), 'descr: "<" is no NumPy type'),
    "no size": (npy(npy_header(descr="'<f'"), F4), 'descr: "<f" is no NumPy type'),
    "unknown letter": (npy(npy_header(descr="'<x4'"), F4), 'descr: "<x4" is no NumPy type'),
    "text after the type": (npy(npy_header(descr="'<f4x'"), F4), 'descr: "<f4x" is no NumPy type'),
    "floats without order": (npy(npy_header(descr="'|f4'"), F4), 'descr: "|f4" has no byte order'),
    "void of two bytes": (npy(npy_header(descr="'<V2'"), b"\0\0"), "name the dtype (--dtype bf16 or fp16)"),
    "void of one byte": (npy(npy_header(descr="'|V1'"), b"\0"), "name the dtype (--dtype e4m3 or e5m2)"),
    "float of one byte": (npy(npy_header(descr="'<f1'"), b"\0"), "name the dtype (--dtype e4m3 or e5m2)"),
    "backslash": (npy(npy_header(descr="'\\x3cf4'"), F4), "expected a printable ASCII character"),
    "Latin-1": (
        npy(npy_header(descr="'\u00e9'").encode("latin-1"), F4),
        "expected a printable ASCII character, found byte 0xe9",
    ),
}


class TensorFiles(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()

    def tearDown(self):
        self.folder.cleanup()

    def path(self, name, content):
        path = os.path.join(self.folder.name, name)
        with open(path, "wb") as file:
            file.write(content)
        return path

    def inspect(self, path, *arguments):
        code, out, err = run("inspect", "--json", *arguments, path)
        self.assertEqual((code, err), (0, ""), err)
        return json.loads(out)["files"][0]

    def refused(self, message, name, content, *arguments):
        path = self.path(name, content)
        code, out, err = run("inspect", *arguments, path)
        self.assertEqual(code, 1, out + err)
        self.assertIn("fp8lm inspect: %s: " % path, err)
        self.assertIn(message, err)
        code, out, _ = run("inspect", "--json", *arguments, path)
        self.assertEqual(code, 1)
        self.assertIn("error", json.loads(out)["files"][0])


class Files(TensorFiles):
    def test_bad_safetensors(self):
        for name, (content, message) in BAD_SAFETENSORS.items():
            with self.subTest(name):
                self.refused(message, "x.safetensors", content)

    def test_good_safetensors(self):
        for name, (content, tensors) in GOOD_SAFETENSORS.items():
            with self.subTest(name):
                report = self.inspect(self.path("x.safetensors", content))
                found = {t["name"]: (t["stored_dtype"], t["shape"], t["elements"]) for t in report["tensors"]}
                self.assertEqual(found, tensors)
                self.assertEqual(run("inspect", self.path("x.safetensors", content))[0], 0)

    def test_every_cut_of_a_safetensors_file(self):
        whole = safetensors('{"a":%s,"b":%s}' % (entry(), entry("F8_E4M3", "[2]", "[4,6]")), b"\0" * 6)
        for length in range(0, len(whole), 5):
            with self.subTest(length):
                self.assertEqual(run("inspect", self.path("x.safetensors", whole[:length]))[0], 1)

    def test_safetensors_dtypes(self):
        for dtype, size in ALL_DTYPES.items():
            with self.subTest(dtype):
                content = safetensors(one(dtype=dtype, shape="[3]", offsets="[0,%d]" % (3 * size)), b"\0" * 3 * size)
                tensor = self.inspect(self.path("x.safetensors", content))["tensors"][0]
                read = dtype in ("F8_E4M3", "F8_E5M2", "BF16", "F16", "F32", "F64")
                self.assertEqual("skipped" in tensor, not read)
                self.assertEqual("casts" in tensor, read)
                self.refused(
                    "its shape takes",
                    "x.safetensors",
                    safetensors(one(dtype=dtype, shape="[3]", offsets="[0,%d]" % (2 * size)), b"\0" * 2 * size),
                )

    def test_order_of_tensors(self):
        content = safetensors(
            '{"c":%s,"b":%s,"a":%s}' % (entry(offsets="[4,8]"), entry(offsets="[8,12]"), entry()), b"\0" * 12
        )
        report = self.inspect(self.path("x.safetensors", content))
        self.assertEqual([t["name"] for t in report["tensors"]], ["a", "c", "b"])

    def test_many_tensors(self):
        # Beyond several growths of every array of the reader.
        names = ["t%05d" % i for i in range(3000)]
        random.Random(1).shuffle(names)
        fields = ",".join(
            '"%s":%s' % (n, entry("U8", "[1,%d]" % (i % 3), "[%d,%d]" % (o, o + i % 3)))
            for i, (n, o) in enumerate(zip(names, self.offsets(3000)))
        )
        content = safetensors("{%s}" % fields, b"\0" * 3000)
        report = self.inspect(self.path("x.safetensors", content))
        self.assertEqual(
            {t["name"]: t["shape"] for t in report["tensors"]}, {n: [1, i % 3] for i, n in enumerate(names)}
        )

    @staticmethod
    def offsets(count):
        position = 0
        for i in range(count):
            yield position
            position += i % 3

    def test_bad_npy(self):
        for name, (content, message) in BAD_NPY.items():
            with self.subTest(name):
                self.refused(message, "x.npy", content)

    def test_npy_with_dtype(self):
        void2 = npy(npy_header(descr="'|V2'"), b"\x80\x3f")
        self.refused("has 2 bytes an element, e4m3 has 1", "x.npy", void2, "--dtype", "e4m3")
        self.refused("contradicts the dtype bf16", "x.npy", npy(npy_header(), F4), "--dtype", "bf16")
        self.refused("is not read", "x.npy", npy(npy_header(descr="'|V4'"), F4), "--dtype", "fp32")
        for descr, dtype, data, value in [
            ("'|V2'", "bf16", b"\x80\x3f", 1.0),
            ("'<V2'", "bf16", b"\x00\x40", 2.0),
            ("'<V2'", "fp16", b"\x00\x3c", 1.0),
            ("'<V1'", "e4m3", b"\x7e", 448.0),
            ("'|V1'", "e5m2", b"\x7b", 57344.0),
            ("'<f1'", "e5m2", b"\x3c", 1.0),
            ("'|u1'", "e4m3", b"\x01", 2.0**-9),
            ("'|i1'", "e4m3", b"\xfe", 448.0),
            ("'<u2'", "bf16", b"\x80\x3f", 1.0),
            ("'>u2'", "bf16", b"\x3f\x80", 1.0),
            ("'<f4'", "fp32", struct.pack("<f", 3.5), 3.5),
        ]:
            with self.subTest(descr=descr, dtype=dtype):
                report = self.inspect(self.path("x.npy", npy(npy_header(descr=descr), data)), "--dtype", dtype)
                self.assertEqual(report["tensors"][0]["amax"], value)
                self.assertEqual(report["tensors"][0]["dtype"], dtype)

    def test_npy_forms(self):
        values = [1.0, -2.5, 3.0, 0.25, 0.0, -8.0]
        for header, version in [
            (npy_header(shape="(6,)"), (1, 0)),
            (npy_header(shape="(6,)"), (2, 0)),
            (npy_header(shape="(6,)"), (3, 0)),
            ('{"shape":(6L,),"fortran_order":False,"descr":"<f4"}', (1, 0)),
            (npy_header(shape="(2, 3)"), (1, 0)),
            (npy_header(shape="(2,3,)", order="True"), (1, 0)),
            (npy_header(shape="(6,1,1)", descr="'=f4'"), (1, 0)),
            (" { 'descr' : '<f4' , 'fortran_order' : False , 'shape' : ( 6 , ) } ", (1, 0)),
        ]:
            with self.subTest(header=header, version=version):
                report = self.inspect(self.path("x.npy", npy(header, struct.pack("<6f", *values), version)))
                tensor = report["tensors"][0]
                self.assertEqual((tensor["elements"], tensor["amax"], tensor["min_nonzero"]), (6, 8.0, 0.25))
                self.assertEqual(tensor["fortran_order"], "True" in header)
        for code, kind in [("e", "f2"), ("f", "f4"), ("d", "f8")]:
            for order in "<>":
                with self.subTest(kind=kind, order=order):
                    content = npy(
                        npy_header(descr="'%s%s'" % (order, kind), shape="(6,)"),
                        struct.pack(order + "6" + code, *values),
                    )
                    tensor = self.inspect(self.path("x", content))["tensors"][0]
                    self.assertEqual((tensor["amax"], tensor["min_nonzero"]), (8.0, 0.25))
        scalar = self.inspect(self.path("x.npy", npy(npy_header(shape="()"), struct.pack("<f", -7))))["tensors"][0]
        self.assertEqual((scalar["shape"], scalar["elements"], scalar["amax"]), ([], 1, 7))
        empty = self.inspect(self.path("x.npy", npy(npy_header(shape="(3, 0)"))))["tensors"][0]
        self.assertEqual((empty["shape"], empty["elements"], empty["min_nonzero"]), ([3, 0], 0, None))

    def test_raw(self):
        content = struct.pack("<6f", *range(6))
        for shape, expected in [
            ((), [6]),
            (("--shape", "6"), [6]),
            (("--shape", "2,3"), [2, 3]),
            (("--shape", "1,6,1,1,1"), [1, 6, 1, 1, 1]),
        ]:
            tensor = self.inspect(self.path("x", content), "--dtype", "fp32", *shape)["tensors"][0]
            self.assertEqual((tensor["shape"], tensor["amax"]), (expected, 5))
        self.refused(
            "the shape takes 4 elements of fp32, 16 bytes; the file has 24",
            "x",
            content,
            "--dtype",
            "fp32",
            "--shape",
            "2,2",
        )
        self.refused("the shape takes 0 elements", "x", content, "--dtype", "fp32", "--shape", "2,0")
        self.refused("23 bytes are no whole number of fp32", "x", content[:-1], "--dtype", "fp32")
        self.refused(
            "the shape [9223372036854775807, 2] of fp32 has 2^63 bytes or more",
            "x",
            content,
            "--dtype",
            "fp32",
            "--shape",
            "9223372036854775807,2",
        )
        empty = self.inspect(self.path("x", b""), "--dtype", "e4m3")["tensors"][0]
        self.assertEqual((empty["shape"], empty["elements"]), ([0], 0))
        # Bytes that look like another format are raw when asked for.
        tensor = self.inspect(self.path("x.npy", npy(npy_header(), F4)), "--format", "raw", "--dtype", "e4m3")
        self.assertEqual(tensor["format"], "raw")

    def test_kind_of_file(self):
        st = safetensors(one(), F4)
        self.assertEqual(self.inspect(self.path("x", st))["format"], "safetensors")
        self.assertEqual(self.inspect(self.path("x.bin", npy(npy_header(), F4)))["format"], "npy")
        self.assertEqual(self.inspect(self.path("x.npy", st), "--format", "safetensors")["format"], "safetensors")
        self.refused("is neither .npy nor .safetensors; for raw bytes give --dtype", "x", b"hello")
        self.refused("is neither .npy nor .safetensors", "x", b"")
        self.refused("is a ZIP archive", "x.npz", b"PK\3\4....")
        self.refused("not with the magic", "x.npy", st)
        self.refused("header", "x.safetensors", npy(npy_header(), F4))
        self.refused("--dtype is for raw and NumPy files", "x.safetensors", st, "--dtype", "bf16")
        self.refused(
            "--shape is for raw files, this one is npy",
            "x.npy",
            npy(npy_header(), F4),
            "--dtype",
            "fp32",
            "--shape",
            "1",
        )

    def test_unreadable(self):
        code, _, err = run("inspect", os.path.join(self.folder.name, "absent"))
        self.assertEqual(code, 1)
        self.assertIn("absent: cannot open the file: No such file", err)
        code, _, err = run("inspect", self.folder.name)
        self.assertEqual(code, 1)
        self.assertIn("is a directory, expected a regular file", err)
        fifo = os.path.join(self.folder.name, "fifo")
        os.mkfifo(fifo)
        code, _, err = run("inspect", fifo)
        self.assertEqual(code, 1)
        self.assertIn("is a pipe, socket or device, expected a regular file", err)

    def test_several_files(self):
        good = self.path("good.npy", npy(npy_header(), F4))
        bad = self.path("bad\x1b.npy", b"x")
        code, out, err = run("inspect", "--json", bad, good)
        files = json.loads(out)["files"]
        self.assertEqual(code, 1)
        self.assertEqual([f["file"] for f in files], [bad, good])
        self.assertIn("error", files[0])
        self.assertEqual(files[1]["tensors"][0]["elements"], 1)
        code, out, _ = run("inspect", good, good)
        self.assertEqual((code, out.count("good.npy: npy, 1 tensor")), (0, 2))
        # In one stream the message stands where the file would, and files that fail leave no blank lines.
        done = subprocess.run([FP8LM, "inspect", good, bad, bad, good], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        lines = done.stdout.decode().split("\n")
        heads = [i for i, line in enumerate(lines) if line.endswith("npy: npy, 1 tensor")]
        errors = [i for i, line in enumerate(lines) if "fp8lm inspect: " in line]
        self.assertEqual((done.returncode, len(heads), len(errors)), (1, 2, 2))
        self.assertTrue(heads[0] < errors[0] < errors[1] < heads[1], lines)
        self.assertNotIn("\n\n\n", done.stdout.decode())
        self.assertNotIn("\n\n\n", run("inspect", bad, good, bad, bad, good)[1])
        self.assertFalse(run("inspect", bad, good)[1].startswith("\n"))

    def test_patterns(self):
        content = safetensors(
            '{"l.0.w":%s,"l.1.w":%s,"b":%s}' % (entry(), entry(offsets="[4,8]"), entry(offsets="[8,12]")), b"\0" * 12
        )
        path = self.path("x.safetensors", content)
        for patterns, expected in [
            (["*"], ["l.0.w", "l.1.w", "b"]),
            (["l.?.w"], ["l.0.w", "l.1.w"]),
            (["b"], ["b"]),
            (["b", "l.1*"], ["l.1.w", "b"]),
            (["[!l]*"], ["b"]),
        ]:
            arguments = [x for p in patterns for x in ("--tensor", p)]
            self.assertEqual([t["name"] for t in self.inspect(path, *arguments)["tensors"]], expected)
        code, _, err = run("inspect", "--tensor", "b", "--tensor", "zz*", path)
        self.assertEqual(code, 1)
        self.assertIn("no tensor's name matches --tensor 'zz*'", err)
        self.assertIn("x.safetensors: safetensors, 3 tensors\n", run("inspect", path)[1])
        self.assertIn("x.safetensors: safetensors, 2 of 3 tensors\n", run("inspect", "--tensor", "l*", path)[1])
        self.assertEqual(run("inspect", "--tensor", "nope", path)[1].count("\n"), 1)
        self.assertIn("x.safetensors: safetensors, 0 of 3 tensors\n", run("inspect", "--tensor", "nope", path)[1])

    def test_escaped_output(self):
        path = self.path("x.safetensors", safetensors('{"a\\u001b[31m":%s}' % entry(), F4))
        code, out, _ = run("inspect", path)
        self.assertEqual(code, 0)
        self.assertNotIn("\x1b", out)
        self.assertIn('"a\\u001b[31m"', out)
        # C1 control characters too, which terminals obey as well.
        code, out, _ = run("inspect", self.path("x.safetensors", safetensors('{"a\\u009b31m\\u00a0":%s}' % entry(), F4)))
        self.assertEqual(code, 0)
        self.assertNotIn("\x9b", out)
        self.assertIn('"a\\u009b31m\u00a0"', out)

    def test_escaped_names_of_files(self):
        for content in (npy(npy_header(), F4), b"\x93NUMPY"):
            _, out, err = run("inspect", self.path("e\x1b[31m\n\x9bx.npy", content))
            self.assertNotIn("\x1b", out + err)
            self.assertNotIn("\x9b", out + err)
            self.assertIn("e\\u001b[31m\\u000a\\u009bx.npy: ", out + err)
        _, _, err = run("inspect\x1b[31m")
        self.assertIn("unknown command 'inspect\\u001b[31m'", err)
        _, _, err = run("inspect", "--f\x1boo")
        self.assertIn("option '--f\\u001boo'", err)


class Figures(TensorFiles):
    def compare(self, values, report, margin=0):
        tensor = report["tensors"][0]
        finite = [v for v in values if math.isfinite(v)]
        self.assertEqual(tensor["elements"], len(values))
        self.assertEqual(tensor["nonfinite"], len(values) - len(finite))
        self.assertEqual(tensor["amax"], max((abs(v) for v in finite), default=0))
        self.assertEqual(tensor["min_nonzero"], min((abs(v) for v in finite if v), default=None))
        expected = formats.expected_casts(values, margin)
        self.assertEqual(len(tensor["casts"]), len(expected))
        for cast in tensor["casts"]:
            key = cast["format"], cast["policy"]
            with self.subTest(key):
                want = expected[key]
                self.assertEqual(cast["scale"], want["scale"])
                self.assertEqual(cast["underflow_share"], want["underflow_share"])
                self.assertEqual(cast["overflow_share"], want["overflow_share"])
                self.assertEqual(cast["exact"], want["snr_db"] is None)
                if want["snr_db"] is None:
                    self.assertIsNone(cast["snr_db"])
                else:
                    self.assertAlmostEqual(cast["snr_db"], want["snr_db"], delta=1e-9)

    def raw(self, values, *arguments):
        return self.inspect(self.path("x", struct.pack("<%df" % len(values), *values)), "--dtype", "fp32", *arguments)

    def values(self, seed, count, spread):
        generator = random.Random(seed)
        return [formats.to_fp32(generator.gauss(0, 1) * math.exp(generator.gauss(0, spread))) for _ in range(count)]

    def test_known_answers(self):
        # Worked by hand: at scale 1, E4M3 keeps 448 and 1, saturates 1000 to 448, flushes 2^-11; 1.0625 ties to 1.
        values = [448.0, 1.0, 1000.0, 2.0**-11, 1.0625, 0.0, -0.0, -1000.0]
        cast = {(c["format"], c["policy"]): c for c in self.raw(values)["tensors"][0]["casts"]}["e4m3", "none"]
        self.assertEqual((cast["underflow_share"], cast["overflow_share"]), (1 / 8, 2 / 8))
        signal = 448.0**2 + 1 + 2e6 + 2.0**-22 + 1.0625**2
        noise = 2 * 552.0**2 + 2.0**-22 + 0.0625**2
        self.assertAlmostEqual(cast["snr_db"], 10 * math.log10(signal / noise), delta=1e-12)

    def test_ordinary_values(self):
        for seed, spread in [(1, 0), (2, 2), (3, 8)]:
            values = self.values(seed, 3001, spread)
            self.compare(values, self.raw(values))

    def test_margins(self):
        values = self.values(4, 500, 3)
        for margin in (-64, -3, 1, 7, 64):
            self.compare(values, self.raw(values, "--margin", str(margin)), margin)

    def test_edges(self):
        self.compare([0.0, -0.0, 0.0], self.raw([0.0, -0.0, 0.0]))
        for amax in (
            2.0**-149,
            2.0**-126,
            1e-38,
            1.3e-36,
            1e-34,
            3.0,
            448.0,
            57344.0,
            65504.0,
            3e38,
            3.4028234663852886e38,
        ):
            values = [formats.to_fp32(amax * f) for f in (1, -0.5, 0.3, 1e-3, 1e-9, 0)]
            with self.subTest(amax):
                self.compare(values, self.raw(values))

    def test_nonfinite_values(self):
        values = self.values(5, 400, 1)
        for position, bad in [(0, math.inf), (399, -math.inf), (200, math.nan)]:
            changed = list(values)
            changed[position] = bad
            self.compare(changed, self.raw(changed))
        self.compare([math.nan, math.inf], self.raw([math.nan, math.inf]))

    def test_stored_formats(self):
        # Every code of the narrow formats is read as the value that the format's specification gives it.
        for form, name, size in zip(formats.FORMATS, ("F8_E4M3", "F8_E5M2", "BF16", "F16"), (1, 1, 2, 2)):
            sign = 1 << (8 * size - 1)
            step = 1 if size == 1 else 61
            codes = list(range(0, len(form.values), step)) + [len(form.values) - 1]
            data = b"".join(c.to_bytes(size, "little") + (c | sign).to_bytes(size, "little") for c in codes)
            values = [v for c in codes for v in (form.decode(c), -form.decode(c))]
            content = safetensors(one(dtype=name, shape="[%d,2]" % len(codes), offsets="[0,%d]" % len(data)), data)
            with self.subTest(name):
                self.compare(values, self.inspect(self.path("x.safetensors", content)))

    def test_fp64(self):
        values = [
            1.0,
            1e-50,
            -1e300,
            1e39,
            1 + 2.0**-40,
            3.4028235677973364e38,
            3.4028235677973366e38,
            math.inf,
            math.nan,
            2.0**-150,
            1.5 * 2.0**-150,
        ]
        tensor = self.inspect(self.path("x", struct.pack("<%dd" % len(values), *values)), "--dtype", "fp64")["tensors"][
            0
        ]
        self.assertEqual((tensor["overflowed_fp32"], tensor["underflowed_fp32"], tensor["nonfinite"]), (3, 2, 5))
        self.assertEqual(tensor["amax"], 3.4028234663852886e38)
        self.assertEqual(tensor["min_nonzero"], 2.0**-149)

    def test_more_than_a_block(self):
        # Blocks of 65,536 elements: the figures of a repeated tensor are those of one copy, at any number of threads.
        values = self.values(6, 1023, 2)
        single = self.raw(values)["tensors"][0]
        content = struct.pack("<1023f", *values) * 200
        reports = [self.inspect(self.path("x", content), "--dtype", "fp32", "--threads", str(t)) for t in (1, 2, 3)]
        self.assertEqual(reports[0], reports[1])
        self.assertEqual(reports[0], reports[2])
        for one_cast, many in zip(single["casts"], reports[0]["tensors"][0]["casts"]):
            self.assertEqual(one_cast["scale"], many["scale"])
            self.assertAlmostEqual(one_cast["underflow_share"], many["underflow_share"], delta=1e-12)
            self.assertAlmostEqual(one_cast["overflow_share"], many["overflow_share"], delta=1e-12)
            if not one_cast["exact"]:
                self.assertAlmostEqual(one_cast["snr_db"], many["snr_db"], delta=1e-9)

    def test_table(self):
        code, out, _ = run("inspect", "--dtype", "fp32", self.path("x", struct.pack("<4f", 1, 2, 3, 448)))
        self.assertEqual(code, 0)
        self.assertIn("amax 448   smallest nonzero 1   non-finite 0", out)
        rows = [
            line.split()
            for line in out.splitlines()
            if line.split()[:1] and line.split()[0] in ("e4m3", "e5m2", "bf16", "fp16")
        ]
        self.assertEqual(len(rows), 12)
        self.assertEqual(rows[0], ["e4m3", "just-in-time", "1", "exact", "0", "0"])
        self.assertEqual(rows[4][:3], ["e5m2", "power-of-two", "128"])

    def test_bad_tier(self):
        path = self.path("x.npy", npy(npy_header(), F4))
        done = subprocess.run([FP8LM, "inspect", path], capture_output=True, env={**os.environ, "FP8CORE_ISA": "mmx"})
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"mmx", done.stderr)


class Usage(unittest.TestCase):
    def wrong(self, message, *arguments):
        with self.subTest(arguments=arguments):
            code, out, err = run(*arguments)
            self.assertEqual((code, out), (2, ""))
            self.assertIn(message, err)

    def test_commands(self):
        self.wrong("no command given; commands are " + COMMANDS)
        self.wrong("unknown command 'inspct'; commands are " + COMMANDS, "inspct")
        self.wrong("unknown option '--foo'; commands are " + COMMANDS, "--foo")
        self.wrong("fp8lm bench: no benchmark given; benchmarks are core", "bench")
        self.wrong("fp8lm bench: unknown benchmark 'x'; benchmarks are core", "bench", "x")
        self.wrong("unknown command 'x'; commands are " + COMMANDS, "help", "x")

    def test_help(self):
        for arguments in (["--help"], ["-h"], ["help"], ["help", "help"]):
            code, out, err = run(*arguments)
            self.assertEqual((code, err), (0, ""))
            self.assertIn("Usage: fp8lm COMMAND", out)
        for command in (["inspect"], ["bench"], ["bench", "core"]):
            direct = run(*command, "--help")
            self.assertEqual((direct[0], direct[2]), (0, ""))
            self.assertIn("Usage: fp8lm %s" % " ".join(command), direct[1])
            self.assertEqual(direct, run("help", *command))

    def test_every_option_is_described(self):
        for command in (["inspect"], ["bench", "core"]):
            listed = run(*command, "--nonsense")[2].split("options are ")[1].split(";")[0].split(", ")
            text = run(*command, "--help")[1]
            for option in listed:
                self.assertRegex(text, r"\n  %s\b" % option)

    def test_version(self):
        code, out, _ = run("--version")
        self.assertEqual(code, 0)
        self.assertRegex(out, r"^fp8lm \d+\.\d+\.\d+ \(libfp8core \d+\.\d+\.\d+\)\n$")
        for option in ("--version", "--help", "-h"):
            self.wrong("unexpected argument 'extra' after %s" % option, option, "extra")
        self.wrong("unexpected argument 'extra'", "help", "inspect", "extra")
        self.wrong("unexpected argument 'extra'", "help", "help", "extra")
        self.wrong("unexpected argument 'extra'", "help", "bench", "core", "extra")
        self.wrong("unknown benchmark 'extra'", "help", "bench", "extra")

    def test_inspect_options(self):
        self.wrong("no file given", "inspect")
        self.wrong(
            "unknown or ambiguous option '--foo'; options are --format, --dtype, --shape", "inspect", "--foo", "x"
        )
        self.wrong("unknown option '-x'; options are --format", "inspect", "-x")
        self.wrong("unknown or ambiguous option '--t'", "inspect", "--t", "1", "x")
        self.wrong("option '--dtype' needs a value", "inspect", "--dtype")
        self.wrong("option '--json' takes no value", "inspect", "--json=1", "x")
        self.wrong(
            "--dtype is 'fp12', expected e4m3, e5m2, bf16, fp16, fp32 or fp64", "inspect", "--dtype", "fp12", "x"
        )
        self.wrong("--format is 'zip', expected raw, npy or safetensors", "inspect", "--format", "zip", "x")
        self.wrong("--format raw needs --dtype", "inspect", "--format", "raw", "x")
        self.wrong("--shape needs --dtype", "inspect", "--shape", "1", "x")
        for bad in ("", "-1", "1,", ",1", "1x2", " 1", "1.0", "9223372036854775808", "abc"):
            self.wrong("a size of --shape is '", "inspect", "--dtype", "fp32", "--shape", bad, "x")
        self.wrong("expected at most 64 sizes", "inspect", "--dtype", "fp32", "--shape", ",".join(["1"] * 65), "x")
        for option, bads, limits in [
            ("--margin", ["65", "-65", "x", "", "1.5"], "from -64 to 64"),
            ("--threads", ["0", "-1", "1025", "two", "99999999999999999999"], "from 1 to 1024"),
        ]:
            for bad in bads:
                self.wrong(
                    "%s is '%s', expected a whole number %s" % (option, bad, limits), "inspect", option, bad, "x"
                )

    def test_bench_options(self):
        self.wrong("unknown or ambiguous option '--foo'; options are --device, --isa", "bench", "core", "--foo")
        self.wrong("unexpected argument 'x'", "bench", "core", "x")
        self.wrong("--isa is 'sse', expected scalar, avx2, avx512 or avx512-bf16", "bench", "core", "--isa", "sse")
        self.wrong("--device is 'tpu', expected cpu, cuda, cuda:N or all", "bench", "core", "--device", "tpu")
        self.wrong("--device is 'cudax', expected cpu, cuda, cuda:N or all", "bench", "core", "--device", "cudax")
        self.wrong("the number of --device cuda:N is 'x'", "bench", "core", "--device", "cuda:x")
        self.wrong("--elements is '4097', expected a multiple of 4096", "bench", "core", "--elements", "4097")
        self.wrong("--elements is '0', expected a whole number from 4096", "bench", "core", "--elements", "0")
        for bad in ("0", "x", "", "nan", "inf", "1s", "3601"):
            self.wrong(
                "--seconds is '%s', expected a number from 0.001 to 3600" % bad, "bench", "core", "--seconds", bad
            )
        self.wrong(
            "no case's name contains --filter 'nothing'", "bench", "core", "--device", "cpu", "--filter", "nothing"
        )

    def test_no_gpu(self):
        code, out, err = run("bench", "core", "--device", "cuda:1023", "--list")
        self.assertEqual((code, out), (1, ""))
        self.assertTrue(err.startswith("fp8lm bench core: ") and len(err) > 30, err)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full")
    def test_full_disk(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([FP8LM, "--help"], stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"cannot write to standard output: No space left on device", done.stderr)


class Bench(unittest.TestCase):
    def test_list(self):
        code, out, _ = run("bench", "core", "--device", "cpu", "--isa", "scalar", "--list")
        self.assertEqual(code, 0)
        names = out.split()
        self.assertEqual(len(names), 7 + 9)
        self.assertIn("cast/scalar/fp32-e4m3-transpose", names)
        self.assertIn("gemm/scalar/e4m3-bf16/1024x3072x768", names)
        code, out, _ = run("bench", "core", "--device", "cpu", "--list", "--filter", "cast/*/fp32-e5m2")
        self.assertTrue(all(name.endswith("/fp32-e5m2") for name in out.split()) and "cast/scalar/fp32-e5m2" in out)
        # A whole name is one case, though other names begin with it; what matches no name as a whole is looked for in them.
        for pattern, expected in [
            ("cast/scalar/fp32-e4m3", ["cast/scalar/fp32-e4m3"]),
            ("gemm/scalar/*/1024x3072x768", [name for name in names if name.endswith("/1024x3072x768")]),
            ("fp32-e4m3", [name for name in names if "fp32-e4m3" in name]),
            ("cast/scalar/", [name for name in names if name.startswith("cast/")]),
            ("e4m3-[sf]", [name for name in names if "e4m3-s" in name or "e4m3-f" in name]),
        ]:
            with self.subTest(pattern=pattern):
                code, out, _ = run(
                    "bench", "core", "--device", "cpu", "--isa", "scalar", "--list", "--filter", pattern
                )
                self.assertEqual((code, out.split()), (0, expected))

    def test_small_run(self):
        arguments = [
            "bench",
            "core",
            "--device",
            "cpu",
            "--elements",
            "40960",
            "--seconds",
            "0.001",
            "--filter",
            "cast",
            "--threads",
            "2",
        ]
        code, out, err = run(*arguments, "--json")
        self.assertEqual(code, 0)
        # On fewer CPUs than threads there is a warning.
        self.assertRegex(err, r"\A(fp8lm bench core: warning: \d+ threads on \d+ CPU.*\n)?\Z")
        results = json.loads(out)["results"]
        self.assertEqual(len(results) % 7, 0)
        for result in results:
            self.assertGreater(result["rate"]["median"], 0)
            self.assertGreater(result["limit"]["median"], 0)
            self.assertAlmostEqual(
                result["share"]["median"],
                result["rate"]["median"] / result["limit"]["median"],
                delta=1e-9 if result["rounds"] == 1 else 1e9,
            )
            self.assertEqual(result["limit_name"], "copy")
        sizes = {r["name"].split("/")[2]: r["bytes"] / 40960 for r in results}
        self.assertEqual(
            sizes,
            {
                "fp32-e4m3": 5,
                "fp32-e5m2": 5,
                "bf16-e4m3": 3,
                "e4m3-fp32": 5,
                "e4m3-bf16": 3,
                "fp32-e4m3-stochastic": 5,
                "fp32-e4m3-transpose": 6,
            },
        )
        code, out, _ = run(*arguments)
        self.assertEqual(code, 0)
        self.assertIn("Casts of 40960 elements, GB/s of bytes read and written", out)

    def test_small_gemm(self):
        isa = run("bench", "core", "--device", "cpu", "--list")[1].split()[-1].split("/")[1]
        code, out, err = run(
            "bench",
            "core",
            "--device",
            "cpu",
            "--isa",
            isa,
            "--seconds",
            "0.001",
            "--json",
            "--filter",
            "gemm/*/1024x1024x1024",
        )
        self.assertEqual(code, 0)
        # On fewer CPUs than threads there is a warning.
        self.assertRegex(err, r"\A(fp8lm bench core: warning: \d+ threads on \d+ CPU.*\n)?\Z")
        results = json.loads(out)["results"]
        self.assertEqual([r["name"].split("/")[2] for r in results], ["e4m3-bf16", "bf16-bf16", "fp32-fp32"])
        self.assertTrue(all(r["rate"]["median"] > 0 and r["unit"] == "GFLOP/s" for r in results))


@unittest.skipUnless(SLOW, "slow")
class Large(TensorFiles):
    def peak_memory(self, *arguments):
        # The child's own peak, in KiB, by way of a second child that waits for it alone.
        script = (
            "import resource,subprocess,sys;c=subprocess.run(sys.argv[1:],stdout=subprocess.DEVNULL).returncode;"
            "print(c,resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        out = subprocess.run([sys.executable, "-c", script, FP8LM, *arguments], capture_output=True, check=True).stdout
        code, memory = map(int, out.split())
        self.assertEqual(code, 0)
        return memory

    def test_beyond_4_gib(self):
        # 2^32 + 1 elements, all zero but the last.
        path = self.path("x", b"")
        os.truncate(path, 2**32)
        with open(path, "ab") as file:
            file.write(b"\x38")
        tensor = self.inspect(path, "--dtype", "e4m3")["tensors"][0]
        self.assertEqual((tensor["elements"], tensor["amax"]), (2**32 + 1, 1.0))

    def test_bounded_memory(self):
        small = self.path("small", b"\0" * 4096)
        large = self.path("large", b"")
        os.truncate(large, 2**30)
        self.assertLess(
            self.peak_memory("inspect", "--dtype", "fp32", large),
            self.peak_memory("inspect", "--dtype", "fp32", small) + 8192,
        )

    def test_longest_header(self):
        name = "n" * 1000
        header = '{"%s":%s}' % (name, entry())
        whole = safetensors(header + " " * (100000000 - len(header)), F4)
        self.assertEqual(self.inspect(self.path("x.safetensors", whole))["tensors"][0]["name"], name)
        count = 1000000
        fields = ",".join('"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(count))
        code, out, err = run(
            "inspect", "--json", "--tensor", "999999", self.path("x.safetensors", safetensors("{%s}" % fields))
        )
        self.assertEqual(code, 0)
        # On fewer CPUs than threads there is a warning.
        self.assertRegex(err, r"\A(fp8lm bench core: warning: \d+ threads on \d+ CPU.*\n)?\Z")
        self.assertEqual([t["name"] for t in json.loads(out)["files"][0]["tensors"]], ["999999"])


if __name__ == "__main__":
    arguments = [sys.argv[0]] + (["Large"] if SLOW else [])
    unittest.main(argv=arguments)
