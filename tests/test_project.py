"""What stands in two files of the project says the same in both."""

from __future__ import annotations

import inspect
import re
import runpy
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pipelab

ROOT = Path(__file__).resolve().parents[1]
TEACHER = ROOT / "teacher"
PICTURES = runpy.run_path(str(ROOT / "docs" / "pictures.py"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def pins() -> dict[str, str]:
    lines = [line for line in read("constraints.txt").splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def requirements() -> list[Requirement]:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *(text for name, extra in extras.items() if name != "gpu" for text in extra)]
    return sorted({Requirement(text) for text in named if not text.startswith(project["name"])}, key=str)


def test_every_make_target_that_a_reader_is_told_of_exists() -> None:
    makefiles = read("Makefile") + (read("teacher/make.mk") if TEACHER.exists() else "")
    targets = set(re.findall(r"^(\w+):", makefiles, flags=re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md", "docs/index.md", ".ci/run", ".github/workflows/pages.yml"):
        text = read(page) if (ROOT / page).exists() else ""  # the last two are not in students' copies
        told = set(re.findall(r"(?:^|[`:] ?|=\S+ )make (\w+)", text, flags=re.MULTILINE))
        assert told <= targets, page
    assert {"demo", "test"} <= set(re.findall(r"^make (\w+)", read("README.md"), flags=re.MULTILINE))


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_constraints_pin_a_version_within_the_range(requirement: Requirement) -> None:
    assert pins()[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_changelog_knows_the_version() -> None:
    assert pipelab.__version__.removesuffix("+teacher") in read("CHANGELOG.md")


def test_every_page_of_the_navigation_exists() -> None:
    pages = re.findall(r"[\w/]+\.md$", read("mkdocs.yml").partition("nav:")[2], flags=re.MULTILINE)
    assert "index.md" in pages
    for page in pages:
        source = ROOT / page.replace(".md", ".py") if page.startswith("tutorials/") else ROOT / "docs" / page
        assert source.is_file() or (TEACHER / "site" / Path(page).relative_to("teach")).is_file(), page


@pytest.mark.filterwarnings("ignore:.* ranks share:UserWarning")  # on a machine with fewer GPUs than ranks
def test_the_readme_and_home_do_what_they_say(tmp_path: Path) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for page in ("README.md", "docs/index.md"):  # Home goes on with the README's schedule
        for code, printed in PICTURES["examples"](page):
            output = PICTURES["run"](code, tmp_path, namespace)
            assert printed is None or output.rstrip() == printed.rstrip()
    PICTURES["others"](tmp_path)
    if metadata.version("matplotlib") != pins()["matplotlib"]:
        pytest.skip("needs the pinned matplotlib, which drew the README's pictures")
    for drawn in tmp_path.glob("*.svg"):
        assert drawn.read_text() == read(f"docs/images/{drawn.name}"), "out of date: make pictures"


def test_the_maps_of_the_code_name_every_folder_and_only_files_that_exist() -> None:
    package, course = ROOT / "pipelab", ROOT / "pipelab_course"
    map_of_folders = read("CONTRIBUTING.md").partition("## Where is what?")[2].partition("\n## ")[0]
    folders = {path.parent.relative_to(package) for path in package.glob("*/**/__init__.py")}
    folders |= {path.parent.relative_to(ROOT) for path in course.glob("**/__init__.py")}
    folders.discard(Path("draw/page"))  # a part of drawing that no map needs
    assert {Path(folder).name for folder in re.findall(r"`([\w/]+)/`", map_of_folders)} - {
        "pipelab",
        "tests",
        "fuzz",
    } == {folder.name for folder in folders}
    files = re.findall(r"`([\w/]+\.py)`", read("docs/architecture.md"))
    assert [name for name in files if not (package / name).is_file() and not (ROOT / name).is_file()] == []


def test_the_road_for_one_evening_is_as_long_as_it_says() -> None:
    road = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", read("docs/architecture.md"), re.MULTILINE)
    assert road
    for name, said in road:
        assert abs(len(read(f"pipelab/{name}").splitlines()) - int(said)) <= 40, name


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = listed.stdout.split() if listed.returncode == 0 else []
    if not files:
        pytest.skip("needs a git checkout")
    place = re.compile(r"(?<![\w.])/(?:home|Users|root|work|mnt|srv)/\w|[A-Z]:\\Users", flags=re.ASCII)
    named: list[str] = []
    for path in (ROOT / name for name in files):
        if path.is_file() and path.suffix in {".py", ".md", ".yml", ".toml", ".txt", ".css", ".svg", ""}:
            lines = path.read_text(encoding="utf-8").splitlines()
            named += [
                f"{path.relative_to(ROOT)}:{number}" for number, line in enumerate(lines, 1) if place.search(line)
            ]
    assert named == []


def script_of(path: Path) -> str:
    """Return a script, or those of a page."""
    text = path.read_text(encoding="utf-8")
    return text if path.suffix == ".js" else "\n".join(re.findall(r"<script>(.*?)</script>", text, re.DOTALL))


def test_no_line_of_a_script_is_longer_than_120_columns() -> None:
    kinds = ("docs/**/*.js", "docs/**/*.html", "pipelab/**/*.js", "pipelab/**/*.html")
    scripts = [path for kind in kinds for path in sorted(ROOT.glob(kind))]
    ours = [path for path in scripts if not {"node_modules", "vendored"} & set(path.parts)]
    assert ROOT / "pipelab" / "draw" / "page" / "model.js" in ours
    assert [path for path in ours if max(map(len, script_of(path).splitlines()), default=0) > 120] == []


def test_public_functions_name_and_order_their_arguments_alike():
    order = ["plan", "cost", "memory_cap", "order", "transport", "memory"]
    for name in pipelab.__all__:
        function = getattr(pipelab, name)
        if not inspect.isfunction(function):
            continue
        arguments = inspect.signature(function).parameters
        shared = [each for each in arguments if each in order]
        assert shared == sorted(shared, key=order.index), name
        assert "memory_cap" not in arguments or arguments["memory_cap"].kind is inspect.Parameter.KEYWORD_ONLY, name
        takes_a_plan = any(re.search("ScheduleLike|Subject", str(each.annotation)) for each in arguments.values())
        assert not takes_a_plan or name == "compare" or next(iter(arguments)) == "plan", name
