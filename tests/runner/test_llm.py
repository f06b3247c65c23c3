"""The runner as a whole on small random models: what it returns, refuses and gives back."""

import os
import random
import signal

import numpy as np
import pytest
import torch

from attnkit import LLM, SamplingParams
from attnkit.backends.reference import ReferenceBackend
from attnkit.errors import BackendError, CacheError, ConfigurationError, ModelError, RequestError
from attnkit.runner.engine import Engine
from attnkit.runner.entry import Entry
from attnkit.runner.interrupt import Interrupted

transformers = pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save_model(tmp_path_factory.mktemp("llama"))


def make_llm(folder, **changes) -> LLM:
    settings = {"backend": "reference", "block_size": 4, "num_blocks": 400, "debug_poison": True}
    return LLM(folder, **{**settings, **changes})


def some_prompts(num: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(1, longest))] for _ in range(num)]


def tokens(outputs) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
def test_greedy_tokens_of_a_family_are_those_of_transformers(family, backend, tmp_path):
    """Windows of 9 over pages of 4, several groups of layers, chunks of 5, poisoned pages."""
    model = tiny_models.make_model(family)
    model.save_pretrained(tmp_path)
    prompts = some_prompts(5, seed=3)
    llm = make_llm(tmp_path, max_num_batched_tokens=5, backend=backend)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    assert tokens(outputs) == [tiny_models.greedy(model, p, 16) for p in prompts]
    assert llm.stats.num_used_blocks == 0


