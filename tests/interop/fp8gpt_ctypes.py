"""The structs of libfp8gpt's headers for ctypes, and a model with numpy arrays; for the tests and benchmarks in Python."""
import ctypes

import numpy as np

from fp8core_ctypes import BF16, FP32, ContextOptions, ScalingOptions, Tensor

PRECISIONS = {"fp32": 0, "bf16": 1, "te": 2, "fp8-o1": 3, "fp8-o2": 4, "fp8-o3": 5}
FP8CORE_API_VERSION = 0


class Config(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t)] + [
        (name, ctypes.c_int) for name in (
            "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocabulary", "sequence", "normalization", "activation",
            "position", "tied_embeddings", "biases")
    ] + [(name, ctypes.c_float) for name in ("norm_eps", "rope_theta", "dropout", "init_std")]


class ModelOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t), ("precision", ctypes.c_int), ("batch", ctypes.c_int), ("scaling", ScalingOptions),
        ("recompute", ctypes.c_int), ("inference", ctypes.c_int), ("seed", ctypes.c_uint64),
        ("external_weights", ctypes.c_int), ("external_gradients", ctypes.c_int),
    ]


class Parameter(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p), ("dimensions", ctypes.c_int), ("shape", ctypes.c_int64 * 2), ("decay", ctypes.c_int),
        ("linear", ctypes.c_int), ("part", ctypes.c_int), ("weight", Tensor), ("gradient", Tensor),
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        ("sequences", ctypes.c_int), ("length", ctypes.c_int), ("tokens", ctypes.c_void_p), ("targets", ctypes.c_void_p),
    ]


def values_of(tensor):
    """A copy in FP32 of a tensor in BF16 or FP32."""
    shape = tuple(tensor.shape[i] for i in range(tensor.dimensions))
    code = np.float32 if tensor.dtype == FP32 else np.uint16
    assert tensor.dtype in (FP32, BF16)
    memory = (ctypes.c_char * (int(np.prod(shape)) * np.dtype(code).itemsize)).from_address(tensor.data)
    codes = np.frombuffer(memory, code).reshape(shape)
    if tensor.dtype == FP32:
        return codes.copy()
    return (codes.astype(np.uint32) << 16).view(np.float32)


class Model:
    """A model of a preset, some fields of its config replaced."""

    def __init__(self, core, gpt, preset, precision, batch, threads=0, inference=0, seed=1, **changes):
        """core, gpt: paths of the shared libraries."""
        self.core = ctypes.CDLL(core, mode=ctypes.RTLD_GLOBAL)
        self.gpt = ctypes.CDLL(gpt)
        self.core.fp8core_last_error.restype = ctypes.c_char_p
        self.gpt.fp8gpt_model_parameters.restype = ctypes.c_int64
        self.context = ctypes.c_void_p()
        self.model = ctypes.c_void_p()
        options = ContextOptions(size=ctypes.sizeof(ContextOptions), api_version=FP8CORE_API_VERSION, threads=threads)
        self.check(self.core.fp8core_context_create(ctypes.byref(self.context), None if threads == 0 else ctypes.byref(options)))
        self.config = Config()
        self.check(self.gpt.fp8gpt_config_preset(preset.encode(), ctypes.byref(self.config)))
        for name, value in changes.items():
            setattr(self.config, name, value)
        scaling = ScalingOptions(size=ctypes.sizeof(ScalingOptions), policy=1, history_length=16)
        model_options = ModelOptions(size=ctypes.sizeof(ModelOptions), precision=PRECISIONS[precision], batch=batch,
                                     scaling=scaling, inference=inference, seed=seed)
        self.check(self.gpt.fp8gpt_model_create(ctypes.byref(self.model), self.context, ctypes.byref(self.config),
                                                ctypes.byref(model_options)))

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.core.fp8core_last_error().decode())

    def close(self):
        self.gpt.fp8gpt_model_destroy(ctypes.byref(self.model))
        self.core.fp8core_context_destroy(ctypes.byref(self.context))

    def parameters(self):
        for index in range(self.gpt.fp8gpt_model_parameters(self.model)):
            parameter = Parameter()
            self.check(self.gpt.fp8gpt_model_parameter(self.model, ctypes.c_int64(index), ctypes.byref(parameter)))
            yield parameter

    def weights(self):
        return {p.name.decode(): values_of(p.weight) for p in self.parameters()}

    def gradients(self):
        return {p.name.decode(): values_of(p.gradient) for p in self.parameters()}

    def batch(self, tokens, targets):
        assert tokens.dtype == np.int32 and targets.dtype == np.int32 and tokens.flags.c_contiguous
        return Batch(tokens.shape[0], tokens.shape[1], tokens.ctypes.data, targets.ctypes.data)

    def train(self, tokens, targets, first=1, loss_scale=1.0, step=0, micro_batch=0):
        loss = ctypes.c_float()
        self.check(self.gpt.fp8gpt_model_train(
            self.model, ctypes.byref(self.batch(tokens, targets)), first, ctypes.c_float(loss_scale), ctypes.c_int64(step),
            micro_batch, ctypes.byref(loss)))
        return loss.value

    def end_step(self):
        self.check(self.gpt.fp8gpt_model_end_step(self.model))

    def loss(self, tokens, targets):
        loss = ctypes.c_float()
        self.check(self.gpt.fp8gpt_model_loss(self.model, ctypes.byref(self.batch(tokens, targets)), ctypes.byref(loss)))
        return loss.value

    def next(self, tokens, position):
        tokens = np.ascontiguousarray(tokens, np.int32)
        logits = np.empty(self.config.vocabulary, np.float32)
        self.check(self.gpt.fp8gpt_model_next(
            self.model, ctypes.c_void_p(tokens.ctypes.data), tokens.size, position, ctypes.c_void_p(logits.ctypes.data)))
        return logits
