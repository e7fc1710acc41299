"""AdamW of libfp8optim as a torch.optim.Optimizer, through ctypes and without a copy: the library reads p.grad and writes
p where they lie, and keeps master weights and moments to itself (5 bytes a parameter with preset "fp8").

    optimizer = FP8AdamW(model.parameters(), lr=1e-3)       # FP32 or BF16 parameters
    loss.backward()
    optimizer.step()                                        # lr, betas, eps, weight_decay of the param_groups hold

As a program it trains a small network beside torch.optim.AdamW, and resumes it from a checkpoint:

    python fp8adamw.py [path of libfp8optim.so]             # else FP8OPTIM_LIBRARY, else where the loader finds it

Exits with 77 where PyTorch is missing.
"""
import ctypes
import ctypes.util
import io
import os
import sys

try:
    import torch
except ImportError as missing:
    print(f"skipped: {missing}; pip install torch")
    sys.exit(77)

E4M3, E5M2, BF16, FP16, FP32 = range(5)
DTYPES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16,
          torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
# Formats of master, exp_avg, exp_avg_sq: what fp8optim_adamw_options_of() gives, which is inline in the header.
PRESETS = {"fp32": (FP32, FP32, FP32), "bf16": (FP32, FP32, FP32), "fp8": (FP16, E4M3, FP16),
           "fp8-bf16-master": (BF16, E4M3, FP16), "fp8-master": (E4M3, E4M3, FP16), "fp8-exp-avg-sq": (FP16, E4M3, E4M3)}
MASTER, EXP_AVG, EXP_AVG_SQ, WEIGHT = range(4)


# The structs of fp8core/context.h, fp8core/tensor.h and fp8optim/adamw.h.
class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("index", ctypes.c_int)]


class ContextOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("api_version", ctypes.c_int), ("device", Device), ("threads", ctypes.c_int),
                ("isa", ctypes.c_int), ("use_stream", ctypes.c_int), ("stream", ctypes.c_void_p),
                ("workspace_bytes", ctypes.c_size_t), ("seed", ctypes.c_uint64), ("log", ctypes.c_void_p),
                ("log_user_data", ctypes.c_void_p)]


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("dimensions", ctypes.c_int),
                ("shape", ctypes.c_int64 * 4), ("row_stride", ctypes.c_int64), ("device", Device),
                ("scale_granularity", ctypes.c_int), ("scale", ctypes.c_void_p), ("scale_inverse", ctypes.c_void_p),
                ("amax", ctypes.c_void_p)]


class Options(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("master_dtype", ctypes.c_int), ("exp_avg_dtype", ctypes.c_int),
                ("exp_avg_sq_dtype", ctypes.c_int), ("stochastic_rounding", ctypes.c_int), ("seed", ctypes.c_uint64)]


class Group(ctypes.Structure):
    _fields_ = [("learning_rate", ctypes.c_double), ("beta1", ctypes.c_double), ("beta2", ctypes.c_double),
                ("eps", ctypes.c_double), ("weight_decay", ctypes.c_double)]


class Parameter(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("dimensions", ctypes.c_int), ("shape", ctypes.c_int64 * 4),
                ("group", ctypes.c_int), ("with_weight", ctypes.c_int), ("weight_dtype", ctypes.c_int),
                ("weight", ctypes.c_void_p), ("master", ctypes.c_void_p), ("exp_avg", ctypes.c_void_p),
                ("exp_avg_sq", ctypes.c_void_p)]


class StepOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("max_norm", ctypes.c_float), ("loss_scale", ctypes.c_float)]


class StepReport(ctypes.Structure):
    _fields_ = [("skipped", ctypes.c_int), ("gradient_norm", ctypes.c_float), ("clip_factor", ctypes.c_float),
                ("steps", ctypes.c_int64), ("skipped_steps", ctypes.c_int64)]


class Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("parameters", "weight_bytes", "master_bytes", "exp_avg_bytes",
                                                    "exp_avg_sq_bytes", "overhead_bytes")]


