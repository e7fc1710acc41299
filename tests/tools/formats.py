"""Scalar formats written from their specifications (OFP8 1.0, IEEE 754), sharing nothing with the library: the judge of
check_inspect.py. Slow, for a few thousand values."""

import bisect
import math
import struct


def to_fp32(value):
    """Rounds a double to FP32."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


class Format:
    """All finite values of a small format in order; a value's position is its code."""

    def __init__(self, name, exponent_bits, mantissa_bits, bias, has_infinity):
        self.name = name
        self.values = []
        codes = 1 << (exponent_bits + mantissa_bits)
        top = codes - (1 << mantissa_bits) if has_infinity else codes - 1
        for code in range(top):
            exponent = code >> mantissa_bits
            mantissa = code & ((1 << mantissa_bits) - 1)
            if exponent == 0:
                self.values.append(math.ldexp(mantissa, 1 - bias - mantissa_bits))
            else:
                self.values.append(math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits))
        self.maximum = self.values[-1]
        # Above this, rounding to nearest even leaves the range; the tie goes to the even one of the last code and the next.
        last = len(self.values) - 1
        self.limit = self.maximum + (self.values[last] - self.values[last - 1]) / 2
        self.tie_stays = last % 2 == 0
        self.scaled = name != "bf16"

    def encode(self, magnitude):
        """The nearest value, ties to even codes, and whether it was beyond the range (and is saturated)."""
        if magnitude > self.limit or (magnitude == self.limit and not self.tie_stays):
            return self.maximum, True
        above = bisect.bisect_left(self.values, magnitude)
        if above == len(self.values):
            return self.maximum, False
        if above == 0 or self.values[above] == magnitude:
            return self.values[above], False
        low, high = self.values[above - 1], self.values[above]
        # Exact: neighbours and the value differ by little.
        if magnitude - low < high - magnitude:
            return low, False
        if magnitude - low > high - magnitude:
            return high, False
        return (low if (above - 1) % 2 == 0 else high), False

    def decode(self, code):
        return self.values[code]

    def scale(self, amax, margin, power_of_two):
        if not self.scaled or not 0 < amax < math.inf:
            return 1.0
        quotient = self.maximum / amax / 2.0**margin
        quotient = min(max(quotient, 2.0**-126), 2.0**126)
        if power_of_two:
            return 2.0 ** (math.frexp(quotient)[1] - 1)
        return to_fp32(quotient)


FORMATS = [
    Format("e4m3", 4, 3, 7, False),
    Format("e5m2", 5, 2, 15, True),
    Format("bf16", 8, 7, 127, True),
    Format("fp16", 5, 10, 15, True),
]


def expected_casts(values, margin=0):
    """For every format and policy what fp8lm inspect must report of these FP32 values."""
    finite = [value for value in values if math.isfinite(value)]
    amax = max((abs(value) for value in finite), default=0.0)
    if len(finite) < len(values):
        amax = math.inf
    result = {}
    for form in FORMATS:
        for policy in ("just-in-time", "power-of-two", "none"):
            scale = 1.0 if policy == "none" else form.scale(amax, margin, policy == "power-of-two")
            inverse = to_fp32(1.0 / scale)
            signal = noise = 0.0
            flushed = saturated = 0
            for value in finite:
                code, beyond = form.encode(abs(to_fp32(value * scale)))
                returned = math.copysign(min(to_fp32(code * inverse), 3.4028234663852886e38), value)
                signal += value * value
                noise += (value - returned) ** 2
                flushed += value != 0 and code == 0
                saturated += beyond
            count = max(len(values), 1)
            result[form.name, policy] = {
                "scale": scale,
                "snr_db": 10 * math.log10(signal / noise) if noise else None,
                "underflow_share": flushed / count,
                "overflow_share": saturated / count,
            }
    return result
