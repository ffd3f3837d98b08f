"""What students get: no solution, no answer, no teacher's notes, neither in files nor in what is published or built."""

from __future__ import annotations

import html
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ran

from pipelab import files

ROOT = Path(__file__).resolve().parents[2]
TEACHER = ROOT / "teacher"
COPIES = runpy.run_path(str(TEACHER / "distribute.py"))
BUILT = ROOT / "build" / "student"
TEXTS = {".py", ".md", ".toml", ".txt", ".html", ".js", ".json", ".ipynb", ".yml", ".zip", ""}
SOLUTIONS = [*TEACHER.glob("solutions/*.py"), *TEACHER.glob("homework*/*.md")]


def plain(text: str) -> str:
    """Return the words of a text without its markup, as one line."""
    return re.sub(r"[\s`*#\\\"']+", " ", html.unescape(re.sub(r"<[^<>]*>", "", text)))


def sentences(text: str) -> Iterator[str]:
    """Yield the longer sentences of a text; what a template fills in, and code, ends one."""
    for each in re.split(r"[.:;?!]\s|\n\n|[{}|]", text):
        words = plain(each).strip()
        if len(words) > 40:
            yield words


def secrets() -> dict[str, str]:
    """Return what students must not find, each with its file."""
    found: dict[str, str] = {}
    for path in SOLUTIONS:
        text = path.read_text(encoding="utf-8")
        prose = re.sub(r"^\|.*", "", text, flags=re.MULTILINE) if path.suffix == ".md" else text.split('"""')[1]
        found |= dict.fromkeys(sentences(prose), path.name)
    for path in [TEACHER / "challenges.toml", *TEACHER.glob("keys/*.toml")]:
        for text in strings(tomllib.loads(path.read_text(encoding="utf-8"))):
            found |= dict.fromkeys(sentences(text), path.name)
    for path in TEACHER.glob("site/**/*.md"):
        prose = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        found |= dict.fromkeys(sentences(prose), path.name)
    return found


