"""docs/metrics.md names every metric that the code can log."""

import re
from pathlib import Path

import pytest

from miles.rollout.session.history import HistoryCounts
from miles.tracking.rollout_metrics import compute_eval_metrics, compute_rollout_metrics
from miles.utils.types import Failure, PrefixCacheInfo, SpecInfo

from .conftest import trained

ROOT = Path(__file__).parents[3]
FAMILIES = "train|rollout|perf|contract|eval|passrate|multi_turn|tracking"

_SESSION = {**vars(HistoryCounts()), "generations": 3, "special_text": 0}


def documented():
    """Patterns of the names on the page: `{a,b}` is one of them, `{anything}` is any name."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name in re.findall(rf"`((?:{FAMILIES})/[^`*\s]+)`", page):
        pattern = re.escape(name).replace(r"\{", "{").replace(r"\}", "}").replace(r"\,", ",")
        pattern = re.sub(r"\{([^{}]*,[^{}]*)\}", lambda m: "(" + m[1].replace(",", "|") + ")", pattern)
        yield re.sub(r"\{[^{}]*\}", r"[^/]+", pattern)


PATTERNS = list(documented())


def is_documented(name):
    return any(re.fullmatch(pattern, name) for pattern in PATTERNS if pattern != "train/[^/]+")


def test_what_rollouts_and_evaluations_log(args):
    sample = trained(0, version=1, reward={"score": 1.0, "kind": "sum"})
    sample.failure = Failure("reward_none", "None")
    sample.prefix_cache_info, sample.spec_info = PrefixCacheInfo(1, 2), SpecInfo(1, 2, 3, 4)
    sample.metadata |= {"tito_session_mismatch": [], "round_number": 1, "session": _SESSION}
    args.reward_key, args.log_reward_category = "score", "kind"
    args.log_passrate = args.log_multi_turn = True
    samples = [sample, trained(1, reward={"score": 1.0})]
    metrics = compute_rollout_metrics(args, samples, 1.0, current_version=2)
    data = {"words": {"rewards": [1.0, 1.0], "truncated": [False, True], "samples": samples}}
    names = [*metrics, *(n for n in compute_eval_metrics(args, data) if n.count("/") == 1)]
    assert len(names) > 60
    assert [name for name in names if not is_documented(name)] == []


def names_in_the_code():
    """String literals that are names of metrics, f-string fields as one word. Other literals end in `/` or are axes."""
    for path in sorted((ROOT / "miles").rglob("*.py")):
        for name in re.findall(rf"\"((?:{FAMILIES})/[A-Za-z0-9_/{{}}@.\-]+)\"", path.read_text()):
            if name not in ("train/step", "rollout/step", "eval/step") and not name.endswith(("/", "-")):
                yield name


@pytest.mark.parametrize("name", sorted(set(names_in_the_code())))
def test_what_the_code_names(name):
    plain = re.sub(r"\{[^{}]*\}", "word", name)
    plain = plain.replace(
        "train/value_", "train/critic-value_"
    )  # a critic's metrics get its prefix when they are logged
    distribution = any(is_documented(f"{plain}/{end}") for end in ("mean", "old_mean"))
    free = plain in ("train/word", "rollout/word", "eval/word/")  # columns and custom metrics, listed on the page
    assert free or is_documented(plain) or distribution, f"docs/metrics.md does not explain {name}"
