"""Cuts of a parameter into the segments that an elementwise optimizer steps on, by arithmetic on counts of elements.

[Note: cuts that keep the bits]
PyTorch computes most elements of an elementwise kernel with vector instructions and the rest, the *scalar
tail*, one by one; the two may round differently. Stepping a parameter in segments is bit-equal to stepping it
whole if, and only if, each element is in a vector in both or in a tail in both.

A kernel that runs over `n` contiguous elements takes vectors in steps of 16, 32 or 64 elements (two registers;
by dtype and instruction set) and leaves `n % step` for the tail. So a cut at a multiple of 64 elements from the
start moves no element from one side to the other.

With several threads the kernel runs over *chunks*. `at::parallel_for(0, n, grain)` with `grain` = 32768 makes
one chunk if `n <= grain`; else `k = min(threads, ceil(n / grain))` chunks of `ceil(n / k)` elements, the last one
shorter (ATen/Parallel-inl.h, ATen/ParallelOpenMP.h). A chunk's length is any number, so each chunk has a tail.
Worked: 100001 elements, 2 threads: chunks [0, 50001) and [50001, 100001). With 64-element vector steps the tails
are [49984, 50001) and [99985, 100001). A cut at 50048 would put 49984..50000 in vectors.

Which rule is needed (measured by `tests/test_exactness_of_cuts.py`):

- fp32 and fp64, not fused: the first. Their tails round as their vectors do; only NaNs may get other bits in a
  tail (in the maxima of amsgrad and Adamax), and with the second rule not even those.
- `fused=True`, any dtype: the first. These kernels split among threads at multiples of 64 bytes, whatever the grain,
  so that only the parameter's own end is a tail; it rounds differently even in fp32.
- bf16 and fp16, not fused: both. With one thread, or at most 32768 elements, there is one chunk.
- A class that is not torch's: both, in any dtype. It may call kernels whose tails round otherwise than their vectors
  in fp32 too, as `pow`, `atan2` and `softplus`; a trial would miss the few elements that show it.

For the second rule `low_precision=True` cuts so that

- each chunk of the whole parameter starts a segment, except inside a segment that PyTorch splits at the same places;
- other cuts are at multiples of 64 elements from the start of their chunk;
- a segment of more than 32768 elements, which is itself split among threads, is split at such places too.

The parameter, its gradient and its state must be contiguous, or dense with the same strides and cut in the order of
memory; then any alignment of any of them will do. A gradient of other strides takes other loops: step it whole.
The second rule holds for the thread count at the time of the step: after `torch.set_num_threads`, plan the cuts anew.
"""

from __future__ import annotations

import itertools

from swapper.sizes import round_up

__all__ = ["CUT_NUMEL", "segment_cuts", "segment_keeps_bits"]

CUT_NUMEL = 64
"""Segments are cut at multiples of this: the widest step of torch's vector loops (two registers of 32 bf16)."""

_GRAIN_NUMEL = 32768
"""`at::internal::GRAIN_SIZE`: kernels over at most this many elements are not split among threads."""


def segment_cuts(
    numel: int, numel_max: int, *, low_precision: bool, threads: int, cut_numel: int = CUT_NUMEL
) -> tuple[tuple[int, int], ...]:
    """Cut a flattened parameter into the segments on which an elementwise optimizer steps with the same bits.

    See [Note: cuts that keep the bits]. Each segment's state is to start at a multiple of `ALIGNMENT_BYTES` in a
    buffer of its own; the parameter and its gradient may lie anywhere, but contiguous.

    Args:
        numel: elements of the parameter, >= 0.
        numel_max: most elements of a segment, >= `cut_numel`. At `low_precision` use 32768 or more: with less,
            each segment is stepped by one thread.
        low_precision: the parameter is stepped in fp16 or bf16, or by a class that is not torch's, by kernels that
            are not fused. False for fp32 and fp64, for fp32 masters (True would be exact there too, with more
            segments), and with `fused=True`, whatever the dtype: with fused kernels the cuts for True would be wrong.
        threads: `torch.get_num_threads()` in the thread that will call `step`, >= 1; of no effect unless
            `low_precision`.
        cut_numel: without `low_precision` cuts are at multiples of this, which is one of `CUT_NUMEL`.

    Returns:
        `(start, stop)` of each segment, in order, without holes or overlap, none empty, none longer than
        `numel_max`; `()` if `numel` is 0; one segment if `numel <= numel_max`.

        Without `low_precision` all starts are multiples of `cut_numel`, lengths differ by at most 2 * `cut_numel`,
        and there are as few as `numel_max` rounded down to a multiple of `cut_numel` allows.

        With it, `segment_keeps_bits` is true of each. Where chunks are ragged and longer than 32768, each takes a
        segment or more of its own, often two, the last of any length from 1 to 32768: at worst about 2 * `threads`
        segments more than without. Where chunks are multiples of 64 (most layers, on a power of two of threads) about
        one more.

    Raises:
        ValueError: `numel_max` is less than `cut_numel`, `numel` is negative, or `threads` is less than 1.
    """
    if numel < 0 or threads < 1:
        raise ValueError(f"numel is {numel} and must be >= 0; threads is {threads} and must be >= 1")
    if numel_max < cut_numel:
        raise ValueError(f"numel_max is {numel_max}: a segment needs room for {cut_numel} elements")
    if numel <= numel_max:
        return ((0, numel),) if numel else ()
    if not low_precision or _pieces(numel, threads) == 1:
        return _even_cuts(numel, numel_max, cut_numel)
    return _cuts_of_chunks(numel, numel_max, threads)


