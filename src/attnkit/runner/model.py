"""A transformers causal language model, run as one packed stream through attnkit layers.

In: a loaded model and how to run it. Out: `PackedModel`: the layers it has (built from `discovery`),
what they keep in the cache, and `forward`, which returns the logits of the wanted rows. Its model code
is transformers', unmodified; all requests of a step are one sequence to it, with `position_ids` of their
own and no cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from attnkit.arguments import check_count
from attnkit.compiled import forward_context
from attnkit.contract import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionSpec,
    CacheConfig,
    CompilationConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from attnkit.errors import ConfigurationError, ModelError
from attnkit.kvcache.groups import plan_kv_cache
from attnkit.kvcache.pool import PagedKVCache
from attnkit.paged_layer import logical_page
from attnkit.runner import hook, two_sides
from attnkit.runner.checkpoint import resolve_checkpoint
from attnkit.runner.discovery import LayerFacts
from attnkit.runner.layers import LayerMaker, indexers_of, takes_ranges
from attnkit.runner.loading import load_model
from attnkit.runner.shared_pages import allocate_pages, blocks_per_block
from attnkit.runner.step import ImageRows, StepInputs
from attnkit.runner.takeover import (
    attention_names,
    count_names,
    explain_layers,
    left_alone_on_error,
    probe,
    restore_attention,
    set_attention,
)

_LENGTH_NAMES = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions",
)  # fmt: skip


class PackedModel:
    """The model and its attention layers.

    Attributes:
        model: transformers' module, in eval mode.
        dtype: of the attention.
        device: where it runs.
        max_model_len: longest sequence, in tokens.
        vocab_size: width of the logits.
        layers: layer name -> `attnkit.Attention`, or `attnkit.MLAAttention` where the model expands
            latents and no backend for keys and values was named; in the order of the forward pass.
        indexers: layer name -> who chooses the keys of a sparse layer. Their keys are companions in
            `kv_plan`.
        kv_plan: what they keep in the cache, and which of them share a block table.
        block_size: tokens in a page; more in groups whose tokens take fewer bytes (see `kv_plan`).
        blocks_per_block: kernel blocks in a page.
        capture_sizes: rows that decode steps may be captured with, smallest first.
        attention_mask: what the model must be given as its own; None: nothing.
        token_types: which tokens of a prompt see each other in both directions; None: none do.
        takes_ranges: its layers were built for such prompts.
    """

    def __init__(
        self,
        model: Any,
        *,
        backend: str | type[AttentionBackend] = "auto",
        block_size: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        capture_sizes: Sequence[int] = (),
        use_kv_connector: bool = False,
        use_batch_invariant: bool = False,
        use_token_types: bool = False,
        index_cache_dtype: str = "auto",
    ) -> None:
        """Probe `model` and attach a layer to each of its attention modules.

        Args:
            model: a transformers causal language model with its weights where it shall run. One that is
                refused is left as it was.
            backend: as in `attnkit.Attention`.
            block_size: None: what the chosen backends prefer.
            max_model_len: None: what the model's configuration says. Smaller values are allowed.
            max_num_seqs: most requests in a step; backends size buffers by it.
            max_num_batched_tokens: most tokens in a step, likewise.
            capture_sizes: rows that decode steps may be captured with, smallest first, likewise.
            use_kv_connector: pages will be copied out of and into the cache.
            use_batch_invariant: as in `attnkit.Attention`, for every layer.
            use_token_types: of a model whose tokens see each other by type, prompts with types will
                come: its layers get a backend that does ranges, unless another is named.
            index_cache_dtype: what indexers' keys are stored as, one of `attnkit.indexer.INDEX_FORMATS`.

        Raises:
            ModelError: the model cannot be driven.
            ConfigurationError: a length or block size that is not allowed, or a format of keys for a
                model without indexers.
            BackendError: no backend for one of its layers.
        """
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.max_model_len = max_model_len_of(model.config, max_model_len)
        self.capture_sizes = tuple(capture_sizes)
        self._around_step: Callable[[], AbstractContextManager[None]] = nullcontext
        self._previous = attention_names(model)
        with left_alone_on_error(model):
            facts = self._probe()
            if index_cache_dtype != "auto" and not any(fact.indexer for fact in facts):
                raise ConfigurationError(
                    f"index_cache_dtype {index_cache_dtype!r} is for models whose layers choose keys "
                    f"(DeepSeek-V3.2), and {type(model).__name__} has none; leave it out"
                )
            self.token_types = facts[0].token_types
            self.takes_ranges = use_token_types and takes_ranges(facts[0], backend)
            self._maker = LayerMaker(
                backend=backend,
                device=self.device,
                use_kv_connector=use_kv_connector,
                use_batch_invariant=use_batch_invariant,
                index_cache_dtype=index_cache_dtype,
                takes_ranges=self.takes_ranges,
            )
            self._build(facts, block_size, max_num_seqs, max_num_batched_tokens)
            self._modules = {fact.name: fact.module for fact in facts}
            self.attach()

    def _probe(self) -> tuple[LayerFacts, ...]:
        """The attention layers that keep something."""
        if two_sides.is_encoder_decoder(self.model):
            raise ModelError(
                f"{type(self.model).__name__} is an encoder-decoder, which is not run by its decoder "
                "alone; generate with attnkit.LLM"
            )
        return probe(self.model, self.max_model_len)

    def explain(self) -> str:
        """Which backend runs which layers, and why not the others."""
        return explain_layers(self.layers)

    @property
    def capture_refusal(self) -> str | None:
        """Why its steps cannot be captured as graphs; None if decode steps can."""
        never = [
            name
            for name, layer in self.layers.items()
            if layer.get_cudagraph_support() is AttentionCGSupport.NEVER
        ]
        if not never:
            waiting = [n for n, x in self.indexers.items() if not x.kernels.is_capturable]
            return f"the keys of {count_names(waiting)} are chosen on the host" if waiting else None
        backend = self.layers[never[0]].selection.name
        return f"{backend} says AttentionCGSupport.NEVER, and runs {count_names(never)}"

    def attach(self) -> None:
        """Take the model's attention over again after a `release`, and from another that has it."""
        set_attention(self.model, hook.RUN)
        for name, module in self._modules.items():
            hook.attach(module, self.layers[name])

    def release(self) -> None:
        """Give the model its former attention back."""
        for module in self._modules.values():
            hook.detach(module)
        restore_attention(self.model, self._previous)

    def _build(
        self,
        facts: Sequence[LayerFacts],
        block_size: int | None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        """Layers, and how their pages fit together."""
        model = self.model
        self.dtype = facts[0].dtype
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.vocab_size = int(model.config.get_text_config().vocab_size)

        config = VllmConfig(
            model_config=ModelConfig(dtype=self.dtype, max_model_len=self.max_model_len),
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
            ),
            compilation_config=CompilationConfig(cudagraph_capture_sizes=self.capture_sizes),
        )
        default = 16 if self.device.type == "cuda" else 64
        wanted = default if block_size is None else block_size
        # Made once to see which backends are chosen, and again when their page is known.
        layers = {fact.name: self._maker.make(fact, wanted, config) for fact in facts}
        if block_size is None:
            wanted = max(la.backend.get_preferred_block_size(default) for la in layers.values())
        self.block_size = wanted
        specs: dict[str, AttentionSpec] = {}
        for name, layer in layers.items():
            specs[name] = self._cache_spec(layer, wanted)
        beside = {
            name: (indexer.layer_name, indexer.get_kv_cache_spec(wanted))
            for name, indexer in indexers_of(layers).items()
        }
        own_shape = [n for n, la in layers.items() if logical_page(la.backend, specs[n]) is None]
        self.kv_plan = plan_kv_cache(specs, beside, alone=own_shape)
        self.blocks_per_block = blocks_per_block(self.kv_plan, layers)
        config = replace(config, cache_config=CacheConfig(block_size=wanted))
        sizes = {n: s.block_size // self.blocks_per_block for n, s in self.kv_plan.specs.items()}
        self.layers = {f.name: self._maker.make(f, sizes[f.name], config) for f in facts}
        self.indexers = indexers_of(self.layers)
        self.attention_mask = None
        if self.indexers:
            self.attention_mask = torch.empty(hook.NO_MASK, device=self.device)

    def _cache_spec(
        self, layer: hook.ModelLayer | hook.ModelLatentLayer, block_size: int
    ) -> AttentionSpec:
        """What a layer keeps."""
        spec = layer.get_kv_cache_spec(block_size)
        assert spec is not None, "decoder layers own a cache"
        return spec

    def allocate(self, num_blocks: int, *, poison: bool = False) -> PagedKVCache:
        """Memory for `num_blocks` pages of every layer, in a layout all backends can read.

        Args:
            num_blocks: of `block_size` tokens, the null block included.
            poison: fill pages with NaN (see `PagedKVCache`).

        Raises:
            ConfigurationError: the layers' backends have no layout in common.
        """
        return allocate_pages(
            self.kv_plan,
            self.layers,
            self.blocks_per_block,
            self.device,
            num_blocks,
            poison=poison,
        )

    def compile(self) -> None:
        """Let torch.compile fuse what lies between weights and attention, from the next step on."""
        # Imports torch._inductor, for those who compile.
        from attnkit.runner.compiling import compile_model, compiling

        compile_model(self.model)
        self._around_step = compiling

    def run(
        self, inputs: StepInputs, plans: Mapping[str, Any], cache: PagedKVCache
    ) -> torch.Tensor:
        """`forward` of a step's inputs."""
        return self.forward(
            inputs.input_ids,
            inputs.positions,
            inputs.logits_indices,
            plans,
            cache,
            inputs.image_rows,
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        plans: Mapping[str, Any],
        cache: PagedKVCache,
        image_rows: ImageRows | None = None,
    ) -> torch.Tensor:
        """Run one step.

        Args:
            input_ids: int64 (num_tokens,), all requests after each other.
            positions: int64 (num_tokens,), each token's position in its request.
            logits_indices: int64 (num_rows,), the tokens whose logits are wanted.
            plans: layer name -> plan, from a `StepPlanner`.
            cache: the pages they speak of.
            image_rows: what stands in the place of some tokens' embeddings; None: nothing does.

        Returns:
            Logits (num_rows, vocab_size) in the model's dtype.
        """
        options: dict[str, Any] = {}
        if self._takes_logits_to_keep:
            options["logits_to_keep"] = logits_indices
        if self.attention_mask is not None:
            options["attention_mask"] = self.attention_mask
        if image_rows is None:
            options["input_ids"] = input_ids[None]
        with (
            torch.inference_mode(),
            forward_context(plans, cache.by_layer, positions),
            self._around_step(),
        ):
            if image_rows is not None:
                options["inputs_embeds"] = self._embed(input_ids, image_rows)[None]
            logits = self.model(position_ids=positions[None], use_cache=False, **options).logits[0]
        return logits if self._takes_logits_to_keep else logits[logits_indices]

    def _embed(self, input_ids: torch.Tensor, image_rows: ImageRows) -> torch.Tensor:
        """Embeddings (num_tokens, hidden_size), those of images in their places."""
        embedded = self.model.get_input_embeddings()(input_ids)
        return embedded.index_copy(0, image_rows.rows, image_rows.vectors.to(embedded.dtype))


def load_layer_facts(model: str | None, dtype: torch.dtype) -> tuple[LayerFacts, ...]:
    """The attention layers of a model, without building any: for `attnkit explain`.

    Args:
        model: as in `resolve_checkpoint`.
        dtype: to load it in.

    Raises:
        ModelError: it cannot be found, loaded or driven.
    """
    loaded, _ = load_model(resolve_checkpoint(model), dtype, torch.device("cpu"))
    return probe(loaded.eval(), max_model_len_of(loaded.config, None))


def max_model_len_of(config: Any, given: int | None) -> int:
    """The longest sequence: what was asked for, or what transformers' configuration of a model says.

    Raises:
        ConfigurationError: neither says it, or the model's is less.
    """
    check_count("max_model_len", given, optional=True)
    text = config.get_text_config()
    own = next((n for name in _LENGTH_NAMES if (n := getattr(text, name, None))), None)
    if given is None:
        if own is None:
            raise ConfigurationError(
                f"the configuration of {config.model_type} does not say how long a sequence may be; "
                "give max_model_len"
            )
        return int(own)
    if own is not None and given > own:
        raise ConfigurationError(f"max_model_len {given} is not allowed; give 1 to {own}")
    return int(given)  # Not numpy's, of which not all behaves alike.
