"""`NativeSteps`: steps segments in one pass over memory, with the bits of the optimizer's class. See `step_recorder`.

Each step, and in it for each group and each distinct small state, the class steps a token: copies of the first elements
of a segment, and random ones. What it computed is replayed on the token, and compared, and only then on the segments.
It steps a part of the token in another shape, too: what it computes with must not depend on sizes.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from swapper.errors import ConfigError
from swapper.io.checksums import checksum
from swapper.optimizer.class_step import ClassStep
from swapper.optimizer.frozen import Unfrozen, frozen
from swapper.optimizer.master_codec import ties_bytes_max
from swapper.optimizer.native_parts import (
    IMMUTABLE,
    TOKEN_NUMEL,
    native_segment,
    parts_of,
    share_memory,
    token_of,
)
from swapper.optimizer.operands import Operand, Scratch, attributes_of
from swapper.optimizer.probe import has_only_elementwise_code, is_elementwise, state_after_steps
from swapper.optimizer.records import Encoded, OpenBucket
from swapper.optimizer.segments import OptimizerParameter, Segment
from swapper.optimizer.single_settings import has_manager
from swapper.optimizer.step_function import has_step_of_torch
from swapper.optimizer.step_program import (
    NativeProgram,
    NativeSegment,
    Unsupported,
    best_instruction_set,
    compiled,
    refusal,
    scratch_for,
    ways_of,
)
from swapper.optimizer.step_recorder import COPY, FIRST_STATE, FUSED, MAXIMUM, PARAMETER, Operation, StepRecorder
from swapper.process.interrupts import interrupts_deferred

__all__ = ["NativeOperand", "NativeSteps"]

log = logging.getLogger(__name__)

_TOKEN_MORE = 128
"""Other elements of a token, of each kind."""

_NUMEL_MIN = 64
_PROBE_LENGTHS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 64, 100, 257, 1003)
_OTHER_SIZES = (15, 2, 2)
"""Of the first dimensions of a token, at most `TOKEN_NUMEL` in all: the first is larger than the others together."""

_Flags = tuple[tuple[str, bool], ...]
"""True or False of each option of a group, by which the class may choose another way through its code."""

_KINDS = ("usual", "small", "bits")
_RECORDINGS_MAX = 64
"""In a step: each takes the time of about a million elements."""

_GROUP_NUMEL_MIN = 1 << 21
"""Elements of a group in one step from which on a native one saves more than its recordings cost."""

_OPERATIONS_MIN = 6
"""Of a step without masters, from which on one pass over memory is faster than one for each of them."""


@dataclass(eq=False, slots=True)
class NativeOperand:
    """An operand that is stepped natively.

    Attributes:
        small: its small state after the step, by key; of its recording, so tensors are to be cloned.
        result: count of ties and checksum of the bits, of a split master, when it was stepped.
    """

    operand: Operand
    program: NativeProgram
    segment: NativeSegment
    small: Mapping[str, Any]
    result: tuple[int, int] = (0, 0)


@dataclass(eq=False, slots=True)
class _Case:
    """All that a class may read of a parameter that it steps, but for its elements.

    Attributes:
        number: of its group.
        dims: of its shape.
        keys: of its state tensors that are as long as it is.
        small: the rest of its state.
        attributes: what the user has set on it.
    """

    optimizer: Optimizer
    number: int
    dims: int
    keys: list[str]
    small: Mapping[str, Any]
    attributes: Mapping[str, Any]


@dataclass(eq=False, slots=True)
class _Recording:
    """The operations of the class on a token. If `program` is None, the class makes the step."""

    program: NativeProgram | None
    small: dict[str, Any] = field(default_factory=dict)
    writes_gradient: bool = False
    operations: Sequence[Operation] = ()


@dataclass(eq=False, slots=True)
class _Recorded:
    """A recording, the tensors that the class has stepped, and those that it was given."""

    recorder: StepRecorder
    before: list[Tensor]
    after: list[Tensor]
    small: dict[str, Any]


class NativeSteps:
    """Steps what it can of a bucket.

    Args:
        class_step: calls the optimizer's class.
        mode: "on": all that it can; "auto": of that, what is faster than the class; "off": nothing.
    """

    def __init__(self, class_step: ClassStep, mode: Literal["auto", "on", "off"]) -> None:
        self.enabled = mode != "off"
        self._class_step = class_step
        self._chooses = mode == "auto"
        self._set = best_instruction_set() if self.enabled else 0
        self._recordings: dict[tuple[Any, ...], _Recording] = {}  # of this step
        self._is_elementwise: bool | None = None  # the class, in this step; None: not asked yet
        self._is_declared = True  # it has no code but that of a class that is known to be elementwise
        self._numel: Counter[int] = Counter()  # of each group, in this step
        self._recorded_of: Counter[int] = Counter()  # recordings of each group, in this step
        self._flags: dict[int, _Flags | None] = {}  # of each group, in this step; None if its options have no key
        self._short: set[_Flags] = set()  # of groups whose steps are few operations
        self._room: Tensor | None = None  # for roots; of this step
        self._ways: dict[tuple[Any, ...], int | None] = {}
        self._reasons: set[str] = set()
        self._is_told = False

    def begin_step(self, segments: Iterable[Segment]) -> None:
        """A step of `segments` begins; or goes on after the user's code, as in a backward, with the same options."""
        self._is_elementwise = None
        if not self._numel:
            self._count((segment.of.group, segment.numel) for segment in segments)

    def _count(self, numels: Iterable[tuple[int | None, int]]) -> None:
        for number, numel in numels:
            if number is not None:
                self._numel[number] += numel

    def forget(self) -> None:
        """A step is over: what was recorded is not true of the next one."""
        self._recordings.clear()
        self._flags.clear()
        self._numel.clear()
        self._recorded_of.clear()
        self._is_elementwise = None
        self._room = None

    def announce(self, optimizer: Optimizer, planned: Sequence[OptimizerParameter]) -> None:
        """Try the class before its first step, so that the log says which way is taken.

        Args:
            planned: what it will step.
        """
        if not self.enabled or not is_elementwise(optimizer) or has_manager(optimizer):
            return
        self._count((of.group, of.numel) for of in planned)
        kinds = {
            (of.group, of.parameter.dim() if of.segments[0].whole else 1)
            for of in planned
            if of.group is not None and (of.segments[0].master or of.dtype is torch.float32)
        }
        tried: set[tuple[Hashable, int]] = set()
        for number, dims in sorted(kinds):
            if self._is_small(number):
                continue
            options = self._frozen_options(optimizer, number)
            if options is not None and (options, dims) not in tried and len(tried) < _RECORDINGS_MAX:
                tried.add((options, dims))
                self.probe(optimizer, number, dims)
        self.forget()

    def probe(self, optimizer: Optimizer, number: int, dims: int) -> str:
        """Try the class with the options of group `number`. Returns why it is not stepped natively, or ""."""
        shape = (*[1] * (dims - 1), TOKEN_NUMEL)
        try:
            state = state_after_steps(optimizer, optimizer.param_groups[number], shape)
            large = [key for key, value in state.items() if isinstance(value, Tensor) and value.shape == shape]
            small = {key: value for key, value in state.items() if key not in large}
            frozen(small)
            case = _Case(optimizer, number, dims, large, small, {})
            token = _probe_token(TOKEN_NUMEL, 2 + len(large), torch.Generator().manual_seed(0), _KINDS[0])
            operations = self._recorded_twice(case, token).recorder.operations
            compiled(operations, len(large), self._way(case, operations))
            self._note_length(optimizer.param_groups[number], operations)
        except ConfigError as error:  # Found when it was planned, or only in this probe: then the step says so.
            return str(error)
        except (Unsupported, Unfrozen) as error:
            self._tell(optimizer, str(error))
            return str(error)
        finally:
            self._class_step.abandon()  # What the class changed in its groups.
        return ""

    def choose(
        self,
        optimizer: Optimizer,
        operands: Sequence[Operand],
        opened: OpenBucket,
        scratch: Scratch,
        edited: Mapping[OptimizerParameter, object],
        apart: bool,
    ) -> list[NativeOperand]:
        """Return the `operands` that `run` can step. Nothing is written but `scratch`.

        Args:
            edited: False for those that the user is known not to have changed, nor can have until the step is over.
            apart: it is known that none of them shares memory with another.

        Raises:
            SwapError: a stored master is damaged.
        """
        if not self.enabled:
            return []
        if self._is_elementwise is None:
            # With settings of single parameters a group's options are not all that the class goes by.
            self._is_elementwise = is_elementwise(optimizer) and not has_manager(optimizer)
            self._is_declared = has_only_elementwise_code(type(optimizer))
        if not self._is_elementwise or (torch.get_num_threads() > 1 and _flushes_denormals()):
            return []  # torch's threads do as that one that made them did.
        some = [each for each in operands if self._may_step(optimizer, each.segment)]
        if not some or any(each.segment.of.collective for each in operands):
            return []
        if not apart and share_memory([each.segment for each in operands if each.bits is None], operands):
            return []
        address = opened.address()
        found = (self._choose_one(optimizer, each, opened, address, scratch, edited) for each in some)
        return [each for each in found if each is not None]

    def _may_step(self, optimizer: Optimizer, segment: Segment) -> bool:
        number = segment.of.group
        assert number is not None
        if self._is_small(number):
            return False
        if number not in self._flags:
            has_key = self._frozen_options(optimizer, number) is not None
            self._flags[number] = _flags(optimizer.param_groups[number]) if has_key else None
        flags = self._flags[number]
        return flags is not None and not (self._chooses and not segment.master and flags in self._short)

    def _is_small(self, number: int) -> bool:
        """True if the recordings of this group would take longer than they save."""
        return self._chooses and self._numel[number] < _GROUP_NUMEL_MIN

    def _note_length(self, group: Mapping[str, Any], operations: Sequence[Operation]) -> None:
        if len(operations) < _OPERATIONS_MIN:
            self._short.add(_flags(group))

    def run(self, chosen: Sequence[NativeOperand]) -> None:
        """Step `chosen`, and note the `result` of each. Their small state is `keep`'s.

        Raises:
            SwapError: a stored master is damaged, or a step refused. Nothing of the parameter was written.
        """
        arrays = max([each.program.scratch_arrays for each in chosen], default=0)
        numel = max([each.segment.numel for each in chosen if each.program.scratch_arrays], default=0)
        if self._room is None or arrays > self._room.shape[0] or numel > self._room.shape[1]:
            self._room = scratch_for(arrays, numel)  # The class would make as much.
        threads = torch.get_num_threads()
        by_program: dict[int, list[NativeOperand]] = {}
        for each in chosen:
            by_program.setdefault(id(each.program), []).append(each)
        for mine in by_program.values():
            try:
                results = mine[0].program.run([each.segment for each in mine], self._room, threads, self._set)
            except ValueError as error:
                raise refusal(error) from error
            for each, result in zip(mine, results, strict=True):
                each.result = result

    def keep(self, each: NativeOperand) -> None:
        """Keep the small state after the step."""
        small = each.operand.segment.small
        for key, value in each.small.items():
            small[key] = value.clone() if isinstance(value, Tensor) else value

    def encoded(self, chosen: Sequence[NativeOperand]) -> Encoded:
        """Return what `OpenBucket.place_ties` needs to know of split masters that were written."""
        return {
            each.operand.segment: (*each.result, each.segment.new_ties, each.operand.bits)
            for each in chosen
            if each.segment.new_ties and each.operand.bits is not None
        }

    # --- One operand -----------------------------------------------------------------------------------------------

    def _choose_one(
        self,
        optimizer: Optimizer,
        operand: Operand,
        opened: OpenBucket,
        address: int,
        scratch: Scratch,
        edited: Mapping[OptimizerParameter, object],
    ) -> NativeOperand | None:
        segment = operand.segment
        if segment.numel < _NUMEL_MIN or operand.edited is not False:
            return None
        if segment.master and not isinstance(segment.checksum, int):
            return None
        if segment.learnt and not segment.keys:
            return None  # The first step, which makes state.
        parts = parts_of(operand, opened, address)
        if parts is None or (segment.whole and not self._is_declared):
            return None
        attributes = attributes_of(segment.of)
        dims = segment.parameter.dim() if segment.whole else 1
        try:
            seen = frozen(attributes) if attributes else None
            # Without the group's options, which are read once a step: they take long to hash.
            key = (segment.of.group, dims, frozen(parts.small), seen, parts.keys)
        except Unfrozen as unfrozen:
            self._tell(optimizer, f"an attribute of a parameter, or of its state: {unfrozen}")
            return None
        recording = self._recordings.get(key)
        if recording is not None and recording.program is None:
            return None
        if segment.master and edited.get(segment.of) is not False and segment.checksum != checksum(parts.values):
            return None  # It was edited: the class's own way notes that.
        if recording is None:
            if len(self._recordings) >= _RECORDINGS_MAX:
                self._tell(optimizer, f"more than {_RECORDINGS_MAX} different attributes and small states in a step")
                return None
            number = segment.of.group
            assert number is not None
            if self._chooses and (self._recorded_of[number] + 1) * _GROUP_NUMEL_MIN > self._numel[number]:
                return None
            self._recorded_of[number] += 1
            case = _Case(optimizer, number, dims, list(parts.keys), parts.small, attributes)
            recording = self._recordings[key] = self._record(case, token_of(segment, opened, parts))
            if recording.operations and not segment.master:
                self._note_length(optimizer.param_groups[number], recording.operations)
        if recording.program is None or (recording.writes_gradient and not segment.master):
            return None
        is_encoded = segment.is_split and recording.program.writes_parameter  # Else its master is what it was.
        new_ties = scratch.take_bytes(ties_bytes_max(segment.numel)) if is_encoded else 0
        native = native_segment(segment, opened, parts, address, new_ties, scratch, recording.program.in_memory)
        return NativeOperand(operand, recording.program, native, recording.small)

    def _frozen_options(self, optimizer: Optimizer, number: int) -> Hashable:
        try:
            return frozen(dict(_options(optimizer.param_groups[number])))
        except Unfrozen as unfrozen:
            self._tell(optimizer, f"an option of a group: {unfrozen}")
            return None

    def _record(self, case: _Case, first: Sequence[Tensor]) -> _Recording:
        """Have the class step a token: `first`, of real elements, and others."""
        generator = torch.Generator().manual_seed(first[0].numel())
        # Of real elements most updates are far smaller than the parameter, and their last bits do not show.
        more = [_probe_token(_TOKEN_MORE, 2 + len(case.keys), generator, kind) for kind in _KINDS[1:]]
        token = [torch.cat(parts) for parts in zip(*more, first, strict=True)]
        try:
            recorded = self._recorded_twice(case, token)
            operations = recorded.recorder.operations
            program = compiled(operations, len(case.keys), self._way(case, operations))
        except Unsupported as unsupported:
            self._tell(case.optimizer, str(unsupported))
            return _Recording(None)
        if not self._agrees(program, recorded):
            log.warning(
                "%s: a native step gave other bits than the class's own; the class steps as before",
                _name(case.optimizer),
            )
            self.enabled = False
            return _Recording(None)
        return _Recording(program, recorded.small, recorded.recorder.writes_gradient, operations)

    def _recorded_twice(self, case: _Case, token: Sequence[Tensor]) -> _Recorded:
        """As `_recorded`, of a class that does the same to elements of a parameter that has other sizes.

        Raises:
            Unsupported: it does not, or cannot be recorded.
        """
        recorded = self._recorded(case, token)
        sizes = [_OTHER_SIZES[i] if i < len(_OTHER_SIZES) else 1 for i in range(max(case.dims, 1))]
        other = self._recorded(case, [each[: math.prod(sizes)] for each in token], sizes)
        if other.recorder.operations != recorded.recorder.operations:
            raise Unsupported("a number that is not the same for parameters of other sizes")
        return recorded

    def _recorded(self, case: _Case, token: Sequence[Tensor], sizes: Sequence[int] = ()) -> _Recorded:
        """Have the class step `token`: parameter, gradient and large state, which are copied before.

        Args:
            sizes: of its shape; none: all elements in the last dimension.

        Raises:
            Unsupported: it cannot be recorded.
        """
        shape = sizes or [1] * (case.dims - 1) + [token[0].numel()]
        values, gradient, *large = (each.clone().view(shape) for each in token)
        parameter = torch.nn.Parameter(values)
        parameter.grad = gradient
        vars(parameter).update(copy.deepcopy(dict(case.attributes)))
        given = dict(zip(case.keys, large, strict=True))
        state = {
            key: given[key] if key in given else value.clone() if isinstance(value, Tensor) else value
            for key, value in {**case.small, **given}.items()
        }
        recorder = StepRecorder([parameter, gradient, *large])
        address = gradient.data_ptr()
        with interrupts_deferred():  # A millisecond, in which the optimizer has the attributes of a copy.
            left = self._class_step.record(case.optimizer, case.number, parameter, state, recorder)
        if recorder.reason is not None:
            raise Unsupported(recorder.reason)
        if left is None or recorder.register_of(parameter) != PARAMETER or left.keys() != state.keys():
            raise Unsupported("the class does more than arithmetic on state that is there")
        if _attributes_key(vars(parameter)) != _attributes_key(case.attributes):
            raise Unsupported("the class changes an attribute of a parameter")
        if parameter.grad is not gradient or gradient.data_ptr() != address:
            recorder.writes_gradient = True  # The user sees what the class has put in its place, or that it is gone.
        if any(each.opcode == MAXIMUM for each in recorder.operations) and not has_step_of_torch(case.optimizer):
            raise Unsupported("a maximum, which of 0.0 and -0.0 is another in torch's vectors than after them")
        small_after = {}
        for key, value in left.items():
            if key in given:
                self._note_assigned(recorder, value, FIRST_STATE + case.keys.index(key))
                given[key] = value
            elif isinstance(value, IMMUTABLE) or (isinstance(value, Tensor) and value.dim() == 0):
                small_after[key] = value
            else:
                raise Unsupported(f"state {key!r} has changed its kind")
        after = [parameter.detach(), *(given[key] for key in case.keys)]
        return _Recorded(recorder, list(token), after, small_after)

    def _note_assigned(self, recorder: StepRecorder, value: object, register: int) -> None:
        """The class may leave a tensor that it made in the place of its state."""
        found = recorder.register_of(value) if isinstance(value, Tensor) else None
        if found is None or (found != register and found < recorder.states_stop):
            raise Unsupported("state was replaced by another tensor")
        if found != register:
            recorder.operations.append(Operation(COPY, register, found, found, found))

    def _way(self, case: _Case, operations: Sequence[Operation]) -> int:
        """Find by a trial the best of `ways_of(operations)` that has the class's bits.

        Raises:
            Unsupported: none has, or the core has no way.
        """
        flags = _flags(case.optimizer.param_groups[case.number])
        shape = tuple((each.opcode, each.out, each.a, each.b, each.c) for each in operations)
        key = (flags, shape, case.dims, torch.get_num_threads())
        if key not in self._ways:
            self._ways[key] = self._try(case, operations)
        found = self._ways[key]
        if found is None:
            raise Unsupported("a trial, which gave other bits than the class's own step")
        if not self._is_told:
            self._is_told = True
            log.info("%s is stepped natively, with the bits of its class", _name(case.optimizer))
        return found

    def _try(self, case: _Case, operations: Sequence[Operation]) -> int | None:
        ways = ways_of(operations)
        left = _compilable(operations, len(case.keys), ways)
        is_fused = any(each.opcode in FUSED for each in operations)
        generator = torch.Generator().manual_seed(0)
        for numel in _PROBE_LENGTHS:
            for kind in (*_KINDS, *(["zeros"] if is_fused else [])):
                if not left:  # A class that is compiled would be compiled for each length, and for so many only.
                    return None
                recorded = self._recorded(case, _probe_token(numel, 2 + len(case.keys), generator, kind))
                for way in sorted(left):
                    program = compiled(recorded.recorder.operations, len(case.keys), way)
                    if not self._agrees(program, recorded):
                        left.remove(way)
        return next((each for each in ways if each in left), None)

    def _agrees(self, program: NativeProgram, recorded: _Recorded) -> bool:
        """True if `program` gives what the class gave."""
        values, gradient, *large = (each.clone() for each in recorded.before)
        numel = values.numel()
        state = [each.data_ptr() for each in large]
        segment = NativeSegment(numel, values.data_ptr(), 0, 0, 0, 0, 0, gradient, state, large.__getitem__)
        program.run([segment], scratch_for(program.scratch_arrays, numel), 1, self._set)
        return all(_same(mine, other.reshape(-1)) for mine, other in zip([values, *large], recorded.after, strict=True))

    def _tell(self, optimizer: Optimizer, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            log.info("%s is stepped by its own class, because of %s", _name(optimizer), reason)


def _compilable(operations: Sequence[Operation], state: int, ways: Sequence[int]) -> set[int]:
    """Return which of `ways` the core has for `operations`, of so many state tensors.

    Raises:
        Unsupported: it has none.
    """
    left, reason = set(), None
    for way in ways:
        try:
            compiled(operations, state, way)
            left.add(way)
        except Unsupported as unsupported:
            reason = unsupported
    if not left and reason is not None:
        raise reason
    return left


def _flushes_denormals() -> bool:
    """True if this thread takes denormals for zero, as after `torch.set_flush_denormal`."""
    return sys.float_info.min / 2 == 0


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _options(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted((key, value) for key, value in group.items() if key not in ("params", "param_names"))


def _flags(group: Mapping[str, Any]) -> _Flags:
    return tuple((key, bool(value)) for key, value in _options(group))


def _attributes_key(attributes: Mapping[str, Any]) -> Hashable:
    try:
        return frozen(dict(attributes))
    except Unfrozen:
        return None


def _probe_token(numel: int, count: int, generator: torch.Generator, kind: str) -> list[Tensor]:
    """Random tensors: of usual sizes; with a parameter so small that each bit of its update shows; or random bits,
    denormals, infinities and NaNs among them; or those and as many zeros of both signs.
    """
    if kind in ("bits", "zeros"):
        bits = torch.randint(-(1 << 31), 1 << 31, (count, numel), generator=generator, dtype=torch.int64, device="cpu")
        if kind == "zeros":
            bits &= torch.where(torch.rand(count, numel, generator=generator, device="cpu") < 0.5, -(1 << 31), -1)
        return list(bits.to(torch.int32).view(torch.float32))
    values = torch.randn(count, numel, generator=generator, dtype=torch.float32, device="cpu")
    if kind == "small":
        values[0] *= 2.0**-40
        values[2:].abs_()  # Else the root of half of them is NaN.
    return list(values)


def _same(a: Tensor, b: Tensor) -> bool:
    """True if each element has the same bits, or is a NaN in both."""
    alike = a.view(torch.int32) == b.contiguous().view(torch.int32)
    return bool((alike | (a.isnan() & b.isnan())).all())
