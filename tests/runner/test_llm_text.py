"""Incremental text: what decoding all at once gives, in whole characters; stop strings anywhere."""

import random

import pytest

from attnkit.runner.detokenizer import TextStream

pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

WORDS = "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \U0001f389 e\u0301 plain <|end|> \ufffd ok"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_models.make_tokenizer()


def stream(tokenizer, ids, **options) -> tuple[list[str], TextStream]:
    text = TextStream(tokenizer, tokenizer.encode("prompt"), **options)
    pieces = []
    for token_id in ids:
        if text.append(token_id):
            break
        pieces.append(text.take())
    pieces.append(text.take(final=True))
    return pieces, text


def decode(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_characters_of_several_tokens_come_whole(tokenizer):
    ids = tokenizer.encode(WORDS)
    assert len(ids) > len(WORDS)
    pieces, text = stream(tokenizer, ids)
    assert "".join(pieces) == text.text() == decode(tokenizer, ids)
    assert "\U0001f389" in pieces
    assert sum("\ufffd" in p for p in pieces) == 1  # the one that is in the text


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_give_what_decoding_at_once_gives(tokenizer, seed):
    rng = random.Random(seed)
    alphabet = [*range(260), *tokenizer.encode(WORDS) * 8]
    ids = [rng.choice(alphabet) for _ in range(rng.randrange(60))]
    expected = decode(tokenizer, ids)
    pieces, text = stream(tokenizer, ids)
    assert "".join(pieces) == text.text() == expected
    lazy = TextStream(tokenizer, [])
    for token_id in ids:
        lazy.append(token_id)
    assert lazy.text() == expected


def test_an_incomplete_end_shows_only_at_the_end(tokenizer):
    ids = tokenizer.encode("ok \U0001f389")[:-1]
    text = TextStream(tokenizer, [])
    for token_id in ids:
        text.append(token_id)
    assert text.text(final=False) in ("", "ok ")
    assert text.take() in ("", "ok ")
    assert text.text(final=True) == "ok \ufffd"


@pytest.mark.parametrize(
    ("written", "stop", "expected", "by"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["three", "two"], "one ", "two"),
        ("one two three", ["o"], "", "o"),
        ("aaab", ["aab"], "a", "aab"),
        ("abcabd", ["abd"], "abc", "abd"),
        ("tail", ["l"], "tai", "l"),
        ("caf\u00e9!", ["\u00e9"], "caf", "\u00e9"),
        ("no such", ["nothing"], "no such", None),
        ("almost sto", ["stop"], "almost sto", None),
        ("x" * 50 + "END", ["END"], "x" * 50, "END"),
        ("<|end|>a", ["<|end|>"], "a", None),  # special tokens have no text
        ("ab", ["ab", "b"], "", "ab"),
    ],
)
def test_stop_strings(tokenizer, written, stop, expected, by):
    pieces, text = stream(tokenizer, tokenizer.encode(written), stop=stop)
    assert text.stopped_by == by
    assert text.text() == "".join(pieces) == expected


@pytest.mark.parametrize("seed", range(20))
def test_what_is_given_out_never_holds_part_of_the_stop_string_that_ends_it(tokenizer, seed):
    rng = random.Random(seed)
    written = "".join(rng.choice("ab\u00e9") for _ in range(40))
    stop = ["".join(rng.choice("ab\u00e9") for _ in range(rng.randrange(3, 6))) for _ in range(2)]
    ends = [(written.index(s) + len(s), s) for s in stop if s in written]
    pieces, text = stream(tokenizer, tokenizer.encode(written), stop=stop)
    if not ends:
        assert "".join(pieces) == written
        assert text.stopped_by is None
        return
    end = min(e for e, _ in ends)
    begin = min(e - len(s) for e, s in ends if e == end)
    assert "".join(pieces) == text.text() == written[:begin]


def test_text_is_held_back_only_while_it_may_become_a_stop_string(tokenizer):
    pieces, _ = stream(tokenizer, tokenizer.encode("a-- b--- c"), stop=["---"])
    assert pieces == ["a", "", "", "-- ", "b", "", "", ""]


def test_a_tokenizer_that_drops_the_first_space_sees_the_prompt():
    """Sentencepiece decoders drop the space of the first word; a continuation keeps it."""

    class Words:
        def decode(self, token_ids, *, skip_special_tokens, clean_up_tokenization_spaces):
            return "".join(f" w{i}" for i in token_ids)[1:]

    text = TextStream(Words(), [7, 8])
    text.append(9)
    text.append(10)
    assert text.text() == " w9 w10"
    first = TextStream(Words(), [])
    first.append(9)
    first.append(10)
    assert first.text() == "w9 w10"
