"""The structs of libfp8optim's headers for ctypes, and the loaded library; for the tests and benchmarks in Python."""
import ctypes

from fp8core_ctypes import BF16, E4M3, FP16, FP32, Tensor

MASTER, EXP_AVG, EXP_AVG_SQ, WEIGHT = range(4)
# master, exp_avg, exp_avg_sq of each preset.
PRESETS = {
    "fp32": (FP32, FP32, FP32),
    "bf16": (FP32, FP32, FP32),
    "fp8": (FP16, E4M3, FP16),
    "fp8-bf16-master": (BF16, E4M3, FP16),
    "fp8-master": (E4M3, E4M3, FP16),
    "fp8-exp-avg-sq": (FP16, E4M3, E4M3),
}


class AdamWOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t), ("master_dtype", ctypes.c_int), ("exp_avg_dtype", ctypes.c_int),
        ("exp_avg_sq_dtype", ctypes.c_int), ("stochastic_rounding", ctypes.c_int), ("seed", ctypes.c_uint64),
    ]


class Group(ctypes.Structure):
    _fields_ = [
        ("learning_rate", ctypes.c_double), ("beta1", ctypes.c_double), ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double), ("weight_decay", ctypes.c_double),
    ]


class Parameter(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p), ("dimensions", ctypes.c_int), ("shape", ctypes.c_int64 * 4), ("group", ctypes.c_int),
        ("with_weight", ctypes.c_int), ("weight_dtype", ctypes.c_int), ("weight", ctypes.c_void_p),
        ("master", ctypes.c_void_p), ("exp_avg", ctypes.c_void_p), ("exp_avg_sq", ctypes.c_void_p),
    ]


class StepOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("max_norm", ctypes.c_float), ("loss_scale", ctypes.c_float)]


class StepReport(ctypes.Structure):
    _fields_ = [
        ("skipped", ctypes.c_int), ("gradient_norm", ctypes.c_float), ("clip_factor", ctypes.c_float),
        ("steps", ctypes.c_int64), ("skipped_steps", ctypes.c_int64),
    ]


class Schedule(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t), ("type", ctypes.c_int), ("peak", ctypes.c_double), ("floor", ctypes.c_double),
        ("warmup_steps", ctypes.c_int64), ("total_steps", ctypes.c_int64), ("decay_steps", ctypes.c_int64),
    ]


class Memory(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("parameters", "weight_bytes", "master_bytes", "exp_avg_bytes", "exp_avg_sq_bytes", "overhead_bytes")
    ]


def options_of(preset, stochastic_rounding=False, seed=0):
    return AdamWOptions(ctypes.sizeof(AdamWOptions), *PRESETS[preset], int(stochastic_rounding), seed)


def parameter(name, shape, group=0, weight_dtype=None, **memory):
    """`memory`: addresses of weight, master, exp_avg, exp_avg_sq, where the caller brings them."""
    return Parameter(name=name.encode(), dimensions=len(shape), shape=(ctypes.c_int64 * 4)(*shape), group=group,
                     with_weight=int(weight_dtype is not None), weight_dtype=weight_dtype or 0, **memory)


def step_options(max_norm=0.0, loss_scale=1.0):
    return StepOptions(ctypes.sizeof(StepOptions), max_norm, loss_scale)


def load(path):
    """The library; libfp8core, which it needs, must have been loaded by fp8core_ctypes.load() before."""
    library = ctypes.CDLL(path)
    library.fp8optim_adamw_steps.restype = ctypes.c_int64
    library.fp8optim_adamw_steps.argtypes = [ctypes.c_void_p]
    library.fp8optim_adamw_saved_bytes.restype = ctypes.c_size_t
    library.fp8optim_adamw_saved_bytes.argtypes = [ctypes.c_void_p]
    library.fp8optim_adamw_set_steps.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.fp8optim_adamw_set_learning_rate.argtypes = [ctypes.c_void_p, ctypes.c_double]
    library.fp8optim_adamw_create.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(AdamWOptions), ctypes.c_int64, ctypes.POINTER(Parameter),
        ctypes.c_int, ctypes.POINTER(Group),
    ]
    library.fp8optim_adamw_set_state.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.POINTER(Tensor),
    ]
    library.fp8optim_adamw_state.argtypes = library.fp8optim_adamw_set_state.argtypes
    library.fp8optim_adamw_step.argtypes = [
        ctypes.c_void_p, ctypes.POINTER(Tensor), ctypes.POINTER(StepOptions), ctypes.POINTER(StepReport),
    ]
    library.fp8optim_schedule_rate.argtypes = [
        ctypes.POINTER(Schedule), ctypes.c_int64, ctypes.POINTER(ctypes.c_double),
    ]
    return library
