"""Damaged files by the thousand: each mutation is a function of a random generator, so a seed repeats it."""

import io
import json
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors.torch import load, save

Mutation = Callable[[bytes, Random], bytes]

EXTREMES = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
NUMBERS = (
    0, -1, 1, 2, 7, 99, 4097, 30_000, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 10**400, -(10**400),
    0.5, -0.0, 1e-320, 1e-30, 1e30, 1e308, math.nan, math.inf, -math.inf,
)  # fmt: skip
TEXTS = (
    "", "x", "meta", "cuda:0", "mps", "hpu", "privateuseone", "mkldnn", "auto", "nan",
    "../../outside", "/dev/zero", "/dev/stdin", "hf-hub:a/b",
    "timm:hf-hub:a/b", "timm:local-dir:/tmp", "os:system", "\0", "\ud800", "\x1b[2J", "<script>",
    "wrn-1000-256", "wrn-28-30", "small-256", "resnet50", "features", "fashion-demo", "cifar10", "x.npz",
    "é" * 300, "9" * 5000,
)  # fmt: skip
DTYPES = (
    "BOOL",
    "U8",
    "I8",
    "I16",
    "I32",
    "I64",
    "F16",
    "BF16",
    "F32",
    "F64",
    "F8_E4M3",
    "U16",
    "U64",
    "x",
    "",
)


# Bytes of any kind


def bytes_changed(content: bytes, random: Random) -> bytes:
    """Between one and eight small wounds: flipped, cut, repeated, inserted, set to an extreme number."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 4, 8))):
        data = bytearray(_wound(data, random))
    return bytes(data)


def _wound(data: bytearray, random: Random) -> bytes:
    if not data:
        return random.randbytes(random.randrange(64))
    # Half of the wounds are near the start, where headers are.
    place = random.randrange(min(len(data), 200) if random.random() < 0.5 else len(data))
    kind = random.randrange(8)
    if kind == 0:
        data[place] ^= 1 << random.randrange(8)
    elif kind == 1:
        data[place] = random.randrange(256)
    elif kind == 2:
        return bytes(data[:place])
    elif kind == 3:
        end = min(len(data), place + random.choice((1, 4, 32, 1000)))
        del data[place:end]
    elif kind == 4:
        data[place:place] = random.randbytes(random.choice((1, 4, 32, 1000)))
    elif kind == 5:
        end = min(len(data), place + random.choice((4, 32, 500)))
        data[place:place] = data[place:end] * random.choice((1, 2, 50))
    elif kind == 6:
        number = random.choice(EXTREMES)
        code = random.choice(("<H", ">H", "<I", ">I", "<Q", ">Q"))
        packed = struct.pack(code, number & ((1 << (8 * struct.calcsize(code))) - 1))
        data[place : place + len(packed)] = packed
    else:
        data[place : place + 16] = bytes(16)
    return bytes(data)


# Trees of dictionaries and lists


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for name, item in items:
        yield (*place, name)
        yield from places(item, (*place, name))


def changed(value: Any, place: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy in which one place is changed; a change that gives GONE removes it."""
    if not place:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    new = changed(copy[place[0]], place[1:], change)
    if new is GONE:
        del copy[place[0]]
    else:
        copy[place[0]] = new
    return copy


GONE = object()


def nonsense(old: Any, random: Random) -> Any:
    """Something that should not be there: of another type, out of range, absurdly long, nested, or gone."""
    kind = random.randrange(9)
    if kind == 0:
        return GONE
    if kind == 1:
        return random.choice((None, True, False, [], {}, [[1]], {"x": 1}, [None], {"": {}}))
    if kind == 2:
        return random.choice(TEXTS)
    if kind == 3 and isinstance(old, int | float) and not isinstance(old, bool):
        return old * random.choice((-1, 10, 1000, 10**9)) if abs(old) < 1e300 else 0
    if kind == 4 and isinstance(old, list) and old:
        return random.choice(
            (old[:-1], old * 2, old[::-1], [old], [*old, random.choice(NUMBERS)], old[:1] * 1000)
        )
    if kind == 5:
        return [old] * random.choice((0, 1, 2, 40))
    if kind == 6:
        return {"x": old}
    if kind == 7:
        return deep(random.choice((50, 300, 2000)))
    return random.choice(NUMBERS)


def deep(levels: int) -> Any:
    nested: Any = []
    for _ in range(levels):
        nested = [nested]
    return nested


