"""From the run's arguments to the command line and the environment of one SGLang server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from miles.backends.engine_api.errors import EngineStartError
from miles.backends.sglang_utils.installation import Installation, Option, interpreter_environment
from miles.backends.sglang_utils.option_names import SERVER_ALIASES, SERVER_OPTIONS

# What a launch decides for each server. An option of the user's would contradict it.
RESERVED = ("admin_api_key", "api_key", "weight_version")

# A CPU-only SGLang has neither attention nor sampling kernels but torch's, and its idle scheduler would keep a core busy.
# It sizes its cache by the host's whole memory, which it shares with the trainer here.
_CPU_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "max_total_tokens": 32768,
    "mem_fraction_static": 0.3,
    "sleep_on_idle": True,
}
_DEFAULTS: dict[str, Any] = {"log_level_http": "warning"}  # not a line for every request
# Flags of ours that only look like the server's: the topology file, and a switch that means something with LoRA alone.
_NOT_PASSED = ("config", "lora_use_virtual_experts")
_NAMES = tuple(name for names in SERVER_OPTIONS.values() for name in names.split())


class UnknownOption(EngineStartError):
    """The installed SGLang does not have an option that was asked for."""


def given_options(args: Any, installation: Installation) -> dict[str, Any]:
    """The `--sglang-*` flags that have a value, by the name of their field."""
    names = dict.fromkeys((*_NAMES, *(option.field for option in installation.options.values())))
    values = {name: getattr(args, f"sglang_{name}", None) for name in names}
    return {name: value for name, value in values.items() if value is not None and name not in _NOT_PASSED}


def unknown_options(args: Any, installation: Installation) -> list[str]:
    """Flags that the installed SGLang does not have, as the user spells them, and values that it does not take."""
    problems = []
    for name, value in given_options(args, installation).items():
        flag = f"--sglang-{name.replace('_', '-')}"
        option = _find(installation, name)
        if option is None:
            problems.append(f"{flag} is no option of SGLang {installation.version} ({installation.python}): drop it")
        elif option.choices is not None and option.values == 1 and str(value) not in option.choices:
            problems.append(
                f"{flag} {value}: SGLang {installation.version} takes one of {', '.join(map(str, option.choices))}"
            )
    return problems


def runs_on_cpu(args: Any) -> bool:
    return (getattr(args, "sglang_device", None) or getattr(args, "train_device", None)) == "cpu"


def server_options(args: Any, installation: Installation, own: dict[str, Any]) -> list[str]:
    """The server's command line. `own` is what the launch decides: addresses, keys, the model, sizes.

    Order of precedence: `own`, then the user's flags, then defaults, of which those that this SGLang lacks are left out.
    Raises: UnknownOption with every flag that it does not have.
    """
    if problems := unknown_options(args, installation):
        raise UnknownOption("; ".join(problems))
    wanted = _DEFAULTS | (_CPU_DEFAULTS if runs_on_cpu(args) else _gpu_defaults(args))
    defaults = {name: value for name, value in wanted.items() if _find(installation, name) is not None}
    merged = defaults | given_options(args, installation) | own
    return [word for name, value in merged.items() for word in _words(installation, name, value)]


def _gpu_defaults(args: Any) -> dict[str, Any]:
    """SGLang's own, except where the GPU is not the engine's alone."""
    share = getattr(args, "gpus_per_rank", 1.0)
    return {"mem_fraction_static": round(0.8 * share, 3)} if share < 1 else {}


def _words(installation: Installation, name: str, value: Any) -> Iterator[str]:
    option = _find(installation, name)
    if option is None:
        raise UnknownOption(
            f"SGLang {installation.version} ({installation.python}) has no option {name}, which a run needs"
        )
    if isinstance(value, bool):
        if value:
            yield option.spelling
        elif (off := "--no-" + option.spelling.removeprefix("--")) in installation.options:
            yield off
        return
    values = value if isinstance(value, list | tuple) else [value]
    # One word, so that a value that begins with a dash is not taken for an option.
    if option.values == "many":
        yield from (option.spelling, *map(str, values))
    else:
        yield from (f"{option.spelling}={v}" for v in values)


def _find(installation: Installation, name: str) -> Option | None:
    return installation.find(name, SERVER_ALIASES.get(name, ()))


def server_environment(args: Any, gpu_ids: list[int] | None, ranks: int) -> dict[str, str]:
    """The environment of a server of `ranks` ranks."""
    env = interpreter_environment(getattr(args, "sglang_python", None)) | {
        "TOKENIZERS_PARALLELISM": "false",
        # Its /health otherwise generates a token, and so does not answer while it is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    if gpu_ids is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
    if runs_on_cpu(args):
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if ranks > 1:  # otherwise it wants a NUMA node for each
            cores = sorted(os.sched_getaffinity(0))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return env
