"""Run scripts one after another in the same processes, as starting processes is what takes time."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

for script in sys.argv[1:]:
    runpy.run_path(str(Path(__file__).parent / script), run_name="__main__")