def test_a_model_that_also_sees_images_continues_text(tmp_path):
    text = {**tiny_models.BASE, **tiny_models.FAMILIES["gemma3_text"]}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
    model = tiny_models.make_model(
        "gemma3",
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=300,
    )
    model.save_pretrained(tmp_path)
    prompts = some_prompts(3, seed=5)
    llm = make_llm(tmp_path, max_num_batched_tokens=5, backend="cpu")
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert tokens(outputs) == [tiny_models.greedy(model, p, 8) for p in prompts]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_greedy_tokens_on_triton_are_those_of_transformers(family, tmp_path):
    pytest.importorskip("triton")
    model = tiny_models.make_model(family, num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    prompts = [[1, 2, 3, 4, 5, 6, 7], list(range(30, 60)), [9]]
    llm = make_llm(tmp_path, max_num_batched_tokens=16, backend="triton", block_size=16)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert tokens(outputs) == [tiny_models.greedy(model, p, 5) for p in prompts]


def test_a_compiled_model_gives_the_same_tokens(tmp_path):
    """Steps of one token and of many, with and without a row of logits; a window in some layers."""
    model = tiny_models.make_model("gemma2", num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    prompts = [[1, 2, 3, 4, 5, 6, 7], list(range(30, 60)), [9]]
    llm = make_llm(tmp_path, max_num_batched_tokens=16, compile=True)
    calls = []
    llm.engine.model.model.register_forward_hook(
        lambda *_: calls.append(torch.compiler.is_compiling())
    )
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert tokens(outputs) == [tiny_models.greedy(model, p, 8) for p in prompts]
    assert True in calls, "the model was traced"


@pytest.mark.parametrize("budget", [3, 16, 1000])
@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_tokens_depend_on_no_setting(folder, block_size, budget):
    prompts = some_prompts(9)
    expected = tokens(make_llm(folder).generate(prompts, GREEDY))
    llm = make_llm(
        folder,
        block_size=block_size,
        num_blocks=9 * 64 // block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=budget != 16,
    )
    assert tokens(llm.generate(prompts, GREEDY)) == expected


def test_tokens_depend_on_no_batch_mate(folder):
    prompts = some_prompts(7)
    params = [
        SamplingParams(temperature=1.0, seed=n, max_tokens=10, top_p=0.9 if n % 2 else 1.0)
        if n % 3
        else GREEDY
        for n in range(7)
    ]
    llm = make_llm(folder)
    together = tokens(llm.generate(prompts, params))
    alone = [
        tokens(make_llm(folder).generate(p, q))[0] for p, q in zip(prompts, params, strict=True)
    ]
    assert together == alone
    assert tokens(llm.generate(prompts[::-1], params[::-1])) == together[::-1]


def test_preemption_changes_no_token(folder):
    """Pages for about two requests, so that later ones lose theirs and are computed again."""
    prompts = some_prompts(6, seed=5)
    params = [
        SamplingParams(temperature=n % 2, seed=n, max_tokens=30, ignore_eos=True) for n in range(6)
    ]
    expected = tokens(make_llm(folder).generate(prompts, params))
    for caching in (False, True):
        llm = make_llm(folder, num_blocks=24, enable_prefix_caching=caching)
        assert tokens(llm.generate(prompts, params)) == expected
        assert llm.stats.num_preemptions > 0
        assert llm.stats.num_used_blocks == 0


def test_a_shared_beginning_is_computed_once(tmp_path):
    tiny_models.save_model(tmp_path, max_position_embeddings=1100)
    rng = random.Random(2)
    shared = [rng.randrange(256) for _ in range(1001)]
    prompts = [[*shared, n, n + 1] for n in range(5)]
    llm = make_llm(tmp_path, num_blocks=600)
    outputs = llm.generate(prompts, GREEDY)
    assert [o.num_cached_tokens for o in outputs] == [0, 1000, 1000, 1000, 1000]
    # The first prompt, the others' last three tokens, and all but the last generated one.
    assert llm.stats.num_computed_tokens == 1003 + 4 * 3 + 5 * 11
    assert llm.stats.num_cached_tokens == 4000
    assert llm.stats.num_used_blocks == 0
    cold = make_llm(tmp_path, num_blocks=1400, enable_prefix_caching=False)
    assert tokens(cold.generate(prompts, GREEDY)) == tokens(outputs)
    assert cold.stats.num_cached_tokens == 0
    assert cold.stats.num_computed_tokens == 5 * (1003 + 11)


def test_a_window_group_and_a_full_group_share_a_beginning(tmp_path):
    """BR-059: the window layers' pages of the first request are gone where a hit needs them."""
    tiny_models.save_model(tmp_path, "gemma3_text")
    prompt = some_prompts(1, seed=8, longest=30)[0] + list(range(24))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    cold = tokens(make_llm(tmp_path, enable_prefix_caching=False).generate(prompt, params))
    llm = make_llm(tmp_path)
    assert tokens(llm.generate(prompt, params)) == cold
    assert tokens(llm.generate(prompt, params)) == cold
    assert tokens(llm.generate([prompt[:-3], prompt], params))[1:] == cold
    assert llm.stats.num_cached_tokens > 0


@pytest.mark.parametrize("length", [3, 4, 8, 9])
def test_a_prompt_that_is_wholly_cached_still_generates(folder, length):
    """BR-061: the last token is computed again, since its logits are wanted."""
    prompt = list(range(length))
    llm = make_llm(folder)
    first = llm.generate(prompt, GREEDY)
    again = llm.generate([prompt, prompt], GREEDY)
    assert tokens(again) == tokens(first) * 2
    assert [o.num_cached_tokens for o in again] == [(length - 1) // 4 * 4] * 2
    assert llm.stats.num_used_blocks == 0


def test_an_evicted_page_loses_its_identity(folder):
    """BR-063."""
    x, y = list(range(16)), list(range(100, 116))
    params = SamplingParams(temperature=0, max_tokens=1)
    llm = make_llm(folder, num_blocks=5)
    cold = tokens(make_llm(folder).generate([x, [99, *x[1:]]], params))
    llm.generate(x, params)
    llm.generate(y, params)
    again = llm.generate(x, params)
    assert again[0].num_cached_tokens == 0
    changed = llm.generate([99, *x[1:]], params)
    assert changed[0].num_cached_tokens == 0
    assert tokens(again) + tokens(changed) == cold


def test_prompts_come_in_several_forms(folder):
    llm = make_llm(folder)
    ids = llm.tokenizer.encode("hello")
    one = llm.generate("hello", GREEDY)
    assert one[0].prompt == "hello"
    assert one[0].prompt_token_ids == ids
    assert tokens(llm.generate(ids, GREEDY)) == tokens(one)
    assert llm.generate(ids, GREEDY)[0].prompt is None
    forms = ["hello", ids, tuple(ids), np.array(ids), torch.tensor(ids)]
    assert tokens(llm.generate(forms, [GREEDY] * 5)) == tokens(one) * 5
    assert tokens(llm.generate(np.array(ids), GREEDY)) == tokens(one)
    assert llm.generate([], GREEDY) == []


def test_text_is_the_decoded_tokens(folder):
    """A random model writes random bytes: characters of several bytes, and broken ones."""
    llm = make_llm(folder)
    outputs = llm.generate(some_prompts(8), SamplingParams(temperature=1.5, max_tokens=40, seed=1))
    for output in outputs:
        done = output.outputs[0]
        ids = done.token_ids[:-1] if done.finish_reason == "stop" else done.token_ids
        assert done.text == llm.tokenizer.decode(ids, skip_special_tokens=True)


def test_outputs_say_why_they_ended(folder):
    llm = make_llm(folder)
    prompt = some_prompts(1)[0]
    free = llm.generate(prompt, GREEDY)[0].outputs[0]
    assert (free.finish_reason, free.stop_reason, len(free.token_ids)) == ("length", None, 12)
    token = free.token_ids[5]
    at = free.token_ids.index(token)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[token])
    stopped = llm.generate(prompt, params)[0].outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token)
    assert stopped.token_ids == free.token_ids[: at + 1]
    assert stopped.text == llm.tokenizer.decode(free.token_ids[:at], skip_special_tokens=True)


def test_the_models_end_token_ends_an_output_unless_it_is_ignored(folder, monkeypatch):
    llm = make_llm(folder)
    prompt = some_prompts(1)[0]
    free = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    llm.engine.eos_token_ids = frozenset([free[4]])
    at = free.index(free[4])
    params = SamplingParams(temperature=0, max_tokens=12)
    ended = llm.generate(prompt, params)[0].outputs[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert ended.token_ids == free[: at + 1]
    assert tokens(llm.generate(prompt, GREEDY)) == [free]


def test_a_stop_token_that_no_model_gives_is_refused(folder):
    llm = make_llm(folder)
    llm.generate([1, 2, 3], SamplingParams(max_tokens=1, stop_token_ids=[319]))
    params = [GREEDY, SamplingParams(stop_token_ids=[7, 320])]
    with pytest.raises(
        RequestError, match=r"prompt 1: .*stop_token_ids has 320, .* end at 319, so"
    ):
        llm.generate([[1, 2, 3], [1, 2, 3]], params)
    assert llm.stats.num_steps == 1


def test_one_bad_prompt_stops_all_before_anything_runs(folder):
    llm = make_llm(folder, num_blocks=30)
    good = [1, 2, 3]
    cases = [
        ([good, []], "prompt 1.*no tokens"),
        ([good, good, list(range(256)) * 3], r"prompt 2.*768 tokens.*512"),
        ([good, [5] * 200], "prompt 1.*blocks"),
        ([good, [320]], "prompt 1.*320"),
        ([good, [-1]], "prompt 1.*-1"),
        ([good, [1.5]], r"prompt 1.*1\.5"),
        ([good, None], "prompt 1.*NoneType"),
        ([good, b"bytes"], "prompt 1 is bytes"),
        ([good, [True]], "prompt 1 has True among"),
        ([good, ["a"]], "prompt 1 has 'a' among"),
        ([good, "half \ud800"], "prompt 1 is no text at character 5"),
        ([good, {"input_ids": [[1, None]]}], "prompt 1: input_ids is not one row"),
    ]
    for prompts, message in cases:
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, GREEDY)
    with pytest.raises(RequestError, match="2 prompts but 3"):
        llm.generate([good, good], [GREEDY] * 3)
    assert llm.stats.num_steps == 0
    assert llm.stats.num_used_blocks == 0
    assert len(tokens(llm.generate(good, GREEDY))[0]) == 12


def test_a_request_that_fails_while_it_is_taken_leaves_nothing_behind(folder, monkeypatch):
    llm = make_llm(folder)
    expected = tokens(llm.generate([1, 2, 3], GREEDY))
    for part in ("SamplingState", "TextStream", "Entry"):
        with monkeypatch.context() as patch:
            patch.setattr(f"attnkit.runner.engine.{part}", None)
            with pytest.raises(TypeError, match="NoneType"):
                llm.generate([4, 5], GREEDY)
        assert not llm.engine.scheduler.has_work
    assert tokens(llm.generate([1, 2, 3], GREEDY)) == expected


def test_numpys_numbers_do_as_settings(folder):
    llm = make_llm(folder, **{n: np.int64(64) for n in ("max_model_len", "num_blocks", "seed")})
    params = [SamplingParams(seed=kind(3), max_tokens=kind(9)) for kind in (int, np.int64)]
    one, other = tokens(llm.generate([[1, 2]] * 2, params))
    assert one == other
    assert len(tokens(llm.generate([1, 2], SamplingParams(max_tokens=5)))[0]) == 5


def test_an_error_in_the_model_gives_every_page_back(folder, monkeypatch):
    llm = make_llm(folder)
    expected = tokens(llm.generate(some_prompts(3), GREEDY))
    forward, calls = llm.engine.model.forward, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("out of memory, say")
        return forward(*args)

    monkeypatch.setattr(llm.engine.model, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate(some_prompts(3), GREEDY)
    assert llm.stats.num_used_blocks == 0
    assert not llm.engine.scheduler.has_work
    assert tokens(llm.generate(some_prompts(3), GREEDY)) == expected


def test_logits_that_are_not_finite_end_one_request_with_an_error(folder, monkeypatch):
    llm = make_llm(folder)
    prompts = some_prompts(3)
    expected = tokens(llm.generate(prompts, GREEDY))
    forward, calls = llm.engine.model.forward, []

    def poisoned(*args):
        logits = forward(*args).clone()
        calls.append(1)
        if len(calls) == 5:
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(llm.engine.model, "forward", poisoned)
    outputs = llm.generate(prompts, GREEDY)
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].outputs[0].token_ids == expected[1][:4]
    assert "not finite" in (outputs[1].error or "")
    assert tokens([outputs[0], outputs[2]]) == [expected[0], expected[2]]
    assert llm.stats.num_used_blocks == 0


def test_ctrl_c_stops_after_the_step_and_hands_out_what_there_is(folder, monkeypatch):
    llm = make_llm(folder)
    prompts = some_prompts(3)
    expected = tokens(llm.generate(prompts, GREEDY))
    forward, calls = llm.engine.model.forward, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(*args)

    monkeypatch.setattr(llm.engine.model, "forward", interrupted)
    with pytest.raises(Interrupted) as caught:
        llm.generate(prompts, [GREEDY, SamplingParams(temperature=0, max_tokens=3), GREEDY])
    assert isinstance(caught.value, KeyboardInterrupt)
    outputs = caught.value.outputs
    assert [o.outputs[0].finish_reason for o in outputs] == ["abort", "length", "abort"]
    assert tokens(outputs) == [expected[0][:6], expected[1][:3], expected[2][:6]]
    assert llm.stats.num_used_blocks == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_stops_at_once(folder, monkeypatch):
    llm = make_llm(folder)

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("went on")

    monkeypatch.setattr(llm.engine.model, "forward", interrupted)
    with pytest.raises(Interrupted) as caught:
        llm.generate([1, 2, 3], GREEDY)
    assert caught.value.outputs[0].outputs[0].finish_reason == "abort"
    monkeypatch.undo()
    assert llm.stats.num_used_blocks == 0
    assert len(tokens(llm.generate([1, 2, 3], GREEDY))[0]) == 12


def test_progress_is_reported_after_each_step(folder):
    llm = make_llm(folder)
    seen: list[tuple[int, int, int]] = []
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 4)]
    llm.generate([[1], [2]], params, progress=lambda *now: seen.append(now))
    assert seen == [(0, 2, 2), (1, 2, 4), (1, 2, 5), (2, 2, 6)]
    for ask in (llm.generate, llm.chat):
        with pytest.raises(ConfigurationError, match=r"progress 3 .* a function of"):
            ask([[1]], progress=3)  # type: ignore[arg-type]
    assert llm.stats.num_steps == len(seen)


