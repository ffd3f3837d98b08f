"""Files are written whole or not at all, and refused before any work."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

import pipelab
from pipelab import files
from pipelab.errors import FormatError

TRACE = pipelab.simulate(pipelab.OneFOneB(2, 2))
SUFFIXES = ["json", "html", "svg", "png", "pdf", "txt", "csv", "dot"]


def saved(path: Path) -> Path:
    """Save something in the format of the suffix."""
    if path.suffix == ".csv":
        return TRACE.plan.to_csv(path)
    return TRACE.plan.save_graph(path) if path.suffix == ".dot" else TRACE.save(path)


class Full:
    """A file on a disk that is full after half of the data."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def write(self, data):
        self.file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, suffix):
    path = tmp_path / f"old.{suffix}"
    path.write_text("old")

    really_open = Path.open

    def opened(self, mode="r", *more, **named):
        file = really_open(self, mode, *more, **named)
        return file if mode.startswith("r") else Full(file)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(OSError, match=r"No space left") as caught:
        saved(path)
    assert caught.value.filename == str(path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "old"


def test_a_new_file_has_usual_permissions_and_an_old_one_keeps_its_own(tmp_path):
    new, old = tmp_path / "new.txt", tmp_path / "old.txt"
    old.write_text("old")
    old.chmod(0o640)
    umask = os.umask(0o027)
    try:
        saved(new), saved(old)
    finally:
        os.umask(umask)
    assert (new.stat().st_mode & 0o777, old.stat().st_mode & 0o777) == (0o640, 0o640)
    assert "1F1B" in old.read_text(encoding="utf-8")


def test_a_link_stays_a_link_and_its_target_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    target, link, dangling, hard = (tmp_path / name for name in ("there/t.txt", "l.txt", "d.txt", "h.txt"))
    target.write_text("old")
    link.symlink_to(target)
    hard.hardlink_to(target)
    dangling.symlink_to(tmp_path / "there" / "new.txt")
    assert saved(link) == link
    saved(dangling)
    assert link.is_symlink()
    assert dangling.is_symlink()
    assert "1F1B" in target.read_text(encoding="utf-8") == hard.read_text(encoding="utf-8")
    assert (tmp_path / "there" / "new.txt").is_file()


def test_devices_and_pipes_are_written_directly(tmp_path):
    assert TRACE.plan.to_csv("/dev/null") == Path("/dev/null")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(OSError, match="/dev/full"):
        TRACE.plan.to_csv("/dev/full")
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    TRACE.plan.to_csv(pipe)
    reader.join(30)
    assert read[0].startswith("0F0,")
    assert pipe.is_fifo()


def test_an_existing_file_is_written_where_no_other_may_be_made(tmp_path, monkeypatch):
    path = tmp_path / "old.txt"
    path.write_text("old")
    monkeypatch.setattr(os, "access", lambda path, _: not Path(path).is_dir())
    saved(path)
    assert "1F1B" in path.read_text(encoding="utf-8")
    with pytest.raises(PermissionError):
        saved(tmp_path / "new.txt")


@pytest.mark.parametrize(
    ("name", "error"),
    [("no/x.txt", FileNotFoundError), ("file/x.txt", NotADirectoryError), ("d.txt", IsADirectoryError)],
)
def test_a_place_where_nothing_can_be_written_is_refused(tmp_path, name, error):
    (tmp_path / "file").write_text("")
    (tmp_path / "d.txt").mkdir()
    with pytest.raises(error, match=name):
        files.require_writable(tmp_path / name)
    with pytest.raises(error, match=name):
        saved(tmp_path / name)


@pytest.mark.parametrize("toml", [False, True], ids=["JSON", "TOML"])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "expected names|is not TOML"),
        ("3", "expected names|is not TOML"),
        ("[" * 100_000, "nested too deeply|more than 8,192 bytes"),
        ("x = " + "[" * 4000, "nested too deeply|is not JSON"),
        ("x = " + "{x = " * 1500, "nested too deeply|is not JSON"),
        ('{"x":' * 100_000, "nested too deeply|more than 8,192 bytes"),
        ('{"x": ' + "9" * 5000 + "}", "is not (JSON|TOML)"),
        (".".join("x" * 200_000) + " = 1", "more than 8,192 bytes|is not JSON"),
        ("\xff", "is not (JSON|TOML)"),
    ],
    ids=range(9),
)
def test_what_holds_no_data_with_names_is_refused(tmp_path, text, told, toml):
    path = tmp_path / "data"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=told):
        files.read_data(path, "an example", toml)


def test_a_file_larger_than_the_limit_is_not_read(tmp_path):
    path = tmp_path / "large"
    path.write_text("12345")
    assert files.read_text(path, 5) == "12345"
    for large, limit, told in ((path, 4, "more than 4 bytes"), ("/dev/zero", 1000, "more than 1,000 bytes")):
        with pytest.raises(FormatError, match=told):
            files.read_text(large, limit)
