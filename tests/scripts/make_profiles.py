"""Write the profiles that tests read: PyTorch's own schedules in two processes, without the events that do not count.

python tests/scripts/make_profiles.py
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent
FOLDER = TESTS / "hub" / "profiles"
MADE = {
    "gpipe": ("GPipe", "none"),
    "1f1b": ("1F1B", "none", "with_stack"),
    "1f1b-without-stack": ("1F1B", "none"),
    "interleaved-1f1b": ("Interleaved1F1B", "none"),
    "interleaved-1f1b-slow-rank-1": ("Interleaved1F1B", "1"),
    "zbv": ("ZBVZeroBubble", "none"),
    "dualpipev": ("DualPipeV", "none"),
}
"""By folder, the arguments of profiled.py."""


def counts(event):
    """Tell whether an event says anything about the pipeline."""
    name, kind = event.get("name", ""), event.get("cat")
    return (
        kind in (None, "user_annotation")
        or name.startswith("c10d::")
        or (kind == "python_function" and "pipelining/s" in name)
    )


def main():
    """Make all of them."""
    sys.path.insert(0, str(TESTS))
    from processes import run_in, shown

    for folder, arguments in MADE.items():
        with tempfile.TemporaryDirectory() as raw:
            ended = run_in(2, "profiled.py", raw, *arguments, fresh=True)
            assert not any(each.code for each in ended), shown(ended)
            (FOLDER / folder).mkdir(parents=True, exist_ok=True)
            for file in sorted(Path(raw).iterdir()):
                data = json.loads(gzip.decompress(file.read_bytes()))
                data.pop("traceName", None)  # a path of the machine
                data["traceEvents"] = [event for event in data["traceEvents"] if counts(event)]
                packed = gzip.compress(json.dumps(data).encode(), mtime=0)
                (FOLDER / folder / file.name).write_bytes(packed)
                print(f"{folder}/{file.name}: {len(packed):,} bytes")


if __name__ == "__main__":
    main()
