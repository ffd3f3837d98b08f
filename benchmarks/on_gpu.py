"""All that needs a GPU, in one go of ten minutes at most: `python benchmarks/on_gpu.py --out folder`.

Runs the tests marked gpu and the GPU's benchmark, each test file and each part in a process of its own: whatever fails,
hangs or ends its process costs the others nothing. Nothing is installed, and no setting of the card is changed.

The folder then holds few files, each whole as soon as it is written: `summary.txt` (read this first), `tests.txt`,
`log.txt` (all that was said), `clocks.txt` (clocks and power, second by second), `gpu.json` and `gpu.md` (the figures),
and `everything.tar.gz` (all of it, with the pictures).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import gpu
from gpu_parts import PARTS
from gpu_promises import promises

TESTS = {
    "tests/engine/device/test_gpu_parts.py": 60.0,
    "tests/engine/test_gpu.py": 110.0,
    "tests/engine/model/test_traced.py": 40.0,
    "tests/engine/torchrun/test_process_gpu.py": 60.0,
}
"""Where tests are marked gpu, and how many seconds each file may take: half of the time is the benchmark's."""

_PART_SECONDS = 100.0
_ASIDE_SECONDS = 10.0
"""What is left for the end: to pack everything."""


def main(arguments: list[str]) -> int:
    """Run all of it; return how many test files and parts failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is found")
    parser.add_argument("--seconds", type=float, default=570.0, help="how long it may take at most")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only to see that everything runs")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    return Gathering(options).run()


class Gathering:
    """One go: what runs, until when, and where it is written."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Begin the log."""
        self.options = options
        self.out: Path = options.out.resolve()
        self.until = time.monotonic() + options.seconds - _ASIDE_SECONDS
        self.log = (self.out / "log.txt").open("w")
        self.lines: list[str] = []
        self.failed = 0

    def left(self) -> float:
        """Return how many seconds are left."""
        return self.until - time.monotonic()

    def run(self) -> int:
        """Do everything; return how much failed."""
        began = time.monotonic()
        (self.out / "tests.txt").unlink(missing_ok=True)
        clocks = self._clocks()
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            try:
                self._about()
                for name, seconds in TESTS.items():
                    self._tests(name, seconds)
                self._benchmark(work)
            except Exception as error:  # noqa: BLE001 - what was found until here must come home
                self._say(f"stopped by {type(error).__name__}: {error}")
                self.failed += 1
            finally:
                _end(clocks)
                self._say(f"\n{self.failed} failed, after {time.monotonic() - began:.0f} s; written to {self.out}")
                self.log.close()
                self._pack(work)
        return self.failed

    def _say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)
        (self.out / "summary.txt").write_text("\n".join(self.lines) + "\n")

    def _about(self) -> None:
        """Note what is installed."""
        told = "import platform, torch; print('python', platform.python_version(), 'torch', torch.__version__)"
        for command in (["nvidia-smi"], [sys.executable, "-c", told], [sys.executable, "-m", "pip", "list"]):
            if shutil.which(command[0]):
                gpu.run_for(command, min(60.0, self.left()), self.log)

    def _tests(self, name: str, seconds: float) -> None:
        """Run the GPU's tests of one file."""
        plugins = ["-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin"]  # what else is installed stays out
        limits = ["--timeout=40", "-o", "faulthandler_timeout=30"]  # the latter tells where something hangs
        # PyTorch comes before pytest makes errors of warnings: what it says of the machine is none of ours.
        started = [sys.executable, "-c", "import torch, pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"]
        asked = [*started, *plugins, *limits, "-m", "gpu", "-q", "-ra", "--durations=5", name]
        path = self.out / "tests.txt"
        with path.open("a") as file:
            file.write(f"\n=== {name}\n")
            file.flush()
            start = path.stat().st_size
            error = gpu.run_for(asked, min(seconds, self.left()), file)
        said = path.read_bytes()[start:].decode(errors="replace")
        counted = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|deselected|error).*)$", said, re.MULTILINE)
        self._say(f"{name}: {'; '.join([*counted[-1:], *filter(None, [error])])}")
        for line in re.findall(r"^(?:FAILED|ERROR|SKIPPED) .*$", said, re.MULTILINE):
            self._say(f"  {line[:300]}")
        self.failed += error is not None

    def _benchmark(self, work: Path) -> None:
        """Measure every part; keep what was found after each."""
        seconds = lambda: min(_PART_SECONDS, self.left())  # noqa: E731 - it is asked before every part
        for name, found in zip(PARTS, gpu.apart(list(PARTS), self.options, work, seconds, self.log), strict=True):
            for kept in ("gpu.json", "gpu.md"):
                shutil.copy(work / kept, self.out / kept)
            result = found["parts"][name]
            self._say(f"{name}: {result.get('error', 'measured')}, {result['seconds']:.0f} s")
            self.failed += "error" in result
        self._say(f"ranks on {', '.join(found['about']['ranks'])}")
        for told in found["about"]["told"]:
            for line in told.splitlines()[1:]:  # why the GPU is not cut
                self._say(line)
        for each in promises(found["parts"]):
            self._say(f"  {_WORDS[each.kept]:8} {each.text}: {each.found}")

    def _clocks(self) -> subprocess.Popen[bytes] | None:
        """Begin to note the card's clocks and power."""
        if shutil.which("nvidia-smi") is None:
            return None
        with (self.out / "clocks.txt").open("w") as file:
            asked = ["nvidia-smi", "dmon", "-s", "puc", "-d", "1", "-o", "T"]
            return subprocess.Popen(asked, stdout=file, stderr=subprocess.STDOUT)

    def _pack(self, work: Path) -> None:
        """Put everything into one file, the pictures too."""
        packed = work / "everything.tar.gz"
        with tarfile.open(packed, "w:gz") as file:
            for path in sorted([*self.out.glob("*.txt"), *self.out.glob("gpu.*"), *work.glob("*.svg")]):
                file.add(path, path.name)
        shutil.copy(packed, self.out)


_WORDS = {True: "kept", False: "NOT KEPT", None: "unknown"}


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
