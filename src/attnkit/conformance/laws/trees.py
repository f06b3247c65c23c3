"""The law of trees: a token of a tree answers as the last of its path.

In: a `Subject`. Out: as of any law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attnkit.conformance.checks import judge, run_and_judge
from attnkit.conformance.laws.law import base_case, claimed
from attnkit.conformance.subject import Result, Subject


def a_tree_is_its_paths(subject: Subject) -> None:
    """A token of a tree answers as the last of its path: the context, what it follows, itself. A tree
    that does not branch answers as a plain chunk."""
    base = base_case(subject, tree=True)
    for layer, case in claimed(subject, base):
        inputs = subject.inputs(layer, case)
        tree, _ = run_and_judge(subject, layer, inputs)
        row = 0
        for request, whole in enumerate(inputs.sequences):
            context = len(whole.k) - len(whole.q)
            plain = replace(whole.meaning, parents=None)
            for token, _ in enumerate(case.parents_of(request)):
                path = _path(case.parents_of(request), token)
                keys = [*range(context), *(context + i for i in path)]
                one = replace(
                    whole, q=whole.q[path[-1:]], k=whole.k[keys], v=whole.v[keys], meaning=plain
                )
                rows = slice(row + token, row + token + 1)
                lse = None if tree.lse is None else tree.lse[rows]
                judge((one,), Result(out=tree.out[rows], lse=lse))
            row += len(whole.q)
        words = inputs.batch.tree_mask
        assert words is not None
        chains = [(2 << i) - 1 for n in case.query_lens for i in range(n)]
        again = subject.inputs(layer, case)
        batch = again.batch.replace(tree_mask=torch.tensor(chains, device=words.device))
        plain_sequences = tuple(
            replace(s, meaning=replace(s.meaning, parents=None, causal=True))
            for s in again.sequences
        )
        judge(plain_sequences, subject.run(layer, again, batch=batch))


def _path(parents: Sequence[int], token: int) -> list[int]:
    """What a token of a tree follows, first to last, and itself."""
    path = [token]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path
