// SPDX-License-Identifier: Apache-2.0
/*!
 * \file paged_kv_cache.h
 * \brief The cache object: composes table, plan, arrays and memory, and calls the kernels.
 *
 * paged_kv_cache.cc has its making, the sequences and the step; attention.cc and mla_attention.cc
 * what a layer calls within a step, step_checks.cc what such a call needs, attention_kernels.cc,
 * shared_attention.cc and tree_attention.cc the kernels behind it; tree_commit.cc what follows a
 * step with token trees; inspect.cc what looks at a cache from outside; checkpoint.cc what takes
 * sequences out of a cache and into another; send_receive.cc transfers.
 */
#ifndef TVM_PAGEDKV_FFI_PAGED_KV_CACHE_H_
#define TVM_PAGEDKV_FFI_PAGED_KV_CACHE_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/optional.h>

#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "attention/flashinfer_backend.h"
#include "attention/layer_call.h"
#include "attention/stock_window_backend.h"
#include "checkpoint/checkpoint_metadata.h"
#include "config/cache_config.h"
#include "config/kernels.h"
#include "device/aux_data.h"
#include "device/device_memory.h"
#include "device/device_stream.h"
#include "ffi/caller_guard.h"
#include "state/commit_plan.h"
#include "state/forward_plan.h"
#include "state/sequence_table.h"

namespace pagedkv {

class PagedKVCacheObj : public ffi::Object {
 public:
  explicit PagedKVCacheObj(CacheConfig config);

  /*!
   * \brief Makes a call as the only thread inside; after what had to wait for a call to be made.
   * \throws Error (RuntimeError) while another thread is inside; nothing has changed.
   */
  template <typename F>
  auto Enter(F call) -> decltype(call()) {
    guard_.Enter();
    const Leaving leaving{&guard_};
    if (guard_.is_outermost()) deferred_calls_.RunAll();
    return call();
  }
  /*!
   * \brief Makes a call that cannot fail, or leaves it to the next caller: while another thread is
   * inside, and while this one changes pages or runs a kernel.
   */
  template <typename F>
  void EnterOrDefer(F call) {
    if (guard_.TryEnter()) {
      const Leaving leaving{&guard_};
      if (phase_ == Phase::kIdle || phase_ == Phase::kForward) {
        if (guard_.is_outermost()) deferred_calls_.RunAll();
        return call();
      }
    }
    deferred_calls_.Add(std::move(call));
  }

  // Sequences. None of these may be called within a step.
  void Clear();
  void AddSequence(int64_t sequence_id);
  void RemoveSequence(int64_t sequence_id);
  void ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_position);
  void PopN(int64_t sequence_id, int64_t count);
  void EnableSlidingWindow(int64_t sequence_id, int64_t window, int64_t num_sinks);

  // The step, and the commit of token trees between steps. What throws has changed nothing.
  void BeginForward(ffi::Shape sequence_ids, ffi::Shape append_lengths,
                    ffi::Optional<ffi::Shape> token_tree_parents);
  void EndForward();
  /*! \brief Ends the step as if it had never begun: what layers have appended is dropped. */
  void AbortForward();
  /*! \brief Ids of the layers whose K and V have not been appended in this step. */
  ffi::Shape MissingLayers() const;
  void CommitTree(ffi::Shape sequence_ids, ffi::Shape leaf_indices);
  bool IsInForward() const { return phase_ == Phase::kForward || phase_ == Phase::kAttending; }

  // Counters.
  bool IsEmpty() const { return table_.num_sequences() == 0; }
  int64_t NumAvailablePages() const;
  int64_t TotalLength() const { return table_.total_length(); }
  int64_t SequenceLength(int64_t sequence_id) const { return table_.At(sequence_id).length; }

