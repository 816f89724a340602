"""Makes prose.txt: the first chapters of Jane Austen's Persuasion, from the Debian package r-cran-janeaustenr 1.0.0-1.

Unpack the package (apt-get download r-cran-janeaustenr; dpkg-deb -x r-cran-janeaustenr_1.0.0-1_all.deb DIR), then run
python benchmarks/prose.py DIR. With --novel EMMA --out emma.txt it writes the whole of another novel, to train on.
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


def paragraphs(lines: list[str]) -> list[str]:
    """One string a paragraph."""
    found = re.split(r"\n\s*\n", "\n".join(lines))
    return [" ".join(paragraph.split()) for paragraph in found if paragraph.strip()]


def prose(found: list[str], chapters: int) -> list[str]:
    """From the first chapter to the end of `chapters`."""
    return found[found.index("Chapter 1") : found.index(f"Chapter {chapters + 1}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, metavar="DIR", help="the unpacked Debian package")
    parser.add_argument("--novel", metavar="TITLE", help="the whole of this one, named by its first line")
    parser.add_argument("--out", type=Path, default=HERE / "prose.txt")
    arguments = parser.parse_args()
    title = arguments.novel or TITLE
    novels = {lines[0]: lines for lines in map(strings, objects((arguments.package / DATABASE).read_bytes()))}
    if title not in novels:
        parser.error(f"no novel {title!r} in this package; it has {', '.join(novels)}")
    found = paragraphs(novels[title])
    arguments.out.write_text("\n\n".join(found if arguments.novel else prose(found, CHAPTERS)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
