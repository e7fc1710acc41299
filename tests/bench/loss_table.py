#!/usr/bin/env python3
"""Trains the same GPT at several precision levels and seeds, and prints a table of final validation losses.

    tests/bench/loss_table.py --fp8lm build/tools/fp8lm/fp8lm --data-path kjv --output runs [--jobs 2] [OPTION...]

With --ranks N every run is one of N processes, and a level may end in /STAGE, the ZeRO stage: fp8-o3/2.
Options that it does not know go to every `fp8lm train`, so that no hyper-parameter differs between the runs. Runs whose
log has an end are not repeated: a table that was interrupted goes on. Needs Python's standard library only.
"""
import argparse
import concurrent.futures
import json
import math
import os
import pathlib
import shlex
import statistics
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "multirank"))
from ranks import finish, running

LEVELS = ["bf16", "te", "fp8-o1", "fp8-o2"]
SEEDS = [1, 2, 3]


def final_loss(folder, steps):
    """The validation loss after the last step, or None."""
    log = folder / "log.jsonl"
    if not log.exists():
        return None
    loss = None
    ended = False
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        if entry["event"] == "validation" and entry["step"] == steps:
            loss = entry["loss"]
        ended = ended or (entry["event"] == "end" and entry["reason"] == "done")
    return loss if ended else None


def command(settings, options, level, seed, folder):
    level, _, stage = level.partition("/")
    options = options + (["--zero-stage", stage] if stage else [])
    return [settings.fp8lm, "train", "--data-path", settings.data_path, "--precision", level, "--seed", str(seed),
            "--train-iters", str(settings.train_iters), "--eval-interval", str(settings.train_iters), "--eval-iters", "0",
            "--save-interval", "0", "--log-interval", "100", "--save", str(folder)] + options


def run(settings, options, level, seed):
    folder = pathlib.Path(settings.output) / f"{level.replace('/', '-zero')}-{seed}"
    loss = final_loss(folder, settings.train_iters)
    if loss is None:
        if folder.exists():
            for path in sorted(folder.rglob("*"), reverse=True):
                path.unlink() if path.is_file() or path.is_symlink() else path.rmdir()
        with running([command(settings, options, level, seed, folder)] * settings.ranks) as started:
            # A run may take days.
            if any(code != 0 for code, _, _ in finish(started, None)):
                sys.exit(f"the run {folder} failed")
        loss = final_loss(folder, settings.train_iters)
    print(f"{level}, seed {seed}: {loss:.5f}", file=sys.stderr, flush=True)
    return loss


def table(losses, seeds):
    base = statistics.mean(losses["bf16", seed] for seed in seeds)
    spread = max(losses["bf16", seed] for seed in seeds) - min(losses["bf16", seed] for seed in seeds)
    print("| level | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | from bf16 | seed by seed |")
    print("| --- " * (len(seeds) + 4) + "|")
    for level in dict.fromkeys(level for level, _ in losses):
        row = [losses[level, seed] for seed in seeds]
        mean = statistics.mean(row)
        each = ", ".join(f"{100 * (loss / losses['bf16', seed] - 1):+.2f} %" for loss, seed in zip(row, seeds))
        print(f"| {level} | " + " | ".join(f"{loss:.4f}" for loss in row) +
              f" | {mean:.4f} | {100 * (mean / base - 1):+.2f} % | {each} |")
    print(f"\nbf16's seeds are {spread:.4f} apart, {100 * spread / base:.2f} % of their mean.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp8lm", required=True, help="the program")
    parser.add_argument("--data-path", required=True, help="shards of `fp8lm data tokenize`")
    parser.add_argument("--output", required=True, help="folder of the runs")
    parser.add_argument("--train-iters", type=int, default=1500)
    parser.add_argument("--levels", default=",".join(LEVELS), help="bf16 is what the others are compared with")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--ranks", type=int, default=1, help="of each run")
    settings, options = parser.parse_known_args()
    levels = settings.levels.split(",")
    seeds = [int(seed) for seed in settings.seeds.split(",")]
    if "bf16" not in levels:
        parser.error("--levels lacks bf16")
    print("Commands: " + shlex.join(command(settings, options, "LEVEL", "SEED", "FOLDER")), file=sys.stderr)
    pairs = [(level, seed) for seed in seeds for level in levels]
    with concurrent.futures.ThreadPoolExecutor(settings.jobs) as pool:
        losses = dict(zip(pairs, pool.map(lambda pair: run(settings, options, *pair), pairs)))
    if any(loss is None or not math.isfinite(loss) for loss in losses.values()):
        sys.exit("a run ended without a validation loss")
    table({(level, seed): losses[level, seed] for level in levels for seed in seeds}, seeds)


if __name__ == "__main__":
    main()
