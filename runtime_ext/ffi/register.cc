// SPDX-License-Identifier: Apache-2.0
/*!
 * \file register.cc
 * \brief The registrations of the cache: the stock names, which serve both kinds, and our own.
 */
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <array>
#include <set>
#include <string>
#include <utility>

#include "base/checksum.h"
#include "base/cpu_features.h"
#include "base/error.h"
#include "bundle/bundle.h"
#include "device/device_memory.h"
#include "device/parallel_launch.h"
#include "ffi/cache_object.h"
#include "ffi/loading.h"
#include "ffi/method.h"
#include "ffi/override.h"
#include "ffi/register_rnn.h"
#include "ffi/sink_order.h"
#include "step/scratch.h"
#include "transfer/copy_regions.h"

namespace pagedkv {

namespace {

/*! \brief A function of the cache whose call is deferred while the cache is busy. */
template <typename Part, typename... Args>
ffi::Function FromDeferred(void (Part::*method)(Args...)) {
  return ffi::Function::FromTyped([method](PagedKVCache cache, Args... args) {
    PagedKVCacheObj* object = cache.get();
    Translate([&] { object->EnterOrDefer([=] { (object->part<Part>()->*method)(args...); }); });
  });
}

/*!
 * \brief The function with which models create a cache; tvm_pagedkv/relax/own_creation.py names it.
 *
 * A process without this library has no such function, and the error of the Relax VM quotes the
 * name. So the name says what to do.
 */
constexpr const char* kModelConstructor =
    "pagedkv.create_in_model (import tvm_pagedkv, or load libtvm_pagedkv.so)";

void CreatePositional(ffi::PackedArgs args, ffi::Any* result) {
  Translate([&] { *result = PagedKVCache(CacheConfig::FromPositional(args)); });
}

/*! \brief Returns the cache, so that a model can order later calls after this one. */
void AppendMLAKV(ffi::PackedArgs args, ffi::Any* result) {
  static const ffi::Function append = ToFunction(Method<&Attention::AppendMLAKV>());
  append.CallPacked(args, result);
  *result = args[0];
}

struct CacheName {
  const char* name;
  CacheMethod method;
};

/*! \brief Names that apache-tvm has, too. */
constexpr CacheName kStockNames[] = {
    {"vm.builtin.kv_state_clear", Method<&Sequences::Clear>()},
    {"vm.builtin.kv_state_add_sequence", Method<&Sequences::Add>()},
    {"vm.builtin.kv_state_remove_sequence", Method<&Sequences::Remove>()},
    {"vm.builtin.kv_state_fork_sequence", Method<&Sequences::Fork>()},
    {"vm.builtin.kv_state_popn", Method<&Sequences::PopN>()},
    {"vm.builtin.kv_state_begin_forward",
     Method<&PagedKVCacheObj::BeginForward>(/*num_optional=*/1)},
    {"vm.builtin.kv_state_end_forward", Method<&PagedKVCacheObj::EndForward>()},
    {"vm.builtin.attention_kv_cache_enable_sliding_window_for_seq",
     Method<&Sequences::EnableSlidingWindow>()},
    {"vm.builtin.attention_kv_cache_commit_accepted_token_tree_nodes",
     Method<&TreeCommit::Commit>()},
    {"vm.builtin.attention_kv_cache_empty", Method<&Sequences::IsEmpty>()},
    {"vm.builtin.attention_kv_cache_get_num_available_pages",
     Method<&Sequences::NumAvailablePages>()},
    {"vm.builtin.attention_kv_cache_get_total_sequence_length", Method<&Sequences::TotalLength>()},
    {"vm.builtin.attention_kv_cache_get_sequence_length", Method<&Sequences::Length>()},
    {"vm.builtin.attention_kv_cache_get_query_positions", Method<&Step::QueryPositions>()},
    {"vm.builtin.attention_kv_cache_merge_attn_output_inplace", Method<&Attention::Merge>()},
    {"vm.builtin.attention_kv_cache_debug_get_kv", Method<&DebugKV::Get>()},
    {"vm.builtin.attention_kv_cache_debug_get_kv_mla", Method<&DebugKV::GetMLA>()},
    {"vm.builtin.attention_kv_cache_get_checkpoint_metadata",
     Method<&CheckpointWriter::Metadata>()},
    {"vm.builtin.attention_kv_cache_get_layout_hash", Method<&CheckpointWriter::LayoutHash>()},
    {"vm.builtin.attention_kv_cache_export_page_group",
     Method<&CheckpointWriter::ExportPageGroup>()},
    {"vm.builtin.attention_kv_cache_prepare_import", Method<&CheckpointReader::Prepare>()},
    {"vm.builtin.attention_kv_cache_import_page_group",
     Method<&CheckpointReader::ImportPageGroup>()},
    {"vm.builtin.attention_kv_cache_finish_import", Method<&CheckpointReader::Finish>()},
    {"vm.builtin.kv_cache_disagg_prepare_recv", Method<&KVReceiver::Prepare>()},
    {"vm.builtin.kv_cache_disagg_mark_send", Method<&KVSender::MarkSend>()},
};

/*! \brief Our own names, without "pagedkv.". */
constexpr CacheName kOwnNames[] = {
    {"begin_forward_with_spans", Method<&PagedKVCacheObj::BeginForwardWithSpans>()},
    {"abort_forward", Method<&Step::Abort>()},
    {"missing_layers", Method<&Step::MissingLayers>()},
    {"is_in_forward", Method<&Step::IsInForward>()},
    {"total_length", Method<&Sequences::TotalLength>()},
    {"check_pop", Method<&Sequences::CheckPop>()},
    {"prefix_match", Method<&PrefixCalls::Match>()},
    {"prefix_add", Method<&PrefixCalls::Add>()},
    {"prefix_add_within", Method<&PrefixCalls::AddWithin>()},
    {"prefix_prefetch", Method<&PrefixCalls::Prefetch>()},
    {"prefix_locate", Method<&PrefixCalls::Locate>()},
    {"prefix_open", Method<&LowerTiers::Open>()},
    {"prefix_tier", Method<&LowerTiers::Get>()},
    {"prefix_flush", Method<&LowerTiers::Flush>()},
    {"prefix_clear", Method<&LowerTiers::ForgetTexts>()},
    {"prefix_retain", Method<&PrefixCalls::Retain>()},
    {"prefix_pin", Method<&PrefixCalls::Pin>()},
    {"prefix_release", Method<&PrefixCalls::Release>()},
    {"prefix_demote", Method<&PrefixCalls::Demote>()},
    {"prefix_load", Method<&PrefixCalls::Load>()},
    {"prefix_advance_clock", Method<&PrefixCalls::AdvanceClock>()},
    {"prefix_record", Method<&PrefixCalls::Record>()},
    {"prefix_record_step", Method<&PrefixCalls::RecordStep>()},
    {"prefix_length", Method<&PrefixCalls::NumRecorded>()},
    {"index_top_k", Method<&Attention::ChooseTopK>()},
    {"index_top_blocks", Method<&Attention::ChooseTopBlocks>()},
    {"stats", Method<&Inspector::Stats>()},
    {"describe", Method<&Inspector::Describe>()},
    {"check_layer", Method<&LayerStorage::CheckLayer>()},
    {"check_recurrent", Method<&LayerStorage::CheckRecurrent>()},
    {"check_conv", Method<&LayerStorage::CheckConv>()},
    {"sequence_ids", Method<&Inspector::SequenceIds>()},
    {"page_table", Method<&Inspector::PageTable>()},
    {"state_table", Method<&Inspector::StateTable>()},
    {"cached_pages", Method<&Inspector::CachedPages>()},
    {"first_position", Method<&Inspector::FirstPosition>()},
    {"sequence_window", Method<&Inspector::Window>()},
    {"check_integrity", Method<&Inspector::CheckIntegrity>()},
    {"debug_set_kv", Method<&DebugKV::Set>()},
    {"debug_set_kv_mla", Method<&DebugKV::SetMLA>()},
    {"checkpoint_metadata", Method<&CheckpointWriter::MetadataWith>()},
    {"checkpoint_pages", Method<&CheckpointWriter::PagesWith>()},
    {"export_pages", Method<&CheckpointWriter::ExportPages>()},
    {"prepare_imports", Method<&CheckpointReader::PrepareMany>()},
    {"import_pages", Method<&CheckpointReader::ImportPages>()},
    {"import_rows", Method<&CheckpointReader::ImportRows>()},
    {"receive_id", Method<&KVReceiver::IdOf>()},
    {"shorten_receive", Method<&KVReceiver::Shorten>()},
    {"finish_receive", Method<&KVReceiver::Finish>()},
    {"cancel_receive", Method<&KVReceiver::Cancel>()},
    {"set_send_handler", Method<&KVSender::SetHandler>()},
    {"first_to_send", Method<&KVSender::FirstToSend>()},
    {"send_id", Method<&KVSender::IdOf>()},
    {"cancel_send", Method<&KVSender::Cancel>()},
    {"send_block", Method<&KVSender::DescribeBlock>()},
    {"release_send_block", Method<&KVSender::ReleaseBlock>()},
    {"pages_of", Method<&LayerStorage::PagesOf>()},
    {"pool_of", Method<&LayerStorage::PoolOf>()},
    {"shared_pages", Method<&LayerStorage::SharedPages>()},
    {"poison_free_pages", Method<&Inspector::PoisonFreePages>()},
    {"shuffle_free_pages", Method<&Inspector::ShuffleFreePages>()},
    {"share_every_prefix", Method<&Step::ShareEveryPrefix>()},
};

struct TierName {
  const char* name;
  TierMethod method;
};

/*! \brief Functions of a tier, without "pagedkv.". */
constexpr TierName kTierNames[] = {
    {"tier_next_job", MethodOfTier<&HostMemoryObj::NextJob>()},
    {"tier_finish_job", MethodOfTier<&HostMemoryObj::FinishJob>()},
    {"tier_wait", MethodOfTier<&HostMemoryObj::Wait>()},
    {"tier_flush", MethodOfTier<&HostMemoryObj::Flush>()},
    {"tier_close", MethodOfTier<&HostMemoryObj::Close>()},
    {"tier_memory", MethodOfTier<&HostMemoryObj::MemoryRange>()},
};

void OverrideStockNames() {
  const auto serve = [](const char* name, ffi::Function function) {
    Override<PagedKVCacheObj>(name, "a KV cache", std::move(function));
  };
  OverrideCreate("vm.builtin.paged_attention_kv_cache_create",
                 ffi::Function::FromPacked(CreatePositional));
  serve("vm.builtin.attention_kv_cache_append_mla_kv", ffi::Function::FromPacked(AppendMLAKV));
  for (const auto& [name, method] : kStockNames) serve(name, ToFunction(method));
  serve("vm.builtin.attention_kv_cache_attention_with_fused_qkv",
        WithSinksInEitherOrder(Method<&Attention::AttendFused>(), /*num_outputs=*/1));
  serve("vm.builtin.attention_kv_cache_attention_with_shared_kv",
        WithSinksInEitherOrder(Method<&Attention::AttendShared>(), /*num_outputs=*/1));
  serve("vm.builtin.attention_kv_cache_self_attention",
        WithSinksInEitherOrder(Method<&Attention::SelfAttend>(), /*num_outputs=*/2));
  serve("vm.builtin.attention_kv_cache_cross_attention",
        WithSinksInEitherOrder(Method<&Attention::CrossAttend>(), /*num_outputs=*/2));
}

/*!
 * \brief A method whose last argument, a tensor that some layers take, may be left out, as a
 * function that takes it second to last: Relax passes the output last.
 */
template <auto kCall>
ffi::Function WithOutputLast() {
  static constexpr CacheMethod kMethod = Method<kCall>(/*num_optional=*/1);
  return ffi::Function::FromPacked(
      [call = ToFunction(kMethod)](ffi::PackedArgs args, ffi::Any* result) {
        if (args.size() != kMethod.num_args) return call.CallPacked(args, result);
        std::array<ffi::AnyView, kMethod.num_args> swapped;  // a step allocates nothing
        for (int i = 0; i < args.size(); ++i) swapped[i] = args[i];
        std::swap(swapped[kMethod.num_args - 2], swapped.back());
        call.CallPacked(ffi::PackedArgs(swapped.data(), args.size()), result);
      });
}

PagedKVCache Create(ffi::Map<ffi::String, ffi::Any> config, ffi::AnyView kernels, DLDevice device) {
  return Translate([&] { return PagedKVCache(CacheConfig::FromNamed(config, kernels, device)); });
}

PagedKVCache CreateInModel(ffi::Map<ffi::String, ffi::Any> config, ffi::AnyView kernels,
                           ffi::Tensor prototype, ffi::Map<ffi::String, ffi::Any> compiled_for) {
  return Translate([&] {
    return PagedKVCache(CacheConfig::FromModel(config, kernels, prototype, compiled_for));
  });
}

/*! \brief The checksum that stores add to their values, computed without Python's global lock. */
int64_t ChecksumOf(const ffi::Tensor& bytes, int64_t seed) {
  return Translate([&] {
    if (!bytes.defined()) Raise(kTypeError, "checksum takes a tensor, got None");
    if (!IsHost(bytes.device()) || !bytes.IsContiguous() || bytes.dtype() != kByte) {
      Raise(kValueError, "checksum takes contiguous bytes in host memory");
    }
    const char* data = static_cast<const char*>(bytes.data_ptr()) + bytes.byte_offset();
    return static_cast<int64_t>(Checksum(data, bytes.numel(), static_cast<uint64_t>(seed)));
  });
}

void DefineOwnNames() {
  tvm::ffi::reflection::GlobalDef()
      .def("pagedkv.create", Create)
      .def("pagedkv.checksum", ChecksumOf)
      .def("pagedkv.library",
           [] {
             return ffi::Map<ffi::String, ffi::String>{{"version", TVM_PAGEDKV_VERSION},
                                                       {"path", LibraryPath()}};
           })
      .def("pagedkv.use_stock_runtime", [] { use_stock_runtime = true; })
      .def("pagedkv.use_pagedkv_runtime", [] { use_stock_runtime = false; });
  auto define = [](const char* name, ffi::Function function) {
    ffi::Function::SetGlobal(std::string("pagedkv.") + name, std::move(function));
  };
  ffi::Function::SetGlobal(kModelConstructor, ffi::Function::FromTyped(CreateInModel));
  for (const auto& [name, method] : kOwnNames) define(name, ToFunction(method));
  for (const auto& [name, method] : kTierNames) define(name, ToFunction(method));
  define("recurrent", WithOutputLast<&Recurrence::Update>());
  define("conv", WithOutputLast<&Recurrence::Convolve>());
  define("attention_to_positions",
         WithSinksInEitherOrder(Method<&Attention::AttendToList>(), /*num_outputs=*/1));
  define("cross_attention_to_positions",
         WithSinksInEitherOrder(Method<&Attention::CrossAttendToList>(), /*num_outputs=*/2));
  define("attention_to_blocks",
         WithSinksInEitherOrder(Method<&Attention::AttendToBlocks>(), /*num_outputs=*/1));
  define("cross_attention_to_blocks",
         WithSinksInEitherOrder(Method<&Attention::CrossAttendToBlocks>(), /*num_outputs=*/2));
  define("attention_within_budget",
         WithSinksInEitherOrder(Method<&Attention::AttendWithinBudget>(), /*num_outputs=*/1));
  define("attention_with_sinks", WithSinksInEitherOrder(Method<&Attention::AttendFused>(),
                                                        /*num_outputs=*/1, SinkNeed::kRequired));
  define("attention_with_shared_kv_and_sinks",
         WithSinksInEitherOrder(Method<&Attention::AttendShared>(), /*num_outputs=*/1,
                                SinkNeed::kRequired));
  define("release_receive", FromDeferred(&KVReceiver::Release));
  define("drop_send_handler", FromDeferred(&KVSender::DropHandler));
  define("copy_regions",
         ffi::Function::FromTyped([](ffi::Tensor to, ffi::Tensor from, ffi::Tensor regions) {
           Translate([&] { CopyRegions(to, from, regions); });
         }));
  define("borrow_scratch", ffi::Function::FromTyped(Scratch::Borrow));
  define("return_scratch", ffi::Function::FromTyped(Scratch::Return));
  define("cpu_features", ffi::Function::FromTyped([] {
           ffi::Array<ffi::String> names;
           for (const std::string& feature : CPUFeatures()) names.push_back(feature);
           return names;
         }));
  define("require_cpu", ffi::Function::FromTyped([](ffi::String what, ffi::String architecture,
                                                    ffi::Array<ffi::String> features) {
           Translate([&] { RequireCPU(what, architecture, {features.begin(), features.end()}); });
         }));
  define("load_bundle",
         ffi::Function::FromTyped([](ffi::String path, ffi::Optional<ffi::String> target,
                                     ffi::Optional<DLDevice> device) {
           return Translate([&] { return LoadBundle(path, target, device); });
         }));
  define("choose_bundle_target",
         ffi::Function::FromTyped([](ffi::Array<ffi::Any> targets,
                                     ffi::Optional<ffi::Map<ffi::String, ffi::Any>> machine,
                                     ffi::Optional<ffi::String> name) {
           return Translate([&] { return ChooseBundleTarget(targets, machine, name); });
         }));
}

/*! \brief Makes every function that creates a cache raise the reason, instead of the stock one. */
void DefineRefusals(const std::string& reason) {
  auto refuse = [reason](ffi::PackedArgs, ffi::Any*) {
    throw ffi::Error(kRuntimeError, reason, "");
  };
  for (const char* name :
       {"pagedkv.create", "pagedkv.load_bundle", kModelConstructor,
        "vm.builtin.paged_attention_kv_cache_create", "vm.builtin.rnn_state_create"}) {
    ffi::Function::SetGlobal(name, ffi::Function::FromPacked(refuse), /*override=*/true);
  }
}

/*! \brief Why this copy of the library has not registered its functions; empty when it has. */
std::string& NotRegistered() {
  static std::string reason;
  return reason;
}

// An exception that leaves this block would end the process.
TVM_FFI_STATIC_INIT_BLOCK() {
  try {
    const std::string other = OtherCopy();
    if (!other.empty()) {
      NotRegistered() = "the process has loaded " + other + " already, and uses that; this is " +
                        TVM_PAGEDKV_VERSION + " from " + LibraryPath();
      return;
    }
    NotRegistered() = RuntimeMismatch();
    if (!NotRegistered().empty()) return DefineRefusals(NotRegistered());
    tvm::ffi::reflection::ObjectDef<PagedKVCacheObj>();
    tvm::ffi::reflection::ObjectDef<HostMemoryObj>();
    OverrideStockNames();
    DefineOwnNames();
    RegisterRNNState();
    Scratch::ServeCPUKernels();
    ServeParallelLaunches();
  } catch (const std::exception& error) {
    NotRegistered() = std::string("tvm_pagedkv cannot register its functions: ") + error.what();
  }
}

}  // namespace

ffi::String WhyNotRegistered() { return NotRegistered(); }

ffi::String Version() { return TVM_PAGEDKV_VERSION; }

}  // namespace pagedkv

// Functions of this copy of the library, whether or not it has registered any.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pagedkv_why_not_registered, pagedkv::WhyNotRegistered);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pagedkv_version, pagedkv::Version);
