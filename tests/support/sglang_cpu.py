"""SGLang's own cache on a machine without a GPU: the few parts that need one are replaced."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# imported by SGLang and Transformers for images; their builds need a GPU's torch
ABSENT = ("torchvision",)


class _AnyAttribute(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyAttribute(name, (), {})


class _AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages of which names are imported and nothing is used."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _AbsentModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Done:
    """An event of a device stream that has happened."""

    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def prepare() -> None:
    """Make SGLang importable; replace the copies between device and host, and pinned memory."""
    if any(isinstance(finder, _AbsentPackages) for finder in sys.meta_path):
        return
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # Transformers remembers that it is absent
    sys.meta_path.append(_AbsentPackages())
    import sglang.srt.managers.cache_controller as controller
    import sglang.srt.mem_cache.l2_transfer as transfers
    import sglang.srt.mem_cache.pool_host.common as pinned

    class NoCopies(transfers.L2TransferEngine):  # type: ignore[misc]  # SGLang is not typed
        def submit_device_to_host(self, _: Any) -> Any:
            return transfers.TransferCompletion(_Done(), _Done(), False)

        def submit_host_to_device(self, _: Any, **__: Any) -> Any:
            return transfers.TransferCompletion(_Done(), _Done(), False)

    controller.L2TransferEngine = NoCopies
    pinned._cuda_host_register = lambda *_, **__: None
