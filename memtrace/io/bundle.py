"""One file of plain values and numpy columns: a JSON header, then the columns as they lie in memory.

    magic, 8 bytes | length of the header, u32 | its CRC-32, u32 | header, JSON in UTF-8 | columns

Every column begins at a multiple of 64 bytes. Where follows from the lengths of those before it, so columns can
neither overlap nor lie outside the file. The classes of the values are the schema: what does not fit the hints of
their fields is not written, and what does not fit them when it is read is damage. Nothing in a file is ever run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import mmap
import os
import struct
import types
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

MAGIC = b"\x89mtcols\n"
MAX_HEADER_BYTES = 16 << 20
_PREFIX = struct.Struct("<8sII")
_ALIGNMENT = 64
_DIGEST_ROW = 4096
_DTYPES = frozenset("bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float64".split())
_COLUMN = "column"
_TEXTS = "texts"

Column: TypeAlias = NDArray[Any]
Value = TypeVar("Value")


class DamagedError(Exception):
    """The file is not what was written."""


class UnfitError(ValueError):
    """The value is not of the class that it should be of, or too large for a header."""


class Packed:
    """Values ready to be written. `size` is the length of the file in bytes."""

    def __init__(self, values: Mapping[str, tuple[object, Any]]) -> None:
        """Of each name, the value and its class. Raises UnfitError."""
        self._columns: list[Column] = []
        packer = _Packer(self._columns)
        plain = {name: packer.plain(value, hint) for name, (value, hint) in values.items()}
        described = [[column.dtype.name, len(column), digest(column)] for column in self._columns]
        text = json.dumps({"columns": described, "values": plain}, ensure_ascii=False, separators=(",", ":"))
        self._header = text.encode("utf-8", "surrogatepass")
        if len(self._header) > MAX_HEADER_BYTES:
            raise UnfitError("the header is too long")
        self._offsets, self.size = _layout(len(self._header), [column.nbytes for column in self._columns])

    def write(self, file: BinaryIO) -> None:
        """Writes all of it to an empty file. Raises OSError."""
        prefix = _PREFIX.pack(MAGIC, len(self._header), zlib.crc32(self._header))
        position = file.write(prefix) + file.write(self._header)
        for offset, column in zip(self._offsets, self._columns, strict=True):
            position += file.write(bytes(offset - position))
            position += file.write(column.data.cast("B")) if len(column) else 0
        file.write(bytes(self.size - position))


class Bundle:
    """A written file, mapped: values are read when they are asked for, their columns never copied, never writable."""

    def __init__(self, descriptor: int) -> None:
        """The file may be closed and removed afterwards, but not changed. Raises DamagedError, or OSError."""
        size = os.fstat(descriptor).st_size
        if size < _PREFIX.size:
            raise DamagedError("too short")
        self._map = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        magic, length, checksum = _PREFIX.unpack_from(self._map)
        if magic != MAGIC or length > min(MAX_HEADER_BYTES, size - _PREFIX.size):
            raise DamagedError("no bundle")
        header = self._map[_PREFIX.size : _PREFIX.size + length]
        if zlib.crc32(header) != checksum:
            raise DamagedError("the header is damaged")
        try:
            content = json.loads(header.decode("utf-8", "surrogatepass"))
            self._values = _exactly(content["values"], dict)
            self._columns = [_described(*entry) for entry in content["columns"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DamagedError("the header makes no sense") from error
        widths = [dtype.itemsize * count for dtype, count, _ in self._columns]
        self._offsets, expected = _layout(length, widths)
        if expected != size:
            raise DamagedError("the length is not that of the columns")

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, kind: type[Value]) -> Value:
        """The value of that name, which must be of this class. Raises DamagedError, also when there is none."""
        try:
            return cast("Value", _Unpacker(self._column).value(self._values[name], kind))
        except (ValueError, TypeError, KeyError, IndexError, RecursionError, MemoryError) as error:
            raise DamagedError(f"{name} is damaged") from error

    def _column(self, index: int) -> Column:
        dtype, count, expected = self._columns[index]
        column: Column = np.ndarray(count, dtype, self._map, self._offsets[index]) if count else np.empty(0, dtype)
        if digest(column) != expected:
            raise DamagedError("a column is damaged")
        return column


def digest(column: Column) -> int:
    """A checksum at the speed of memory: the sums of the columns of 8-byte words of its pages, and a CRC-32 of those.

    One wrong bit, a page of zeros and words that changed places are noticed, whatever their number is.
    """
    raw = column.view(np.uint8)
    pages = len(raw) // _DIGEST_ROW * _DIGEST_ROW
    sums = raw[:pages].view(np.uint64).reshape(-1, _DIGEST_ROW // 8).sum(axis=0, dtype=np.uint64)
    return zlib.crc32(raw[pages:].tobytes(), zlib.crc32(sums.tobytes()))


class _Packer:
    """Values -> what JSON can hold, guided by the hints of their classes; columns are put aside and numbered."""

    def __init__(self, columns: list[Column]) -> None:
        self._columns = columns

    def plain(self, value: Any, hint: Any) -> object:
        hint = _meant(hint)
        origin, arms = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return self._first_arm(value, arms)
        if origin is np.ndarray:
            return {_COLUMN: self._put(value, _dtype_of(hint))}
        if origin is tuple:
            return self._tuple(_exactly(value, tuple), arms)
        if _is_mapping(origin):
            if not isinstance(value, Mapping):
                raise UnfitError(f"{type(value).__name__}, expected a mapping")
            return [[self.plain(key, arms[0]), self.plain(item, arms[1])] for key, item in value.items()]
        if dataclasses.is_dataclass(hint):
            return {name: self.plain(getattr(value, name), of) for name, of in _fields_of(_exactly(value, hint))}
        return _exactly(value, hint)

    def _first_arm(self, value: Any, arms: tuple[Any, ...]) -> object:
        for arm in arms:
            with contextlib.suppress(UnfitError):
                return self.plain(value, arm)
        raise UnfitError(f"{type(value).__name__} is none of {arms}")

    def _tuple(self, value: tuple[Any, ...], arms: tuple[Any, ...]) -> object:
        if arms == (str, ...):
            written = "".join(_exactly(text, str) for text in value).encode("utf-8", "surrogatepass")
            lengths = np.fromiter(map(len, value), np.int64, len(value))
            return {_TEXTS: [self._put(lengths, lengths.dtype), self._put(np.frombuffer(written, np.uint8), None)]}
        return [self.plain(item, arm) for item, arm in _paired(value, arms)]

    def _put(self, column: Any, dtype: np.dtype[Any] | None) -> int:
        column = _exactly(column, np.ndarray)
        if column.ndim != 1 or column.dtype.name not in _DTYPES or dtype not in (None, column.dtype):
            raise UnfitError(f"a column of {column.dtype} in {column.ndim} dimensions, expected {dtype}")
        self._columns.append(np.ascontiguousarray(column))
        return len(self._columns) - 1


class _Unpacker:
    """The way back. Raises ValueError, TypeError, KeyError or IndexError for what does not fit."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def value(self, plain: Any, hint: Any) -> object:
        hint = _meant(hint)
        origin, arms = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return self._first_arm(plain, arms)
        if origin is np.ndarray:
            return self._checked(plain[_COLUMN], _dtype_of(hint))
        if origin is tuple:
            return self._tuple(plain, arms)
        if _is_mapping(origin):
            return {self.value(key, arms[0]): self.value(item, arms[1]) for key, item in _exactly(plain, list)}
        if dataclasses.is_dataclass(hint):
            fields = _fields_of(hint)
            if list(_exactly(plain, dict)) != [name for name, _ in fields]:
                raise UnfitError(f"not the fields of {hint}")
            return cast("type[Any]", hint)(**{name: self.value(plain[name], of) for name, of in fields})
        return _exactly(plain, hint)

    def _first_arm(self, plain: Any, arms: tuple[Any, ...]) -> object:
        if plain is None and type(None) in arms:
            return None
        for arm in arms:
            with contextlib.suppress(UnfitError, TypeError):
                return self.value(plain, arm)
        raise UnfitError("none of the hints fits")

    def _tuple(self, plain: Any, arms: tuple[Any, ...]) -> tuple[Any, ...]:
        if arms != (str, ...):
            return tuple(self.value(item, arm) for item, arm in _paired(_exactly(plain, list), arms))
        lengths, written = plain[_TEXTS]
        ends = np.cumsum(self._checked(lengths, np.dtype(np.int64)))
        text = self._checked(written, np.dtype(np.uint8)).tobytes().decode("utf-8", "surrogatepass")
        bounds = [0, *ends.tolist()]
        if bounds[-1] != len(text) or bounds != sorted(bounds):
            raise UnfitError("lengths that are not those of the texts")
        return tuple(text[start:end] for start, end in itertools.pairwise(bounds))

    def _checked(self, index: Any, dtype: np.dtype[Any]) -> Column:
        if _exactly(index, int) < 0:
            raise UnfitError("a column before the first")
        column: Column = self._column(index)
        if column.dtype != dtype:
            raise UnfitError(f"a column of {column.dtype}, expected {dtype}")
        return column


