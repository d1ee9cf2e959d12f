"""What readers of a kept attempt are given, whenever they come and however slowly they read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvmesh.v1 import common_pb2, worker_pb2

from services.worker.kept_log import BroughtOutput, Cursor, KeptLog, Response
from services.worker.messages import RequestFailed

CHOICES = 3


def tokens(choice: int, *ids: int) -> Response:
    return Response(tokens=worker_pb2.TokenChunk(choice=choice, token_ids=ids))


def said(responses: list[Response]) -> dict[int, list[int]]:
    """Tokens by choice."""
    found: dict[int, list[int]] = {}
    for response in responses:
        if response.HasField("tokens"):
            found.setdefault(response.tokens.choice, []).extend(response.tokens.token_ids)
    return found


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, CHOICES - 1), st.integers(1, 40)),
        st.tuples(st.just("known"), st.integers(0, CHOICES - 1), st.integers(1, 3)),
        st.tuples(st.just("open"), st.just(0), st.just(0)),
        st.tuples(st.just("take"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("leave"), st.integers(0, 9), st.just(0)),
    ),
    max_size=80,
)


@given(ACTIONS)
def test_every_reader_is_told_everything_once_and_in_order(actions: list[tuple[str, int, int]]) -> None:
    log, everything, drawn, number = KeptLog(), dict[int, list[int]](), dict[int, list[int]](), 0
    starter = log.open(is_starter=True)
    read: dict[Cursor, list[Response]] = {starter: []}
    for action, which, count in actions:
        readers = list(log.cursors)
        if action in ("say", "known"):
            chunks = [tokens(which, number + i) for i in range(count)]
            number += count
            everything.setdefault(which, []).extend(range(number - count, number))
            if action == "say":
                drawn.setdefault(which, []).extend(range(number - count, number))
                log.say(chunks)
            else:
                log.say_known(chunks)
        elif action == "open":
            read[log.open()] = []
        elif readers and action == "take":
            cursor = readers[which % len(readers)]
            read[cursor].extend(cursor.take())
        elif readers:
            log.cursors.discard(readers[which % len(readers)])
            log.compact()
    log.end(None)
    late = log.open()
    read[late] = []
    for cursor in list(log.cursors):
        while not cursor.is_over:
            read[cursor].extend(cursor.take())
        assert said(read[cursor]) == (drawn if cursor.is_starter else everything)


def test_what_is_no_token_keeps_its_place_when_tokens_are_merged() -> None:
    log = KeptLog()
    finish = Response(finish=worker_pb2.WorkerChoiceFinish(choice=0))
    admitted, completed = Response(admitted=worker_pb2.Admitted()), Response(completed=worker_pb2.Completed())
    log.say([admitted, *(tokens(i % 2, i) for i in range(60)), finish, *(tokens(1, i) for i in range(60, 70))])
    log.say([completed])
    log.compact()
    cursor = log.open()
    responses = cursor.take()
    assert len(responses) < 12
    assert (responses[0], responses[-1]) == (admitted, completed)
    end = responses.index(finish)
    assert said(responses[:end])[0] == list(range(0, 60, 2))
    assert said(responses)[1] == [*range(1, 60, 2), *range(60, 70)]


def test_log_probabilities_stay_with_their_tokens() -> None:
    log = KeptLog()
    for token in range(30):
        one = tokens(0, token)
        one.tokens.logprobs.add().chosen.token_id = token
        log.say([one])
    log.compact()
    for response in log.open().take():
        assert [position.chosen.token_id for position in response.tokens.logprobs] == list(response.tokens.token_ids)


def test_a_reader_that_is_behind_is_given_few_responses() -> None:
    log, fresh = KeptLog(), tokens(0, 1)
    behind = log.open()
    log.say([tokens(0, i) for i in range(2000)])
    assert len(behind.take()) < 10
    log.say([fresh])
    assert behind.take() == [fresh]


def test_moves_are_for_the_starter() -> None:
    log = KeptLog()
    starter, other = log.open(is_starter=True), log.open()
    moves = [Response(prepared=worker_pb2.Prepared()), Response(move_wanted=worker_pb2.MoveWanted())]
    log.say([tokens(0, 1), *moves])
    assert starter.take() == [tokens(0, 1), *moves]
    assert other.take() == [tokens(0, 1)]
    assert not other.has_more


def test_a_long_log_is_taken_in_parts() -> None:
    log = KeptLog()
    cursor = log.open()
    log.say([tokens(0, i) for i in range(5000)])
    log.end(RequestFailed(1, "UNAVAILABLE", "gone"))
    parts = []
    while cursor.has_more:
        assert not cursor.is_over
        parts.append(cursor.take())
    assert len(parts) > 1
    assert cursor.is_over
    assert cursor.failure is not None
    assert said([response for part in parts for response in part]) == {0: list(range(5000))}


def test_known_output_is_told_with_its_finish() -> None:
    request = worker_pb2.WorkerGenerateRequest(max_tokens=3, stop_token_ids=[9])
    for choice, ids in enumerate(([1, 2, 3], [1, 9], [4], [1, 2, 9])):
        request.known.add(choice=choice, token_ids=ids, finished=choice != 2)
    brought = BroughtOutput(request)
    responses = brought.responses(request.known)
    assert said(responses) == {0: [1, 2, 3], 1: [1, 9], 2: [4], 3: [1, 2, 9]}
    reasons = {r.finish.choice: r.finish.reason for r in responses if r.HasField("finish")}
    stop = common_pb2.FINISH_REASON_STOP
    assert reasons == {0: common_pb2.FINISH_REASON_LENGTH, 1: stop, 3: stop}
    further = brought.responses([worker_pb2.KnownOutput(choice=2, token_ids=[5, 6], finished=True)])
    assert said(further) == {2: [5, 6]}
    assert further[-1].finish.reason == common_pb2.FINISH_REASON_LENGTH, "the third of three tokens"