def json_changed(content: bytes, random: Random) -> bytes:
    if random.random() < 0.2:
        return bytes_changed(content, random)
    value = json.loads(content)
    found = list(places(value))  # once: a change may nest deeper than Python can walk
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        # Long lists have most of the places; the top levels are where most of the meaning is.
        shallow = [place for place in found if len(place) <= 2]
        place = random.choice(shallow if shallow and random.random() < 0.6 else found or [()])
        try:
            value = changed(value, place, lambda old: nonsense(old, random))
        except (LookupError, TypeError, ValueError):  # an earlier change has removed that place
            continue
        if value is GONE:
            return b""
    return as_json(value)


def as_json(value: Any) -> bytes:
    """Not json.dumps, which gives up at a depth that a file may well have."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 5000 + b"]" * 5000


def lines_changed(content: bytes, random: Random) -> bytes:
    """Of a file with one JSON object on each line."""
    lines = content.splitlines()
    if not lines or random.random() < 0.3:
        return bytes_changed(content, random)
    place = random.randrange(len(lines))
    lines[place] = json_changed(lines[place], random)
    return b"\n".join(lines) + b"\n"


# Tensors


def tensor_changed(value: torch.Tensor, random: Random) -> torch.Tensor:
    """Another type, shape or value."""
    kind = random.randrange(12)
    if kind == 0:
        return value.to(
            random.choice((torch.float16, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8))
        )
    if kind == 1:
        return value[:0].clone() if value.ndim else value.new_empty(0)
    if kind == 2:
        return value[None].clone()
    if kind == 3:
        return value.reshape(-1).clone()
    if kind == 4:
        return torch.cat([value, value]) if value.ndim else value.repeat(2)
    if kind == 5:
        return value[:-1].clone() if value.ndim else value.new_empty(0)
    if kind == 6 and value.ndim > 1:
        return value.transpose(0, 1).contiguous()
    if kind == 7:
        return torch.zeros_like(value)
    copy = value.clone(memory_format=torch.contiguous_format)
    if copy.numel() and copy.dtype.is_floating_point:
        most = torch.finfo(copy.dtype).max
        new = random.choice((math.nan, math.inf, -math.inf, most, -most, 1e-40, -1.0, 2.0))
        copy.view(-1)[random.randrange(copy.numel())] = new
        if kind > 9:
            copy.fill_(new)
    elif copy.numel() and copy.dtype not in (torch.bool, torch.uint8):
        copy.view(-1)[random.randrange(copy.numel())] = random.choice((-1, -2, 99, 1 << 20, (1 << 31) - 1))
    return copy


def safetensors_changed(content: bytes, random: Random) -> bytes:
    kind = random.random()
    if kind < 0.3:
        return bytes_changed(content, random)
    size = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    if kind < 0.55:  # the header alone
        text = json_changed(json.dumps(header).encode(), random)
        if random.random() < 0.5:
            name = random.choice([name for name in header if name != "__metadata__"])
            header[name][random.choice(("dtype", "shape"))] = random.choice(
                (random.choice(DTYPES), [1 << 40], [0], [])
            )
            text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + body
    tensors, metadata = load(content), header.get("__metadata__")
    name = random.choice(list(tensors))
    if random.random() < 0.1:
        del tensors[name]
    else:
        tensors[name] = tensor_changed(tensors[name], random).contiguous()
    return save(tensors, metadata)


def checkpoint_changed(content: bytes, random: Random) -> bytes:
    """torch.save's archive: its bytes, its pickle, or the values in it."""
    kind = random.random()
    if kind < 0.2:
        return bytes_changed(content, random)
    if kind < 0.4:
        return member_changed(content, random, "data.pkl")
    value = torch.load(io.BytesIO(content), weights_only=True)
    found = list(places(value))
    place = random.choice([place for place in found if len(place) <= 2] if random.random() < 0.5 else found)

    def change(old: Any) -> Any:
        if isinstance(old, torch.Tensor) and random.random() < 0.7:
            return tensor_changed(old, random)
        if random.random() < 0.1:
            return random.choice((laughs(60), itself(), odd_tensor(random)))
        return nonsense(old, random)

    value = changed(value, place, change)
    stream = io.BytesIO()
    try:
        torch.save(None if value is GONE else value, stream)
    except (
        RecursionError
    ):  # nested deeper than torch can write; a file with such a pickle is among the others
        return member_changed(content, random, "data.pkl")
    return stream.getvalue()


