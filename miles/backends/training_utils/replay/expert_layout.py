"""Which layers of a model have experts, and the routes through them: as engines send them, as they travel, how they are checked.

Engines send int32 for every layer, dense ones included: `(tokens - 1) * layers * topk * 4` bytes (article, section 4.1). What
travels are the layers that have experts, in the smallest integer type that holds an expert's number.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

NO_ROUTE = -1  # in every place of a row: the engine did not say where this token went in this layer


class RouteError(ValueError):
    """Routes that are not those of this model: the text says what they are and what they should be."""


@dataclass(frozen=True)
class ExpertLayout:
    """`moe_layers`: numbers of the layers with experts, among all `num_layers`; each token goes to `topk` of `num_experts`."""

    num_layers: int
    moe_layers: tuple[int, ...]
    topk: int
    num_experts: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ExpertLayout | None:
        """From the text part of a Hugging Face `config.json`; None for a dense model."""
        experts = next(
            (config[n] for n in ("num_experts", "n_routed_experts", "num_local_experts") if config.get(n)), 0
        )
        layers = _moe_layers(config) if experts else ()
        topk = config.get("num_experts_per_tok")
        if not layers or topk is None:
            return None
        return cls(config["num_hidden_layers"], layers, topk, experts)

    # ---- from the engine -----------------------------------------------------------------------------------------

    def decode(self, encoded: str, rows: int) -> np.ndarray:
        """`meta_info.routed_experts`, base64 of int32 `[rows, layers, topk]`, as `[rows, moe layers, topk]`.

        Raises: RouteError for another size, an expert that does not exist, or one that is named twice.
        """
        try:
            flat = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
        except (binascii.Error, ValueError, TypeError) as error:
            raise RouteError(f"routed_experts is no base64 of int32: {error}") from error
        if flat.size != rows * self.num_layers * self.topk:
            raise RouteError(
                f"the engine sent {flat.size} expert indices for {rows} rows of {self.num_layers} layers x {self.topk} experts"
            )
        return self.compact(flat.reshape(rows, self.num_layers, self.topk))

    # ---- as they travel ------------------------------------------------------------------------------------------

    def compact(self, routes: Any) -> np.ndarray:
        """`[rows, layers or moe layers, topk]` of any integer type, checked, as `[rows, moe layers, topk]` in the smallest one.

        Raises: RouteError as `decode` does.
        """
        array = np.asarray(routes)
        if array.dtype.kind not in "iu":
            raise RouteError(f"routes have type {array.dtype}, not an integer type")
        if array.ndim == 3 and array.shape[1] == self.num_layers != len(self.moe_layers):
            array = array[:, list(self.moe_layers)]
        wanted = (len(self.moe_layers), self.topk)
        if array.ndim != 3 or array.shape[1:] != wanted:
            raise RouteError(
                f"routes have shape {list(array.shape)}, not [tokens - 1, {wanted[0]} layers with experts, {wanted[1]} experts]"
            )
        absent = self._check_values(array)
        return np.ascontiguousarray(array, dtype=self.dtype(with_absent=absent))

    def dtype(self, *, with_absent: bool = False) -> np.dtype:
        """The smallest type that holds every expert's number, and `NO_ROUTE` where asked for."""
        types = (np.int8, np.int16, np.int32) if with_absent else (np.uint8, np.uint16, np.uint32)
        return np.dtype(next(t for t in types if self.num_experts - 1 <= np.iinfo(t).max))

    def _check_values(self, array: np.ndarray) -> bool:
        """Whether some rows have no route. Raises: RouteError that names the first wrong place."""
        wrong = array >= self.num_experts
        absent = None
        if array.dtype.kind == "i" and array.size and int(array.min()) < 0:
            absent = (array == NO_ROUTE).all(axis=-1)
            wrong |= (array < 0) & ~absent[..., None]
        if wrong.any():
            row, layer, _ = (int(x) for x in np.argwhere(wrong)[0])
            raise RouteError(
                f"token {row} in layer {self.moe_layers[layer]} goes to experts {array[row, layer].tolist()}, "
                f"and the model has experts 0 to {self.num_experts - 1}"
            )
        twice = np.zeros(array.shape[:2], dtype=bool)
        for shift in range(1, self.topk):
            twice |= (array[..., shift:] == array[..., :-shift]).any(axis=-1)
        if absent is not None:
            twice &= ~absent
        if twice.any():
            row, layer = (int(x) for x in np.argwhere(twice)[0])
            raise RouteError(
                f"token {row} in layer {self.moe_layers[layer]} goes to experts {array[row, layer].tolist()}, one of them twice: "
                f"the engine did not record this token ({int(twice.sum())} such places)"
            )
        return bool(absent is not None and absent.any())


def routed_rows(routes: np.ndarray) -> np.ndarray:
    """bool `[rows]`: which rows of `[rows, moe layers, topk]` have a route in every layer."""
    if routes.dtype.kind == "u":
        return np.ones(len(routes), dtype=bool)
    return np.all(routes >= 0, axis=(1, 2))


def _moe_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    layers = range(config["num_hidden_layers"])
    if kinds := config.get("mlp_layer_types"):  # by name, one a layer
        return tuple(i for i, kind in enumerate(kinds) if kind == "sparse")
    if (dense := config.get("first_k_dense_replace")) is not None:  # DeepSeek, GLM
        every = config.get("moe_layer_freq") or 1
        return tuple(i for i in layers if i >= dense and i % every == 0)
    every, dense_layers = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or [])  # Qwen
    return tuple(i for i in layers if i not in dense_layers and (i + 1) % every == 0)
