"""Everything that a kept attempt has said, and its readers, each with a cursor of its own. Pure.

Invariants: a reader is given all output once, and of each choice in order; only the one that started the attempt is not
told what it brought along, and it alone is told of moves. A log that is over says nothing more. Tokens of a choice are
merged for a reader that is behind, who has room for so many responses, and while nobody reads, to save memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvmesh.v1 import common_pb2, worker_pb2

from services.worker.messages import RequestFailed

# With 20 log probabilities each, so many tokens are half a megabyte; a message may have 16.
_TAKEN_TOKENS = 2048
_MERGED_TOKENS = 512
# A reader with fewer is not behind.
_MANY_TOKENS = 16

Response = worker_pb2.WorkerGenerateResponse


class KeptLog:
    """Responses of one attempt; bounded by its prompt and max_tokens, for each token is said once.

    With a reader, that its prompt gets on comes on top, about once a second.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.failure: RequestFailed | None = None
        self.cursors: set[Cursor] = set()
        self._responses: list[Response] = []
        # Where output stands that the starter knows.
        self._known: set[int] = set()

    def __len__(self) -> int:
        return len(self._responses)

    def say(self, responses: Iterable[Response]) -> None:
        """Something new."""
        self._responses.extend(responses)
        self._wake()

    def say_known(self, responses: Sequence[Response]) -> None:
        """Output that the starter knows already."""
        start = len(self._responses)
        self._known.update(range(start, start + len(responses)))
        self.say(responses)

    def end(self, failure: RequestFailed | None) -> None:
        """Nothing follows."""
        self.is_over, self.failure = True, failure
        self._wake()

    def open(self, *, is_starter: bool = False) -> Cursor:
        """A reader from the beginning on."""
        cursor = Cursor(self, is_starter=is_starter)
        self.cursors.add(cursor)
        return cursor

    def read(self, cursor: Cursor) -> list[Response]:
        """What the cursor has not seen, as far as one message may go; it moves on."""
        taken: list[Response] = []
        num_tokens = 0
        while cursor.has_more and num_tokens < _TAKEN_TOKENS:
            response = self._responses[cursor.position]
            if self._is_for(cursor, response):
                taken.append(response)
                num_tokens += len(response.tokens.token_ids)
            cursor.position += 1
        return taken if num_tokens < _MANY_TOKENS else list(_merged(taken))

    def compact(self) -> None:
        """Merge what can be. Nothing while somebody reads."""
        if not self.cursors:
            self._responses = list(_merged(one for one in self._responses if not one.HasField("prompt_advanced")))
            self._known.clear()

    def _is_for(self, cursor: Cursor, response: Response) -> bool:
        """Whether the reader is to have the response that it stands at."""
        if cursor.is_starter:
            return cursor.position not in self._known
        return response.WhichOneof("event") not in ("prepared", "move_wanted")

    def _wake(self) -> None:
        for cursor in self.cursors:
            cursor.wake()


class Cursor:
    """How far one reader is."""

    def __init__(self, log: KeptLog, *, is_starter: bool) -> None:
        self.is_starter = is_starter
        self.position = 0
        self.wake: Callable[[], None] = _ignore
        self._log = log

    @property
    def has_more(self) -> bool:
        """Whether something is left to take."""
        return self.position < len(self._log)

    @property
    def is_over(self) -> bool:
        """Whether everything has been taken, and nothing follows."""
        return self._log.is_over and not self.has_more

    @property
    def failure(self) -> RequestFailed | None:
        """How the attempt ended, if not well."""
        return self._log.failure

    def take(self) -> list[Response]:
        """What it has not seen, as far as one message may go."""
        return self._log.read(self)


class BroughtOutput:
    """Turns output that the starter of a request brings along into responses, as if it had been drawn here."""

    def __init__(self, request: worker_pb2.WorkerGenerateRequest) -> None:
        self._max_tokens = request.max_tokens
        self._stop_token_ids = frozenset(request.stop_token_ids)
        # Tokens so far, by choice.
        self._counts: dict[int, int] = {}

    def responses(self, outputs: Iterable[worker_pb2.KnownOutput]) -> list[Response]:
        """What is known now, after what was known before."""
        return [response for output in outputs for response in self._choice_responses(output)]

    def _choice_responses(self, output: worker_pb2.KnownOutput) -> Iterator[Response]:
        tokens = output.token_ids
        count = self._counts[output.choice] = self._counts.get(output.choice, 0) + len(tokens)
        if tokens:
            yield Response(tokens=worker_pb2.TokenChunk(choice=output.choice, token_ids=tokens))
        if output.finished:
            is_cut = count >= self._max_tokens and self._stop_token_ids.isdisjoint(tokens[-1:])
            reason = common_pb2.FINISH_REASON_LENGTH if is_cut else common_pb2.FINISH_REASON_STOP
            yield Response(finish=worker_pb2.WorkerChoiceFinish(choice=output.choice, reason=reason))


def _merged(responses: Iterable[Response]) -> Iterator[Response]:
    """The same with fewer responses: tokens of a choice go together, and before whatever else follows them."""
    open_chunks: dict[int, Response] = {}
    for response in responses:
        if not response.HasField("tokens"):
            yield from open_chunks.values()
            open_chunks.clear()
            yield response
            continue
        choice = response.tokens.choice
        chunk = open_chunks.get(choice)
        if chunk is not None and len(chunk.tokens.token_ids) < _MERGED_TOKENS:
            chunk.tokens.token_ids.extend(response.tokens.token_ids)
            chunk.tokens.logprobs.extend(response.tokens.logprobs)
            chunk.tokens.accelerator_s = max(chunk.tokens.accelerator_s, response.tokens.accelerator_s)
            continue
        if chunk is not None:
            yield open_chunks.pop(choice)
        open_chunks[choice] = Response()
        open_chunks[choice].CopyFrom(response)
    yield from open_chunks.values()


def _ignore() -> None:
    """A cursor that nobody waits at."""
