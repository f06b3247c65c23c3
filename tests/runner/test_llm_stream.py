"""Streams: increments add up to the whole, share their steps, and leave nothing behind."""

import asyncio
import os
import random
import re
import signal

import pytest

from attnkit import LLM, SamplingParams
from attnkit.errors import RequestError
from attnkit.runner.interrupt import Interrupted

pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.5, max_tokens=40, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def llm(folder):
    llm = LLM(folder, backend="reference", block_size=4, num_blocks=300, debug_poison=True)
    yield llm
    llm.close()


def prompts(num: int) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(256) for _ in range(rng.randrange(1, 30))] for _ in range(num)]


async def collect(stream):
    return [piece async for piece in stream]


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random bytes"])
@pytest.mark.parametrize("how", ["iterate", "stream"])
def test_increments_add_up_to_the_whole(llm, params, how):
    prompt = prompts(1)[0]
    whole = llm.generate(prompt, params)[0].outputs[0]
    if how == "iterate":
        pieces = list(llm.iterate(prompt, params))
    else:
        pieces = asyncio.run(collect(llm.stream(prompt, params)))
    assert "".join(p.text for p in pieces) == whole.text
    assert [t for p in pieces for t in p.token_ids] == whole.token_ids
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert pieces[-1].output.outputs[0] == whole
    assert pieces[-1].output.finished
    assert not pieces[0].output.finished
    assert llm.stats.num_used_blocks == 0


def test_text_that_was_given_out_is_never_taken_back(llm):
    given = ""
    for piece in llm.iterate(prompts(1)[0], RANDOM):
        given += piece.text
        assert piece.output.outputs[0].text.startswith(given)


def test_streams_of_one_loop_share_their_steps(llm):
    many = prompts(5)
    expected = [o.outputs[0].token_ids for o in llm.generate(many, GREEDY)]
    before = llm.stats.num_steps

    async def all_at_once():
        return await asyncio.gather(*(collect(llm.stream(p, GREEDY)) for p in many))

    results = asyncio.run(all_at_once())
    assert [pieces[-1].output.outputs[0].token_ids for pieces in results] == expected
    # Alone they would need 5 * 12 steps; a few more than 12, since they do not start at one time.
    assert llm.stats.num_steps - before <= 20
    assert llm.stats.num_used_blocks == 0


def test_leaving_a_stream_early_gives_its_pages_back(llm):
    for piece in llm.iterate(prompts(1)[0], GREEDY):
        if len(piece.output.outputs[0].token_ids) == 3:
            assert llm.stats.num_used_blocks > 0
            break
    del piece

    async def leave():
        stream = llm.stream(prompts(1)[0], GREEDY)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    assert llm.stats.num_used_blocks == 0
    assert not llm.engine.scheduler.has_work


def test_a_cancelled_task_gives_its_pages_back_and_others_finish(llm):
    first, second = prompts(2)
    expected = llm.generate(second, GREEDY)[0].outputs[0].token_ids

    async def cancel_one():
        task = asyncio.create_task(collect(llm.stream(first, RANDOM)))
        other = asyncio.create_task(collect(llm.stream(second, GREEDY)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await other

    pieces = asyncio.run(cancel_one())
    assert pieces[-1].output.outputs[0].token_ids == expected
    assert llm.stats.num_used_blocks == 0
    assert not llm.engine.scheduler.has_work


def test_a_stream_and_a_batch_run_side_by_side(llm):
    many = prompts(4)
    expected = [o.outputs[0].token_ids for o in llm.generate(many, GREEDY)]
    stream = llm.iterate(many[0], GREEDY)
    next(stream)
    assert [o.outputs[0].token_ids for o in llm.generate(many[1:], GREEDY)] == expected[1:]
    assert list(stream)[-1].output.outputs[0].token_ids == expected[0]
    assert llm.stats.num_used_blocks == 0


def test_ctrl_c_in_a_stream_hands_out_what_there_is(llm, monkeypatch):
    prompt = prompts(1)[0]
    expected = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    forward, calls = llm.engine.model.forward, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(*args)

    monkeypatch.setattr(llm.engine.model, "forward", interrupted)
    stream = llm.iterate(prompt, GREEDY)
    given = [t for _ in range(3) for t in next(stream).token_ids]
    assert given == expected[:3]
    with pytest.raises(Interrupted) as caught:
        next(stream)
    (output,) = caught.value.outputs
    assert output.outputs[0].token_ids == expected[:4]
    assert output.outputs[0].finish_reason == "abort"
    assert llm.stats.num_used_blocks == 0


def test_bad_requests_are_refused_before_the_stream_starts(llm):
    with pytest.raises(RequestError, match="no tokens"):
        llm.iterate([])
    with pytest.raises(RequestError, match="320"):
        asyncio.run(collect(llm.stream([320])))
    assert llm.stats.num_steps == 0


def test_a_stop_string_ends_a_stream_and_never_shows(llm):
    prompt = prompts(1)[0]
    free = llm.generate(prompt, RANDOM)[0].outputs[0].text
    stop = re.findall("[^\ufffd]{2}", free)[1]
    at = free.index(stop)
    assert at > 0
    params = SamplingParams(temperature=1.5, max_tokens=40, seed=3, ignore_eos=True, stop=stop)
    whole = llm.generate(prompt, params)[0].outputs[0]
    assert (whole.finish_reason, whole.stop_reason, whole.text) == ("stop", stop, free[:at])
    pieces = list(llm.iterate(prompt, params))
    assert "".join(p.text for p in pieces) == free[:at]
    assert pieces[-1].output.outputs[0] == whole
    assert llm.stats.num_used_blocks == 0
