# SPDX-License-Identifier: Apache-2.0
"""The gate for compiled CUDA kernels passes, and fails on wrong machine code. No GPU needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tir_kernels import build_kernel
from tir_kernels.spec import RopeSpec
from tvm_pagedkv.compiler.cuda.library import find_nvcc
from tvm_pagedkv.compiler.cuda.source import cuda_source

from ..support.cases.kernels.cuda_cases import make_spec
from ..support.emulators.cuda_emulator import mutated

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "gpu"
# Of a configuration the architectures, and the kernels (None: all). A whole one takes two seconds.
GATED = {
    "llama-float16": (("80",), None),
    "llama-float32": (("80",), ("prefill", "decode")),
    "llama-bfloat16": (("90a",), ("prefill",)),
    "heads-of-256-bfloat16": (("90",), ("prefill", "decode")),
    "windows-cap-alibi-float16": (("80",), ("prefill_sliding", "decode_sliding")),
    "spans-float16": (("80",), ("prefill_spans",)),
    "falcon-bfloat16-pages-float16": (("90",), ("decode", "prefill")),
    "mla-512-64-bfloat16": (("90",), ("mla_prefill",)),
    "kda-float32": (("80",), ("recurrent_append", "recurrent_scan")),
    "gated-delta-16-bit": (("80",), ("recurrent_scan",)),
    "conv-silu-bfloat16": (("90",), None),
}
MORE_GATED = {
    "longrope-float16": (("90",), ("split_rotary", "rope_append", "prefill")),
    "spans-windows-bfloat16": (("90", "90a"), ("prefill_spans_sliding",)),
    "llama-float32": (("80",), ("prefill_shared",)),
    "windows-cap-alibi-float16": (("80",), ("tree_sliding",)),
    "llama-bfloat16": (("86", "89", "90a", "100", "120"), ("prefill", "prefill_shared")),
    "llama-float16": (("90", "90a"), None),
    "heads-of-64-float16": (("90a",), None),
    "heads-of-256-bfloat16": (("90",), None),
    "heads-of-256-float32": (("80", "90"), ("prefill", "decode", "prefill_shared")),
    "mla-512-64-bfloat16": (("90",), None),
    "mla-512-64-windows-bfloat16": (("80", "90"), ("mla_prefill_sliding", "mla_tree_sliding")),
    "gated-delta-bfloat16": (("80", "90"), None),
    "kda-float32": (("86", "89", "90", "100", "120"), ("recurrent_scan",)),
    "lightning-256-float32": (("90",), None),
}
SPEC = make_spec((8, 2), 128)
LATENT_SPEC = make_spec((16, 1), (576, 512), kind="mla", rope=RopeSpec(rotary_dim=0))


def _has_nvcc() -> bool:
    try:
        return bool(find_nvcc())
    except RuntimeError:
        return False


pytestmark = pytest.mark.skipif(not _has_nvcc(), reason="needs nvcc")


@pytest.fixture(scope="module", autouse=True)
def scripts():
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(str(SCRIPTS))
        yield


@pytest.fixture(scope="module")
def source():
    return cuda_source({name: build_kernel(name, SPEC) for name in ("prefill", "merge")})


@pytest.fixture(scope="module")
def codes(source):
    """The sm_80 machine code of `prefill`, `prefill_1` (the merge of its splits) and `merge`."""
    return by_name(source, "80")


def by_name(source: str, arch: str, options=()) -> dict:
    from cuda_machine_code import machine_code

    codes = machine_code(source, arch, options)
    return {code.launch.kernel.replace("_kernel", ""): code for code in codes}


@pytest.mark.parametrize(
    "name, gated",
    [(name, GATED) for name in GATED]
    + [pytest.param(name, MORE_GATED, marks=pytest.mark.slow) for name in MORE_GATED],
    ids=[*GATED, *(f"{name}-more" for name in MORE_GATED)],
)
def test_kernels_pass(name, gated):
    """No spills, within the limits of the chip, with the instructions that make them fast."""
    import cuda_gate

    archs, functions = gated[name]
    for arch in archs:
        codes = cuda_gate.codes_of(name, arch, functions=functions)
        assert codes and cuda_gate.failures_of(name, codes) == []


def test_every_kernel_is_gated(monkeypatch):
    import cuda_gate

    assert cuda_gate.ungated() == []
    for name in ("mla-512-64-bfloat16", "mla-512-64-bfloat16-pages-int8"):
        monkeypatch.delitem(cuda_gate.CONFIGURATIONS, name)
    assert {"mla_prefill", "mla_tree"} <= set(cuda_gate.ungated())


def test_too_few_registers_fail(source):
    from cuda_gate_rules import failures

    codes = by_name(source, "80", ["-maxrregcount=32", "-override-directive-values"])
    assert failures("merge", SPEC, [codes["merge"]]) == []
    found = failures("prefill", SPEC, [codes["prefill"], codes["prefill_1"]])
    assert "prefill_kernel (sm_80) spills" in "".join(found)


@pytest.mark.parametrize(
    "name, launch, fields, message",
    [
        ("prefill", {"dynamic_bytes": 164 << 10}, {}, "167936 bytes of shared memory of 166912"),
        ("prefill", {"threads": 64}, {}, "compiled for 128 threads and launched with 64"),
        ("prefill", {"threads": 512, "bound": 512}, {}, "does not fit into a multiprocessor"),
        ("prefill", {}, {"mma": 16}, "16 mma, needs at least 17"),
        ("prefill", {}, {"ldsm": 10}, "10 ldsm, needs at least 20"),
        ("prefill", {}, {"ldgsts": 0}, "0 ldgsts"),
        ("merge", {}, {"ldg.128": 0}, "0 ldg.128"),
        ("prefill", {}, {"stg.128": 0}, "0 stg.128"),
        ("prefill", {}, {"local": 1}, "1 accesses to local memory"),
        ("prefill", {}, {"wait": 1}, "does not begin early"),
        ("merge", {}, {"constant": 2}, "2 constant loads that its PTX has not"),
    ],
)
def test_each_rule_can_fail(codes, name, launch, fields, message):
    from cuda_gate_rules import failures

    code = codes[name]
    assert failures(name, SPEC, [code]) == []
    changed = replace(code, launch=replace(code.launch, **launch), counts={**code.counts, **fields})
    assert message in failures(name, SPEC, [changed])[0]


def test_merges_load_many_states_at_once(codes):
    from cuda_gate_rules import failures

    code, merge = codes["prefill"], codes["prefill_1"]
    assert failures("prefill", SPEC, [code, merge]) == []
    slow = replace(merge, counts={**merge.counts, "ldg.128": 2})
    (message,) = failures("prefill", SPEC, [code, slow])
    assert "merges states by 2 loads of 128 bits at a time" in message


@pytest.fixture(scope="module")
def latent_source():
    return cuda_source({"mla_prefill": build_kernel("mla_prefill", LATENT_SPEC)})


def test_conditions_of_launches_are_read(latent_source):
    """Each MLA tiling has an attention kernel and a merge kernel."""
    from cuda_machine_code import launches

    found = [(x.dynamic_bytes, x.device_bytes) for x in launches(latent_source)]
    most, more, least = 148160, 74112, 92416
    assert found == [(most, most), (0, most), (more, more), (0, more), (least, 0), (0, 0)]
    condition = f"if (({most} <= pagedkv_block_shared_bytes()) && "
    for new in (condition.replace("&&", "||"), condition.replace("(", "(!", 1)):
        with pytest.raises(RuntimeError, match="conditions on .* have another form"):
            launches(mutated(latent_source, condition, new))


def test_kernels_beyond_what_every_chip_has_are_conditional(codes):
    from cuda_gate_rules import failures

    code, merge = codes["prefill"], codes["prefill_1"]

    def launched(code, dynamic_bytes, device_bytes):
        fields = {"dynamic_bytes": dynamic_bytes, "device_bytes": device_bytes}
        return replace(code, launch=replace(code.launch, **fields))

    # A chip of 8.0 has 163 KB, so the first of these is launched on others only.
    large, fitting = launched(code, 200 << 10, 200 << 10), launched(code, 150 << 10, 150 << 10)
    assert failures("prefill", SPEC, [large, fitting, code]) == []
    for wrong, messages in (
        ([launched(code, 200 << 10, 100 << 10), code], ("204800 bytes of shared memory",) * 2),
        ([launched(code, 200 << 10, 0)], ("204800 bytes of shared memory of 166912", "not fit")),
        ([fitting], ("launches nothing where blocks have little shared memory",)),
        ([large, merge], ("(sm_80) has 0 mma, needs at least 17", "(sm_80) has 0 ldgsts")),
        ([launched(merge, 0, 150 << 10), code], ("where blocks may have 153600 bytes) has 0 mma",)),
    ):
        found = "\n".join(failures("prefill", SPEC, wrong))
        assert all(message in found for message in messages), found


def test_kernels_that_begin_early_wait_before_they_touch_memory(source):
    from cuda_gate_rules import failures

    codes = by_name(source, "90")
    for name in ("prefill", "merge"):
        code, launch = codes[name], replace(codes[name].launch, begins_early=False)
        assert code.launch.begins_early and failures(name, SPEC, [code]) == []
        for wrong, message in (
            (replace(code, counts={**code.counts, "wait": 0}), "does not wait"),
            (replace(code, counts={**code.counts, "next": 0}), "does not let the next one"),
            (replace(code, early_accesses=2), "2 accesses to memory before it waits"),
            (replace(code, launch=launch), "does not begin early"),
        ):
            assert message in failures(name, SPEC, [wrong])[0]


def test_accesses_before_the_wait_are_counted(source):
    """The wait comes last."""
    from cuda_machine_code import machine_code

    wait = "  pagedkv_wait_for_before();\n"
    begin = source.index(wait, source.rindex(" merge_kernel("))
    end = source.index("\n}\n", begin) + 1
    late = source[:begin] + source[begin + len(wait) : end] + wait + source[end:]
    (code,) = (c for c in machine_code(late, "90") if c.launch.kernel == "merge_kernel")
    assert code.early_accesses > 0


@pytest.mark.parametrize(
    "kernel, spec, declared, name",
    [
        ("merge", SPEC, "float* ", "lse_other"),
        # V in slices of other blocks, before which the logs are copied.
        pytest.param(
            "prefill_shared", make_spec((3, 1), 264), "float* ", "lse", marks=pytest.mark.slow
        ),
        # Rows of 5 elements are loaded one at a time.
        ("split_rotary", make_spec((2, 1), 5, rope=RopeSpec(rotary_dim=2)), "half* ", "qkv"),
    ],
)
def test_constant_loads_of_what_kernels_write_are_refused(kernel, spec, declared, name):
    """The compiler turns loads through a restricted pointer into constant loads."""
    from cuda_gate_rules import failures
    from cuda_machine_code import machine_code

    source = cuda_source({kernel: build_kernel(kernel, spec)})
    pointer = f"{name}_ptr"
    restricted = mutated(source, f"{declared}{pointer}", f"{declared}__restrict__ {pointer}")
    found = []
    for text in (source, restricted):
        codes = machine_code(text, "90")
        found.append([line for line in failures(kernel, spec, codes) if "constant loads" in line])
    assert found[0] == [] and len(found[1]) > 0  # a line for each tiling
    reason = f"reads what kernels write by constant loads: {name}"
    assert all(reason in line for line in found[1])


def test_arguments_of_constant_loads_are_told(codes):
    """Those that the host copies before a step may be loaded so."""
    assert codes["merge"].constant_arguments == ()
    assert set(codes["prefill"].constant_arguments) >= {"query_indptr", "page_ids"}


def test_constant_loads_of_other_arguments_are_refused(codes):
    from cuda_gate_rules import failures

    wrong = replace(codes["prefill"], constant_arguments=("page_ids", "pages", "lse"))
    (line,) = (x for x in failures("prefill", SPEC, [wrong, codes["prefill_1"]]))
    assert "reads what kernels write by constant loads: lse, pages" in line


def test_kernels_that_move_rows_leave_room_for_many_threads(codes):
    from cuda_gate_rules import failures

    (line,) = failures("merge", SPEC, [replace(codes["merge"], registers=65)])
    assert "65 registers, more than 64" in line


def test_instructions_of_ptx_are_counted_without_a_disassembler(source, codes, monkeypatch):
    import cuda_machine_code

    monkeypatch.setattr(cuda_machine_code, "find_nvdisasm", lambda: None)
    of_ptx = by_name(source, "80")
    assert not any(code.is_sass for code in of_ptx.values())
    assert {n: c.counts for n, c in of_ptx.items()} == {n: c.counts for n, c in codes.items()}


def test_launches_are_read(codes):
    prefill = codes["prefill"].launch
    assert (prefill.threads, prefill.grid) == (128, (None, SPEC.num_kv_heads, None))


def test_floors_are_those_of_the_data_sheets():
    """64 x 4096 rows of K and V, 4 KiB each, at 4.8 TB/s; 2 x 32 x 128 x 8192^2 flops at 312 T.

    Of the shared ones 8192 rows at 4.8 TB/s, and 64 x 8192 x 32 x 4 x 128 flops at 989 T.
    """
    from cuda_floors import floors

    spec = make_spec((32, 8), 128)
    assert floors("decode", spec, "90") == "decode 16 x 4k: 56, decode 64 x 4k: 224"
    assert floors("prefill_shared", spec, "90") == "16 rows on 8k: 7.07, 64 rows on 8k: 8.69"
    assert floors("prefill", spec, "80") == "prefill 8k: 1.76e+03"
    assert floors("merge", spec, "90") == floors("decode", spec, "120") == ""


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
