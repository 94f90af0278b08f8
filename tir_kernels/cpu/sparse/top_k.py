# SPDX-License-Identifier: Apache-2.0
"""The positions of the largest scores of rows, kept while scores come, in the order of positions.

A list has room for about twice the positions that are chosen, and a threshold that most scores do
not exceed. Where it is full, a histogram finds a higher threshold.
"""

from tvm.script import tirx as T

from ...script import inline
from ..isa.simd import broadcast, load, temp, vector_type
from ..tasks import Workspace

OFFERED = 64  # scores that a list takes at once, at most
_BINS = 1 << 11
_LOWEST = -(1 << 31)  # less than every key

# linkonce_odr: several kernels of one module may bring the same helpers.
_HELPERS = """
define linkonce_odr i32 @pagedkv_greater_{n}(<{n} x i32> %a, i32 %b) #0 {{
  %x = insertelement <{n} x i32> poison, i32 %b, i64 0
  %y = shufflevector <{n} x i32> %x, <{n} x i32> poison, <{n} x i32> zeroinitializer
  %c = icmp sgt <{n} x i32> %a, %y
  %m = bitcast <{n} x i1> %c to i{n}
  %r = zext i{n} %m to i32
  ret i32 %r
}}
define linkonce_odr i32 @pagedkv_first_bit(i32 %bits) #0 {{
  %r = call i32 @llvm.cttz.i32(i32 %bits, i1 true)
  ret i32 %r
}}
declare i32 @llvm.cttz.i32(i32, i1)
attributes #0 = {{ alwaysinline nounwind readnone }}
"""


def llvm_helpers(lanes: int) -> str:
    """Return the LLVM functions that `TopK` calls."""
    return _HELPERS.format(n=lanes)


def keys_of(scores, lanes: int):
    """Return signed integers in whose order a vector of scores is; NaN has one too."""
    integers = vector_type("int32", lanes)
    bits = temp(T.reinterpret(integers, scores), lanes, "int32")
    numbers = [broadcast(T.int32(n), lanes) for n in (31, 0x7FFFFFFF, _LOWEST + 1)]
    flipped = T.bitwise_and(T.shift_right(bits, numbers[0]), numbers[1])
    return T.max(T.bitwise_xor(bits, flipped), numbers[2])


@T.meta_class
class TopKLists:
    """Keys and positions of lists, in memory of the call.

    Parameters
    ----------
    num_lists : int32 expression
    k : int32
        Positions to choose.
    longest : int32 expression
        Maximum number of scores of a list.

    Attributes
    ----------
    room : int64
        Entries of a list.
    keys, positions : int32 Buffers ``[num_lists * room]``
    states : int32 Buffer ``[num_lists, 2]``
        Entries that a list has, and its threshold.
    """

    def __init__(self, num_lists, k, longest):
        self.k, self.room = k, T.local_scalar("int64")
        enough = T.cast(k, "int64") * 2 + 4 * OFFERED
        self.room_of_call = T.min(T.cast(longest, "int64"), enough) + OFFERED
        # Vectors of the last list may end behind it.
        size = T.cast(num_lists, "int64") * self.room_of_call + OFFERED
        what = "lists of chosen positions"
        self._keys = Workspace(size, (), "int32", what)
        self._positions = Workspace(size, (), "int32", what)
        self._states = Workspace(num_lists, (2,), "int32", what)
        self.keys, self.positions = self._keys.buffer, self._positions.buffer
        self.states = self._states.buffer

    @inline
    def begin(self):
        """Keep the room."""
        self.room = self.room_of_call

    @inline
    def clear(self, index):
        """Forget the entries of a list."""
        self.states[T.cast(index, "int64"), 0] = 0
        self.states[T.cast(index, "int64"), 1] = _LOWEST

    @inline
    def free(self):
        """Give the memory back."""
        self._states.free()
        self._positions.free()
        self._keys.free()


