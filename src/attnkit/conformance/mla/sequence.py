"""LatentSequence: one request over latents as the judge sees it, and its float64 answer.

In: queries, latents and rotated parts as they are read back, and the weights that expand them. Out:
dense attention over keys and values of all heads, expanded in float64, and a budget. There are two
plain computations, expanded and absorbed; a backend may use either for any row, so the larger error of
the two sets the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attnkit.conformance.budget import Budget, budget_from, plain
from attnkit.conformance.oracle import Answer, Array, attend, visible
from attnkit.conformance.sequences import WholeSequence, float64


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSequence(WholeSequence):
    """k holds latents (kv_len, 1, kv_lora_rank), v rotated parts (kv_len, 1, qk_rope_head_dim).

    Attributes:
        weight: (num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank) in the layer's dtype.
    """

    weight: torch.Tensor

    def expected(self) -> tuple[Answer, Budget]:
        q, latents, rotated = float64(self.q), float64(self.k)[:, 0], float64(self.v)
        w_uk, w_uv = np.split(float64(self.weight), [self._nope], axis=1)
        k_nope = np.einsum("tl,hpl->thp", latents, w_uk)
        shared = np.broadcast_to(rotated, (*k_nope.shape[:2], rotated.shape[-1]))
        key = np.concatenate([k_nope, shared], axis=-1)
        value = np.einsum("tl,hvl->thv", latents, w_uv)
        answer = attend(q, key, value, self.meaning)
        # Keys are rounded where they are expanded, queries where they are absorbed.
        absorbed = np.einsum("qhp,hpl->qhl", q[..., : self._nope], w_uk)
        by_query = np.concatenate([absorbed, q[..., self._nope :]], axis=-1) ** 2
        row = np.concatenate([latents, rotated[:, 0]], axis=-1) ** 2
        norms = np.maximum(
            np.einsum("qhd,khd->qhk", q**2, key**2), np.einsum("qhd,kd->qhk", by_query, row)
        )
        keys, first = np.arange(len(row)), len(row) - len(q)
        seen = visible(first + np.arange(len(q)), keys, self.meaning)[:, None]
        factors = abs(self.meaning.scale) * np.sqrt(np.where(seen, norms, 0).max(-1, initial=0))
        runs = [self._expanded(), self._absorbed()]
        # Each latent becomes a value in a product, or what is attended to does, whose norm is no larger.
        products = np.sqrt(np.einsum("tl,hvl->thv", latents**2, w_uv**2))
        projected = attend(q, key, products, self.meaning).out
        return answer, budget_from(runs, answer, len(latents), self.q.dtype, factors, projected)

    @property
    def _nope(self) -> int:
        return self.q.shape[-1] - self.v.shape[-1]

    def _expanded(self) -> tuple[Array, Array]:
        """Keys and values rounded to the layer's dtype, then the plain formula."""
        dtype = self.q.dtype
        latents, rotated = self.k[:, 0].to(dtype), self.v.to(dtype)
        heads = torch.einsum("tl,hnl->thn", latents, self.weight)
        k_nope, value = heads[..., : self._nope], heads[..., self._nope :]
        key = torch.cat([k_nope, rotated.expand(-1, heads.shape[1], -1)], dim=-1)
        return plain(self.q, key, value, self.meaning, dtype)

    def _absorbed(self) -> tuple[Array, Array]:
        """Queries rounded to the layer's dtype, the plain formula over latents, values at the end."""
        dtype = self.q.dtype
        latents = self.k.to(dtype)
        q_nope, q_rotated = self.q[..., : self._nope], self.q[..., self._nope :]
        absorbed = torch.einsum("qhp,hpl->qhl", q_nope, self.weight[:, : self._nope])
        query = torch.cat([absorbed, q_rotated], dim=-1)
        row = torch.cat([latents, self.v.to(dtype)], dim=-1)
        attended, lse = plain(query, row, latents, self.meaning, dtype)
        values = self.weight[:, self._nope :]
        out = torch.einsum("qhl,hvl->qhv", torch.from_numpy(attended).to(dtype), values)
        return out.double().numpy(), lse
