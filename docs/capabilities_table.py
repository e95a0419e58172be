"""The table of ``docs/generated/capabilities.md``, written by ``python docs/capabilities_table.py``.

Nothing is built and no environment is stepped: every backend declares its capabilities.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vecenv.backends import native
from vecenv.backends.envpool.drivers import FirstReadyDriver, WholeBatchDriver
from vecenv.backends.jax_native import _CAPABILITIES as ON_DEVICE
from vecenv.engine.process_engine import Engine
from vecenv.front.capabilities import Capabilities

PAGE = Path(__file__).parent / "generated" / "capabilities.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

CALLS = {
    "`reset`, `step`, `step_async`, `step_wait`, `stats`, `close`": None,
    "`step_wait(timeout=)`, `recv(timeout=)`": "timeouts",
    "`send(env_id=)` to some environments, `recv` of those that are done first": "first_ready",
    "`reset(seed=[...])`, one seed per environment": "row_seeds",
    '`reset(options={"reset_mask": ...})`': "reset_mask",
    "... together with `seed`": "masked_seeds",
    "`reset(options=)`, other keys": "reset_options",
    "`reset(options=[...])`, one dict per environment": "row_options",
    "`call`, `get_attr`, `set_attr`, `exec_func`": "attributes",
    "`save`, `load`, `state_dict`, `load_state_dict`": "snapshots",
    "`freeze`, `thaw`": "freezing",
    "`record_failures=`, `record`": "recording",
    '`on_failure="restart"`': "restarts",
    "`spare_workers=`, resets ahead of time": "spare_workers",
    "a crash of an environment leaves the program alone": "in_this_process",
}
"""The label of a row -> the attribute of ``Capabilities``; the last row shows its opposite."""


def columns() -> dict[str, Capabilities]:
    """Return the greatest capabilities of each backend."""
    engine = {"policy": SimpleNamespace(restart=True), "pool": SimpleNamespace(local=None)}
    here, there = (lambda _: ""), (lambda _: "its environments are stepped by hosts")
    process = SimpleNamespace(backend="process", reason=here, **engine)
    workers: Any = Engine.__dict__["capabilities"].fget
    library: Any = native._LibraryDriver.__dict__["capabilities"].fget
    return {
        "process": replace(workers(process), spare_workers=True, recording=True),
        "ray": replace(workers(SimpleNamespace(backend="ray", reason=there, **engine)), recording=True),
        "EnvPool": WholeBatchDriver.capabilities,
        "EnvPool, first-ready": FirstReadyDriver.capabilities,
        "EnvPool, players": FirstReadyDriver.capabilities,
        "native, ALE": library(SimpleNamespace(features=native._LIBRARIES["ale_py.vector_env.AtariVectorEnv"])),
        "native, others": library(SimpleNamespace(features=())),
        "JAX": ON_DEVICE,
    }


def table() -> str:
    """Return the table in Markdown."""
    backends = columns()
    lines = [f"| | {' | '.join(backends)} |", f"|---|{':---:|' * len(backends)}"]
    for call, attribute in CALLS.items():
        able = [attribute is None or getattr(backend, attribute) for backend in backends.values()]
        if attribute == "in_this_process":
            able = [not here for here in able]
        lines.append(f"| {call} | {' | '.join('yes' if one else '-' for one in able)} |")
    return "\n".join(lines)


def in_page(page: str) -> tuple[str, str, str]:
    """Return the text before the table, the table, and the text after it."""
    before, _, rest = page.partition(BEGIN)
    there, _, after = rest.partition(END)
    return before, there.strip(), after


if __name__ == "__main__":
    before, _, after = in_page(PAGE.read_text())
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
