"""HiSparseCache: a hot set of rows on the device, for latents whose pages stay in host memory.

In: the cache on the host, and the rows that a step's queries were told (`ChosenRows`). Out: these
rows as pages of one token on the device, and a block table over them. Rows that are hot already are not
moved again; where there is no room, those go that were not wanted for the longest time. Attention over
the hot set is to the bit attention over the pages themselves, and every move is counted.

Which rows are hot is known on the host, so a step waits for its lists, and is not captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnkit.arguments import check_count
from attnkit.contract import DeviceCapability
from attnkit.errors import CacheError
from attnkit.mla.sparse import ChosenRows


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What has happened since the cache was made.

    Attributes:
        hits: different rows of a step that were hot already.
        moved: rows that were copied to the device.
        moved_bytes: of them.
    """

    hits: int = 0
    moved: int = 0
    moved_bytes: int = 0


class HiSparseCache:
    """The hot rows of one layer; set as `hisparse_cache` of its impl before the first step.

    Attributes:
        num_rows: rows that are hot at most; as many as all lists of a step name differently.
        traffic: counted moves.
    """

    def __init__(self, num_rows: int, *, device: torch.device | str = "cpu") -> None:
        """
        Args:
            num_rows: at least 1; one list per query of a decode step, and some to keep, are useful.
            device: where attention runs.

        Raises:
            ConfigurationError: num_rows is no whole number of at least 1, or there is no such device.
        """
        check_count("num_rows", num_rows)
        DeviceCapability.of(device)
        self.num_rows, self.device, self.traffic = num_rows, torch.device(device), Traffic()
        self._hot: torch.Tensor | None = None
        self._place_of = torch.empty(0, dtype=torch.int64)  # of a row of the host: -1 or its place
        self._row_at = torch.full((num_rows,), -1)
        self._last_step = torch.zeros(num_rows, dtype=torch.int64)
        self._step = 0

    def forget(self, slot_mapping: torch.Tensor) -> None:
        """These slots are written anew: what is hot of them is stale."""
        slots = slot_mapping.cpu()
        slots = slots[(slots >= 0) & (slots < len(self._place_of))]
        places = self._place_of[slots]
        self._row_at[places[places >= 0]] = -1
        self._last_step[places[places >= 0]] = 0
        self._place_of[slots] = -1

    def pages_of(
        self, cache: torch.Tensor, chosen: ChosenRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `ChosenRows.pages_of`, on the device.

        Args:
            cache: (num_blocks, block_size, C), on the host; the same in every step.
            chosen: of the step.

        Raises:
            CacheError: the step names more rows than may be hot; nothing was moved.
        """
        num_blocks, block_size, size = cache.shape
        if self._hot is None:
            self._hot = torch.zeros(self.num_rows, 1, size, dtype=cache.dtype, device=self.device)
            self._place_of = torch.full((num_blocks * block_size,), -1)
        rows = (chosen.blocks * block_size + chosen.offsets).cpu()
        named = torch.arange(rows.shape[1]) < chosen.num_chosen.cpu()[:, None]
        wanted = rows[named].unique()
        if len(wanted) > self.num_rows:
            raise CacheError(
                f"the step attends to {len(wanted)} different rows and {self.num_rows} may be hot; make "
                "the HiSparseCache larger, or the step smaller"
            )
        self._step += 1
        places = self._place_of[wanted]
        is_hot = places >= 0
        self._last_step[places[is_hot]] = self._step
        self._bring(cache, wanted[~is_hot])
        self.traffic.hits += int(is_hot.sum())
        table = torch.where(named, self._place_of[rows], 0)
        return self._hot, table.int().to(self.device)

    def _bring(self, cache: torch.Tensor, missing: torch.Tensor) -> None:
        """Copy rows in place of those that were not wanted for the longest time; this step's are the
        newest, and there is room for all of them."""
        assert self._hot is not None
        places = self._last_step.argsort(stable=True)[: len(missing)]
        evicted = self._row_at[places]
        self._place_of[evicted[evicted >= 0]] = -1
        self._row_at[places], self._place_of[missing] = missing, places
        self._last_step[places] = self._step
        # As bytes, since not every operation knows every 8-bit dtype.
        source, hot = cache.view(torch.uint8), self._hot.view(torch.uint8)
        block_size = cache.shape[1]
        moved = source[missing // block_size, missing % block_size].to(self.device)
        hot[places.to(self.device), 0] = moved
        self.traffic.moved += len(missing)
        self.traffic.moved_bytes += moved.numel()
