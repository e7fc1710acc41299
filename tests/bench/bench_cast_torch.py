"""Quantises FP32 to E4M3 beside PyTorch on the CPU, in rounds of both, and prints the medians and their ratio.

Both sides do what just-in-time scaling does (amax of the tensor, scale from it, scaled cast), and the cast alone with a known
scale. Ours gathers amax and counts in the cast, PyTorch's does not. Exits with 77 without PyTorch.
"""
import argparse
import ctypes
import os
import statistics
import sys
import time

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("library", help="libfp8core.so: build/libfp8core/libfp8core.so")
parser.add_argument("elements", type=int, nargs="?", default=64 << 20, help="default 64 Mi")
parser.add_argument("threads", type=int, nargs="?", default=2, help="default 2")
arguments = parser.parse_args()

try:
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "interop"))
from fp8core_ctypes import E4M3, FP32, CastOptions, ContextOptions, ScalingOptions, load, vector

ROUNDS = 15
elements, threads = arguments.elements, arguments.threads
torch.set_num_threads(threads)


library = load(arguments.library)


def checked(status):
    if status != 0:
        sys.exit(library.fp8core_last_error().decode())


context, scaling = ctypes.c_void_p(), ctypes.c_void_p()
options = ContextOptions(size=ctypes.sizeof(ContextOptions), api_version=library.fp8core_api_version(), threads=threads)
checked(library.fp8core_context_create(ctypes.byref(context), ctypes.byref(options)))
JUST_IN_TIME = 0
policy = ScalingOptions(size=ctypes.sizeof(ScalingOptions), policy=JUST_IN_TIME, history_length=1)
checked(library.fp8core_scaling_create(ctypes.byref(scaling), context, ctypes.c_int64(1), (ctypes.c_int * 1)(E4M3),
                                       ctypes.byref(policy)))

values = torch.randn(elements)
codes = torch.empty(elements, dtype=torch.uint8)
their_codes = torch.empty(elements, dtype=torch.float8_e4m3fn)
counts = (ctypes.c_uint64 * 4)()
cast_options = CastOptions(size=ctypes.sizeof(CastOptions), saturate=1, statistics=ctypes.addressof(counts))


def tensor(memory, dtype):
    return vector(memory.data_ptr(), dtype, elements)


source, destination = tensor(values, FP32), tensor(codes, E4M3)


def ours_just_in_time():
    checked(library.fp8core_scaling_cast(scaling, ctypes.c_int64(0), ctypes.byref(cast_options), ctypes.byref(source),
                                         ctypes.byref(destination), None))


def ours_known_scale():
    checked(library.fp8core_cast(context, ctypes.byref(cast_options), ctypes.byref(source), ctypes.byref(destination)))


def theirs_just_in_time():
    scale = 448.0 / values.abs().max()
    their_codes.copy_((values * scale).clamp_(-448.0, 448.0))


def theirs_known_scale():
    # Without amax or counts, and without the clamp that saturating needs: the least that the peer can do.
    their_codes.copy_(values * known_scale)


ours_just_in_time()
known_scale = 448.0 / values.abs().max()
theirs_just_in_time()
different = int((codes != their_codes.view(torch.uint8)).sum())
pairs = {
    "just in time (amax, scale, cast)": (ours_just_in_time, theirs_just_in_time),
    "known scale (cast)": (ours_known_scale, theirs_known_scale),
}
print(f"torch {torch.__version__}, {threads} threads, {elements} elements; {different} codes differ")
for name, runs in pairs.items():
    seconds = ([], [])
    for _ in range(ROUNDS):
        for run, kept in zip(runs, seconds):
            start = time.perf_counter()
            run()
            kept.append(time.perf_counter() - start)
    ours, theirs = (statistics.median(kept) for kept in seconds)
    print(f"{name}: ours {elements / ours / 1e9:.2f} G values/s, PyTorch {elements / theirs / 1e9:.2f}, ratio {theirs / ours:.2f}")