  // Attention, within a step.
  ffi::Tensor QueryPositions() const;
  void AttentionWithFusedQKV(int64_t layer, double sm_scale, ffi::Tensor qkv, ffi::Tensor o,
                             ffi::Optional<ffi::Tensor> sinks);
  void AttentionWithSharedKV(int64_t source, double sm_scale, ffi::Tensor q, ffi::Tensor current_k,
                             ffi::Tensor current_v, ffi::Tensor o,
                             ffi::Optional<ffi::Tensor> sinks);
  void SelfAttention(int64_t layer, double sm_scale, ffi::Tensor q, ffi::Tensor k, ffi::Tensor v,
                     ffi::Tensor o, ffi::Tensor lse);
  void CrossAttention(int64_t layer, double sm_scale, ffi::Tensor q, ffi::Tensor o,
                      ffi::Tensor lse);
  void AppendMLAKV(int64_t layer, ffi::Tensor kv);
  ffi::Array<ffi::Tensor> MergeAttention(ffi::Tensor o, ffi::Tensor lse, ffi::Tensor o_other,
                                         ffi::Tensor lse_other);

  // Transfers between caches. Ids are of one sequence and count from 1; 0 stands for none.
  ffi::Shape DisaggPrepareRecv(int64_t sequence_id, int64_t append_length);
  /*!
   * \brief The receive of a sequence that is under way; 0: none. From now on its pages stay taken
   * until it is finished, cancelled or released, even if the sequence is removed.
   */
  int64_t ReceiveId(int64_t sequence_id);
  void FinishReceive(int64_t sequence_id, int64_t receive_id);
  /*! \brief Also where the sequence has been used or removed: then it lets the pages go. */
  void CancelReceive(int64_t sequence_id, int64_t receive_id);
  /*! \brief Nothing writes to the pages of a receive any more; now, or at the next call. */
  void ReleaseReceive(int64_t receive_id);
  /*!
   * \brief Whom to tell of rows that are ready for a receiver.
   * \param handler Takes the id of a block; None lets go of all that was meant for the receiver.
   * \param num_slots Of the receiver's pools, for each group.
   */
  void SetSendHandler(int64_t peer, ffi::Optional<ffi::Function> handler, ffi::Shape num_slots);
  /*! \brief As SetSendHandler with None; now, or at the next call. */
  void DropSendHandler(int64_t peer);
  /*!
   * \param peer The number under which the receiver was connected. Engines pass the group offset of
   *   the destination, the number of its first worker; every worker of the sender connects to the
   *   receiver of its own rank under that one number.
   */
  void DisaggMarkSend(int64_t sequence_id, int64_t begin, ffi::Shape position_map, int64_t peer);
  int64_t SendId(int64_t sequence_id) const;
  void CancelSend(int64_t sequence_id, int64_t send_id);
  ffi::Map<ffi::String, ffi::Any> DescribeSendBlock(int64_t block_id) const;
  void ReleaseSendBlock(int64_t block_id);
  ffi::Tensor PagesOf(int64_t layer) const;
  /*! \brief File descriptor and size of the memory that has all pages; [-1, 0] without. */
  ffi::Shape SharedPages() const;

  // From outside.
  void DebugGetKV(int64_t sequence_id, int64_t begin, int64_t end, ffi::Tensor k, ffi::Tensor v);
  void DebugSetKV(int64_t sequence_id, int64_t begin, ffi::Tensor k, ffi::Tensor v);
  // Of the MLA layers, where the two above are of the MHA layers.
  void DebugGetKVMLA(int64_t sequence_id, int64_t begin, int64_t end, ffi::Tensor kv);
  void DebugSetKVMLA(int64_t sequence_id, int64_t begin, ffi::Tensor kv);
  ffi::Map<ffi::String, ffi::Any> Stats() const;
  ffi::Map<ffi::String, ffi::Any> Describe() const;
  /*! \throws Error when the model has no such layer, or the cache keeps nothing of it. */
  void CheckLayer(int64_t layer) const { LayerAt(layer); }
  ffi::Shape SequenceIds() const;
  /*! \brief The pages that the group keeps of the sequence. */
  ffi::Shape PageTable(int64_t sequence_id, int64_t group) const;
  ffi::Shape CachedPages(int64_t group) const;  // the least recently used one first
  int64_t FirstPosition(int64_t sequence_id, int64_t group) const;
  /*! \brief The window of a sequence (0: none), its sinks, and how many it has dropped. */
  ffi::Shape Window(int64_t sequence_id) const;
  void CheckIntegrity() const;
  void PoisonFreePages();
  void ShuffleFreePages(int64_t seed);
  /*! \brief Lets every page that sequences share be read once, whether or not it saves time. */
  void ShareEveryPrefix();

