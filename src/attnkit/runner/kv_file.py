"""A prefix's keys and values in a safetensors file: a `KVConnector`.

In: `PrefixContents`. Out: a file with one tensor per layer, the token ids, and metadata that says what
they are and how their bytes add up. A file is written whole or not at all, and read only when all of it
has been found to be right.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from attnkit.arguments import check_kind
from attnkit.errors import CacheError
from attnkit.kvcache.transfer import LayerContents, PrefixContents, check_fits

FORMAT = "attnkit-kv-1"
_TOKENS = "token_ids"


class SafetensorsFile:
    """One prefix in one file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """
        Args:
            path: of the file, which need not be there.

        Raises:
            ConfigurationError: this is no path.
        """
        check_kind("path", path, (str, os.PathLike), "the path of a file")
        self.path = Path(path)

    def check_writable(self) -> None:
        """Ask before the work is done whether `save` could write.

        Raises:
            CacheError: it could not.
        """
        folder = self.path.parent
        if self.path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise CacheError(
                f"{self.path} cannot be written: it needs a folder that is there and may be written "
                "to; give a place that can"
            )

    def check_readable(self) -> None:
        """Ask before a model is loaded whether there is such a file.

        Raises:
            CacheError: there is none, or it is no file of saved keys and values.
        """
        self._read(names=())

    def save(self, contents: PrefixContents) -> None:
        """Write the file, replacing what was there.

        Raises:
            CacheError: it cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = {_TOKENS: torch.tensor(contents.token_ids, dtype=torch.int64)}
        layers: dict[str, Any] = {}
        for name, layer in contents.layers.items():
            tensors[name] = layer.rows.contiguous()
            layers[name] = {
                "first_token": layer.first_token,
                "kv_cache_dtype": layer.kv_cache_dtype,
                "scales": layer.scales,
            }
        metadata = {
            "format": FORMAT,
            "model": contents.model,
            "layers": json.dumps(layers),
            "digests": json.dumps({name: _digest(t) for name, t in tensors.items()}),
        }
        part = self.path.with_name(self.path.name + ".part")
        try:
            save_file(tensors, part, metadata=metadata)
            os.replace(part, self.path)
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise CacheError(
                f"{self.path} cannot be written: {error}; give a place that can"
            ) from error

    def load(self, wanted: PrefixContents) -> PrefixContents:
        """Read and check everything.

        Raises:
            CacheError: there is no such file, it is damaged or of another format, model or shape.
        """
        metadata, tensors = self._read(names=None)
        contents = _parse(self.path, metadata, tensors)
        check_fits(contents, wanted, str(self.path))
        return contents

    def _read(
        self, names: tuple[str, ...] | None
    ) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        """Metadata and some tensors, or all of them (None)."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, "pt") as file:  # type: ignore[no-untyped-call]
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise CacheError(
                        f"{self.path} is a safetensors file, but not one of saved keys and values "
                        f"(format {metadata.get('format')} instead of {FORMAT}); give one that "
                        "--kv-save or LLM.save_kv wrote"
                    )
                wanted = file.keys() if names is None else names
                return metadata, {name: file.get_tensor(name) for name in wanted}
        except OSError as error:
            raise CacheError(
                f"{self.path} cannot be read: {error}; give a file that LLM.save_kv wrote"
            ) from error
        except SafetensorError as error:
            raise CacheError(
                f"{self.path} is no safetensors file, or damaged: {error}; save it again"
            ) from error


def _parse(
    path: Path, metadata: dict[str, str], tensors: dict[str, torch.Tensor]
) -> PrefixContents:
    try:
        digests = json.loads(metadata["digests"])
        facts = json.loads(metadata["layers"])
        bad = [name for name in {*digests, *tensors} if digests[name] != _digest(tensors[name])]
        if bad:
            raise CacheError(f"{path}: the bytes of {min(bad)} have changed; save it again")
        layers = {
            name: LayerContents(
                first_token=int(fact["first_token"]),
                rows=tensors[name],
                kv_cache_dtype=fact["kv_cache_dtype"],
                scales=(tuple(fact["scales"][0]), tuple(fact["scales"][1])),
            )
            for name, fact in facts.items()
        }
        token_ids = tuple(tensors[_TOKENS].tolist())
        model = metadata["model"]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CacheError(f"{path} is damaged: {error!r} in its metadata; save it again") from error
    for name, layer in layers.items():
        if layer.rows.dim() != 3:
            raise CacheError(f"{path} is damaged: layer {name} has {layer.rows.dim()} dimensions")
    return PrefixContents(model=model, token_ids=token_ids, layers=layers)


def _digest(tensor: torch.Tensor) -> str:
    """Of dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.flatten().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
