# SPDX-License-Identifier: Apache-2.0
"""Where the sections of a .lode file lie, read by docs/file-format.md alone."""

import dataclasses
import json
import struct


@dataclasses.dataclass
class Section:
    name: str
    offset: int
    size: int


def table_offset(data: bytes) -> int:
    return struct.unpack_from("<Q", data, 24)[0]


def sections(data: bytes) -> list[Section]:
    offset, size = struct.unpack_from("<QQ", data, 24)
    return [Section(s["name"], s["offset"], s["bytes"]) for s in json.loads(data[offset : offset + size])]
