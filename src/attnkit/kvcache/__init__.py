"""The paged KV cache: memory (`pool`), strides (`layout`), reads and writes in torch (`read`, `write`),
block ids (`blocks`) and which layers share a block table (`groups`)."""
