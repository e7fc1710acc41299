"""libfp8comm through ctypes, and its gradient all-reduce as a communication hook of DistributedDataParallel: one byte a
gradient on the wire, a scale of its own for every parameter.

    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(model)
    state = fp8comm.HookState()
    model.register_comm_hook(state, fp8comm.fp8_compress_hook)
    ...
    loss.backward()
    if state.report().nonfinite_tensors == 0:               # the same on every rank
        optimizer.step()

Gradients in host memory: FP32, BF16 or FP16. The libraries are those that FP8COMM_LIBRARY and FP8CORE_LIBRARY name,
else those that the loader finds. What they refuse is an Error with the library's message; so is a rank that is gone or
silent. PyTorch makes a RuntimeError of it where backward() meets it; the process can then only end, or start again with
all ranks.
"""
import concurrent.futures
import ctypes
import dataclasses
import math
import os

import torch
import torch.distributed

# FP8COMM_API_VERSION and FP8CORE_API_VERSION that the structs below are of; also the sonames of the libraries.
API_VERSION = 0
E4M3, E5M2, BF16, FP16, FP32 = range(5)
DTYPES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
ALGORITHMS = {"two-shot": 0, "native": 1, "fp32": 2, "bf16": 3}
SCALINGS = {"auto": 0, "pre": 1, "post": 2}
WIRE_DTYPES = {"e4m3": E4M3, "e5m2": E5M2}


class Error(RuntimeError):
    """A call that the library refused or that failed: fp8core_last_error(), and the status as a number."""

    def __init__(self, message, status):
        super().__init__(message)
        self.status = status


# The structs of fp8core/context.h, fp8core/tensor.h, fp8comm/communicator.h and fp8comm/gradient.h. The library
# compares each `size` with its own.
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


class CommunicatorOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("timeout_seconds", ctypes.c_double), ("transport", ctypes.c_char_p),
                ("interrupt", ctypes.c_void_p), ("interrupt_data", ctypes.c_void_p)]


class GradientOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("algorithm", ctypes.c_int), ("scaling", ctypes.c_int),
                ("wire_dtype", ctypes.c_int), ("buckets_in_flight", ctypes.c_int), ("bucket_bytes", ctypes.c_int64),
                ("saturation_threshold", ctypes.c_double), ("backoff", ctypes.c_double),
                ("growth_steps", ctypes.c_double), ("mu_initial", ctypes.c_double), ("mu_min", ctypes.c_double),
                ("mu_max", ctypes.c_double), ("measure_snr", ctypes.c_int), ("owners", ctypes.c_void_p),
                ("bucket_of", ctypes.c_void_p), ("inputs_have_amax", ctypes.c_int), ("error_feedback", ctypes.c_int),
                ("in_place", ctypes.c_int), ("delayed_scaling", ctypes.c_int)]


class GradientResult(ctypes.Structure):
    _fields_ = [("nonfinite_tensors", ctypes.c_int64), ("nonfinite_rank", ctypes.c_int),
                ("bytes_sent", ctypes.c_uint64)]


class GradientStatistics(ctypes.Structure):
    _fields_ = [("elements", ctypes.c_int64), ("saturated_in_cast", ctypes.c_uint64),
                ("saturated_in_sum", ctypes.c_uint64), ("flushed_to_zero", ctypes.c_uint64), ("bytes_sent", ctypes.c_uint64),
                ("nonfinite", ctypes.c_int), ("amax", ctypes.c_float), ("wire_scale", ctypes.c_float),
                ("mean_scale", ctypes.c_float), ("mu", ctypes.c_double), ("next_mu", ctypes.c_double),
                ("snr_db", ctypes.c_double)]


ALL_GATHER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _open(path, advice):
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise OSError(f"cannot load {path}: {error}; {advice}") from None


