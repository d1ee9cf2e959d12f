"""Which workers could finish a request: the candidates of a decision. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.router.domain import Ask, Identity, Requirements, WorkerId
from services.router.policies.view import IntArray
from services.router.workers import WorkerTable

ANYTHING = Requirements()


def candidates(ask: Ask, table: WorkerTable, serving: npt.NDArray[np.bool_], model: int) -> IntArray:
    """Rows of workers of that model that take requests and have, when idle, room for the prompt and its whole output.

    serving: of each row, whether its worker takes requests at all. Output is bounded for each choice; choices that do
    not fit together are run one after another.
    """
    rows = table.rows
    tokens = ask.prompt_tokens + max(1, -(-ask.max_output_tokens // max(1, ask.num_choices)))
    blocks = np.ceil(tokens / np.maximum(1, rows["block_tokens"]))
    able = (
        serving
        & (rows["model"] == model)
        & (model >= 0)
        & (rows["context_length"] >= tokens)
        & (rows["total_blocks"] >= blocks)
        & rows["runs_whole"]
    )
    for name in ask.excluded_workers:
        worker = table.workers.get(WorkerId(name))
        if worker is not None:
            able[worker.row] = False
    found = np.flatnonzero(able)
    if ask.requires == ANYTHING:
        return found
    meeting = [row for row in found.tolist() if _meets(table.workers[table.by_row[row]].identity, ask.requires)]
    return np.array(meeting, np.int64)


def _meets(identity: Identity | None, requires: Requirements) -> bool:
    """Whether a worker has everything that is named."""
    return (
        identity is not None
        and requires.dtype in ("", identity.dtype)
        and requires.device in ("", identity.device)
        and (not requires.adapter or requires.adapter in identity.adapters)
    )
