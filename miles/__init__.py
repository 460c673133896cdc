"""miles: distributed RL post-training in which rollout engine and trainer provably run the same policy."""

__version__ = "0.1.0"
