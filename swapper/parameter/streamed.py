"""The choice of records, where weights stay in files, that are read in each round; the others stay in the pool."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch

from swapper.parameter.records import ParameterPlan, ParameterRecord, needs_of

__all__ = ["choose_streamed"]


def choose_streamed(model: torch.nn.Module, plan: ParameterPlan, budget_bytes: int) -> set[int]:
    """Choose the records that are read in each round, evenly spread. See [Note: streams] in `cache_policies`.

    The longest stay first: room for what arrives is then two of the longest that are left.

    Args:
        model, plan: as for `FileParameters`.
        budget_bytes: the most of the pool that records may hold.

    Returns:
        Their numbers; none if all have room.
    """
    passing = {record.number for record in plan.device_resident}  # To where they stay.
    records = [record for record in plan.records if record.number not in passing]
    for limit_bytes in sorted({record.length_bytes for record in records if record not in plan.resident}):
        moving = [r for r in records if r.length_bytes <= limit_bytes and r not in plan.resident]
        staying = set(records).difference(moving)
        needs = needs_of(model, records, staying, False, on_host=plan.device_needs is None)
        if needs.least_bytes <= budget_bytes:
            break
    else:
        return set()  # As little room as that is shared best by what is needed soonest.
    total_bytes = sum(record.length_bytes for record in moving)
    # Where longer ones stay a record or two more are streamed, so that four have room: the drive goes on while one is
    # used and another given up. What is read in a round is still within the sum that two of the longest make it.
    longest_bytes = max(record.length_bytes for record in records)
    more_bytes = max(0, min(2 * limit_bytes, 2 * longest_bytes - 3 * limit_bytes))
    left_bytes = min(total_bytes, total_bytes - (budget_bytes - needs.least_bytes) + more_bytes)
    if total_bytes + sum(record.length_bytes for record in staying) <= budget_bytes:
        return set()
    streamed: set[ParameterRecord] = set()
    due_bytes = chosen_bytes = 0
    for record in moving:  # Each is chosen when that brings the sum closer to its part of what is left.
        due_bytes += record.length_bytes
        if chosen_bytes * total_bytes < left_bytes * due_bytes - total_bytes * record.length_bytes // 2:
            streamed.add(record)
            chosen_bytes += record.length_bytes
    shortest_first = sorted(moving, key=lambda record: record.length_bytes)
    for record in shortest_first:
        if chosen_bytes < left_bytes and record not in streamed:
            streamed.add(record)
            chosen_bytes += record.length_bytes
    for record in reversed(shortest_first):
        if record in streamed and chosen_bytes - record.length_bytes >= left_bytes:
            streamed.remove(record)
            chosen_bytes -= record.length_bytes
    while swap := _closest_swap(streamed, shortest_first, chosen_bytes - left_bytes):
        streamed.symmetric_difference_update(swap)
        chosen_bytes -= swap[0].length_bytes - swap[1].length_bytes
    return passing.union(record.number for record in streamed)


def _closest_swap(
    streamed: set[ParameterRecord], shortest_first: Sequence[ParameterRecord], most_bytes: int
) -> tuple[ParameterRecord, ParameterRecord] | None:
    """Find one of `streamed`, and a shorter one of the others, that differ by as much of `most_bytes` as can be."""
    others = [record for record in shortest_first if record not in streamed]
    lengths_bytes = [record.length_bytes for record in others]
    best, best_bytes = None, 0
    for record in {record.length_bytes: record for record in shortest_first if record in streamed}.values():
        i = bisect.bisect_left(lengths_bytes, record.length_bytes - most_bytes)
        if i < len(others) and record.length_bytes - lengths_bytes[i] > best_bytes:
            best, best_bytes = (record, others[i]), record.length_bytes - lengths_bytes[i]
    return best
