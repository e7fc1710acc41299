"""Trains a small character-level transformer in several processes with DistributedDataParallel, three times from the
same start: as PyTorch does it (FP32 over gloo), with gradients through libfp8comm in FP32, and with one byte a gradient
on the wire. Shows loss against loss and bytes against bytes; exits with 1 where the losses part.

    torchrun --nproc-per-node 2 train_ddp.py            # FP8COMM_LIBRARY=.../libfp8comm.so where it is not installed

Exits with 77 where PyTorch is missing.
"""
import argparse
import dataclasses
import functools
import lzma
import math
import os
import sys
import traceback

try:
    import torch
    import torch.distributed
except ImportError as missing:
    print(f"skipped: {missing}; pip install torch")
    sys.exit(77)

import fp8comm

WINDOW = 25
# The curves may part by this share of the loss, in the mean of WINDOW steps.
BOUND_FP8 = 0.01
BOUND_FP32 = 0.001
# Of every parameter's mean gradient against PyTorch's own, in dB; one rounding to E4M3 leaves 31.5.
LEAST_SNR_FP8 = 22.0
LEAST_SNR_FP32 = 100.0
LENGTH, BATCH = 64, 12


class Transformer(torch.nn.Module):
    def __init__(self, characters, width=64, layers=2):
        super().__init__()
        self.character = torch.nn.Embedding(characters, width)
        self.position = torch.nn.Embedding(LENGTH, width)
        self.blocks = torch.nn.ModuleList([
            torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
                                             norm_first=True) for _ in range(layers)])
        self.norm = torch.nn.LayerNorm(width)
        self.scores = torch.nn.Linear(width, characters)
        self.mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, text):
        x = self.character(text) + self.position.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.scores(self.norm(x))


