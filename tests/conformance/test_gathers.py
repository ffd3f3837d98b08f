"""`with_gathers` puts gathers, frees and reductions where the installed PyTorch's own lowering does."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as native

import pipelab
from pipelab import with_gathers
from pipelab.plan.csv_notation import cell

SIZES = [("interleaved-1f1b", 2, 4), ("looped-bfs", 3, 6), ("zbv", 2, 6), ("1f1b", 4, 8), ("dualpipev", 2, 4)]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("policy", ["full", "auto", "numbers"])
@pytest.mark.parametrize("most", [2, 3])
def test_every_row_is_pytorchs(name, ranks, microbatches, policy, most):
    newest = hasattr(native, "_resolve_unshard_lookahead")
    if policy != "full" and not newest:
        pytest.skip("PyTorch has one policy before 2.15")
    given = [1 + rank % most for rank in range(ranks)] if policy == "numbers" else policy
    plan = pipelab.schedules[name](ranks, microbatches).plan()
    if newest:
        ahead = native._resolve_unshard_lookahead(tuple(given) if policy == "numbers" else given, ranks, most)
        options = [{"unshard_lookahead": each} for each in ahead]
    else:
        options = [{}] * ranks
    mine = with_gathers(plan, most, given)
    for rank, row in enumerate(plan.rows):
        read = [native._Action.from_str(str(item)) for item in row]
        theirs = native._add_unshard_reshard(read, most, **options[rank])
        theirs = [str(each) for each in native._add_reduce_grad(theirs, microbatches) if "WAIT" not in str(each)]
        listed = [cell(item) for item in mine.rows[rank]]
        assert (listed == theirs) if newest else in_any_order(listed) == in_any_order(theirs)
    assert pipelab.check(mine, gather_cap=most) == []


def in_any_order(row):
    """Return a row with neighbouring frees sorted: before 2.15, their order is a set's."""
    found = []
    for each in row:
        if each.endswith("RESHARD") and found and isinstance(found[-1], set):
            found[-1].add(each)
        else:
            found.append({each} if each.endswith("RESHARD") else each)
    return found
