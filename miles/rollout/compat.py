"""User functions in the shapes they come in: classes or functions, typed or legacy signatures, sync or async.

A class for rollout or evaluation is built from `RolloutFnConstructorInput` and called with a `RolloutFnInput`; a function gets
`(args, rollout_id, data_source, evaluation=False)`. A generate function gets a `GenerateFnInput`, or in the legacy form
`(args, sample, sampling_params[, evaluation])`. Sync callables run in a thread, so that they never block the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from miles.rollout.base_types import (
    GenerateFnInput,
    GenerateFnOutput,
    RolloutFnConstructorInput,
    RolloutFnEvalOutput,
    RolloutFnInput,
    RolloutFnTrainOutput,
)
from miles.utils.imports import ImportPathError, check_accepts, load_function
from miles.utils.types import Sample

RolloutFn = Callable[[RolloutFnInput], Awaitable[RolloutFnTrainOutput | RolloutFnEvalOutput]]
GenerateFn = Callable[[GenerateFnInput], Awaitable[GenerateFnOutput]]


def is_async(function: Callable) -> bool:
    """Whether calling `function` gives a coroutine; knows callable objects too."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Await an async callable; run a sync one in a thread. A sync callable may return an awaitable."""
    if is_async(function):
        return await function(*args, **kwargs)
    result = await asyncio.to_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


# ---- rollout and evaluation ------------------------------------------------------------------------------------------


class RolloutFunction:
    """A user's rollout or evaluation function behind one signature: `await fn(input)`."""

    def __init__(self, path: str, target: Any, constructor_input: RolloutFnConstructorInput) -> None:
        self.path = path
        self._input = constructor_input
        self.legacy = not inspect.isclass(target)
        if self.legacy:
            check_accepts(path, target, positional=3, keywords=("evaluation",))
            self.instance = target
        else:
            check_accepts(path, target, positional=1)
            self.instance = target(constructor_input)
            if not callable(self.instance):
                raise ImportPathError(f"{path}: class {target.__name__} has no __call__(self, input)")
            check_accepts(path, self.instance, positional=1)

    async def __call__(self, input: RolloutFnInput) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
        if self.legacy:
            source = self._input
            output = await call(
                self.instance, source.args, input.rollout_id, source.data_source, evaluation=input.evaluation
            )
        else:
            output = await call(self.instance, input)
        return self._typed(output, input.evaluation)

    def _typed(self, output: Any, evaluation: bool) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
        if evaluation and isinstance(output, dict):
            output = RolloutFnEvalOutput(data=output)
        if not evaluation and isinstance(output, list):
            output = RolloutFnTrainOutput(samples=output)
        wanted = RolloutFnEvalOutput if evaluation else RolloutFnTrainOutput
        if not isinstance(output, wanted):
            raise TypeError(f"{self.path} returned a {type(output).__name__}; expected {wanted.__name__}")
        return output


def load_rollout_function(path: str, constructor_input: RolloutFnConstructorInput) -> RolloutFunction:
    """The function or class at `path`, ready to be awaited.

    Raises: ImportPathError when the path or the signature is wrong.
    """
    return RolloutFunction(path, load_function(path), constructor_input)


# ---- generation ------------------------------------------------------------------------------------------------------


def _is_legacy_generate(function: Callable) -> bool:
    parameters = list(inspect.signature(function).parameters.values())
    return len(parameters) >= 3 and parameters[0].name != "input"


def load_generate_function(path: str) -> GenerateFn:
    """The generate function at `path` as `async (GenerateFnInput) -> GenerateFnOutput`.

    Raises: ImportPathError when the path or the signature is wrong.
    """
    target = load_function(path)
    if inspect.isclass(target):
        check_accepts(path, target)
        target = target()
    if not callable(target):
        raise ImportPathError(f"{path} is a {type(target).__name__}, not a function or class")
    if not _is_legacy_generate(target):
        check_accepts(path, target, positional=1)
        return _typed_generate(path, target)
    check_accepts(path, target, positional=3)
    takes_evaluation = "evaluation" in inspect.signature(target).parameters
    return _legacy_generate(path, target, takes_evaluation)


def _output(path: str, value: Any) -> GenerateFnOutput:
    if isinstance(value, GenerateFnOutput):
        return value
    if isinstance(value, Sample) or (isinstance(value, list) and all(isinstance(s, Sample) for s in value)):
        return GenerateFnOutput(samples=value)
    raise TypeError(
        f"{path} returned a {type(value).__name__}; expected a Sample, a list of Samples or GenerateFnOutput"
    )


def _typed_generate(path: str, target: Callable) -> GenerateFn:
    async def generate(input: GenerateFnInput) -> GenerateFnOutput:
        return _output(path, await call(target, input))

    return generate


def _legacy_generate(path: str, target: Callable, takes_evaluation: bool) -> GenerateFn:
    async def generate(input: GenerateFnInput) -> GenerateFnOutput:
        extra = {"evaluation": input.evaluation} if takes_evaluation else {}
        return _output(path, await call(target, input.args, input.sample, input.sampling_params, **extra))

    return generate
