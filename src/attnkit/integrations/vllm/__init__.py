"""attnkit's backends inside an unmodified vLLM, as a plugin.

In: vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). Out: vLLM's
names for foreign backends lead to ours. On a GPU that is CUSTOM, which users ask for. On a CPU vLLM
ignores every name and takes its own, CPU_ATTN or for latents CPU_MLA and AMX_MLA, so there the bridge
answers for these, and only where ATTNKIT_VLLM says so: being installed must not change a server.

The contract is that of vLLM 0.31. What differs in the supported versions, and what `backend` does:

    item                                 0.31      0.32      0.33        here
    use_cascade_attention (builder)      asked     gone      gone        answers no
    common_prefix_len (build)            real      real      always 0    handed on; ours do not need it
    set_kernel_block_size (builder)      called    gone      gone        ignored: the spec has the size
    do_kv_cache_update(skip_scale)       -         -         passed      taken; plain formats have none
    reserve_workspace (impl)             -         -         called      nothing to reserve
    set_interleaved_v_cache (impl)       -         -         asked       answers no: K, then V
    supports_kv_cache_update_bypass      -         -         asked       its default, no
    builder's constructor                4 values  4         + keywords  keywords taken
    MultipleOf, KVCacheLayout, graph levels: types of vLLM's own         made by value and by name
    sinks: a parameter, loaded after the impl was made                   read again with the weights
    on a CPU nobody asks validate_configuration                          the impl asks, and raises
"""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

from attnkit.contract import AttentionBackend
from attnkit.errors import UnknownBackend
from attnkit.selection import resolve

OLDEST, NEWEST = (0, 31), (0, 33)
ENV_VLLM = "ATTNKIT_VLLM"
_DENSE = "attnkit.integrations.vllm.backend.VllmBackend"
_LATENTS = "attnkit.integrations.vllm.latents.VllmLatentBackend"


def register() -> None:
    """Tell vLLM where our backend is; may be called many times.

    The environment variable ATTNKIT_VLLM names the backend of attnkit to use, a dense one or one over
    latents. Unset, a GPU's CUSTOM is triton and a CPU keeps vLLM's own.
    """
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.v1.attention.backends.registry import (  # pyright: ignore[reportMissingImports]
        AttentionBackendEnum,
        register_backend,
    )

    wanted = os.environ.get(ENV_VLLM)
    if current_platform.is_cpu() and not wanted:
        return
    if wanted:
        check_version(vllm.__version__)  # pyright: ignore[reportAttributeAccessIssue]
    names: Any = AttentionBackendEnum
    if current_platform.is_cpu():
        # Both: layers of the kind that was not named are refused, not served by vLLM in silence.
        register_backend(names.CPU_ATTN, _DENSE)
        register_backend(names.CPU_MLA, _LATENTS)
        register_backend(names.AMX_MLA, _LATENTS)
    else:
        latents = (
            bool(wanted) and wanted_backend(wanted).is_mla()
        )  # Unasked, nothing of ours is imported.
        register_backend(names.CUSTOM, _LATENTS if latents else _DENSE)


def wanted_backend(name: str) -> type[AttentionBackend]:
    """The class that ATTNKIT_VLLM names.

    Raises:
        UnknownBackend: nothing has this name.
        BackendUnavailable: a library it needs is not installed.
    """
    try:
        return resolve(name)
    except UnknownBackend as unknown:
        raise UnknownBackend(f"{ENV_VLLM}={name} is not allowed: {unknown}") from unknown


def check_version(version: str) -> None:
    """Warn where `version` is outside of the tested range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
        warnings.warn(
            f"attnkit's bridge was made for vLLM {oldest} to {newest}, and this is {version}: check its "
            "output, or install a version of that range",
            RuntimeWarning,
            stacklevel=2,
        )
