"""What `kvmesh ctl kv stats` makes of a node's answer."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor
from kvmesh.v1 import kvstore_pb2

from services.cli.commands.kv_figures import flat_fields, table

_PULLS = kvstore_pb2.TierPulls(tier="ram", pulls=3, p50_s=0.00025, p99_s=0.004)
PLAIN = kvstore_pb2.StatsResponse(kvstore_id="kv-1", ram_bytes=3 * 2**20, ram_capacity_bytes=2**30, pulls=[_PULLS])
WITH_SSD = kvstore_pb2.StatsResponse(
    kvstore_id="kv-2", hit_blocks=9, ssd_hit_blocks=2, ssd=kvstore_pb2.SsdStats(state="on", blocks=7)
)


def test_a_line_for_each_figure_and_a_column_for_each_node() -> None:
    lines = {str(line[""]): line for line in table([PLAIN, WITH_SSD])}
    assert all(list(line) == ["", "kv-1", "kv-2"] for line in lines.values())
    assert lines["RAM used"]["kv-1"] == "3.0 MiB of 1.0 GiB"
    assert (lines["RAM hits, blocks"]["kv-2"], lines["SSD hits, blocks"]["kv-2"]) == (7, 2)
    assert (lines["SSD state"]["kv-1"], lines["SSD state"]["kv-2"]) == ("-", "on")
    assert lines["SSD encryption"]["kv-2"] == "OFF"
    assert (lines["pull from RAM, p50"]["kv-1"], lines["pull from RAM, p50"]["kv-2"]) == ("0.25 ms", "-")


def test_programs_get_every_field() -> None:
    fields = flat_fields(WITH_SSD)
    assert fields["ssd_blocks"] == "7"
    assert fields["ssd_encrypted"] is False
    assert fields["replication_asked_copies"] == "0"
    assert flat_fields(PLAIN)["pulls_ram_p99_s"] == 0.004
    assert "ssd_blocks" not in flat_fields(PLAIN)
    plain = [
        field.name
        for field in kvstore_pb2.StatsResponse.DESCRIPTOR.fields
        if field.type != FieldDescriptor.TYPE_MESSAGE
    ]
    assert set(plain) <= set(fields)