  // Checkpoints. A page group is what a sequence keeps of one layer; its id, and `layer` here, is
  // the number of the layer among those that this cache keeps.
  ffi::String LayoutHash() const;
  ffi::String CheckpointMetadata(int64_t sequence_id) const;
  void ExportPageGroup(int64_t sequence_id, int64_t layer, ffi::Tensor out) const;
  /*! \brief Any pages of a layer; the slots after the first num_slots[i] of a page become zero. */
  void ExportPages(int64_t layer, ffi::Shape pages, ffi::Shape num_slots, ffi::Tensor out) const;
  void PrepareImport(int64_t sequence_id, ffi::String metadata);
  /*! \brief One import of several sequences; page_numbers[i][group] are among all its pages. */
  void PrepareImports(ffi::Shape sequence_ids, ffi::Array<ffi::String> metadata,
                      ffi::Array<ffi::Array<ffi::Shape>> page_numbers);
  void ImportPageGroup(int64_t sequence_id, int64_t layer, ffi::Tensor data);
  /*! \brief The next pages of a layer. */
  void ImportPages(int64_t sequence_id, int64_t layer, ffi::Tensor data);
  void FinishImport(int64_t sequence_id);

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("pagedkv.KVCache", PagedKVCacheObj, ffi::Object);

 private:
  enum class Phase { kIdle, kPlanning, kForward, kAttending };
  struct Leaving {  // when a call ends
    CallerGuard* guard;
    ~Leaving() { guard->Leave(); }
  };
  /*! \brief A call of a layer: its kernels find the step busy, and its stream is in order. */
  class LayerCallScope;

  /*! \brief Arrays of a step: some for all groups, then those of each, then of its segments. */
  enum CommonArray {
    kTreeOrder,  // with kTreeOrderIndptr empty where the causal mask will do
    kTreeOrderIndptr,
    kQueryIndptr,
    kQueryPositions,  // counted within the sequences: for masks, and rotations in the kernels
    kTextPositions,   // empty where no sequence of the step has dropped positions before them
    kPastLengths,
    kNumCommonArrays
  };
  enum GroupArray {
    kPageIndptr,
    kPageValues,
    kLastPageLengths,
    kFirstPositions,
    kSlots,
    kNumGroupArrays
  };

  /*! \brief Arrays of the segments of shared pages, for each group; there once a step has some. */
  enum SegmentArray {
    kSegmentPageIndptr,
    kSegmentPageValues,
    kSegmentFirstPositions,
    kSegmentRowIndptr,
    kSegmentRows,
    kNumSegmentArrays
  };

  /*! \brief Layers of one shape and window. */
  struct Group {
    LayerConfig shape;
    std::vector<int64_t> layers;  // indices into layers_
    // This step's rows of the workspaces.
    StepView q, k, v, lse;
  };
  struct Layer {
    LayerConfig config;
    int32_t group;
    ffi::Tensor pages;  // [NumPages, 2, num_kv_heads, page_size, head_dim], or without 2 and heads
    // The last step, counted by num_forwards_, in which each of these was called.
    int64_t last_append = 0;
    int64_t last_self_attention = 0;   // of MLA layers, as the next one
    int64_t last_whole_attention = 0;  // a cross_attention that covered the step's rows
  };
  /*! \brief The page table of a group, as a kernel takes it, and who sees which tree node. */
  struct PageArrays {
    PageRange range;
    const ffi::Tensor& indptr;
    const ffi::Tensor& values;
    const ffi::Tensor& last_page_lengths;  // [B], or with windows of sequences [4 * B]
    const ffi::Tensor& tree_order;
    // Where the lengths are from.
    const AuxData& arrays;
    size_t lengths_index;
  };

