"""End to end on a GPU: attnkit's runner with and without CUDA graphs beside transformers, in turns.

In: nothing but a GPU: the model is Llama-3.1-8B by its sizes, with random weights made there, and
prompts are random tokens, so neither network nor tokenizer is needed. Out: tokens a second of whole
generations; then, engine by engine, a full decode step and a step of prompts, with the share of it
that the GPU was busy and the share of that which attention took; with --json a record of it all.
Greedy choices of random weights are near ties, so texts part ways after some tokens: the column of
differing tokens is no verdict here.

    python benchmarks/e2e_gpu.py --json benchmarks/e2e-h200.json
    python benchmarks/e2e_gpu.py --quick        # a tiny model on any machine, to see that it runs
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attnkit.bench import machine
from attnkit.bench.e2e import (
    GROUP,
    TextEngine,
    TextWorkload,
    TransformersEngine,
    measure,
    random_prompts,
)
from attnkit.bench.record import Record, Row, now, save
from attnkit.bench.session import with_ratios
from attnkit.bench.table import show
from attnkit.bench.timing import Timing
from attnkit.bench.workloads import DTYPES
from attnkit.runner.engine import Engine
from attnkit.runner.graphs import capture_sizes, choose_recorder
from attnkit.runner.model import PackedModel
from attnkit.runner.sampling_params import SamplingParams

LLAMA_3_1_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
TINY = {
    **LLAMA_3_1_8B,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
}

ATTENTION_KERNELS = (
    "attention_kernel",
    "prefill_kernel",
    "decode_kernel",
    "merge_kernel",
    "write_kernel",
    "encode_kernel",
    "share_decodes_kernel",
    "fill_row_tiles_kernel",
)
"""Parts of the names of attnkit's kernels: attention, writes of the cache, and their planning."""

NUM_TIMED_STEPS, NUM_PROFILED_STEPS = 30, 10


class RunnerEngine:
    """attnkit's runner on a model that is loaded already, which it takes over while it generates."""

    is_rival = False

    def __init__(
        self,
        model: Any,
        backend: str,
        workload: TextWorkload,
        *,
        graphs: bool,
        block_size: int | None,
        compiled: bool = False,
    ) -> None:
        assert workload.num_prompt_tokens is not None
        length = workload.num_prompt_tokens + workload.num_tokens
        self.packed = PackedModel(
            model,
            backend=backend,
            block_size=block_size,
            max_model_len=length,
            max_num_seqs=workload.num_prompts,
            capture_sizes=capture_sizes(workload.num_prompts),
        )
        recorder, _ = choose_recorder(self.packed, graphs)
        per_request = self.packed.kv_plan.max_blocks_per_request(length, 8192)
        self.engine = Engine(
            self.packed,
            num_blocks=1 + workload.num_prompts * per_request,
            max_num_seqs=workload.num_prompts,
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            recorder=recorder,
            graphs_required=graphs,
        )
        self._call = None
        if compiled:
            self.packed.compile()
            # The model is everybody's; compiled is what it does for this engine alone.
            self._call, model._compiled_call_impl = model._compiled_call_impl, None
        self.packed.release()
        modes = " graphs" * graphs + " compiled" * compiled
        self.name = f"attnkit {backend}{modes}"
        chosen = "+".join(sorted({la.selection.name for la in self.packed.layers.values()}))
        self.backend = backend
        self.note = f"backend {chosen}, pages of {self.packed.block_size}"

    @contextmanager
    def attached(self) -> Iterator[Engine]:
        """The model is ours inside."""
        self.packed.attach()
        self.packed.model._compiled_call_impl = self._call
        try:
            yield self.engine
        finally:
            self.packed.model._compiled_call_impl = None
            self.packed.release()

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        with self.attached() as engine:
            entries = [engine.add(prompt, params) for prompt in prompts]
            while not all(entry.request.is_finished for entry in entries):
                engine.step()
        return [entry.request.output_token_ids for entry in entries]


