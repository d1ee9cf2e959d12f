"""What a later release says is understood as far as it is known here, or refused in the way that is meant for it."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvmesh.v1 import router_pb2, worker_pb2
from xxhash import xxh3_64_intdigest

from services.common.announcements import Tier
from services.common.keys import FORMAT, KeySpace
from services.common.transfer import wire
from services.common.transfer.errors import BlockInvalid, ProtocolViolation
from services.common.transfer.header import PART_VERSION, decode_header
from services.gateway.catalog import ModelCatalog
from services.gateway.errors import GatewayError
from services.gateway.output_record import OutputRecord
from services.gateway.router_client import refusal_error
from services.gateway.text.text_model import TextModel
from services.kvstore.ssd_files import SegmentDirectory
from services.kvstore.ssd_format import FORMAT_VERSION, SegmentHeader, encode_segment_header
from services.router.control.table import ControlTable, Entry
from services.router.domain import AttemptId, Placement, Refused, WorkerId
from services.router.errors import BadAskError
from services.router.news.messages import Bulletin, GrantedNews
from services.router.service import ask_of
from services.router.watch import identity_of, load_of
from services.router.worker_state import PendingAttempt
from services.worker.convert import known_outputs, submit_message
from services.worker.messages import Submit
from tests.common.transfer.blocks import header
from tests.gateway.conftest import text_model
from tests.router.scenes import IDENTITY, Scene, chain
from tests.versions.later import later

__all__ = ["text_model"]


@given(later(worker_pb2.WorkerIdentity), later(worker_pb2.WorkerLoad), later(router_pb2.Ask))
def test_a_router_places_by_what_it_knows(
    identity: worker_pb2.WorkerIdentity, load: worker_pb2.WorkerLoad, message: router_pb2.Ask
) -> None:
    scene, told = Scene(), identity_of(identity)
    scene.worker("w", load_of(load), dataclasses.replace(told, epoch=1, block_tokens=told.block_tokens or 16))
    scene.worker("v")
    message.model, message.model_digest = IDENTITY.model, IDENTITY.model_digest
    message.block_ids = message.block_ids[: len(message.block_ids) // 16 * 16]
    try:
        assert isinstance(scene.place(ask_of(message)), Placement | Refused)
    except BadAskError:
        assert not message.prompt_tokens or message.policy


@given(later(worker_pb2.WorkerGenerateRequest))
def test_a_worker_takes_a_request_by_what_it_knows(request: worker_pb2.WorkerGenerateRequest) -> None:
    told = submit_message(request, key=1, deadline_s=5.0, traceparent="")
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Submit)
    assert again.prompt == told.prompt
    # A run of a kind that is not known, and what follows it, is computed.
    assert [run.kind in ("worker", "kvstore") for run in told.pull_plan] == [True] * len(told.pull_plan)
    assert len(known_outputs(request.known)) == len(request.known)


@given(later(router_pb2.Refusal))
def test_a_gateway_knows_every_refusal_for_one(refusal: router_pb2.Refusal) -> None:
    assert isinstance(refusal_error(refusal), GatewayError)


@given(later(router_pb2.ModelSnapshot))
def test_a_gateway_takes_models_by_what_it_knows(text_model: TextModel, snapshot: router_pb2.ModelSnapshot) -> None:
    catalog = ModelCatalog([text_model])
    for model in snapshot.models:
        model.name = text_model.name
    catalog.update(snapshot)
    assert all(info.name == text_model.name for info in map(catalog.info, catalog.views))


@given(later(worker_pb2.TokenChunk), later(worker_pb2.WorkerChoiceFinish))
def test_output_is_kept_by_what_is_known(tokens: worker_pb2.TokenChunk, finish: worker_pb2.WorkerChoiceFinish) -> None:
    tokens.choice = finish.choice = 0
    record = OutputRecord(1, 10, ())
    assert record.note(worker_pb2.WorkerGenerateResponse(tokens=tokens))
    assert record.note(worker_pb2.WorkerGenerateResponse(finish=finish))
    assert record.is_over


@pytest.mark.parametrize(
    "message",
    [
        wire.Challenge(1, b"n", b"p"),
        wire.Pull(1, b"i" * 16, 3, 1.5, "", "r"),
        wire.Blocks(1, 0, 7, [b"h"], ["ram"]),
        wire.PullEnd(1, 1, ""),
        wire.Offer(1, [b"h"], 3, 1.5, ""),
        wire.Accept(1, 0, 1, 7),
        wire.Lent(1, 0, [b"h"], ["ram"], [(0, 0, 1)], 1.0),
        wire.WasRead(b"i" * 16, 0.1, "", "r"),
        wire.Welcome(),
    ],
)
def test_messages_of_transfers_may_grow_at_the_end(message: wire.AnyControl) -> None:
    fields = msgspec.msgpack.decode(wire.encode(message)[4:])
    body = msgspec.msgpack.encode([*fields, "later", 7])
    assert wire.decode(struct.pack("<I", len(body)) + body) == message


@given(st.lists(st.integers(-9, 9) | st.text() | st.binary(), max_size=5))
def test_unknown_messages_of_transfers_end_the_connection_alone(fields: list[object]) -> None:
    body = msgspec.msgpack.encode(["Later", *fields])
    with pytest.raises(ProtocolViolation):
        wire.decode(struct.pack("<I", len(body)) + body)


@given(st.integers(PART_VERSION + 1, 2**16 - 1))
def test_a_block_with_a_later_header_is_a_miss(version: int) -> None:
    encoded = bytearray(header(chain(1), 0, bytes(192 * 64)))
    struct.pack_into("<H", encoded, 4, version)
    struct.pack_into("<Q", encoded, len(encoded) - 8, xxh3_64_intdigest(bytes(encoded[:-8])))
    with pytest.raises(BlockInvalid, match="version"):
        decode_header(bytes(encoded))


def test_segments_of_a_later_format_are_discarded_and_the_others_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = SegmentDirectory(tmp_path)
    for sequence in (1, 2, 3):
        directory.create(sequence, 2**16).close()
    page = bytearray(encode_segment_header(SegmentHeader(2, 2**16)))
    struct.pack_into("<I", page, 8, FORMAT_VERSION + 1)
    with (tmp_path / "segment-0000000002.kv").open("r+b") as file:
        file.write(page)
    assert [segment.header.sequence for segment in directory.existing()] == [1, 3]
    assert f"format {FORMAT_VERSION + 1}" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("*.kv")) == ["segment-0000000001.kv", "segment-0000000003.kv"]
    directory.close()


def test_news_may_grow_and_what_is_not_news_is_not_understood() -> None:
    news = GrantedNews(WorkerId("a"), 1, AttemptId("r", 1), PendingAttempt(100, 7, 0.0))
    router, (fields,) = msgspec.msgpack.decode(msgspec.msgpack.encode(Bulletin("r", [news])))
    fields[4]["later"] = 1
    decoder = msgspec.msgpack.Decoder(Bulletin)
    assert decoder.decode(msgspec.msgpack.encode([router, [[*fields, "later"]], "later"])) == Bulletin("r", [news])
    with pytest.raises(msgspec.DecodeError):
        decoder.decode(msgspec.msgpack.encode([router, [["later", 1]]]))


@given(st.binary(max_size=20), st.sampled_from(["model/m", "worker/w", "pool/p"]))
def test_operators_entries_that_cannot_be_read_are_kept_and_do_not_apply(payload: bytes, key: str) -> None:
    table, found = ControlTable(), {key: Entry(5, payload), "model/n": Entry(6, b'{"weights":{"d":1},"later":[1]}')}
    assert table.replace(found)
    assert table.entries == found
    assert table.model("n").weights == {"d": 1}
    assert table.beyond({}, {}, 6).keys() == found.keys()


@given(st.integers(len(Tier), 255))
def test_blocks_in_a_tier_of_a_later_release_are_placed_by_somehow(tier: int) -> None:
    scene, ids = Scene(), chain(8)
    scene.worker("a")
    scene.worker("b")
    scene.hold("worker/b", ids, tier)  # type: ignore[arg-type]
    assert isinstance(scene.place(scene.ask(ids)), Placement)


def test_every_key_says_its_format() -> None:
    space = KeySpace()
    keys = [
        *dataclasses.astuple(space.registry())[:3], space.registry().record("w"), *dataclasses.astuple(space.control()),
        *dataclasses.astuple(space.generations()), *dataclasses.astuple(space.quota(b"t")), space.request("r"),
        space.artifacts().readers, space.artifacts().holders("d"), space.news, space.shard(1).members,
        space.shard(1).changes, space.shard(1).meta("w"), space.shard(1).blocks("w"), space.shard(1).stage("w"),
    ]  # fmt: skip
    assert [key for key in keys if f"}}:{FORMAT}:" not in key] == []