def test_chat_is_the_template_and_generate(folder):
    llm = make_llm(folder)
    conversation = [{"role": "user", "content": "hi"}]
    text = "<|user|>hi<|end|><|assistant|>"
    answer = llm.chat(conversation, GREEDY)
    assert answer[0].prompt == text
    assert answer[0].prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    assert tokens(answer) == tokens(llm.generate(answer[0].prompt_token_ids, GREEDY))
    assert tokens(llm.chat([conversation, conversation], GREEDY)) == tokens(answer) * 2
    assert llm.chat([], GREEDY) == []
    with pytest.raises(RequestError, match="a conversation is int"):
        llm.chat([5], GREEDY)  # type: ignore[list-item]
    for nothing in (3.5, "hi", {"role": "user"}, torch.zeros(2)):
        with pytest.raises(RequestError, match="messages is"):
            llm.chat(nothing, GREEDY)
    for refused in ([[]], [{"role": "user", "content": "\ud800"}]):
        with pytest.raises(RequestError, match="conversation"):
            llm.chat(refused, GREEDY)
    for message, named in (
        ("hi", "message 0 of a conversation is str"),
        ({"role": "user"}, "content of message 0 of a conversation is missing"),
        ({"role": "user", "content": None}, "content .* is missing"),
        ({"role": "user", "content": 3}, "content .* is int"),
        ({"role": "user", "content": [{"type": "text", "text": "hi"}]}, "content .* is list"),
        ({"content": "hi"}, "role of message 0 of a conversation is missing"),
        ({"role": 1, "content": "hi"}, "role .* is int"),
    ):
        for ask in (lambda said: llm.chat([said], GREEDY), llm.encode_chat):
            with pytest.raises(RequestError, match=named):
                ask([message])  # type: ignore[list-item]
    called = {"role": "assistant", "content": None, "tool_calls": []}
    assert llm.encode_chat([called])[0] == "<|assistant|><|end|><|assistant|>"
    llm.tokenizer.chat_template = "{{ raise_exception('users must speak first') }}"
    with pytest.raises(RequestError, match="users must speak first"):
        llm.chat(conversation, GREEDY)


