"""Files: refused before any work if they cannot be written, written whole or not at all, and read within bounds."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import secrets
import shutil
import tomllib
import zlib
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from pipelab.errors import FormatError, UsageError

_GZIP = b"\x1f\x8b"
"""How gzip files begin, and no text in UTF-8 does."""

_MOST_BYTES = 1 << 30
"""The trace of the largest plan has about half as many."""

_MOST_TOML = 1 << 13
"""What `tomllib` takes for a dotted key grows with the square of its length."""


def teacher(name: str) -> Path:
    """Return a file of the folder `teacher`: solutions, keys, answers. Students' copies lack it.

    It is beside the package in the repository and in the copy for teachers, and inside it in a teacher's wheel.
    """
    package = Path(__file__).parent
    for place in (package / "teacher" / name, package.parent / "teacher" / name):
        if place.exists():
            return place
    raise UsageError("students' copies have no answers\n  try, as a teacher, in the repository: make teacher")


def read_text(path: str | os.PathLike[str], most_bytes: int = _MOST_BYTES) -> str:
    """Return the text of a file in UTF-8, whatever the locale; unpacked, if it is a gzip file."""
    with Path(path).open("rb") as file:
        return text_of(file, path, most_bytes)


def text_of(file: BinaryIO, path: str | os.PathLike[str], most_bytes: int = _MOST_BYTES) -> str:
    """Return the text of an open file, unpacked if it is a gzip file; messages call it `path`.

    It raises what `read_text` raises.
    """
    data, unpacked = _read(file, most_bytes), ""
    if data.startswith(_GZIP):
        most_bytes = min(most_bytes, (1 << 20) + 100 * len(data))  # traces unpack to 5 to 20 times their size
        unpacked = f" unpacked from {len(data):,}"
        try:
            with gzip.open(io.BytesIO(data)) as packed:
                data = _read(packed, most_bytes)
        except (EOFError, OSError, zlib.error) as error:
            raise FormatError(f"{path} is a gzip file, and broken: {error}") from error
    if len(data) > most_bytes:
        raise FormatError(
            f"{path} has more than {most_bytes:,} bytes{unpacked}, which pipelab does not read: is it the right file?"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}): save it as text in UTF-8"
        ) from error


def _read(file: BinaryIO | gzip.GzipFile, most_bytes: int) -> bytes:
    """Return what a file holds, or more than `most_bytes` of it: `file.read(most_bytes)` would take so much at once."""
    return b"".join(islice(iter(partial(file.read, 1 << 20), b""), (most_bytes >> 20) + 1))


def read_data(path: str | os.PathLike[str], what: str, toml: bool = False) -> dict[str, Any]:
    """Return the data of a JSON file, packed with gzip or not, or of a TOML file, which is to be `what`."""
    text = read_text(path, _MOST_TOML if toml else _MOST_BYTES)
    try:
        found = tomllib.loads(text) if toml else json.loads(text)
    except RecursionError:
        raise FormatError(f"{path} is not {what}: its lists are nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{path} is not {what}: it is not {'TOML' if toml else 'JSON'}: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{path} is not {what}: expected names, as in {{'name': 1}}")
    return found


def require_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a file that cannot be written; call this before the work whose result it shall hold."""
    path = Path(path)
    folder = path.parent
    number, why = 0, ""
    if path.is_dir():
        number, why = errno.EISDIR, "it is a folder: name a file in it"
    elif not folder.exists():
        number, why = errno.ENOENT, f"there is no folder {folder}"
    elif not folder.is_dir():
        number, why = errno.ENOTDIR, f"{folder} is a file, not a folder"
    elif not os.access(path if path.exists() else _target(path).parent, os.W_OK):
        number, why = errno.EACCES, "you may not write there: name a file in your own folder"
    if why:
        raise OSError(number, why, str(path))


def write(path: str | os.PathLike[str], data: str | bytes) -> Path:
    """Write a whole file, text as UTF-8; return the path. If that fails, the old file stays as it was.

    The data go to a new file beside, which then replaces the old one and has its permissions. If the path is a link,
    the file that it points to is replaced. Devices and pipes, such as `/dev/stdout`, are written directly, and so is a
    file in a folder where the user may not make others.
    """
    path = Path(path)
    # A name from a file may hold what UTF-8 lacks: half of a surrogate pair.
    data = data if isinstance(data, bytes) else data.encode("utf-8", "backslashreplace")
    require_writable(path)
    target = _target(path)
    beside = target.with_name(f".pipelab-{secrets.token_hex(8)}")
    try:
        if not _is_direct(path, target):
            try:
                with beside.open("xb") as file:
                    file.write(data)
                if target.exists():
                    shutil.copymode(target, beside)
                with suppress(PermissionError):  # another user's file in /tmp
                    beside.replace(target)
                    return path
            finally:
                beside.unlink(missing_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # the user knows this path only
    return path


def _target(path: Path) -> Path:
    """Return the file that a path means: of a link, the one that it points to."""
    return Path(os.path.realpath(path))


def _is_direct(path: Path, target: Path) -> bool:
    """Return whether a path is written directly: nothing can take the place of what it names."""
    if path.absolute().parts[1:2] in (("dev",), ("proc",)):
        return True
    replaceable = path.is_file() and os.access(target.parent, os.W_OK)
    return path.exists() and (not replaceable or target.is_mount() or target.stat().st_nlink > 1)
