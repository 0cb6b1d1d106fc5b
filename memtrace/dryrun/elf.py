"""Reads the names in an ELF file's symbol tables: what a library imports, what an object file defines."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

_SYMBOLS = 2  # section types
_DYNAMIC_SYMBOLS = 11
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_WANTED = b"\x7fELF\x02\x01"  # 64 bits, little-endian


@dataclass(frozen=True)
class Names:
    """The names of one file: those it wants from elsewhere, and those it defines for others."""

    imported: frozenset[str]
    defined: frozenset[str]


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


def _names(data: mmap.mmap) -> Names:
    if data[:6] != _WANTED:
        raise ValueError("not a 64-bit little-endian ELF file")
    header = _HEADER.unpack_from(data, 0)
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