class GenerateBatchEngine:
    """transformers' continuous batching."""

    is_rival = True
    name = "transformers generate_batch"

    def __init__(self, model: Any) -> None:
        self._model = model
        self.note = f"continuous batching, {model.config._attn_implementation}"

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        from transformers import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        attention = self._model.config._attn_implementation
        try:
            outputs = self._model.generate_batch(list(prompts), config, progress_bar=False)
        finally:
            self._model.set_attn_implementation(attention)
        by_prompt = {tuple(output.prompt_ids): output for output in outputs.values()}
        return [by_prompt[tuple(prompt)].generated_tokens for prompt in prompts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Where the time of some steps went on the GPU.

    Attributes:
        kernel_us: of kernels and copies, a step.
        attention_us: of those, attention's.
        num_kernels: a step.
    """

    kernel_us: float
    attention_us: float
    num_kernels: float


def profile_steps(engine: Engine, num_steps: int) -> Profile | None:
    """Run steps under torch's profiler; None on a CPU, or where it may not see the device."""
    if engine.model.device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() or () if e.device_type.name == "CUDA"]
    if not kernels:
        return None
    attention = [e for e in kernels if any(name in e.name for name in ATTENTION_KERNELS)]
    return Profile(
        kernel_us=sum(e.time_range.elapsed_us() for e in kernels) / num_steps,
        attention_us=sum(e.time_range.elapsed_us() for e in attention) / num_steps,
        num_kernels=len(kernels) / num_steps,
    )