def laughs(levels: int) -> Any:
    """A list of ten times a list of ten times ...: small in memory, endless for whoever walks it."""
    value: Any = ["ha"]
    for _ in range(levels):
        value = [value] * 10
    return value


def itself() -> Any:
    loop: dict[str, Any] = {}
    loop["state_dict"] = loop
    return loop


def odd_tensor(random: Random) -> torch.Tensor:
    """One element that claims to be a terabyte; a tensor without content; a sparse one."""
    return random.choice((
        torch.zeros(1).expand(1 << 20, 1 << 18),
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.zeros(2, dtype=torch.complex64),
    ))  # fmt: skip


def member_changed(content: bytes, random: Random, ending: str) -> bytes:
    """One file in a zip archive is changed, its checksum is right. Sometimes it is a bomb."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w") as new:
        chosen = random.choice([name for name in old.namelist() if name.endswith(ending)])
        bomb = random.random() < 0.02
        for info in old.infolist():
            data = old.read(info)
            if info.filename == chosen:
                data = bytes(random.choice((1 << 26, 1 << 28))) if bomb else bytes_changed(data, random)
            method = zipfile.ZIP_DEFLATED if bomb else info.compress_type
            new.writestr(zipfile.ZipInfo(info.filename, info.date_time), data, method)
    return stream.getvalue()


# Arrays


def npz_changed(content: bytes, random: Random) -> bytes:
    kind = random.random()
    if kind < 0.25:
        return bytes_changed(content, random)
    if kind < 0.5:
        return member_changed(content, random, ".npy")
    if kind < 0.55:
        return npz_bomb(content, random)
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        arrays = dict(found)
    name = random.choice(list(arrays))
    if random.random() < 0.1:
        del arrays[name]
    else:
        arrays[name] = array_changed(arrays[name], random)
    stream = io.BytesIO()
    (np.savez if random.random() < 0.5 else np.savez_compressed)(stream, **arrays)
    return stream.getvalue()


ALLOWED = 60_000  # rows of 4,096 bytes that are just below the limit


def npz_bomb(content: bytes, random: Random) -> bytes:
    """A header that claims too much, or zeros that compress a thousandfold."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        names = old.namelist()
        chosen = random.choice(names)
        for name in names:
            data = old.read(name)
            if name == chosen:
                rows = random.choice((1 << 14, ALLOWED, 1 << 17, 1 << 40))
                head = io.BytesIO()
                npy.write_array_header_1_0(
                    head, {"descr": "|u1", "fortran_order": False, "shape": (rows, 64, 64)}
                )
                is_whole = rows in (ALLOWED, 1 << 17) and random.random() < 0.3
                data = head.getvalue() + bytes(rows * 4096 if is_whole else 1 << 20)
            new.writestr(name, data)
    return stream.getvalue()


def array_changed(value: Any, random: Random) -> Any:
    kind = random.randrange(10)
    try:
        if kind == 0:
            return value.astype(random.choice(("u1", "i8", "f4", "f8", "f2", "?", "U3", "S2", "c8", "M8[s]")))
        if kind == 1:
            return value[:0]
        if kind == 2:
            return value[None]
        if kind == 3:
            return value.reshape(-1)
        if kind == 4:
            return value[:-1]
        if kind == 5:
            return np.array(random.choice((3, math.nan, "x", -7)))
        if kind == 6:
            return np.concatenate([value, value])
        copy = value.copy()
        if copy.size:
            extreme = (
                random.choice((math.nan, math.inf, 1e30))
                if copy.dtype.kind == "f"
                else random.choice((-1, -5, 99))
            )
            copy.reshape(-1)[random.randrange(copy.size)] = extreme
        return copy
    except (ValueError, TypeError, OverflowError):
        return np.zeros(3)


def npy_changed(content: bytes, random: Random) -> bytes:
    if random.random() < 0.5:
        return bytes_changed(content, random)
    stream = io.BytesIO()
    np.save(stream, array_changed(np.load(io.BytesIO(content)), random))
    return stream.getvalue()


# Tables and lists


