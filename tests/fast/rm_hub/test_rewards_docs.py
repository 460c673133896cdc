"""docs/rewards.md is true: its examples run, and its tables are complete."""

import json
import re
from pathlib import Path

import pytest

from miles.rollout.rm_hub import async_rm, batched_async_rm, failures, score_sample
from miles.rollout.rm_hub.registry import REWARD_TYPES
from miles.utils.imports import register_function

from .conftest import finished

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()


@pytest.fixture(scope="module")
def examples():
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "docs/rewards.md", "exec"), names)
    for name, value in names.items():
        register_function(f"rewards_page.{name}", value)
    yield names
    if names["pool"] is not None:
        names["pool"].close()


async def test_examples_score(args, examples):
    def use(name, **flags):
        vars(args).update(custom_rm_path=f"rewards_page.{name}", reward_key=None, **flags)

    use("ends_politely")
    assert await async_rm(args, finished("Here it is. Thanks!")) == 1.0
    assert await async_rm(args, finished("Take it.")) == 0.0
    use("longest_is_best")
    assert await batched_async_rm(args, [finished(index=i, response_length=n) for i, n in enumerate((1, 4))]) == [
        0.25,
        1.0,
    ]
    use("graded")
    args.reward_key = "score"
    assert await async_rm(args, finished(" 4 ", "4")) == {"score": 1.0, "verdict": "right"}
    use("slow_check")
    assert await async_rm(args, finished("kitten", "kittens")) == 1.0
    assert await async_rm(args, finished("dog", "kittens")) == 0.0
    use("judged")
    assert await async_rm(args, finished(metadata={"verdict": "good"})) == 1.0
    sample = finished(index=4)
    await score_sample(args, sample)
    assert (sample.failure.category, sample.failure.permanent) == ("no_verdict", True)


def table_names(heading):
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0].split("\n### ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def test_tables_have_every_reward_and_every_failure():
    assert table_names("Built-in rewards") == set(REWARD_TYPES)
    assert table_names("When a reward fails") == set(failures.CATEGORIES)


async def test_the_rows_of_the_page_score(args):
    args.rm_type = "reasoning_gym"
    row = re.search(r'```json\n(\{"input".*?\})\n```', PAGE, re.DOTALL)[1]
    row = json.loads(row)
    assert await async_rm(args, finished("<answer>nus</answer>", row["label"], metadata=row["metadata"])) == 1.0
