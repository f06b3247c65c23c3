"""The paged KV cache: memory (`pool`), strides (`layout`), writes (`write`), block ids (`blocks`)
and which layers share a block table (`groups`)."""