def test_a_model_without_tokenizer_takes_token_ids(tmp_path):
    tiny_models.save_model(tmp_path, tokenizer=False)
    llm = make_llm(tmp_path)
    output = llm.generate([1, 2, 3], GREEDY)[0].outputs[0]
    assert (len(output.token_ids), output.text) == (12, "")
    with pytest.raises(ModelError, match="tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(RequestError, match="stop_token_ids"):
        llm.generate([1], SamplingParams(stop="x"))
    with pytest.raises(ModelError, match="chat template"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert list(llm.iterate([1, 2, 3], GREEDY))[-1].output.outputs[0].token_ids == output.token_ids


def test_logprobs_belong_to_the_tokens(folder):
    llm = make_llm(folder)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True)
    plain = llm.generate([1, 2, 3], GREEDY)[0].outputs[0]
    done = llm.generate([1, 2, 3], params)[0].outputs[0]
    assert plain.logprobs is None
    assert done.token_ids == plain.token_ids[:5]
    assert done.logprobs is not None
    assert [min(at, key=lambda t: at[t].rank) for at in done.logprobs] == done.token_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([[1, 2, 3, *done.token_ids[:4]]])).logits[0, 2:]
    expected = logits.log_softmax(-1)
    for row, (token, at) in enumerate(zip(done.token_ids, done.logprobs, strict=True)):
        assert at[token].logprob == pytest.approx(float(expected[row, token]), abs=1e-4)


