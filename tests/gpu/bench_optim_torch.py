"""Times PyTorch's fused AdamW on a GPU on the parameters of bench_optim's "fp32" row, as a peer of it.

Prints one line; exits with 77 without PyTorch or a GPU.
"""
import statistics
import sys

try:
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)
if not torch.cuda.is_available():
    print("skipped: PyTorch finds no GPU")
    sys.exit(77)

TENSORS, SIZE, REPEATS = 32, 4096, 15
parameters = [torch.zeros(SIZE, SIZE, device="cuda") for _ in range(TENSORS)]
for parameter in parameters:
    parameter.grad = torch.full_like(parameter, 0.01)
optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def median(step):
    times = []
    for repeat in range(-3, REPEATS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        stop.record()
        stop.synchronize()
        if repeat >= 0:
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


def clipped():
    torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
    optimizer.step()


print(f"{'PyTorch ' + torch.__version__ + ', fused, 32 x 4096^2, FP32':50s} {median(optimizer.step):9.3f} ms, "
      f"with clip_grad_norm_ {median(clipped):.3f} ms")
