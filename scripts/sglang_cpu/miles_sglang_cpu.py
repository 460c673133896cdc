"""Stand-ins for what the SGLang wheel imports and a CPU-only installation does not have. SGLang itself stays as released.

`install_sglang_cpu.sh` puts this file into SGLang's own environment, where a `.pth` file runs it in every interpreter: the
server starts its scheduler and detokenizer as new ones. It does nothing unless SGLANG_USE_CPU_ENGINE=1, SGLang's own
switch for a CPU, and it stands in only for what is missing:

- `sgl_kernel` and `triton`: imported at module level, but not called where SGLang has a torch implementation, which it
  takes on a CPU. A kernel that is called all the same raises NotImplementedError with its name.
- torchvision's operators: its wheel cannot load its compiled half beside a torch without CUDA, and then declares
  gradients of operators that nobody has defined.
- `torch.cuda`: three calls that the weight checker and the capture of routed experts make on every device.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

_keep: list[Any] = []  # a torch library's definitions live as long as the object that made them


class MissingKernel:
    """A kernel, decorator or constant of a package that is not installed. As a base class it is empty."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._name.startswith("triton."):
            raise NotImplementedError(f"{self._name} is not available on a CPU")
        # Triton's names are decorators, plain or with options. What they decorate stays a function, which cannot be
        # launched on a grid: defining a kernel is no use of it.
        return args[0] if len(args) == 1 and callable(args[0]) else lambda function: function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingKernel(f"{self._name}.{name}")

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, bases: tuple) -> tuple:
        return (object,)


class MissingModule(types.ModuleType):
    """A module of a package that is not installed: every name in it can be imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        # Names with a capital are types: they are subclassed, raised, and asked for by isinstance.
        value = type(name, (Exception,), {}) if name[0].isupper() else MissingKernel(full)
        setattr(self, name, value)
        return value


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return MissingModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "triton":
            _fill_triton(module)


class _Finder(importlib.abc.MetaPathFinder):
    """First in line, so that it sees the imports before which something must be prepared."""

    def __init__(self) -> None:
        self._missing: dict[str, bool] = {}
        self._prepare = {"torchvision": _declare_torchvision_operators, "sglang": _answer_for_cuda}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        prepare = self._prepare.pop(name, None)
        if prepare is not None:
            prepare()
        package = name.partition(".")[0]
        if package in ("sgl_kernel", "triton") and self._is_missing(package):
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        return None

    def _is_missing(self, package: str) -> bool:
        if package not in self._missing:
            self._missing[package] = importlib.machinery.PathFinder.find_spec(package) is None
        return self._missing[package]


def _fill_triton(triton: Any) -> None:
    """What is computed with while modules are imported."""

    class Config:
        def __init__(self, kwargs: dict | None = None, num_warps: int = 4, num_stages: int = 2, **more: Any) -> None:
            self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages

    class constexpr:
        def __init__(self, value: Any = None) -> None:
            self.value = value

    triton.__version__ = "3.0.0"
    triton.Config = Config
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
    language = importlib.import_module("triton.language")
    language.constexpr = constexpr  # type: ignore[attr-defined]
    triton.language = language


def _declare_torchvision_operators() -> None:
    import torch

    if torch.version.cuda is not None:
        return  # its compiled half loads, and declares them itself
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _keep.append(library)


def _answer_for_cuda() -> None:
    import torch

    if torch.cuda.is_available():
        return
    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda *args: 0, cudaHostUnregister=lambda *args: 0, cudaGetErrorString=lambda code: ""
    )
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.cudart = lambda: runtime
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, _Finder())
