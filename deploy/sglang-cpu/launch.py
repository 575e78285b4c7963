"""Runs `sglang.launch_server` where torch is a CPU build: the same arguments, in an environment made by install.sh.

SGLang imports names of two packages whose published builds need CUDA: sgl_kernel (its kernels) and torchvision (image
transforms of models that are not run here). On a CPU without AMX it computes with torch's own operators, so placeholders do:
importing a name works, calling it raises. Each of the server's processes is spawned, and imports this file again: what stands at
the top holds there.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
ABSENT = ("sgl_kernel", "torchvision")


class _PlaceholderType(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(f"{cls.__qualname__}.{name}")


def _placeholder(path):
    def fail(*args, **kwargs):
        raise NotImplementedError(f"{path} needs a CUDA build, which this environment does not have")

    return _PlaceholderType(path.rsplit(".", 1)[-1], (), {"__new__": fail, "__qualname__": path})


class _PlaceholderModule(types.ModuleType):
    __file__, __version__ = None, "0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _placeholder(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _PlaceholderModule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
