"""Which release of KVMesh a process runs, and what it understands of what processes say to each other.

Two neighbouring releases run in one mesh (docs/versions.md). A message may get fields that older processes ignore; what
they must not ignore is sent only to those who say that they understand it.
"""

from __future__ import annotations

RELEASE = "0.2.0"
# What a worker does of a request, told in its identity and with each admission; one that tells nothing does the first.
# Raise it with a field of WorkerGenerateRequest that changes the answer, and name the new level below.
FIRST_PROTOCOL, GRAMMAR_PROTOCOL, ADAPTER_PROTOCOL, SCORE_PROTOCOL = 1, 2, 3, 4
PROTOCOL = SCORE_PROTOCOL
