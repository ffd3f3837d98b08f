"""What the tests of the grader share: two of its processes, each of which imports PyTorch once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest

from pipelab_course.grading import runner


class Kept(runner._Server):
    """It stays when grading is over, for the next test."""

    def close(self) -> None:
        """Leave it running."""


@pytest.fixture(scope="session")
def kept_servers() -> Iterator[None]:
    servers = [Kept(), Kept()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_Server", cycle(servers).__next__)
        yield
    for server in servers:
        runner._Server.close(server)
