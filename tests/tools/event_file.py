"""A reader of TensorBoard event files, written from the formats and not from the writer: TFRecord frames with masked
CRC-32C, and the few fields of the protobuf message Event that scalars need."""

import struct

TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    TABLE.append(byte)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    at = 0
    while at < len(data):
        length = data[at:at + 8]
        size, = struct.unpack("<Q", length)
        assert struct.unpack("<I", data[at + 8:at + 12])[0] == masked(length), "checksum of a length"
        record = data[at + 12:at + 12 + size]
        assert len(record) == size, "a record is cut off"
        assert struct.unpack("<I", data[at + 12 + size:at + 16 + size])[0] == masked(record), "checksum of a record"
        yield record
        at += 16 + size


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def fields(data):
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        elif key & 7 == 1:
            value, at = data[at:at + 8], at + 8
        elif key & 7 == 2:
            size, at = varint(data, at)
            value, at = data[at:at + size], at + size
        elif key & 7 == 5:
            value, at = data[at:at + 4], at + 4
        else:
            raise AssertionError("wire type %d" % (key & 7))
        yield key >> 3, value


def scalars(data):
    """{tag: {step: value}} of a file, whose first event must tell the version."""
    found = {}
    for number, record in enumerate(records(data)):
        event = dict(fields(record))
        assert struct.unpack("<d", event[1])[0] > 1.6e9, "wall time"
        if number == 0:
            assert event[3] == b"brain.Event:2", "version"
            continue
        for field, value in fields(event[5]):
            assert field == 1
            point = dict(fields(value))
            found.setdefault(point[1].decode(), {})[event.get(2, 0)] = struct.unpack("<f", point[2])[0]
    return found
