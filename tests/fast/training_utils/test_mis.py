"""Masked importance sampling beside loops over its definition; its settings; its sums over a step."""

import itertools
import math

import pytest
import torch

from miles.backends.training_utils.loss_hub.mis import compute_mis_weights, compute_mis_weights_with_cp
from miles.backends.training_utils.scoring import plan_scoring
from tests.fast.training_utils.example import MASKS, OLD, ROLLOUT, SUMS, evaluate, slow_reduce, slow_token_losses
from tests.fast.training_utils.toy import make_args

MIS = "miles.backends.training_utils.loss_hub.mis.compute_mis_weights_with_cp"
NAN = float("nan")


def slow_weights(level, mode, low, high, rs=None, veto=None, normalize=False, old=OLD, rollout=ROLLOUT, masks=MASKS):
    """(weights, masks), written out; `rs`: (level, low, high)."""
    weights, kept = [], []
    for ps, qs, ms in zip(old, rollout, masks, strict=True):
        d = [p - q if m else 0.0 for p, q, m in zip(ps, qs, ms, strict=True)]

        def ratios(at, d=d, ms=ms):
            if at == "token":
                return [math.exp(x) for x in d]
            return [math.exp(sum(d) if at == "sequence" else sum(d) / max(sum(ms), 1))] * len(d)

        row, mask = ratios(level), list(ms)
        if mode == "mask":
            mask = [m if low <= r <= high else 0 for m, r in zip(mask, row, strict=True)]
        else:
            row = [min(max(r, 0 if mode == "truncate" else low), high) for r in row]
        if rs is not None:
            mask = [m if rs[1] <= r <= rs[2] else 0 for m, r in zip(mask, ratios(rs[0]), strict=True)]
        if veto is not None and any(m and math.exp(x) < veto for m, x in zip(ms, d, strict=True)):
            mask = [0] * len(mask)
        weights.append(row)
        kept.append(mask)
    if normalize:
        counted = [[w for w, m in zip(row, mask, strict=True) if m] for row, mask in zip(weights, kept, strict=True)]
        counted = [row[:1] if level == "sequence" else row for row in counted]
        every = [w for row in counted for w in row]
        mean = sum(every) / len(every)
        weights = [[w / mean for w in row] for row in weights]
    return weights, kept


@pytest.mark.parametrize(
    ("level", "mode"), itertools.product(("token", "sequence", "geometric"), ("truncate", "clip", "mask"))
)
@pytest.mark.parametrize("rejects", [False, True])
def test_the_loss_equals_loops_over_the_definition(level, mode, rejects):
    low, high = 0.85, 1.3
    settings = dict(tis_level=level, tis_mode=mode, tis_lower_bound=low, tis_upper_bound=high)
    slow = dict(level=level, mode=mode, low=low, high=high)
    if rejects:
        settings |= dict(
            use_rs=True, rs_level="geometric", rs_lower_bound=0.6, rs_upper_bound=1.1, rs_veto_threshold=0.5
        )
        slow |= dict(rs=("geometric", 0.6, 1.1), veto=0.5)
    if level != "geometric":
        settings["tis_batch_normalize"] = slow["normalize"] = True
    args = make_args(use_tis=True, custom_tis_function_path=MIS, **settings)
    loss, _, metrics = evaluate(args)
    weights, masks = slow_weights(**slow)
    losses, _ = slow_token_losses(args)
    weighted = [[a * w for a, w in zip(x, ws, strict=True)] for x, ws in zip(losses, weights, strict=True)]
    assert loss == pytest.approx(slow_reduce(args, weighted, masks=masks, sums=SUMS), rel=1e-5, abs=1e-7)
    final = [[w * m for w, m in zip(x, ms, strict=True)] for x, ms in zip(weights, masks, strict=True)]
    assert metrics["train/mis_is_ratio_mean_final"] == pytest.approx(slow_reduce(args, final), rel=1e-5)


def test_the_bounds_default_to_each_others_inverse_and_rejection_to_those_of_the_weights():
    args = make_args(use_tis=True, tis_upper_bound=1.25, tis_mode="mask", use_rs=True, custom_tis_function_path=MIS)
    rows = ([-1.0, -1.0, -1.0], [-1.2, -1.3, -0.7])  # ratios 1.22, 1.35, 0.74
    _, masks, _ = compute_mis_weights(
        args,
        train_log_probs=[torch.tensor(rows[0])],
        rollout_log_probs=[torch.tensor(rows[1])],
        loss_masks=[torch.ones(3)],
    )
    assert masks[0].tolist() == [1, 0, 0]


