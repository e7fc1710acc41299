#!/usr/bin/env python3
"""fp8lm inspect against NumPy, ml_dtypes and safetensors: files that they write are read right, and the figures are those that
ml_dtypes' own casts give.

Usage: check_interop.py FP8LM. Exits with 77 (skipped) where a package is missing."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import unittest

try:
    import ml_dtypes
    import numpy as np
    import safetensors
    import safetensors.numpy
except ImportError as missing:
    print("skipped: %s; see tests/interop/requirements.txt" % missing)
    sys.exit(77)

FP8LM = sys.argv[1]
FORMATS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "bf16": (ml_dtypes.bfloat16, float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)),
    "fp16": (np.float16, 65504.0),
}
STORED = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
}


def inspect(*arguments):
    done = subprocess.run([FP8LM, "inspect", "--json", *arguments], capture_output=True, timeout=600)
    if done.returncode:
        raise AssertionError(done.stderr.decode())
    return json.loads(done.stdout)["files"]


def expected(values):
    """Figures of FP32 values, by NumPy's arithmetic and ml_dtypes' casts."""
    values = np.asarray(values, dtype=np.float32).ravel()
    finite = values[np.isfinite(values)]
    magnitudes = np.abs(finite)
    amax = np.float32(magnitudes.max(initial=0))
    usable = len(finite) == len(values) and amax > 0
    result = {}
    for (name, (dtype, largest)), policy in itertools.product(
        FORMATS.items(), ("just-in-time", "power-of-two", "none")
    ):
        scale = np.float64(1)
        if usable and policy != "none" and name != "bf16":
            scale = np.clip(np.float64(largest) / np.float64(amax), 2.0**-126, 2.0**126)
            scale = np.exp2(np.floor(np.log2(scale))) if policy == "power-of-two" else scale
        scale = np.float32(scale)
        with np.errstate(over="ignore"):
            scaled = finite * scale
            # ml_dtypes does not saturate: what it makes infinite or NaN of a finite value is beyond the range.
            cast = scaled.astype(dtype)
        beyond = ~np.isfinite(cast.astype(np.float32))
        returned = np.where(beyond, np.copysign(np.float32(largest), scaled), cast.astype(np.float32))
        returned = returned * (np.float32(1) / scale)
        noise = np.sum((finite.astype(np.float64) - returned.astype(np.float64)) ** 2)
        signal = np.sum(finite.astype(np.float64) ** 2)
        result[name, policy] = (
            float(scale),
            10 * np.log10(signal / noise) if noise > 0 else None,
            float(np.sum((finite != 0) & (returned == 0)) / max(len(values), 1)),
            float(np.sum(beyond) / max(len(values), 1)),
        )
    return result


def serialize(arrays):
    """The package's plain interface, which takes names of dtypes and bytes, or since 0.8 their address."""
    spelled = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BF16": "bfloat16", "F16": "float16"}
    specifications = {}
    for name, array in arrays.items():
        dtype = spelled[name.split(".")[-1]]
        shape = list(array.shape)
        if hasattr(safetensors, "TensorSpec"):
            specifications[name] = safetensors.TensorSpec(
                dtype=dtype, shape=shape, data_ptr=array.ctypes.data, data_len=array.nbytes
            )
        else:
            specifications[name] = {"dtype": dtype, "shape": shape, "data": array.tobytes()}
    return safetensors.serialize(specifications)


