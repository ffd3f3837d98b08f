"""The keys: each question has an answer and a rubric, its numbers exist, and students' copies print none of it."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files as resources
from string import Formatter

import pytest

from pipelab import files, simulate
from pipelab.catalogue import DelayedBackward
from pipelab_course import commands, compressed, hw1, hw3, practical9
from pipelab_course.grading.tasks import variant
from pipelab_course.hybrid import Hybrid

QUESTIONS = tomllib.loads(resources("pipelab_course").joinpath("questions.toml").read_text(encoding="utf-8"))


def key(lab: str) -> dict[str, dict[str, list[str]]]:
    return tomllib.loads(files.teacher(f"keys/{lab}.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("lab", QUESTIONS)
def test_every_question_has_an_answer_and_a_rubric_and_says_which_number_it_needs(lab: str) -> None:
    assert list(key(lab)) == list(QUESTIONS[lab])
    for name, question in QUESTIONS[lab].items():
        assert all(question[part] for part in ("part", "ask", "number")), name
        assert all(key(lab)[name][part] for part in ("answer", "rubric")), name


def test_as_many_are_asked_as_the_assignments_ask() -> None:
    assert {lab: len(asked) for lab, asked in QUESTIONS.items()} == {
        "practical9": 18, "hw1": 17, "hw3": 12, "hw4": 10, "hybrid": 6, "report": 4
    }  # fmt: skip


def of_hw1() -> set[str]:
    slower = [0]  # milliseconds that each process adds to a step

    def found(job, timeout):  # each step takes 1 ms for 8 rows, divided by the processes, and what is serial
        step_ms = job.batch / 8 / job.processes + job.delay_ms + slower[0] * job.processes
        each, alone = range(job.processes), [step_ms / 2] * (job.processes > 1)
        times = {"times_ms": [step_ms - 1, step_ms, step_ms + 3], "alone_ms": alone, "rank_ms": [step_ms for _ in each]}
        devices = range(job.processes * job.devices)
        uses = {"utilisation": [0.5 for _ in devices], "memory_mb": [1 for _ in devices], "others": 0.0, "loss": 1.0}
        return times | uses

    names = set[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hw1, "run_job", found)
        patch.setattr(hw1, "cores", lambda: 1)
        for slower[0] in (0, 100):
            for experiment in (None, *hw1.EXPERIMENTS):
                rows = list(hw1.measurements(hw1.runs(["16x2"], [1, 2], experiment=experiment)))
                names |= set(hw1.numbers(rows, experiment)[0])
    return names


def of_practical9() -> set[str]:
    rows = list(practical9.measurements(2, (2, 4), emulate=(0.001, 0.001), batch=8, steps=1))
    return set(practical9.numbers([row | {"emulated": False, "marked": ()} for row in rows]))


def of_hw3() -> set[str]:
    rows = list(hw3.measurements([4, 6], [2, 3], width=4, batch=2, steps=1))
    return set(hw3.numbers([*rows[:-1], rows[-1] | {"step_time_ms": 0.0}]))


def of_hybrid() -> set[str]:
    job = Hybrid(stages=2, replicas=2, microbatches=2, forward=1, backward=2, ring_step=1)
    return set(compressed.numbers(list(compressed.trainings(2, 2, 2, ("none", "int8"), 1)), job))


NUMBERS = {
    "practical9": of_practical9,
    "hw1": of_hw1,
    "hw3": of_hw3,
    "hw4": lambda: set().union(*(commands._of_homework(variant(str(name))) for name in range(50))),
    "hybrid": of_hybrid,
    "report": set,
}


@pytest.mark.parametrize("lab", QUESTIONS)
def test_an_answer_names_numbers_that_its_lab_finds(lab: str) -> None:
    found = NUMBERS[lab]()
    for name, answer in key(lab).items():
        for sentence in answer["answer"]:
            needed = {field for _, field, _, _ in Formatter().parse(sentence) if field}
            assert needed <= found, name


def test_homework_4s_key_has_1f1bs_delay_for_the_students_own_micro_batches() -> None:
    delays = {own.microbatches: commands._of_homework(own)["late"] for own in map(variant, map(str, range(50)))}
    assert delays.items() >= {6: "5", 7: "6", 8: "6"}.items()


def test_a_sentence_without_its_number_is_left_out_and_models_follow_each_other() -> None:
    sentences = ["{model}: {speed_up}.", "Below 1 it is {slower}.", "All."]
    numbers = [{"model": "a", "speed_up": "2"}, {"model": "b", "speed_up": "3"}]
    assert commands._filled(sentences, numbers) == "a: 2. b: 3. All."
    assert commands._filled(sentences, [{}]) == ""


SMALL = ("lab", "practical9", "-m", "2,4", "--emulate", "1", "2", "--steps", "1", "--batch", "8")


def test_a_teachers_copy_answers_below_the_table_unless_it_shall_not(pipelab_command) -> None:
    _, output, _ = pipelab_command(*SMALL)
    numbered = re.findall(r"^(\d+)\. [A-Z]", output, re.MULTILINE)
    assert numbered == [str(number) for number in range(1, 19)]
    assert "{" not in output
    parts = [question["part"] for question in QUESTIONS["practical9"].values()]
    assert [f". {part}: " in " ".join(output.split()) for part in parts] == [True] * 18
    _, output, _ = pipelab_command(*SMALL, "--no-answers")
    assert "true 1F1B" in output
    assert not re.search(r"^1\. ", output, re.MULTILINE)


@pytest.mark.parametrize("lab", QUESTIONS)
def test_questions_are_asked_without_running_anything(succeeds, lab: str) -> None:
    output = succeeds("lab", lab, "--questions")
    assert all(question["ask"] in output for question in QUESTIONS[lab].values())


@pytest.mark.parametrize("words", [SMALL, ("lab", "hw4"), ("lab", "report")], ids=lambda words: words[1])
def test_a_students_copy_prints_no_answer(pipelab_command, monkeypatch, words: tuple[str, ...]) -> None:
    monkeypatch.setattr(commands, "_key", lambda _: {})
    _, output, _ = pipelab_command(*words)
    said = " ".join(output.split())
    assert all(question["ask"] in said for question in QUESTIONS[words[1]].values())
    answers = [sentence for answer in key(words[1]).values() for sentence in answer["answer"]]
    assert not [answer for answer in answers if answer.partition("{")[0][:40] in said and len(answer) > 40]
    assert "wrong" not in said


def test_the_single_loop_runs_no_forward_beside_a_backward() -> None:  # as two answers say
    for ranks, microbatches in ((2, 4), (3, 4), (4, 8)):
        events = simulate(DelayedBackward(ranks, microbatches)).events
        forwards, backwards = ([event for event in events if event.action.kind == kind] for kind in "FB")
        pairs = [(f, b) for f in forwards for b in backwards if f.start < b.end and b.start < f.end]
        assert (len(forwards), pairs) == (ranks * microbatches, [])
