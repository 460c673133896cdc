"""The write-ahead log of one server: a file a session, so that a restarted process has every session that it had answered for.

Each record is its length, a checksum and msgpack. A record that the end of the process cut short belongs to a turn that nobody
was told of, and is left out; a damaged one in the middle loses the whole session, and says so.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

logger = logging.getLogger(__name__)
_HEAD = struct.Struct("<IQ")


class DamagedLog(ValueError):
    """A log that does not say what the session was."""


class SessionLog:
    """Appends to, reads and removes the logs of a folder. With no folder it does nothing."""

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._open: dict[str, Any] = {}
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def append(self, session_id: str, record: dict[str, Any]) -> None:
        """Returns when the kernel has the record: it survives the process, not the machine."""
        if self.folder is None:
            return
        file = self._open.get(session_id)
        if file is None:
            file = self._open[session_id] = open(self.folder / f"{session_id}.log", "ab", buffering=0)  # noqa: SIM115
            if len(self._open) > 512:
                self._open.pop(next(iter(self._open))).close()
        body = msgspec.msgpack.encode(record)
        file.write(_HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body)

    def remove(self, session_id: str) -> None:
        if self.folder is None:
            return
        file = self._open.pop(session_id, None)
        if file is not None:
            file.close()
        (self.folder / f"{session_id}.log").unlink(missing_ok=True)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def sessions(self) -> Iterator[tuple[str, list[dict[str, Any]] | None]]:
        """Every session with its records; None where they cannot be trusted. Cuts off what was not written whole."""
        for path in sorted(self.folder.glob("*.log")) if self.folder is not None else ():
            try:
                yield path.stem, self._read(path)
            except DamagedLog as error:
                logger.error("session %s is lost: %s", path.stem, error)
                yield path.stem, None

    def _read(self, path: Path) -> list[dict[str, Any]]:
        data, at, records = path.read_bytes(), 0, []
        while at < len(data):
            if at + _HEAD.size > len(data):
                break
            length, digest = _HEAD.unpack_from(data, at)
            body = data[at + _HEAD.size : at + _HEAD.size + length]
            if len(body) < length:
                break
            if xxhash.xxh3_64_intdigest(body) != digest:
                raise DamagedLog(f"{path}: the record at byte {at} does not have its checksum")
            records.append(msgspec.msgpack.decode(body))
            at += _HEAD.size + length
        if at < len(data):
            with open(path, "r+b") as file:
                file.truncate(at)
        if not records:
            raise DamagedLog(f"{path}: no whole record")
        return records
