"""The structs of libfp8core's headers for ctypes, and the loaded library; for the tests and benchmarks in Python."""
import ctypes

E4M3, E5M2, BF16, FP16, FP32 = range(5)


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("index", ctypes.c_int)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("dimensions", ctypes.c_int), ("shape", ctypes.c_int64 * 4),
        ("row_stride", ctypes.c_int64), ("device", Device), ("scale_granularity", ctypes.c_int),
        ("scale", ctypes.c_void_p), ("scale_inverse", ctypes.c_void_p), ("amax", ctypes.c_void_p),
    ]


class ContextOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t), ("api_version", ctypes.c_int), ("device", Device), ("threads", ctypes.c_int),
        ("isa", ctypes.c_int), ("use_stream", ctypes.c_int), ("stream", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t), ("seed", ctypes.c_uint64), ("log", ctypes.c_void_p),
        ("log_user_data", ctypes.c_void_p),
    ]


class CastOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t), ("rounding", ctypes.c_int), ("saturate", ctypes.c_int), ("tensor_id", ctypes.c_uint32),
        ("step", ctypes.c_uint32), ("first_element", ctypes.c_uint64), ("statistics", ctypes.c_void_p),
    ]


class ScalingOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t), ("policy", ctypes.c_int), ("history_length", ctypes.c_int),
        ("amax_choice", ctypes.c_int), ("margin", ctypes.c_int), ("power_of_two", ctypes.c_int),
    ]


def load(path):
    library = ctypes.CDLL(path)
    library.fp8core_last_error.restype = ctypes.c_char_p
    return library


def vector(address, dtype, elements):
    return Tensor(data=address, dtype=dtype, dimensions=1, shape=(ctypes.c_int64 * 4)(elements))
