"""The optimizer in FP32 against torch.optim.AdamW, and its schedules against torch's. Arguments: the libraries fp8core and
fp8optim. Exits with 77 where torch is missing.

Both work in FP32 and round differently: 1e-6 of the size of a tensor, as single values go through zero. The states are also
held to torch's own in FP64, from which both are further away: the factor of the decay and those of the moments are rounded
to FP32 once, and enter the same way every step."""
import ctypes
import math
import sys

try:
    import torch
except ImportError as missing:
    print(f"skipped: {missing}; see requirements-torch.txt and the option interop_python")
    sys.exit(77)

import fp8core_ctypes
import fp8optim_ctypes as optim
from fp8core_ctypes import FP32, Tensor

core = fp8core_ctypes.load(sys.argv[1])
library = optim.load(sys.argv[2])
torch.manual_seed(1)
torch.set_num_threads(1)

SHAPES = [(37, 53), (211,), (3, 5, 7), (4, 3, 2, 5), ()]
NAMES = ["matrix", "bias", "three", "four", "scalar"]
# No decay on what has fewer than two dimensions.
GROUP_OF = [0, 1, 0, 0, 1]
STEPS = 100
LIMIT = 1e-6
# Half a unit of FP32 a step.
LIMIT_OF_FP64 = STEPS * 2.0**-24

failures = 0


def check(condition, message):
    global failures
    if not condition:
        failures += 1
        print(f"FAILED {message}")


def ok(status):
    assert status == 0, core.fp8core_last_error().decode()


def tensor_of(values):
    return Tensor(data=values.data_ptr(), dtype=FP32, dimensions=values.dim(),
                  shape=(ctypes.c_int64 * 4)(*values.shape))


class Ours:
    def __init__(self, context, parameters, groups):
        self.parameters = parameters
        described = [optim.parameter(name, shape, group) for name, shape, group in zip(NAMES, SHAPES, GROUP_OF)]
        self.handle = ctypes.c_void_p()
        ok(library.fp8optim_adamw_create(ctypes.byref(self.handle), context, optim.options_of("fp32"), len(described),
                                         (optim.Parameter * len(described))(*described), len(groups),
                                         (optim.Group * len(groups))(*groups)))
        for index, values in enumerate(parameters):
            ok(library.fp8optim_adamw_set_state(self.handle, index, optim.MASTER, tensor_of(values)))

    def step(self, gradients, max_norm):
        report = optim.StepReport()
        array = (Tensor * len(gradients))(*[tensor_of(gradient) for gradient in gradients])
        ok(library.fp8optim_adamw_step(self.handle, array, optim.step_options(max_norm), report))
        return report

    def state(self, index, state):
        tensor = Tensor()
        ok(library.fp8optim_adamw_state(self.handle, index, state, ctypes.byref(tensor)))
        values = torch.empty(SHAPES[index], dtype=torch.float32)
        ctypes.memmove(values.data_ptr(), tensor.data, values.numel() * 4)
        return values


def distance(values, exact):
    return ((values.double() - exact).norm() / exact.norm()).item()


