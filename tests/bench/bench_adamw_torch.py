"""One step of AdamW beside torch.optim.AdamW(fused=True) on the CPU, in rounds of both, and prints medians and ratios.

Preset fp8 with FP8 gradients and weights, and preset fp32, against PyTorch in FP32 on as many parameters. Exits with 77 without
PyTorch.
"""
import argparse
import ctypes
import os
import statistics
import sys
import time

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("core", help="libfp8core.so: build/libfp8core/libfp8core.so")
parser.add_argument("optim", help="libfp8optim.so: build/libfp8optim/libfp8optim.so")
parser.add_argument("parameters", type=int, nargs="?", default=64, help="millions (2^20), default 64")
parser.add_argument("threads", type=int, nargs="?", default=2, help="default 2")
arguments = parser.parse_args()

try:
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "interop"))
import fp8core_ctypes
import fp8optim_ctypes as optim
from fp8core_ctypes import E4M3, FP32, ContextOptions, Tensor

ROUNDS = 15
COLUMNS = 1024
rows = (arguments.parameters << 20) // COLUMNS
torch.set_num_threads(arguments.threads)
core = fp8core_ctypes.load(arguments.core)
library = optim.load(arguments.optim)


def checked(status):
    if status != 0:
        sys.exit(core.fp8core_last_error().decode())


context = ctypes.c_void_p()
options = ContextOptions(size=ctypes.sizeof(ContextOptions), api_version=core.fp8core_api_version(), threads=arguments.threads)
checked(core.fp8core_context_create(ctypes.byref(context), ctypes.byref(options)))
group = optim.Group(1e-3, 0.9, 0.95, 1e-8, 0.1)


def tensor(memory, dtype, scale_inverse=None):
    described = Tensor(data=memory.data_ptr(), dtype=dtype, dimensions=2, shape=(ctypes.c_int64 * 4)(rows, COLUMNS))
    if scale_inverse is not None:
        described.scale_inverse = scale_inverse.data_ptr()
    return described


weights = torch.randn(rows, COLUMNS) * 0.02
gradients = torch.randn(rows, COLUMNS) * 0.01
scale_inverse = torch.tensor([2.0**-12])
codes = (gradients / scale_inverse).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def ours(preset, gradient, weight_dtype):
    handle = ctypes.c_void_p()
    described = (optim.Parameter * 1)(optim.parameter("w", (rows, COLUMNS), 0, weight_dtype))
    checked(library.fp8optim_adamw_create(ctypes.byref(handle), context, optim.options_of(preset), 1, described, 1,
                                          (optim.Group * 1)(group)))
    checked(library.fp8optim_adamw_set_state(handle, 0, optim.MASTER, tensor(weights, FP32)))
    array = (Tensor * 1)(gradient)
    return lambda: checked(library.fp8optim_adamw_step(handle, array, None, None))


parameter = torch.nn.Parameter(weights.clone())
parameter.grad = gradients
theirs = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
steps = {
    "fp8, E4M3 gradient and weight": ours("fp8", tensor(codes, E4M3, scale_inverse), E4M3),
    "fp32, FP32 gradient, no weight": ours("fp32", tensor(gradients, FP32), None),
    "torch.optim.AdamW(fused=True), FP32": theirs.step,
}
times = {name: [] for name in steps}
for turn in range(-1, ROUNDS):
    for name, step in steps.items():
        start = time.perf_counter()
        step()
        if turn >= 0:
            times[name].append(time.perf_counter() - start)
reference = statistics.median(times["torch.optim.AdamW(fused=True), FP32"])
print(f"{arguments.parameters} Mi parameters, {arguments.threads} threads, {ROUNDS} rounds, torch {torch.__version__}")
for name, values in times.items():
    median = statistics.median(values)
    print(f"{name:38} {rows * COLUMNS / median * 1e-9:6.2f} G parameters/s  {reference / median:5.2f} times PyTorch's")
