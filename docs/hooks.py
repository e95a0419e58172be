"""For mkdocs: docstrings name things by Sphinx roles, :class:`vecenv.AsyncVectorEnv`; a page shows the name alone."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code)")


def on_page_content(html: str, **_: Any) -> str:
    return _ROLE.sub("", html)
