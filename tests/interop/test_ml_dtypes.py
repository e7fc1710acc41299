"""Casts against ml_dtypes and numpy, bit for bit. Argument: the shared library. Exits with 77 where a peer is missing."""
import ctypes
import sys

try:
    import ml_dtypes
    import numpy as np
except ImportError as missing:
    print(f"skipped: {missing}; see requirements.txt and the option interop_python")
    sys.exit(77)

from fp8core_ctypes import BF16, E4M3, E5M2, FP16, FP32, CastOptions, load, vector

TYPES = {
    E4M3: (ml_dtypes.float8_e4m3fn, np.uint8),
    E5M2: (ml_dtypes.float8_e5m2, np.uint8),
    BF16: (ml_dtypes.bfloat16, np.uint16),
    FP16: (np.float16, np.uint16),
    FP32: (np.float32, np.uint32),
}
NAMES = {E4M3: "e4m3", E5M2: "e5m2", BF16: "bf16", FP16: "fp16", FP32: "fp32"}


library = load(sys.argv[1])
context = ctypes.c_void_p()
assert library.fp8core_context_create(ctypes.byref(context), None) == 0, library.fp8core_last_error()


def tensor(array, dtype):
    return vector(array.ctypes.data, dtype, array.size)


def cast(codes, source, destination):
    result = np.zeros(codes.size, TYPES[destination][1])
    options = CastOptions(size=ctypes.sizeof(CastOptions), saturate=0)
    status = library.fp8core_cast(context, ctypes.byref(options), ctypes.byref(tensor(codes, source)),
                                  ctypes.byref(tensor(result, destination)))
    assert status == 0, library.fp8core_last_error()
    return result


failures = 0


def check(what, codes, source, destination):
    """All but the payload of NaN, which formats leave open, and its sign, which conversions of the peers may drop."""
    global failures
    ours = cast(codes, source, destination)
    with np.errstate(all="ignore"):
        values = codes.view(TYPES[source][0])
        theirs = (values if source == destination else values.astype(np.float32).astype(TYPES[destination][0]))
        theirs = np.ascontiguousarray(theirs).view(TYPES[destination][1])
        nan = np.isnan(values.astype(np.float32))
        our_nan = np.isnan(ours.view(TYPES[destination][0]).astype(np.float32))
    wrong = np.where(nan, ~our_nan, ours != theirs)
    # NaN for a finite value or an infinity is right only where the peer says so, which the comparison of codes covers.
    if wrong.any():
        i = int(np.argmax(wrong))
        failures += 1
        print(f"FAILED {what}: {NAMES[source]} {codes[i]:x} -> {NAMES[destination]} {ours[i]:x}, the peer has {theirs[i]:x}"
              f" ({int(wrong.sum())} of {codes.size} differ)")
    sign = TYPES[destination][1](1 << (8 * ours.itemsize - 1))
    dropped = int((nan & ((ours ^ theirs) & sign != 0)).sum())
    if dropped:
        print(f"note: {what}, {NAMES[source]} -> {NAMES[destination]}: the sign of {dropped} of {int(nan.sum())} NaNs differs")


def ties(destination):
    """Every value of the format, halfway to the next one, and the FP32 neighbours of both, of both signs."""
    dtype, code = TYPES[destination]
    values = np.arange(2 ** (8 * code().itemsize - 1), dtype=code).view(dtype).astype(np.float64)
    values = values[np.isfinite(values)]
    halves = (values[:-1] + values[1:]) / 2
    maximum = values[-1]
    above = maximum + (maximum - values[-2]) * np.array([0.25, 0.5, 0.75, 1.0, 2.0, 4.0])
    with np.errstate(over="ignore"):
        points = np.concatenate([values, halves, above]).astype(np.float32).view(np.uint32)
    points = np.concatenate([points, points + np.uint32(1), np.maximum(points, 1) - np.uint32(1)])
    return np.concatenate([points, points | np.uint32(0x80000000)])


generator = np.random.default_rng(1)
random = generator.integers(0, 2**32, 4_000_000, dtype=np.uint32)
fitting = (generator.standard_normal(4_000_000) * np.exp(generator.uniform(-12, 8, 4_000_000))).astype(np.float32).view(np.uint32)
for destination in range(5):
    for source in (E4M3, E5M2):
        check("all codes", np.arange(256, dtype=np.uint8), source, destination)
    for source in (BF16, FP16):
        check("all codes", np.arange(65536, dtype=np.uint16), source, destination)
    check("random bits", random, FP32, destination)
    check("random values", fitting, FP32, destination)
    if destination != FP32:
        check("ties", ties(destination), FP32, destination)
library.fp8core_context_destroy(ctypes.byref(context))
print(f"ml_dtypes {ml_dtypes.__version__}, numpy {np.__version__}: {failures} failures")
sys.exit(1 if failures else 0)