def load_library(path=None):
    path = path or os.environ.get("FP8OPTIM_LIBRARY") or ctypes.util.find_library("fp8optim")
    if not path:
        raise OSError("libfp8optim is not found; set FP8OPTIM_LIBRARY to its path")
    library = ctypes.CDLL(path)
    if library.fp8optim_api_version() != 0:
        raise OSError(f"{path} has API version {library.fp8optim_api_version()}, expected 0")
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    signatures = {
        "fp8core_context_create": [pointer, pointer], "fp8core_context_destroy": [pointer],
        "fp8optim_adamw_create": [pointer, pointer, pointer, number, pointer, ctypes.c_int, pointer],
        "fp8optim_adamw_destroy": [pointer], "fp8optim_adamw_set_group": [pointer, ctypes.c_int, pointer],
        "fp8optim_adamw_set_state": [pointer, number, ctypes.c_int, pointer],
        "fp8optim_adamw_set_steps": [pointer, number], "fp8optim_adamw_memory": [pointer, pointer],
        "fp8optim_adamw_step": [pointer, pointer, pointer, pointer], "fp8optim_adamw_saved_bytes": [pointer],
        "fp8optim_adamw_save": [pointer, pointer, size], "fp8optim_adamw_load": [pointer, pointer, size],
    }
    for name, arguments in signatures.items():
        getattr(library, name).argtypes = arguments
    library.fp8core_last_error.restype = ctypes.c_char_p
    library.fp8optim_adamw_saved_bytes.restype = size
    return library