def test_settings_that_are_not_allowed_are_named_before_weights_are_loaded(folder, monkeypatch):
    with pytest.raises(CacheError, match="5 bytes"):  # Of pages whose size the model decides.
        make_llm(folder, num_blocks=None, kv_cache_bytes=5)
    with pytest.raises(CacheError, match="more than int32 block ids can name"):
        make_llm(folder, num_blocks=10**12)
    monkeypatch.setattr("attnkit.runner.llm.load_model", None)
    cases = [
        ({"dtype": 8}, ConfigurationError, "dtype 8 is not known"),
        ({"dtype": np.zeros(2)}, ConfigurationError, "dtype array.* is not known"),
        ({"weights": np.zeros(2)}, ConfigurationError, "weights array.* is not known"),
        ({"seed": "a"}, ConfigurationError, "seed 'a'"),
        ({"cuda_graphs": True}, ConfigurationError, "would run on cpu"),
        ({"notice": 3}, ConfigurationError, "notice 3 .* a function of a line"),
        ({"compile": "no"}, ConfigurationError, "compile 'no' .* True or False"),
        ({"backend": "flash_attn"}, BackendError, "flash_attn cannot run on this machine"),
        ({"backend": None}, BackendError, "is None, not a subclass"),
        ({"backend": "cpu", "dtype": "float16", "block_size": -4}, ConfigurationError, "-4"),
        ({"dtype": "float64"}, ConfigurationError, "float64.*bfloat16"),
        ({"dtype": torch.int8}, ConfigurationError, "int8"),
        ({"device": "toaster"}, ConfigurationError, "toaster"),
        ({"device": "meta"}, ConfigurationError, "meta"),
        ({"backend": "nothing"}, BackendError, "nothing"),
        ({"block_size": 0}, ConfigurationError, "0"),
        ({"num_blocks": 1}, ConfigurationError, "num_blocks 1 .* at least 2"),
        ({"num_blocks": 5, "kv_cache_bytes": 5}, ConfigurationError, "both"),
        ({"max_model_len": 513}, ConfigurationError, "513.*512"),
        ({"max_model_len": 0}, ConfigurationError, "0"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, ConfigurationError, "8.*9"),
    ]
    for changes, kind, message in cases:
        with pytest.raises(kind, match=message):
            make_llm(folder, **changes)


