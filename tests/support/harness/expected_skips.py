# SPDX-License-Identifier: Apache-2.0
"""The tests that continuous integration may skip; any other skip fails its run.

A test that is skipped everywhere tests nothing, and nobody reads the list of skips of a green run.
With the environment variable CI set to "true", as `.ci/run` does, a skip must be listed here.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

import pytest

from .older_release import PREFIX

NO_AVX512 = "only CPUs with AVX-512 run code for x86-64-v4"
NO_AVX512_BF16 = "what surrounds the model of AMX runs on CPUs with AVX-512 and bfloat16"
NO_EMULATOR = "qemu-user and a compiler for AArch64 are packages of the system"
NO_RDMA_LIBRARY = "Mooncake needs the system's libibverbs1, which pip cannot install"
NO_BYTE_DOTS = "only CPUs with AVX512-VNNI multiply codes of weights as bytes"
_TILES = "tests/harness/test_tile_model.py"
_AMX = "tests/kernels/test_amx_kernels.py"
_AMX_LINEAR = "tests/lm/kernels/test_amx_linear.py"
_CODES = "tests/lm/kernels/test_code_kernels.py"
_PAGES = "tests/kernels/test_quantized_page_kernels.py"
# Patterns of tests, and why they may be skipped.
EXPECTED = {
    f"{_CODES}::test_activations*bytes*": NO_BYTE_DOTS,
    f"{_CODES}::test_largest_codes_and_activations_do_not_overflow*bytes*": NO_BYTE_DOTS,
    f"{_CODES}::test_linear*no bytes]": NO_AVX512,
    "tests/kernels/test_attention_kernels.py::test_other_instruction_sets*x86-64-v4]": NO_AVX512,
    "tests/kernels/test_mla_kernels.py::test_other_instruction_sets*x86-64-v4]": NO_AVX512,
    "tests/kernels/test_sliding_kernels.py::test_other_instruction_sets*x86-64-v4]": NO_AVX512,
    "tests/kernels/test_window_kernels.py::test_other_instruction_sets*x86-64-v4]": NO_AVX512,
    "tests/kernels/test_quantized_attention.py::test_other_cpus*x86-64-v4-*": NO_AVX512,
    f"{_PAGES}::test_append_for_other_cpus*x86-64-v4-*": NO_AVX512,
    "tests/kernels/test_recurrent_scan.py::test_other_cpus*x86-64-v4]": NO_AVX512,
    "tests/kernels/test_recurrent_moves.py::test_other_cpus*x86-64-v4]": NO_AVX512,
    "tests/kernels/test_causal_conv.py::test_other_cpus*x86-64-v4]": NO_AVX512,
    f"{_PAGES}::test_every_float8_code_is_chosen_and_read_exactly*x86-64-v4]": NO_AVX512,
    "tests/cache/errors/test_non_finite.py::test_every_nan_stays_nan*x86-64-v4]": NO_AVX512,
    "tests/lm/kernels/test_linear_kernels.py::test_linear*no pairs]": NO_AVX512,
    f"{_TILES}::test_products*": NO_AVX512_BF16,
    f"{_TILES}::test_denormal_numbers_are_zeros*": NO_AVX512_BF16,
    f"{_TILES}::test_not_a_number_stays_in_its_row_and_column*": NO_AVX512_BF16,
    f"{_TILES}::test_misuse_is_noticed*": NO_AVX512_BF16,
    f"{_TILES}::test_tiles_are_there_between_configuration_and_release*": NO_AVX512_BF16,
    f"{_AMX}::test_prefill*": NO_AVX512_BF16,
    f"{_AMX}::test_prefill_ragged*": NO_AVX512_BF16,
    f"{_AMX}::test_rows_that_see_nothing*": NO_AVX512_BF16,
    f"{_AMX}::test_append_prefill*": NO_AVX512_BF16,
    f"{_AMX}::test_windows_and_rotation*": NO_AVX512_BF16,
    f"{_AMX}::test_trees*": NO_AVX512_BF16,
    f"{_AMX}::test_hidden_positions_that_are_not_finite*": NO_AVX512_BF16,
    f"{_AMX}::test_every_thread_has_tiles_of_its_own*": NO_AVX512_BF16,
    f"{_AMX}::test_latent_rows*": NO_AVX512_BF16,
    f"{_AMX}::test_latent_rows_that_are_not_finite*": NO_AVX512_BF16,
    f"{_AMX}::test_shared_pages*": NO_AVX512_BF16,
    f"{_AMX_LINEAR}::test_linear*": NO_AVX512_BF16,
    f"{_AMX_LINEAR}::test_every_task_configures_its_tiles_once*": NO_AVX512_BF16,
    f"{_AMX_LINEAR}::test_rows_that_are_not_finite_stay_alone*": NO_AVX512_BF16,
    f"{_AMX_LINEAR}::test_odd_numbers_of_input_features_have_no_tiles*": NO_AVX512_BF16,
    f"{_AMX_LINEAR}::test_other_types_have_no_tiles*": NO_AVX512_BF16,
    f"{_AMX_LINEAR}::test_embedding*": NO_AVX512_BF16,
    f"{_AMX_LINEAR}::test_experts*": NO_AVX512_BF16,
    f"{_AMX_LINEAR}::test_heads*": NO_AVX512_BF16,
    f"{_AMX_LINEAR}::test_codes*": NO_AVX512_BF16,
    f"{_AMX_LINEAR}::test_codes_of_float16_activations_have_no_tiles*": NO_AVX512_BF16,
    "tests/lm/families/test_amx_model.py::test_logits*": NO_AVX512_BF16,
    "tests/harness/test_limits.py::test_peak_of_tiles*": NO_AVX512_BF16,
    "tests/kernels/test_emulated_cpus.py::test_rows_that_move*": NO_EMULATOR,
    "tests/kernels/test_emulated_cpus.py::test_attention*": NO_EMULATOR,
    "tests/kernels/test_emulated_cpus.py::test_trees_and_windows*": NO_EMULATOR,
    "tests/kernels/test_emulated_cpus.py::test_latent_rows*": NO_EMULATOR,
    "tests/kernels/test_emulated_cpus.py::test_shared_prefixes*": NO_EMULATOR,
    "tests/kernels/test_emulated_cpus.py::test_quantized_pages*": NO_EMULATOR,
    "tests/kernels/test_emulated_cpus.py::test_pairs_of_bfloat16*": NO_EMULATOR,
    "tests/bundle/test_emulated_bundle.py::test_cpp_program*": NO_EMULATOR,
    "tests/bundle/test_emulated_bundle.py::test_units_of_the_runtime*": NO_EMULATOR,
    "tests/stores/test_stores.py::test_values_come_back*mooncake*": NO_RDMA_LIBRARY,
    "tests/stores/test_stores.py::test_some_keys_are_missing*mooncake*": NO_RDMA_LIBRARY,
    "tests/stores/test_stores.py::test_another_size_is_a_miss*mooncake*": NO_RDMA_LIBRARY,
    "tests/stores/test_stores.py::test_put_again*mooncake*": NO_RDMA_LIBRARY,
    "tests/stores/test_stores.py::test_equal_keys_in_a_batch*mooncake*": NO_RDMA_LIBRARY,
    "tests/stores/test_stores.py::test_large_batches*mooncake*": NO_RDMA_LIBRARY,
    "tests/stores/test_stores.py::test_an_empty_batch*mooncake*": NO_RDMA_LIBRARY,
    "tests/stores/test_stores.py::test_registered_memory_works_the_same*mooncake*": NO_RDMA_LIBRARY,
    "tests/stores/test_stores.py::test_arguments_are_checked*mooncake*": NO_RDMA_LIBRARY,
    "tests/stores/test_stores.py::test_a_closed_store_stays_closed*mooncake*": NO_RDMA_LIBRARY,
    "tests/stores/test_servers.py::test_mooncake_servers_that_are_killed": NO_RDMA_LIBRARY,
    "tests/stores/test_servers.py::test_mooncake_uses_registered_memory_in_place": NO_RDMA_LIBRARY,
    "tests/stores/test_servers.py::test_no_mooncake_master": NO_RDMA_LIBRARY,
    "tests/lm/families/test_llama_cpp.py": "llama-cpp-python compiles for ten minutes",
}


def is_expected(nodeid: str) -> bool:
    """Whether a test, or a file that is skipped as a whole, is listed."""
    return any(fnmatchcase(nodeid, pattern) for pattern in EXPECTED)


class Skips:
    """Fails the run when a skip is not expected.

    Under pytest-xdist it belongs into the main process, which gets the reports of all workers.
    """

    def __init__(self):
        self.unexpected: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "wasxfail"):
            self._look_at(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report)

    def _look_at(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not is_expected(report.nodeid):
            where = report.longrepr
            reason = where[2] if isinstance(where, tuple) else str(where)
            if PREFIX not in reason:
                self.unexpected[report.nodeid] = reason

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.unexpected and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if not self.unexpected:
            return
        terminalreporter.section("unexpected skips", red=True)
        for nodeid, reason in sorted(self.unexpected.items()):
            terminalreporter.write_line(f"{nodeid}: {reason}")
        terminalreporter.write_line(
            "The run fails: a skipped test proves nothing. Let it run here, or list it with a "
            "reason in tests/support/harness/expected_skips.py."
        )


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI") == "true" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(), "expected skips")