def measure_steps(
    runner: RunnerEngine, prompts: Sequence[list[int]], workload: TextWorkload
) -> tuple[list[Row], dict[str, dict[str, Any]]]:
    """A step full of prompts and a step in which all of them decode: time, busy GPU, attention."""
    params = SamplingParams(temperature=0.0, max_tokens=workload.num_tokens, ignore_eos=True)
    with runner.attached() as engine:
        entries = [engine.add(prompt, params) for prompt in prompts]
        prompt_us = _time_steps(engine, 1)
        prompt_profile = profile_steps(engine, 1)
        while any(entry.request.is_prefilling for entry in entries):
            engine.step()
        for _ in range(3):  # The first may capture.
            engine.step()
        left = workload.num_tokens - max(entry.request.num_output_tokens for entry in entries) - 1
        decode_us = _time_steps(engine, min(NUM_TIMED_STEPS, left // 2))
        decode_profile = profile_steps(engine, min(NUM_PROFILED_STEPS, left // 2))
        engine.abort(entries)
    num_tokens = sum(map(len, prompts))
    first = min(8192, num_tokens)
    rows, details = [], {}
    for name, samples, found, rate in (
        (f"step of {first} prompt tokens", prompt_us, prompt_profile, first),
        (
            f"decode step B{len(prompts)} ctx{len(prompts[0])}",
            decode_us,
            decode_profile,
            len(prompts),
        ),
    ):
        timing = Timing.of(samples)
        note = runner.note
        if found is not None:
            busy = found.kernel_us / timing.median_us
            share = found.attention_us / found.kernel_us
            note = (
                f"GPU busy {busy:.0%}, of that attention {share:.0%} ({found.attention_us:.0f} us), "
                f"{found.num_kernels:.0f} kernels"
            )
            details[f"{runner.name}, {name}"] = {"busy": busy, "attention": share, **asdict(found)}
        rows.append(
            Row(
                group=GROUP,
                workload=f"{name} {workload.dtype}",
                contender=runner.name,
                is_rival=False,
                mode="wall",
                note=note,
                median_us=timing.median_us,
                p10_us=timing.p10_us,
                p90_us=timing.p90_us,
                num_samples=timing.num_samples,
                tokens_per_s=rate / timing.median_us * 1e6,
            )
        )
    return rows, details


def _time_steps(engine: Engine, num_steps: int) -> list[float]:
    """Microseconds of each step; every one ends with its tokens on the host."""
    samples = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples


def make_model(sizes: dict[str, Any], dtype: str, device: torch.device) -> Any:
    """A Llama of these sizes with random weights, made where it runs."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=DTYPES[dtype])
    return model.eval()


def main() -> None:
    """Parse, make everything, measure, report."""
    options = _parser().parse_args()
    device = torch.device(options.device)
    workload = TextWorkload(
        num_prompts=options.prompts or (4 if options.quick else 64),
        num_prompt_tokens=options.prompt_tokens or (64 if options.quick else 1024),
        num_tokens=options.tokens or (16 if options.quick else 256),
        dtype=options.dtype,
    )
    assert workload.num_prompt_tokens is not None
    if workload.num_tokens < 16:
        sys.exit(f"--tokens {workload.num_tokens} leaves no steps to look at; give at least 16")
    started = now()
    sizes = TINY if options.quick else LLAMA_3_1_8B
    model = make_model(sizes, workload.dtype, device)
    on_gpu = device.type == "cuda"
    ours = [
        RunnerEngine(model, backend, workload, graphs=graphs, block_size=options.block_size)
        for backend in options.backend or (["hopper", "triton"] if on_gpu else ["cpu"])
        for graphs in ((False, True) if on_gpu else (False,))
        if not (options.no_graphs if graphs else options.no_eager)
    ]
    if options.compile:
        # One only: what torch.compile keeps of a model's code holds the layers it was traced with.
        name = ours[0].backend
        ours.append(
            RunnerEngine(
                model, name, workload, graphs=on_gpu, block_size=options.block_size, compiled=True
            )
        )
    rivals: list[TextEngine] = []
    if "generate" in options.rivals:
        rivals.append(TransformersEngine(model))
    if "generate_batch" in options.rivals:
        rivals.append(GenerateBatchEngine(model))
    prompts = random_prompts(workload.num_prompts, workload.num_prompt_tokens, sizes["vocab_size"])
    rows = measure(
        [*ours, *rivals],
        prompts,
        workload,
        options.rounds,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    steps: list[Row] = []
    details: dict[str, dict[str, Any]] = {workload.name: {**asdict(workload), "model": sizes}}
    for runner in ours:
        made, found = measure_steps(runner, prompts, workload)
        steps += made
        details.update(found)
    steps.sort(key=lambda row: row.workload)
    record = Record(
        **machine.origin(device, started, options.commit),
        ceilings=None,
        workloads=details,
        rows=(*rows, *with_ratios(steps)),
    )
    if options.json is not None:
        save(record, options.json)
    show(record)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    made.add_argument(
        "--backend",
        action="append",
        help="of attnkit; several times (hopper, triton; on a CPU cpu)",
    )
    made.add_argument("--no-graphs", action="store_true", help="attnkit without CUDA graphs alone")
    made.add_argument("--no-eager", action="store_true", help="attnkit with CUDA graphs alone")
    made.add_argument(
        "--compile", action="store_true", help="the first backend also with torch.compile"
    )
    made.add_argument(
        "--rivals",
        nargs="*",
        choices=["generate", "generate_batch"],
        default=["generate"],
        help="of transformers: padded generate, continuous batching (generate)",
    )
    made.add_argument("--prompts", type=int, help="asked at once (64)")
    made.add_argument("--prompt-tokens", type=int, help="of each (1024)")
    made.add_argument("--tokens", type=int, help="generated for each (256)")
    made.add_argument("--dtype", default="bfloat16", help="float32, float16 or bfloat16 (bfloat16)")
    made.add_argument("--block-size", type=int, help="tokens in a page (what the backend prefers)")
    made.add_argument(
        "--rounds", type=int, default=2, help="that count, after one that does not (2)"
    )
    made.add_argument("--quick", action="store_true", help="a tiny model and few tokens")
    made.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="(cuda, if there is one)",
    )
    made.add_argument("--commit", help="of the source, where it carries no git history")
    made.add_argument("--json", type=Path, help="write the record here")
    return made


if __name__ == "__main__":
    main()
