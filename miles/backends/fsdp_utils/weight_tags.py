"""Weights under names: the actor's own, the reference's, and those that made the rollout (`--keep-old-actor`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from miles.backends.fsdp_utils.loading import LoadedPolicy, reshard
from miles.backends.training_utils.actor_history import ActorHistory, Shards


class WeightCopies:
    """Gives the model that holds the weights of a tag. Copies are this rank's shards, kept on the host."""

    def __init__(self, args: Any, actor: LoadedPolicy, ref: LoadedPolicy | None) -> None:
        self.actor, self.ref = actor, ref
        self.ref_interval = getattr(args, "ref_update_interval", None)
        self.history = ActorHistory(args, lambda: take_shards(actor))

    @contextlib.contextmanager
    def weights(self, tag: str) -> Iterator[LoadedPolicy]:
        """The model with the weights of `tag`: `actor` (`critic` in a critic's trainer), `ref` or `old_actor`. Collective."""
        if tag in ("actor", "critic") or (tag == "old_actor" and self.history.old_actor is None):
            yield self.actor
        elif tag == "old_actor" and self.history.old_actor is not None:
            own = take_shards(self.actor)
            put_shards(self.actor, self.history.old_actor)
            try:
                yield self.actor
            finally:
                put_shards(self.actor, own)
        elif tag == "ref":
            if self.ref is None:
                raise ValueError("log-probs of the reference are needed, but no reference model was loaded")
            yield self.ref
        else:
            raise ValueError(f"the FSDP trainer keeps no weights named {tag!r}: it has actor, ref and old_actor")

    def published(self) -> None:
        """The engines got the actor's weights."""
        self.history.published()

    def before_rollout(self) -> None:
        """A batch is about to train: `old_actor` becomes the weights that made it."""
        self.history.before_rollout()

    def after_rollout(self, rollout_id: int) -> None:
        """Move the reference to the actor every `--ref-update-interval` rollouts."""
        if self.ref is not None and self.ref_interval and (rollout_id + 1) % self.ref_interval == 0:
            put_shards(self.ref, take_shards(self.actor))

    def changing_models(self) -> dict[str, LoadedPolicy]:
        """Models besides the actor that a checkpoint must hold."""
        return {"ref": self.ref} if self.ref is not None and self.ref_interval else {}


def take_shards(loaded: LoadedPolicy) -> Shards:
    """Host copies of this rank's shards."""
    reshard(loaded.module)
    return {name: _local(p).detach().to("cpu", copy=True) for name, p in loaded.module.named_parameters()}


@torch.no_grad()
def put_shards(loaded: LoadedPolicy, shards: Shards) -> None:
    reshard(loaded.module)  # gathered parameters would keep the values from before
    for name, p in loaded.module.named_parameters():
        _local(p).copy_(shards[name])


def _local(p: torch.Tensor) -> torch.Tensor:
    return p.to_local() if isinstance(p, DTensor) else p
