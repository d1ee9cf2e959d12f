"""What the drafts of one sequence are made from; it lives as long as the sequence. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.draft_pace import DraftPace
from services.worker.prompt_lookup import PromptLookup


@dataclass(slots=True)
class Drafting:
    """Where to look for guesses, and how many to make."""

    lookup: PromptLookup
    pace: DraftPace = field(default_factory=DraftPace)
