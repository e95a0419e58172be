"""For mkdocs: names in docstrings, options in one piece, and the address of the repository.

Docstrings name things by Sphinx roles, :class:`vecenv.AsyncVectorEnv`, with a tilde if only the last part is shown.
Two colons before a block of code become one. The link to the repository is the address under ``Repository`` of
``[project.urls]`` in pyproject.toml, its only place; ``VECENV_REPOSITORY`` in the environment replaces it, for a fork.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code)")
_CODE_FOLLOWS = re.compile(r"::(?=</p>\s*<(?:div|pre))")
_OPTION = re.compile(r"<code>(--?[\w-]{1,24})</code>")
_SHORT = re.compile(r"<code>~(?:\w+\.)+(\w+)</code>")


def on_config(config: Any) -> Any:
    project = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text())["project"]
    address = os.environ.get("VECENV_REPOSITORY") or project.get("urls", {}).get("Repository")
    if address:
        config.repo_url, config.repo_name = address, address.rstrip("/").rpartition("/")[2]
    return config


def on_page_content(html: str, **_: Any) -> str:
    html = _OPTION.sub(r'<code class="option">\1</code>', html)
    return _CODE_FOLLOWS.sub(":", _SHORT.sub(r"<code>\1</code>", _ROLE.sub("", html)))
