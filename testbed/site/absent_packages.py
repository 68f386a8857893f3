"""Importable stand-ins for GPU and vision packages that SGLang imports at module level and never calls here.

A real installation always wins: the finder sits last on ``sys.meta_path``. Whatever is called on a stand-in
returns something harmless, so only import time is covered; a computation that reached one would be wrong.
"""

from __future__ import annotations

import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

ABSENT = ("torchvision", "triton")
_PROBE = "transformers/utils/import_utils.py"
_PROBE_DEPTH = 12


class _StandInMeta(type):
    """A stand-in class answers any attribute with a dotted name, as enum-like and dtype-like classes are
    read.
    """

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StandIn(metaclass=_StandInMeta):
    """Base for every class taken from an absent package: can be subclassed, made and called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> _StandIn:
        return self


class AbsentModule(types.ModuleType):
    """A module of an absent package: sub-modules, classes and decorators appear when asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = __file__
        self.__version__ = "0.0.0"
        self.__spec__ = ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        qualified = f"{self.__name__}.{name}"
        found: Any = sys.modules.get(qualified)
        if found is None:
            if name[0].isupper():
                found = _StandInMeta(name, (_StandIn,), {"__module__": self.__name__})
            else:
                found = sys.modules[qualified] = AbsentModule(qualified)
        setattr(self, name, found)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Used as a decorator, bare (``@triton.jit``) or with arguments (``@triton.autotune(...)``)."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __bool__(self) -> bool:
        return False


class AbsentPackageFinder(MetaPathFinder, Loader):
    """Finds only the packages of :data:`ABSENT`, after every real finder has failed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in ABSENT or _asked_by_transformers():
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> AbsentModule:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _asked_by_transformers() -> bool:
    """Transformers probes for optional packages with find_spec and would use what it believes is there."""
    frame: Any = sys._getframe(2)
    for _ in range(_PROBE_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_filename.replace("\\", "/").endswith(_PROBE):
            return True
        frame = frame.f_back
    return False


def install() -> None:
    """Put the finder last, so that a package that is really installed is never hidden. Idempotent."""
    if not any(isinstance(finder, AbsentPackageFinder) for finder in sys.meta_path):
        sys.meta_path.append(AbsentPackageFinder())
