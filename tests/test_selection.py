"""Selection: by name a backend runs or raises every reason; auto tells what became of each candidate."""

from __future__ import annotations

import importlib.metadata
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import attnkit
from attnkit import registry, selection
from attnkit import select as public_select
from attnkit.backends import BACKENDS
from attnkit.backends.flex.backend import FlexBackend
from attnkit.backends.reference import ReferenceBackend, ReferenceImpl
from attnkit.contract import (
    AttentionBackend,
    CommonMetadataBuilder,
    DeviceCapability,
    MultipleOf,
)
from attnkit.errors import (
    BackendError,
    BackendUnavailable,
    ConfigurationError,
    UnknownBackend,
    UnsupportedConfiguration,
)
from attnkit.selection import (
    AttentionRequest,
    backend_names,
    decide,
    reasons_against,
    register,
    resolve,
    select,
)

PLAIN = AttentionRequest(head_size=64, dtype=torch.float32, num_heads=4, num_kv_heads=2)
SINKS = AttentionRequest(head_size=64, dtype=torch.float32, has_sink=True)


class Cheap(ReferenceBackend):
    cost: ClassVar[float] = 1.0
    absent: ClassVar[str | None] = None

    @staticmethod
    def get_name() -> str:
        return "cheap"

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return cls.absent

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        return cls.cost


class Equal(Cheap): ...


class Dear(Cheap):
    cost = 7.0


class NoSinks(Cheap):
    cost = 0.5

    @classmethod
    def supports_sink(cls) -> bool:
        return False


class Absent(Cheap):
    cost = 0.0
    absent = "fastlib is not installed"


class GpuOnly(Cheap):
    cost = 0.25

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= (9, 0)


class NotABackend: ...


Table = Callable[..., None]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """Replace attnkit's own table by classes of this file or by paths."""

    def replace(**rows: type[AttentionBackend] | str) -> None:
        paths = {
            name: row if isinstance(row, str) else f"{__name__}:{row.__name__}"
            for name, row in rows.items()
        }
        for module in (registry, selection):
            monkeypatch.setattr(module, "BACKENDS", paths)

    return replace


@pytest.fixture(autouse=True)
def _no_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.delenv("ATTNKIT_BACKEND", raising=False)


@pytest.fixture
def module_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], str]]:
    """Write an importable module; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def write(name: str, source: str) -> str:
        path = tmp_path / Path(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(source))
        made.append(name.split(".")[0])
        return name

    yield write
    for name in [m for m in sys.modules if m.split(".")[0] in made]:
        del sys.modules[name]


BACKEND_SOURCE = """
    from attnkit.backends.reference import ReferenceBackend

    class Mine(ReferenceBackend):
        @staticmethod
        def get_name():
            return "mine"
