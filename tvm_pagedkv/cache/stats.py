# SPDX-License-Identifier: Apache-2.0
"""The types of what `KVCache.stats` returns."""

from __future__ import annotations

from typing import TypedDict


class GroupStats(TypedDict):
    """Counters of one layer group: the layers that share a page table.

    They have one kind, shape, window and kv_dtype.

    Every page of its pool is free, cached or used.
    """

    num_layers: int
    window: int
    """Positions that a layer of the group sees; 0 without a window."""
    kv_dtype: str
    """Type of the pages, or the codec that quantizes them."""
    page_bytes: int
    """Bytes of a page of one layer."""
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    """Pages that no sequence holds but that one can find; they count as available."""
    num_reclaimed_pages: int
    """Cached pages that were reused since the cache was made."""
    num_used_pages: int
    """Pages that a sequence holds or a transfer has pinned."""
    num_shared_pages: int
    """Used pages with more than one owner."""
    num_retained_pages: int
    """Pages, cached or used, that a hint covers; see `KVCache.retain`."""


class StateGroupStats(TypedDict):
    """Counters of one state group: the recurrent layers that share pages of states.

    A page has the states of all heads of a layer at one position.
    """

    num_layers: int
    interval: int
    """Positions from one kept state to the next."""
    ingredient_group: int
    """The layer group with the ingredients of these layers."""
    page_bytes: int
    """Bytes of a page of one layer."""
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_reclaimed_pages: int
    num_used_pages: int
    num_shared_pages: int
    num_retained_pages: int


class PrefixTierStats(TypedDict):
    """Counters of the tiers below the pages; a page counts once per layer group.

    Counters of events start at 0 when the cache is made.
    """

    num_host_pages: int
    """Pages in host memory, now."""
    host_bytes: int
    """Bytes of their slots."""
    host_capacity_bytes: int
    num_saved_pages: int
    """Pages that were copied to host memory."""
    num_failed_saves: int
    """Those that were not, because no slot was free or the copy failed."""
    num_evicted_pages: int
    """Pages of host memory that made room for others."""
    num_damaged_pages: int
    """Pages whose checksum or text was wrong when they were read; they counted as missing."""
    num_stored_pages: int
    """Pages that the store took."""
    num_failed_stores: int
    """Pages that the store did not take, and pages evicted from host memory before it had them."""
    num_dropped_stores: int
    """Pages that were not queued for the store because its queue was full; they stay in memory."""
    num_pending_stores: int
    """Pages that are to be written to the store, now."""
    num_fetched_pages: int
    """Pages that came from the store into host memory."""
    num_failed_fetches: int
    num_failed_loads: int
    """Hits that got shorter because a page of host memory was gone or damaged."""
    reused_pool_tokens: int
    """Reused tokens whose pages were in the pool."""
    reused_host_tokens: int
    """Reused tokens with a page that was copied back from host memory."""
    reused_store_tokens: int
    """Reused tokens with a page that had come from the store."""


class _TieredStats(TypedDict, total=False):
    prefix_tiers: PrefixTierStats


class CacheStats(_TieredStats):
    """Pages, bytes and events of a cache. Page counts are sums over its layer groups.

    Bytes are those on the cache's device. Counters of events start at 0 when the cache is made.
    ``prefix_tiers`` is there in a cache with a `prefix_cache`.
    """

    page_pool_bytes: int
    workspace_bytes: int
    """Q, K, V and lse rows of a step."""
    scratch_bytes: int
    """Partial states and tiles of kernels, which the first steps allocate, one after the other.

    On a CPU they are at most `tvm_pagedkv.scratch_bytes`. Code for CPUs in libraries that the
    process loaded before this package has memory of TVM's runtime instead, which is not counted.
    """
    aux_bytes: int
    """Page tables, positions and other int32 arrays of a step."""
    allocated_bytes: int
    """Everything that the cache has allocated; see `KVCacheConfig.memory_bytes`."""
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_reclaimed_pages: int
    num_used_pages: int
    num_shared_pages: int
    num_retained_pages: int
    groups: list[GroupStats]
    state_groups: list[StateGroupStats]
    num_sequences: int
    num_importing_sequences: int
    """Sequences that `KVCache.load` or a transfer has begun to import."""
    total_tokens: int
    """Sum of the lengths of all sequences."""
    num_prefix_lookups: int
    """Sequences that were added with their tokens."""
    num_prefix_hits: int
    """Those of them that reuse pages of an earlier text."""
    num_looked_up_tokens: int
    """Tokens of these lookups."""
    num_reused_tokens: int
    """Those of them that need not be computed."""
    num_findable_tokens: int
    """Tokens of the texts whose pages a lookup may find, now."""
    num_windowed_sequences: int
    """Sequences with a sliding window of their own."""
    num_dropped_tokens: int
    """Tokens that have left these windows, of the sequences that exist."""
    num_forwards: int
    """Steps that were begun."""
    num_pinned_pages: int
    """Pages that transfers keep as they are, counted once per pin."""
    num_hints: int
    """Hints of `KVCache.retain` and `KVCache.pin` that have not ended."""
    num_hint_pinned_pages: int
    """Pages that `KVCache.pin` keeps, of layer groups and state groups, counted once per pin."""
    num_send_blocks: int
    """Blocks of rows that receivers have not read yet."""
    cow_page_copies: int
    """Pages that were copied before a write because they had several owners."""
    copied_inputs: int
    """Input tensors that were copied because they were not contiguous."""
    aux_bytes_copied: int
    """Bytes of int32 arrays that were copied to the device."""
    pages_read: int
    """Pages that attention has read, counted once per step and group; a shared prefix once."""
    pages_read_without_sharing: int
    """The same if no prefix was shared."""
    step_pages_read: int
    """`pages_read` of the last step."""
    step_pages_read_without_sharing: int
    uncommitted_tree_nodes: int
    committed_tree_nodes: int
    dropped_tree_nodes: int
    moved_tree_nodes: int
    """Committed nodes whose rows were copied to other slots."""