def test_a_shorter_limit_than_the_models_holds(folder):
    llm = make_llm(folder, max_model_len=20)
    assert len(tokens(llm.generate([1] * 8, GREEDY))[0]) == 12
    with pytest.raises(RequestError, match="20"):
        llm.generate([1] * 9, GREEDY)


def test_memory_is_sized_by_bytes_and_never_beyond_use(folder):
    """A page of 4 tokens: 3 layers, 2 heads, 16 + 16 elements of 4 bytes."""
    page = 4 * 3 * 2 * 32 * 4
    assert make_llm(folder, num_blocks=None, kv_cache_bytes=10 * page + 5).stats.num_blocks == 10
    llm = make_llm(folder, num_blocks=None, max_num_seqs=2, debug_poison=False)
    assert llm.stats.num_blocks == 1 + 2 * 512 // 4


class Older(ReferenceBackend):
    """Its caches are its own to shape, so layers of several kinds do not overlay each other."""

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return num_blocks, num_kv_heads, block_size, 2 * head_size


def test_memory_of_an_older_backend_is_what_was_asked_for(tmp_path):
    tiny_models.make_model("gemma3_text").save_pretrained(tmp_path)
    most = 300_000
    for backend in ("reference", Older):
        llm = make_llm(tmp_path, backend=backend, num_blocks=None, kv_cache_bytes=most)
        assert 0.9 * most < llm.engine.cache.num_bytes <= most
        (output,) = llm.generate([3, 4, 5], GREEDY)
        assert len(output.outputs[0].token_ids) == 12


