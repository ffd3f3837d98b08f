"""Copy the repository as students get it, or as teachers do: `python teacher/distribute.py student build/student`.

Only files that git tracks are copied, as they are now, so that no grade that lies around goes along. Students' copies
lack the folder `teacher` and the tests that hold answers. In the other files, what a line with `<!-- teacher -->` or
`# teacher` begins is left out, up to the next empty line.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEACHERS = re.compile(r"(teacher|tests/teacher|\.ci|\.github)/|tests/.*(homework|test_grading)\w*\.py")
"""What students do not get."""
MARKED = re.compile(r"^.*(?:<!-- teacher -->|# teacher$)(?:.|\n(?!\n))*\n", flags=re.MULTILINE)
TEXTS = {".md", ".yml", ".toml"}


def copy(folder: Path, *, student: bool) -> None:
    """Make a copy; what the folder held before is removed."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S607
    shutil.rmtree(folder, ignore_errors=True)
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, folder / name
        if not source.is_file() or (student and TEACHERS.match(name)):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        if student and source.suffix in TEXTS:
            target.write_text(MARKED.sub("", source.read_text(encoding="utf-8")), encoding="utf-8")
    if not student:
        version = folder / "pipelab" / "_version.py"
        version.write_text(re.sub(r'(?<=\d)"$', '+teacher"', version.read_text(encoding="utf-8"), flags=re.MULTILINE))
    python = Path("build", "pyodide")  # the playground's, for the site
    if (ROOT / python).is_dir():
        shutil.copytree(ROOT / python, folder / python)


if __name__ == "__main__":
    who, place = sys.argv[1:]
    copy(Path(place), student=who == "student")