def _pieces(numel: int, threads: int) -> int:
    """Into how many chunks `at::parallel_for` splits `numel` >= 1 elements."""
    return min(threads, -(-numel // _GRAIN_NUMEL))


def _chunk_numel(numel: int, threads: int) -> int:
    """Elements of each chunk but the last."""
    return -(-numel // _pieces(numel, threads))


def _outer_chunk_numel(numel: int, threads: int) -> int:
    """Distance of the chunks' starts that cuts must respect: `numel` where no chunk but the last has a tail."""
    chunk = _chunk_numel(numel, threads)
    return numel if chunk % CUT_NUMEL == 0 else chunk


def segment_keeps_bits(start: int, stop: int, numel: int, threads: int) -> bool:
    """Tell if stepping on a segment of `numel` elements has the same in scalar tails as stepping whole, at any width.

    This is the rule for `low_precision`, as a check: it knows nothing of how cuts are made. A False says that
    bits may differ on some machine, not that they do on this one.
    """
    outer = _outer_chunk_numel(numel, threads)
    inner = _chunk_numel(stop - start, threads)
    for piece_start in range(start, stop, inner):
        piece_stop = min(stop, piece_start + inner)
        chunk_start = piece_start // outer * outer
        chunk_stop = min(numel, chunk_start + outer)
        starts_on_a_vector = (piece_start - chunk_start) % CUT_NUMEL == 0
        ends_on_a_vector = piece_stop < chunk_stop and (piece_stop - chunk_start) % CUT_NUMEL == 0
        if not (starts_on_a_vector and (ends_on_a_vector or piece_stop == chunk_stop)):
            return False
    return True


def _even_cuts(numel: int, numel_max: int, cut_numel: int) -> tuple[tuple[int, int], ...]:
    """Fewest segments of at most `numel_max`, cut at multiples of `cut_numel`, of about one length."""
    units = -(-numel // cut_numel)
    count = -(-units // (numel_max // cut_numel))
    edges = [units * i // count * cut_numel for i in range(count)] + [numel]
    return tuple(itertools.pairwise(edges))


def _cuts_of_chunks(numel: int, numel_max: int, threads: int) -> tuple[tuple[int, int], ...]:
    """`segment_cuts` where the whole parameter is stepped in more than one chunk and does not fit one segment."""
    chunk = _outer_chunk_numel(numel, threads)
    count = -(-numel // chunk)
    # A run of whole chunks, none above the grain, is split where its chunks meet, so it can be one segment.
    chunks_max = max(1, numel_max // chunk) if chunk <= _GRAIN_NUMEL else 1
    runs = -(-count // chunks_max)
    edges = [chunk * (count * i // runs) for i in range(runs)] + [numel]
    cuts: list[tuple[int, int]] = []
    for start, stop in itertools.pairwise(edges):
        last = (count - 1) * chunk
        if stop - start <= numel_max and segment_keeps_bits(start, stop, numel, threads):
            cuts.append((start, stop))
        elif start < last < stop:
            # The last chunk is so much shorter than the others that this run would be split elsewhere.
            cuts += [(start, last), (last, stop)]
        else:
            cuts += _cuts_in_chunk(start, stop, numel_max, threads)
    return tuple(cuts)


def _cuts_in_chunk(start: int, stop: int, numel_max: int, threads: int) -> tuple[tuple[int, int], ...]:
    """Cuts of one chunk: segments that are split without a tail, then one that ends as the chunk does.

    The last is not longer than the grain, so not split, unless a longer one would be split without a tail too.
    """
    body_max = _longest_without_tail(numel_max, threads)
    edges: list[int] = []
    for tail_max in (numel_max, min(numel_max, _GRAIN_NUMEL)):
        edges = [start]
        while (left := stop - edges[-1]) > tail_max:
            bodies = -(-(left - tail_max) // body_max)
            # Even lengths, unless the last would then be longer than `tail_max`.
            aim = min(body_max, max(-(-left // (bodies + 1)), -(-(left - tail_max) // bodies)))
            length = round_up(aim, CUT_NUMEL * _pieces(aim, threads))
            if length >= left:  # more than 512 threads: the multiple is longer than a grain
                length = _longest_without_tail(left - 1, threads)
            edges.append(edges[-1] + length)
        if _pieces(left, threads) == 1 or _chunk_numel(left, threads) % CUT_NUMEL == 0:
            break
    return tuple(itertools.pairwise([*edges, stop]))


def _longest_without_tail(numel_max: int, threads: int) -> int:
    """Largest length <= `numel_max` whose chunks all are multiples of `CUT_NUMEL`."""
    pieces = _pieces(numel_max, threads)
    length = numel_max // (CUT_NUMEL * pieces) * (CUT_NUMEL * pieces)
    # Rounding down may cross into the range of one piece less; that range's upper end is a multiple of what it needs.
    return length if _pieces(length, threads) == pieces else (pieces - 1) * _GRAIN_NUMEL
