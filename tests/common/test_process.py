"""What a process does about itself."""

from __future__ import annotations

import subprocess
import sys

_SPARED = """
import gc, weakref
from services.common.process import spare_collections

class Node:
    pass

made_before = Node()
spare_collections()
made_after = Node()
made_after.me = made_after
watched = weakref.ref(made_after)
seen = {id(one) for one in gc.get_objects()}
assert id(made_before) not in seen and id(made_after) in seen
del made_after
assert watched() is not None
gc.collect()
assert watched() is None
"""


def test_a_served_process_looks_only_through_what_came_later_for_cycles() -> None:
    # In a process of its own, since this one's collector is not to be changed.
    subprocess.run([sys.executable, "-c", _SPARED], check=True, timeout=30)
