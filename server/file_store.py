"""A directory of records (JSON) and contents (bytes): uploaded files, and batches with what they have put out.

A record is replaced as a whole, so a crash leaves the old one or the new one. Ids are made here and checked when
they come back: none names a path of its own. Each record is seen by the API key that made it alone.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import NotFound

_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")


class Records:
    """Records of one kind, in one directory: `<id>.json`, and `<id>.data` where there is content."""

    def __init__(self, directory: Path, prefix: str, what: str) -> None:
        self._directory = directory
        self._prefix = prefix
        self._what = what
        self._directory.mkdir(parents=True, exist_ok=True)

    def new_id(self) -> str:
        return self._prefix + secrets.token_hex(12)

    def put(self, record: dict[str, Any], key: str) -> None:
        """Write or replace. `key` is the label of the API key that may see it."""
        path = self._path(record["id"], ".json")
        temporary = path.with_suffix(".new")
        with temporary.open("wb") as out:
            out.write(msgspec.json.encode({"key": key, "record": record}))
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)

    def get(self, id: str, key: str, param: str | None = None) -> dict[str, Any]:
        """Raises NotFound."""
        found = self._read(id)
        if found is None or found["key"] != key:
            raise NotFound(f"there is no {self._what} {id[:80]!r}", param=param)
        record: dict[str, Any] = found["record"]
        return record

    def all(self, key: str) -> list[dict[str, Any]]:
        """Oldest first."""
        return [record for owner, record in self.everyones() if owner == key]

    def everyones(self) -> list[tuple[str, dict[str, Any]]]:
        """(label of the key, record), oldest first."""
        found = [self._read(path.stem) for path in self._directory.glob("*.json")]
        records = [(str(f["key"]), f["record"]) for f in found if f is not None]
        return sorted(records, key=lambda pair: (pair[1]["created_at"], pair[1]["id"]))

    def delete(self, id: str, key: str) -> None:
        self.get(id, key)
        for suffix in (".json", ".data"):
            self._path(id, suffix).unlink(missing_ok=True)

    def content(self, id: str) -> Path:
        """Where the bytes are; they may be written before there is a record."""
        return self._path(id, ".data")

    def _path(self, id: str, suffix: str) -> Path:
        if not _ID.fullmatch(id) or not id.startswith(self._prefix):
            raise NotFound(f"there is no {self._what} {id[:80]!r}")
        return self._directory / (id + suffix)

    def _read(self, id: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = msgspec.json.decode(self._path(id, ".json").read_bytes())
        except (NotFound, FileNotFoundError, msgspec.DecodeError):
            return None
        return found


class FileStore:
    """The data directory: `files` and `batches`."""

    def __init__(self, directory: str) -> None:
        self.files = Records(Path(directory) / "files", "file-", "file")
        self.batches = Records(Path(directory) / "batches", "batch_", "batch")

    def add_file(self, id: str, filename: str, purpose: str, key: str) -> dict[str, Any]:
        """The record of a file whose content has been written."""
        record = {
            "id": id,
            "object": "file",
            "bytes": self.files.content(id).stat().st_size,
            "created_at": int(time.time()),
            "expires_at": None,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        self.files.put(record, key)
        return record
