import math
from types import SimpleNamespace

import pytest
import torch

from miles.backends.training_utils.lr_schedule import LRSchedule, ScheduleConfig


def config(**changes):
    return ScheduleConfig(**{**dict(max_lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=20), **changes})


def test_warmup_rises_from_the_initial_rate():
    c = config(init_lr=0.2, decay_style="linear")
    assert [c.lr(s) for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_constant_stays():
    c = config(decay_style="constant")
    assert {c.lr(s) for s in (4, 10, 20, 1000)} == {1.0}
    assert config(decay_style="constant", warmup_steps=0).lr(0) == 1.0


def test_linear_falls_to_the_minimum_and_stays():
    c = config(decay_style="linear")
    assert c.lr(12) == pytest.approx(0.1 + 0.9 * 0.5) and c.lr(20) == pytest.approx(0.1) and c.lr(99) == 0.1


def test_cosine():
    c = config(decay_style="cosine")
    assert c.lr(8) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert c.lr(12) == pytest.approx(0.55) and c.lr(20) == pytest.approx(0.1)


def test_inverse_square_root():
    c = config(decay_style="inverse-square-root")
    assert c.lr(16) == pytest.approx(0.5) and c.lr(9) == pytest.approx(2 / 3) and c.lr(21) == 0.1
    assert config(decay_style="inverse-square-root", min_lr=0.9).lr(16) == 0.9


@pytest.mark.parametrize(
    ("style", "middle"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_wsd_is_stable_and_then_anneals(style, middle):
    c = config(decay_style="WSD", wsd_decay_steps=8, wsd_decay_style=style)
    assert c.lr(5) == c.lr(12) == pytest.approx(1.0)
    assert c.lr(16) == pytest.approx(0.1 + 0.9 * middle) and c.lr(20) == pytest.approx(0.1)


@pytest.mark.parametrize(("style", "middle"), [("constant", 0.3), ("linear", 0.2), ("cosine", 0.2)])
def test_weight_decay_grows(style, middle):
    c = config(start_weight_decay=0.1, end_weight_decay=0.3, weight_decay_style=style)
    assert c.weight_decay(10) == pytest.approx(middle) and c.weight_decay(50) == pytest.approx(0.3)


def test_every_wrong_flag_is_named_at_once():
    with pytest.raises(ValueError) as error:
        config(decay_style="cosin", min_lr=2.0, init_lr=3.0)
    for text in ("--lr-decay-style 'cosin'", "--min-lr 2.0", "--lr-warmup-init 3.0"):
        assert text in str(error.value)
    with pytest.raises(ValueError, match="--lr-wsd-decay-iters"):
        config(decay_style="WSD")
    with pytest.raises(ValueError, match="shorter than --lr-decay-iters 20"):
        config(decay_style="linear", warmup_steps=20)


def test_from_the_flags():
    args = SimpleNamespace(lr=1e-6, lr_decay_style="cosine", lr_warmup_fraction=0.1, weight_decay=0.1, min_lr=1e-7)
    c = ScheduleConfig.from_args(args, train_iters=50)
    assert (c.decay_steps, c.warmup_steps, c.end_weight_decay, c.min_lr) == (50, 5.0, 0.1, 1e-7)
    args.lr_decay_iters = 200
    assert ScheduleConfig.from_args(args, train_iters=50).warmup_steps == 20.0
    args.lr_warmup_iters = 3
    with pytest.raises(ValueError, match="--lr-warmup-fraction and --lr-warmup-iters"):
        ScheduleConfig.from_args(args, train_iters=50)
    args.lr_warmup_fraction = None
    assert ScheduleConfig.from_args(args, train_iters=50).warmup_steps == 3


def optimizer():
    p, q = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    return torch.optim.AdamW([{"params": [p]}, {"params": [q], "wd_mult": 0.0, "lr_mult": 2.0}], lr=9.0)


def test_the_schedule_drives_the_optimizer_groups():
    opt = optimizer()
    schedule = LRSchedule(opt, config(decay_style="linear", end_weight_decay=0.1))
    assert schedule.metrics() == {"train/lr-pg_0": 0.0, "train/lr-pg_1": 0.0}
    schedule.step()
    assert schedule.metrics() == {"train/lr-pg_0": 0.25, "train/lr-pg_1": 0.5}
    assert [g["weight_decay"] for g in opt.param_groups] == [0.1, 0.0]


def test_resume_continues_where_it_was():
    whole, first = (
        LRSchedule(optimizer(), config(decay_style="cosine")),
        LRSchedule(optimizer(), config(decay_style="cosine")),
    )
    for _ in range(7):
        whole.step()
    for _ in range(3):
        first.step()
    second = LRSchedule(optimizer(), config(decay_style="cosine"))
    second.load_state_dict(first.state_dict())
    for _ in range(4):
        second.step()
    assert second.metrics() == whole.metrics()


def test_another_schedule_is_refused_taken_or_overridden(caplog):
    saved = LRSchedule(optimizer(), config(decay_style="linear"))
    for _ in range(12):
        saved.step()
    state = saved.state_dict()
    ours = LRSchedule(optimizer(), config(decay_style="linear", max_lr=2.0))
    with pytest.raises(ValueError, match=r"max_lr is 2\.0 and was 1\.0"):
        ours.load_state_dict(state)
    ours.load_state_dict(state, override=True)
    assert ours.metrics()["train/lr-pg_0"] == pytest.approx(0.1 + 1.9 * 0.5)
    ours.load_state_dict(state, use_checkpoint=True)
    assert ours.metrics() == saved.metrics() and "max_lr is 2.0 and was 1.0" in caplog.text
    with pytest.raises(ValueError, match="choose one"):
        ours.load_state_dict(state, use_checkpoint=True, override=True)