def load_library(path=None):
    """The functions of both libraries, with their signatures. `path` is that of libfp8comm.so."""
    path = path or os.environ.get("FP8COMM_LIBRARY") or f"libfp8comm.so.{API_VERSION}"
    # Where the loader does not know the folder, it would not find what libfp8comm needs; but it takes what is loaded.
    core = os.environ.get("FP8CORE_LIBRARY")
    neighbour = os.path.join(os.path.dirname(path), f"libfp8core.so.{API_VERSION}")
    if core or (os.path.dirname(path) and os.path.exists(neighbour)):
        _open(core or neighbour, "expected the path of libfp8core.so in FP8CORE_LIBRARY")
    library = _open(path, "install libfp8core and libfp8comm, or set FP8COMM_LIBRARY to the path of libfp8comm.so")
    for name in "fp8core", "fp8comm":
        try:
            version = getattr(library, name + "_api_version")()
        except AttributeError:
            raise OSError(f"{path} has no {name}_api_version(), expected libfp8comm, which needs libfp8core") from None
        if version != API_VERSION:
            raise OSError(f"{path} comes with lib{name} of API version {version}, expected {API_VERSION}")

    pointer, integer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
    signatures = {
        "fp8core_context_create": (integer, [pointer, pointer]), "fp8core_context_destroy": (None, [pointer]),
        "fp8core_last_error": (ctypes.c_char_p, []), "fp8core_tensor_span_bytes": (number, [pointer]),
        "fp8comm_version": (ctypes.c_char_p, []),
        "fp8comm_communicator_create": (integer, [pointer, integer, integer, ALL_GATHER, pointer, pointer]),
        "fp8comm_communicator_destroy": (None, [pointer]),
        "fp8comm_communicator_transport": (ctypes.c_char_p, [pointer]),
        "fp8comm_gradient_create": (integer, [pointer, pointer, pointer, number, pointer, pointer]),
        "fp8comm_gradient_destroy": (None, [pointer]),
        "fp8comm_gradient_all_reduce": (integer, [pointer, pointer, pointer, pointer]),
        "fp8comm_gradient_get_statistics": (integer, [pointer, number, pointer]),
        "fp8comm_gradient_saved_bytes": (size, [pointer]), "fp8comm_gradient_save": (integer, [pointer, pointer, size]),
        "fp8comm_gradient_load": (integer, [pointer, pointer, size]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    # The one struct that carries no size: 2 rows of 3, 5 elements apart, of 2 bytes.
    probe = Tensor(data=256, dtype=BF16, dimensions=2, shape=(2, 3), row_stride=5)
    if library.fp8core_tensor_span_bytes(ctypes.byref(probe)) != 16:
        raise OSError(f"{path} comes with a libfp8core whose fp8core_tensor is another: "
                      f"{library.fp8core_last_error().decode()}")
    return library


class Communicator:
    """A rank's place in a group. `all_gather` takes this rank's bytes and returns a list of all ranks' bytes; it is
    called within the constructor only, and not where the size is 1. Collective."""

    def __init__(self, rank, size, all_gather=None, timeout_seconds=60.0, library=None):
        self._handle = ctypes.c_void_p()
        self.library = library or load_library()
        self.rank, self.size = rank, size
        raised = []

        def call_back(_, send, receive, count):
            # An exception cannot pass through the library.
            try:
                parts = all_gather(ctypes.string_at(send, count))
                if [len(part) for part in parts] != [count] * size:
                    raise ValueError(f"all_gather gave {[len(part) for part in parts]} bytes, expected {count} of each "
                                     f"of {size} ranks")
                ctypes.memmove(receive, b"".join(parts), count * size)
                return 0
            except Exception as error:
                raised.append(error)
                return 1

        options = CommunicatorOptions(ctypes.sizeof(CommunicatorOptions), timeout_seconds, None, None, None)
        try:
            self.check(self.library.fp8comm_communicator_create(
                ctypes.byref(self._handle), rank, size, ALL_GATHER(call_back if all_gather else 0), None,
                ctypes.byref(options)))
        except Error as error:
            raise error from (raised[0] if raised else None)

    @classmethod
    def of_process_group(cls, group=None, timeout_seconds=60.0, library=None):
        """The ranks of a process group of torch.distributed (None: all), over which they find each other. It must take
        tensors on the CPU, as that of a DistributedDataParallel on the CPU does."""
        rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)

        def all_gather(part):
            own = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            parts = [torch.empty_like(own) for _ in range(size)]
            torch.distributed.all_gather(parts, own, group=group)
            return [one.numpy().tobytes() for one in parts]

        return cls(rank, size, all_gather, timeout_seconds, library)

    def check(self, status):
        if status != 0:
            raise Error(f"libfp8comm: {self.library.fp8core_last_error().decode()} (status {status})", status)

    @property
    def handle(self):
        if not self._handle:
            raise ValueError("the communicator is closed")
        return self._handle

    @property
    def transport(self):
        return self.library.fp8comm_communicator_transport(self.handle).decode()

    def close(self):
        if self._handle:
            self.library.fp8comm_communicator_destroy(ctypes.byref(self._handle))

    def __del__(self):
        self.close()


class Context:
    """Threads that do the casts."""

    def __init__(self, threads=0, library=None):
        self._handle = ctypes.c_void_p()
        self.library = library or load_library()
        options = ContextOptions(size=ctypes.sizeof(ContextOptions), api_version=API_VERSION, threads=threads)
        status = self.library.fp8core_context_create(ctypes.byref(self._handle), ctypes.byref(options))
        if status != 0:
            raise Error(f"libfp8core: {self.library.fp8core_last_error().decode()} (status {status})", status)

    @property
    def handle(self):
        if not self._handle:
            raise ValueError("the context is closed")
        return self._handle

    def close(self):
        if self._handle:
            self.library.fp8core_context_destroy(ctypes.byref(self._handle))

    def __del__(self):
        self.close()


class Reducer:
    """The mean over all ranks of a list of tensors, whose numbers of elements are given. Collective."""

    def __init__(self, communicator, context, elements, *, algorithm="two-shot", scaling="auto", wire_dtype="e4m3",
                 buckets_in_flight=2, bucket_bytes=25 << 20, saturation_threshold=1e-5, backoff=0.5,
                 growth_steps=1000.0, mu_initial=1.0, mu_min=2.0 ** -16, mu_max=16.0, measure_snr=False,
                 error_feedback=False, delayed_scaling=False):
        self._handle = ctypes.c_void_p()
        # Both must outlive the reducer.
        self._communicator, self._context = communicator, context
        self.library, self.elements = communicator.library, tuple(elements)
        chosen = []
        for what, name, names in (("algorithm", algorithm, ALGORITHMS), ("scaling", scaling, SCALINGS),
                                  ("wire_dtype", wire_dtype, WIRE_DTYPES)):
            if name not in names:
                raise ValueError(f"{what} is {name!r}, expected one of {', '.join(names)}")
            chosen.append(names[name])
        options = GradientOptions(ctypes.sizeof(GradientOptions), *chosen, buckets_in_flight, bucket_bytes,
                                  saturation_threshold, backoff, growth_steps, mu_initial, mu_min, mu_max,
                                  int(measure_snr), None, None, 0, int(error_feedback), 1, int(delayed_scaling))
        communicator.check(self.library.fp8comm_gradient_create(
            ctypes.byref(self._handle), communicator.handle, context.handle, len(self.elements),
            (ctypes.c_int64 * len(self.elements))(*self.elements), ctypes.byref(options)))

    def all_reduce(self, tensors):
        """Puts the mean of each torch tensor in its place. Each must be dense; the order of its memory counts."""
        if tuple(tensor.numel() for tensor in tensors) != self.elements:
            raise ValueError(f"tensors have {[tensor.numel() for tensor in tensors]} elements, expected "
                             f"{self.elements}")
        for tensor in tensors:
            if tensor.dtype not in DTYPES or tensor.device.type != "cpu":
                raise ValueError(f"a gradient is {tensor.dtype} on {tensor.device}, expected FP32, BF16 or FP16 on the "
                                 "CPU")
        described = (Tensor * len(tensors))(*[
            Tensor(data=tensor.data_ptr(), dtype=DTYPES[tensor.dtype], dimensions=1, shape=(tensor.numel(),))
            for tensor in tensors])
        result = GradientResult()
        self._communicator.check(self.library.fp8comm_gradient_all_reduce(self._handle, described, described,
                                                                          ctypes.byref(result)))
        return result

    def statistics(self):
        """Of each tensor's last step."""
        found = [GradientStatistics() for _ in self.elements]
        for i, one in enumerate(found):
            self._communicator.check(self.library.fp8comm_gradient_get_statistics(self._handle, i, ctypes.byref(one)))
        return found

    def save(self):
        """The factors mu, for a checkpoint: the same bytes on every rank."""
        saved = ctypes.create_string_buffer(self.library.fp8comm_gradient_saved_bytes(self._handle))
        self._communicator.check(self.library.fp8comm_gradient_save(self._handle, saved, len(saved)))
        return saved.raw

    def load(self, saved):
        self._communicator.check(self.library.fp8comm_gradient_load(self._handle, saved, len(saved)))

    def close(self):
        if self._handle:
            self.library.fp8comm_gradient_destroy(ctypes.byref(self._handle))

    def __del__(self):
        self.close()


@dataclasses.dataclass
class Report:
    """What the hook has done since the last report, of all buckets; but for `bytes_sent` the same on every rank."""

    buckets: int = 0
    # Gradients of this rank, and bytes that it sent, counted by the transport.
    elements: int = 0
    bytes_sent: int = 0
    # Values of all ranks that saturated, in the cast or in the sum, and that became 0.
    saturated: int = 0
    flushed_to_zero: int = 0
    # Tensors with an infinity or a NaN on some rank: their gradient is now NaN on all. The lowest of these ranks; -1:
    # none, or unknown (algorithms "fp32" and "bf16").
    nonfinite_tensors: int = 0
    nonfinite_rank: int = -1
    # The lowest signal-to-noise ratio of a tensor, against a mean in FP32; infinity unless `measure_snr` was asked for.
    least_snr_db: float = math.inf


class HookState:
    """What fp8_compress_hook() keeps between steps, for one DistributedDataParallel. Collective over the process group.

    A thread of its own makes all calls of the library, in the order in which the buckets came, which is the same on
    every rank: a bucket travels while backward() computes the next one. `options` are those of Reducer. One reducer a
    bucket, made when it first comes; DistributedDataParallel packs its buckets anew after the first step, and these get
    new ones.
    """

    def __init__(self, process_group=None, timeout_seconds=60.0, threads=None, library=None, **options):
        self._options, self._reducers, self._saved, self._report = options, {}, {}, Report()
        self.reducers_created = 0
        loaded = library or load_library()
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "fp8comm")
        self._context = Context(threads or torch.get_num_threads(), loaded)
        self.communicator = Communicator.of_process_group(process_group, timeout_seconds, loaded)

    def _reduce(self, index, is_last, tensors):
        elements = tuple(tensor.numel() for tensor in tensors)
        reducer = self._reducers.get(index)
        if reducer is None or reducer.elements != elements:
            if reducer is not None:
                reducer.close()
            self._reducers[index] = reducer = Reducer(self.communicator, self._context, elements, **self._options)
            self.reducers_created += 1
            if self._saved.get(index, (None,))[0] == elements:
                reducer.load(self._saved.pop(index)[1])
        if is_last:
            for gone in [i for i in self._reducers if i > index]:
                self._reducers.pop(gone).close()
        result, report = reducer.all_reduce(tensors), self._report
        report.buckets += 1
        report.bytes_sent += result.bytes_sent
        report.nonfinite_tensors += result.nonfinite_tensors
        if result.nonfinite_rank >= 0:
            known = report.nonfinite_rank >= 0
            lowest = min(report.nonfinite_rank, result.nonfinite_rank)
            report.nonfinite_rank = lowest if known else result.nonfinite_rank
        for one in reducer.statistics():
            report.elements += one.elements
            report.saturated += one.saturated_in_cast + one.saturated_in_sum
            report.flushed_to_zero += one.flushed_to_zero
            if not math.isnan(one.snr_db):
                report.least_snr_db = min(report.least_snr_db, one.snr_db)

    def start(self, bucket):
        """A future of the bucket's buffer, with the means in it."""
        reduced = torch.futures.Future()
        buffer, index, is_last, tensors = bucket.buffer(), bucket.index(), bucket.is_last(), bucket.gradients()

        def work():
            try:
                self._reduce(index, is_last, tensors)
                reduced.set_result(None)
            except Exception as error:
                reduced.set_result(error)

        def take(done):
            if done.value() is not None:
                raise done.value()
            return buffer

        # What is raised in then() reaches backward() as it is; set_exception() hides it behind a failed conversion.
        returned = reduced.then(take)
        self._worker.submit(work)
        return returned

    def report(self):
        """After backward(): what was done since the last call."""
        report, self._report = self._report, Report()
        return report

    def state_dict(self):
        """The factors mu, for a checkpoint: the same on every rank, and good for any number of ranks."""
        return {index: (reducer.elements, reducer.save()) for index, reducer in self._reducers.items()}

    def load_state_dict(self, saved):
        """Taken by each bucket when it first comes with the sizes that it had. Before the first step, on every rank."""
        self._saved = dict(saved)

    def close(self):
        """Not collective. DistributedDataParallel must not be used afterwards."""
        self._worker.shutdown()
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers.clear()
        self.communicator.close()
        self._context.close()


def fp8_compress_hook(state, bucket):
    """For DistributedDataParallel.register_comm_hook(HookState(), fp8_compress_hook)."""
    return state.start(bucket)
