"""The critic of PPO: a trainer like the actor's, whose model ends in one number a token and whose loss is the value loss."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from miles.utils.seeds import derive_seed

HEAD_STD = 0.02


def critic_args(args: Any, start_rollout_id: int) -> Any:
    """The critic's own view of a run's arguments.

    Its checkpoints are saved just before the actor's, so that a resumed run takes the one of the same rollout. Where the
    actor starts afresh, a `--critic-load` with checkpoints gives the critic its weights and nothing else.
    """
    own = copy.deepcopy(args)
    changes = {
        "loss_type": "value_loss",
        "normalize_advantages": False,  # returns are not whitened
        "load": args.critic_load,
        "save": args.critic_save,
        "ckpt_step": start_rollout_id - 1 if start_rollout_id else None,
        "finetune": start_rollout_id == 0,
        "lr": args.critic_lr,
        "min_lr": min(args.min_lr, args.critic_lr),
        "lr_warmup_iters": args.critic_lr_warmup_iters,
        "lr_warmup_fraction": None,
        # The reference model, corrections and what looks at log-probs are the actor's.
        "use_kl_loss": False,
        "kl_coef": 0.0,
        "entropy_coef": 0.0,
        "use_opd": False,
        "use_tis": False,
        "get_mismatch_metrics": False,
        "keep_old_actor": False,
        "skip_actor_forward_only": False,
        "use_rollout_entropy": False,
        "rollout_data_postprocess_path": None,
        "save_debug_train_data": None,
    }
    for name, value in changes.items():
        setattr(own, name, value)
    return own


def add_value_head(model: Any, args: Any, *, initialise: bool) -> None:
    """Replace the output projection of a Hugging Face model by one to a single number: `[1, hidden]`, no bias, not tied.

    Weights are normal with a deviation of 0.02, from the run's seed; left as they are without `initialise`.
    """
    config = model.config.get_text_config()
    old = model.get_output_embeddings()
    head = nn.Linear(config.hidden_size, 1, bias=False, dtype=old.weight.dtype, device=old.weight.device)
    if initialise:
        generator = torch.Generator().manual_seed(derive_seed(getattr(args, "seed", 0), "value head") % 2**63)
        with torch.no_grad():
            head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * HEAD_STD)
    model.config.tie_word_embeddings = config.tie_word_embeddings = False
    model.set_output_embeddings(head)