  static std::vector<Group> MakeGroups(const CacheConfig& config);
  std::vector<Layer> MakeLayers();
  void RequireMemory() const;
  int64_t PoolBytes(const LayerConfig& layer) const;
  void AllocateWorkspaces();
  std::vector<int64_t> InitialArraySizes() const;
  size_t ArrayIndex(int32_t group, GroupArray array) const {
    return kNumCommonArrays + group * kNumGroupArrays + array;
  }
  size_t SegmentIndex(int32_t group, SegmentArray array) const {
    return ArrayIndex(table_.num_groups(), GroupArray{}) + group * kNumSegmentArrays + array;
  }
  const ffi::Tensor& common(CommonArray array) const { return aux_->view(array); }
  /*! \brief Whether positions that models and appends see count all that was ever appended. */
  bool counts_text() const { return plan_.has_windows() && config_.rope_mode != RopeMode::kInline; }
  /*!
   * \brief The position of every row where it is rotated before it is written, by us or by the
   * model. A rotated K stays as it is when a window slides, so this counts the whole text.
   */
  const ffi::Tensor& rope_positions() const {
    return common(counts_text() ? kTextPositions : kQueryPositions);
  }

  void RequireIdle(const char* what) const;
  void RequireForward(const char* what) const;
  void RequireOpenStep(const char* what) const;
  void CopyPages(const std::vector<PageCopy>& copies);
  void CopyPagesTogether(const PageCopy* begin, const PageCopy* end);
  void MakeCopyArrays();
  void LayOutArrays();
  void FillArrays();
  void SetWorkspaceViews();

  /*! \brief The layer with this id in the model; it keeps K and V, and is of this stage. */
  const Layer& LayerAt(int64_t layer) const;
  Layer& LayerAt(int64_t layer) {
    return const_cast<Layer&>(static_cast<const PagedKVCacheObj*>(this)->LayerAt(layer));
  }
  const KernelSet& KernelsOf(const Layer& layer) const {
    return config_.kernel_sets[layer.config.kernel_set];
  }
  void CheckTensor(const char* name, const ffi::Tensor& tensor,
                   std::initializer_list<int64_t> shape, DLDataType dtype) const;
  /*! \brief As CheckTensor, of what is only read and may have strides on the host. */
  void CheckInput(const char* name, const ffi::Tensor& tensor, std::initializer_list<int64_t> shape,
                  DLDataType dtype) const;
  /*! \brief Copies inputs that kernels cannot take: with strides, or not aligned. */
  void MakeCompact(std::initializer_list<ffi::Tensor*> inputs, bool is_stock);
  void CheckScale(double sm_scale) const;
  void CheckAlignment(const char* name, const ffi::Tensor& tensor) const;
  void Append(const Layer& layer, const ffi::Tensor& qkv);
  void PagedAttention(const Layer& layer, const PageArrays& pages, double sm_scale,
                      const ffi::Tensor& q, const ffi::Tensor& o, const ffi::Tensor& lse);
  void CheckSinks(const Layer& layer, const ffi::Optional<ffi::Tensor>& sinks) const;
  /*! \brief Lets the sinks, if there are any, into the softmax of what was written to `o`. */
  void ApplySinks(const Layer& layer, const ffi::Optional<ffi::Tensor>& sinks,
                  const ffi::Tensor& o);
  bool CanSharePrefixes(const Group& group) const;
  void SizeSegments();
  void FillSegments();
  void CountPagesRead();
  void AttendToSegments(const Layer& layer, double sm_scale, const ffi::Tensor& q,
                        const ffi::Tensor& o, const ffi::Tensor& lse) const;
  PageArrays StepPages(const Layer& layer) const;
  /*! \brief The page table that cross_attention takes. */
  PageArrays PastPages(const Layer& layer);
  void FillPastArrays();
  int64_t NumLengthRows(int32_t group) const;
  void FillLengths(int32_t group, PageRange range, int32_t* out) const;
  /*! \brief The kernel that attends over the pages of a layer in a step without a tree mask. */
  KernelName PagedKernel(const Layer& layer) const;
  /*! \brief Whether it can attend to the past only: then this step's rows are a part of their own.
   */
  bool AttendsInParts(const Layer& layer) const;
  /*! \brief Attends to what the rows see; k and v are this step's, which the pages hold already. */
  void AttendToStep(const Layer& layer, double sm_scale, const ffi::Tensor& q, const ffi::Tensor& k,
                    const ffi::Tensor& v, const ffi::Tensor& o, const ffi::Tensor& lse);

