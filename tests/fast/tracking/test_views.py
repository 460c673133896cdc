"""What people see: the line a step, the live panel, the summary and the plot, from what was logged."""

import io
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from miles.tracking.plot import running_mean
from miles.tracking.progress import Progress
from miles.tracking.step_view import StepView, clock, course, is_eval_score, number, sparkline
from miles.tracking.summary import History, main, summarize
from miles.tracking.tracker import Tracker

STEP = {
    "rollout/raw_reward": 0.5,
    "rollout/response_len/mean": 12.5,
    "rollout/weight_version/min": 3.0,
    "rollout/weight_version/published": 5.0,
    "train/train_rollout_logprob_abs_diff": 2.5e-7,
    "perf/tokens_per_gpu_per_sec": 1000.0,
    "perf/train_wait_time": 5.0,
    "perf/train_time": 3.0,
    "perf/update_weights_time": 1.0,
    "perf/step_time": 10.0,
    "eval/words": 0.25,
    "eval/words-truncated_ratio": 0.0,
    "eval/words/response_len/mean": 7.0,
    "eval/words-pass@2": 0.5,
}


def test_a_step_as_people_read_it():
    view = StepView.of(3, STEP, engines=2, published=4.0)
    assert (view.reward, view.length, view.tokens_per_s, view.mismatch, view.staleness) == (
        0.5,
        12.5,
        2000.0,
        2.5e-7,
        1.0,
    )
    assert view.evals == {"words": 0.25}
    assert view.shares == pytest.approx({"generate": 0.5, "train": 0.3, "update": 0.1, "other": 0.1})


def test_staleness_is_of_the_step_when_it_began_and_measured_values_win():
    assert StepView.of(0, STEP).staleness is None, "nothing says yet which version was published"
    assert StepView.of(0, STEP | {"rollout/staleness/old_max": 2.0}, published=4.0).staleness == 2.0


@pytest.mark.parametrize("name", ["eval/lag_steps", "eval/skipped_busy", "eval/x-pass@1", "eval/x-none_reward_ratio"])
def test_other_eval_metrics_are_no_scores(name):
    assert not is_eval_score(name) and is_eval_score("eval/aime-2024")


def test_a_log_gets_one_line_a_step_and_no_control_characters(args):
    out = io.StringIO()
    progress = Progress(args, file=out)
    progress.status("starting engines")
    progress.begin(0, 20)
    for step in range(2):
        progress.phase("rollout")
        progress.step(step, STEP)
    progress.close()
    progress.close()
    first, *steps = out.getvalue().splitlines()
    assert first == "starting engines" and len(steps) == 2
    assert steps[1] == (
        "step  2/20 | reward  0.500 | length  12.5 |   1,000 tokens/s | stale 2 | |dlogp| 2.5e-07 |  10.00 s "
        "(generate 50%, train 30%, update 10%, other 10%) | eval words 0.250"
    )
    assert "\x1b" not in out.getvalue()


def test_steps_without_a_trainer_or_a_reward_still_have_their_line(args):
    out = io.StringIO()
    progress = Progress(args, file=out)
    progress.begin(0, 1)
    progress.step(0, {"train/loss": math.nan, "perf/step_time": 1.0})
    progress.step(0, {"rollout/response_len/mean": 3.0})
    assert out.getvalue().splitlines() == [
        "step 1/1 | loss nan |   1.00 s (generate 0%, train 0%, update 0%, other 100%)",
        "step 1/1 | length   3.0",
    ]


def test_supervised_steps_show_their_loss(args):
    view = StepView.of(0, {"rollout/raw_reward": 0.0, "train/loss": 2.5})
    assert (view.reward, view.loss) == (None, 2.5)
    view = StepView.of(0, {"rollout/raw_reward": 0.0, "train/loss": 2.5, "train/pg_loss": 2.5})
    assert (view.reward, view.loss) == (0.0, None)


def test_a_reader_that_goes_away_does_not_end_the_run(args):
    out = io.StringIO()
    progress = Progress(args, file=out)
    out.close()
    progress.status("still here")


def test_the_panel_shows_everything(args):
    progress = Progress(args, file=io.StringIO())
    progress.begin(0, 20)
    for step in range(5):
        progress.step(step, STEP | {"rollout/raw_reward": step / 4})
    progress.phase("train")
    console = Console(file=io.StringIO(), width=100)
    console.print(progress)
    text = console.file.getvalue()
    for part in ("run · step 5/20", "1.000", "▁▃▅▆█", "words 0.250", "1,000 tokens/s", "2 versions behind", "2.5e-07"):
        assert part in text
    assert "generate 50%" in text and "training, 0:00" in text and "left" in text


def test_on_a_terminal_the_panel_is_live_and_stays_at_the_end(args):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    progress = Progress(args, file=out)
    progress.begin(0, 1)
    progress.step(0, STEP)
    progress.close()
    assert "step 1/1" in out.getvalue() and "generate" in out.getvalue()


