"""Triton backend: portable GPU kernels over the paged cache; on a CPU they run in Triton's interpreter.

Host: backend (capabilities), impl, plan (metadata builder), operands, launch, configs. Device: tile
(shared parts), attention, decode, write. Importing the host files does not need Triton; `launch` and
the device files do.
"""
