import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from miles.rollout.rm_hub.scoring_pool import PoolClosed, ScoringCrash, ScoringPool, ScoringTimeout


def answer(value):
    return value


def work(seconds):
    time.sleep(seconds)
    return os.getpid()


def spin_in_c():
    """Backtracks for longer than the universe lasts, without ever giving up the interpreter lock."""
    import re

    re.match(r"(a+)+$", "a" * 60 + "b")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def complain(text):
    raise ValueError(text)


def unsendable():
    return lambda: None


def chatter():
    print("this must not reach the run's output")
    return 1


HERE = __name__ + "."


@pytest.fixture
def pool():
    pool = ScoringPool(1)
    yield pool
    pool.close()


def test_200_scorings_at_once_on_one_worker_give_no_false_timeout(pool):
    pool.submit(HERE + "answer", 0, timeout_s=10).result(60)  # the worker is up
    futures = [pool.submit(HERE + "work", 0.01, timeout_s=0.5) for _ in range(200)]  # 2 s of work, 0.5 s each at most
    assert all(isinstance(future.result(60), int) for future in futures)
    assert pool.workers_replaced == 0


@pytest.mark.parametrize("hang", ["work", "spin_in_c"])
def test_a_hung_worker_is_killed_and_replaced(pool, hang):
    before = pool.submit(HERE + "work", 0, timeout_s=10).result(60)
    stuck = pool.submit(HERE + hang, *([1e6] if hang == "work" else []), timeout_s=0.3)
    after = pool.submit(HERE + "work", 0, timeout_s=10)
    with pytest.raises(ScoringTimeout, match=r"0\.3 s"):
        stuck.result(60)
    assert after.result(60) != before, "the scoring behind it ran in a new process"
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)


def test_a_worker_that_dies_fails_its_scoring_only(pool):
    dead = pool.submit(HERE + "die", timeout_s=10)
    alive = pool.submit(HERE + "answer", 3, timeout_s=10)
    with pytest.raises(ScoringCrash, match="-9"):
        dead.result(60)
    assert alive.result(60) == 3


def test_exceptions_come_back_as_they_are(pool):
    with pytest.raises(ValueError, match="no such unit"):
        pool.submit(HERE + "complain", "no such unit", timeout_s=10).result(60)
    with pytest.raises(TypeError, match="cannot be sent between processes"):
        pool.submit(HERE + "unsendable", timeout_s=10).result(60)
    with pytest.raises(ValueError, match="no attribute 'nothing'"):
        pool.submit(HERE + "nothing", timeout_s=10).result(60)
    assert pool.submit(HERE + "answer", 1, timeout_s=10).result(60) == 1


def test_arguments_that_cannot_be_sent_fail_their_scoring_only(pool):
    with pytest.raises((TypeError, AttributeError, ValueError)):
        pool.submit(HERE + "answer", threading.Lock(), timeout_s=10).result(60)
    assert pool.submit(HERE + "answer", 1, timeout_s=10).result(60) == 1


def test_scorers_that_print_stay_silent(pool, capfd):
    assert pool.submit(HERE + "chatter", timeout_s=10).result(60) == 1
    assert "must not reach" not in capfd.readouterr().out


def test_any_thread_and_any_loop_may_score(pool):
    def from_a_thread(value):
        return asyncio.run(pool.score(HERE + "answer", value, timeout_s=10))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(from_a_thread, range(20))) == list(range(20))


def test_a_cancelled_scoring_is_skipped(pool):
    first = pool.submit(HERE + "work", 0.3, timeout_s=10)
    waiting = pool.submit(HERE + "work", 100, timeout_s=200)
    assert waiting.cancel()
    assert first.result(60) and pool.submit(HERE + "answer", 1, timeout_s=10).result(60) == 1


def test_closing_ends_the_workers_and_fails_what_waits():
    pool = ScoringPool(1)
    pid = pool.submit(HERE + "work", 0, timeout_s=10).result(60)
    running, waiting = (pool.submit(HERE + "work", 100, timeout_s=200) for _ in range(2))
    time.sleep(0.2)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 5
    for future in (running, waiting, pool.submit(HERE + "answer", 1, timeout_s=1)):
        with pytest.raises(PoolClosed):
            future.result(1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


_PARENT = """
import sys
from miles.rollout.rm_hub.scoring_pool import ScoringPool
pool = ScoringPool(1)
print(pool.submit("{here}work", 0, timeout_s=10).result(60), flush=True)
pool.submit("{here}spin_in_c", timeout_s=1000)
sys.stdin.read()
"""


def test_workers_die_with_a_killed_parent_even_while_they_hang():
    command = [sys.executable, "-c", _PARENT.replace("{here}", HERE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        time.sleep(0.3)
        parent.kill()
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(worker, 0)
            time.sleep(0.05)
        os.kill(worker, signal.SIGKILL)
        raise AssertionError("the worker outlived its parent")
