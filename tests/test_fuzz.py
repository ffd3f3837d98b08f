"""Every kind of random attack, with a few fixed seeds; `make fuzz` goes on for minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import kinds

TRIES = [
    pytest.param(attack, seed, id=f"{kind}-{seed}", marks=[pytest.mark.dist] * getattr(attack, "dist", False))
    for kind, attack in kinds().items()
    for seed in range(getattr(attack, "seeds", 1))
]


@pytest.mark.sweep
@pytest.mark.parametrize(("attack", "seed"), TRIES)
def test_a_random_attack_finds_nothing(attack, seed):
    assert attack(seed) is None


def test_the_command_tells_failures_hangs_and_crashes_with_their_seeds(tmp_path):
    folder = Path(__file__).parent
    (tmp_path / "tests").mkdir()
    for name in ("__init__.py", "__main__.py"):
        target = tmp_path / "tests" / "fuzz" / name
        target.parent.mkdir(exist_ok=True)
        target.write_text((folder / "fuzz" / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "tests" / "fuzz" / "odd.py").write_text(
        "import os, time\n"
        "def fuzz_fine(seed): print('no answer')\n"
        "def fuzz_wrong(seed): return f'wrong with {seed}'\n"
        "def fuzz_raises(seed): raise ValueError(seed)\n"
        "def fuzz_dies(seed): os._exit(3)\n"
        "def fuzz_hangs(seed): time.sleep(60)\n"
        "fuzz_hangs.seconds = 1\n"
    )
    command = [sys.executable, "-m", "tests.fuzz", "--seed", "7"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    rows = {line.split()[0]: line.split()[1:3] for line in done.stdout.splitlines()[-5:]}
    assert rows == {"fine": ["1", "0"], **{kind: ["1", "1"] for kind in ("wrong", "raises", "dies", "hangs")}}
    for told in ("wrong with 7", "ValueError: 7", "exit code 3", "no end within 1 s", "make fuzz KIND=dies SEED=7"):
        assert told in done.stdout
    only = subprocess.run([*command, "--kind", "fine"], cwd=tmp_path, capture_output=True, timeout=120, check=False)
    assert only.returncode == 0
