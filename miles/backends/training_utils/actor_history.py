"""Which of the actor's earlier weights made a rollout (`--keep-old-actor`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# This rank's part of a model's weights by name, on the host.
Shards = dict[str, torch.Tensor]


class ActorHistory:
    """Keeps host copies of what was published to the engines, as far as a run asks for them."""

    def __init__(self, args: Any, take: Callable[[], Shards]) -> None:
        """`take` copies the actor's current weights to the host."""
        self.take = take
        self.keeps = bool(getattr(args, "keep_old_actor", False))
        # train_async.py starts the next rollout before it trains on this one and publishes the result.
        self.overlaps = getattr(args, "driver", None) == "train_async.py"
        self._published: Shards | None = None
        self._makes_next: Shards | None = None
        self.old_actor: Shards | None = None

    def published(self) -> None:
        """The engines got the actor's weights."""
        if self.keeps:
            self._published = self.take()

    def before_rollout(self) -> None:
        """A batch is about to train: `old_actor` becomes the weights that made it."""
        made_this = self._makes_next if self.overlaps and self._makes_next is not None else self._published
        self.old_actor, self._makes_next = made_this, self._published
