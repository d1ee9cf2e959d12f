"""What nobody waits for is computed in small pieces beside what clients wait for, on the toy model."""

from __future__ import annotations

from services.common.fair_queue import RequestClass
from services.worker.messages import PreparedRequest, Resume
from tests.worker.cores import known_output, make_core, submit
from tests.worker.test_known_output import NUM_BLOCKS, PROMPT, Toy
from tests.worker.toy import expected_tokens

HOLD = {"hold_s": 5.0}


def toy_with_room() -> Toy:
    return Toy(make_core(NUM_BLOCKS, budget=100, max_queue_s=100.0))


def pieces(toy: Toy) -> list[dict[int, int]]:
    """Tokens of each of the next steps, by key, while anything but lone tokens is in."""
    found: list[dict[int, int]] = []
    while True:
        chunks = toy.core.schedule(toy.now)
        if not any(chunk.length > 1 for chunk in chunks):
            return found
        found.append({chunk.sequence.request.key: chunk.length for chunk in chunks})
        toy.run(1)


def test_what_nobody_waits_for_is_computed_in_small_pieces_beside_decodes() -> None:
    """Clients of the others wait for each step, and the source of a held attempt goes on."""
    toy, whole = toy_with_room(), expected_tokens(tuple(PROMPT), 60)
    toy.tell(submit(1, [5] * 10, 60))
    toy.run(1)
    toy.tell(submit(2, PROMPT, 60, known=[known_output(0, whole[:6])], **HOLD))
    toy.tell(submit(3, [6] * 20, 5, **HOLD))
    assert pieces(toy) == [{1: 1, 2: 8}, {1: 1, 2: 8}, {1: 1, 2: 8}, {1: 1, 2: 2, 3: 8}, {1: 1, 3: 8}, {1: 1, 3: 3}]
    # What the source has said meanwhile is computed so, too, and the draw comes with the last piece.
    toy.tell(Resume(2, [known_output(0, whole[6:16])]))
    assert pieces(toy) == [{1: 1, 2: 8}, {1: 1, 2: 3}]
    toy.run()
    assert toy.tokens(2) == whole[16:]


def test_the_rest_of_a_long_held_prompt_is_computed_in_larger_pieces() -> None:
    toy = toy_with_room()
    toy.tell(submit(1, [5] * 10, 60))
    toy.run(1)
    toy.tell(submit(2, [6] * 201, 5, **HOLD))
    lengths = [piece[2] for piece in pieces(toy)]
    assert lengths[:3] == [25, 21, 19]
    assert lengths == sorted(lengths, reverse=True)
    assert sum(lengths) == 200
    toy.run(1)
    assert [message.key for message in toy.said if isinstance(message, PreparedRequest)] == [2]


def test_a_held_prompt_is_computed_at_once_where_no_client_waits() -> None:
    """Beside nobody, and beside batch work."""
    toy = toy_with_room()
    toy.tell(submit(1, [6] * 60, 5, **HOLD))
    assert pieces(toy) == [{1: 59}]
    toy.tell(submit(2, [5] * 10, 30, priority=RequestClass.BATCH.value))
    toy.run(1)
    toy.tell(submit(3, [7] * 60, 5, **HOLD))
    # Decodes of batch work stand aside meanwhile.
    assert pieces(toy) == [{3: 59}]
