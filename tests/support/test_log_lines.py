from __future__ import annotations

from tests.support.log_lines import log_events

LOG = 'not JSON\n{"event": "one"}\n{"event": "two"}\n'


def test_a_log_can_be_read_after_every_byte_of_it() -> None:
    counts = [len(log_events(LOG[:size])) for size in range(len(LOG) + 1)]
    assert counts == sorted(counts)
    assert counts[-1] == 2
    assert log_events(LOG, containing="two") == [{"event": "two"}]
