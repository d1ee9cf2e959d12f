"""What a policy sees: the request in numbers, and the candidates as arrays with one element each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from services.common.fair_queue import NUM_CLASSES
from services.router.policies.correction import Correction
from services.router.policies.correction import FloatArray as FloatArray
from services.router.policies.correction import IntArray as IntArray

# One worker. Rates are per second; *_s are seconds; host numbers the machine; slot is the worker's in the index, -1
# where it has none. What a report brings stands together, and so does what grants add, so that each is written at once.
WORKER_ROW = np.dtype(
    [
        ("live", np.bool_),
        ("up", np.bool_),
        ("ready", np.bool_),
        ("draining", np.bool_),
        # By an operator, until the worker starts anew.
        ("drained", np.bool_),
        # Prefills and decodes, so that it can finish a request alone; others compute prompts for those that do.
        ("runs_whole", np.bool_),
        # Others can pull blocks from it: a simulated worker has nothing to give.
        ("serves_pulls", np.bool_),
        ("model", np.int32),
        ("context_length", np.int64),
        ("block_tokens", np.int64),
        ("block_bytes", np.float64),
        ("total_blocks", np.int64),
        ("step_token_budget", np.float64),
        ("max_running", np.float64),
        # As measured when the worker started.
        ("benchmark_prefill_tokens_per_s", np.float64),
        ("benchmark_decode_step_s", np.float64),
        # By which the worker is slower than its figures say.
        ("pace", np.float64),
        # When a report came, when one came that its engine had not made before, and when it showed progress or no work.
        ("reported_s", np.float64),
        ("told_s", np.float64),
        ("moved_s", np.float64),
        ("stall_limit_s", np.float64),
        ("running", np.float64),
        ("waiting", np.float64),
        ("queued_tokens", np.float64),
        ("queued_pairs", np.float64),
        ("waiting_by_class", np.float64, (NUM_CLASSES,)),
        ("decoding", np.float64),
        ("context_tokens", np.float64),
        # Blocks that nobody uses, and those of them whose content is still there.
        ("free_blocks", np.float64),
        ("cached_blocks", np.float64),
        ("prefill_tokens_per_s", np.float64),
        ("decode_step_s", np.float64),
        ("decode_slope_s", np.float64),
        # Most tokens of a step now, and what a step takes (services.common.step_costs), the shortest one too.
        ("step_tokens", np.float64),
        ("fixed_s", np.float64),
        ("decoding_s", np.float64),
        ("prefill_token_s", np.float64),
        ("prefill_pair_s", np.float64),
        ("decode_sequence_s", np.float64),
        ("context_token_s", np.float64),
        ("least_step_s", np.float64),
        # Tightest TPOT objective of the requests that it has; inf: none.
        ("promised_tpot_s", np.float64),
        # Granted by this router and in no report yet.
        ("pending", np.float64),
        ("pending_tokens", np.float64),
        ("pending_blocks", np.float64),
        ("pending_pairs", np.float64),
        ("pending_by_class", np.float64, (NUM_CLASSES,)),
        ("host", np.int64),
        ("slot", np.int64),
        ("name_hash", np.uint64),
    ]
)


class WorkerRows(Protocol):
    """Workers by column, with the names and types of WORKER_ROW; one element of each column for each worker."""

    def __getitem__(self, name: str, /) -> Any:
        """A column."""

    def __len__(self) -> int:
        """Workers."""


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """prefix_key: hash of the prompt's first blocks, or of the request where it has no full block."""

    prompt_tokens: int
    block_tokens: int
    num_choices: int
    expected_output_tokens: float
    prefix_key: int
    # Decisions made before this one.
    sequence: int
    now_s: float = 0.0
    # A PriorityClass; 0 counts as the most urgent, as workers serve it.
    priority: int = 0

    @property
    def usable_blocks(self) -> int:
        """Leading blocks that need not be computed: the last token always is."""
        return max(0, self.prompt_tokens - 1) // self.block_tokens


@dataclass(frozen=True, slots=True)
class LinkArrays:
    """[source, candidate] each: bytes/s and setup of the source's memory, and what its SSD adds."""

    bytes_per_s: FloatArray
    setup_s: FloatArray
    ssd_bytes_per_s: FloatArray
    ssd_setup_s: FloatArray


@dataclass(frozen=True, slots=True)
class Sources:
    """Locations that hold leading blocks of the prompt, one element each.

    end: leading blocks held; the first memory_end of them in memory, the rest on an SSD. queue_bytes: being pulled
    from it already. is_self: [source, candidate].
    """

    end: IntArray
    memory_end: IntArray
    queue_bytes: FloatArray
    is_self: npt.NDArray[np.bool_]
    links: LinkArrays


def no_sources(num_candidates: int) -> Sources:
    """Nobody has anything to give."""
    empty, floats, none = np.zeros((0, num_candidates)), np.zeros(0), np.zeros(0, np.int64)
    return Sources(none, none, floats, empty.astype(np.bool_), LinkArrays(empty, empty, empty, empty))


@dataclass(frozen=True, slots=True)
class Pressure:
    """How much the candidates have had to do of late.

    window_s: seconds of work granted to each in the last three minutes. prefill_share: of the last half minute, that
    each was given prompts for; utilisation: its mean; arrivals_per_s: grants to the mean candidate. reuse: share of
    the blocks asked for that somebody held.
    """

    window_s: FloatArray
    prefill_share: FloatArray
    utilisation: float = 0.0
    arrivals_per_s: float = 0.0
    reuse: float = 0.0


def idle(num_candidates: int) -> Pressure:
    """Nobody has had anything to do."""
    none = np.zeros(num_candidates)
    return Pressure(none, none)


@dataclass(frozen=True, slots=True)
class AdapterLoads:
    """Of each candidate the seconds until it has the request's adapter, 0 where it is there, and whether all its places
    are taken: it will load the adapter once a request with another one has ended.
    """

    load_s: FloatArray
    is_full: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PolicyView:
    """Candidates only, each able to finish the request. local_blocks: leading blocks that the candidate itself has.

    adapters: None for requests of the base model.
    """

    rows: WorkerRows
    local_blocks: IntArray
    sources: Sources
    pressure: Pressure
    correction: Correction = field(default_factory=Correction)
    adapters: AdapterLoads | None = None


def rendezvous(name_hashes: npt.NDArray[np.uint64], key: int) -> FloatArray:
    """A draw in [0, 1) for each name under `key`, high where the key prefers that name (highest random weight).

    A name that leaves moves only its own keys (Thaler and Ravishankar, 1998). The mixer is splitmix64's.
    """
    mixed = name_hashes ^ np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2.0**53
