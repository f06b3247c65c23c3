"""Wrappers: backends made from any backend by changing the batch before it plans, never a kernel.

chunked_local   queries see the keys of their own chunk (position // chunk size)
"""

from attnkit.backends.wrappers.chunked import check_chunk_size, chunked_local

__all__ = ["check_chunk_size", "chunked_local"]
