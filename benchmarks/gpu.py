"""Measure pipelines on a GPU: `python benchmarks/gpu.py`, some minutes; `--device cpu --quick` only sees that it runs.

Whatever fails is noted, and the rest is measured all the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from gpu_parts import fits, makespans, memory, native, overhead, tracer
from gpu_report import report
from gpu_setting import LARGE, QUICK, SMALL, Setting

PARTS = {
    "makespans": makespans,
    "fits": fits,
    "memory": memory,
    "overhead": overhead,
    "native": native,
    "tracer": tracer,
}
RESULTS = Path(__file__).parent.parent / "docs" / "results"


def main(arguments: list[str]) -> int:
    """Measure, write what was found after every part, and return how many parts failed."""
    options = _options(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU: torch.cuda.is_available() is False; to see that everything runs: --device cpu --quick")
    sizes = (QUICK, QUICK) if options.quick else (LARGE, SMALL)
    setting = Setting(torch.device(options.device), *sizes)
    out = _folder(options)
    found: dict[str, object] = {"about": setting.about(), "quick": options.quick, "parts": {}}
    for name in options.parts or PARTS:
        print(f"{name}: measuring", flush=True)
        began = time.perf_counter()
        result = _guarded(name, setting, out)
        result["seconds"] = time.perf_counter() - began
        found["parts"][name] = result
        (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
        (out / "gpu.md").write_text(report(found) + "\n")
    print(report(found), flush=True)
    print(f"\nwritten to {out}")
    return sum("error" in result for result in found["parts"].values())


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
            torch.cuda.empty_cache()


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; all by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only to see that everything runs")
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
