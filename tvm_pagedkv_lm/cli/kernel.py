# SPDX-License-Identifier: Apache-2.0
"""``tvm-pagedkv kernel``: the TVMScript, source or assembly of a kernel."""

from __future__ import annotations

import argparse
from pathlib import Path

# What is printed without --config: the layers of Llama 3 8B.
DEFAULT_CONFIG = {
    "num_layers": 1,
    "num_qo_heads": 32,
    "num_kv_heads": 8,
    "qk_head_dim": 128,
    "dtype": "float16",
}


def add_parser(commands) -> None:
    """Add the command and its options."""
    add = commands.add_parser(
        "kernel",
        help="print a kernel",
        description="Print a kernel as TVMScript, source or assembly; without a name, the names of "
        "the kernels that a layer needs.",
    )
    add.set_defaults(run=run)
    add.add_argument("name", nargs="?", metavar="NAME", help="such as decode")
    add.add_argument(
        "--config",
        metavar="FILE",
        help="JSON with the fields of KVCacheConfig (default: a layer of Llama 3 8B)",
    )
    add.add_argument("--layer", type=int, default=0, metavar="N", help="of the config (default 0)")
    add.add_argument(
        "--target",
        default="native",
        help="native (default), a CPU such as x86-64-v3, or cuda",
    )
    add.add_argument(
        "--as",
        dest="form",
        choices=["tvmscript", "source", "assembly"],
        default="tvmscript",
        help="tvmscript (default); source: LLVM IR, or CUDA C++; assembly: the CPU's, or PTX, "
        "which needs nvcc",
    )
    add.add_argument(
        "--arch", default="90", metavar="NUMBER", help="compute capability of PTX (default 90)"
    )


def run(options: argparse.Namespace) -> None:
    """Print a kernel, or the names of all."""
    import tir_kernels
    from tvm_pagedkv.compiler import is_cuda, kernel_spec, resolve_target
    from tvm_pagedkv.compiler.cuda import cuda_spec

    config = _config(options.config).resolved()
    if not 0 <= options.layer < len(config.layers):
        last = len(config.layers) - 1
        raise ValueError(f"--layer must be from 0 to {last}, got {options.layer}")
    on_gpu = is_cuda(options.target)
    target = resolve_target(None if on_gpu else options.target)
    spec = kernel_spec(config, config.layers[options.layer], target)
    spec = cuda_spec(spec) if on_gpu else spec
    names = tir_kernels.kernel_names(spec, for_stock=True)
    if options.name is None:
        print("\n".join(names))
        return
    if options.name not in names:
        raise ValueError(f"no kernel {options.name!r}; this layer has {', '.join(names)}")
    function = tir_kernels.build_kernel(options.name, spec)
    if options.form == "tvmscript":
        print(function.script())
    elif on_gpu:
        print(_cuda_text(options.name, function, options))
    else:
        from tvm_pagedkv.compiler import compile_kernel

        module = compile_kernel(function, options.name, target)
        print(module.inspect_source("ll" if options.form == "source" else "asm"))


def _cuda_text(name: str, function, options: argparse.Namespace) -> str:
    from tvm_pagedkv.compiler.cuda import compile_ptx, cuda_source

    source = cuda_source({name: function})
    return source if options.form == "source" else compile_ptx(source, options.arch)


def _config(path: str | None):
    import json

    from tvm_pagedkv.bundle import read_config

    if path is None:
        return read_config(DEFAULT_CONFIG)
    try:
        return read_config(json.loads(Path(path).read_bytes()))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