def table_changed(content: bytes, random: Random) -> bytes:
    """Commas, quotes, line ends and names of a csv file."""
    if random.random() < 0.4:
        return bytes_changed(content, random)
    rows = [line.split(b",") for line in content.splitlines()]
    for _ in range(random.choice((1, 2, 5))):
        row = random.choice(rows)
        if row:
            row[random.randrange(len(row))] = random.choice((
                b"", b'"', b'""', b"\xff", b"\0", b"=1+1", b"../../outside", b"/dev/zero", b"x" * 200_000,
                b"a\nb",
                b'"' + b"y" * 1000, b"label", b"path", "é".encode(), b"\r", b".", b"/", b"1.png\0",
            ))  # fmt: skip
        if random.random() < 0.2:
            rows.append(random.choice(rows) * 2)
    return random.choice((b"\n", b"\r\n", b"\r")).join(b",".join(row) for row in rows)


def pickle_changed(content: bytes, random: Random) -> bytes:
    """Also one that would run something, were it let."""
    if random.random() < 0.05:
        return pickle.dumps({b"data": _Evil(), b"labels": [0]})
    return bytes_changed(content, random)


class _Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('executed')",)


def gzip_changed(content: bytes, random: Random) -> bytes:
    if random.random() < 0.5:
        return bytes_changed(content, random)
    inside = bytes_changed(zlib.decompress(content, 31), random)
    if random.random() < 0.03:
        inside = inside[:16] + bytes(1 << 29)
    packer = zlib.compressobj(wbits=31)
    return packer.compress(inside) + packer.flush()


# Images


def image_changed(content: bytes, random: Random) -> bytes:
    """Small wounds; or other dimensions. A PNG gets its checksums, as else little would get past them."""
    if random.random() < 0.6:
        if content.startswith(b"\x89PNG") and random.random() < 0.7:
            return png_changed(content, random)
        return bytes_changed(content, random)
    sizes = (0, 1, 36, 5000, 6300, 13_300, 16_383, 60_000, 0x7FFFFFFF)
    width, height = random.choice(sizes), random.choice(sizes)
    data = bytearray(content)
    if content.startswith(b"\x89PNG"):
        depth, kind = random.choice((1, 2, 4, 8, 16)), random.choice((0, 2, 3, 4, 6))
        deep = bytes((depth, kind, 0, 0, 0)) if random.random() < 0.3 else bytes(data[24:29])
        body = zlib.compress(bytes(1 << 20)) if random.random() < 0.3 else b""
        chunks = [(b"IHDR", struct.pack(">II", width, height) + deep)]
        chunks += [(b"IDAT", body)] if body else _chunks(content)[1:]
        return _png(chunks)
    if content.startswith(b"BM"):
        data[18:26] = struct.pack("<ii", width, -height)
    elif content.startswith(b"GIF8"):
        data[6:10] = struct.pack("<HH", width & 0xFFFF, height & 0xFFFF)
    elif content.startswith(b"\xff\xd8"):
        start = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
        data[start + 5 : start + 9] = struct.pack(">HH", height & 0xFFFF, width & 0xFFFF)
    elif content.startswith(b"RIFF"):
        return webp_bomb(width & 0x3FFF, height & 0x3FFF)
    else:
        return bytes_changed(content, random)
    return bytes(data)


def png_changed(content: bytes, random: Random) -> bytes:
    """What is in a chunk, packed or not; chunks that are doubled, lost or in another order."""
    chunks = _chunks(content)
    place = random.randrange(len(chunks))
    name, body = chunks[place]
    kind = random.randrange(4)
    if kind == 0 and name == b"IDAT":
        body = zlib.compress(bytes_changed(zlib.decompress(body), random))
    elif kind == 1:
        chunks.insert(
            place, (random.choice((b"iCCP", b"zTXt", b"tRNS", b"PLTE", b"acTL", b"eXIf", name)), body)
        )
    elif kind == 2:
        random.shuffle(chunks)
        return _png(chunks)
    else:
        body = bytes_changed(body, random)
    chunks[place] = (name, body)
    return _png(chunks)


def _chunks(content: bytes) -> list[tuple[bytes, bytes]]:
    found, place = [], 8
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        found.append((content[place + 4 : place + 8], content[place + 8 : place + 8 + length]))
        place += 12 + length
    return found


def _png(chunks: list[tuple[bytes, bytes]]) -> bytes:
    parts = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def webp_bomb(width: int, height: int) -> bytes:
    """34 bytes that say: one color, on so many pixels."""
    size = (max(width, 1) - 1) | (max(height, 1) - 1) << 14
    body = b"\x2f" + size.to_bytes(4, "little") + b"\x88\x88\x08" + bytes(6)
    chunk = b"VP8L" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(chunk) + 4) + b"WEBP" + chunk
