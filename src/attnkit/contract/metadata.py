"""CommonAttentionMetadata: one batch as tensors, the same for every layer and backend.

In: whoever schedules (the runner, an engine, `attnkit.make_batch`) builds one per step and KV cache
group. Out: each `AttentionMetadataBuilder.build` turns it into its backend's own plan. Nobody
writes into it after it is built; builders that need changed fields call `replace`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from dataclasses import replace as _dataclass_replace
from typing import Any

import numpy as np
import torch

from attnkit.contract.spans import check_prefix_lens, spans_of_tokens
from attnkit.contract.tree import check_tree_words
from attnkit.errors import BatchError

_CACHES = (
    "_num_computed_tokens_cache",
    "_token_to_req_indices_cache",
    "_mm_token_spans_cache",
)

_PER_REQ = (
    "seq_lens",
    "block_table_tensor",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu_upper_bound",
    "seq_lens_cpu_upper_bound",
    "is_prefilling",
    "req_idx",
    "rswa_prefix_lens",
    "replayssm_decode_base_cpu",
    "freed_cpu",
)


class AttentionMetadata:
    """Optional base for a backend's own metadata class; it asks nothing.

    A plan may be of any class. If the backend leaves the cache write to the layer
    (`forward_includes_kv_cache_update = False`), the plan must have a `slot_mapping` attribute. A plan
    with a `block_size` attribute, the batch's, is refused by layers of another one.
    """


@dataclass
class CommonAttentionMetadata:
    """One batch. R requests, T tokens; tensors named without suffix live on the device.

    A row with query length 0 is padding: it has `seq_lens` 0, a block-table row of zeros and no
    tokens. Tokens at and past `query_start_loc[-1]` are padding: their slot is -1.
    """

    query_start_loc: torch.Tensor
    """int32 (R + 1,): request r owns tokens query_start_loc[r] to query_start_loc[r + 1]."""
    query_start_loc_cpu: torch.Tensor
    """The same on the host. Totals always agree; single rows may differ from the device's under
    adaptive verification (see `supports_device_cpu_query_lens_mismatch`)."""

    seq_lens: torch.Tensor
    """int32 (R,): all tokens of a request including this step's; its context is seq_len - query_len."""

    num_reqs: int
    """Rows of the batch, padding rows included."""
    num_actual_tokens: int
    """Tokens to compute. May include padding when a captured graph is replayed, so the count of real
    tokens is query_start_loc_cpu[-1]."""
    max_query_len: int
    """Longest query, exact."""
    max_seq_len: int
    """Longest request; an upper bound is allowed, so use it for sizes, never for masks."""

    block_table_tensor: torch.Tensor
    """int32 (R, W): ids of the kernel blocks of a request in order; entries past its length are 0."""
    slot_mapping: torch.Tensor
    """int64 (T,): block id * block_size + offset where a token's K/V goes; -1: do not write."""

    causal: bool | torch.Tensor = True
    """False: queries see every key of their request. A bool tensor (R,) says it per request."""

    logits_indices_padded: torch.Tensor | None = None
    """int32 (P,): tokens whose logits are wanted, the last one repeated as padding. Fast prefill
    (layers that share another layer's cache compute only these) reads it; None: not armed."""
    num_logits_indices: int | None = None
    """How many of `logits_indices_padded` are real."""
    max_logits_per_req: int | None = None
    """Most wanted tokens of one request: fast prefill refuses a request with more. None: it counts."""

    encoder_seq_lens: torch.Tensor | None = None
    """int32 (R,): encoder tokens per request, for cross attention."""
    encoder_seq_lens_cpu: np.ndarray | None = None
    """The same on the host."""

    dcp_local_seq_lens: torch.Tensor | None = None
    """int32 (R,): this rank's share of `seq_lens` under decode context parallelism."""
    dcp_local_seq_lens_cpu_upper_bound: torch.Tensor | None = None
    """int32 (R,) host bound on the share of any rank, equal on all ranks, for padded gathers."""

    positions: torch.Tensor | None = None
    """int64 (T,): absolute positions, for builders whose plan depends on them; None if the caller
    has none at hand."""
    is_prefilling: torch.Tensor | None = None
    """bool (R,) host: the request has prompt tokens left, so a short query is a chunk, not a decode.
    Padding rows are False."""
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    """int32 (R,) host bound on `seq_lens`: exact for prefills, and for decodes unless drafts are in
    flight. For sizing and splitting, never for masks."""
    req_idx: np.ndarray | None = None
    """int (R,): which request of the engine a row belongs to. Equal neighbours are chunks of one
    request that share its context (prefill context parallelism)."""
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    """Row -> (start, end) absolute positions, both ends inside: a query in a range sees all keys of it,
    beside what it sees anyway. Ranges of a row do not overlap and lie inside its `seq_lens`. None: no
    such ranges."""
    rswa_prefix_lens: torch.Tensor | None = None
    """int32 (R,): keys below this are visible to all later tokens, others within the window. At most
    `seq_lens`. None: the model has no such attention."""
    replayssm_decode_base_cpu: torch.Tensor | None = None
    """int32 (R,) host: computed tokens at the last full state write of the current decode run, from
    which an SSM's replay ring counts."""
    tree_mask: torch.Tensor | None = field(default=None, kw_only=True)
    """int64 (T,): bit j of a token's word says that it sees its request's j-th token of this step,
    whatever `causal` says; the context before the step is seen by all. A request whose words are 0 is no
    tree. None: no request is."""
    block_size: int | None = field(default=None, kw_only=True)
    """Tokens in a block of `block_table_tensor` and `slot_mapping`; layers with others refuse the batch.
    None: whoever made it does not say."""
    freed_cpu: np.ndarray | None = field(default=None, kw_only=True)
    """int64 (R, 2): positions [start, end) of a request between which null blocks stand in its table,
    (0, 0) for none; layers that see one of them refuse the batch. None: there are none, or whoever made
    it does not say."""

    views: tuple[str, ...] = field(default=(), kw_only=True)
    """What wrappers show a builder in the place of an engine's batch, outermost first; layers of others
    refuse the plan. (): it is as an engine made it."""

    _num_computed_tokens_cache: torch.Tensor | None = None
    _token_to_req_indices_cache: torch.Tensor | None = None
    _mm_token_spans_cache: torch.Tensor | None = field(default=None, kw_only=True)

    def batch_size(self) -> int:
        """Rows of `seq_lens` (what tensors have, where `num_reqs` is what was said)."""
        return self.seq_lens.shape[0]

    def naive_query_lens(self) -> torch.Tensor:
        """int32 (R,): differences of `query_start_loc`, on the device.

        "Naive": it takes a query to end where the next begins, so padding between them counts.
        """
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    def replace(self, **kwargs: Any) -> CommonAttentionMetadata:
        """A copy with the named fields changed and derived caches dropped."""
        return _dataclass_replace(self, **{**dict.fromkeys(_CACHES), **kwargs})

    def compute_num_computed_tokens(self) -> torch.Tensor:
        """int32 (R,): tokens already in the cache, seq_lens - query_lens, on the device; cached."""
        if self._num_computed_tokens_cache is None:
            self._num_computed_tokens_cache = self.seq_lens - self.naive_query_lens()
        return self._num_computed_tokens_cache

    def token_to_req_indices(self, buffer: torch.Tensor) -> torch.Tensor:
        """Which row each token belongs to, from the device's own offsets; cached.

        Args:
            buffer: int32, at least max(T, real tokens) long, on the metadata's device. It is
                written and a view of it is returned, so that a captured graph reads one address.

        Returns:
            int32 (num_actual_tokens,). Rows without tokens own none; padding tokens map to row 0.
        """
        num_tokens = self.num_actual_tokens
        cached = self._token_to_req_indices_cache
        if cached is not None:
            assert cached.device == buffer.device, "token_to_req_indices: cached on another device"
            assert cached.dtype == torch.int32, "token_to_req_indices: cached in another dtype"
            assert cached.shape[0] >= num_tokens, "token_to_req_indices: cached for fewer tokens"
            return cached[:num_tokens]
        num_mapped = int(self.query_start_loc_cpu[-1])
        num_output = max(num_mapped, num_tokens)
        assert buffer.dtype == torch.int32, (
            f"token_to_req_indices: buffer is {buffer.dtype}, not int32"
        )
        assert buffer.shape[0] >= num_output, (
            f"token_to_req_indices: buffer holds {buffer.shape[0]} tokens, needs {num_output}"
        )
        tokens = torch.arange(num_mapped, device=buffer.device, dtype=torch.int32)
        # right=True steps over rows whose start equals their end, so rows without tokens own none.
        rows = torch.searchsorted(self.query_start_loc[1:].contiguous(), tokens, right=True)
        view = buffer[:num_output]
        view[:num_mapped] = rows.to(torch.int32)
        view[num_mapped:] = 0
        self._token_to_req_indices_cache = view
        return view[:num_tokens]

    def mm_token_spans(self) -> torch.Tensor | None:
        """`mm_req_doc_ranges` per token, on the device, checked; builders that do ranges call this.

        Returns:
            int32 (num_actual_tokens, 2): the token's range as keys [start, end); (2**30, 0) outside of
            any, so that the smaller start and the larger end of it and of the layer's own mask are what
            the token sees. None: no token of this step lies in a range, so none changes anything.

        Raises:
            BatchError: a range is reversed, overlaps another or is not inside its request; or host
                lengths are not known.
        """
        if not self.mm_req_doc_ranges:
            return None
        if self._mm_token_spans_cache is None:
            device = self.query_start_loc.device
            spans = spans_of_tokens(
                self.mm_req_doc_ranges,
                self.query_start_loc_cpu.tolist(),
                self.host_seq_lens("mm_req_doc_ranges").tolist(),
                max(self.num_actual_tokens, int(self.query_start_loc_cpu[-1])),
            )
            if spans is not None:
                self._mm_token_spans_cache = torch.from_numpy(spans).to(device, non_blocking=True)
        return self._mm_token_spans_cache

    def checked_rswa_prefix_lens(self) -> torch.Tensor | None:
        """`rswa_prefix_lens`, checked as far as that needs no wait for a device; builders that do R-SWA
        call this. Kernels count a prefix that is longer than the request as all of it.

        Raises:
            BatchError: its shape or dtype is another; or, on the host, a prefix is longer than its
                request or negative.
        """
        prefixes = self.rswa_prefix_lens
        if prefixes is None:
            return None
        if prefixes.shape != (self.num_reqs,) or prefixes.dtype != torch.int32:
            raise BatchError(
                f"rswa_prefix_lens is {prefixes.dtype} of shape {tuple(prefixes.shape)}; give "
                f"torch.int32 of shape ({self.num_reqs},)"
            )
        if prefixes.device.type == "cpu" and self.seq_lens.device.type == "cpu":
            check_prefix_lens(prefixes.tolist(), self.seq_lens[: self.num_reqs].tolist())
        return prefixes

    def checked_tree_mask(self) -> torch.Tensor | None:
        """`tree_mask`, checked as far as that needs no wait for a device; builders that do trees call
        this.

        Raises:
            BatchError: its shape or dtype is another; or, on the host, its words are no tree.
        """
        words = self.tree_mask
        if words is None:
            return None
        num_tokens = int(self.query_start_loc_cpu[-1])
        if words.dim() != 1 or words.shape[0] < num_tokens or words.dtype != torch.int64:
            raise BatchError(
                f"tree_mask is {words.dtype} of shape {tuple(words.shape)}; give torch.int64 of shape "
                f"({num_tokens},)"
            )
        if words.device.type == "cpu" and self.query_start_loc.device.type == "cpu":
            check_tree_words(words.numpy(), self.query_start_loc.numpy())
        return words.contiguous()

    def host_seq_lens(self, what: str) -> torch.Tensor:
        """int32 (R,): lengths on the host, exact for prefills, without waiting for a device.

        Args:
            what: needs them; for the error.

        Raises:
            BatchError: they are on a device only.
        """
        if self.seq_lens_cpu_upper_bound is not None:
            return self.seq_lens_cpu_upper_bound
        if self.seq_lens.device.type != "cpu":
            raise BatchError(
                f"{what} needs lengths on the host; set seq_lens_cpu_upper_bound of the batch"
            )
        return self.seq_lens

    def unpadded(self, num_actual_tokens: int, num_actual_reqs: int) -> CommonAttentionMetadata:
        """The first rows and tokens of a padded batch; every field a consumer may need is kept.

        Args:
            num_actual_tokens: tokens to keep.
            num_actual_reqs: rows to keep.
        """
        changed = self._of_requests(slice(0, num_actual_reqs))
        if self.positions is not None:
            changed["positions"] = self.positions[..., :num_actual_tokens]
        if self.tree_mask is not None:
            changed["tree_mask"] = self.tree_mask[:num_actual_tokens]
        return self.replace(
            query_start_loc=self.query_start_loc[: num_actual_reqs + 1],
            query_start_loc_cpu=self.query_start_loc_cpu[: num_actual_reqs + 1],
            slot_mapping=self.slot_mapping[:num_actual_tokens],
            num_reqs=num_actual_reqs,
            num_actual_tokens=num_actual_tokens,
            **changed,
        )

    def rows(self, first: int, end: int) -> CommonAttentionMetadata:
        """Rows first to end as a batch of their own, whose tokens count from the first one's.

        Padding behind the batch's last row stays with it. Which tokens are wanted
        (`logits_indices_padded`) is not handed on.

        Args:
            first: row.
            end: row, past the last.
        """
        starts = self.query_start_loc_cpu
        start_token, is_last = int(starts[first]), end == self.num_reqs
        end_token = self.num_actual_tokens if is_last else int(starts[end])
        tokens = slice(start_token, None if is_last else end_token)
        changed = self._of_requests(slice(first, end))
        if self.positions is not None:
            changed["positions"] = self.positions[..., tokens]
        if self.tree_mask is not None:
            changed["tree_mask"] = self.tree_mask[tokens]
        query_lens = starts[first : end + 1].diff()
        return self.replace(
            query_start_loc=self.query_start_loc[first : end + 1] - self.query_start_loc[first],
            query_start_loc_cpu=starts[first : end + 1] - starts[first],
            slot_mapping=self.slot_mapping[tokens],
            num_reqs=end - first,
            num_actual_tokens=end_token - start_token,
            max_query_len=int(query_lens.max()) if end > first else 0,
            logits_indices_padded=None,
            num_logits_indices=None,
            max_logits_per_req=None,
            **changed,
        )

    def _of_requests(self, rows: slice) -> dict[str, Any]:
        """Every per-request field that is there, cut to some rows."""
        changed: dict[str, Any] = {
            name: value[rows] for name in _PER_REQ if (value := getattr(self, name)) is not None
        }
        if isinstance(self.causal, torch.Tensor):
            changed["causal"] = self.causal[rows]
        if self.mm_req_doc_ranges is not None:
            changed["mm_req_doc_ranges"] = {
                row - rows.start: ranges
                for row, ranges in self.mm_req_doc_ranges.items()
                if rows.start <= row < rows.stop
            }
        return changed


COMMON_METADATA_FIELDS: tuple[str, ...] = tuple(
    f.name for f in fields(CommonAttentionMetadata) if not f.name.startswith("_")
)
"""Names of the public fields, for tools that compare or print a batch."""
