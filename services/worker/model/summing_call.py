"""Seam.sum as a function that compiled code calls in the midst of its pass. An error ends the pass and waits here."""

from __future__ import annotations

from ctypes import c_float

import torch

from kernels.cpu.structs import SumOverRanks
from services.worker.model.seam import Seam


class SummingCall:
    """`function` is called by address: keep this object for as long."""

    def __init__(self, seam: Seam) -> None:
        self._seam = seam
        self._error: Exception | None = None
        self.function = SumOverRanks(self._sum)

    def error(self) -> Exception:
        """What ended the last pass."""
        error, self._error = self._error, None
        return error or RuntimeError("the compiled pass was given up for no reason that is known")

    def _sum(self, address: int, count: int) -> int:
        try:
            self._seam.sum(torch.frombuffer((c_float * count).from_address(address), dtype=torch.float32))
        except Exception as error:
            self._error = error
            return -1
        return 0