def solutions() -> dict[str, tuple[list[str], int]]:
    """Return what counts as a solution if a file has enough of it: lines, and how many of them."""
    answers = tomllib.loads((TEACHER / "challenges.toml").read_text(encoding="utf-8"))
    orders = {name: each["reference"] for name, each in answers.items() if isinstance(each["reference"], list)}
    found = {f"an order of {name}": (rows, len(rows)) for name, rows in orders.items()}
    for path in TEACHER.glob("*/*_homework.py"):
        template = (ROOT / "pipelab_course" / "grading" / f"{path.name}.txt").read_text(encoding="utf-8")
        filled = set(path.read_text(encoding="utf-8").splitlines()) - set(template.splitlines())
        lines = [words for line in filled if len(words := plain(line).strip()) > 25]
        found[path.name] = (lines, len(lines) // 2 + 1)
    return found


def strings(data: object) -> Iterator[str]:
    """Yield all texts in data but the rows of orders."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict | list):
        for key, each in data.items() if isinstance(data, dict) else enumerate(data):
            yield from strings(each) if key != "reference" else ()


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each text of a folder by name, those in wheels and archives too."""
    for path in folder.rglob("*"):
        if path.suffix in {".whl", ".zip"}:
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if Path(name).suffix in TEXTS - {".zip"}:
                        yield f"{path.name}:{name}", archive.read(name).decode(errors="replace")
        elif path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                for member in archive.getmembers():
                    if member.isfile() and Path(member.name).suffix in TEXTS:
                        yield f"{path.name}:{member.name}", archive.extractfile(member).read().decode(errors="replace")
        elif path.is_file() and path.suffix in TEXTS and "pyodide" not in path.parts:
            yield str(path.relative_to(folder)), path.read_text(encoding="utf-8", errors="replace")


def leaks(folder: Path) -> list[str]:
    hidden = secrets()
    parts = solutions()
    together = re.compile("|".join(map(re.escape, sorted(hidden, key=len, reverse=True))))
    found: list[str] = []
    for name, text in texts(folder):
        words = plain(text)
        found += [f"{name}: {each[0]} ({hidden[each[0]]})" for each in [together.search(words)] if each]
        found += [f"{name}: {what}" for what, (lines, many) in parts.items() if sum(x in words for x in lines) >= many]
    return found


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    folder = tmp_path_factory.mktemp("copies") / "student"
    COPIES["copy"](folder, student=True)
    return folder


def test_no_secret_is_in_the_students_copy(student: Path) -> None:
    assert len(secrets()) > 100
    assert leaks(student) == []


@pytest.mark.parametrize("folder", ["dist", "site"])
def test_no_secret_is_in_what_is_built_from_it(folder: str) -> None:
    if not (BUILT / folder).is_dir():
        pytest.skip("needs the students' copy as it is built: make student")
    assert leaks(BUILT / folder) == []


def test_a_secret_is_found_wherever_it_is(tmp_path: Path) -> None:
    secret = next(each for each in secrets() if len(each) > 60)
    half = len(secret) // 2
    for name, text in {
        "a.md": secret.replace(" ", "\n"),
        "b.html": f"<p>{secret[:half]}<code>{secret[half:]}</code></p>",
        "c.py": f"# {secret}",
    }.items():
        (tmp_path / name).write_text(text)
    with zipfile.ZipFile(tmp_path / "d.whl", "w") as wheel:
        wheel.writestr("pipelab/e.toml", f"answer = '''{secret}'''")
    assert len(leaks(tmp_path)) == 4
    rows = tomllib.loads((TEACHER / "challenges.toml").read_text(encoding="utf-8"))["far"]["reference"]
    (tmp_path / "f.toml").write_text(f"reference = {list(rows)}")
    homework = TEACHER / "homework4" / "pipeline_homework.py"
    (tmp_path / "g.txt").write_text(homework.read_text(encoding="utf-8"))
    assert len(leaks(tmp_path)) == 6
    assert all(many > 1 for _, many in solutions().values())


def test_the_students_copy_works_and_says_that_it_has_no_answers(student: Path) -> None:
    assert not (student / "teacher").exists()
    assert not [
        path for path in student.rglob("*") if path.suffix in COPIES["TEXTS"] and "<!-- teacher" in path.read_text()
    ]
    command = [sys.executable, "-m", "pipelab", "challenge"]
    assert "fill" in subprocess.run(command, cwd=student, capture_output=True, text=True, check=True).stdout
    refused = subprocess.run([*command, "--sheet"], cwd=student, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")


def test_the_teachers_copy_has_all_and_a_version_that_says_so(tmp_path: Path, student: Path) -> None:
    COPIES["copy"](tmp_path, student=False)
    made = runpy.run_path(str(tmp_path / "pipelab" / "_version.py"))["__version__"]
    assert made == runpy.run_path(str(student / "pipelab" / "_version.py"))["__version__"] + "+teacher"
    assert (tmp_path / "teacher" / "solutions").is_dir()


def test_the_code_of_the_key_runs_and_its_numbers_hold() -> None:
    assert "pipelab" in ran(files.teacher("site/key.md"))


def test_the_key_shows_what_the_commands_of_the_lesson_print(pipelab_command, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    lesson, slides = (
        (ROOT / "docs" / "teach" / f"{name}.md").read_text(encoding="utf-8") for name in ("lesson", "slides")
    )
    for name, code in re.findall(r'title="(\w+\.py)" \}\n(.*?)```', lesson, flags=re.DOTALL):
        Path(name).write_text(code, encoding="utf-8")
        assert code[code.index("class ") :] in slides
    key = files.teacher("site/key.md").read_text(encoding="utf-8")
    shown = re.findall(r"```console\n\$ pipelab (.*)\n((?:.*\n)+?)```", key)
    for command, printed in shown:
        _, output, error = pipelab_command(*command.split())
        assert (output + error).strip() == printed.strip()
        assert f"`pipelab {command}`" in lesson or command == "simulate 1f1b -r 3 -m 4"
    assert len(shown) == 8


def test_what_follows_a_left_out_paragraph_or_row_stays_apart() -> None:
    text = "| a |\n| b <!-- teacher --> |\n\n## Head\n\nOne. <!-- teacher -->\ntwo\n\nthree\n"
    assert COPIES["MARKED"].sub("", text) == "| a |\n\n## Head\n\n\nthree\n"
