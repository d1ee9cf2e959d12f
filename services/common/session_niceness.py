"""The niceness of a session: how its processes stand against those of other sessions for the processor (Linux).

Where the kernel shares the processor among sessions first ("autogroups", sched(7)), nice(2) counts within one alone,
and this counts between them. Unlike nice(2) it may be taken back without a privilege.
"""

from __future__ import annotations

import errno
import time
from pathlib import Path

_AUTOGROUP = "/proc/{}/autogroup"
# Without a privilege one may ask ten times a second, all processes of the machine together.
_TRIES = 20
_RETRY_S = 0.1


def set_session_niceness(niceness: int, pid: int | None = None) -> bool:
    """Of a process's session, or this one's, -20 to 19; False where that is not possible. Blocks for 2 s at most."""
    file = Path(_AUTOGROUP.format("self" if pid is None else pid))
    for _ in range(_TRIES):
        try:
            file.write_text(str(niceness))
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return False
            time.sleep(_RETRY_S)
        else:
            return True
    return False
