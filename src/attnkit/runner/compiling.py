"""torch.compile for a model whose attention is ours: what it shall do, and what it need not check.

In: a transformers model. Out: the model, compiled at its next step; and a context for its steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch._dynamo import config as dynamo
from torch.fx.experimental import _config

from attnkit.runner.join import JoinLinears

_VALUE_GUARDS = frozenset({"CONSTANT_MATCH", "EQUALS_MATCH", "TENSOR_MATCH"})


def compile_model(model: Any) -> None:
    """Let torch.compile fuse what lies between weights and attention, from the next step on."""
    options = {"guard_filter_fn": _worth_checking, "post_grad_custom_pre_pass": JoinLinears()}
    model.compile(dynamic=True, options=options)


@contextmanager
def compiling() -> Iterator[None]:
    """Around each step: what torch.compile does where it is the first of its kind."""
    # Not as options of torch.compile: its front end reads them itself, when a graph is traced.
    shapes: Any = _config  # its `patch` is put there at run time

    # Numbers of the model (a scale, an epsilon) are constants: as inputs they had everything traced
    # twice. And a graph for many tokens serves one token too.
    with (
        dynamo.patch(specialize_float=True),
        shapes.patch(backed_size_oblivious=True, use_duck_shape=False),
    ):
        yield


def _worth_checking(guards: Sequence[Any]) -> list[bool]:
    """Which of its conditions compiled code checks before each step.

    While a model runs here its modules and hooks stay as they are; asking all of them took 2 ms a step
    of 30 layers. Numbers they hold may change (RoPE that follows the lengths), so these are asked.
    """
    return [
        g.guard_type in _VALUE_GUARDS or not g.orig_guard.source.is_unspecialized_nn_module()
        for g in guards
    ]
