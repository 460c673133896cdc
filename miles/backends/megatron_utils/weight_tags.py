"""Weights under names (actor, ref, old_actor, teacher): one model on the device, the others on the host, swapped in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from miles.backends.training_utils.actor_history import ActorHistory, Shards


class WeightCopies:
    """Lends the model the weights of a tag. Copies are this rank's parameters and buffers, on the host."""

    def __init__(self, args: Any, chunks: Sequence[Any], fixed: dict[str, Shards]) -> None:
        """`fixed`: the weights of the other tags, as `take_shards` made them."""
        self.chunks, self.fixed = list(chunks), fixed
        self.ref_interval = getattr(args, "ref_update_interval", None)
        self.history = ActorHistory(args, lambda: take_shards(self.chunks))

    @contextlib.contextmanager
    def weights(self, tag: str) -> Iterator[None]:
        """Run with the weights of `tag`; the actor's come back afterwards. Collective."""
        wanted = self._find(tag)
        if wanted is None:
            yield
            return
        own = take_shards(self.chunks)
        put_shards(self.chunks, wanted)
        try:
            yield
        finally:
            put_shards(self.chunks, own)

    def _find(self, tag: str) -> Shards | None:
        if tag == "actor":
            return None
        if tag == "old_actor":
            return self.history.old_actor
        if tag not in self.fixed:
            wanted = {"ref": "reference", "teacher": "teacher"}.get(tag)
            if wanted is None:
                raise ValueError(f"the Megatron trainer keeps no weights named {tag!r}")
            raise ValueError(f"log-probs of the {wanted} are needed, but no {wanted} model was loaded")
        return self.fixed[tag]

    def published(self) -> None:
        """The engines got the actor's weights."""
        self.history.published()

    def before_rollout(self) -> None:
        """A batch is about to train: `old_actor` becomes the weights that made it."""
        self.history.before_rollout()

    def after_rollout(self, rollout_id: int) -> None:
        """Move the reference to the actor every `--ref-update-interval` rollouts."""
        if "ref" in self.fixed and self.ref_interval and (rollout_id + 1) % self.ref_interval == 0:
            self.fixed["ref"] = take_shards(self.chunks)

    def put_back(self, shards: Shards) -> None:
        """Give the model weights that `take_shards` made."""
        put_shards(self.chunks, shards)

    @property
    def moving_reference(self) -> Shards | None:
        """The reference, where it changes while training, so that a checkpoint must hold it."""
        return self.fixed.get("ref") if self.ref_interval else None


def take_shards(chunks: Sequence[Any]) -> Shards:
    """Host copies of this rank's parameters and buffers, by chunk and name."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(chunks)}


@torch.no_grad()
def put_shards(chunks: Sequence[Any], shards: Shards) -> None:
    for name, tensor in _tensors(chunks):
        tensor.copy_(shards[name])


def _tensors(chunks: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for i, chunk in enumerate(chunks):
        model = unwrap_model(chunk)
        for name, tensor in model.named_parameters():
            yield f"{i}.{name}", tensor
        for name, tensor in model.named_buffers():
            yield f"{i}.{name}", tensor