def test_a_checkpoint_with_missing_weights_is_refused(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    model = tiny_models.make_model()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"missing.*layers\.1\.mlp\.up_proj"):
        make_llm(tmp_path)


def test_a_model_that_cannot_be_driven_is_refused_by_name(tmp_path):
    tiny_models.save_model(tmp_path, "diffllama", tokenizer=False)
    with pytest.raises(ModelError, match="DiffLlama"):
        make_llm(tmp_path)


def test_the_record_of_the_choice_is_there(folder):
    llm = make_llm(folder)
    assert llm.model_path == folder
    assert list(llm.backends) == ["reference"]
    assert len(llm.backends["reference"]) == 3
    assert "and 2 more layers" in llm.explain()
    assert "reference" in llm.explain()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_runs_and_stays_in_its_dtype(folder, dtype):
    llm = make_llm(folder, dtype=dtype)
    assert str(llm.dtype) == f"torch.{dtype}"
    assert all(str(t.dtype) == f"torch.{dtype}" for t in llm.engine.cache.values())
    assert len(tokens(llm.generate([1, 2, 3], GREEDY))[0]) == 12


def test_auto_dtype_is_the_checkpoints_but_for_half_on_a_cpu(tmp_path):
    for own, expected in (("bfloat16", torch.bfloat16), ("float16", torch.float32)):
        model = tiny_models.make_model().to(getattr(torch, own))
        model.save_pretrained(tmp_path / own)
        assert make_llm(tmp_path / own, device="cpu").dtype is expected


def random_cases() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of one family and lone ones, greedy and sampled."""
    rng = random.Random(11)
    family = [rng.randrange(256) for _ in range(24)]
    cases = []
    for seed in range(24):
        prompt = family[: rng.randrange(25)] + [
            rng.randrange(256) for _ in range(rng.randrange(1, 9))
        ]
        params = SamplingParams(
            temperature=rng.choice([0, 1.0]),
            seed=seed,
            max_tokens=rng.randrange(1, 20),
            ignore_eos=True,
        )
        cases.append((prompt, params))
    return cases


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[LLM, list[list[int]]]:
    """A model, and what each of the random cases gives when nothing else runs."""
    shallow = tiny_models.save_model(tmp_path_factory.mktemp("shallow"), num_hidden_layers=2)
    llm = make_llm(shallow, enable_prefix_caching=False)
    return llm, [tokens(llm.generate(*case))[0] for case in random_cases()]


@pytest.mark.parametrize("part", range(10))
def test_random_schedules_leak_no_page_and_change_no_token(alone, part):
    """200 schedules: arrivals, cancels and lengths at random over a small poisoned pool."""
    llm, expected = alone
    cases = random_cases()
    for seed in range(20 * part, 20 * part + 20):
        rng = random.Random(seed)
        budget = rng.choice([4, 9, 64])
        engine = Engine(
            llm.engine.model,
            num_blocks=rng.choice([14, 24, 60]),
            max_num_seqs=min(budget, rng.choice([2, 8])),
            max_num_batched_tokens=budget,
            enable_prefix_caching=rng.random() < 0.7,
            poison=True,
            runs_ahead=seed % 2 == 0,
        )
        waiting = rng.sample(range(len(cases)), 6)
        running: dict[int, Entry] = {}
        cancelled = set()
        while waiting or any(not e.request.is_finished for e in running.values()):
            if waiting and rng.random() < 0.5:
                case = waiting.pop()
                running[case] = engine.add(*cases[case])
            if running and rng.random() < 0.05:
                case = rng.choice(sorted(running))
                if not running[case].request.is_finished:
                    cancelled.add(case)
                    engine.abort([running[case]])
            engine.step()
        for case, entry in running.items():
            got = entry.output().outputs[0]
            assert got.finish_reason == ("abort" if case in cancelled else "length")
            if case in cancelled:
                assert got.token_ids == expected[case][: len(got.token_ids)]
            else:
                assert got.token_ids == expected[case], (seed, case)
        assert engine.stats.num_used_blocks == 0, seed
        assert not engine.scheduler.has_work
