# SPDX-License-Identifier: Apache-2.0
"""The pipeline: the creation pass first, and 32-bit indices before code is generated."""

import tvm
from tvm.relax import register_pipeline
from tvm.s_tir import dlight as dl

from .dispatch_kv_cache_creation import DispatchKVCacheCreation


@register_pipeline("mlc_llm_standin")
def _pipeline(target, flashinfer, metadata):
    passes = tvm.relax.transform

    @tvm.transform.module_pass(opt_level=0)
    def run(mod, _context):
        return tvm.transform.Sequential(
            [
                DispatchKVCacheCreation(target, flashinfer, metadata),
                passes.LegalizeOps(),
                passes.AnnotateTIROpPattern(),
                passes.FoldConstant(),
                passes.FuseOps(),
                passes.FuseTIR(),
                passes.DeadCodeElimination(),
                dl.ApplyDefaultSchedule(dl.cpu.GEMV()),
                tvm.tirx.transform.ForceNarrowIndexToInt32(),
                passes.RewriteDataflowReshape(),
                passes.ToNonDataflow(),
                passes.RemovePurityChecking(),
                passes.CallTIRRewrite(),
                passes.StaticPlanBlockMemory(),
                passes.LowerAllocTensor(),
                passes.KillAfterLastUse(),
                passes.LowerRuntimeBuiltin(),
                passes.VMShapeLower(),
                passes.AttachGlobalSymbol(),
                passes.AttachExternModules([]),
            ]
        )(mod)

    return run