# ---- summary ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished_run(args):
    tracker = Tracker(args)
    for step in range(12):
        rollout = {k: v for k, v in STEP.items() if k.startswith("rollout/")}
        tracker.log(rollout | {"rollout/raw_reward": step / 11}, step_key="rollout/step", step=step)
        loss = {"train/train_rollout_logprob_abs_diff": 10.0 ** -(step % 5), "train/grad_norm": math.nan}
        tracker.log(loss, step_key="train/step", step=step)
        times = {k: v for k, v in STEP.items() if k.startswith("perf/")}
        tracker.log(times, step_key="rollout/step", step=step)
    tracker.log({"eval/words": 0.25, "eval/words-pass@2": 0.5}, step_key="eval/step", step=11)
    tracker.log({"eval/words": 0.75}, step_key="eval/step", step=5)  # arrived late
    tracker.close()
    return args.run_dir


def test_history_is_by_step_on_every_axis(finished_run):
    history = History.read(finished_run)
    assert history.series("rollout/raw_reward")[-1] == (11, 1.0)
    assert history.evals() == {"words": [(5, 0.75), (11, 0.25)]}
    assert history.series("nothing") == []


def test_summary_and_plot_come_from_the_record_alone(finished_run):
    console = Console(file=io.StringIO(), width=80)
    picture = summarize(finished_run, console)
    text = console.file.getvalue()
    assert picture == Path(finished_run, "reward.png") and picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    reward = next(line for line in text.splitlines() if line.startswith("│ reward"))
    assert "0.182" in reward and "0.818" in reward, "means of the first and last five steps"
    assert "12 steps in 120.0 s: generate 50%, train 30%, update 10%, other 10%" in text
    assert finished_run in text.replace("\n", "") and all(len(line) <= 80 for line in text.splitlines() if "│" in line)


def test_the_command_makes_both_again(finished_run):
    Path(finished_run, "reward.png").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "miles.tracking.summary", finished_run], capture_output=True, text=True
    )
    assert done.returncode == 0 and Path(finished_run, "reward.png").exists(), done.stderr


def test_an_output_without_unicode_gets_what_it_can_show(finished_run):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    summarize(finished_run, Console(file=out, width=80))
    out.flush()
    assert "reward" in out.buffer.getvalue().decode("ascii")


def test_a_folder_without_a_record_is_an_error_that_says_so(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "metrics.jsonl does not exist" in capsys.readouterr().err
    assert main([]) == 2 and "usage" in capsys.readouterr().err


def test_supervised_training_is_told_by_its_loss_and_not_by_its_rewards_of_0(args):
    tracker = Tracker(args)
    for step in range(3):
        tracker.log({"rollout/raw_reward": 0.0}, step_key="rollout/step", step=step)
        tracker.log({"train/loss": 3.0 - step}, step_key="train/step", step=step)
    tracker.close()
    console = Console(file=io.StringIO())
    assert summarize(args.run_dir, console).exists()
    assert "│ loss" in console.file.getvalue() and "│ reward" not in console.file.getvalue()


def test_a_policy_that_earns_nothing_still_has_its_reward_shown(args):
    tracker = Tracker(args)
    tracker.log({"rollout/raw_reward": 0.0}, step_key="rollout/step", step=0)
    tracker.log({"train/loss": 0.0, "train/pg_loss": 0.0}, step_key="train/step", step=0)
    tracker.close()
    assert History.read(args.run_dir).rewards() == [(0, 0.0)]


def test_a_run_without_anything_to_draw_has_a_table_and_no_plot(args):
    tracker = Tracker(args)
    tracker.log({"train/grad_norm": 1.0}, step_key="train/step", step=0)
    tracker.close()
    assert summarize(args.run_dir, Console(file=io.StringIO())) is None
    assert not Path(args.run_dir, "reward.png").exists()


def test_a_run_of_rewards_that_are_not_numbers_is_drawn_too(args):
    tracker = Tracker(args)
    for step in range(3):
        tracker.log({"rollout/raw_reward": math.nan}, step_key="rollout/step", step=step)
    tracker.close()
    assert summarize(args.run_dir, Console(file=io.StringIO())).exists()


# ---- small things ----------------------------------------------------------------------------------------------------


def test_small_formats():
    assert sparkline([0, 1, 2, 3]) == "▁▃▆█" and sparkline([1, 1]) == "▁▁" and sparkline([]) == ""
    assert sparkline([math.nan, 1.0, 2.0]) == "▁█" and len(sparkline(range(100), width=10)) == 10
    assert course([0, 2, 4, 6], width=2) == "▁█" and course([1.0, 2.0]) == "▁█"
    assert [number(v) for v in (0, 0.5, 12345.6, 2.5e-7, math.nan)] == ["0", "0.5", "12,346", "2.5e-07", "NaN"]
    assert [clock(s) for s in (5, 65, 3723)] == ["0:05", "1:05", "1:02:03"]


def test_the_running_mean_starts_at_the_first_value_and_ignores_gaps():
    assert running_mean([2.0, 2.0]) == pytest.approx([2.0, 2.0])
    means = running_mean([1.0, math.nan, 3.0])
    assert means[0] == means[1] == pytest.approx(1.0) and 1.0 < means[2] < 3.0
    assert math.isnan(running_mean([math.nan])[0])
