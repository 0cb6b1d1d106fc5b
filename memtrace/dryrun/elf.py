"""Reads ELF files: names that a library imports or an object file defines, and the room it takes when loaded."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SYMBOLS = 2  # section types
_DYNAMIC_SYMBOLS = 11
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_LOADED = 1  # a program header's type
_PAGE = 4096
_WANTED = b"\x7fELF\x02\x01"  # 64 bits, little-endian


@dataclass(frozen=True)
class Names:
    """The names of one file: those it wants from elsewhere, and those it defines for others."""

    imported: frozenset[str]
    defined: frozenset[str]


def span(path: Path) -> int:
    """Bytes of address space that a library takes: from the first page that is loaded to the last.

    ValueError: not such a file, or damaged.
    """
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                offset, size, count = (_header(data)[index] for index in (5, 9, 10))
                programs = [_PROGRAM.unpack_from(data, offset + size * index) for index in range(count)]
        except struct.error as error:
            raise ValueError(f"{path}: damaged") from error
    loaded = [(program[3], program[3] + program[6]) for program in programs if program[0] == _LOADED]
    if not loaded:
        raise ValueError(f"{path}: nothing of it is loaded")
    first = min(begin for begin, _ in loaded)
    last: int = max(end for _, end in loaded)
    return int(-(-last // _PAGE) - first // _PAGE) * _PAGE


def names(path: Path) -> Names:
    """The dynamic symbols of a library, or the global ones of an object file.

    Reads only the tables: libtorch_cuda.so has more than a gigabyte. ValueError: not such a file, or damaged.
    """
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _names(data)
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: damaged") from error


def _header(data: mmap.mmap) -> tuple[Any, ...]:
    if data[:6] != _WANTED:
        raise ValueError("not a 64-bit little-endian ELF file")
    return _HEADER.unpack_from(data, 0)


def _names(data: mmap.mmap) -> Names:
    header = _header(data)
    offset, size, count = header[6], header[11], header[12]
    sections = [_SECTION.unpack_from(data, offset + size * index) for index in range(count)]
    tables = [section for section in sections if section[1] == _DYNAMIC_SYMBOLS]
    tables = tables or [section for section in sections if section[1] == _SYMBOLS]
    imported: set[str] = set()
    defined: set[str] = set()
    for table in tables:
        texts = sections[table[6]]
        text = data[texts[4] : texts[4] + texts[5]]
        for name, info, _, section, _, _ in _SYMBOL.iter_unpack(data[table[4] : table[4] + table[5]]):
            if name and info >> 4:  # local symbols are 0
                word = text[name : text.index(b"\0", name)].decode()
                (defined if section else imported).add(word)
    return Names(frozenset(imported), frozenset(defined))
