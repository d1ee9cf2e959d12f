"""`python -m services.worker.engine --config JSON`: the engine process of a worker, started by its front."""

from __future__ import annotations

import argparse
import gc
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog
import torch
from llguidance import LLTokenizer

from services.common.grammars import grammar_tokenizer
from services.common.models import ModelSource
from services.common.process import die_with_parent
from services.common.telemetry import configure_logging
from services.common.text.model_tokenizer import load_tokenizer
from services.worker.core import CoreLimits, EngineCore
from services.worker.engine.adapters import Adapters, adapter_loader
from services.worker.engine.benchmark import Benchmark, measure
from services.worker.engine.config import EngineConfig
from services.worker.engine.grammars import Grammars
from services.worker.engine.limits import core_limits
from services.worker.engine.load_progress import memory_figures
from services.worker.engine.loop import EngineLoop
from services.worker.engine.open import OpenReplica, open_replica
from services.worker.engine.rank_process import run_rank
from services.worker.engine.sampled import Sampled
from services.worker.engine.start import cannot_start, prepare_torch
from services.worker.engine_messages import Configure, EngineFailed, EngineReady, FromFrontToEngine
from services.worker.errors import RankLost
from services.worker.ipc import Link, wait_links
from services.worker.link_rates import LinkRates
from services.worker.messages import Message
from services.worker.model.kv_pool import TORCH_DTYPES
from services.worker.mover_messages import FromMoverToEngine
from services.worker.rates import Rates

_CONFIGURE_TIMEOUT_S = 10.0
_log = structlog.get_logger()


def main(argv: Sequence[str]) -> int:
    """Load, report and serve until the front goes; the exit status."""
    parser = argparse.ArgumentParser(prog="services.worker.engine")
    parser.add_argument("--config", required=True)
    config = msgspec.json.decode(parser.parse_args(argv).config, type=EngineConfig)
    # Closing the link ends this process; a signal to the whole process group must not come before that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(config.parent_pid)
    configure_logging("worker", f"{config.instance}/engine", config.log_level)
    front: Link[Message] = Link(socket.socket(fileno=config.front_fd), FromFrontToEngine)
    if config.ranks is not None and config.ranks.rank:
        return run_rank(config, config.ranks, front)
    mover: Link[Message] = Link(socket.socket(fileno=config.mover_fd), FromMoverToEngine)
    try:
        loop = _load(config, front, mover)
    except Exception as error:
        front.send(cannot_start(error))
        return 1
    try:
        loop.run()
    except ConnectionError:
        _log.info("front or mover has gone")
    except (RankLost, RuntimeError) as error:
        front.send(EngineFailed(str(error).splitlines()[0]))
    return 1


def _load(config: EngineConfig, front: Link[Message], mover: Link[Message]) -> EngineLoop:
    threads = prepare_torch(config.threads)
    block_key = _receive_key(front)
    opened = open_replica(config, threads, front.send)
    runner, spec = opened.runner, opened.runner.spec
    limits = core_limits(
        config,
        max_context=spec.max_context,
        vocab_size=spec.vocab_size,
        num_blocks=spec.num_blocks,
        block_bytes=spec.layout.block_bytes,
    )
    speed = measure(runner, num_blocks=spec.num_blocks, max_context=spec.max_context, vocab_size=spec.vocab_size)
    rates = Rates(speed.prefill_tokens_per_s, speed.decode_step_s)
    # The runner's thread keeps its own number. For a draw a second thread costs more than it saves on a busy machine.
    torch.set_num_threads(1)
    # Before anything is served: it takes the interpreter for so long that streams would be thought lost.
    tokenizer = _grammar_tokenizer(config, spec.vocab_size)
    # What is loaded stays. Looking through it, as a full collection would, holds every stream up for 0.1 s.
    gc.collect()
    gc.freeze()
    front.send(_ready(config, opened, limits, speed))
    links = LinkRates(spec.layout.block_bytes, config.pull_half_life_s)
    grammars = Grammars(tokenizer, spec.vocab_size)
    core = EngineCore(limits, spec.num_blocks, block_key, rates, links, grammars, _adapters(config, opened))
    return EngineLoop(core, Sampled(runner), front, mover, transfers=opened.transfers)


def _adapters(config: EngineConfig, opened: OpenReplica) -> Adapters | None:
    """None where the runner takes none."""
    table, spec = opened.adapters, opened.runner.spec
    if table is None:
        return None
    load = adapter_loader(
        table,
        spec.config,
        TORCH_DTYPES[spec.dtype],
        max_rank=config.max_adapter_rank,
        max_bytes=config.max_adapter_bytes,
    )
    return Adapters(
        table,
        load,
        max_waiting=config.max_adapter_waiting,
        max_wait_s=config.adapter_wait_s,
        max_bytes=config.max_adapter_bytes,
    )


def _grammar_tokenizer(config: EngineConfig, vocab_size: int) -> LLTokenizer | None:
    """None where the model has none: everything but grammars goes without it."""
    try:
        loaded = load_tokenizer(ModelSource("", Path(config.model_path)))
        return grammar_tokenizer(loaded.tokenizer, loaded.eos_token_ids, vocab_size)
    except Exception as error:
        _log.warning("no tokenizer for grammars", error=type(error).__name__, detail=str(error))
        return None


def _ready(config: EngineConfig, opened: OpenReplica, limits: CoreLimits, speed: Benchmark) -> EngineReady:
    spec = opened.runner.spec
    return EngineReady(
        model_digest=spec.digest,
        dtype=spec.dtype,
        kv_dtype=spec.layout.dtype,
        weight_format=spec.weight_format,
        vocab_size=spec.vocab_size,
        context_length=limits.scheduler.max_context,
        num_blocks=spec.num_blocks,
        block_bytes=spec.layout.block_bytes,
        prefill_tokens_per_s=speed.prefill_tokens_per_s,
        decode_step_s=speed.decode_step_s,
        block_shape=list(spec.layout.block_shape),
        transfer_slots=opened.transfer_slots,
        memory=memory_figures(spec.memory),
        adapter_slots=0 if opened.adapters is None else opened.adapters.num_slots,
        max_adapter_rank=0 if opened.adapters is None else config.max_adapter_rank,
    )


def _receive_key(front: Link[Message]) -> bytes:
    """The key of block ids, from the front's first message."""
    if not wait_links([front], _CONFIGURE_TIMEOUT_S):
        raise TimeoutError(f"the front sent no configuration in {_CONFIGURE_TIMEOUT_S} s")
    for message in front.receive():
        if isinstance(message, Configure):
            return message.block_key
    raise ConnectionError("the front's first message was no configuration")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