def test_one_hopeless_token_vetoes_its_response_and_no_other():
    args = make_args(use_tis=True, use_rs=True, rs_upper_bound=1e9, rs_lower_bound=1e-9, rs_veto_threshold=1e-3)
    weights, masks, metrics = compute_mis_weights(
        args,
        train_log_probs=[torch.tensor([-1.0, -20.0]), torch.tensor([-1.0, NAN])],
        rollout_log_probs=[torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0])],
        loss_masks=[torch.ones(2), torch.tensor([1.0, 0.0])],
    )
    assert [m.tolist() for m in masks] == [[0, 0], [1, 0]], "what is masked, NaN or not, vetoes nothing"
    assert torch.cat(weights).isfinite().all()
    assert [m.tolist() for m in metrics["mis_rs_catastrophic_seq_fraction"]] == [[1, 1], [0, 0]]
    assert all(torch.cat(values).isfinite().all() for values in metrics.values())


def test_without_use_tis_only_the_metrics_count():
    args = make_args(get_mismatch_metrics=True, custom_tis_function_path=MIS, use_rs=True, tis_mode="mask")
    watched, plain = evaluate(args), evaluate(make_args())
    assert watched[0] == plain[0] and torch.equal(watched[1], plain[1])
    assert "train/mis_k3_kl" in watched[2]


def test_metrics_written_out():
    args = make_args(use_tis=True, custom_tis_function_path=MIS)
    metrics = evaluate(args)[2]
    want: dict[str, list[list[float]]] = {}
    for ps, qs, ms in zip(OLD, ROLLOUT, MASKS, strict=True):
        d = [p - q for p, q in zip(ps, qs, strict=True)]
        n = sum(ms)
        train = -sum(p * m for p, m in zip(ps, ms, strict=True)) / n
        engine = -sum(q * m for q, m in zip(qs, ms, strict=True)) / n
        total = sum(x * m for x, m in zip(d, ms, strict=True))
        rows = dict(
            kl=[-x for x in d],
            k3_kl=[math.exp(x) - 1 - x for x in d],
            chi2_token=[math.exp(x) ** 2 - 1 for x in d],
            chi2_seq=[math.exp(total) ** 2 - 1] * len(d),
            training_log_ppl=[train] * len(d),
            rollout_ppl=[math.exp(engine)] * len(d),
            ppl_ratio=[math.exp(train) / math.exp(engine)] * len(d),
            log_ppl_abs_diff=[abs(train - engine)] * len(d),
            tis_truncate_fraction=[float(math.exp(x) > 2) for x in d],
            tis_weight_before_bound=[math.exp(x) for x in d],
        )
        for name, row in rows.items():
            want.setdefault(name, []).append(row)
    for name, rows in want.items():
        assert metrics[f"train/mis_{name}"] == pytest.approx(slow_reduce(args, rows), rel=1e-4, abs=1e-6), name


def test_weights_are_normalised_by_the_whole_step_not_by_the_micro_batch():
    """The two halves of the batch, each with the sums of both, have the weights that they have together."""
    args = make_args(use_tis=True, tis_batch_normalize=True)

    def rows(of, part):
        return [torch.tensor(r, dtype=torch.float32) for r in of[part]]

    def given(part):
        return dict(
            train_log_probs=rows(OLD, part), rollout_log_probs=rows(ROLLOUT, part), loss_masks=rows(MASKS, part)
        )

    whole, first, second = slice(None), slice(0, 1), slice(1, 3)
    sums = [compute_mis_weights_with_cp.step_sums(args, **given(part)) for part in (first, second)]
    together = torch.cat(compute_mis_weights(args, **given(whole))[0])
    apart = [compute_mis_weights(args, **given(part), step_sums=sum(sums))[0] for part in (first, second)]
    torch.testing.assert_close(torch.cat([w for ws in apart for w in ws]), together)
    alone = torch.cat(compute_mis_weights(args, **given(first))[0])
    assert not torch.allclose(alone, together[:3], rtol=1e-2), "a micro-batch's own mean is another one"


def test_a_normalised_batch_is_scored_before_its_single_step():
    class Shard:
        steps, columns = [None], {}

    assert plan_scoring(make_args(use_tis=True, custom_tis_function_path=MIS), Shard()).old_is_current
    args = make_args(use_tis=True, custom_tis_function_path=MIS, tis_batch_normalize=True)
    assert plan_scoring(args, Shard()).policy
    args.skip_actor_forward_only = True
    with pytest.raises(ValueError, match=r"--skip-actor-forward-only .* sums over the whole step"):
        plan_scoring(args, Shard())


def test_all_bad_settings_are_told_at_once():
    args = make_args(
        tis_mode="drop",
        tis_level="geometric",
        tis_upper_bound=-2,
        tis_batch_normalize=True,
        use_rs="yes",
        rs_veto_threshold="0.1",
    )
    told = compute_mis_weights_with_cp.setting_problems(args)
    assert told == [
        "tis_mode 'drop' is not one of truncate, clip, mask",
        "tis_upper_bound -2 is not a number above 0",
        "rs_veto_threshold '0.1' is not a number above 0",
        "use_rs 'yes' is not true or false",
        "tis_batch_normalize works with tis_level token or sequence, not geometric",
    ]
    (swapped,) = compute_mis_weights_with_cp.setting_problems(make_args(tis_lower_bound=3.0))
    assert swapped.startswith("tis_lower_bound 3 is above tis_upper_bound 2")
