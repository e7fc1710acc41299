#!/usr/bin/env python3
"""What fp8lm train writes, read by programs that no one here wrote: checkpoints by safetensors and ml_dtypes, event files
by TensorBoard. Skips what Python lacks.

Usage: check_train_interop.py FP8LM"""

import glob
import json
import os
import subprocess
import sys
import tempfile

SKIP = 77
FP8LM = os.path.abspath(sys.argv[1])

try:
    import ml_dtypes
    import numpy
    from safetensors import safe_open
except ImportError as missing:
    print("skipped: %s" % missing)
    sys.exit(SKIP)

TYPES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F16": numpy.float16, "F32": numpy.float32,
         "U8": numpy.uint8}


def tensors_of(path):
    """By the header, as safetensors' NumPy reader has no FP8; that every tensor is there and well-formed is its word."""
    with safe_open(path, framework="numpy") as file:
        names = set(file.keys())
    with open(path, "rb") as file:
        data = file.read()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    assert set(header) == names
    assert (8 + size) % 8 == 0
    found = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        kind = numpy.dtype(TYPES[entry["dtype"]])
        assert first % kind.itemsize == 0, "%s is not aligned" % name
        found[name] = numpy.frombuffer(data[8 + size + first:8 + size + last], kind).reshape(entry["shape"])
    return found


def check_checkpoint(folder):
    model = tensors_of(os.path.join(folder, "model.safetensors"))
    state = tensors_of(os.path.join(folder, "state.safetensors"))
    compared = 0
    for name, weight in model.items():
        if name.endswith("_scale_inv"):
            continue
        master = state[name + ".master"].astype(numpy.float64) / state[name + ".scales"][0]
        inverse = model.get(name + "_scale_inv", numpy.ones(1, numpy.float32))[0]
        values = weight.astype(numpy.float64) * inverse
        # Half a unit of E4M3's or BF16's last place, and E4M3's subnormals.
        bound = abs(master) / 16 + 2.0 ** -10 * inverse if weight.dtype.itemsize == 1 else abs(master) / 256
        assert (abs(values - master) <= bound * 1.0001).all(), name
        assert (state[name + ".exp_avg_sq"].astype(numpy.float64) >= 0).all()
        assert abs(state[name + ".exp_avg"].astype(numpy.float64)).max() > 0, name
        assert weight.dtype == ml_dtypes.float8_e4m3fn or not name.startswith("layers") or weight.ndim == 1
        compared += 1
    print("%d weights are those of their masters" % compared)
    assert compared > 10


def check_board(folder):
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as missing:
        print("not compared with TensorBoard: %s" % missing)
        return
    board = EventAccumulator(os.path.join(folder, "tensorboard"))
    board.Reload()
    with open(os.path.join(folder, "log.jsonl")) as file:
        steps = [entry for entry in map(json.loads, file) if entry["event"] == "step"]
    points = board.Scalars("train/loss")
    assert [point.step for point in points] == [entry["step"] for entry in steps]
    for point, entry in zip(points, steps):
        assert abs(point.value - entry["loss"]) < 1e-5
    assert "validation/loss" in board.Tags()["scalars"]
    print("TensorBoard reads %d steps" % len(points))


def main():
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "text.txt"), "w") as file:
            file.write("a few words, again and again. " * 500)
        for arguments in (["data", "tokenize", "--output-prefix", "t", "text.txt"],
                          ["train", "--data-path", "t", "--num-layers", "2", "--hidden-size", "32",
                           "--num-attention-heads", "2", "--seq-length", "32", "--micro-batch-size", "2",
                           "--train-iters", "10", "--save", "run", "--precision", "fp8-o2", "--threads", "1"]):
            subprocess.run([FP8LM, *arguments], check=True, cwd=folder, stdout=subprocess.DEVNULL)
        check_checkpoint(glob.glob(os.path.join(folder, "run", "step-*"))[0])
        check_board(os.path.join(folder, "run"))


main()
