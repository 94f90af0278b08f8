# SPDX-License-Identifier: Apache-2.0
"""`load_bundle`: caches from kernels that were compiled elsewhere; needs no compiler."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi

from ..cache import KVCache
from ..config import KVCacheConfig, LayerSpec, RopeConfig

MANIFEST = "manifest.json"
CAPACITIES = ("max_num_sequences", "max_total_tokens", "prefill_chunk_size")


@dataclass(frozen=True)
class Bundle:
    """Kernels of one target of a bundle, loaded.

    Parameters
    ----------
    path : Path
        The folder.
    target : str
        The name of the target that was chosen.
    device : tvm.runtime.Device
        Where its kernels run, unless `create` is given another one.
    config : KVCacheConfig
        What the kernels were compiled for, and the default capacities.
    manifest : mapping
        The content of manifest.json.
    """

    path: Path
    target: str
    device: tvm.runtime.Device
    config: KVCacheConfig
    manifest: Mapping[str, Any]
    _loaded: Mapping[str, Any] = field(repr=False)
    _named: str | None = field(repr=False)

    @property
    def kernel_sets(self) -> tuple[Mapping[str, Any], ...]:
        """The kernels for `device`: name -> function, a mapping for all layers that are alike."""
        return tuple(dict(kernels.items()) for kernels in self._loaded["kernels"])

    def cache_map(self, **capacities: int) -> dict[str, Any]:
        """The first argument of the global function ``pagedkv.create`` for `device`.

        Raises
        ------
        ValueError
            For what belongs to the kernels.
        """
        return self._described(self._loaded, capacities)

    def create(self, device: tvm.runtime.Device | None = None, **capacities: int) -> KVCache:
        """Make a cache.

        Parameters
        ----------
        device : optional
            Where the pages lie; None: `device`. Unless a target was named, the bundle's kernels for
            it are loaded.
        **capacities
            `max_num_sequences`, `max_total_tokens` and `prefill_chunk_size`, where they are to be
            other than those of `config`.

        Raises
        ------
        ValueError
            For any other field: it would need other kernels. For a device that the bundle, or the
            target that was named, has no kernels for.
        RuntimeError
            For a GPU that is not there, or without a driver.
        """
        loaded = self._loaded
        if device is not None and _place(device) != _place(self.device):
            loaded = _load(self.path, self._named, device)
        make = tvm_ffi.get_global_func("pagedkv.create")
        return make(self._described(loaded, capacities), loaded["kernels"], loaded["device"])

    def _described(self, loaded: Mapping[str, Any], capacities: Mapping[str, int]) -> dict:
        other = sorted(set(capacities) - set(CAPACITIES))
        if other:
            raise ValueError(
                f"a bundle's caches can have capacities of their own ({', '.join(CAPACITIES)}), "
                f"but {', '.join(other)} belongs to its kernels: write a bundle for that"
            )
        config = replace(self.config, **dict[str, Any](capacities))
        own = {name: getattr(config, name) for name in CAPACITIES}
        return dict(loaded["config"].items()) | own


def load_bundle(
    path: str | Path,
    target: str | None = None,
    config: KVCacheConfig | None = None,
    device: tvm.runtime.Device | None = None,
) -> Bundle:
    """Load what ``tvm-pagedkv bundle`` has written.

    Its libraries run in this process: load no bundle whose writer you would not run code of. The
    checksums find damage, not malice.

    Parameters
    ----------
    path : str or Path
        The folder.
    target : str, optional
        The name of a target of the bundle; None: the one that asks for most of what the machine
        has.
    config : KVCacheConfig, optional
        What the caches are to be like, capacities aside.
    device : optional
        Where its kernels are to run; None: the CPU, or the GPU ``tvm.cuda(0)`` with a target for
        GPUs that is named or the only one.

    Raises
    ------
    ValueError
        When the bundle is damaged, of another version, for other machines, or not for `config`;
        the message tells what is needed.
    RuntimeError
        For a GPU that is not there, or without a driver.
    """
    path = Path(path)
    loaded = _load(path, target, device)
    manifest = json.loads(str(loaded["manifest"]))
    bundle = Bundle(
        path=path,
        target=str(loaded["target"]),
        device=loaded["device"],
        config=read_config(manifest["config"]),
        manifest=manifest,
        _loaded=loaded,
        _named=target,
    )
    if config is not None:
        _check_config(bundle.config, config)
    return bundle


def _load(path: Path, target: str | None, device: tvm.runtime.Device | None) -> Mapping[str, Any]:
    return tvm_ffi.get_global_func("pagedkv.load_bundle")(str(path), target, device)


def _place(device: tvm.runtime.Device) -> tuple[int, int]:
    return device.dlpack_device_type(), device.index


def choose_target(
    manifest: Mapping[str, Any],
    features: Iterable[str],
    architecture: str = "x86_64",
    name: str | None = None,
) -> str:
    """The target that `load_bundle` would choose on a CPU with these features.

    Parameters
    ----------
    manifest : mapping
        Of a bundle.
    features : iterable of str
        As Linux names them in /proc/cpuinfo.
    architecture : {"x86_64", "aarch64"}
    name : str, optional
        Of the target to take.

    Raises
    ------
    ValueError
        When the CPU can run none of them, or not the named one.
    """
    machine = {"device": "cpu", "architecture": architecture, "features": sorted(features)}
    choose = tvm_ffi.get_global_func("pagedkv.choose_bundle_target")
    return manifest["targets"][choose(manifest["targets"], machine, name)]["name"]


# --- the configuration in a manifest ------------------------------------------------------------


def describe_config(config: KVCacheConfig) -> dict[str, Any]:
    """A configuration as JSON has it."""
    return json.loads(json.dumps(asdict(config)))


def read_config(described: Mapping[str, Any]) -> KVCacheConfig:
    """A configuration from JSON: the fields of `KVCacheConfig`, those with defaults optional.

    Raises
    ------
    ValueError, TypeError
        On fields that are unknown, missing or wrong.
    """
    given = _fields(KVCacheConfig, described, "config")
    if given.get("rope") is not None:
        given["rope"] = _rope(given["rope"])
    if given.get("layers") is not None:
        layers = [_fields(LayerSpec, layer, "layer") for layer in given["layers"]]
        for layer in layers:
            if layer.get("rope") is not None:
                layer["rope"] = _rope(layer["rope"])
        given["layers"] = [LayerSpec(**layer) for layer in layers]
    return KVCacheConfig(**given)


def _rope(described: Mapping[str, Any]) -> RopeConfig:
    given = _fields(RopeConfig, described, "rope")
    if isinstance(given.get("scaling"), list):  # pairs
        given["scaling"] = dict(given["scaling"])
    return RopeConfig(**given)


def _fields(kind: type, described: Mapping[str, Any], what: str) -> dict[str, Any]:
    if not isinstance(described, Mapping):
        raise TypeError(f"{what} must be an object with fields, got {described!r}")
    known = [f.name for f in fields(kind)]
    unknown = sorted(set(described) - set(known))
    if unknown:
        raise ValueError(f"{what} has no field {unknown[0]!r}; known: {', '.join(known)}")
    return dict(described)


# --- checks -------------------------------------------------------------------------------------


def _check_config(own: KVCacheConfig, wanted: KVCacheConfig) -> None:
    if not isinstance(wanted, KVCacheConfig):
        raise TypeError(f"config must be a KVCacheConfig, got {wanted!r}")
    for name in (f.name for f in fields(KVCacheConfig)):
        has, wants = getattr(own, name), getattr(wanted, name)
        if name not in CAPACITIES and has != wants:
            raise ValueError(
                f"the bundle is for caches with {name}={has!r}, not {wants!r}; write one for that"
            )
