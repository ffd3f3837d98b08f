"""What all tests share: Hypothesis draws the same examples on every run, unless asked for more.

HYPOTHESIS_PROFILE=thorough python -m pytest tests        many more examples, new ones each time
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from browsing import CHROMIUM, FLAGS
from hypothesis import HealthCheck, settings

from pipelab.cli import app

collect_ignore = ["scripts", "fuzz"]  # other processes run the first, test_fuzz.py the second
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
for name in ("COLUMNS", "PYTHONUNBUFFERED"):  # whoever runs the tests may have them; most machines do not
    os.environ.pop(name, None)
# PyTorch asks for the name of every address that it connects to: a name server that does not answer would cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

settings.register_profile(
    "ci", max_examples=100, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a parameter that is a long text by its beginning."""
    return f"{' '.join(val.split())[:30]}..." if isinstance(val, str) and len(val) > 40 else None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def pipelab_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command in this process; return its exit code, output and error output."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipelab", *arguments])
        code = 0
        try:
            app.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            targets_loaded = [name for name in sys.modules if name in {"mine", "broken"}]
            for name in targets_loaded:
                del sys.modules[name]
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()
