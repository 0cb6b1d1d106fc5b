# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The native kernel: both directions of the replay, by the rules of `exact` and `initial`, in C.

Those two modules are the reference: every function here has the name of the one there that it does the work of, and
the same budgets, so that any trace, legal or not, comes out the same. The loops run without the GIL on plain memory.
Addresses are uint64 (io admits ends up to 2^63, so no sum of an address and a size wraps), sizes int64, events and
rows int32. What is handed out is `Column`s: memory that numpy reads in place (`kernel` says with which type).
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport INT32_MAX, int8_t, int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from memtrace.allocator.initial import ContradictionError

cdef enum:
    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    FREE = 255

cdef enum:
    BEFORE = -1
    NONE = -1
    UNKNOWN_POOL = -1
    NOT_RECORDED = -1

cdef enum:  # sizes.py
    MIN_BLOCK = 512
    SMALL_REQUEST = 1 << 20
    SMALL_SEGMENT = 2 << 20
    LARGE_REMAINDER = 1 << 20
    LARGE_PAGE = 20 << 20
    INTERVALS = 16

cdef enum:  # the budgets of exact.py and initial.py
    SEARCH_BUDGET = 20000000
    REHOME_BUDGET = 10000000

cdef enum:  # what a node is; the first three are also the numbers of the lists it can stand in
    LIVE = 0
    PENDING = 1
    HOLE = 2
    UNUSED = 3

include "../model/_column.pxi"
include "_kernel_tables.pxi"
include "_kernel_ranges.pxi"
include "_kernel_logs.pxi"
include "_kernel_forward.pxi"
include "_kernel_backward.pxi"
include "_kernel_alone.pxi"
include "_kernel_sums.pxi"