@T.meta_class
class TopK:
    """Fills lists, and chooses the largest scores of one; of equal ones the first positions.

    Parameters
    ----------
    lists : TopKLists
    lanes : int
    """

    def __init__(self, lists: TopKLists, lanes: int):
        self.lists, self.lanes = lists, lanes
        self.bins = T.alloc_buffer((_BINS,), "int32")
        self.first = T.local_scalar("int64")  # entry of the list
        self.count, self.threshold = T.local_scalar("int32"), T.local_scalar("int32")
        self.lowest, self.bound = T.local_scalar("uint32"), T.local_scalar("uint32")
        self.left, self.is_cut = T.local_scalar("int32"), T.local_scalar("int32")

    @inline
    def open(self, index):
        """Load the state of a list."""
        self.first = T.cast(index, "int64") * self.lists.room
        self.count = self.lists.states[T.cast(index, "int64"), 0]
        self.threshold = self.lists.states[T.cast(index, "int64"), 1]

    @inline
    def close(self, index):
        """Keep the state of the list for the next time."""
        self.lists.states[T.cast(index, "int64"), 0] = self.count
        self.lists.states[T.cast(index, "int64"), 1] = self.threshold

    @inline
    def offer(self, keys, start, num, position_of):
        """Add those of `num` keys, from ``keys[start]`` on, that may be among the largest.

        They are `OFFERED` at most. Those behind them are loaded too, up to whole vectors.
        ``position_of(i)`` is the position of the i-th key, behind all that the list has.
        """
        lists, lanes = T.meta_var((self.lists, self.lanes))
        if T.cast(self.count, "int64") > lists.room - OFFERED:
            self._shrink(lists.k + lists.k // 4 + OFFERED)
        for i in range((num + lanes - 1) // lanes):
            vector = T.meta_var(load(keys, (start + i * lanes,), lanes, "int32"))
            call = T.meta_var((f"pagedkv_greater_{lanes}", vector, self.threshold))
            bits = T.call_pure_extern("int32", *call)
            if num - i * lanes < lanes:
                behind = T.shift_left(T.int32(1), num - i * lanes)
                bits = T.bitwise_and(bits, behind - 1)
            while bits != 0:
                n = i * lanes + T.call_pure_extern("int32", "pagedkv_first_bit", bits)
                lists.keys[self.first + self.count] = keys[start + n]
                lists.positions[self.first + self.count] = position_of(n)
                self.count += 1
                bits = T.bitwise_and(bits, bits - 1)

    @inline
    def offer_list(self, index):
        """Offer the entries of another list, whose positions are behind those of this one."""
        lists = T.meta_var(self.lists)
        other = T.cast(index, "int64") * lists.room
        num = lists.states[T.cast(index, "int64"), 0]
        for i in range((num + OFFERED - 1) // OFFERED):
            start = other + i * OFFERED
            self.offer(
                lists.keys,
                start,
                T.min(num - i * OFFERED, OFFERED),
                lambda n: lists.positions[start + n],
            )

    @inline
    def choose(self, positions, row: tuple):
        """Store the positions of the `k` largest scores of the list, in order, then -1.

        `row` has the indices of `positions`, less the last one.
        """
        lists = T.meta_var(self.lists)
        if self.count > lists.k:
            self._shrink(lists.k)
        for i in range(self.count):
            T.buffer_store(positions, lists.positions[self.first + i], [*row, i])
        for i in range(lists.k - self.count):
            T.buffer_store(positions, T.int32(-1), [*row, self.count + i])

    @inline
    def _shrink(self, most):
        """Leave the `k` largest scores of the list and a few more, `most` in all."""
        self._find_bound(most)
        keys, positions = T.meta_var((self.lists.keys, self.lists.positions))
        at = self.first
        for i in range(self.count):
            key, position = keys[self.first + i], positions[self.first + i]
            offset = T.meta_var(T.reinterpret("uint32", key) - self.lowest)
            keys[at] = key
            positions[at] = position
            if self.is_cut == 0:
                at += T.Select(offset >= self.bound, T.int64(1), T.int64(0))
            elif offset > self.bound:
                at += T.int64(1)
            elif T.And(offset == self.bound, self.left > 0):
                self.left -= 1
                at += T.int64(1)
        self.count = T.cast(at - self.first, "int32")
        # A later score that equals the last one of a list that was cut is not chosen.
        last = T.reinterpret("int32", self.lowest + self.bound)
        self.threshold = T.Select(self.is_cut == 0, last - 1, last)

    @inline
    def _find_bound(self, most):
        """Find the `bound` that at least `k` keys of the list reach, and at most `most` if it can.

        Keys count from `lowest`. If more have to reach it, since they are equal, the list is cut:
        `left` of those that are equal to it are chosen.
        """
        keys, bins = T.meta_var((self.lists.keys, self.bins))
        low, high = keys[self.first], keys[self.first]
        for i in range(self.count):
            low = T.min(low, keys[self.first + i])
            high = T.max(high, keys[self.first + i])
        self.lowest = T.reinterpret("uint32", low)
        self.bound = T.uint32(0)
        self.left = self.lists.k
        span = T.reinterpret("uint32", high) - self.lowest  # of the keys that are looked at
        shift = T.uint32(0)
        while T.shift_right(span, shift) >= T.uint32(_BINS):
            shift += T.uint32(1)
        num_reaching = self.count
        is_first = T.int32(1)
        while T.And(num_reaching > most, T.Or(is_first != 0, span != T.uint32(0))):
            if is_first == 0:
                shift = T.Select(shift > T.uint32(11), shift - T.uint32(11), T.uint32(0))
            is_first = 0
            for i in range(_BINS):
                bins[i] = 0
            for i in range(self.count):
                key = T.meta_var(T.reinterpret("uint32", keys[self.first + i]))
                offset = key - self.lowest - self.bound
                if offset <= span:
                    bins[T.cast(T.shift_right(offset, shift), "int32")] += 1
            digit = T.int32(_BINS - 1)
            while bins[digit] < self.left:
                self.left -= bins[digit]
                digit -= 1
            self.bound += T.shift_left(T.cast(digit, "uint32"), shift)
            span = T.shift_left(T.uint32(1), shift) - T.uint32(1)
            num_reaching = self.lists.k - self.left + bins[digit]
        self.is_cut = T.Select(num_reaching > most, 1, 0)
