r"""What each built-in reward gives to answers right, wrong, and impossible to judge."""

import asyncio
import threading
import time

import pytest
import reasoning_gym

from miles.rollout.rm_hub import RewardFailure, async_rm
from miles.rollout.rm_hub.boxed import last_boxed
from miles.utils.types import Sample

from .conftest import finished


@pytest.mark.parametrize(
    "rm_type, response, label, reward",
    [
        ("math", r"thus \boxed{42}", "42", 1),
        ("math", r"\boxed{\frac12}", "0.5", 1),
        ("math", r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        ("math", r"first \boxed{41}, no, \boxed{42}", "42", 1),
        ("math", "The answer is 42.", "42", 1),
        ("math", r"\boxed{41}", "42", 0),
        ("math", r"42 \boxed{41}", "42", 0),
        ("math", "I do not know", "42", 0),
        ("math", "", "42", 0),
        ("math", r"\boxed{\frac{1}{2}", "1/2", 1),  # a response cut off in its last brace still states its answer
        ("math", r"\boxed{3}", r"\boxed{3}", 1),
        ("math", r"\boxed{Monday}", "Monday", 1),
        ("math", r"\boxed{东}", "西", 0),
        ("math", r"\boxed{\sqrt{8}}", r"$2\sqrt{2}$", 1),
        ("math", r"\boxed{(1, 2]}", "(1,2]", 1),
        ("math", r"\boxed{50\%}", "50\\%", 1),
        ("math", "\\boxed{" * 500, "42", 0),
        ("boxed_math", r"7 \boxed{42} 8", "42", 1),
        ("boxed_math", "42", "42", 0),
        ("deepscaler", r"<think>\boxed{1}</think> \boxed{42}", "42", 1),
        ("deepscaler", r"<think> \boxed{42} </think> 42", "42", 0),
        ("deepscaler", r"\boxed{42}", "42", 0),
        ("deepscaler", r"###Response \boxed{42}", "42", 1),
        ("gemma_math", r"<|channel>thought \boxed{1}<channel|>\boxed{42}", "42", 1),
        ("gemma_math", r"\boxed{42}", "42", 1),
        ("gemma_math", "42", "42", 0),
        ("f1", "The cat sat.", "a cat sat down", 0.8),
        ("f1", "dog", "cat", 0),
        ("f1", "yes it is", "yes", 0),
        ("f1", "", "cat", 0),
        ("boxed_f1", r"so it is a dog \boxed{cat}", "cat", 1),
        ("gpqa", "Let me think. The answer is (C).", "C", 1),
        ("gpqa", "<think>answer: A</think> Answer: **B**", "B", 1),
        ("gpqa", r"\boxed{D}", "D", 1),
        ("gpqa", r"\boxed{\text{d}}", "D", 1),
        ("gpqa", "(A) is tempting, but\nB\n", "B", 1),
        ("gpqa", "the answer is a mystery", "A", 0),
        ("gpqa", "Answer: A", "B", 0),
    ],
)
async def test_rewards_of_text(args, rm_type, response, label, reward):
    args.rm_type = rm_type
    assert await async_rm(args, finished(response, label)) == pytest.approx(reward)


@pytest.mark.parametrize(
    "response, label, right",
    [
        ("Answer: 42", "42", True),
        ("answer:  $42$.", "42", True),
        (r"Answer: \boxed{\frac12}", r"\frac{1}{2}", True),
        ("Answer: 1,234 dollars", "1234", True),
        ("Answer: x = 5", "5", True),
        ("Answer: 41\nAnswer: 42", "42", True),
        ("Answer: 42 " + "x" * 400, "42", False),  # too far from the end
        ("42", "42", False),
    ],
)
async def test_dapo_reads_the_last_answer_line(args, response, label, right):
    args.rm_type, args.reward_key = "dapo", "score"
    reward = await async_rm(args, finished(response, label))
    assert (reward["score"], reward["acc"]) == ((1.0, 1.0) if right else (-1.0, 0.0))


async def test_gpqa_takes_the_right_letter_from_wherever_the_row_has_it(args):
    args.rm_type = "gpqa"
    rows = [
        {"label": "ignored text", "metadata": {"correct_letter": "b"}},
        {"label": "the mitochondrion", "metadata": {"choices": ["the nucleus", "The  mitochondrion"]}},
    ]
    assert [await async_rm(args, finished("Answer: B", **row)) for row in rows] == [1, 1]
    with pytest.raises(RewardFailure, match="no right letter"):
        await async_rm(args, finished("Answer: B", "the golgi apparatus", metadata={"choices": ["x", "y"]}))


@pytest.mark.parametrize("task", ["basic_arithmetic", "countdown", "word_sorting", "spell_backward", "sudoku"])
async def test_reasoning_gym_scores_its_own_answers_1_in_every_layout(args, task):
    args.rm_type = "reasoning_gym"
    entry = reasoning_gym.create_dataset(task, seed=3, size=1)[0]
    layouts = [{"task": task, "entry": entry}, {"entry": entry}, entry["metadata"] | {"question": entry["question"]}]
    for metadata in layouts:
        for response in (
            entry["answer"],
            f"I think <answer>{entry['answer']}</answer>",
            f"hm</think> {entry['answer']}",
        ):
            assert await async_rm(args, finished(response, entry["answer"], metadata=metadata)) == 1.0
        assert await async_rm(args, finished("<answer>zzz</answer>", entry["answer"], metadata=metadata)) < 0.5


@pytest.mark.parametrize(
    "rm_type, label, metadata, message",
    [
        ("math", None, {}, "no label"),
        ("math", "  ", {}, "no label"),
        ("deepscaler", None, {}, "no label"),
        ("gemma_math", "", {}, "no label"),
        ("dapo", None, {}, "no label"),
        ("f1", None, {}, "no label"),
        ("gpqa", None, {}, "no right letter"),
        ("reasoning_gym", "1", {}, "names no reasoning-gym task"),
        ("reasoning_gym", "1", {"task": "no_such_task"}, "no task 'no_such_task'"),
    ],
)
async def test_rows_that_cannot_be_judged_are_failures_and_not_zeros(args, rm_type, label, metadata, message):
    args.rm_type, args.reward_key = rm_type, "score"
    with pytest.raises(RewardFailure, match=message) as caught:
        await async_rm(args, finished("some response", label, index=5, metadata=metadata))
    assert caught.value.category == "reward_data" and caught.value.permanent
    assert "sample 5" in str(caught.value)


async def test_deterministic_random_depends_on_seed_and_index_only(args):
    args.rm_type = "deterministic_random"
    first = [await async_rm(args, finished(str(i), index=i)) for i in range(64)]
    again = [await async_rm(args, finished("something else", index=i)) for i in range(64)]
    assert first == again and set(first) == {0.0, 1.0}
    args.rollout_seed += 1
    assert first != [await async_rm(args, finished(index=i)) for i in range(64)]
    args.rm_type = "random"
    assert {await async_rm(args, finished()) for _ in range(64)} == {0.0, 1.0}


def test_scoring_off_the_main_thread_gives_a_right_answer_1(args):
    args.rm_type = "math"
    rewards = []

    def score():
        rewards.append(asyncio.run(async_rm(args, finished(r"\boxed{42}", "42"))))

    thread = threading.Thread(target=score)
    thread.start()
    thread.join(60)
    assert rewards == [1.0]


async def test_a_response_that_hangs_the_verifier_times_out_and_the_next_is_scored(args):
    args.rm_type, args.reward_timeout = "math", 2.0
    tower = finished(r"\boxed{10^{10^{10^{10}}} + 1}", "10^{10^{10^{10}}}", index=1)
    fine = finished(r"\boxed{42}", "42", index=2)
    hung, scored = await asyncio.gather(async_rm(args, tower), async_rm(args, fine), return_exceptions=True)
    assert scored == 1.0
    if not isinstance(hung, float):  # what math-verify makes of it is its business; hanging the run is not
        assert hung.category == "reward_timeout" and hung.permanent


@pytest.mark.parametrize(
    "text, inside",
    [
        (r"\boxed{a} \boxed{b{c}}", "b{c}"),
        (r"\boxed {x}", "x"),
        (r"\boxed{done} \boxed{cut of", "done"),
        (r"\boxed{}", ""),
        (r"\boxed{a} } \frac{1}{2} {", "a"),
        (r"\boxed{outer \boxed{inner} more}", "inner"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("none", None),
    ],
)
def test_last_boxed(text, inside):
    assert last_boxed(text) == inside


def test_a_hostile_response_of_open_boxes_costs_no_time():
    began = time.monotonic()
    assert last_boxed(r"\boxed{" * 200_000) is None
    assert last_boxed(r"\boxed{" * 200_000 + "}" * 200_000) == ""
    assert time.monotonic() - began < 5


def test_the_sample_is_left_as_it_was(args):
    args.rm_type = "boxed_f1"
    sample = finished(r"\boxed{cat}", "cat", metadata={"a": 1})
    before = Sample.from_dict(sample.to_dict())
    asyncio.run(async_rm(args, sample))
    assert sample == before
