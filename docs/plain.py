"""Write the site's sources as plain files, for a builder that runs no hooks: `python docs/plain.py FOLDER`.

Zensical is one: it reads `mkdocs.yml`, but neither runs hooks nor knows the pages that they make. In the folder, run
`zensical build`, with pipelab's folder as `PYTHONPATH`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import yaml
from mkdocs.config import load_config
from mkdocs.structure.files import InclusionLevel, get_files, set_exclusions
from mkdocs.structure.pages import Page
from mkdocs.utils.yaml import yaml_load

ROOT = Path(__file__).resolve().parents[1]


def write(folder: Path) -> None:
    """Run the hooks as MkDocs does, and write what they give."""
    config = load_config(str(ROOT / "mkdocs.yml"))
    config = config.plugins.on_config(config)
    files = config.plugins.on_files(get_files(config), config=config)
    set_exclusions(files, config)
    for file in files:
        if file.inclusion == InclusionLevel.EXCLUDED:
            continue
        content = file.content_bytes
        if file.is_documentation_page():
            page = Page(None, file, config)
            page.read_source(config)
            # The front matter is no part of a page's Markdown.
            front = f"---\n{yaml.safe_dump(page.meta)}---\n\n" if page.meta else ""
            text = config.plugins.on_page_markdown(page.markdown, page=page, config=config, files=files)
            content = f"{front}{text}".encode()
        place = folder / "docs" / file.src_uri
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)

    settings = yaml_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    del settings["hooks"], settings["watch"], settings["exclude_docs"]
    settings["nav"] = config.nav
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "theme", folder / "docs" / "theme", dirs_exist_ok=True)
    # What pages and mkdocstrings read, beside the pages themselves.
    shutil.copytree(ROOT / "docs" / "results", folder / "docs" / "results", dirs_exist_ok=True)
    for name in ("README.md", "docs/train.py", "docs/docstrings.py"):
        shutil.copy(ROOT / name, folder / name)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