def read_text(path):
    """The text as numbers from 0 on, and how many characters there are."""
    with (lzma.open if path.endswith(".xz") else open)(path, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    characters, text = torch.unique(text, return_inverse=True)
    return text, len(characters)


@dataclasses.dataclass
class Run:
    """Of one rank."""

    losses: list
    # Mean gradients of the first step that was taken, one a parameter.
    gradients: list
    # Of the hook, one a step.
    reports: list
    # At the end.
    weights: torch.Tensor = None
    reducers_created: int = 0


def train(text, characters, arguments, make_state, name):
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank == 0:
        print(f"training: {name}", flush=True)
    torch.manual_seed(1)
    # Small buckets, so that there are several.
    model = torch.nn.parallel.DistributedDataParallel(Transformer(characters), bucket_cap_mb=0.2)
    state = make_state() if make_state else None
    if state:
        model.register_comm_hook(state, fp8comm.fp8_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    run = Run([], [], [])
    for step in range(arguments.steps):
        # Every rank has its part of a batch that depends on the step alone.
        starts = torch.randint(len(text) - LENGTH, (BATCH * ranks,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([text[start:start + LENGTH + 1] for start in starts[rank::ranks]])
        loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        run.losses.append(loss.item())
        optimizer.zero_grad()
        (loss * math.nan if [rank, step] == arguments.nan else loss).backward()
        if state:
            run.reports.append(state.report())
            finite = run.reports[-1].nonfinite_tensors == 0
            if not finite:
                culprit = run.reports[-1].nonfinite_rank
                print(f"rank {rank}: step {step}: {run.reports[-1].nonfinite_tensors} gradients are not finite on "
                      f"{f'rank {culprit}' if culprit >= 0 else 'some rank'}; step skipped", flush=True)
        else:
            finite = all(p.grad.isfinite().all() for p in model.parameters())
        if finite:
            run.gradients = run.gradients or [p.grad.clone() for p in model.parameters()]
            optimizer.step()
    run.weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    if state:
        run.reducers_created = state.reducers_created
        state.close()
    return run


def windows(run):
    """Mean losses over all ranks and WINDOW steps each."""
    losses = torch.tensor(run.losses, dtype=torch.float64)
    torch.distributed.all_reduce(losses)
    return (losses / torch.distributed.get_world_size()).view(-1, WINDOW).mean(1)


def least_snr(run, other):
    """Of all parameters' first gradients, in dB; infinity where all are the same."""
    return min(10 * math.log10(theirs.double().square().sum() / noise) if noise > 0 else math.inf
               for noise, theirs in (((ours.double() - theirs.double()).square().sum(), theirs)
                                     for ours, theirs in zip(run.gradients, other.gradients)))


def on_all_ranks(weights):
    everyones = [torch.empty_like(weights) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyones, weights)
    return all(torch.equal(weights, others) for others in everyones)


def print_bytes(elements, fp8, fp32):
    ranks = torch.distributed.get_world_size()
    print(f"bytes that rank 0 sent in the last step, for {elements} gradients in {fp8.buckets} buckets:")
    print(f"  FP8 by libfp8comm  {fp8.bytes_sent:9}   {fp8.bytes_sent / elements:.2f} a gradient, counted by the "
          "transport")
    print(f"  FP32 by libfp8comm {fp32.bytes_sent:9}   {fp32.bytes_sent / elements:.2f}, likewise")
    least = 8 * (ranks - 1) / ranks
    print(f"  FP32 by gloo       {least * elements:9.0f}   {least:.2f} at least: 2 (N - 1) / N numbers of 4 bytes a "
          "gradient; gloo does not count")


def main():
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")
    parser = argparse.ArgumentParser(description="see the head of this file")
    parser.add_argument("library", nargs="?", help="path of libfp8comm.so; else FP8COMM_LIBRARY, else the loader's")
    parser.add_argument("--text", default=os.path.join(root, "data", "kjv.txt.xz"),
                        help="of at least 10,000 bytes, may be xz")
    parser.add_argument("--steps", type=int, default=150, help=f"a multiple of {WINDOW}")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until a silent rank is given up")
    parser.add_argument("--nan", type=int, nargs=2, metavar=("RANK", "STEP"), help="where a loss becomes NaN")
    arguments = parser.parse_args()
    if arguments.steps < WINDOW or arguments.steps % WINDOW:
        parser.error(f"--steps is {arguments.steps}, expected a multiple of {WINDOW}")
    library = fp8comm.load_library(arguments.library)
    try:
        text, characters = read_text(arguments.text)
    except (OSError, lzma.LZMAError) as error:
        parser.error(f"--text is {arguments.text}: {error}")
    if len(text) < 10000:
        parser.error(f"{arguments.text} has {len(text)} bytes, expected at least 10000")

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    hook = functools.partial(fp8comm.HookState, timeout_seconds=arguments.timeout, library=library)
    gloo = train(text, characters, arguments, None, "FP32 over gloo")
    fp32 = train(text, characters, arguments, functools.partial(hook, algorithm="fp32"), "FP32 over libfp8comm")
    fp8 = train(text, characters, arguments, hook, "FP8 over libfp8comm")

    curves = [windows(run) for run in (gloo, fp32, fp8)]
    parting_fp32, parting_fp8 = ((curve / curves[0] - 1).abs().max().item() for curve in curves[1:])
    snr_fp32, snr_fp8 = (least_snr(run, gloo) for run in (fp32, fp8))
    elements, last = fp8.reports[-1].elements, fp8.reports[-1]
    failed = [message for holds, message in (
        (parting_fp8 <= BOUND_FP8, "the curves of FP8 and of FP32 over gloo part"),
        (parting_fp32 <= BOUND_FP32, "the curves of FP32 over gloo and over libfp8comm part"),
        (snr_fp8 >= LEAST_SNR_FP8, f"a mean gradient in FP8 has {snr_fp8:.1f} dB, expected {LEAST_SNR_FP8:.0f}"),
        (snr_fp32 >= LEAST_SNR_FP32, f"a mean gradient in FP32 has {snr_fp32:.1f} dB, expected {LEAST_SNR_FP32:.0f}"),
        (on_all_ranks(fp8.weights), "ranks do not have the same weights"),
        (elements == len(fp8.weights), f"{elements} gradients went through the hook, expected {len(fp8.weights)}"),
    ) if not holds]
    if rank == 0:
        print(f"libfp8comm {library.fp8comm_version().decode()}, torch {torch.__version__}, "
              f"{torch.distributed.get_world_size()} ranks, {fp8.reducers_created} reducers made for {last.buckets} "
              "buckets")
        print(" steps   FP32 over gloo   FP32 over libfp8comm   FP8 over libfp8comm   saturated   became 0")
        values = elements * WINDOW * torch.distributed.get_world_size()
        for i, losses in enumerate(zip(*(curve.tolist() for curve in curves))):
            done = fp8.reports[i * WINDOW:(i + 1) * WINDOW]
            print(f"{(i + 1) * WINDOW:6}   {losses[0]:14.4f}   {losses[1]:20.4f}   {losses[2]:19.4f}   "
                  f"{100 * sum(one.saturated for one in done) / values:7.4f} %   "
                  f"{100 * sum(one.flushed_to_zero for one in done) / values:6.2f} %")
        print_bytes(elements, last, fp32.reports[-1])
        print(f"least SNR of a parameter's mean gradient in the first step, against PyTorch's: FP8 {snr_fp8:.1f} dB, "
              f"libfp8comm's FP32 {snr_fp32:.1f} dB")
        print(f"FP8 parts from gloo by {100 * parting_fp8:.3f} % at most, allowed: {100 * BOUND_FP8:.1f} %; "
              f"libfp8comm's FP32 by {100 * parting_fp32:.3f} %, allowed: {100 * BOUND_FP32:.1f} %")
        for message in failed:
            print("failed:", message)
    # No rank leaves while gloo still serves another.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        result = main()
    except Exception:
        traceback.print_exc()
        result = 1
    # Not by way of the interpreter's end: DistributedDataParallel keeps gloo's threads alive beyond
    # destroy_process_group() (PyTorch 2.15), and one that lets go of its last tensors while the interpreter ends aborts
    # the process, "terminate called without an active exception".
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(result)
