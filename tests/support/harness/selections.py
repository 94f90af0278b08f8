# SPDX-License-Identifier: Apache-2.0
"""Tests that `-m quick` selects, that start first, and that compile kernels as users do.

Long runs are marked `slow` where they are defined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

# Some of every component: three minutes on two CPUs with an empty cache of compiled kernels.
QUICK = (
    "tests/bundle/test_hostile_bundles.py",
    "tests/cache/errors/test_cache_errors.py",
    "tests/cache/steps/test_cache_forward.py",
    "tests/cache/layers/test_cache_sliding.py",
    "tests/cache/sequences/test_cached_pages.py",
    "tests/cache/errors/test_creation_errors.py",
    "tests/cache/errors/test_failed_steps.py",
    "tests/cache/sequences/test_sequence_window.py",
    "tests/cache/prefixes/test_shared_prefix.py",
    "tests/cache/sequences/test_tree_cache.py",
    "tests/checkpoint/",
    "tests/compiler/test_disk_cache.py",
    "tests/cuda/test_cuda_decode.py",
    "tests/cuda/test_cuda_emulator.py",
    "tests/distributed/test_disco.py",
    "tests/docs/test_references.py",
    "tests/drop_in/test_engine_",
    "tests/lm/engine/test_tokens.py",
    "tests/harness/",
    "tests/kernels/test_attention_kernels.py::test_decode",
    "tests/kernels/test_attention_kernels.py::test_prefill",
    "tests/kernels/test_page_kernels.py",
    "tests/kernels/test_tree_kernels.py",
    "tests/mlc/test_mlc_configs.py",
    "tests/lm/config/test_models_config.py",
    "tests/package/test_imports.py",
    "tests/package/test_python_surface.py",
    "tests/page/",
    "tests/relax/test_model_kernels.py",
    "tests/runtime/test_includes.py",
    "tests/runtime/test_loading.py",
    "tests/scripts/test_bench.py",
    "tests/transfer/test_transfer.py",
    "tests/transfer/test_transfer_errors.py",
    "tests/transfer/test_transfer_messages.py",
)
# These compile C++ or set up another environment, for a minute or more.
LONG = ("tests/lm/cli/test_commands.py", "tests/runtime/", "tests/scripts/test_gpu_check.py")

# Kernels compiled together and with LLVM's optimisations; `--optimized` does so everywhere. Some of
# these are about compilation or its files.
OPTIMIZED = (
    "tests/compiler/",
    "tests/kernels/test_attention_kernels.py::test_decode[",
    "tests/kernels/test_attention_kernels.py::test_prefill[",
    "tests/kernels/test_quantized_attention.py::test_decode[",
    "tests/package/test_python_surface.py",
)


def is_quick(nodeid: str) -> bool:
    """Whether a test belongs to the quick selection, unless it is slow."""
    return nodeid.startswith(QUICK)


def may_have_quick(path: str) -> bool:
    """Whether a file or folder may have tests of the quick selection."""
    return any(path.startswith(begin) or begin.startswith(path) for begin in QUICK)


def is_optimized(nodeid: str) -> bool:
    """Whether a test compiles kernels as users do, not in the fastest way."""
    return nodeid.startswith(OPTIMIZED)


def runs_long(nodeid: str) -> bool:
    """Whether a test should start before others."""
    return nodeid.startswith(LONG)


def latin_square(size: int, *parameters: str) -> pytest.MarkDecorator:
    """Run one in `size` combinations of a test's parameters; the others are slow.

    Those run in which the indices of the values add up to a multiple of `size`. So any two of the
    parameters meet in all their combinations, where the last one has `size` values.
    """
    return pytest.mark.latin_square(size, *parameters)


def with_slow(values: Iterable, *slow) -> list:
    """Return values of a parameter, of which those in `slow` are left to the long runs."""
    return [pytest.param(v, marks=pytest.mark.slow) if v in slow else v for v in values]


def few_of(values: Iterable, count: int) -> list:
    """Return values of a parameter, of which all but the first ones are left to the long runs."""
    values = list(values)
    return values[:count] + [pytest.param(v, marks=pytest.mark.slow) for v in values[count:]]


def all_slow_but(values: Iterable, *quick) -> list:
    """Return values of a parameter, of which only those in `quick` run by default."""
    return [v if v in quick else pytest.param(v, marks=pytest.mark.slow) for v in values]


def every_nth(values: Iterable, n: int) -> list:
    """Return values of a parameter, of which all but one in `n` are left to the long runs."""
    return [pytest.param(v, marks=pytest.mark.slow if i % n else ()) for i, v in enumerate(values)]


def find_spared(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the combinations of parameters that are left to the long runs."""
    seen: dict[tuple, list] = {}  # (test, parameter) -> values in their order
    spared = set()
    for item in items:
        mark = item.get_closest_marker("latin_square")
        if mark is None:
            continue
        size, *parameters = mark.args
        total = 0
        for name in parameters:
            values = seen.setdefault((item.parent, item.originalname, name), [])
            value = item.callspec.params[name]
            if value not in values:
                values.append(value)
            total += values.index(value)
        if total % size != 0:
            spared.add(item)
    return spared


def find_refused(items: list[pytest.Item], vector_target: Callable) -> set[pytest.Item]:
    """Return the tests of float16 for CPUs that do not convert it: no machine can run them.

    `vector_target` names the instruction set of a CPU; whoever imports this file may not want TVM.
    `test_float16_needs_conversion_in_hardware` shows that their kernels are refused.
    """
    refused = set()
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        values = [params.get("dtype"), *(params.get("dtypes") or ())]
        cpu = params.get("cpu", "native")
        if "float16" in values:
            if isinstance(cpu, str):
                target = vector_target(cpu) if cpu.startswith("x86-64") else None
            else:
                target = cpu.traits  # an emulated one
            if target is not None and not target.has_f16_convert:
                refused.add(item)
    return refused