def _layout(header_bytes: int, widths: list[int]) -> tuple[list[int], int]:
    """Where each column begins, and the length of the file."""
    offsets, position = [], _PREFIX.size + header_bytes
    for width in widths:
        offsets.append(position + -position % _ALIGNMENT)
        position = offsets[-1] + width
    return offsets, position + -position % _ALIGNMENT


def _described(dtype: Any, count: Any, expected: Any) -> tuple[np.dtype[Any], int, int]:
    if dtype not in _DTYPES or _exactly(count, int) < 0:
        raise UnfitError("no such column")
    return np.dtype(dtype), count, _exactly(expected, int)


def _meant(hint: Any) -> Any:
    """What an alias stands for: numpy's NDArray is one of its own kind from 2.5 on (PEP 695)."""
    value = getattr(get_origin(hint), "__value__", None)
    return hint if value is None else value[get_args(hint)]


def _exactly(value: Any, kind: Any) -> Any:
    """The value, if it is of this class and of no other: a bool is no int, an int no float."""
    if type(value) is not kind:
        raise UnfitError(f"{type(value).__name__}, expected {kind}")
    return value


def _paired(items: Any, arms: tuple[Any, ...]) -> Any:
    """Each item of a tuple with its hint."""
    if arms[-1:] == (...,):
        return zip(items, itertools.repeat(arms[0]), strict=False)
    if len(items) != len(arms):
        raise UnfitError(f"{len(items)} items, expected {len(arms)}")
    return zip(items, arms, strict=True)


def _fields_of(kind: Any) -> list[tuple[str, Any]]:
    """Names and hints of a dataclass or of an instance of one."""
    hints = get_type_hints(kind if isinstance(kind, type) else type(kind))
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _dtype_of(hint: Any) -> np.dtype[Any]:
    """The dtype in `NDArray[...]`."""
    dtype: np.dtype[Any] = np.dtype(get_args(get_args(hint)[1])[0])
    return dtype