class Interop(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.generator = np.random.default_rng(20240229)

    def tearDown(self):
        self.folder.cleanup()

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def compare(self, tensor, array):
        values = np.asarray(array).astype(np.float32)
        self.assertEqual(tensor["shape"], list(array.shape))
        self.assertEqual(tensor["elements"], values.size)
        finite = np.abs(values[np.isfinite(values)])
        self.assertEqual(tensor["amax"], float(finite.max(initial=0)))
        self.assertEqual(tensor["nonfinite"], int(values.size - finite.size))
        nonzero = finite[finite > 0]
        self.assertEqual(tensor["min_nonzero"], float(nonzero.min()) if nonzero.size else None)
        want = expected(values)
        self.assertEqual(len(tensor["casts"]), len(want))
        for cast in tensor["casts"]:
            with self.subTest(format=cast["format"], policy=cast["policy"]):
                scale, snr, underflow, overflow = want[cast["format"], cast["policy"]]
                self.assertEqual(cast["scale"], scale)
                self.assertEqual(cast["underflow_share"], underflow)
                self.assertEqual(cast["overflow_share"], overflow)
                self.assertEqual(cast["exact"], snr is None)
                if snr is not None:
                    self.assertAlmostEqual(cast["snr_db"], snr, delta=1e-6)

    def arrays(self):
        normal = self.generator.standard_normal
        yield "normal", normal((37, 129))
        yield "log-normal", normal(70001) * np.exp(4 * normal(70001))
        yield "small", normal((3, 5, 7)) * 1e-9
        yield "large", normal((11, 2, 3, 5, 2)) * 1e5
        yield "zeros", np.zeros((4, 4))
        yield "scalar", np.array(-3.25)
        yield "empty", np.zeros((0, 8))
        yield "non-finite", np.array([1.0, np.nan, -np.inf, 1e-8, 7.7])

    def test_npy(self):
        for (name, array), dtype, order in itertools.product(
            self.arrays(), ("<f2", "<f4", "<f8", ">f2", ">f4", ">f8"), "CF"
        ):
            with self.subTest(name=name, dtype=dtype, order=order):
                with np.errstate(over="ignore"):
                    stored = np.asarray(array, dtype=dtype, order=order)
                np.save(self.path("x.npy"), stored)
                tensor = inspect(self.path("x.npy"))[0]["tensors"][0]
                self.assertEqual(tensor["stored_dtype"], dtype)
                self.compare(tensor, stored)

    def test_npy_of_ml_dtypes(self):
        for name, dtype in (
            ("e4m3", ml_dtypes.float8_e4m3fn),
            ("e5m2", ml_dtypes.float8_e5m2),
            ("bf16", ml_dtypes.bfloat16),
        ):
            for _, array in self.arrays():
                stored = array.astype(np.float32).astype(dtype)
                np.save(self.path("x.npy"), stored)
                self.compare(inspect("--dtype", name, self.path("x.npy"))[0]["tensors"][0], stored)
                np.save(self.path("x.npy"), stored.view(np.uint8 if stored.itemsize == 1 else np.uint16))
                self.compare(inspect("--dtype", name, self.path("x.npy"))[0]["tensors"][0], stored)

    def test_npy_versions(self):
        array = self.generator.standard_normal((6, 7)).astype(np.float32)
        for version in ((1, 0), (2, 0), (3, 0)):
            with open(self.path("x.npy"), "wb") as file:
                np.lib.format.write_array(file, array, version)
            self.compare(inspect(self.path("x.npy"))[0]["tensors"][0], array)

    def test_safetensors(self):
        tensors = {}
        for (name, array), dtype in itertools.product(self.arrays(), (np.float16, np.float32, np.float64)):
            with np.errstate(over="ignore"):
                tensors["%s.%s" % (name, np.dtype(dtype).name)] = array.astype(dtype)
        tensors["step"] = np.arange(3)
        safetensors.numpy.save_file(tensors, self.path("x.safetensors"), metadata={"format": "np"})
        found = {t["name"]: t for t in inspect(self.path("x.safetensors"))[0]["tensors"]}
        self.assertEqual(set(found), set(tensors))
        self.assertIn("skipped", found.pop("step"))
        for name, tensor in found.items():
            with self.subTest(name):
                self.compare(tensor, tensors[name])

    def test_safetensors_of_narrow_formats(self):
        with np.errstate(over="ignore"):
            arrays = {
                "%s.%s" % (name, key): array.astype(np.float32).astype(dtype)
                for (name, array), (key, dtype) in itertools.product(self.arrays(), STORED.items())
            }
        with open(self.path("x.safetensors"), "wb") as file:
            file.write(serialize(arrays))
        found = {t["name"]: t for t in inspect(self.path("x.safetensors"))[0]["tensors"]}
        self.assertEqual(set(found), set(arrays))
        for name, tensor in found.items():
            with self.subTest(name):
                self.assertEqual(tensor["stored_dtype"], name.split(".")[-1])
                self.compare(tensor, arrays[name])

    def test_raw(self):
        for name, dtype in {**{k: v[0] for k, v in FORMATS.items()}, "fp32": np.float32, "fp64": np.float64}.items():
            array = (self.generator.standard_normal((13, 17)) * 3).astype(dtype)
            array.tofile(self.path("x"))
            self.compare(inspect("--dtype", name, "--shape", "13,17", self.path("x"))[0]["tensors"][0], array)

    def test_every_code(self):
        for name, dtype in (("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)):
            codes = np.arange(256, dtype=np.uint8)
            codes.tofile(self.path("x"))
            self.compare(inspect("--dtype", name, self.path("x"))[0]["tensors"][0], codes.view(dtype))
        codes = np.arange(65536, dtype=np.uint16)
        codes.tofile(self.path("x"))
        for name, dtype in (("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)):
            self.compare(inspect("--dtype", name, self.path("x"))[0]["tensors"][0], codes.view(dtype))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]])
