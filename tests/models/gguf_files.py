"""GGUF files for tests: a writer, and the formats' definitions said again in numpy."""

import struct

import numpy as np

KINDS = {bool: 7, int: 4, float: 6, str: 8}


def _text(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value):
    kind = KINDS[type(value)]
    return kind, _text(value) if kind == 8 else struct.pack({7: "<?", 4: "<I", 6: "<f"}[kind], value)


def _entry(key, value):
    if isinstance(value, list):
        parts = [_value(entry) for entry in value]
        body = struct.pack("<IQ", parts[0][0], len(parts)) + b"".join(data for _, data in parts)
        return _text(key) + struct.pack("<I", 9) + body
    kind, data = _value(value)
    return _text(key) + struct.pack("<I", kind) + data


def write(path, metadata, tensors):
    """tensors: name -> (type number, shape with rows first, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_entry(key, value) for key, value in metadata.items())
    data = b""
    for name, (number, shape, content) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += _text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", number, len(data))
        data += content
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def _nibbles(packed):
    """[blocks, n] bytes as [blocks, 2n]: all low halves, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], 1).astype(np.float64)


def _halves(raw, first, count):
    return raw[:, first : first + 2 * count].copy().view(np.float16).astype(np.float64)


def _bits(raw):
    """[blocks, n] bytes as [blocks, 8n] bits, the lowest first."""
    return np.unpackbits(raw, axis=1, bitorder="little").astype(np.float64)


def _q4_0(raw):
    return _halves(raw, 0, 1) * (_nibbles(raw[:, 2:]) - 8)


def _q4_1(raw):
    return _halves(raw, 0, 1) * _nibbles(raw[:, 4:]) + _halves(raw, 2, 1)


def _q5_0(raw):
    return _halves(raw, 0, 1) * (_nibbles(raw[:, 6:]) + 16 * _bits(raw[:, 2:6]) - 16)


def _q5_1(raw):
    return _halves(raw, 0, 1) * (_nibbles(raw[:, 8:]) + 16 * _bits(raw[:, 4:8])) + _halves(raw, 2, 1)


def _q8_0(raw):
    return _halves(raw, 0, 1) * raw[:, 2:].view(np.int8)


def _sixes(raw):
    """The scales and minima of eight parts from twelve bytes."""
    a, b, c = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], 1)
    return scales.astype(np.float64), np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], 1).astype(np.float64)


def _parts(raw, numbers):
    scales, least = _sixes(raw[:, 4:16])
    per_part = numbers.reshape(len(raw), 8, 32)
    values = (_halves(raw, 0, 1) * scales)[..., None] * per_part - (_halves(raw, 2, 1) * least)[..., None]
    return values.reshape(len(raw), 256)


def _by_parts(packed):
    """128 bytes: the low halves of 32 are a part, their high halves the next."""
    groups = packed.reshape(len(packed), 4, 32)
    return np.stack([groups & 15, groups >> 4], 2).reshape(len(packed), 8, 32).astype(np.float64)


def _q4_k(raw):
    return _parts(raw, _by_parts(raw[:, 16:]))


def _q5_k(raw):
    fifth = np.stack([raw[:, 16:48] >> part & 1 for part in range(8)], 1)
    return _parts(raw, _by_parts(raw[:, 48:]) + 16.0 * fifth)


def _q6_k(raw):
    low, high = raw[:, :128].reshape(-1, 2, 2, 32), raw[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], 2)
    top = np.concatenate([high >> 2 * part & 3 for part in range(4)], 2)
    numbers = (low | top << 4).astype(np.float64).reshape(len(raw), 16, 16) - 32
    scales = raw[:, 192:208].view(np.int8).astype(np.float64)[..., None]
    return (_halves(raw, 208, 1)[..., None] * scales * numbers).reshape(len(raw), 256)


#: name: (its number, numbers of a block, its bytes, where its float16 scales lie, what it means)
FORMATS = {
    "Q4_0": (2, 32, 18, [0], _q4_0),
    "Q4_1": (3, 32, 20, [0, 2], _q4_1),
    "Q5_0": (6, 32, 22, [0], _q5_0),
    "Q5_1": (7, 32, 24, [0, 2], _q5_1),
    "Q8_0": (8, 32, 34, [0], _q8_0),
    "Q4_K": (12, 256, 144, [0, 2], _q4_k),
    "Q5_K": (13, 256, 176, [0, 2], _q5_k),
    "Q6_K": (14, 256, 210, [208], _q6_k),
}


def plain(name, values):
    """F32, F16 or BF16: (the tensor's entry, what it holds)."""
    values = np.asarray(values, np.float32)
    if name == "BF16":
        kept = values.view(np.uint32) >> 16
        return (30, values.shape, kept.astype(np.uint16).tobytes()), (kept << 16).astype(np.uint32).view(np.float32)
    kept = values.astype({"F32": np.float32, "F16": np.float16}[name])
    return ({"F32": 0, "F16": 1}[name], values.shape, kept.tobytes()), kept.astype(np.float32)


def quantised(name, shape, random):
    """Random blocks with scales near those of weights: (the tensor's entry, what it holds)."""
    number, numbers, size, scales, meaning = FORMATS[name]
    blocks = int(np.prod(shape)) // numbers
    raw = random.integers(0, 256, (blocks, size), dtype=np.uint8)
    for place in scales:
        chosen = random.uniform(-1, 1, (blocks, 1)) * (2e-4 if "K" in name else 5e-3)
        raw[:, place : place + 2] = chosen.astype(np.float16).view(np.uint8)
    return (number, shape, raw.tobytes()), meaning(raw).reshape(shape).astype(np.float32)
