# SPDX-License-Identifier: Apache-2.0
"""Compile fast in the processes that tests start, as `fast_compilation` does in their own.

Python imports this at its start, because `fast_compilation.in_children` puts this folder on
PYTHONPATH. Nothing else is imported before the process imports the compiler. TVM imports torch
where it is installed, for a second, to take its tensors; here only processes that import it do.
"""

import importlib.util
import sys
from pathlib import Path

_TARGETS = "tvm_pagedkv.compiler.targets"
_MAKE_CACHES = ("tvm_pagedkv.compiler.create", "tvm_pagedkv_lm.model.caches")


class _Finder:
    """Find the modules to patch, and patch them once they are imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch" and _importer().startswith(("tvm.", "tvm_ffi")):
            raise ModuleNotFoundError("tests start without torch", name=name)
        if name != _TARGETS and name not in _MAKE_CACHES:
            return None
        others = [finder for finder in sys.meta_path if finder is not _Finder]
        spec = next(filter(None, (finder.find_spec(name, path) for finder in others)), None)
        if spec is not None:
            load = spec.loader.exec_module

            def load_and_patch(module):
                load(module)
                _patch(module)

            spec.loader.exec_module = load_and_patch
        return spec


def _importer():
    """Return the name of the module whose import statement is being run."""
    frame = sys._getframe(2)
    while "importlib" in frame.f_globals.get("__name__", "importlib"):
        frame = frame.f_back
    return frame.f_globals["__name__"]


def _patch(module):
    if module.__name__ == _TARGETS:
        native = module.native_target
        module.native_target = lambda: at_level_0(native())
        return
    fast_compilation = sys.modules.get("fast_compilation_of_child")
    if fast_compilation is None:
        path = Path(__file__).resolve().parent.parent / "fast_compilation.py"
        spec = importlib.util.spec_from_file_location("fast_compilation_of_child", path)
        fast_compilation = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fast_compilation)
        fast_compilation.patch_compiler(setattr)
    fast_compilation.patch_maker(setattr, module)


def at_level_0(target):
    """Return a target without LLVM's optimisations."""
    from tvm.target import Target

    fields = target.export()
    known = ("kind", "mtriple", "mcpu", "mattr", "model")
    fields = {name: fields[name] for name in known if name in fields}
    return Target(fields | {"opt-level": 0})


if __name__ == "sitecustomize":  # a child, not a test
    sys.meta_path.insert(0, _Finder)
