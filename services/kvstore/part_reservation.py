"""Room for the parts that one rank offers, from the push until they are verified and what they complete is in RAM."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.kvstore.errors import PartRefused
from services.kvstore.partials import Claim, PartialBlocks
from services.kvstore.ram_tier import RamTier
from services.kvstore.reservations import Kept, Offered, Overtaken, find_faults, hold_anchor


class PartReservation:
    """The same heads of successive blocks. `refused` is told why an offer is cut, and how many blocks that costs."""

    def __init__(
        self,
        ram: RamTier,
        partials: PartialBlocks,
        offered: Sequence[Offered],
        kept: Kept,
        overtaken: Overtaken,
        refused: Callable[[int, str], None],
        *,
        now_s: float,
        created_s: int,
    ) -> None:
        self._ram = ram
        self._partials = partials
        self._kept = kept
        self._overtaken = overtaken
        self._created_s = created_s
        self.num_held = next((i for i, part in enumerate(offered) if not partials.holds(part.header)), len(offered))
        self._anchor = hold_anchor(ram, offered, self.num_held)
        self._claims: list[Claim] = []
        try:
            self._claim(offered, now_s)
        except PartRefused as error:
            refused(len(offered) - self.num_held - len(self._claims), error.reason)
        self._offered = offered[self.num_held : self.num_held + len(self._claims)]
        self.buffers = [partials.memory(claim) for claim in self._claims]

    async def commit(self) -> int:
        """As `Reservation.commit`: how many leading blocks have this rank's heads here."""
        try:
            faults = await find_faults(self._offered, self.buffers)
            if self._overtaken(self._offered):
                return 0
            return self.num_held + self._accept(faults)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """As `Reservation.abandon`; also gives up the claims that `commit` did not use."""
        for claim in reversed(self._claims):
            self._partials.release(claim)
        self._claims.clear()
        if self._anchor is not None:
            self._ram.release([self._anchor])
            self._anchor = None

    def _claim(self, offered: Sequence[Offered], now_s: float) -> None:
        """Claim the parts after those that are held, as far as they hang together. Raises PartRefused for the rest."""
        for i in range(self.num_held, len(offered)):
            header = offered[i].header
            if i and (header.starts_chain or header.parent_id != offered[i - 1].header.block_id):
                raise PartRefused("no parent or no room")
            if i == self.num_held and not self._partials.has_under(header):
                raise PartRefused("no parent or no room")
            self._claims.append(self._partials.claim(header, now_s))

    def _accept(self, faults: Sequence[str]) -> int:
        """Keep up to the first bad part, and hand over what is whole then. Returns how many parts are held."""
        whole: list[Offered] = []
        held = 0
        for fault in faults:
            claim = self._claims[0]
            if fault or not self._partials.accept(claim):
                break
            self._claims.pop(0)
            held += 1
            if (block := self._partials.complete(claim.header.block_id, self._created_s)) is not None:
                whole.append(block)
        self._kept(whole, [fault for fault in faults if fault])
        return held
