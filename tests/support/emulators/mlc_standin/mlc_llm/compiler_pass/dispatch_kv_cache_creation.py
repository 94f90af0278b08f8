# SPDX-License-Identifier: Apache-2.0
"""The pass that turns the generic call into functions that make caches."""

import json

import tvm
from tvm import relax
from tvm.relax.frontend.nn.llm import kv_cache

_CAPACITIES = "max_batch_size max_total_seq_len prefill_chunk_size page_size support_sliding_window"
_NUMBERS = (
    "num_hidden_layers num_attention_heads num_key_value_heads qk_head_dim v_head_dim "
    "mla_original_qk_head_dim mla_original_v_head_dim rope_mode rope_scale rope_theta"
)


def creation_arguments(function):
    """The keyword arguments of a cache class, from the one binding of the generic function."""
    call = function.body.blocks[0].bindings[0].value
    args = call.args[1:]
    assert call.args[0].global_symbol == "mlc.create_paged_kv_cache_generic" and len(args) == 18
    assert isinstance(args[17], relax.DataTypeImm)
    one_kind = isinstance(args[0], relax.StringImm)
    return {
        "attn_kind": args[0].value if one_kind else [each.value for each in args[0].fields],
        **dict(zip(_CAPACITIES.split(), args[1].values, strict=True)),
        "layer_partition": args[2],
        **{name: args[3 + i].value for i, name in enumerate(_NUMBERS.split())},
        "rope_scaling": json.loads(args[13].value),
        "rope_ext_factors": args[14],
        "rotary_dim": args[15].value,
        "enable_disaggregation": bool(args[16].value),
        "dtype": args[17].value,
    }


@tvm.transform.module_pass(opt_level=0, name="DispatchKVCacheCreation")
class DispatchKVCacheCreation:
    def __init__(self, target, flashinfer, metadata):
        self.target, self.flashinfer, self.metadata = target, flashinfer, metadata

    def transform_module(self, mod, _context):
        functions = {name.name_hint: (name, each) for name, each in mod.functions_items()}
        generic = functions.pop("create_paged_kv_cache")[1]
        arguments = creation_arguments(generic)
        self.metadata["flashinfer"] = self.flashinfer
        builder = relax.BlockBuilder(tvm.IRModule(dict(functions.values()), attrs=mod.attrs))
        shapes = [
            relax.Var(f"{name}_", relax.ShapeType([arguments[name]]))
            for name in _CAPACITIES.split()
        ]
        with builder.function("create_tir_paged_kv_cache", shapes):
            cache = kv_cache.TIRPagedKVCache(target=self.target, **arguments)
            builder.emit_func_output(cache._expr)
        mod = builder.finalize()
        before = (mod.attrs or {}).get("external_mods", [])
        return mod.with_attr("external_mods", [*before, *cache.extern_mods])
