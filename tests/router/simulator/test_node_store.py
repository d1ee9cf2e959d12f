"""The simulated kvstore node against its invariants."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.announcements import Tier
from services.common.blocks import BlockId
from services.router.simulator.node_store import NodeStore
from tests.router.simulator.scenes import block_ids

# Documents that branch: a common beginning, then one's own; each use is of so many leading blocks.
USES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 14)), min_size=1, max_size=60)


def chain(document: int, branch: int, count: int) -> tuple[BlockId, ...]:
    return (*block_ids(document, 4), *block_ids(100 + 10 * document + branch, 10))[:count]


@given(USES, st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=100)
def test_both_tiers_stay_prefix_closed_and_what_is_announced_is_there(
    uses: list[tuple[int, int, int]], ram_blocks: int, ssd_blocks: int
) -> None:
    store = NodeStore(ram_blocks, ssd_blocks)
    announced: dict[BlockId, Tier] = {}
    for document, branch, count in uses:
        store.use(chain(document, branch, count))
        present, gone = store.take_changes()
        announced.update(present)
        for block_id in gone:
            announced.pop(block_id, None)
        in_ram, on_ssd = store.counts
        assert in_ram <= ram_blocks
        assert on_ssd <= ssd_blocks
        assert len(announced) == in_ram + on_ssd
        for other in range(4):
            for fork in range(5):
                ids = chain(other, fork, 14)
                end, ram_end = store.match(ids)
                tiers = [announced.get(block_id) for block_id in ids]
                assert tiers == [Tier.RAM] * ram_end + [Tier.SSD] * (end - ram_end) + [None] * (14 - end)


def test_the_least_recently_used_goes_down_a_tier_and_comes_back_when_it_is_used() -> None:
    store = NodeStore(6, 4)
    old, new = block_ids(1, 4), block_ids(2, 4)
    store.use(old)
    store.use(new)
    assert (store.match(old), store.match(new)) == ((4, 2), (4, 4))
    store.use(old)
    assert (store.match(old), store.match(new)) == ((4, 4), (4, 2))
    store.use(block_ids(3, 6))
    assert (store.match(old), store.match(new)) == ((4, 0), (0, 0))
