"""The statistics of a CUDA tensor in one pass over its memory, as Triton kernels.

The first kernel reads the tensor once and leaves one float64 partial a program and column; the
second, a single program, adds the partials to the row. No atomics: two runs give the same bits.
Nothing is copied to the host and nothing waits for the device, so both can be captured in a CUDA
graph, once a call outside of one has had them compiled and loaded (`is_loaded`).

Sums are float32 for `_TILES` elements in a lane and float64 beyond. Imported only where it is used:
Triton need not be installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from act_exporter.rows import Column
from act_exporter.statistics import below, in_memory_order

# Elements a program reads at once: 8 a thread of the usual 128, which is one 16-byte load of
# 2-byte elements, and leaves registers for the accumulators of 8 lanes.
_TILE = 1_024

# Tiles that are gathered before a reduction: enough to hide its barriers, few enough that a lane's
# float32 sum keeps its digits.
_TILES = 16

# Programs at most: the H200's 132 multiprocessors eight times over. The second kernel reads as many
# partials of a column at once.
_PROGRAMS = 1_024

# Squares of elements outside these leave float32's range (1e38, 1e-38) or its precision...
_BIG = tl.constexpr(1e15)
_SMALL = tl.constexpr(1e-15)
# ... and do not after these factors, powers of two so that nothing is rounded.
_SHRINK = tl.constexpr(2.0**-80)
_GROW = tl.constexpr(2.0**100)

# How the elements reach the kernel. 8-bit floats come as raw bytes: not every GPU converts them,
# and Triton's interpreter takes their NaN and infinity for numbers.
_PLAIN = tl.constexpr(0)
_E4M3FN = tl.constexpr(1)
_E5M2 = tl.constexpr(2)
_BYTES = {torch.float8_e4m3fn: _E4M3FN.value, torch.float8_e5m2: _E5M2.value}
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, *_BYTES}
# Of these no square is out of range.
_NARROW = {torch.float16, *_BYTES}

# What the kernels that have run were compiled for: device, dtype, threshold, and what Triton makes
# kernels of their own for, an address or a number of elements that 16 divides, one, and 2**31.
_loaded: set[tuple[object, ...]] = set()

# The columns of a partial, in the order of `Column` from COUNT on.
_COLUMNS = tl.constexpr(9)
_COUNT = tl.constexpr(Column.COUNT.value)
_MIN = tl.constexpr(Column.MIN.value)


def is_loaded(x: torch.Tensor, exceed_threshold: float) -> bool:
    """Whether `add_fused` would run what has run before: nothing is compiled, nothing loaded."""
    return _kernel_of(in_memory_order(x), exceed_threshold) in _loaded


def _kernel_of(flat: torch.Tensor, exceed_threshold: float) -> tuple[object, ...]:
    n = flat.numel()
    aligned = (flat.data_ptr() % 16 == 0, n % 16 == 0, n == 1, n >= 2**31)
    return flat.device, flat.dtype, exceed_threshold, *aligned


def add_fused(x: torch.Tensor, row: torch.Tensor, exceed_threshold: float) -> None:
    """Count a call and add the elements of `x` (any shape, at least one) to `row` (COLUMNS,)."""
    flat = in_memory_order(x)
    kernel = _kernel_of(flat, exceed_threshold)
    if flat.dtype not in _DTYPES:
        flat = flat.float()  # rare 8-bit formats: one more pass
    n = flat.numel()
    double = flat.dtype is torch.float64
    kind = _BYTES.get(flat.dtype, _PLAIN.value)
    narrow = double or flat.dtype in _NARROW
    programs = min(triton.cdiv(n, _TILE * _TILES), _PROGRAMS)
    with torch.cuda.device_of(flat):  # type: ignore[no-untyped-call]
        partials = torch.empty(_COLUMNS.value, programs, dtype=torch.float64, device=flat.device)
        _gather[(programs,)](
            flat.view(torch.uint8) if kind else flat,
            partials,
            n,
            # A constant of the kernel, since an argument would be rounded to float32, maybe up.
            threshold=exceed_threshold if double else below(exceed_threshold),
            kind=kind,
            wide=not narrow,
            accumulator=tl.float64 if double else tl.float32,
            tile=_TILE,
            tiles=_TILES,
            enable_fp_fusion=True,  # Triton warns where it is not said
        )
        # As wide for few programs as for many: one kernel, which has run before whatever comes.
        _join[(1,)](partials, row, programs, block=_PROGRAMS, enable_fp_fusion=True)
    _loaded.add(kernel)


@triton.jit  # type: ignore[untyped-decorator]
def _gather(
    x: tl.tensor,
    partials: tl.tensor,
    n: int,
    threshold: tl.constexpr,
    kind: tl.constexpr,
    wide: tl.constexpr,
    accumulator: tl.constexpr,
    tile: tl.constexpr,
    tiles: tl.constexpr,
) -> None:
    """One pass over `x` (n,) into `partials` (9, programs), each program a strided share of it."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    start = program.to(tl.int64) * (tile * tiles)  # more than 2**31 elements are possible
    lanes = tl.arange(0, tile)
    # (9,) columns of this program, float64.
    count = tl.zeros((), tl.float64)
    total = tl.zeros((), tl.float64)
    squares = tl.zeros((), tl.float64)
    exceeded = tl.zeros((), tl.float64)
    nans = tl.zeros((), tl.float64)
    posinfs = tl.zeros((), tl.float64)
    neginfs = tl.zeros((), tl.float64)
    low = tl.full((), float("inf"), accumulator)
    high = tl.full((), float("-inf"), accumulator)
    chunks = tl.cdiv(n, tile * tiles)
    for _ in range(tl.cdiv(chunks - program, programs)):
        # (tile,) accumulators, one a lane.
        lane_count = tl.zeros((tile,), tl.int32)
        lane_exceeded = tl.zeros((tile,), tl.int32)
        lane_nans = tl.zeros((tile,), tl.int32)
        lane_posinfs = tl.zeros((tile,), tl.int32)
        lane_neginfs = tl.zeros((tile,), tl.int32)
        lane_low = tl.full((tile,), float("inf"), accumulator)
        lane_high = tl.full((tile,), float("-inf"), accumulator)
        sums = tl.zeros((tile,), accumulator)
        sums_big = tl.zeros((tile,), accumulator)
        squared = tl.zeros((tile,), accumulator)
        squared_big = tl.zeros((tile,), accumulator)
        squared_small = tl.zeros((tile,), accumulator)
        for index in range(tiles):
            offsets = start + index * tile + lanes
            inside = offsets < n
            raw = tl.load(x + offsets, mask=inside, other=0)
            value = _decode(raw, kind, accumulator)
            nan = value != value
            if kind == _E4M3FN:
                nan = (raw & 0x7F) == 0x7F
            posinf = value == float("inf")
            neginf = value == float("-inf")
            finite = inside & ~(nan | posinf | neginf)
            value = tl.where(finite, value, 0.0)
            size = tl.abs(value)
            lane_count += finite.to(tl.int32)
            lane_exceeded += (finite & (size > threshold)).to(tl.int32)
            lane_nans += (inside & nan).to(tl.int32)
            lane_posinfs += (inside & posinf).to(tl.int32)
            lane_neginfs += (inside & neginf).to(tl.int32)
            lane_low = tl.minimum(lane_low, tl.where(finite, value, float("inf")))
            lane_high = tl.maximum(lane_high, tl.where(finite, value, float("-inf")))
            if wide:
                big = tl.where(size > _BIG, value, 0.0) * _SHRINK
                small = tl.where(size < _SMALL, value, 0.0) * _GROW
                sums_big += big
                squared_big += big * big
                squared_small += small * small
                sums += tl.where(size > _BIG, 0.0, value)
                value = tl.where((size > _BIG) | (size < _SMALL), 0.0, value)
            else:
                sums += value
            squared += value * value
        count += tl.sum(lane_count, 0).to(tl.float64)
        exceeded += tl.sum(lane_exceeded, 0).to(tl.float64)
        nans += tl.sum(lane_nans, 0).to(tl.float64)
        posinfs += tl.sum(lane_posinfs, 0).to(tl.float64)
        neginfs += tl.sum(lane_neginfs, 0).to(tl.float64)
        low = tl.minimum(low, tl.min(lane_low, 0))
        high = tl.maximum(high, tl.max(lane_high, 0))
        sums_wide = sums.to(tl.float64)
        squared_wide = squared.to(tl.float64)
        if wide:
            sums_wide += sums_big.to(tl.float64) * (1 / _SHRINK)
            squared_wide += squared_big.to(tl.float64) * (1 / _SHRINK) * (1 / _SHRINK)
            squared_wide += squared_small.to(tl.float64) * (1 / _GROW) * (1 / _GROW)
        total += tl.sum(sums_wide, 0)
        squares += tl.sum(squared_wide, 0)
        start += programs.to(tl.int64) * (tile * tiles)
    mine = partials + program
    tl.store(mine, count)
    tl.store(mine + programs, total)
    tl.store(mine + 2 * programs, squares)
    tl.store(mine + 3 * programs, exceeded)
    tl.store(mine + 4 * programs, nans)
    tl.store(mine + 5 * programs, posinfs)
    tl.store(mine + 6 * programs, neginfs)
    tl.store(mine + 7 * programs, low.to(tl.float64))
    tl.store(mine + 8 * programs, high.to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def _decode(raw: tl.tensor, kind: tl.constexpr, accumulator: tl.constexpr) -> tl.tensor:
    """The values of `raw`, in the accumulator's type; NaN of float8_e4m3fn comes as a number."""
    if kind == _E5M2:  # the upper byte of a float16
        return (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(accumulator)
    if kind == _E4M3FN:  # a float16 with one exponent bit less, so its bias is 8 less
        sign = (raw & 0x80).to(tl.uint16) << 8
        half = sign | ((raw & 0x7F).to(tl.uint16) << 7)
        return half.to(tl.float16, bitcast=True).to(accumulator) * 256.0
    return raw.to(accumulator)


@triton.jit(do_not_specialize=["programs"])  # type: ignore[untyped-decorator]
def _join(partials: tl.tensor, row: tl.tensor, programs: int, block: tl.constexpr) -> None:
    """Add `partials` (9, programs) to `row` (10,), and one call to its first column."""
    tl.store(row, tl.load(row) + 1)
    lanes = tl.arange(0, block)
    inside = lanes < programs
    for column in tl.static_range(_COLUMNS):
        here = row + _COUNT + column
        old = tl.load(here)
        if column < _MIN - _COUNT:
            part = tl.load(partials + column * programs + lanes, mask=inside, other=0.0)
            tl.store(here, old + tl.sum(part, 0))
        elif column == _MIN - _COUNT:
            part = tl.load(partials + column * programs + lanes, mask=inside, other=float("inf"))
            tl.store(here, tl.minimum(old, tl.min(part, 0)))
        else:
            part = tl.load(partials + column * programs + lanes, mask=inside, other=float("-inf"))
            tl.store(here, tl.maximum(old, tl.max(part, 0)))
