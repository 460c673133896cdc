"""Real processes: a session server in front of an embedded engine, an agent with the official client, death and restart."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from types import SimpleNamespace

import openai
import pytest

from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.launcher import EngineProcess, wait_ready
from miles.rollout.base_types import GenerateFnInput
from miles.rollout.generate_and_rm import generate_and_rm
from miles.rollout.generate_hub.agentic_tool_call import generate, request_kwargs
from miles.rollout.session.client import SessionClient
from miles.rollout.session.fleet import SessionServers
from miles.router.engine_pool import EnginePool
from miles.router.front import MilesRouter
from miles.utils.imports import register_function
from miles.utils.process import reserve_port, spawn, terminate
from miles.utils.types import Sample, SampleStatus
from tests.helpers.tiny_models import make_tiny_model

ENGINE_KEY = "of the engine"
AGENTIC = "miles.rollout.generate_hub.agentic_tool_call.generate"


def make_args(model: object, run_dir: object, **overrides: object) -> SimpleNamespace:
    fields = {
        "hf_checkpoint": str(model), "run_dir": str(run_dir), "use_session_server": "v1", "tito_model": "smollm2",
        "session_message_matcher": "strict", "session_strict_history": False, "session_idle_timeout": 600.0,
        "session_sample_picker_path": "miles.rollout.session.v2.picker_hub.drop_retries",
        "session_sample_postprocessor_path": "miles.rollout.session.v2.postprocessor_hub.default_postprocess",
        "session_max_count": 100, "session_max_bytes": 1 << 30, "session_server_ip": None, "session_server_port": None,
        "apply_chat_template_kwargs": None, "chat_template_path": None, "trust_remote_code": False,
        "rollout_max_context_len": None, "save_debug_trajectory_data": None, "use_rollout_routing_replay": False,
        "rollout_request_timeout": 60.0, "engine_start_timeout": 200.0, "weight_update_timeout": 10.0,
        "custom_agent_function_path": "tests.agent", "agent_timeout": 60.0, "max_seq_len": None, "ci_test": True,
        "miles_router_timeout": None, "miles_router_max_connections": None, "rollout_health_check_interval": 30.0,
        "miles_router_health_check_failure_threshold": 3, "sglang_api_key": ENGINE_KEY, "max_sample_retries": 0, "group_rm": False, "custom_rm_path": None, "rm_type": None, "reward_timeout": 5.0,
    }  # fmt: skip
    return SimpleNamespace(**(fields | overrides))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One embedded engine with a tiny random model, which wants a key with every generation."""
    root = tmp_path_factory.mktemp("engine")
    model = make_tiny_model(root / "model", initializer_range=0.15)
    listener = reserve_port("127.0.0.1", 0)
    command = [sys.executable, "-m", "miles.backends.embedded_engine.server", "--model-path", str(model)]
    command += ["--fd", str(listener.fileno()), "--api-key", ENGINE_KEY, "--weight-version", "1", "--device", "cpu"]
    log = root / "engine.log"
    server = spawn(command, log_path=log, env=dict(os.environ), pass_fds=[listener.fileno()])
    process = EngineProcess(server, f"http://127.0.0.1:{listener.getsockname()[1]}", log)
    listener.close()

    async def ready() -> None:
        async with EngineClient(process.url, admin_key=ENGINE_KEY) as client:
            await wait_ready(client, process, 200.0)

    asyncio.run(ready())
    yield SimpleNamespace(url=process.url, model=model)
    terminate(process.process)


@pytest.fixture
async def run(engine, tmp_path):
    args = make_args(engine.model, tmp_path)
    pool = EnginePool(args)
    client = EngineClient(engine.url, api_key=ENGINE_KEY)
    pool.set_engine(0, client)
    servers = SessionServers(args, pool, "127.0.0.1")
    try:
        await servers.start()
        yield SimpleNamespace(args=args, servers=servers)
    finally:
        await servers.stop()
        await client.close()


async def turns(base_url: str, prompt: list, count: int, **kwargs: object) -> list:
    messages = list(prompt)
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="EMPTY", max_retries=6) as client:
        for i in range(count):
            fields = {"model": "m", "messages": messages, "max_tokens": 12, **kwargs}
            said = (await client.chat.completions.create(**fields)).choices[0]
            messages += [said.message.model_dump(exclude_none=True), {"role": "user", "content": f"go on {i}"}]
            if said.finish_reason == "length":
                del messages[-2:]
                return messages
    return messages


def state_of(args: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(
        args=args,
        aborted=False,
        generate_fn_semaphore=asyncio.Semaphore(8),
        generate_function_for=lambda path: generate,
    )


async def test_an_agent_from_the_first_message_to_a_checked_sample(run):
    async def agent(base_url, prompt, request_kwargs, metadata, **kwargs):
        assert metadata["session_server_id"] in base_url
        await turns(base_url, prompt, 2, temperature=request_kwargs["temperature"], extra_body={"stop_token_ids": [2]})
        return {"reward": 0.5, "agent_metrics": {"total_tool_time": 1.5}}

    register_function("tests.agent", agent)
    params = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 12}
    rows = []
    for _ in range(2):
        sample = Sample(index=4, prompt=[{"role": "user", "content": "What is the sum?"}])
        done = await generate_and_rm(state_of(run.args), sample, params)
        assert done.failure is None, done.failure
        assert done.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED) and done.reward == 0.5
        assert sum(done.loss_mask) >= 1 and done.non_generation_time == 1.5
        assert {span.version for span in done.version_spans} == {1}
        rows.append((done.tokens, done.rollout_log_probs))
    assert rows[0] == rows[1]  # the same seed, the same trajectory