"""


# Automatic choice


def test_the_cheapest_that_can_is_chosen_and_every_candidate_has_its_line(table: Table) -> None:
    table(dear=Dear, absent=Absent, no_sinks=NoSinks, cheap=Cheap, gpu=GpuOnly)
    chosen = select(SINKS)
    assert (chosen.name, chosen.backend, chosen.asked) == ("cheap", Cheap, "auto")
    by_name = {d.name: d for d in chosen.decisions}
    assert list(by_name) == ["dear", "absent", "no_sinks", "cheap", "gpu"]
    assert [d.name for d in chosen.decisions if d.chosen] == ["cheap"]
    assert by_name["dear"].cost == 7.0
    assert not by_name["dear"].reasons
    assert by_name["absent"].reasons == ("fastlib is not installed",)
    assert by_name["no_sinks"].reasons == (
        "attention sink is asked for, which this backend does not do",
    )
    assert "device cpu is not supported" in by_name["gpu"].reasons[0]
    assert by_name["absent"].cost is by_name["gpu"].cost is None
    lines = str(chosen).splitlines()
    assert lines[0] == "backend asked for: auto"
    assert lines[1] == "  dear: possible (cost 7)"
    assert lines[2] == "  absent: refused: fastlib is not installed"
    assert lines[4] == "  cheap: chosen (cost 1)"


def test_equal_costs_fall_back_to_the_order_of_the_table(table: Table) -> None:
    table(equal=Equal, cheap=Cheap)
    assert select(PLAIN).name == "equal"
    table(cheap=Cheap, equal=Equal)
    assert select(PLAIN).name == "cheap"


def test_nobody_can_serve_and_every_reason_is_told(table: Table) -> None:
    table(no_sinks=NoSinks, absent=Absent, gpu=GpuOnly)
    with pytest.raises(UnsupportedConfiguration) as refusal:
        select(SINKS)
    for words in ("no_sinks: refused: attention sink", "absent: refused: fastlib", "gpu: refused"):
        assert words in str(refusal.value)
    assert len(refusal.value.reasons) == 3


def test_another_backend_changes_nobody_elses_reasons(table: Table) -> None:
    table(no_sinks=NoSinks, dear=Dear)
    before = {d.name: d.reasons for d in decide(SINKS)}
    table(cheap=Cheap, no_sinks=NoSinks, gpu=GpuOnly, dear=Dear)
    after = {d.name: d.reasons for d in decide(SINKS)}
    assert {name: after[name] for name in before} == before


def test_registered_backends_are_chosen_by_name_only(table: Table) -> None:
    table(dear=Dear)
    register("cheap", Cheap)
    assert select(PLAIN).name == "dear"
    assert select(PLAIN, "cheap").backend is Cheap


def test_the_table_of_attnkit_ends_with_the_reference_and_every_row_resolves() -> None:
    assert list(BACKENDS)[-1] == "reference"
    for name in BACKENDS:
        try:
            assert resolve(name).get_name() == name
        except BackendUnavailable as absent:
            assert "is not installed" in str(absent)  # noqa: PT017


def test_select_decides_as_decide_does(table: Table) -> None:
    table(dear=Dear, no_sinks=NoSinks, cheap=Cheap)
    assert select(SINKS).decisions == decide(SINKS)
    assert [d.name for d in decide(SINKS, "no_sinks")] == ["no_sinks"]
    assert not decide(SINKS, "no_sinks")[0].chosen


# Devices that are not here


def test_a_device_that_is_not_here_can_be_asked_about(table: Table) -> None:
    table(gpu=GpuOnly, absent=Absent, cheap=Cheap)
    hopper = AttentionRequest(
        head_size=64, dtype=torch.bfloat16, device_capability=DeviceCapability(9, 0)
    )
    there = {d.name: d for d in decide(hopper, here=False)}
    assert there["absent"].chosen, "what is missing on this machine does not matter there"
    assert not there["gpu"].reasons
    assert select(hopper, "absent", here=False).backend is Absent
    here = {d.name: d for d in decide(hopper)}
    assert here["absent"].reasons == ("fastlib is not installed",)
    assert here["gpu"].chosen


# By name


def test_a_name_is_taken_whatever_it_costs(table: Table) -> None:
    table(cheap=Cheap, dear=Dear)
    chosen = select(PLAIN, "dear")
    assert (chosen.name, chosen.backend, chosen.asked) == ("dear", Dear, "dear")
    assert len(chosen.decisions) == 1
    assert chosen.decisions[0].chosen


def test_a_name_that_cannot_serve_raises_every_reason_and_nothing_else_runs(table: Table) -> None:
    table(no_sinks=NoSinks, cheap=Cheap)
    asked = AttentionRequest(
        head_size=64, dtype=torch.float64, has_sink=True, use_mla=True, kv_cache_dtype="fp8_ds_mla"
    )
    with pytest.raises(UnsupportedConfiguration) as refusal:
        select(asked, "no_sinks")
    assert refusal.value.reasons == reasons_against(NoSinks, asked)
    assert len(refusal.value.reasons) == 4
    for reason in refusal.value.reasons:
        assert reason in str(refusal.value)
    assert "no_sinks" in str(refusal.value)
    assert "backend='auto'" in str(refusal.value)


def test_a_name_that_is_not_here_is_unavailable(table: Table) -> None:
    table(absent=Absent)
    with pytest.raises(BackendUnavailable, match=r"absent cannot run .*fastlib is not installed; "):
        select(SINKS, "absent")


def test_an_unknown_name_lists_the_known(table: Table) -> None:
    table(cheap=Cheap, dear=Dear)
    register("mine", Equal)
    for function in (resolve, lambda name: select(PLAIN, name), lambda name: decide(PLAIN, name)):
        with pytest.raises(UnknownBackend, match="'chaep'") as unknown:
            function("chaep")
        for known in ("cheap", "dear", "mine", "path/to/file.py:Class", "module:Class"):
            assert known in str(unknown.value)
        assert ("auto" in str(unknown.value)) == (function is not resolve)


def test_a_class_is_its_own_name() -> None:
    chosen = select(PLAIN, Dear)
    assert (chosen.name, chosen.backend, chosen.asked) == ("cheap", Dear, "cheap")
    with pytest.raises(UnsupportedConfiguration):
        select(SINKS, NoSinks)
    with pytest.raises(BackendUnavailable):
        select(PLAIN, Absent)


@pytest.mark.parametrize("wrong", [NotABackend, int, ReferenceImpl])
def test_what_is_no_backend_class_is_refused(wrong: Any) -> None:
    with pytest.raises(
        UnknownBackend, match=rf"{wrong.__name__}.*not a subclass of .*AttentionBackend"
    ):
        select(PLAIN, wrong)
    with pytest.raises(UnknownBackend, match="not a subclass"):
        register("mine", wrong)


def test_every_error_of_selection_is_a_backend_error() -> None:
    for error in (UnknownBackend, BackendUnavailable, UnsupportedConfiguration):
        assert issubclass(error, BackendError)


# The environment


def test_the_environment_names_what_auto_means(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(cheap=Cheap, dear=Dear, no_sinks=NoSinks)
    monkeypatch.setenv("ATTNKIT_BACKEND", "dear")
    chosen = select(PLAIN)
    assert (chosen.name, chosen.asked) == ("dear", "dear (from ATTNKIT_BACKEND)")
    assert select(PLAIN, "cheap").name == "cheap", "an explicit name is stronger"
    assert [d.name for d in decide(PLAIN)] == ["dear"], "what explain shows is what select does"
    monkeypatch.setenv("ATTNKIT_BACKEND", "no_sinks")
    with pytest.raises(UnsupportedConfiguration, match="from ATTNKIT_BACKEND"):
        select(SINKS)
    monkeypatch.setenv("ATTNKIT_BACKEND", "typo")
    with pytest.raises(UnknownBackend, match="'typo'"):
        select(PLAIN)


@pytest.mark.parametrize("value", ["", "auto"])
def test_an_environment_that_names_nothing_changes_nothing(table: Table, value: str) -> None:
    table(dear=Dear, cheap=Cheap)
    assert select(PLAIN, environ={"ATTNKIT_BACKEND": value}).asked == "auto"


def test_the_layer_obeys_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNKIT_BACKEND", "reference")
    assert attnkit.Attention(2, 8).selection.name == "reference"


# Where names come from


def test_registering_again_replaces() -> None:
    attnkit.register("mine", Cheap)
    attnkit.register("mine", Dear)
    assert resolve("mine") is Dear
    assert backend_names()["mine"] == "registered"


@pytest.mark.parametrize("name", ["a,b", "a:b", " ", "", None])
def test_names_that_read_as_something_else_are_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="without commas, colons and spaces"):
        attnkit.register(name, Cheap)


def test_a_pair_is_two_names_whatever_the_spaces() -> None:
    assert select(PLAIN, " reference , reference ").name == "reference,reference"
    for name in ("cpu,", ",cpu", "cpu,reference,flex"):
        with pytest.raises(UnknownBackend, match=f"'{name}' is no pair"):
            select(PLAIN, name)
    with pytest.raises(UnknownBackend, match=r"is None, not a subclass .* or a name"):
        select(PLAIN, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"num_heads": -3}, "num_heads -3"),
        ({"num_heads": 8, "num_kv_heads": 3}, "8 query heads do not divide over 3"),
        ({"attn_type": "foo"}, "attn_type 'foo' is not known"),
        ({"kv_cache_dtype": "foo"}, "kv_cache_dtype 'foo' is not known"),
        ({"dtype": "float32"}, "dtype 'float32' is not allowed; give a torch.dtype"),
        ({"device_capability": "sm_90"}, "device_capability 'sm_90' is not allowed"),
        ({"return_lse": "no"}, "return_lse 'no' is not allowed; give True or False"),
        (
            {"block_size": 0},
            "block_size 0 is not allowed; give a whole number, at least 1, or None",
        ),
    ],
)
def test_a_request_that_no_layer_can_be_is_refused(facts: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        AttentionRequest(**{"head_size": 64, "dtype": torch.float32, **facts})


@pytest.mark.parametrize("choose", [select, decide])
def test_what_is_no_request_is_named(choose: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match="request None is not allowed; give an Attention"):
        choose(None)


@pytest.mark.parametrize("name", ["reference", "auto"])
def test_attnkits_own_names_cannot_be_taken(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name!r} is not free"):
        register(name, Cheap)


def test_a_class_by_its_module(module_of: Callable[[str, str], str]) -> None:
    name = module_of("attnkit_mine.deep.backend", BACKEND_SOURCE)
    found = resolve(f"{name}:Mine")
    assert found.full_cls_name() == (name, "Mine")
    assert resolve(":".join(found.full_cls_name())) is found
    assert select(PLAIN, f"{name}:Mine").name == f"{name}:Mine"


def test_a_class_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my backend.py"
    path.write_text(textwrap.dedent(BACKEND_SOURCE))
    found = resolve(f"{path}:Mine")
    assert found.get_name() == "mine"
    assert resolve(f"{path}:Mine") is found
    monkeypatch.chdir(tmp_path)
    assert resolve("my backend.py:Mine") is found, "relative to the working directory too"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/my backend.py:Mine") is found


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    found = []
    for folder in ("a", "b"):
        path = tmp_path / folder / "backend.py"
        path.parent.mkdir()
        path.write_text(textwrap.dedent(BACKEND_SOURCE))
        found.append(resolve(f"{path}:Mine"))
    assert found[0] is not found[1]
    assert found[0].__module__ != found[1].__module__


def test_entry_points_are_names(
    module_of: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module_of("attnkit_plugin", BACKEND_SOURCE)
    points = [
        importlib.metadata.EntryPoint("plugin", "attnkit_plugin:Mine [extra]", "attnkit.backends"),
        importlib.metadata.EntryPoint("reference", "attnkit_plugin:Mine", "attnkit.backends"),
        importlib.metadata.EntryPoint("gone", "attnkit_gone:Mine", "attnkit.backends"),
    ]

    def entry_points(*, group: str) -> list[importlib.metadata.EntryPoint]:
        return [point for point in points if point.group == group]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert "attnkit_plugin" not in sys.modules
    assert backend_names()["plugin"].startswith("entry point attnkit_plugin:Mine")
    assert "attnkit_plugin" not in sys.modules, "listing names imports nothing"
    assert select(PLAIN, "plugin").backend.get_name() == "mine"
    assert resolve("reference") is ReferenceBackend, "the table's own names stay its own"
    with pytest.raises(UnknownBackend, match="'gone': there is no module 'attnkit_gone'"):
        resolve("gone")
    register("plugin", Dear)
    assert resolve("plugin") is Dear
    assert backend_names()["plugin"] == "registered"


# What is missing is told apart from what is broken


def test_a_missing_library_is_not_installed(
    module_of: Callable[[str, str], str], table: Table
) -> None:
    module_of("attnkit_needy", "import attnkit_no_such_library.kernels")
    table(needy="attnkit_needy:Mine", cheap=Cheap)
    assert decide(PLAIN)[0].reasons == ("attnkit_no_such_library is not installed",)
    assert select(PLAIN).name == "cheap"
    with pytest.raises(BackendUnavailable, match=r"needy cannot run .*_library is not installed"):
        select(PLAIN, "needy")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise RuntimeError('no driver')", RuntimeError),
        ("from attnkit.backends import no_such_thing", ImportError),
        ("import attnkit.no_such_part", ModuleNotFoundError),
        ("import json.no_such_part", ModuleNotFoundError),
        ("class Mine(", SyntaxError),
        ("1 / 0", ZeroDivisionError),
    ],
)
def test_a_broken_module_raises_its_own_error(
    module_of: Callable[[str, str], str],
    table: Table,
    tmp_path: Path,
    source: str,
    error: type[Exception],
) -> None:
    """A library that is there but lacks a part is broken too, and auto does not step over it."""
    module_of("attnkit_broken", source)
    for name in ("attnkit_broken:Mine", f"{tmp_path / 'attnkit_broken.py'}:Mine"):
        with pytest.raises(error):
            select(PLAIN, name)
    table(broken="attnkit_broken:Mine", cheap=Cheap)
    with pytest.raises(error):
        select(PLAIN)


def test_the_error_of_a_broken_part_keeps_its_cause(module_of: Callable[[str, str], str]) -> None:
    module_of(
        "attnkit_caused",
        """
        try:
            1 / 0
        except ZeroDivisionError as cause:
            raise ImportError("libfoo.so: undefined symbol") from cause
        """,
    )
    with pytest.raises(ImportError, match="undefined symbol") as broken:
        resolve("attnkit_caused:Mine")
    assert isinstance(broken.value.__cause__, ZeroDivisionError)


def test_a_file_that_failed_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "flaky.py"
    path.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        resolve(f"{path}:Mine")
    path.write_text(textwrap.dedent(BACKEND_SOURCE))
    assert resolve(f"{path}:Mine").get_name() == "mine"


def test_a_file_named_after_the_library_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "attnkit_no_such_library.py").write_text("import attnkit_no_such_library")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BackendUnavailable, match="attnkit_no_such_library is not installed"):
        resolve("attnkit_no_such_library.py:Mine")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("no_such_module_x.y:Mine", "no module 'no_such_module_x' that .*; check the path"),
        ("attnkit.no_such_part:Mine", "no module 'attnkit.no_such_part'"),
        ("no/such/file.py:Mine", "there is no file no/such/file.py"),
        ("attnkit.backends.reference:Mine", "reference has no class 'Mine'"),
        ("attnkit.backends.reference:", "has no class ''"),
        ("attnkit.backends.reference:BACKENDS", "has no class 'BACKENDS'"),
        ("attnkit.backends.reference:ReferenceImpl", "not a subclass of"),
        ("attnkit.backends:BACKENDS", "not a subclass of"),
        (":Mine", "'' is neither a module nor a .py file"),
        (".relative:Mine", "'.relative' is neither"),
        ("some/kernel.cu:Mine", "'some/kernel.cu' is neither"),
        ("", "no backend is called ''"),
        ("auto", "no backend is called 'auto'; there are hopper, triton"),
        ("./mine.py", r"names a file and no class in it; give \./mine\.py:Class"),
    ],
)
def test_paths_that_lead_nowhere_are_named(name: str, named: str) -> None:
    with pytest.raises(UnknownBackend, match=named):
        resolve(name)


def test_a_module_that_lies_where_one_stands_is_called_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lies_here.py").write_text("class Mine: ...")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownBackend, match=r"that Python finds; give \./lies_here\.py:Mine"):
        resolve("lies_here:Mine")


@pytest.mark.parametrize("choose", [select, decide])
def test_an_unknown_name_says_where_it_came_from(choose: Any) -> None:
    with pytest.raises(UnknownBackend, match=r"no backend is called 'nobody'.*use backend='auto'"):
        choose(PLAIN, "nobody", environ={})
    with pytest.raises(
        UnknownBackend, match=r"no backend is called 'nobody'.*unset ATTNKIT_BACKEND"
    ):
        choose(PLAIN, "auto", environ={"ATTNKIT_BACKEND": "nobody"})


def test_a_backend_from_the_environment_that_cannot_serve_is_not_cured_by_auto() -> None:
    environ = {"ATTNKIT_BACKEND": "reference_mla"}
    with pytest.raises(UnsupportedConfiguration, match=r"or unset ATTNKIT_BACKEND$"):
        select(PLAIN, environ=environ)


# Requests


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"use_alibi": True}, "ALiBi"),
        ({"use_alibi_sqrt": True}, "square-root ALiBi"),
        ({"has_logits_soft_cap": True}, "logits soft cap"),
        ({"head_size_v": 32}, "value head size 32 beside key head size 64"),
        ({"return_lse": True}, "log-sum-exp output"),
        ({"has_sink": True}, "attention sink"),
        ({"has_sliding_window": True}, "sliding window"),
        ({"use_non_causal": True}, "non-causal"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_rswa": True}, "R-SWA"),
        ({"use_tree_mask": True}, "tree mask"),
        ({"use_per_head_quant_scales": True}, "per head"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_pcp": True}, "PCP"),
        ({"use_dcp": True}, "DCP"),
        ({"attn_type": "encoder"}, "encoder"),
        ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"block_size": 8}, "block size 8"),
    ],
)
def test_every_question_of_a_request_reaches_the_backend(asked: dict[str, Any], named: str) -> None:
    """The base class refuses all it can."""

    class Bare(AttentionBackend):
        supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]
        get_impl_cls = staticmethod(lambda: WithoutLse)
        get_builder_cls = staticmethod(ReferenceBackend.get_builder_cls)
        get_name = staticmethod(lambda: "bare")
        get_supported_kernel_block_sizes = staticmethod(lambda spec=None: [MultipleOf(16)])

    class WithoutLse(ReferenceImpl):
        can_return_lse_for_decode = False

    assert reasons_against(Bare, PLAIN) == ()
    request = AttentionRequest(head_size=64, dtype=torch.float32, **asked)
    reasons = reasons_against(Bare, request)
    assert len(reasons) == 1
    assert named in reasons[0]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"use_tree_mask": True, "has_sliding_window": True}, "use_tree_mask and sliding_window"),
        ({"use_tree_mask": True, "use_rswa": True}, "use_tree_mask and use_rswa exclude"),
        ({"use_tree_mask": True, "use_alibi": True}, "use_tree_mask and alibi_slopes exclude"),
        ({"use_tree_mask": True, "use_mm_prefix": True}, "use_tree_mask and use_mm_prefix exclude"),
        ({"use_tree_mask": True, "attn_type": "encoder"}, "use_tree_mask and attn_type encoder"),
        ({"use_mm_prefix": True, "attn_type": "encoder_only"}, "use_mm_prefix is for decoder"),
        ({"use_rswa": True, "attn_type": "encoder_decoder"}, "use_rswa is for decoder layers"),
    ],
)
def test_what_means_nothing_together_is_no_request(asked: dict[str, Any], named: str) -> None:
    """So `attnkit explain` does not call a backend possible that no layer could be built on."""
    with pytest.raises(ConfigurationError, match=named):
        AttentionRequest(head_size=64, dtype=torch.float32, **asked)


def test_values_as_wide_as_keys_are_no_question() -> None:
    class Strict(ReferenceBackend):
        @classmethod
        def supports_head_size_v(cls, head_size: int, head_size_v: int) -> bool:
            return False

    for head_size_v in (None, 64):
        request = AttentionRequest(head_size=64, dtype=torch.float32, head_size_v=head_size_v)
        assert reasons_against(Strict, request) == ()


def test_the_public_function_is_the_module_function() -> None:
    assert public_select is select


def test_flex_comes_before_the_reference_where_it_is_faster() -> None:
    """Eager on a CPU it is not, in steps of one token each."""
    for device, attn_type, is_before in [
        ("cpu", "decoder", False),
        ("cpu", "encoder_decoder", False),
        ("cpu", "encoder_only", True),
        ("sm_90", "decoder", True),
    ]:
        asked = DeviceCapability.parse(device)
        request = replace(PLAIN, device_capability=asked, attn_type=attn_type)
        flex, reference = (b.estimate_cost(request) for b in (FlexBackend, ReferenceBackend))
        assert (flex < reference) is is_before, (device, attn_type)


@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({"get_name": lambda self: "x"}, r"its get_name wants self, .* make it a staticmethod"),
        ({"supports_sink": True}, r"its supports_sink is True, .* calls it; make it a classmethod"),
        (
            {"supports_dtype": lambda self, dtype: True},
            r"its supports_dtype wants self, dtype, .* gives it \(dtype\)",
        ),
        ({"supported_dtypes": None}, r"its supported_dtypes is None; make it a list"),
        ({"supported_kv_cache_dtypes": "auto"}, r"its supported_kv_cache_dtypes is 'auto'"),
    ],
)
def test_a_class_that_cannot_be_asked_is_refused_wherever_it_is_given(
    attributes: dict[str, Any], named: str
) -> None:
    wrong = type("Wrong", (ReferenceBackend,), attributes)
    for take in (
        lambda: attnkit.Attention(2, 16, backend=wrong),
        lambda: attnkit.register("wrong", wrong),
        lambda: select(PLAIN, wrong),
    ):
        with pytest.raises(UnknownBackend, match=f"cannot be asked: {named}"):
            take()


def test_a_plain_function_without_self_can_be_asked() -> None:
    """As engines that make subclasses on the spot have it."""
    made = type("Made", (ReferenceBackend,), {"get_impl_cls": lambda: ReferenceImpl})
    assert attnkit.Attention(2, 16, backend=made).backend is made


class Wide(CommonMetadataBuilder):
    requires_block_table_width = True


def test_what_a_backend_gives_in_the_place_of_its_classes_is_named() -> None:
    for method, given, named in (
        ("get_impl_cls", None, "get_impl_cls of backend reference gave None"),
        ("get_impl_cls", ReferenceBackend, "let it give a subclass of AttentionImpl"),
        ("get_builder_cls", 3, "get_builder_cls of backend reference gave 3"),
        ("get_builder_cls", Wide, "reference requires_block_table_width, which no layer knows"),
    ):
        attributes = {method: staticmethod(lambda given=given: given)}
        wrong = type("Wrong", (ReferenceBackend,), attributes)
        with pytest.raises(BackendError, match=named):
            attnkit.Attention(2, 16, backend=wrong).make_builder()
