"""What all tests share. Hypothesis draws the same examples on every run; `tiers.py` says how many."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from browsing import CHROMIUM, FLAGS
from hypothesis import HealthCheck, settings
from tiers import EXAMPLES, TIER, runs

from pipelab.cli import app

TEACHER = Path(__file__).resolve().parents[1] / "teacher"

collect_ignore = ["scripts", "fuzz"]  # other processes run the first, test_fuzz.py the second
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
for name in ("COLUMNS", "PYTHONUNBUFFERED"):  # whoever runs the tests may have them; most machines do not
    os.environ.pop(name, None)
# PyTorch asks for the name of every address that it connects to: a name server that does not answer would cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

settings.register_profile(
    TIER,
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(TIER)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a parameter that is a long text by its beginning."""
    return f"{' '.join(val.split())[:30]}..." if isinstance(val, str) and len(val) > 40 else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what opens a browser, and by its folder what touches PyTorch; leave out what this tier does not run.

    The labs do not count as touching PyTorch: they start many processes, or wait for emulated devices, and run on the
    engine.
    """
    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = filter(runs, items)
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
        if {"engine", "conformance"}.intersection(item.path.relative_to(config.rootpath).parts):
            item.add_marker("torch")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_sandbox() -> bool:
    from pipelab_course.grading.runner import sandbox

    return bool(sandbox())


NEEDS = {
    "bwrap": (_has_sandbox, "bubblewrap that may start: sudo apt install bubblewrap"),
    "browser": (lambda: CHROMIUM, "Chromium: sudo apt install chromium"),
    "dot": (lambda: shutil.which("dot"), "Graphviz: sudo apt install graphviz"),
    "gpu": (_has_gpu, "a GPU that PyTorch can use"),
    "npm": (lambda: shutil.which("npm"), "npm: sudo apt install npm"),
    "teacher": (TEACHER.is_dir, "the folder teacher, which students' copies lack"),
}
"""By mark, whether the machine has what the test needs, and what brings it."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs what the machine lacks."""
    for mark, (is_there, need) in NEEDS.items():
        if item.get_closest_marker(mark) and not is_there():
            pytest.skip(f"needs {need}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say for each need, in one line, how many tests were skipped.

    `make test` runs pytest several times. It names a file in NOT_RUN that collects what they all skipped: each run says
    the sum so far, and `.ci/run` reads from the file what to run again.
    """
    if hasattr(terminalreporter.config, "workerinput"):
        return  # one of xdist's workers, whose reports the main process has too
    skipped = [f"{report.nodeid}\t{report.longrepr[2]}" for report in terminalreporter.getreports("skipped")]
    if "NOT_RUN" in os.environ:
        with Path(os.environ["NOT_RUN"]).open("a+") as file:
            file.writelines(f"{line}\n" for line in skipped)
            file.seek(0)
            skipped = file.read().splitlines()
    for reason, count in Counter(line.partition("\t")[2] for line in skipped).most_common():
        terminalreporter.write_line(f"not run: {count} test{'s' * (count > 1)} ({reason.removeprefix('Skipped: ')})")


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


@pytest.fixture
def succeeds(pipelab_command):
    """Run the command, which ends with 0; return its output."""

    def run(*arguments: str) -> str:
        code, output, error = pipelab_command(*arguments)
        assert code == 0, error
        return output

    return run


@pytest.fixture
def refused(pipelab_command):
    """Run the command, which ends with 1 and no traceback; return its error output."""

    def run(*arguments: str) -> str:
        code, _, error = pipelab_command(*arguments)
        assert code == 1
        assert "Traceback" not in error
        return error

    return run


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()
