# SPDX-License-Identifier: Apache-2.0
"""`load_bundle`: caches from kernels that were compiled ahead of time, without a compiler."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi

from ..cache import KVCache, open_prefix_cache
from ..config import (
    ConvConfig,
    KVCacheConfig,
    LayerSpec,
    PrefixCacheConfig,
    RecurrentConfig,
    ResolvedConfig,
    RopeConfig,
)

MANIFEST = "manifest.json"
CAPACITIES = ("max_num_sequences", "max_total_tokens", "prefill_chunk_size")


@dataclass(frozen=True)
class Bundle:
    """A bundle with the loaded kernels of one of its targets; see `load_bundle`.

    Attributes
    ----------
    path : Path
        The folder.
    target : str
        Name of the chosen target.
    device : tvm.runtime.Device
        Default device of caches.
    config : KVCacheConfig
        The configuration of the kernels, with default capacities.
    manifest : mapping
        Content of manifest.json.
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
        """The kernels for `device`: one mapping (name -> function) per set of layers."""
        return tuple(dict(kernels.items()) for kernels in self._loaded["kernels"])

    def cache_map(self, **capacities: int) -> dict[str, Any]:
        """Return the configuration as the global function ``pagedkv.create`` takes it.

        Parameters
        ----------
        **capacities : int
            As for `create`.

        Raises
        ------
        ValueError
            If a field is not a capacity.
        """
        return self._described(self._loaded, capacities)

    def create(
        self,
        device: tvm.runtime.Device | None = None,
        *,
        prefix_cache: PrefixCacheConfig | None = None,
        **capacities: int,
    ) -> KVCache:
        """Make a cache.

        Parameters
        ----------
        device : tvm.runtime.Device, optional
            Device of the pages; None: `Bundle.device`. For another device the kernels of a fitting
            target are loaded, unless `load_bundle` was given a target.
        prefix_cache : PrefixCacheConfig, optional
            Tiers below the pages; None: those of `config`, if it has any.
        **capacities : int
            `max_num_sequences`, `max_total_tokens` and `prefill_chunk_size` that differ from those
            of `config`.

        Returns
        -------
        KVCache
            An empty cache.

        Raises
        ------
        ValueError
            If another field is given, which would need other kernels, or if the bundle or the named
            target has no kernels for the device.
        RuntimeError
            If the GPU or its driver is missing.
        MemoryError
            If the device, or the host for its tiers, has too little memory.
        OSError
            If the folder of the tiers cannot be opened.
        """
        loaded = self._loaded
        if device is not None and _place(device) != _place(self.device):
            loaded = _load(self.path, self._named, device)
        make = tvm_ffi.get_global_func("pagedkv.create")
        cache = make(self._described(loaded, capacities), loaded["kernels"], loaded["device"])
        tiers = self.config.prefix_cache if prefix_cache is None else prefix_cache
        if tiers is not None:
            open_prefix_cache(cache, tiers)
        return cache

    def _described(self, loaded: Mapping[str, Any], capacities: Mapping[str, int]) -> dict:
        other = sorted(set(capacities) - set(CAPACITIES))
        if other:
            raise ValueError(
                f"only capacities can change ({', '.join(CAPACITIES)}); {', '.join(other)} is "
                "compiled in: write a bundle for that"
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
    """Load a bundle, which `write_bundle` or ``tvm-pagedkv bundle`` wrote.

    The libraries of a bundle run in this process, so load only bundles whose author you trust.
    Their checksums detect damage, not malice.

    Parameters
    ----------
    path : str or Path
        The folder.
    target : str, optional
        Name of a target of the bundle; None: the most specific one that the machine supports.
    config : KVCacheConfig, optional
        A configuration that the bundle must match, except for capacities and `prefix_cache`.
    device : tvm.runtime.Device, optional
        Device of the kernels. None: ``tvm.cuda(0)`` if the named target, or the only one, is for
        GPUs; else the CPU.

    Returns
    -------
    Bundle

    Raises
    ------
    ValueError
        If the bundle is damaged, has another version, does not support this machine, or does not
        match `config`; the message says what is needed.
    RuntimeError
        If the GPU or its driver is missing, or if the bundle has replaced another one that this
        process has loaded from the same path.
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
    """Return the name of the target that `load_bundle` chooses on a given CPU.

    Parameters
    ----------
    manifest : mapping
        Manifest of a bundle.
    features : iterable of str
        Features of the CPU, as Linux names them in /proc/cpuinfo.
    architecture : {"x86_64", "aarch64"}
    name : str, optional
        Name of a target to require.

    Raises
    ------
    ValueError
        If the CPU supports no target, or not the named one.
    """
    machine = {"device": "cpu", "architecture": architecture, "features": sorted(features)}
    choose = tvm_ffi.get_global_func("pagedkv.choose_bundle_target")
    return manifest["targets"][choose(manifest["targets"], machine, name)]["name"]


# --- the configuration in a manifest ------------------------------------------------------------


def describe_config(config: KVCacheConfig) -> dict[str, Any]:
    """Return a configuration as JSON values, for `read_config`.

    Raises
    ------
    ValueError
        If its `prefix_cache` has a store that is an object of this process.
    """
    tiers = config.prefix_cache
    if tiers is not None and tiers.store is not None:
        raise ValueError(
            "prefix_cache.store is an object, which JSON cannot describe: leave prefix_cache out "
            "and give it to Bundle.create"
        )
    return json.loads(json.dumps(asdict(config), default=os.fspath))


def read_config(described: Mapping[str, Any]) -> KVCacheConfig:
    """Return the configuration that JSON values describe.

    Parameters
    ----------
    described : mapping
        The fields of `KVCacheConfig`; those with a default may be missing.

    Raises
    ------
    ValueError, TypeError
        If a field is unknown, missing or invalid; the message names it.
    """
    given = _fields(KVCacheConfig, described, "config")
    if given.get("rope") is not None:
        given["rope"] = _rope(given["rope"])
    if given.get("prefix_cache") is not None:
        tiers = _fields(PrefixCacheConfig, given["prefix_cache"], "prefix_cache")
        given["prefix_cache"] = PrefixCacheConfig(**tiers)
    if given.get("layers") is not None:
        layers = [_fields(LayerSpec, layer, "layer") for layer in given["layers"]]
        for layer in layers:
            if layer.get("rope") is not None:
                layer["rope"] = _rope(layer["rope"])
            for name, kind in (("recurrent", RecurrentConfig), ("conv", ConvConfig)):
                if layer.get(name) is not None:
                    layer[name] = kind(**_fields(kind, layer[name], name))
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
    for name, has, wants in _differences(own.resolved(), wanted.resolved()):
        if name not in CAPACITIES:
            raise ValueError(
                f"the bundle is for caches with {name}={has!r}, not {wants!r}; write one for that"
            )


def _differences(own: ResolvedConfig, other: ResolvedConfig) -> Iterator[tuple[str, Any, Any]]:
    """Iterate over the fields that differ: their name and both values."""
    yield from _unequal_fields(own, other, "")
    if len(own.layers) != len(other.layers):
        yield "num_layers", len(own.layers), len(other.layers)
    for i, (layer, other_layer) in enumerate(zip(own.layers, other.layers, strict=False)):
        yield from _unequal_fields(layer, other_layer, f"layers[{i}].")


def _unequal_fields(own: Any, other: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for name in (f.name for f in fields(own) if f.name != "layers"):
        if getattr(own, name) != getattr(other, name):
            yield prefix + name, getattr(own, name), getattr(other, name)