  void RequireTreeKernels() const;
  bool HidesStep(const Layer& layer) const;
  void RequireHiddenStep(const Layer& layer) const;
  bool UsesTreeKernel(const Layer& layer, PageRange range) const {
    return range == PageRange::kWithStep ? plan_.needs_tree_mask() : HidesStep(layer);
  }
  void TreeAttention(const Layer& layer, const PageArrays& pages, double sm_scale,
                     const ffi::Tensor& q, const ffi::Tensor& o, const ffi::Tensor& lse);
  void RaggedAttention(const Layer& layer, double sm_scale, const ffi::Tensor& q,
                       const ffi::Tensor& k, const ffi::Tensor& v, const ffi::Tensor& o,
                       const ffi::Tensor& lse);
  /*! \brief The kernel for a step's own rows: one with a window where the layer has one. */
  KernelName RaggedKernel(const Layer& layer) const;
  void FillCommitArrays(const CommitPlan& plan);
  /*! \brief When it throws the rows are as before, or it says that they are lost. */
  void MoveNodes(const CommitPlan& plan, bool* are_nodes_lost);
  bool HasStockWindow(const Layer& layer) const {
    return StockWindowBackend::Serves(KernelsOf(layer), layer.config);
  }
  /*! \brief Whether the layer's attention in this step is that of the stock cache's kernels. */
  bool UsesStockWindow(const Layer& layer, PageRange range) const {
    return HasStockWindow(layer) && !UsesTreeKernel(layer, range);
  }
  LayerCall CallOf(const Layer& layer, double sm_scale, const ffi::Tensor& q, const ffi::Tensor& o,
                   const ffi::Tensor& lse) const;
  StockWindowCall StockWindow(const Layer& layer, double sm_scale, const ffi::Tensor& q,
                              const ffi::Tensor& o, const ffi::Tensor& lse) const;
  bool HasStockKernel(const Layer& layer, std::initializer_list<KernelName> names) const;
  int64_t rotary_mode() const { return config_.rope_mode == RopeMode::kInline; }

  struct Peer {
    ffi::Function handler;
    std::vector<int64_t> num_slots;  // of its pools, for each group
  };
  void RequireNotPlanning(const char* what) const;
  Sequence* Receiving(int64_t sequence_id, int64_t receive_id, const char* what);
  /*! \brief A token tree's rows are not final, so none of these may be under way. */
  void RequireNoSends(const ffi::Shape& sequence_ids) const;
  /*! \brief Makes the rows that are there ready; 0 when there are none. */
  int64_t MakeSendBlock(Sequence* sequence);
  std::vector<int64_t> MakeSendBlocks();
  /*! \brief Calls the handlers of all blocks; the first error of one is thrown after that. */
  void Announce(const std::vector<int64_t>& blocks);
  void ForgetPeer(int64_t peer) noexcept;

  static std::vector<int32_t> NumPages(const CacheConfig& config, const std::vector<Group>& groups);
  static std::vector<int64_t> Windows(const std::vector<Group>& groups);
  void CheckGroup(int64_t group) const;
  Layer& MLALayerAt(int64_t layer, const char* what);
  void MLASelfAttention(Layer* layer, double sm_scale, ffi::Tensor q, ffi::Tensor k, ffi::Tensor v,
                        const ffi::Tensor& o, const ffi::Tensor& lse);
  void MLACrossAttention(Layer* layer, double sm_scale, ffi::Tensor q, const ffi::Tensor& o,
                         const ffi::Tensor& lse);
  const KernelSet& MergeKernels(int64_t num_heads, int64_t width) const;

  void PoisonSlots(const Layer& layer, const std::vector<bool>& is_held);
  int64_t CountUniformLayers(LayerKind kind, const char* what) const;
  const LayerConfig& ShapeOf(LayerKind kind) const;
  void CheckPositions(const Sequence& sequence, int64_t begin, int64_t end) const;
  template <typename Visitor>
  void VisitRows(LayerKind kind, const Sequence& sequence, int64_t begin, int64_t end,
                 Visitor visit) const;
  template <typename Visitor>
  void WriteRows(LayerKind kind, Sequence* sequence, int64_t begin, int64_t count, Visitor visit);

