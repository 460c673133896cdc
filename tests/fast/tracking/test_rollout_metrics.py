"""Metrics of the batch that trains, each against a number worked out by hand."""

import pytest

from miles.tracking.rollout_metrics import compute_eval_metrics, compute_rollout_metrics
from miles.tracking.statistics import pass_at_k
from miles.utils.imports import register_function
from miles.utils.types import Failure, PrefixCacheInfo, Sample, SampleStatus, SpecInfo, VersionSpan

from .conftest import trained


def test_rewards_and_lengths_are_those_of_the_batch_that_is_given(args):
    samples = [trained(i, i // 2, length=n, reward=r) for i, (n, r) in enumerate([(2, 0), (4, 1), (6, 1), (8, 1)])]
    samples[3].loss_mask = [1] * 5 + [0] * 3  # three tokens of a tool
    metrics = compute_rollout_metrics(args, samples, 2.0)
    assert metrics["rollout/raw_reward"] == 0.75
    lengths = {k.rpartition("/")[2]: v for k, v in metrics.items() if k.startswith("rollout/response_len/")}
    assert lengths == {"mean": 4.25, "median": 4.5, "max": 6, "min": 2}
    assert metrics["perf/rollout_time"] == 2.0
    assert metrics["perf/tokens_per_gpu_per_sec"] == 10 and metrics["perf/effective_tokens_per_gpu_per_sec"] == 8.5
    assert metrics["perf/longest_sample_tokens_per_sec"] == 4
    args.rollout_num_gpus = 4
    assert compute_rollout_metrics(args, samples, 2.0)["perf/tokens_per_gpu_per_sec"] == 2.5


def test_raw_reward_of_the_metadata_and_keys_of_dictionaries(args):
    args.reward_key = "score"
    samples = [trained(0, reward={"score": 1.0, "why": "x"}), trained(1, reward={"score": 0.0, "why": "y"})]
    assert compute_rollout_metrics(args, samples, 1.0)["rollout/raw_reward"] == 0.5
    samples[1].metadata["raw_reward"] = 3.0
    assert compute_rollout_metrics(args, samples, 1.0)["rollout/raw_reward"] == 2.0
    args.log_reward_category = "why"
    metrics = compute_rollout_metrics(args, samples, 1.0)
    assert (metrics["rollout/error_cat/x"], metrics["rollout/error_cat/y"]) == (0.5, 0.5)


def test_constant_groups_are_counted_by_their_reward(args):
    rewards = [0, 0, 1, 1, 0.5, 0.5, 0, 1]
    samples = [trained(i, i // 2, reward=r) for i, r in enumerate(rewards)]
    metrics = compute_rollout_metrics(args, samples, 1.0)
    assert {k: v for k, v in metrics.items() if "zero_std/count" in k} == {
        "rollout/zero_std/count_0.0": 1,
        "rollout/zero_std/count_0.5": 1,
        "rollout/zero_std/count_1.0": 1,
    }
    assert metrics["rollout/zero_std/all_zero_percentage"] == 25
    assert metrics["rollout/zero_std/all_one_percentage"] == 25


def test_samples_without_a_group_are_not_one_group(args):
    samples = [trained(i, reward=1.0) for i in range(3)]
    for sample in samples:
        sample.group_index = None
    assert not any("zero_std" in k for k in compute_rollout_metrics(args, samples, 1.0))


def test_siblings_of_one_execution_are_one_reward_of_their_group(args):
    samples = [trained(0, 0, reward=0.0), *(trained(1, 0, reward=1.0) for _ in range(3))]
    args.log_passrate = True
    metrics = compute_rollout_metrics(args, samples, 1.0)
    assert metrics["passrate/pass@1"] == 0.5 and metrics["passrate/pass@2"] == 1.0


def test_pass_rates_are_unbiased_and_of_complete_groups_only(args):
    assert pass_at_k(4, 1, 1) == 0.25 and pass_at_k(4, 1, 2) == 0.5 and pass_at_k(4, 0, 4) == 0.0
    args.n_samples_per_prompt, args.log_passrate = 4, True
    samples = [trained(i, 0, reward=float(i == 0)) for i in range(4)] + [trained(9, 1, reward=1.0)]
    metrics = compute_rollout_metrics(args, samples, 1.0)
    assert {k: v for k, v in metrics.items() if k.startswith("passrate")} == {
        "passrate/pass@1": 0.25,
        "passrate/pass@2": 0.5,
        "passrate/pass@4": 1.0,
    }
    args.log_passrate = False
    assert not any(k.startswith("passrate") for k in compute_rollout_metrics(args, samples, 1.0))


def test_outcomes_are_shares_and_failures_are_named(args):
    samples = [trained(i) for i in range(4)]
    samples[0].status = SampleStatus.TRUNCATED
    samples[1].status, samples[1].failure = SampleStatus.FAILED, Failure("reward_timeout", "too late")
    metrics = compute_rollout_metrics(args, samples, 1.0)
    assert [metrics[f"rollout/outcome/{s}"] for s in ("completed", "truncated", "aborted", "failed")] == [
        0.5,
        0.25,
        0,
        0.25,
    ]
    assert metrics["rollout/truncated_ratio"] == 0.25
    assert metrics["rollout/outcome/failed/reward_timeout"] == 1


def test_a_looping_response_is_repetitive_and_a_short_one_is_not(args):
    loop, short = trained(0), trained(1)
    loop.response, short.response = "ab" * 6000, "ab" * 100
    assert compute_rollout_metrics(args, [loop, short], 1.0)["rollout/repetition_frac"] == 0.5


# ---- versions --------------------------------------------------------------------------------------------------------


def test_the_articles_example_of_staleness(args):
    """300 tokens of version 12, 100 of version 13, trained at 14: behind by 2 at worst, 1.75 for the typical token."""
    spans = [VersionSpan(12, 0, 300), VersionSpan(13, 300, 400)]
    sample = trained(0, length=400, version_spans=spans)
    metrics = compute_rollout_metrics(args, [sample], 1.0, current_version=14)
    staleness = {k.rpartition("/")[2]: v for k, v in metrics.items() if "staleness" in k}
    assert staleness == {"old_mean": 2, "old_max": 2, "post_mean": 1, "gen_mean": 1, "token_weighted": 1.75}
    assert metrics["rollout/weight_version/min"] == 12
    assert metrics["rollout/weight_version/mixed_version_ratio"] == 1
    assert metrics["contract/version_coverage"] == 1


def test_versions_are_counted_over_sampled_tokens_and_coverage_says_what_lacks_them(args):
    known = trained(0, length=4, version=3)
    partly = trained(1, length=4, version_spans=[VersionSpan(5, 0, 1)])
    unknown = trained(2, group=1, length=4)
    metrics = compute_rollout_metrics(args, [known, partly, unknown], 1.0, current_version=6)
    assert metrics["contract/version_coverage"] == 5 / 12
    assert metrics["rollout/weight_version/sample_coverage"] == 2 / 3
    assert metrics["rollout/weight_version/mean"] == 4
    assert metrics["rollout/staleness/token_weighted"] == 6 - (3 * 4 + 5) / 5
    assert metrics["rollout/staleness/old_mean"] == 3, "one group has versions; the other does not count"
    tool = trained(3, length=4, version_spans=[VersionSpan(1, 0, 2)], loss_mask=[1, 1, 0, 0])
    assert compute_rollout_metrics(args, [tool], 1.0)["contract/version_coverage"] == 1


def test_without_versions_there_is_no_staleness_instead_of_a_wrong_one(args):
    metrics = compute_rollout_metrics(args, [trained(0)], 1.0, current_version=3)
    assert not any("staleness" in k or k == "rollout/weight_version/mean" for k in metrics)
    assert metrics["contract/version_coverage"] == 0


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_caches_speculation_tools_turns_and_sessions(args):
    a, b = trained(0, length=10), trained(1, length=6)
    a.prefix_cache_info, b.prefix_cache_info = PrefixCacheInfo(6, 10), PrefixCacheInfo(0, 10)
    a.spec_info = SpecInfo(spec_accept_token_num=3, spec_draft_token_num=4, spec_verify_ct=2, completion_token_num=5)
    a.non_generation_time = 1.0
    a.metadata |= {"round_number": 3, "tito_session_mismatch": [{"type": "assistant_text"}]}
    b.metadata |= {"round_number": 1, "tito_session_mismatch": []}
    args.log_multi_turn = True
    metrics = compute_rollout_metrics(args, [a, b], 2.0)
    assert metrics["perf/prefix_cache_hit_rate"] == 0.3 and metrics["perf/avg_cached_tokens_per_sample"] == 3
    assert metrics["rollout/spec_accept_rate"] == 0.75 and metrics["rollout/spec_accept_length"] == 2.5
    assert metrics["perf/non_generation_time/mean"] == 0.5
    assert metrics["perf/longest_effective_sample_tokens_per_sec_without_non_generation"] == 10
    assert metrics["multi_turn/round_number/mean"] == 2 and metrics["multi_turn/raw_response_length/max"] == 10
    assert metrics["rollout/tito_session_mismatch_rate/v1"] == 0.5
    assert metrics["rollout/tito_session_mismatch_rate/v1/assistant_text"] == 0.5
    assert metrics["rollout/tito_session_mismatch_rate/v1/special_token_type"] == 0


def test_all_but_perf_is_the_same_whatever_the_clock_and_the_order_say(args):
    samples = [trained(i, i // 2, length=i + 1, reward=0.1 * i, version=i % 3) for i in range(8)]
    one = compute_rollout_metrics(args, samples, 1.0, current_version=4)
    two = compute_rollout_metrics(args, samples[::-1], 7.0, current_version=4)
    assert {k: v for k, v in one.items() if not k.startswith("perf/")} == {
        k: v for k, v in two.items() if not k.startswith("perf/")
    }


def test_extra_metrics_keep_their_names_and_win(args):
    extra = {"rollout/dynamic_filter/drop_x": 2, "dropped": 3, "rollout/raw_reward": 9}
    metrics = compute_rollout_metrics(args, [trained(0)], 1.0, extra=extra)
    assert (metrics["rollout/dynamic_filter/drop_x"], metrics["rollout/dropped"], metrics["rollout/raw_reward"]) == (
        2,
        3,
        9,
    )


def test_the_custom_log_function_sees_the_batch_and_may_replace_the_default(args):
    seen = []

    def log(rollout_id, args, samples, extra, seconds):
        seen.append((rollout_id, len(samples), extra, seconds))
        return rollout_id == 1

    register_function("custom_log.rollout", log)
    args.custom_rollout_log_function_path = "custom_log.rollout"
    for rollout_id in (0, 1):
        metrics = compute_rollout_metrics(args, [trained(0)], 1.5, rollout_id=rollout_id, extra={"a": 1})
        assert ("rollout/raw_reward" in metrics) == (rollout_id == 0)
        assert metrics["rollout/a"] == 1
    assert seen == [(0, 1, {"rollout/a": 1}, 1.5), (1, 1, {"rollout/a": 1}, 1.5)]


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluation(rewards, n=1):
    samples = [trained(i, i // n, reward=r) for i, r in enumerate(rewards)]
    return {"rewards": rewards, "truncated": [False] * len(rewards), "samples": samples}


def test_a_failed_reward_is_left_out_of_the_score_and_counted_beside_it(args):
    metrics = compute_eval_metrics(args, {"words": evaluation([1.0, 0.0, None, 1.0])})
    assert metrics["eval/words"] == pytest.approx(2 / 3)
    assert metrics["eval/words-none_reward_ratio"] == 0.25
    assert metrics["eval/words-truncated_ratio"] == 0
    assert metrics["eval/words/response_len/mean"] == 4


def test_an_evaluation_without_a_single_score_has_none(args):
    metrics = compute_eval_metrics(args, {"words": evaluation([None, None])})
    assert "eval/words" not in metrics and metrics["eval/words-none_reward_ratio"] == 1


def test_evaluations_count_their_own_samples_a_prompt(args):
    metrics = compute_eval_metrics(args, {"words": evaluation([1.0, 0.0, 0.0, 0.0], n=2), "sums": evaluation([1.0])})
    assert metrics["eval/words-pass@1"] == 0.25 and metrics["eval/words-pass@2"] == 0.5
    assert metrics["eval/sums"] == 1 and not any(k.startswith("eval/sums-pass") for k in metrics)
    assert metrics["eval/words/zero_std/all_zero_percentage"] == 50


def test_the_evaluation_reward_key_and_the_custom_log_function(args):
    args.reward_key, args.eval_reward_key = "score", "acc"
    data = {"words": evaluation([1.0, 0.0], n=2)}
    for sample in data["words"]["samples"]:
        sample.reward = {"score": sample.index, "acc": 1.0}
    assert compute_eval_metrics(args, data)["eval/words/zero_std/all_one_percentage"] == 100
    register_function("custom_log.eval", lambda rollout_id, args, data, extra: True)
    args.custom_eval_rollout_log_function_path = "custom_log.eval"
    assert compute_eval_metrics(args, data, rollout_id=0, extra={"x": 1.0}) == {"eval/x": 1.0}


def test_an_empty_sample_list_gives_no_numbers(args):
    assert compute_rollout_metrics(args, [], 1.0) == {"perf/rollout_time": 1.0}
    assert Sample().effective_response_length == 0