class FP8AdamW(torch.optim.Optimizer):
    """All parameters on one device, contiguous, of at most 4 dimensions, and where they are for good. A parameter whose
    grad is None counts as one whose gradient is zero. `last_step` holds what the last step found: whether it was
    skipped (an infinity or a NaN among the gradients), their norm, the clip factor, and the counts of both."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, *, preset="fp8", max_norm=0.0,
                 stochastic_rounding=False, seed=0, library=None):
        self._adamw, self._context = ctypes.c_void_p(), ctypes.c_void_p()
        self._library = load_library(library)
        self.max_norm, self.loss_scale, self.last_step = max_norm, 1.0, StepReport()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

        self._parameters = [p for group in self.param_groups for p in group["params"]]
        device = self._parameters[0].device
        for p in self._parameters:
            if p.device != device or not p.is_contiguous() or p.dim() > 4 or p.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"a parameter is {p.dtype}, {tuple(p.shape)} with strides {p.stride()} on {p.device}; "
                                 f"expected contiguous FP32 or BF16 of at most 4 dimensions on {device}")
        self._device = Device(int(device.type == "cuda"), device.index or 0)
        self._addresses = [p.data_ptr() for p in self._parameters]
        self._zeros = {}

        context = ContextOptions(size=ctypes.sizeof(ContextOptions), device=self._device)
        if device.type == "cuda":
            context.use_stream, context.stream = 1, torch.cuda.current_stream(device).cuda_stream
        else:
            context.threads = torch.get_num_threads()
        self._check(self._library.fp8core_context_create(ctypes.byref(self._context), ctypes.byref(context)))
        described = [
            Parameter(name=f"group{i}.{j}".encode(), dimensions=p.dim(), shape=(ctypes.c_int64 * 4)(*p.shape), group=i,
                      with_weight=1, weight_dtype=DTYPES[p.dtype], weight=p.data_ptr())
            for i, group in enumerate(self.param_groups) for j, p in enumerate(group["params"])]
        options = Options(ctypes.sizeof(Options), *PRESETS[preset], int(stochastic_rounding), seed)
        self._groups = [self._group(group) for group in self.param_groups]
        self._check(self._library.fp8optim_adamw_create(
            ctypes.byref(self._adamw), self._context, ctypes.byref(options), len(described),
            (Parameter * len(described))(*described), len(self._groups), (Group * len(self._groups))(*self._groups)))
        self.read_parameters()

    def __del__(self):
        if self._adamw:
            self._library.fp8optim_adamw_destroy(ctypes.byref(self._adamw))
        if self._context:
            self._library.fp8core_context_destroy(ctypes.byref(self._context))

    def _check(self, status):
        if status != 0:
            raise RuntimeError(f"libfp8optim: {self._library.fp8core_last_error().decode()} (status {status})")

    @staticmethod
    def _group(group):
        return Group(group["lr"], *group["betas"], group["eps"], group["weight_decay"])

    def _tensor(self, tensor):
        return Tensor(data=tensor.data_ptr(), dtype=DTYPES[tensor.dtype], dimensions=tensor.dim(),
                      shape=(ctypes.c_int64 * 4)(*tensor.shape), device=self._device)

    def add_param_group(self, param_group):
        if self._adamw:
            raise RuntimeError("FP8AdamW has its parameters for good; make a new one")
        super().add_param_group(param_group)

    def read_parameters(self):
        """Takes the parameters as they are for master weights: at the start, and after model.load_state_dict()."""
        for i, p in enumerate(self._parameters):
            self._check(self._library.fp8optim_adamw_set_state(self._adamw, i, MASTER, ctypes.byref(self._tensor(p.data))))

    def import_moments(self, index, exp_avg, exp_avg_sq):
        """Takes the moments of parameter `index` from another Adam; then import_steps()."""
        for state, tensor in ((EXP_AVG, exp_avg), (EXP_AVG_SQ, exp_avg_sq)):
            source = self._tensor(tensor)
            self._check(self._library.fp8optim_adamw_set_state(self._adamw, index, state, ctypes.byref(source)))

    def import_steps(self, steps):
        self._check(self._library.fp8optim_adamw_set_steps(self._adamw, steps))

    def _gradient(self, index, p):
        if p.grad is not None:
            return p.grad if p.grad.is_contiguous() else p.grad.contiguous()
        if index not in self._zeros:
            self._zeros[index] = torch.zeros_like(p)
        return self._zeros[index]

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if [p.data_ptr() for p in self._parameters] != self._addresses:
            raise RuntimeError("a parameter has moved since FP8AdamW was made")
        for i, group in enumerate(self.param_groups):
            values = self._group(group)
            if bytes(values) != bytes(self._groups[i]):
                self._check(self._library.fp8optim_adamw_set_group(self._adamw, i, ctypes.byref(values)))
                self._groups[i] = values
        gradients = [self._gradient(i, p) for i, p in enumerate(self._parameters)]
        described = (Tensor * len(gradients))(*[self._tensor(gradient) for gradient in gradients])
        options = StepOptions(ctypes.sizeof(StepOptions), self.max_norm, self.loss_scale)
        self._check(self._library.fp8optim_adamw_step(self._adamw, described, ctypes.byref(options),
                                                      ctypes.byref(self.last_step)))
        return loss

    def memory(self):
        memory = Memory()
        self._check(self._library.fp8optim_adamw_memory(self._adamw, ctypes.byref(memory)))
        return {name: getattr(memory, name) for name, _ in Memory._fields_}

    def state_dict(self):
        saved = torch.empty(self._library.fp8optim_adamw_saved_bytes(self._adamw), dtype=torch.uint8)
        self._check(self._library.fp8optim_adamw_save(self._adamw, saved.data_ptr(), saved.numel()))
        return {**super().state_dict(), "fp8optim": saved}

    def load_state_dict(self, state_dict):
        """Restores hyper-parameters, master weights, moments and counts, and writes the parameters."""
        saved = state_dict.get("fp8optim")
        if saved is None or saved.dtype != torch.uint8:
            raise ValueError("the state_dict has no bytes under \"fp8optim\"; expected one of FP8AdamW.state_dict()")
        saved = saved.cpu().contiguous()
        before = super().state_dict()
        # Each checks before it changes anything; where the second refuses, the first is taken back.
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "fp8optim"})
        try:
            self._check(self._library.fp8optim_adamw_load(self._adamw, saved.data_ptr(), saved.numel()))
        except RuntimeError:
            super().load_state_dict(before)
            raise

    def __reduce_ex__(self, protocol):
        raise TypeError("FP8AdamW holds memory of the library's and cannot be copied or pickled; use state_dict()")


def train(dtype, make_optimizer, steps=300, resume_at=None):
    """Trains a network on noisy samples of a function; returns losses before and after, the optimizer and the network."""
    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    network = network.to(dtype)
    inputs = torch.randn(512, 16)
    targets = torch.stack([torch.sin(inputs[:, i] * 2) * inputs[:, i + 8] for i in range(8)], 1) + 0.3 * torch.randn(512, 8)
    decayed = [p for p in network.parameters() if p.dim() > 1]
    others = [p for p in network.parameters() if p.dim() <= 1]
    optimizer = make_optimizer([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def loss_of(rows):
        return torch.nn.functional.mse_loss(network(inputs[rows].to(dtype)).float(), targets[rows])

    before = loss_of(slice(None)).item()
    for step in range(steps):
        if step == resume_at:
            saved = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            checkpoint = io.BytesIO()
            torch.save(saved, checkpoint)
            checkpoint.seek(0)
            saved = torch.load(checkpoint)
            for p in network.parameters():
                torch.nn.init.normal_(p)
            optimizer = make_optimizer([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
        optimizer.zero_grad()
        rows = torch.arange(step * 64 % 512, step * 64 % 512 + 64)
        loss_of(rows).backward()
        optimizer.step()
        schedule.step()
    return before, loss_of(slice(None)).item(), optimizer, network


def main():
    library = sys.argv[1] if len(sys.argv) > 1 else None
    arguments = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    failed = []
    _, goal, _, _ = train(torch.float32, lambda groups: torch.optim.AdamW(groups, **arguments))
    for dtype in (torch.float32, torch.bfloat16):
        def ours(groups, preset="fp8"):
            return FP8AdamW(groups, **arguments, preset=preset, library=library)

        before, torch_loss, _, _ = train(dtype, lambda groups: torch.optim.AdamW(groups, **arguments))
        print(f"{dtype}: loss {before:.4f} before, torch.optim.AdamW {torch_loss:.4f}")
        for preset in ("fp32", "fp8"):
            _, loss, optimizer, network = train(dtype, lambda groups: ours(groups, preset))
            memory = optimizer.memory()
            states = sum(memory[name] for name in ("master_bytes", "exp_avg_bytes", "exp_avg_sq_bytes"))
            print(f"  FP8AdamW {preset:4} loss {loss:.4f}, states {states / memory['parameters']:.0f} bytes a parameter, "
                  f"{optimizer.last_step.steps} steps")
            # Masters make BF16 parameters as good as FP32 ones; torch's moments and updates in BF16 are not.
            if abs(loss - goal) > 0.05 * goal:
                failed.append(f"{dtype} {preset}: loss {loss}, expected {goal} as in FP32")
        _, _, _, resumed = train(dtype, ours, resume_at=150)
        if not all(torch.equal(p, q) for p, q in zip(network.parameters(), resumed.parameters())):
            failed.append(f"{dtype}: resumed at step 150, the parameters differ")

    # The rates of the param_groups hold from the next step on; an infinity skips it.
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = FP8AdamW([p], lr=0.0, weight_decay=0.0, library=library)
    p.grad = torch.ones(4)
    optimizer.step()
    unchanged = torch.equal(p.data, torch.ones(4))
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    if not unchanged or not torch.equal(p.data, torch.full((4,), 0.5)):
        failed.append(f"lr 0, then 0.5: {p.data}")
    p.grad[1] = float("inf")
    optimizer.step()
    if not optimizer.last_step.skipped or not torch.equal(p.data, torch.full((4,), 0.5)):
        failed.append("an infinite gradient did not skip the step")

    # A run of torch.optim.AdamW goes on here, with its moments and its count of steps.
    p = torch.nn.Parameter(torch.linspace(-1, 1, 64))
    theirs = torch.optim.AdamW([p], lr=0.01, betas=(0.9, 0.95))
    for step in range(20):
        if step == 10:
            q = torch.nn.Parameter(p.detach().clone())
            optimizer = FP8AdamW([q], lr=0.01, weight_decay=0.01, preset="fp32", library=library)
            optimizer.import_moments(0, theirs.state[p]["exp_avg"], theirs.state[p]["exp_avg_sq"])
            optimizer.import_steps(10)
        p.grad = torch.sin(torch.arange(64.0) * step)
        theirs.step()
        if step >= 10:
            q.grad = p.grad
            optimizer.step()
    if not torch.allclose(p.data, q.data, rtol=1e-5, atol=1e-6):
        failed.append(f"taken over from torch.optim.AdamW: {(p.data - q.data).abs().max()} apart")
    for message in failed:
        print("failed:", message)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
