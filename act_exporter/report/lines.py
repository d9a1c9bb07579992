"""The lines of a journal file, plain or compressed, whole or torn."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

# Large enough that cutting it into lines costs nothing, small enough for a hundred readers.
_CHUNK_BYTES = 1 << 20

_ZLIB_GZIP = 31  # a gzip header, and the largest window


def lines_of(file: Path, on_damage: Callable[[], None]) -> Iterator[list[bytes]]:
    """The lines of a journal, many at a time; the last one may be torn.

    Args:
        file: its name without `.gz`; it may be compressed at any moment.
        on_damage: called where the rest of the file cannot be unpacked.

    Raises:
        FileNotFoundError: it is not there.
    """
    rest = b""
    for chunk in _chunks(file, on_damage):
        *lines, rest = (rest + chunk).split(b"\n")
        yield lines
    if rest:
        yield [rest]


def _chunks(file: Path, on_damage: Callable[[], None]) -> Iterator[bytes]:
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk
            return
    except FileNotFoundError:
        pass
    unpacking = zlib.decompressobj(_ZLIB_GZIP)
    with Path(f"{file}.gz").open("rb") as stream:
        try:
            while chunk := stream.read(_CHUNK_BYTES):
                yield unpacking.decompress(chunk)
        except zlib.error:
            pass  # the rest of a damaged file
    if not unpacking.eof:
        on_damage()