OUTCOMES = [
    (None, "agent_dropped", True),
    ({"outcome": "drop", "reason": "bad task"}, "agent_dropped", True),
    ({"outcome": "failed"}, "agent_failed", False),
    ({"outcome": "?"}, "agent_error", True),
    (RuntimeError("sandbox gone"), "agent_error", False),
    ({}, "agent_made_no_call", False),
    ("slow", "agent_timeout", False),
]


async def test_what_goes_wrong_never_becomes_a_reward_and_a_cut_off_ends_agents_at_once(run):
    cancelled = asyncio.Event()

    async def agent(base_url, prompt, request_kwargs, metadata, **kwargs):
        outcome = OUTCOMES[metadata["case"]][0]
        if isinstance(outcome, Exception):
            raise outcome
        if outcome == "slow":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise
        return outcome

    register_function("tests.agent", agent)
    run.args.agent_timeout = 0.3

    def sample(case: int) -> Sample:
        return Sample(index=1, prompt=[{"role": "user", "content": "x"}], metadata={"case": case})

    for case, (outcome, category, permanent) in enumerate(OUTCOMES):
        done = await generate_and_rm(state_of(run.args), sample(case), {"temperature": 1.0})
        assert done.status is SampleStatus.FAILED and done.reward is None, outcome
        assert (done.failure.category, done.failure.permanent) == (category, permanent)
    assert cancelled.is_set()
    run.args.agent_timeout = None
    cancelled.clear()
    state = state_of(run.args)
    task = asyncio.create_task(generate(GenerateFnInput(state, sample(len(OUTCOMES) - 1), {"temperature": 1.0})))
    await asyncio.sleep(0.3)
    state.aborted = True
    assert (await asyncio.wait_for(task, 20)).samples.status is SampleStatus.ABORTED
    assert cancelled.is_set()


async def test_a_session_outlives_its_server_and_its_prefix_is_cached(run):
    session = await SessionClient.open(run.args, seed=3)
    prompt = [{"role": "user", "content": "What is the sum of two numbers? " * 8}]
    messages = await turns(session.base_url, prompt, 1, extra_body={"stop": ["e"]})
    [server] = run.servers.servers
    before = await session.collect(Sample(index=0))
    os.kill(server.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 200
    while run.servers.restarts == 0 or server.engines is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert (await session.collect(Sample(index=0))).samples[0].tokens == before.samples[0].tokens
    await turns(session.base_url, messages, 1, extra_body={"stop": ["e"]})
    after = (await session.collect(Sample(index=0))).samples[0]
    if len(messages) > 1:
        assert after.tokens[: len(before.samples[0].tokens)] == before.samples[0].tokens
        assert after.prefix_cache_info.cached_tokens > 0
    await session.close()


async def test_sessions_speak_through_the_router_process(engine, tmp_path):
    args = make_args(engine.model, tmp_path)
    pool = EnginePool(args)
    pool.set_engine(0, EngineClient(engine.url, api_key=ENGINE_KEY))
    router = MilesRouter(args, pool, "127.0.0.1")
    servers = SessionServers(args, router.front, "127.0.0.1")
    try:
        await router.start()
        await servers.start()
        assert servers.servers[0].engines[0].url.endswith(f":{args.sglang_router_port}")
        session = await SessionClient.open(args, seed=3)
        await turns(session.base_url, [{"role": "user", "content": "What is the sum of two numbers? " * 8}], 2)
        found = (await session.collect(Sample(index=0))).samples[0]
        assert found.response_length > 0 and found.weight_versions
        await session.close()
    finally:
        await servers.stop()
        await router.stop()
        await pool.client(0).close()


async def test_a_client_that_leaves_stops_the_engine(run, engine):
    session = await SessionClient.open(run.args)
    task = asyncio.create_task(
        turns(
            session.base_url, [{"role": "user", "content": "x"}], 1, extra_body={"ignore_eos": True, "max_tokens": 1900}
        )
    )
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with EngineClient(engine.url, admin_key=ENGINE_KEY) as client:
        deadline = time.monotonic() + 20
        while (await client.server_info()).get("internal_states", [{}])[0].get("num_running_reqs", 0):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
    assert (await session.collect(Sample(index=0))).empty_reason == "no_records"
    await session.close()


def test_sampling_parameters_under_the_names_of_chat_requests():
    params = {
        "max_new_tokens": 5,
        "temperature": 1.0,
        "top_k": None,
        "sampling_seed": 3,
        "no_stop_trim": True,
        "stop": ["x"],
    }
    assert request_kwargs(params) == {"max_tokens": 5, "temperature": 1.0, "stop": ["x"]}
    assert request_kwargs({"max_new_tokens": 5, "max_tokens": 3}) == {"max_tokens": 3}
