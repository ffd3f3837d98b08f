"""The grader uses the numbers that the student got."""

from __future__ import annotations

from pathlib import Path

import pytest
from homework import SOLUTION, changed

from pipelab_course.grading.tasks import variant


@pytest.mark.usefixtures("folder")
def test_a_variant_is_graded_with_its_own_number_of_micro_batches(pipelab_command) -> None:
    count = variant("ada").microbatches
    Path("pipeline_homework.py").write_text(SOLUTION)
    code, output, error = pipelab_command("grade", "pipeline_homework.py", "--variant", "ada", "--seconds", "60")
    assert (code, "100 of 100" in output) == (0, True), error
    Path("pipeline_homework.py").write_text(changed(("if i > 0:", "if i > 1:")))
    _, output, _ = pipelab_command("grade", "pipeline_homework.py", "--variant", "ada", "--seconds", "60")
    assert f"{count} micro-batches: F0" in output
    assert f"F{count - 1} B{count - 2} B{count - 1}" in output
