"""What PTX says of a compiled kernel that its numbers do not.

In: the text. Out: `unset_registers`.
"""

from __future__ import annotations

import re

_DECLARED = re.compile(r"\.reg\s+\.\w+\s+(%\w+)<")
_INSTRUCTION = re.compile(r"(?:@!?(%\w+)\s+)?([a-z]\w*)((?:[.:]+\w+)*)\s+(.+)", re.DOTALL)
_WITHOUT_RESULT = {
    "bar", "barrier", "bra", "call", "cp", "fence", "griddepcontrol", "mbarrier", "membar", "nanosleep",
    "prefetch", "red", "setmaxnreg", "st", "trap", "wgmma",
}  # fmt: skip
"""Instructions whose first operand is read; of `wgmma` it is written too, of `mbarrier` at times."""


def unset_registers(ptx: str) -> set[str]:
    """Registers that are read and that nothing writes.

    A compiler makes them for halves of vectors that nobody needs. ptxas 12.8 and 12.9 may then take
    another register for the half that is needed: a kernel with any of them can be wrong.
    """
    kinds = {re.escape(kind) for kind in _DECLARED.findall(ptx)}
    if not kinds:
        return set()
    register = re.compile(rf"(?:{'|'.join(kinds)})\d+\b")
    read: set[str] = set()
    written: set[str] = set()
    for text in re.split(r"[;\n]", re.sub(r"//.*", "", ptx)):
        found = _INSTRUCTION.match(text.strip().lstrip("{ \t"))
        if found is None:
            continue
        predicate, name, _, operands = found.groups()
        if predicate:
            read.add(predicate)
        if name in _WITHOUT_RESULT:
            result, rest = "", operands
            if name in ("wgmma", "mbarrier"):
                written.update(register.findall(operands))
        elif operands.startswith("{"):
            result, _, rest = operands.partition("}")
        else:
            result, _, rest = operands.partition(",")
        written.update(register.findall(result))
        read.update(register.findall(rest))
    return {r for r in read if register.fullmatch(r)} - written
