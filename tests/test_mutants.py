"""The random changes of `make mutants` are small, and each changes one thing."""

from __future__ import annotations

import ast

import mutants
import pytest


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a in b", {"x = a not in b"}),
        ("x = a + 1", {"x = a - 1", "x = a + 2", "x = a + 0"}),
        ("x = a and (not b)", {"x = a or not b", "x = a and b"}),
        ("x = f(a, b, c)", {"x = f(b, a, c)", "x = f(a, c, b)"}),
        ("x += y", {"x -= y", "pass"}),
        ("for x in y:\n    continue", {"for x in y:\n    break"}),
        ("if a:\n    x = y", {"pass"}),
        ('def f():\n    """What it does."""\n    return x', {'def f():\n    """What it does."""\n    pass'}),
    ],
)
def test_a_mutant_has_one_small_change(source, changed):
    count = len(list(mutants.changes(ast.parse(source))))
    assert {mutants.mutant(source, number)[0] for number in range(count)} == changed


def test_the_change_is_named_with_its_line():
    _, change = mutants.mutant("x = y\nwhile a in b:\n    x = y", 0)
    assert change == "line 2: while a in b:\n      -> while a not in b:"


def test_every_module_and_test_of_the_table_exists():
    modules = [f"pipelab/{module}.py" for module in mutants.TESTS]
    tests = [f"tests/{test}.py" for names in mutants.TESTS.values() for test in names.split()]
    assert [name for name in modules + tests if not (mutants.ROOT / name).is_file()] == []
