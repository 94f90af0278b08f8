// SPDX-License-Identifier: Apache-2.0
/*!
 * \file register.cc
 * \brief All registrations: the stock names, which serve both kinds of cache, and our own.
 */
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <array>
#include <atomic>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "bundle/bundle.h"
#include "device/device_memory.h"
#include "ffi/arguments.h"
#include "ffi/cache_object.h"
#include "ffi/loading.h"
#include "transfer/copy_regions.h"

namespace pagedkv {

namespace {

std::atomic<bool> use_stock_runtime{false};

/*! \brief Calls f and turns an Error into the Python exception that it names. */
template <typename F>
auto Translate(F f) -> decltype(f()) {
  try {
    return f();
  } catch (const Error& error) {
    throw ffi::Error(error.kind(), error.message(), "");
  } catch (const std::bad_alloc&) {
    throw ffi::Error(kMemoryError, "the host has no memory left", "");
  }
}

/*! \brief Calls f with the cache as the only thread inside. */
template <typename F>
auto Call(const PagedKVCache& cache, F f) {
  PagedKVCacheObj& object = *cache.get();
  return Translate([&] { return object.Enter([&] { return f(object); }); });
}

/*! \brief A method of a part as a function whose first argument is the cache. */
template <typename Part, typename R, typename... Args, typename Method>
ffi::Function Bind(Method method) {
  return ffi::Function::FromTyped(
      [method](PagedKVCache cache, typename ArgumentOf<std::decay_t<Args>>::Type... args) {
        return Call(cache, [&](PagedKVCacheObj& object) {
          Part& part = *object.part<Part>();
          if constexpr (std::is_void_v<R>) {
            (part.*method)(ArgumentOf<std::decay_t<Args>>::Convert(std::move(args))...);
          } else {
            return ConvertResult(
                (part.*method)(ArgumentOf<std::decay_t<Args>>::Convert(std::move(args))...));
          }
        });
      });
}

template <typename Part, typename R, typename... Args>
ffi::Function FromMethod(R (Part::*method)(Args...)) {
  return Bind<Part, R, Args...>(method);
}

template <typename Part, typename R, typename... Args>
ffi::Function FromMethod(R (Part::*method)(Args...) const) {
  return Bind<Part, R, Args...>(method);
}

/*! \brief As FromMethod, for a method that is deferred while the cache is busy. */
template <typename Part, typename... Args>
ffi::Function FromDeferred(void (Part::*method)(Args...)) {
  return ffi::Function::FromTyped([method](PagedKVCache cache, Args... args) {
    PagedKVCacheObj* object = cache.get();
    Translate([&] { object->EnterOrDefer([=] { (object->part<Part>()->*method)(args...); }); });
  });
}

/*! \brief A method of a tier, which workers call while others are inside the cache. */
template <typename R, typename... Args>
ffi::Function FromTier(R (PrefixTierObj::*method)(Args...)) {
  return ffi::Function::FromTyped([method](PrefixTier tier, std::decay_t<Args>... args) -> R {
    if (!tier.defined()) throw ffi::Error(kTypeError, "the tier must be no None", "");
    return Translate([&] { return (tier.get()->*method)(std::move(args)...); });
  });
}

/*! \brief Overrides a stock name: `ours` serves our caches, the stock function all others. */
void Override(const std::string& name, ffi::Function ours) {
  std::optional<ffi::Function> stock = ffi::Function::GetGlobal(name);
  auto dispatch = [name, stock, ours](ffi::PackedArgs args, ffi::Any* result) {
    if (args.size() > 0 && args[0].as<PagedKVCacheObj>() != nullptr) {
      ours.CallPacked(args, result);
    } else if (args.size() == 0 || args[0] == nullptr || !stock) {
      throw ffi::Error(kTypeError, name + " needs a KV cache as its first argument", "");
    } else {
      stock->CallPacked(args, result);
    }
  };
  ffi::Function::SetGlobal(name, ffi::Function::FromPacked(dispatch), /*override=*/true);
}

template <typename Method>
void OverrideMethod(const std::string& name, Method method) {
  Override(name, FromMethod(method));
}

/*! \brief As OverrideMethod, for a method whose last argument is optional (None). */
template <typename Part, typename... Args>
void OverrideWithOption(const std::string& name, void (Part::*method)(Args...)) {
  constexpr int kNumArgs = 1 + sizeof...(Args);
  ffi::Function whole = FromMethod(method);
  Override(name, ffi::Function::FromPacked([whole](ffi::PackedArgs args, ffi::Any* result) {
             if (args.size() != kNumArgs - 1) return whole.CallPacked(args, result);
             std::array<ffi::AnyView, kNumArgs> padded;
             for (int i = 0; i < kNumArgs - 1; ++i) padded[i] = args[i];
             padded.back() = ffi::AnyView(nullptr);
             whole.CallPacked(ffi::PackedArgs(padded.data(), kNumArgs), result);
           }));
}

/*!
 * \brief What models call to create a cache; tvm_pagedkv/relax/frontend.py has the same name.
 *
 * A process without this library has no such function, and the error of the Relax VM quotes the
 * name. So the name says what to do.
 */
constexpr const char* kModelConstructor =
    "pagedkv.paged_attention_kv_cache_create (import tvm_pagedkv, or load libtvm_pagedkv.so)";

void CreatePositional(ffi::PackedArgs args, ffi::Any* result) {
  Translate([&] { *result = PagedKVCache(CacheConfig::FromPositional(args)); });
}

void OverrideCreate() {
  const char* name = "vm.builtin.paged_attention_kv_cache_create";
  std::optional<ffi::Function> stock = ffi::Function::GetGlobal(name);
  auto create = [stock](ffi::PackedArgs args, ffi::Any* result) {
    if (use_stock_runtime && stock) return stock->CallPacked(args, result);
    CreatePositional(args, result);
  };
  ffi::Function::SetGlobal(name, ffi::Function::FromPacked(create), /*override=*/true);
}

/*! \brief Returns the cache, so that a model can order later calls after this one. */
PagedKVCache AppendMLAKV(PagedKVCache cache, int64_t layer, ffi::Tensor kv) {
  Call(cache, [&](PagedKVCacheObj& object) {
    object.part<Attention>()->AppendMLAKV(layer, std::move(kv));
  });
  return cache;
}

void OverrideStockNames() {
  OverrideCreate();

  const std::string state = "vm.builtin.kv_state_";
  OverrideMethod(state + "clear", &Sequences::Clear);
  OverrideMethod(state + "add_sequence", &Sequences::Add);
  OverrideMethod(state + "remove_sequence", &Sequences::Remove);
  OverrideMethod(state + "fork_sequence", &Sequences::Fork);
  OverrideMethod(state + "popn", &Sequences::PopN);
  OverrideWithOption(state + "begin_forward", &PagedKVCacheObj::BeginForward);
  OverrideMethod(state + "end_forward", &PagedKVCacheObj::EndForward);

  const std::string cache = "vm.builtin.attention_kv_cache_";
  OverrideMethod(cache + "enable_sliding_window_for_seq", &Sequences::EnableSlidingWindow);
  OverrideMethod(cache + "commit_accepted_token_tree_nodes", &TreeCommit::Commit);
  OverrideMethod(cache + "empty", &Sequences::IsEmpty);
  OverrideMethod(cache + "get_num_available_pages", &Sequences::NumAvailablePages);
  OverrideMethod(cache + "get_total_sequence_length", &Sequences::TotalLength);
  OverrideMethod(cache + "get_sequence_length", &Sequences::Length);
  OverrideMethod(cache + "get_query_positions", &Step::QueryPositions);
  OverrideWithOption(cache + "attention_with_fused_qkv", &Attention::AttendFused);
  OverrideWithOption(cache + "attention_with_shared_kv", &Attention::AttendShared);
  OverrideMethod(cache + "self_attention", &Attention::SelfAttend);
  OverrideMethod(cache + "cross_attention", &Attention::CrossAttend);
  OverrideMethod(cache + "merge_attn_output_inplace", &Attention::Merge);
  OverrideMethod(cache + "debug_get_kv", &DebugKV::Get);
  OverrideMethod(cache + "debug_get_kv_mla", &DebugKV::GetMLA);
  Override(cache + "append_mla_kv", ffi::Function::FromTyped(AppendMLAKV));

  OverrideMethod(cache + "get_checkpoint_metadata", &CheckpointWriter::Metadata);
  OverrideMethod(cache + "get_layout_hash", &CheckpointWriter::LayoutHash);
  OverrideMethod(cache + "export_page_group", &CheckpointWriter::ExportPageGroup);
  OverrideMethod(cache + "prepare_import", &CheckpointReader::Prepare);
  OverrideMethod(cache + "import_page_group", &CheckpointReader::ImportPageGroup);
  OverrideMethod(cache + "finish_import", &CheckpointReader::Finish);
  OverrideMethod("vm.builtin.kv_cache_disagg_prepare_recv", &KVReceiver::Prepare);
  OverrideMethod("vm.builtin.kv_cache_disagg_mark_send", &KVSender::MarkSend);
}

void RequireSinkLogits(const ffi::Tensor& sink_logits) {
  if (!sink_logits.defined())
    throw ffi::Error(kTypeError, "sink_logits must be a tensor, got None", "");
}

// Relax passes the output last.
void AttentionWithSinks(PagedKVCache cache, int64_t layer, double sm_scale, ffi::Tensor qkv,
                        ffi::Tensor sink_logits, ffi::Tensor o) {
  RequireSinkLogits(sink_logits);
  Call(cache, [&](PagedKVCacheObj& object) {
    object.part<Attention>()->AttendFused(layer, sm_scale, qkv, o, sink_logits);
  });
}

void SharedAttentionWithSinks(PagedKVCache cache, int64_t source, double sm_scale, ffi::Tensor q,
                              ffi::Tensor current_k, ffi::Tensor current_v, ffi::Tensor sink_logits,
                              ffi::Tensor o) {
  RequireSinkLogits(sink_logits);
  Call(cache, [&](PagedKVCacheObj& object) {
    object.part<Attention>()->AttendShared(source, sm_scale, q, current_k, current_v, o,
                                           sink_logits);
  });
}

PagedKVCache Create(ffi::Map<ffi::String, ffi::Any> config, ffi::AnyView kernels, DLDevice device) {
  return Translate([&] { return PagedKVCache(CacheConfig::FromNamed(config, kernels, device)); });
}

/*! \brief What stores add to their values. The caller computes it without Python's global lock. */
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
      .def("pagedkv.attention_with_sinks", AttentionWithSinks)
      .def("pagedkv.attention_with_shared_kv_and_sinks", SharedAttentionWithSinks)
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
  ffi::Function::SetGlobal(kModelConstructor, ffi::Function::FromPacked(CreatePositional));
  define("abort_forward", FromMethod(&Step::Abort));
  define("missing_layers", FromMethod(&Step::MissingLayers));
  define("is_in_forward", FromMethod(&Step::IsInForward));
  define("total_length", FromMethod(&Sequences::TotalLength));
  define("prefix_match", FromMethod(&Prefixes::Match));
  define("prefix_add", FromMethod(&Prefixes::Add));
  define("prefix_add_within", FromMethod(&Prefixes::AddWithin));
  define("prefix_prefetch", FromMethod(&Prefixes::Prefetch));
  define("prefix_locate", FromMethod(&Prefixes::Locate));
  define("prefix_open", FromMethod(&PrefixTiers::Open));
  define("prefix_tier", FromMethod(&PrefixTiers::Get));
  define("prefix_flush", FromMethod(&PrefixTiers::Flush));
  define("prefix_clear", FromMethod(&PrefixTiers::ForgetTexts));
  define("tier_next_job", FromTier(&PrefixTierObj::NextJob));
  define("tier_finish_job", FromTier(&PrefixTierObj::FinishJob));
  define("tier_wait", FromTier(&PrefixTierObj::Wait));
  define("tier_flush", FromTier(&PrefixTierObj::Flush));
  define("tier_close", FromTier(&PrefixTierObj::Close));
  define("tier_memory", FromTier(&PrefixTierObj::MemoryRange));
  define("prefix_record", FromMethod(&Prefixes::Record));
  define("prefix_record_step", FromMethod(&Prefixes::RecordStep));
  define("prefix_length", FromMethod(&Prefixes::NumRecorded));
  define("stats", FromMethod(&Inspector::Stats));
  define("describe", FromMethod(&Inspector::Describe));
  define("check_layer", FromMethod(&LayerStorage::CheckLayer));
  define("sequence_ids", FromMethod(&Inspector::SequenceIds));
  define("page_table", FromMethod(&Inspector::PageTable));
  define("cached_pages", FromMethod(&Inspector::CachedPages));
  define("first_position", FromMethod(&Inspector::FirstPosition));
  define("sequence_window", FromMethod(&Inspector::Window));
  define("check_integrity", FromMethod(&Inspector::CheckIntegrity));
  define("debug_set_kv", FromMethod(&DebugKV::Set));
  define("debug_set_kv_mla", FromMethod(&DebugKV::SetMLA));
  define("export_pages", FromMethod(&CheckpointWriter::ExportPages));
  define("prepare_imports", FromMethod(&CheckpointReader::PrepareMany));
  define("import_pages", FromMethod(&CheckpointReader::ImportPages));
  define("import_rows", FromMethod(&CheckpointReader::ImportRows));
  define("receive_id", FromMethod(&KVReceiver::IdOf));
  define("finish_receive", FromMethod(&KVReceiver::Finish));
  define("cancel_receive", FromMethod(&KVReceiver::Cancel));
  define("release_receive", FromDeferred(&KVReceiver::Release));
  define("set_send_handler", FromMethod(&KVSender::SetHandler));
  define("drop_send_handler", FromDeferred(&KVSender::DropHandler));
  define("send_id", FromMethod(&KVSender::IdOf));
  define("cancel_send", FromMethod(&KVSender::Cancel));
  define("send_block", FromMethod(&KVSender::DescribeBlock));
  define("release_send_block", FromMethod(&KVSender::ReleaseBlock));
  define("pages_of", FromMethod(&LayerStorage::PagesOf));
  define("shared_pages", FromMethod(&LayerStorage::SharedPages));
  define("copy_regions",
         ffi::Function::FromTyped([](ffi::Tensor to, ffi::Tensor from, ffi::Tensor regions) {
           Translate([&] { CopyRegions(to, from, regions); });
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
  define("poison_free_pages", FromMethod(&Inspector::PoisonFreePages));
  define("shuffle_free_pages", FromMethod(&Inspector::ShuffleFreePages));
  define("share_every_prefix", FromMethod(&Step::ShareEveryPrefix));
}

/*! \brief Makes every function that creates a cache raise the reason, instead of the stock one. */
void DefineRefusals(const std::string& reason) {
  auto refuse = [reason](ffi::PackedArgs, ffi::Any*) {
    throw ffi::Error(kRuntimeError, reason, "");
  };
  for (const char* name : {"pagedkv.create", "pagedkv.load_bundle", kModelConstructor,
                           "vm.builtin.paged_attention_kv_cache_create"}) {
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
    tvm::ffi::reflection::ObjectDef<PrefixTierObj>();
    OverrideStockNames();
    DefineOwnNames();
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
