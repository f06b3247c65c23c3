"""The cpu backend: paged attention on the host processor.

In: the contract's batch and tensors on the CPU. Out: attention. `backend` is the host side, `plan`
its metadata; it runs `attend.c` (built on first use by `native`, called through `launch`), or
`attend` in plain torch where no C compiler is.
"""
