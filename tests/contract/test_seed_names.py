"""Every name of vLLM's contract is here, parameters and defaults too, so a backend ports by an import.

`seed_names.json` holds two generations as facts: classes with attributes (name -> default) and methods
(kind, abstract, parameters as [name, kind, default]). Defaults are expressions of contract names.
Where the generations disagree, the current one holds.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from attnkit import contract

FACTS = json.loads(Path(__file__).with_name("seed_names.json").read_text())
GENERATIONS = ("current", "older")
KINDS = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def _classes(part: str) -> list[Any]:
    """(class, name, fact) of every attribute or method; an older fact only where it is the only one."""
    newer, rows = FACTS["current"]["classes"], []
    for generation in GENERATIONS:
        for class_name, facts in FACTS[generation]["classes"].items():
            for name, fact in facts[part].items():
                if generation == "older" and name in newer.get(class_name, {}).get(part, {}):
                    continue
                rows.append(pytest.param(class_name, name, fact, id=f"{class_name}.{name}"))
    return rows


def _value(expression: str) -> Any:
    return eval(expression, {"torch": torch, **vars(contract)})


def _parameters(function: Any, *, bound: bool) -> list[list[Any]]:
    parameters = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
    return [[p.name, KINDS[p.kind], p.default] for p in parameters]


def _expected(parameters: list[list[Any]]) -> list[list[Any]]:
    empty = inspect.Parameter.empty
    return [[name, kind, empty if d is None else _value(d)] for name, kind, d in parameters]


def test_both_generations_are_written_down() -> None:
    current, older = (set(FACTS[g]["classes"]) for g in GENERATIONS)
    assert len(current) == 8
    assert older - current == {"AttentionLayer", "AttentionMetadata"}
    assert sum(len(c["methods"]) for g in GENERATIONS for c in FACTS[g]["classes"].values()) > 80


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_class_and_function_is_exported(generation: str) -> None:
    names = [*FACTS[generation]["classes"], *FACTS[generation]["functions"]]
    assert [name for name in names if name not in contract.__all__] == []
    assert [name for name in names if not hasattr(contract, name)] == []


@pytest.mark.parametrize("class_name", FACTS["current"]["classes"])
def test_bases(class_name: str) -> None:
    bases = FACTS["current"]["classes"][class_name]["bases"]
    mro = {cls.__name__ for cls in getattr(contract, class_name).__mro__}
    assert set(bases) <= mro


@pytest.mark.parametrize(("class_name", "name", "default"), _classes("attributes"))
def test_attribute_and_default(class_name: str, name: str, default: str | None) -> None:
    cls = getattr(contract, class_name)
    if default is None:
        assert name in {key for base in cls.__mro__ for key in inspect.get_annotations(base)}
        assert not hasattr(cls, name)
    elif issubclass(cls, Enum):
        assert cls[name].value == _value(default)
    else:
        assert getattr(cls, name) == _value(default)
        assert type(getattr(cls, name)) is type(_value(default))


@pytest.mark.parametrize(("class_name", "name", "fact"), _classes("methods"))
def test_method_kind_and_parameters(class_name: str, name: str, fact: dict[str, Any]) -> None:
    found = inspect.getattr_static(getattr(contract, class_name), name)
    kind = type(found).__name__ if type(found).__name__ != "function" else "method"
    if name == "__new__":
        kind = "method"  # Python makes it static by itself.
    assert kind == fact["kind"]
    if kind == "property":
        return
    function = found if kind == "method" else getattr(found, "__func__", found)
    assert _parameters(function, bound=kind != "staticmethod") == _expected(fact["params"])


@pytest.mark.parametrize(("class_name", "name", "fact"), _classes("methods"))
def test_what_is_abstract(class_name: str, name: str, fact: dict[str, Any]) -> None:
    """What a current backend must define; an MLA impl may have the older `forward` instead."""
    found = inspect.getattr_static(getattr(contract, class_name), name)
    is_current = name in FACTS["current"]["classes"].get(class_name, {}).get("methods", {})
    expected = fact["abstract"] and is_current and (class_name, name) != MLA_ONE_OF
    assert getattr(found, "__isabstractmethod__", False) == expected


MLA_ONE_OF = ("MLAAttentionImpl", "forward_mqa")


@pytest.mark.parametrize("name", FACTS["current"]["functions"])
def test_function_parameters(name: str) -> None:
    assert _parameters(getattr(contract, name), bound=False) == _expected(
        FACTS["current"]["functions"][name]
    )


def test_the_batch_is_built_by_the_same_fields_in_the_same_order() -> None:
    fields = FACTS["current"]["classes"]["CommonAttentionMetadata"]["attributes"]
    expected = [[name, "positional", d] for name, d in fields.items()]
    parameters = _parameters(contract.CommonAttentionMetadata, bound=False)
    # What attnkit adds is keyword-only, so that it cannot shift anything.
    assert [p for p in parameters if p[1] != "keyword"] == _expected(expected)
    assert all(p[2] in (None, ()) for p in parameters if p[1] == "keyword")


def test_cudagraph_levels_and_no_others() -> None:
    levels = FACTS["current"]["classes"]["AttentionCGSupport"]["attributes"]
    assert {m.name: m.value for m in contract.AttentionCGSupport} == {
        name: _value(value) for name, value in levels.items()
    }
    types = FACTS["current"]["classes"]["AttentionType"]["attributes"]
    assert {m.name: m.value for m in contract.AttentionType} == {
        name: _value(value) for name, value in types.items()
    }


def test_every_public_name_is_exported_in_order() -> None:
    source = Path(contract.__file__).read_text()
    imported = {
        alias.asname or alias.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    assert imported == set(contract.__all__)
    assert len(contract.__all__) == len(set(contract.__all__))


def _public_members(cls: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(cls).items():
        if not name.startswith("_") and (
            inspect.isroutine(member) or isinstance(member, (classmethod, staticmethod, property))
        ):
            yield name, member


@pytest.mark.parametrize("name", contract.__all__)
def test_every_public_thing_says_what_it_is(name: str) -> None:
    thing = getattr(contract, name)
    if not inspect.isclass(thing) and not inspect.isfunction(thing):
        return  # Constants are documented beside their definition.
    own = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    assert own, name
    assert not own.startswith(f"{name}("), "a dataclass's automatic docstring says nothing"
    if inspect.isclass(thing) and thing is not str:
        silent = [m for m, _ in _public_members(thing) if not inspect.getdoc(getattr(thing, m))]
        assert silent == []


def _documented_attributes(node: ast.ClassDef) -> set[str]:
    """Names with a string below them, listed under `Attributes:` or spoken of as `name`."""
    doc = ast.get_docstring(node) or ""
    named = set(re.findall(r"`(\w+)`", doc))
    for line in doc.partition("Attributes:")[2].splitlines():
        names, colon, _ = line.strip().partition(": ")
        if colon and line.startswith("    ") and not line.startswith("     "):
            named |= {part.strip() for part in names.split(",")}
    for statement, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            named |= {t.id for t in ast.walk(statement) if isinstance(t, ast.Name)}
    return named


@pytest.mark.parametrize(
    "path", sorted(Path(contract.__file__).parent.glob("*.py")), ids=lambda p: p.stem
)
def test_every_public_attribute_says_what_it_is(path: Path) -> None:
    inherited: dict[str, set[str]] = {}
    silent = []
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        known = _documented_attributes(node)
        for base in node.bases:
            known |= inherited.get(ast.unparse(base).split("[")[0], set())
        inherited[node.name] = known
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign):
                target = statement.target
            elif isinstance(statement, ast.Assign):
                target = statement.targets[0]
            else:
                continue
            assert isinstance(target, ast.Name)
            if not target.id.startswith("_") and target.id not in known:
                silent.append(f"{node.name}.{target.id}")
    assert silent == []
