"""What `bench.determinism` runs: the engine's scheduler over the real model in one process, and two arithmetics."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from kernels.batch import PagedBatch
from services.common.blocks import block_root, cache_namespace, chain_block_ids, join_ids
from services.common.models import DEFAULT_MODEL, resolve_model
from services.worker.admission import SchedulerLimits
from services.worker.chunk import Chunk
from services.worker.core import CoreLimits, EngineCore
from services.worker.engine.batch import StepBuilder
from services.worker.link_rates import LinkRates
from services.worker.messages import Abort, Sampling, StepOutput, Submit
from services.worker.model import torch_decoder
from services.worker.model.load import kv_layout, load_runner
from services.worker.model.model_files import open_model
from services.worker.model.runner import CpuRunner
from services.worker.rates import Rates
from services.worker.sampler import draw_tokens

NUM_BLOCKS, BUDGET, CONTEXT = 512, 512, 1024
_KEY = b"a key for the benchmark only...."
_FIRST_NEIGHBOUR = 1000
_ABORTS_FROM_STEP = 3
Tokens = dict[int, list[int]]


def prompt(number: int) -> list[int]:
    """40 to 145 token ids, of request `number`; neighbours' are 60."""
    length = 60 if number >= _FIRST_NEIGHBOUR else 40 + 7 * number
    return [(number * 131 + i * i * 37 + i * 11) % 40_000 + 100 for i in range(length)]


class Served:
    """An engine without processes: a fresh scheduler and pool over a runner."""

    def __init__(self, runner: CpuRunner, output: int, *, num_blocks: int = NUM_BLOCKS, budget: int = BUDGET) -> None:
        """output: tokens of each request. budget: tokens of a step."""
        self.core = EngineCore(
            CoreLimits(SchedulerLimits(CONTEXT, runner.spec.vocab_size, max_queue_s=1e9), step_token_budget=budget),
            num_blocks,
            _KEY,
            # Fast enough that the budget alone bounds a step.
            Rates(1e6, 0.01),
            LinkRates(runner.spec.layout.block_bytes, 30.0),
        )
        namespace = cache_namespace(tenant="t", generation=0)
        self._root = block_root(_KEY, model_digest=runner.spec.digest, kv_dtype="bfloat16", namespace=namespace)
        self._runner = runner
        self._output = output
        self._builder = StepBuilder()
        self._keys = 0

    def run(self, numbers: Sequence[int], sampling: Sampling, *, cached: bool = False, neighbours: int = 0) -> Tokens:
        """Serve requests at once; tokens by number. neighbours: others beside them, aborted one by one meanwhile."""
        keys = self.submit_all((*range(_FIRST_NEIGHBOUR, _FIRST_NEIGHBOUR + neighbours), *numbers), sampling, cached)
        others = [key for key, number in keys.items() if number >= _FIRST_NEIGHBOUR]
        tokens: Tokens = {number: [] for number in numbers}
        step = 0
        while chunks := self.core.schedule(0.0):
            for key, drawn in self._step(chunks):
                tokens.get(keys[key], []).extend(drawn)
            step += 1
            if others and step >= _ABORTS_FROM_STEP:
                self.core.handle(Abort(others.pop()), 0.0)
        return tokens

    def submit_all(self, numbers: Iterable[int], sampling: Sampling, cached: bool = False) -> dict[int, int]:
        """Hand requests in; numbers by key."""
        keys: dict[int, int] = {}
        for number in numbers:
            self._keys += 1
            keys[self._keys] = number
            self.core.handle(self._submit(self._keys, number, sampling, cached), 0.0)
        return keys

    def _step(self, chunks: list[Chunk]) -> list[tuple[int, list[int]]]:
        self._runner.submit(self._builder.build(chunks))
        draws = draw_tokens(self._runner.collect(), self.core.draw_rows(chunks))
        self.core.commit(chunks, draws, 1e-4, 0.0)
        steps = [message for message in self.core.to_front if isinstance(message, StepOutput)]
        self.core.to_front.clear()
        return [(output.key, output.token_ids) for step in steps for output in step.choices]

    def _submit(self, key: int, number: int, sampling: Sampling, cached: bool) -> Submit:
        tokens = prompt(number)
        root = self._root if cached else b""
        ids = join_ids(chain_block_ids(_KEY, self._root, tokens)) if cached else b""
        packed = np.array(tokens, dtype="<u4").tobytes()
        return Submit(key, "r", packed, root, ids, b"o" * 16, sampling, 1, self._output, [], [], 0, 0, 1e9, "")


@contextmanager
def exact_runner() -> Iterator[CpuRunner]:
    """What a CPU worker runs."""
    with _runner(compiled=True) as runner:
        yield runner


@contextmanager
def plain_runner() -> Iterator[CpuRunner]:
    """The torch decoder with products and attention as one would write them without care for rows."""
    with ExitStack() as stack:
        runner = stack.enter_context(_runner(compiled=False))
        stack.enter_context(patch.object(torch_decoder, "linear", _plain_linear))
        stack.enter_context(patch.object(torch_decoder, "paged_attention", _plain_attention))
        yield runner


def _runner(*, compiled: bool) -> CpuRunner:
    path = resolve_model(DEFAULT_MODEL).path
    layout = kv_layout(open_model(path).config, "bfloat16")
    pool = mmap.mmap(-1, layout.pool_bytes(NUM_BLOCKS))
    return load_runner(path, pool_buffer=pool, served_context=CONTEXT, compiled=compiled)


def _plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = F.linear(x, weight).float()
    return product if bias is None else product + bias


def _plain_attention(
    query: torch.Tensor, pool: torch.Tensor, layer: int, batch: PagedBatch, *, scale: float, **_ignored: object
) -> torch.Tensor:
    """`scaled_dot_product_attention` for each sequence on its gathered keys and values."""
    outputs = []
    for seq, context in enumerate(batch.context_lens.tolist()):
        begin, end = batch.query_starts[seq], batch.query_starts[seq + 1]
        slots = torch.from_numpy(batch.block_tables[seq, : -(-context // pool.shape[4])]).long()
        keys, values = pool[slots, :, layer].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :context]
        sees = torch.arange(context) <= torch.from_numpy(batch.positions[begin:end])[:, None]
        attended = F.scaled_dot_product_attention(
            query[begin:end].transpose(0, 1)[None], keys[None], values[None], sees, scale=scale, enable_gqa=True
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)
