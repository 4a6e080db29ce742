"""The safetensors format in numpy alone, BF16 included, which numpy has no type for.

Written from the format's published layout: 8 bytes of little-endian header length, a JSON header
(name -> dtype, shape, byte range), then the raw tensor bytes.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_INTEGERS = {"I64": np.int64, "I32": np.int32}


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Round finite values to BF16, nearest even; returns the uint16 bit patterns.

    Values are first rounded to float32, as every framework does.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    half_minus_tie = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half_minus_tie) >> np.uint32(16)).astype(np.uint16)


def from_bfloat16_bits(bits: np.ndarray) -> np.ndarray:
    """The float64 values of uint16 BF16 bit patterns (exact)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """All tensors of one safetensors file: floats as float64, integers as int64.

    Raises ValueError for a dtype other than BF16, F16, F32, F64, I32, I64 and for a tensor whose
    bytes do not match its shape.
    """
    raw = Path(path).read_bytes()
    header_length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_length])
    body = memoryview(raw)[8 + header_length :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data, shape, dtype = body[begin:end], entry["shape"], entry["dtype"]
        if dtype == "BF16":
            flat = from_bfloat16_bits(np.frombuffer(data, dtype="<u2"))
        elif dtype in _FLOATS:
            stored = np.dtype(_FLOATS[dtype]).newbyteorder("<")
            flat = np.frombuffer(data, dtype=stored).astype(np.float64)
        elif dtype in _INTEGERS:
            stored = np.dtype(_INTEGERS[dtype]).newbyteorder("<")
            flat = np.frombuffer(data, dtype=stored).astype(np.int64)
        else:
            raise ValueError(f"{path}: tensor {name} has dtype {dtype}, which is not read here.")
        if flat.size != math.prod(shape):
            raise ValueError(f"{path}: tensor {name} has {flat.size} values for shape {shape}.")
        tensors[name] = flat.reshape(shape)
    return tensors


def write_safetensors(path: str | Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write uint16 arrays as BF16 and float32 arrays as F32, in the mapping's order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks = []
    offset = 0
    for name, array in tensors.items():
        if array.dtype == np.uint16:
            dtype, data = "BF16", array.astype("<u2").tobytes()
        elif array.dtype == np.float32:
            dtype, data = "F32", array.astype("<f4").tobytes()
        else:
            raise ValueError(f"{name}: cannot store {array.dtype}, only uint16 (BF16) or float32.")
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        chunks.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format asks for an aligned first tensor
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for data in chunks:
            file.write(data)
