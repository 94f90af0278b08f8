# SPDX-License-Identifier: Apache-2.0
"""``tvm-pagedkv bundle`` and ``export``: folders that run without a compiler."""

from __future__ import annotations

import argparse
from pathlib import Path

from .terminal import Progress


def add_parsers(commands) -> None:
    """Add the commands and their options."""
    add = commands.add_parser(
        "bundle",
        help="write a folder with compiled kernels and the libraries that run them",
        description="Write a folder from which machines without a compiler can make caches.",
    )
    add.set_defaults(run=_bundle)
    add.add_argument("--out", required=True, metavar="DIR", help="the folder, new or empty")
    add.add_argument(
        "--target",
        action="append",
        choices=["cpu", "cuda"],
        default=[],
        help="may be repeated (default: cpu); cuda needs nvcc, but no GPU",
    )
    add.add_argument(
        "--config", metavar="FILE", required=True, help="JSON with the fields of KVCacheConfig"
    )
    add.add_argument(
        "--cpu",
        action="append",
        metavar="NAME",
        help="native (default), a CPU such as x86-64-v3, or aarch64-linux-gnu[:CPU]; may be "
        "repeated: loading chooses the most specific one that the machine supports",
    )
    add.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="NUMBER",
        help="compute capability such as 90, for --target cuda; may be repeated. Newer GPUs run "
        "PTX of the lowest",
    )
    add.add_argument(
        "--libraries",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder with the libraries of another architecture, to include",
    )
    add = commands.add_parser(
        "export",
        help="write a folder with a compiled model and the libraries that run it",
        description="Write a folder from which a C++ program runs a model without a compiler.",
    )
    add.set_defaults(run=_export)
    add.add_argument("--out", required=True, metavar="DIR", help="the folder, new or empty")
    add.add_argument(
        "--model",
        metavar="MODEL",
        help="as for generate, but for the default (default: the tiny included model)",
    )
    add.add_argument(
        "--dtype",
        help="float32, float16 or bfloat16 (default: the checkpoint's; float16 if it is quantized)",
    )
    add.add_argument(
        "--kv-dtype",
        help="type of the cache's pages: as for --dtype, or int8, float8_e4m3fn, int5 or "
        "int4, which quantize K and V; two with a comma between them are for K and for V, as in "
        "int5,int4 (default: that of --dtype)",
    )
    add.add_argument("--page-size", type=int, default=16, help="slots per page (default 16)")
    add.add_argument("--cpu", metavar="NAME", help="native (default), or a CPU such as x86-64-v3")


def _bundle(options: argparse.Namespace) -> None:
    import json

    from tvm_pagedkv.bundle import read_config, write_bundle

    try:
        config = read_config(json.loads(Path(options.config).read_bytes()))
    except OSError as error:
        raise ValueError(f"cannot read {options.config}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{options.config} is not JSON: {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{options.config}: {error}") from None
    targets = list(options.cpu or [])
    if not targets and ("cpu" in options.target or not options.target):
        targets = ["native"]
    if "cuda" in options.target:
        if not options.arch:
            raise ValueError("--target cuda needs architectures, such as --arch 80 --arch 90")
        targets.append("cuda")
    elif options.arch:
        raise ValueError("--arch needs --target cuda")
    with Progress():
        path = write_bundle(
            config,
            options.out,
            targets,
            archs=options.arch,
            libraries=options.libraries,
        )
    _print_size(path)


def _print_size(path: Path) -> None:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    print(f"{path}: {size / 2**20:.1f} MiB")


def _export(options: argparse.Namespace) -> None:
    from ..model.export import export_model

    with Progress():
        path = export_model(
            options.model,
            options.out,
            options.dtype,
            page_size=options.page_size,
            kv_dtype=options.kv_dtype,
            target=options.cpu,
        )
    _print_size(path)
