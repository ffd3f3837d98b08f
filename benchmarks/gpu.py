"""Measure pipelines on a GPU: `python benchmarks/gpu.py`, some minutes; `--device cpu --quick` only sees that it runs.

Whatever fails is noted, and the rest is measured all the same: with `--apart` even what ends or hangs the process, as
each part then has one of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch
from gpu_parts import PARTS
from gpu_report import report
from gpu_setting import Setting

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"

_CONNECTIONS = "32"
"""The driver's hardware queues: with its usual eight, one rank's stream may have to wait in line with another's."""


def main(arguments: list[str]) -> int:
    """Measure, write what was found after every part, and return how many parts failed."""
    options = _options(arguments)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _CONNECTIONS)  # before the driver is asked for anything
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU: torch.cuda.is_available() is False; to see that everything runs: --device cpu --quick")
    out = _folder(options)
    names = options.parts or list(PARTS)
    if options.apart:
        *_, found = apart(names, options, out)
    else:
        found = together(names, options, out)
    print(report(found), flush=True)
    print(f"\nwritten to {out}")
    return sum("error" in result for result in found["parts"].values())


def together(names: list[str], options: argparse.Namespace, out: Path) -> dict[str, object]:
    """Measure these parts in this process."""
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    setting = Setting(device, options.quick)
    found: dict[str, object] = {"about": setting.about(), "quick": options.quick, "parts": {}}
    for name in names:
        print(f"{name}: measuring", flush=True)
        began = time.perf_counter()
        result = _guarded(name, setting, out)
        found["parts"][name] = result | {"seconds": time.perf_counter() - began}
        _write(found, out)
    return found


def apart(
    names: list[str],
    options: argparse.Namespace,
    out: Path,
    left: Callable[[], float] = lambda: 180.0,
    log: IO[str] | None = None,
) -> Iterator[dict[str, object]]:
    """Measure each of these parts in a process of its own; yield all that was found, after each of them.

    Args:
        names: the parts.
        options: those of the command line.
        out: where to write.
        left: how many seconds the next part may take.
        log: where the processes say what they do; by default, here.
    """
    none = {"date": "", "torch": torch.__version__, "device": options.device, "ranks": [], "told": []}
    found: dict[str, object] = {"about": none, "quick": options.quick, "parts": {}}
    flags = ["--device", options.device, *(["--quick"] if options.quick else [])]
    own = out / "gpu.json"
    for name in names:
        began = time.perf_counter()
        own.unlink(missing_ok=True)
        error = run_for([sys.executable, __file__, name, *flags, "--out", str(out)], left(), log)
        try:
            here = json.loads(own.read_text())
        except (OSError, ValueError):
            here = {"about": found["about"], "parts": {}}
        ended = {"error": error or "it wrote nothing", "seconds": time.perf_counter() - began}
        found["about"] = here["about"]
        found["parts"][name] = here["parts"].get(name, ended)
        _write(found, out)
        yield found


def run_for(command: list[str], seconds: float, log: IO[str] | None = None) -> str | None:
    """Run a command, with all the processes that it starts, for so long at most; return what went wrong."""
    if seconds <= 0:
        return "no time was left"
    process = subprocess.Popen(
        command, cwd=ROOT, env=_environment(), stdout=log, stderr=log and subprocess.STDOUT, start_new_session=True
    )
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"it took more than {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it has left behind
        process.wait()
    return f"its process ended with {code}" if code else None


def _environment() -> dict[str, str]:
    """Return an environment in which this pipelab, from this folder, is the one that is imported."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "GLOO_SOCKET_IFNAME": "lo",  # a machine that reaches nothing outside has no other way
        "NCCL_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": _CONNECTIONS,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "MPLBACKEND": "Agg",
    }


def _write(found: dict[str, object], out: Path) -> None:
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "gpu.md").write_text(report(found) + "\n")


def _guarded(name: str, setting: Setting, out: Path) -> dict[str, object]:
    """Measure one part; return what it found, or its error. Memory is given back."""
    try:
        return {"found": PARTS[name](setting, out)}
    except Exception as error:  # noqa: BLE001 - one part's failure must not cost the others' figures
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        if setting.device.type == "cuda":
            try:
                torch.cuda.empty_cache()
            except RuntimeError as error:  # a GPU that failed says so again
                print(error)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; all by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only to see that everything runs")
    parser.add_argument("--apart", action="store_true", help="each part in a process of its own")
    parser.add_argument("--out", type=Path, help="folder for gpu.json, gpu.md and pictures")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}: there are {', '.join(PARTS)}")
    return options


def _folder(options: argparse.Namespace) -> Path:
    """Return where to write: the documentation's results only for real measurements."""
    real = options.device == "cuda" and not options.quick
    out = options.out or (RESULTS if real else Path(tempfile.mkdtemp(prefix="pipelab-gpu-")))
    out.mkdir(parents=True, exist_ok=True)
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
