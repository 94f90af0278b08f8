// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cache_object.h
 * \brief The object that the FFI sees: the parts of a cache behind a guard.
 *
 * It has no logic. Each part has its state in its own folder; register.cc binds global functions to
 * methods of the parts. Only what concerns a step and transfers at the same time is said here.
 */
#ifndef TVM_PAGEDKV_FFI_CACHE_OBJECT_H_
#define TVM_PAGEDKV_FFI_CACHE_OBJECT_H_

#include <tvm/ffi/object.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "attention/attention.h"
#include "attention/recurrence.h"
#include "base/caller_guard.h"
#include "base/process.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/page_groups.h"
#include "config/cache_config.h"
#include "inspect/debug_kv.h"
#include "inspect/inspector.h"
#include "prefixes/lower_tiers.h"
#include "prefixes/prefix_calls.h"
#include "state/table/sequence_table.h"
#include "step/sequences.h"
#include "step/step.h"
#include "step/tree_commit.h"
#include "storage/layer_storage.h"
#include "storage/page_copier.h"
#include "transfer/kv_receiver.h"
#include "transfer/kv_sender.h"

namespace pagedkv {

class PagedKVCacheObj : public ffi::Object {
 public:
  explicit PagedKVCacheObj(CacheConfig config);

  /*!
   * \brief Makes a call as the only thread inside, after the calls that were deferred.
   * \throws Error (RuntimeError) while another thread is inside, and in a forked child; nothing
   *   has changed.
   */
  template <typename F>
  auto Enter(F call) -> decltype(call()) {
    process_.Require("cache");
    guard_.Enter();
    const Leaving leaving{&guard_};
    if (guard_.is_outermost()) {
      deferred_calls_.RunAll();
      prefix_calls_.ExpireHints();
    }
    return call();
  }
  /*!
   * \brief Makes a call that cannot fail now, or leaves it to the next caller: while another thread
   * is inside, and while this one changes pages or runs a kernel.
   */
  template <typename F>
  void EnterOrDefer(F call) {
    if (!process_.IsThis()) return;
    if (guard_.TryEnter()) {
      const Leaving leaving{&guard_};
      if (step_.phase().is_quiet()) {
        if (guard_.is_outermost()) deferred_calls_.RunAll();
        return call();
      }
    }
    deferred_calls_.Add(std::move(call));
  }

  void BeginForward(IntSpan sequence_ids, IntSpan append_lengths,
                    std::optional<IntSpan> tree_parents);
  /*! \param spans See ForwardPlan::PrepareSpans. */
  void BeginForwardWithSpans(IntSpan sequence_ids, IntSpan append_lengths, IntSpan spans);
  /*! \brief Ends the step, then tells receivers of the rows that are ready for them. */
  void EndForward();

  /*! \brief The part that has the methods of this class. */
  template <typename Part>
  Part* part() {
    if constexpr (std::is_same_v<Part, PagedKVCacheObj>) {
      return this;
    } else {
      return &std::get<Part&>(std::tie(storage_, step_, sequences_, lower_tiers_, prefix_calls_,
                                       tree_commit_, attention_, recurrence_, checkpoint_writer_,
                                       checkpoint_reader_, receiver_, sender_, debug_kv_,
                                       inspector_));
    }
  }

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("pagedkv.KVCache", PagedKVCacheObj, ffi::Object);

 private:
  struct Leaving {  // when a call ends
    CallerGuard* guard;
    ~Leaving() { guard->Leave(); }
  };

  OwnProcess process_;
  CallerGuard guard_;
  DeferredCalls deferred_calls_;
  // Each of these may use those before it.
  CacheConfig config_;
  LayerStorage storage_;
  PageGroups page_groups_;
  SequenceTable table_;
  PageCopier copier_;
  Step step_;
  Sequences sequences_;
  LowerTiers lower_tiers_;
  PrefixCalls prefix_calls_;
  TreeCommit tree_commit_;
  Attention attention_;
  Recurrence recurrence_;
  CheckpointWriter checkpoint_writer_;
  CheckpointReader checkpoint_reader_;
  KVReceiver receiver_;
  KVSender sender_;
  DebugKV debug_kv_;
  Inspector inspector_;
};

class PagedKVCache : public ffi::ObjectRef {
 public:
  explicit PagedKVCache(CacheConfig config)
      : ffi::ObjectRef(ffi::make_object<PagedKVCacheObj>(std::move(config))) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(PagedKVCache, ffi::ObjectRef, PagedKVCacheObj);
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FFI_CACHE_OBJECT_H_