  std::string RopeDetails(const LayerConfig& layer) const;
  CheckpointLayout MakeCheckpointLayout() const;
  SequenceState StateOf(const Sequence& sequence) const;
  ImportedSequence ImportedFrom(int64_t sequence_id, const std::string& metadata) const;
  void CheckPageGroup(const char* name, const ffi::Tensor& tensor, int64_t layer,
                      int64_t num_pages) const;
  void CheckLayerId(int64_t layer, const char* what) const;
  template <typename PageId, typename Copy>
  void CopyRuns(const PageId* pages, int64_t num_pages, const ffi::Tensor& tensor, Copy copy) const;
  template <typename PageId>
  void ReadPages(int64_t layer, const PageId* pages, int64_t num_pages,
                 const std::vector<int64_t>& num_slots, const ffi::Tensor& out) const;
  void WritePages(int64_t layer, const int32_t* pages, int64_t num_pages, const ffi::Tensor& data);

  CallerGuard guard_;
  DeferredCalls deferred_calls_;
  CacheConfig config_;
  mutable StreamOrder stream_order_;
  ByteCounter allocated_bytes_;
  std::vector<Group> groups_;
  std::shared_ptr<SharedMemory> shared_pages_;  // with enable_kv_transfer on a CPU
  std::vector<Layer> layers_;  // before the table: what does not fit should fail here
  CheckpointLayout checkpoint_layout_;
  SequenceTable table_;
  ForwardPlan plan_;
  int64_t page_pool_bytes_;
  std::vector<int64_t> array_sizes_;
  std::unique_ptr<AuxData> aux_;
  /*! \brief Page tables without this step's rows; made when a step first asks for them. */
  std::unique_ptr<AuxData> past_aux_;
  std::vector<int64_t> past_array_sizes_;
  bool has_past_arrays_ = false;
  bool has_segments_ = false;  // of shared pages, in this step
  /*! \brief Which rows a commit of trees moves; made when one first moves any. */
  std::unique_ptr<AuxData> commit_aux_;
  /*! \brief Which pages are copied together; null where the kernel for that is missing. */
  std::unique_ptr<AuxData> copy_aux_;
  std::vector<int64_t> commit_array_sizes_, copy_array_sizes_;
  std::unique_ptr<FlashInferBackend> flashinfer_;     // where a kernel is FlashInfer's
  std::unique_ptr<StockWindowBackend> stock_window_;  // where stock kernels have windows
  ffi::Tensor q_workspace_, k_workspace_, v_workspace_, lse_workspace_;  // bytes
  int64_t workspace_bytes_ = 0;
  int64_t num_forwards_ = 0;
  int64_t num_page_copies_ = 0, num_copied_inputs_ = 0;
  // Pages that the attention of one layer of each group covers: of the last step, and of all.
  int64_t step_pages_read_ = 0, step_pages_read_without_sharing_ = 0;
  int64_t pages_read_ = 0, pages_read_without_sharing_ = 0;
  int64_t num_committed_nodes_ = 0;
  int64_t num_dropped_nodes_ = 0;
  int64_t num_moved_nodes_ = 0;
  Phase phase_ = Phase::kIdle;
  std::map<int64_t, Peer> peers_;
  std::map<int64_t, SendBlock> blocks_;
  int64_t last_transfer_id_ = 0;
};

class PagedKVCacheObj::LayerCallScope {
 public:
  /*! \throws Error (ValueError) outside a step, and within another such call. */
  LayerCallScope(PagedKVCacheObj* cache, const char* what)
      : cache_(cache), on_stream_((cache->RequireForward(what), &cache->stream_order_)) {
    cache_->phase_ = Phase::kAttending;
  }
  ~LayerCallScope() noexcept(false) { cache_->phase_ = Phase::kForward; }
  LayerCallScope(const LayerCallScope&) = delete;
  LayerCallScope& operator=(const LayerCallScope&) = delete;

 private:
  PagedKVCacheObj* cache_;
  StreamOrder::Call on_stream_;
};

/*!
 * \brief Copies bytes between the memory of two tensors.
 * \param regions int64 [n, 3] on the CPU: destination offset, source offset, number of bytes.
 */
void CopyRegions(ffi::Tensor destination, ffi::Tensor source, ffi::Tensor regions);

class PagedKVCache : public ffi::ObjectRef {
 public:
  explicit PagedKVCache(CacheConfig config)
      : ffi::ObjectRef(ffi::make_object<PagedKVCacheObj>(std::move(config))) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(PagedKVCache, ffi::ObjectRef, PagedKVCacheObj);
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FFI_PAGED_KV_CACHE_H_
