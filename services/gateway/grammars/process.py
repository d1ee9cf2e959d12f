"""`python -m services.gateway.grammars.process`: compiles grammars within limits of its own; one for each gateway.

Its standard input and output carry length-prefixed JSON. First the artifacts whose tokenizers to load, answered by an
empty text; then grammars, each answered by what is wrong with it, or by an empty text. Each is compiled in a child that
is forked for it and finds the tokenizers loaded. Beside the limits on work that gateways and workers share a child has
hard ones on processor time and memory: what exceeds them ends the child, and that is the answer, at no cost but these.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import sys
import traceback
from pathlib import Path
from typing import BinaryIO

import msgspec
from llguidance import LLTokenizer

from services.common.grammars import GrammarError, check_matcher, compile_grammar, grammar_tokenizer
from services.common.models import ModelSource
from services.common.process import die_with_parent
from services.common.session_niceness import set_session_niceness
from services.common.text.model_tokenizer import load_tokenizer
from services.gateway.grammars.places import place_of_error

LENGTH = struct.Struct(">I")
# Niceness while compiling: those who have streams open go before.
_NICE = 10
TOO_MUCH = "it takes too long, or too much memory, to compile"
# Tokens of some answer that a grammar is followed for, to see that it can be.
_PROBED_TOKENS = 4
# What a pipe takes at once.
_MAX_VERDICT_BYTES = 4096


class Start(msgspec.Struct, frozen=True):
    """The first message. models: name and path. cpu_s, memory_bytes: of one grammar."""

    parent_pid: int
    models: dict[str, str]
    cpu_s: float
    memory_bytes: int


class Check(msgspec.Struct, frozen=True):
    """A grammar for a model. vocab_size: of the model as its workers serve it."""

    model: str
    vocab_size: int
    grammar: str


class Checker:
    """The tokenizers and what is wrong with grammars for them."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._loaded = {name: load_tokenizer(ModelSource(name, Path(path))) for name, path in start.models.items()}
        self._tokenizers: dict[tuple[str, int], LLTokenizer] = {}

    def check(self, check: Check) -> str:
        """What is wrong, "" when nothing is."""
        tokenizer = self._tokenizer(check.model, check.vocab_size)
        source, sink = os.pipe()
        parent_pid, pid = os.getpid(), os.fork()
        if not pid:
            status = 1
            try:
                die_with_parent(parent_pid)
                os.write(sink, self._verdict(tokenizer, check).encode()[:_MAX_VERDICT_BYTES])
                status = 0
            except BaseException:
                # Nothing of the parent's stack may run here.
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(sink)
        with open(source, "rb") as answer:
            verdict = answer.read()
        return TOO_MUCH if os.waitpid(pid, 0)[1] else verdict.decode(errors="replace")

    def _verdict(self, tokenizer: LLTokenizer, check: Check) -> str:
        """As `check`; does not return where it takes more than it may."""
        with _Limits(self._start.cpu_s, self._start.memory_bytes):
            try:
                _probe(tokenizer, check.grammar)
            except GrammarError as error:
                place = place_of_error(check.grammar, lambda grammar: _fails(tokenizer, grammar))
                return f"{place}: {error.detail}" if place else error.detail
        return ""

    def _tokenizer(self, model: str, vocab_size: int) -> LLTokenizer:
        key = model, vocab_size
        if key not in self._tokenizers:
            loaded = self._loaded[model]
            self._tokenizers[key] = grammar_tokenizer(loaded.tokenizer, loaded.eos_token_ids, vocab_size)
        return self._tokenizers[key]


class _Limits:
    """Beyond these the kernel ends the process: a call into compiled code cannot be interrupted otherwise."""

    def __init__(self, cpu_s: float, memory_bytes: int) -> None:
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
        resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + self._memory_bytes, resource.RLIM_INFINITY))

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _data_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) * 1024


def _probe(tokenizer: LLTokenizer, grammar: str) -> None:
    """Compile a grammar and begin some answer with it. Raises GrammarError."""
    matcher = compile_grammar(tokenizer, grammar)
    ends = set(tokenizer.eos_tokens)
    for _ in range(_PROBED_TOKENS):
        mask = matcher.compute_bitmask()
        check_matcher(matcher)
        token = next((i * 8 + _lowest_bit(byte) for i, byte in enumerate(mask) if byte), None)
        if token is None:
            raise GrammarError("no answer matches it")
        if token in ends:
            return
        matcher.consume_token(token)
        check_matcher(matcher)


def _lowest_bit(byte: int) -> int:
    return (byte & -byte).bit_length() - 1


def _fails(tokenizer: LLTokenizer, grammar: str) -> bool:
    try:
        compile_grammar(tokenizer, grammar)
    except GrammarError:
        return True
    return False


def read_message(source: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    header = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else None


def main() -> int:
    """Serve until standard input ends; the exit status."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = read_message(source)
    if first is None:
        return 0
    start = msgspec.json.decode(first, type=Start)
    die_with_parent(start.parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # A crash at a limit is an answer, and its core would hold a client's schema.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    checker = Checker(start)
    _give_way()
    _answer(sink, "")
    while (message := read_message(source)) is not None:
        _answer(sink, checker.check(msgspec.json.decode(message, type=Check)))
    return 0


def _give_way() -> None:
    """Let all else go before, with the children to come.

    Linux may share the processor among sessions before it looks at niceness (sched(7)). A core that has only idle-class
    work counts as free for whoever wakes; with work of any niceness it would be passed by for one with a queue.
    """
    with contextlib.suppress(PermissionError):
        os.setsid()
    os.nice(_NICE)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    set_session_niceness(_NICE)


def _answer(sink: BinaryIO, text: str) -> None:
    payload = text.encode()
    sink.write(LENGTH.pack(len(payload)) + payload)
    sink.flush()


if __name__ == "__main__":
    sys.exit(main())
