"""Makes prose.txt: the first chapters of Jane Austen's Persuasion, from the Debian package r-cran-janeaustenr 1.0.0-1.

Unpack the package (apt-get download r-cran-janeaustenr; dpkg-deb -x r-cran-janeaustenr_1.0.0-1_all.deb DIR), then run
python benchmarks/prose.py DIR.
"""

from __future__ import annotations

import argparse
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

DATABASE = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
TITLE = "Persuasion"
CHAPTERS = 7
HERE = Path(__file__).resolve().parent


def objects(database: bytes) -> Iterator[bytes]:
    """The serialized objects of an R lazy-load database: each is 4 bytes of length, then a zlib stream."""
    at = 0
    while at < len(database):
        stream = zlib.decompressobj()
        yield stream.decompress(database[at + 4 :])
        at = len(database) - len(stream.unused_data)


def strings(serialized: bytes) -> list[str]:
    """The elements of one R character vector (serialization version 3, big-endian)."""
    header, encoding_length = struct.unpack_from(">2s12xI", serialized)
    at = 18 + encoding_length
    kind, count = struct.unpack_from(">II", serialized, at)
    if header != b"X\n" or kind & 0xFF != 16:
        raise ValueError(f"not a character vector: format {header!r}, kind {kind & 0xFF}")
    at, found = at + 8, []
    for _ in range(count):
        (length,) = struct.unpack_from(">4xi", serialized, at)
        found.append(serialized[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return found


def prose(lines: list[str], chapters: int) -> str:
    """One line a paragraph, an empty line between two, from the first chapter to the end of `chapters`."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    paragraphs = [" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip()]
    first = paragraphs.index("Chapter 1")
    end = paragraphs.index(f"Chapter {chapters + 1}")
    return "\n\n".join(paragraphs[first:end]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, metavar="DIR", help="the unpacked Debian package")
    parser.add_argument("--out", type=Path, default=HERE / "prose.txt")
    arguments = parser.parse_args()
    novels = map(strings, objects((arguments.package / DATABASE).read_bytes()))
    novel = next(lines for lines in novels if lines[0] == TITLE)
    arguments.out.write_text(prose(novel, CHAPTERS), encoding="utf-8")


if __name__ == "__main__":
    main()
