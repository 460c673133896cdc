"""Which SGLang an interpreter has, and what its server can be told: asked of that interpreter, and remembered."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.backends.engine_api.errors import EngineStartError

HOW_TO_INSTALL = (
    "on a CPU, `bash scripts/install_sglang_cpu.sh` makes an environment that has it; then name its interpreter with "
    "--sglang-python"
)
_INSIDE = Path(__file__).parent / "inside"
_TIMEOUT_S = 180.0  # a first import on a busy machine
_FIND = "import importlib.metadata as m; d = m.distribution('sglang'); print(d.version, d.locate_file('sglang'))"


@dataclass(frozen=True)
class Option:
    """One option of the server. `values`: 0 for a switch, 1, or "many"; `choices` None where any value may do."""

    spelling: str
    field: str
    values: int | str
    choices: tuple[str, ...] | None


@dataclass(frozen=True)
class Installation:
    """An interpreter that has SGLang."""

    python: str
    version: str
    options: dict[str, Option]  # by spelling, with the dashes

    def find(self, name: str, aliases: Sequence[str] = ()) -> Option | None:
        """The option of a field of ServerArgs, or None: by the field's name, else by one of its spellings."""
        for field in (name, *aliases):
            spelling = "--" + field.replace("_", "-")
            if spelling in self.options:
                return self.options[spelling]
            for option in self.options.values():
                if option.field == field and not option.spelling.startswith("--no-"):
                    return option
        return None


class SglangMissing(EngineStartError):
    """The interpreter has no SGLang, or one that cannot be imported."""


def installed(python: str | None = None) -> Installation:
    """What `python` (the running interpreter when None) has. Takes seconds the first time for each SGLang.

    Raises: SglangMissing, with the interpreter, its own last words, and how to get one.
    """
    return _installed(os.path.abspath(python) if python else sys.executable)


@functools.cache
def _installed(python: str) -> Installation:
    if not os.access(python, os.X_OK):
        raise SglangMissing(f"--sglang-python {python} is not an executable file: {HOW_TO_INSTALL}")
    found = _run([python, "-c", _FIND])
    if found.returncode != 0 and "PackageNotFoundError" not in found.stderr:
        raise SglangMissing(f"{python} could not be asked for its SGLang: {_last_line(found.stderr)}")
    if found.returncode != 0:
        raise SglangMissing(f"{python} has no SGLang: {HOW_TO_INSTALL}")
    version, _, package = found.stdout.strip().partition(" ")
    store = _store(version, package)
    answer = _read(store) or _describe(python, version, store)
    options = {
        spelling: Option(spelling, o["field"], o["values"], tuple(o["choices"]) if o["choices"] is not None else None)
        for spelling, o in answer["options"].items()
    }
    return Installation(python, answer["version"], options)


def _describe(python: str, version: str, store: Path) -> dict[str, Any]:
    # The switch for a CPU lets it be imported where there is no GPU; it changes nothing about the options.
    done = _run([python, str(_INSIDE / "describe.py")], SGLANG_USE_CPU_ENGINE="0" if _has_cuda() else "1")
    try:
        if done.returncode != 0:
            raise ValueError(_last_line(done.stderr))
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise SglangMissing(
            f"SGLang {version} of {python} cannot be used: listing its server's options failed with: {error}"
        ) from None
    _write(store, answer)
    return answer


def _run(command: list[str], **env: str) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(
            command,
            env=interpreter_environment(command[0]) | env,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SglangMissing(f"{command[0]} could not be asked for its SGLang: {error}") from None


def interpreter_environment(python: str | None) -> dict[str, str]:
    """This process's environment; for another interpreter without what would make it read this one's packages."""
    if python is None or os.path.abspath(python) == sys.executable:
        return dict(os.environ)
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


# ---- what was learned is kept for other processes and runs -----------------------------------------------------------


def _store(version: str, package: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = package.strip("/").replace("/", "-")
    # The stamp changes when SGLang is installed anew, and with what this package asks.
    stamp = int(os.stat(package).st_mtime) ^ int((_INSIDE / "describe.py").stat().st_mtime)
    return cache / "miles" / "sglang" / f"{version}-{place}-{stamp:x}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _write(path: Path, answer: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(answer, file)
        os.replace(file.name, path)
    except OSError:
        pass  # a read-only home: asked again next time
