"""Put tutorials, and the built site if there is one, into what is published: the installed package shows them.

A teacher's wheel has the solutions and keys too: see teacher/distribute.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Site(BuildHookInterface):  # type: ignore[type-arg]
    """`site/` as `site/` in the source archive, and as `pipelab/site/` in the wheel; nothing in an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folders."""
        if version == "standard" and self.target_name == "wheel":
            build_data["force_include"]["tutorials"] = "pipelab_course/tutorials"
        if version == "standard" and (Path(self.root) / "site" / "index.html").is_file():
            build_data["force_include"]["site"] = "site" if self.target_name == "sdist" else "pipelab/site"
        if version == "standard" and self.metadata.version.endswith("+teacher"):
            build_data["force_include"]["teacher"] = "pipelab/teacher"