def compare(context, what, max_norm=0.0, **changes):
    learning_rate = changes.get("lr", 1e-3)
    betas = changes.get("betas", (0.9, 0.95))
    eps = changes.get("eps", 1e-8)
    decays = changes.get("decays", (0.1, 0.0))
    start = [torch.randn(shape) for shape in SHAPES]
    ours = Ours(context, start, [optim.Group(learning_rate, *betas, eps, decay) for decay in decays])
    theirs = {}
    for dtype in (torch.float32, torch.float64):
        values = [torch.nn.Parameter(tensor.to(dtype)) for tensor in start]
        by_group = [[value for value, group in zip(values, GROUP_OF) if group == g] for g in range(2)]
        theirs[dtype] = values, torch.optim.AdamW(
            [{"params": group, "weight_decay": decay} for group, decay in zip(by_group, decays)],
            lr=learning_rate, betas=betas, eps=eps, foreach=False)
    for step in range(STEPS):
        size = 10.0 ** ((step % 7) - 3) if changes.get("wild") else 1.0
        gradients = [torch.randn(shape) * size for shape in SHAPES]
        exact_norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
        factor = min(1.0, max_norm / exact_norm) if max_norm else 1.0
        report = ours.step(gradients, max_norm)
        check(abs(report.gradient_norm / exact_norm - 1) < LIMIT, f"{what}, step {step}: norm {report.gradient_norm}")
        check(abs(report.clip_factor / factor - 1) < LIMIT, f"{what}, step {step}: factor {report.clip_factor}")
        for dtype, (values, optimizer) in theirs.items():
            for value, gradient in zip(values, gradients):
                value.grad = gradient.to(dtype) * factor
            optimizer.step()
    check(library.fp8optim_adamw_steps(ours.handle) == STEPS, f"{what}: {STEPS} steps")
    worst = worst_of_theirs = worst_between = 0.0
    for index in range(len(SHAPES)):
        value, optimizer = theirs[torch.float64][0][index], theirs[torch.float64][1]
        exact = {optim.MASTER: value.detach(), optim.EXP_AVG: optimizer.state[value]["exp_avg"],
                 optim.EXP_AVG_SQ: optimizer.state[value]["exp_avg_sq"]}
        for state, expected in exact.items():
            off = distance(ours.state(index, state), expected)
            worst = max(worst, off)
            check(off <= LIMIT_OF_FP64, f"{what}: state {state} of {NAMES[index]} is {off:.2e} from FP64")
        other = theirs[torch.float32][0][index].detach()
        worst_of_theirs = max(worst_of_theirs, distance(other, exact[optim.MASTER]))
        off = distance(ours.state(index, optim.MASTER), other.double())
        worst_between = max(worst_between, off)
        check(off <= LIMIT, f"{what}: {NAMES[index]} is {off:.2e} from torch in FP32")
    print(f"{what}: {worst_between:.1e} from torch in FP32 at most; from FP64 {worst:.1e}, torch {worst_of_theirs:.1e}")
    library.fp8optim_adamw_destroy(ctypes.byref(ours.handle))


def schedule(kind, peak, floor, warmup, total, decay, step):
    rate = ctypes.c_double()
    given = optim.Schedule(ctypes.sizeof(optim.Schedule), kind, peak, floor, warmup, total, decay)
    ok(library.fp8optim_schedule_rate(given, step, ctypes.byref(rate)))
    return rate.value


def compare_schedules():
    """The decay after a warm-up of n steps is torch's from its last step on; the warm-up is LinearLR's from 1 / n."""
    peak, floor, warmup, total = 3e-4, 3e-5, 10, 90
    for kind, name in ((1, "linear"), (2, "cosine")):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
        rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
        length = total - warmup
        fall = (torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, floor / peak, length) if kind == 1 else
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length, floor))
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [warmup - 1])
        for step in range(total):
            ours = schedule(kind, peak, floor, warmup, total, 0, step)
            theirs = optimizer.param_groups[0]["lr"]
            check(abs(ours / theirs - 1) < 1e-9, f"{name} schedule, step {step}: {ours}, torch has {theirs}")
            optimizer.step()
            both.step()


context = ctypes.c_void_p()
ok(core.fp8core_context_create(ctypes.byref(context), None))
compare(context, "defaults")
compare(context, "torch's own defaults", betas=(0.9, 0.999), decays=(0.01, 0.01))
compare(context, "clipped", max_norm=1.0)
compare(context, "large steps, strong decay", lr=0.05, decays=(0.5, 0.0), eps=1e-5)
compare(context, "gradients over six decades", wild=True)
compare_schedules()
core.fp8core_context_destroy(ctypes.byref(context))
print(f"torch {torch.__version__}: {failures} failures")
sys.exit(1 if failures else 0)
