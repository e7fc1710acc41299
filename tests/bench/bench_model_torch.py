"""Forward and backward passes beside PyTorch's of the same model, in rounds of both; prints medians and their ratio.

Ours in bf16 and fp8-o2; PyTorch in BF16 autocast of FP32 weights with its fused attention, without compilation, gradients set
to None before each round. Exits with 77 without PyTorch.
"""
import argparse
import os
import statistics
import sys
import time

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("core", help="libfp8core.so: build/libfp8core/libfp8core.so")
parser.add_argument("gpt", help="libfp8gpt.so: build/libfp8gpt/libfp8gpt.so")
parser.add_argument("--preset", default="gpt2-124m")
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--length", type=int, nargs="*", default=[64, 256])
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--layers", type=int, default=0, help="default: the preset's")
arguments = parser.parse_args()

try:
    import numpy as np
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "interop"))
from fp8gpt_ctypes import Model
from torch_models import loss_of

torch.set_num_threads(arguments.threads)


def measure(length):
    changes = {"sequence": length}
    if arguments.layers:
        changes["layers"] = arguments.layers
    ours = {precision: Model(arguments.core, arguments.gpt, arguments.preset, precision, arguments.batch, arguments.threads,
                             **changes) for precision in ("bf16", "fp8-o2")}
    config = ours["bf16"].config
    generator = np.random.default_rng(1)
    tokens, targets = generator.integers(0, config.vocabulary, (2, arguments.batch, length), np.int32)
    weights = {name: torch.tensor(value, requires_grad=True) for name, value in ours["bf16"].weights().items()}
    their_tokens, their_targets = torch.from_numpy(tokens).long(), torch.from_numpy(targets).long()

    def their_step():
        for weight in weights.values():
            weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(config, weights, their_tokens, their_targets, fused=True)
        loss.backward()
        return loss.item()

    def our_step(precision):
        loss = ours[precision].train(tokens, targets)
        ours[precision].end_step()
        return loss

    steps = {"PyTorch": their_step, "bf16": lambda: our_step("bf16"), "fp8-o2": lambda: our_step("fp8-o2")}
    times = {name: [] for name in steps}
    losses = {}
    for round_number in range(arguments.rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name] = step()
            # The first one is for memory that grows.
            if round_number:
                times[name].append(time.perf_counter() - start)
    rates = {name: tokens.size / statistics.median(spent) for name, spent in times.items()}
    print(f"{arguments.preset}, {config.layers} layers, B={arguments.batch} T={length}, {arguments.threads} threads, "
          f"PyTorch {torch.__version__}: " + ", ".join(f"{name} {rate:.1f} tokens/s (loss {losses[name]:.4f})"
                                                       for name, rate in rates.items()))
    print(f"  of PyTorch's tokens/s: bf16 {rates['bf16'] / rates['PyTorch']:.2f}, fp8-o2 {rates['fp8-o2'] / rates['PyTorch']:.2f}")
    for model in ours.values():
        model.close()


for length in arguments.length:
    measure(length)
