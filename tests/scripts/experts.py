"""The page on experts, in two processes."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from commands import ran
from facts import say

with redirect_stdout(StringIO()):  # what the page prints
    made = ran(Path(__file__).parents[2] / "docs" / "how_to" / "balanced_experts.md")
proof = made["proof"]
say(losses=made["losses"], exact=proof.exact, parameters=proof.parameters)
