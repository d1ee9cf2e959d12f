"""Which workers could finish a request: the candidates of a decision. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.router.domain import Ask, Identity, Requirements, WorkerId
from services.router.policies.view import IntArray, WorkerRows
from services.router.roll_call import ModelWorkers, Present
from services.router.worker_rows import Selection
from services.router.workers import WorkerTable

ANYTHING = Requirements()
BoolArray = npt.NDArray[np.bool_]


def candidates(ask: Ask, table: WorkerTable, present: Present, model: int, *, whole: bool = True) -> Selection:
    """Workers of that model that take requests and have, when idle, room for the prompt and its whole output.

    Output is bounded for each choice; choices that do not fit together are run one after another. whole: those that do
    all of a request; otherwise those that compute prompts only, which have that room too, should nobody take over.
    """
    workers = present.of_model(model, table.rows, whole=whole)
    tokens = _tokens(ask)
    fits_all = tokens <= workers.least_context and -(-tokens // workers.least_block_tokens) <= workers.least_blocks
    if fits_all and not ask.excluded_workers and ask.requires == ANYTHING and not ask.needs_room_now:
        return workers.selection
    return Selection.of(_chosen(ask, table, workers, tokens))


def is_too_large(ask: Ask, table: WorkerTable, model: int) -> bool:
    """Whether no worker of that model that is known, ready or not, has that room."""
    known = [worker.row for worker in table.workers.values() if worker.identity is not None]
    rows = table.rows.take(known)
    return not ((rows["model"] == model) & _is_large_enough(rows, _tokens(ask))).any()


def _tokens(ask: Ask) -> int:
    """Of the prompt and one choice's output."""
    return ask.prompt_tokens + max(1, -(-ask.max_output_tokens // max(1, ask.num_choices)))


def _is_large_enough(rows: WorkerRows, tokens: int) -> BoolArray:
    result: BoolArray = (rows["context_length"] >= tokens) & (
        rows["total_blocks"] >= np.ceil(tokens / rows["block_tokens"])
    )
    return result


def _chosen(ask: Ask, table: WorkerTable, workers: ModelWorkers, tokens: int) -> IntArray:
    """Looked at one by one."""
    rows = table.rows.pick(workers.selection)
    able = _is_large_enough(rows, tokens)
    if ask.needs_room_now:
        able &= _has_room(ask, rows)
    found: IntArray = workers.selection.rows[able]
    names = (WorkerId(name) for name in ask.excluded_workers)
    excluded = [table.workers[name].row for name in names if name in table.workers]
    if excluded:
        found = found[~np.isin(found, excluded)]
    if ask.requires == ANYTHING:
        return found
    meeting = [row for row in found.tolist() if _meets(table.workers[table.by_row[row]].identity, ask.requires)]
    return np.array(meeting, np.int64)


def _has_room(ask: Ask, rows: WorkerRows) -> BoolArray:
    """Where nobody waits, and it finds a place and blocks without anybody giving up theirs soon.

    A request that runs has one sequence at least. The choices share the blocks of the prompt; each has those of its own
    output, and every sequence soon one more.
    """
    sequences = np.maximum(rows["running"], rows["decoding"]) + rows["pending"] + ask.num_choices
    blocks = np.ceil(ask.prompt_tokens / rows["block_tokens"]) + ask.further_tokens // rows["block_tokens"] + sequences
    has_places = (rows["waiting"] == 0) & (sequences <= rows["max_running"])
    result: BoolArray = has_places & (blocks + rows["pending_blocks"] <= rows["free_blocks"])
    return result


def _meets(identity: Identity | None, requires: Requirements) -> bool:
    """Whether a worker has everything that is named."""
    return (
        identity is not None
        and requires.dtype in ("", identity.dtype)
        and requires.device in ("", identity.device)
        and (
            not requires.adapter or (identity.adapter_slots > 0 and requires.adapter_rank <= identity.max_adapter_rank)
        )
        and requires.protocol <= identity.protocol
        and requires.pooling in ("", identity.pooling)
    )
