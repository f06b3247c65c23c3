"""What PTX says of a compiled kernel that its numbers do not.

In: the text. Out: `unset_halves`.
"""

from __future__ import annotations

import re

_DECLARED = re.compile(r"\.reg\s+\.[bsu]16\s+(%\w+)<")
_INSTRUCTION = re.compile(r"(?:@!?%\w+\s+)?([a-z]\w*)(?:[.:]+\w+)*\s+(.+)")


def unset_halves(ptx: str) -> set[str]:
    """Registers of 16 bits that are read and that nothing writes.

    A compiler makes them for halves of a pair that nobody needs. ptxas 12.8 and 12.9 then took another
    register for the half that is needed: a kernel with any of them can be wrong.
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
        name, operands = found.groups()
        if name in ("st", "red"):
            result, rest = "", operands
        else:
            result, _, rest = operands.partition("}" if operands.startswith("{") else ",")
        written.update(register.findall(result))
        read.update(register.findall(rest))
    return read - written
