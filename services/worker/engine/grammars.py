"""What the grammars of requests allow: compiled on a thread of their own, followed while the device computes.

A follower is an index into the output of its choice and a matcher at that place. Whatever the output has gained since,
drawn here or known from elsewhere, it takes in before it says what may come next, so that preemption costs it nothing
and a choice goes on from where another worker has left it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog
from llguidance import LLMatcher, LLTokenizer

from services.common.grammars import GrammarError, check_matcher, compile_grammar
from services.worker.errors import Refused

# Thread time that a grammar may take: so much for each token in the long run, and so much more at once. An ordinary
# mask takes a twentieth of that.
TOKEN_S = 0.002
BURST_S = 0.25
# Compiled grammars kept for requests that bring the same ones; what masks have left behind is up to 40 MB of each.
_MAX_KEPT = 16

_log = structlog.get_logger()
Allowed = npt.NDArray[np.bool_]


class Follower:
    """One choice's place in its grammar. failure: why it has given up, "" while it has not."""

    __slots__ = ("_clock", "_debt_s", "_matcher", "_num_taken", "_vocab_size", "failure")

    def __init__(self, matcher: LLMatcher, vocab_size: int, clock: Callable[[], float] = time.thread_time) -> None:
        """matcher: at the beginning, and nobody else's. clock: seconds that its work takes."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._clock = clock
        self._num_taken = 0
        self._debt_s = 0.0
        self.failure = ""

    def allowed(self, output: npt.NDArray[np.int32]) -> Allowed | None:
        """Which tokens may follow the whole `output` of the choice, bool [vocab_size]; None when it has given up."""
        if self.failure:
            return None
        started_s = self._clock()
        fresh = output[self._num_taken :].tolist()
        try:
            mask = self._mask_after(fresh)
        except GrammarError as error:
            self.failure = f"the answer's grammar cannot be followed: {error.detail}"
            return None
        self._num_taken = len(output)
        spent_s = self._clock() - started_s
        self._debt_s = max(0.0, self._debt_s + spent_s - TOKEN_S * max(1, len(fresh)))
        if self._debt_s > BURST_S:
            self.failure = "the answer's grammar takes too long to follow"
            return None
        return np.unpackbits(mask, count=self._vocab_size, bitorder="little").view(np.bool_)

    def _mask_after(self, fresh: list[int]) -> npt.NDArray[np.uint8]:
        if fresh and not self._matcher.consume_tokens(fresh):
            check_matcher(self._matcher)
        mask = self._matcher.compute_bitmask()
        check_matcher(self._matcher)
        return np.frombuffer(mask, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """Makes the followers of a grammar, which share what their masks have taught the lexer."""

    matcher: LLMatcher
    vocab_size: int

    def follower(self) -> Follower:
        """One at the beginning of an answer."""
        return Follower(self.matcher.deep_copy(), self.vocab_size)


class Grammars:
    """A GrammarSource (following.py) with one thread."""

    def __init__(self, tokenizer: LLTokenizer | None, vocab_size: int) -> None:
        """tokenizer: None where the model has none that grammars can be compiled for."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()
        # Of _kept: the loop's thread looks, the other one adds.
        self._lock = threading.Lock()
        self._begun: dict[int, Future[CompiledGrammar]] = {}

    @property
    def is_settled(self) -> bool:
        """Whether nothing is to be taken, now or later."""
        return not self._begun

    def begin(self, key: int, grammar: str) -> None:
        """Compile the grammar of request `key`; one that is kept can be taken at once."""
        kept = self._find(grammar)
        if kept is None:
            self._begun[key] = self._thread.submit(self._compile, grammar)
        else:
            self._begun[key] = Future()
            self._begun[key].set_result(kept)

    def take(self) -> list[tuple[int, CompiledGrammar | Refused]]:
        """What has become of grammars since the last call, by request; of those that cannot be followed, why."""
        done = {key: future for key, future in self._begun.items() if future.done()}
        for key in done:
            del self._begun[key]
        return [(key, _outcome(future)) for key, future in done.items()]

    def close(self) -> None:
        """Wait for the grammar that is being compiled, and end the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _find(self, grammar: str) -> CompiledGrammar | None:
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def _compile(self, grammar: str) -> CompiledGrammar:
        kept = self._find(grammar)
        if kept is not None:
            return kept
        if self._tokenizer is None:
            raise RuntimeError("this worker has no tokenizer that grammars can be compiled for")
        compiled = CompiledGrammar(compile_grammar(self._tokenizer, grammar), self._vocab_size)
        with self._lock:
            self._kept[grammar] = compiled
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled


def _outcome(future: Future[CompiledGrammar]) -> CompiledGrammar | Refused:
    try:
        return future.result()
    except GrammarError as error:
        return Refused("INVALID_ARGUMENT", f"the answer's grammar is refused: {error.detail}")
    except Exception:
        # No tokenizer, perhaps: another worker may do better, and here others need no grammar.
        _log.exception("a grammar could not be compiled")
        return Refused("INTERNAL", "this worker cannot compile grammars")
