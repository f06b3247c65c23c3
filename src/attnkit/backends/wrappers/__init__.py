"""Wrappers: backends made from any backend by changing the batch before it plans, never a kernel.

chunked_local(b)    queries see the keys of their own chunk (position // chunk size)
compressed(b)       of latents: a cached row stands for several tokens
cross_attention(b)  queries see the encoder's output, which is in the cache
encoder_only(b)     queries see all tokens of their request in this step
fast_prefill(b)     layers that share a cache compute only the tokens whose logits are wanted
hybrid(p, d)        prefills by one backend, decodes by another
"""

from attnkit.backends.wrappers.chunked import check_chunk_size, chunked_local
from attnkit.backends.wrappers.compressed import check_tokens_per_state, compressed
from attnkit.backends.wrappers.cross import cross_attention
from attnkit.backends.wrappers.encoder_only import encoder_only
from attnkit.backends.wrappers.fast_prefill import fast_prefill
from attnkit.backends.wrappers.hybrid import hybrid

__all__ = [
    "check_chunk_size",
    "check_tokens_per_state",
    "chunked_local",
    "compressed",
    "cross_attention",
    "encoder_only",
    "fast_prefill",
    "hybrid",
]
