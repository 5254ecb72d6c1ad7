"""`StepRecorder`: notes what an optimizer's class computes, as operations of the native core. See [Note: native steps].

[Note: native steps] The class's own unhooked `step` is run on a token, a few elements of a real segment, while a
`TorchDispatchMode` sees each operation of torch that it calls. Those on the token's tensors are noted, with the numbers
that the class's own Python has computed; `csrc/native_step.h` then does the same to all elements, in one pass over
memory. Nothing of a class is known here, and nothing is believed: the token that was recorded has the class's own
answer, and the replay of the recording must give the same bits on the same token before anything else is written. What
holds an operation that is not in the tables below is stepped by the class, as are the first steps, which make state.

torch's `sqrt` is a vendor's on x86, and not the nearest float. The core calls the vendor's function where it finds it;
else `torch.sqrt` is called, on whole segments, between two programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["COPY", "FUSED", "MAXIMUM", "SQRT", "Operation", "StepRecorder"]

# As in csrc/step_program.h.
COPY, _NEG, _ABS, _SIGN, _RECIPROCAL, _ADD, _ADD_NUMBER, _MUL, _MUL_NUMBER = range(9)
_DIV, _DIV_NUMBER, _LERP, _ADDCMUL, _ADDCDIV, _FUSED_ADAM, _FUSED_SGD, MAXIMUM, _FUSED_ADAGRAD = range(9, 18)
_RSQRT, _FILL, _CLAMP_MIN, _CLAMP_MAX, SQRT = range(18, 23)
FUSED = (_FUSED_ADAM, _FUSED_SGD, _FUSED_ADAGRAD)
"""Opcodes of torch's fused kernels."""

PARAMETER, GRADIENT, FIRST_STATE = 0, 1, 2
"""Registers."""

_UNARY = {
    "clone": COPY,
    "neg": _NEG,
    "abs": _ABS,
    "sign": _SIGN,
    "reciprocal": _RECIPROCAL,
    "rsqrt": _RSQRT,
    "sqrt": SQRT,
}
_POWERS = {0.5: SQRT, -0.5: _RSQRT, -1.0: _RECIPROCAL}
_FILLED = {"zero": 0.0, "zeros_like": 0.0, "ones_like": 1.0}


@dataclass(frozen=True)
class Operation:
    """`out = opcode(a, b, c)` with `constants`. Registers that it does not need are `a`."""

    opcode: int
    out: int
    a: int
    b: int
    c: int
    constants: tuple[float, ...] = ()
    contraction: int = 0

    @property
    def reads(self) -> set[int]:
        """The registers whose content counts."""
        registers = {self.a, self.b, self.c}
        return registers | {PARAMETER, GRADIENT} if self.opcode in FUSED else registers

    @property
    def writes(self) -> set[int]:
        """The registers that it changes."""
        return {self.out, self.a, self.b, self.c} if self.opcode in FUSED else {self.out}

    def reading(self, to: Callable[[int], int]) -> Operation:
        """The same, which reads other registers."""
        return replace(self, a=to(self.a), b=to(self.b), c=to(self.c))


class _Unsupported(Exception):
    """The operation cannot be noted."""


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, what is computed with some tensors is noted.

    Args:
        tensors: parameter, gradient and state of a token: float32 on the CPU, contiguous, of one numel, and without a
            byte in common.

    Attributes:
        operations: in order; complete only if `reason` is None.
        registers: count of those that are used.
        states_stop: the first register that is neither parameter, gradient nor state.
        writes_gradient: the gradient was written to, in a register of its own.
        reason: what could not be noted; None if all was.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.registers = 0
        self.writes_gradient = False
        self.reason: str | None = None
        self._numel = tensors[0].numel()
        self._places: dict[int, int] = {}
        self._storages: set[int] = set()
        self._kept: list[Tensor] = []  # So that no address comes twice.
        for tensor in tensors:
            self._add(tensor)
        self.states_stop = self.registers

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: torch.compile compiles within it, too. Else it would leave the function uncompiled for good."""
        return True  # What older versions of torch ask; newer ones ask the next.

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As `is_infra_mode`. What compiled code computes is not seen, so its replay has other bits and is not used."""
        return True

    def register_of(self, tensor: Tensor) -> int | None:
        """The register that `tensor` is; None if it is none."""
        whole = tensor.dtype is torch.float32 and tensor.numel() == self._numel and tensor.is_contiguous()
        return self._places.get(tensor.data_ptr()) if whole and self._knows(tensor) else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, and note it if it is given one of the tensors. Called by torch.

        Raises:
            RuntimeError: it draws random numbers.
        """
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:  # Before it draws: the class draws again in its own step.
            raise RuntimeError(f"{func} draws random numbers")
        concerned = any(self._knows(tensor) for tensor in _tensors_in([*args, *kwargs.values()]))
        if not concerned or self.reason is not None:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        try:
            self._note(func, args, kwargs, result)
        except _Unsupported as unsupported:
            self.reason = f"{func}{unsupported}"
        return result

    def _knows(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in self._storages

    def _add(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        self._storages.add(tensor.untyped_storage().data_ptr())
        self._places[tensor.data_ptr()] = self.registers
        self.registers += 1
        return self.registers - 1

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        given |= kwargs
        name = func._schema.name.removeprefix("aten::")
        if name in ("detach", "alias", "view", "_unsafe_view", "view_as"):
            if not isinstance(result, Tensor) or self.register_of(result) is None:
                raise _Unsupported(" of a part")
            return
        if name in ("_fused_adam_", "_fused_adamw_"):
            self._note_fused_adam(given, decoupled=name == "_fused_adamw_")
        elif name == "_fused_sgd_":
            self._note_fused_sgd(given)
        elif name == "_fused_adagrad_":
            self._note_fused_adagrad(given)
        elif not name.startswith("_foreach_"):
            self._note_one(name, given, result)
        else:
            self._note_each(name.removeprefix("_foreach_"), given, result)

    def _note_each(self, name: str, given: dict[str, Any], result: Any) -> None:
        """An operation on lists: the kernels of the CPU do to each tensor what the operation of one does."""
        for i, _ in enumerate(given["self"]):
            one = {key: value[i] if isinstance(value, (list, tuple)) else value for key, value in given.items()}
            for several, single in (("tensors1", "end"), ("scalars", "scalar")):
                if several in one:
                    one[single] = one.pop(several)
            self._note_one(name, one, None if result is None else result[i])

    def _note_one(self, name: str, given: dict[str, Any], result: Any) -> None:
        base = name.removesuffix("_")
        target = given.get("out")
        in_place = name.endswith("_")
        if in_place:
            target = given["self"]
        if base == "copy":
            self._write(given["self"], COPY, [self._operand(given["src"])])
            return
        if base in _FILLED:  # What it is given does not matter; the gradient costs no more to read.
            self._write(result if target is None else target, _FILL, [GRADIENT], (_FILLED[base],), made=target is None)
            return
        if base == "clamp":
            self._note_clamp(given, result if target is None else target, made=target is None)
            return
        constants: tuple[float, ...] = ()
        if base in _UNARY:
            if base == "clone" and given.get("memory_format") not in (None, torch.preserve_format):
                raise _Unsupported(" with a memory format")
            opcode, operands = _UNARY[base], [given["self"]]
        else:
            opcode, operands, constants = self._arithmetic(base, given)
        registers = [self._operand(operand) for operand in operands]
        self._write(result if target is None else target, opcode, registers, constants, made=target is None)

    def _arithmetic(self, base: str, given: dict[str, Any]) -> tuple[int, list[Any], tuple[float, ...]]:
        a = given["self"]
        if base == "pow":
            return self._power(a, given["exponent"])
        if base in ("add", "sub", "mul", "div"):
            if given.get("rounding_mode") is not None:
                raise _Unsupported(" with a rounding mode")
            b = next(given[key] for key in ("other", "scalar") if key in given)
            alpha = _number(given.get("alpha", 1))
            is_tensor = isinstance(b, Tensor) and self._knows(b)
            number = 0.0 if is_tensor else _number(b)
            if base in ("add", "sub"):
                alpha = -alpha if base == "sub" else alpha
                if is_tensor:
                    return _ADD, [a, b], (alpha,)
                if abs(alpha) != 1:
                    raise _Unsupported(" of a number with alpha")
                return _ADD_NUMBER, [a], (alpha * number,)
            if is_tensor:
                return (_MUL if base == "mul" else _DIV), [a, b], ()
            return (_MUL_NUMBER if base == "mul" else _DIV_NUMBER), [a], (number,)
        if base == "maximum":
            return MAXIMUM, [a, given["other"]], ()
        if base == "lerp" and "weight" in given:
            return _LERP, [a, given["end"]], (_number(given["weight"]),)
        if base in ("addcmul", "addcdiv"):
            value = given.get("value", given.get("scalar", 1))
            return (
                _ADDCMUL if base == "addcmul" else _ADDCDIV,
                [a, given["tensor1"], given["tensor2"]],
                (_number(value),),
            )
        raise _Unsupported("")

    def _power(self, a: Any, exponent: Any) -> tuple[int, list[Any], tuple[float, ...]]:
        """As torch's kernel, which has ways of its own for these numbers; not where they are tensors."""
        if isinstance(exponent, Tensor):
            raise _Unsupported(" with a tensor")
        if exponent == 2:
            return _MUL, [a, a], ()
        if exponent in _POWERS:
            return _POWERS[exponent], [a], ()
        raise _Unsupported(" with another exponent")

    def _note_clamp(self, given: dict[str, Any], target: Any, made: bool) -> None:
        bounds = [(_CLAMP_MIN, given.get("min")), (_CLAMP_MAX, given.get("max"))]
        source = given["self"]
        for opcode, bound in bounds:
            if bound is not None:
                if isinstance(bound, Tensor):
                    raise _Unsupported(" with a tensor")
                self._write(target, opcode, [self._operand(source)], (_number(bound),), made)
                source, made = target, False

    def _note_fused_adam(self, given: dict[str, Any], *, decoupled: bool) -> None:
        amsgrad = bool(given["amsgrad"])
        beta1, beta2, lr, step, decay = (
            _number(value)
            for value in (given["beta1"], given["beta2"], given["lr"], given["state_steps"][0], given["weight_decay"])
        )
        constants = (
            -(lr / (1 - beta1**step)),
            (1 - beta2**step) ** 0.5,
            1 - beta1,
            beta2,
            1 - beta2,
            _number(given["eps"]),
            -1.0 if given["maximize"] else 1.0,
            1 - lr * decay if decoupled else decay,
            0 if decay == 0 else 2 if decoupled else 1,
            float(amsgrad),
        )
        state = ["exp_avgs", "exp_avg_sqs", *(["max_exp_avg_sqs"] if amsgrad else [])]
        self._note_fused(_FUSED_ADAM, given, state, constants)

    def _note_fused_sgd(self, given: dict[str, Any]) -> None:
        momentum = _number(given["momentum"])
        if given["is_first_step"] and momentum != 0:
            raise _Unsupported(" of a first step")
        constants = (
            -_number(given["lr"]),
            momentum,
            _number(given["weight_decay"]),
            1 - _number(given["dampening"]),
            -1.0 if given["maximize"] else 1.0,
            float(given["nesterov"]),
        )
        self._note_fused(_FUSED_SGD, given, ["momentum_buffer_list"] if momentum != 0 else [], constants)

    def _note_fused_adagrad(self, given: dict[str, Any]) -> None:
        lr, decay, step = (_number(value) for value in (given["lr"], given["lr_decay"], given["state_steps"][0]))
        constants = (
            lr / (1 + (step - 1) * decay),
            _number(given["weight_decay"]),
            _number(given["eps"]),
            -1.0 if given["maximize"] else 1.0,
        )
        self._note_fused(_FUSED_ADAGRAD, given, ["state_sums"], constants)

    def _note_fused(
        self, opcode: int, given: dict[str, Any], state: Sequence[str], constants: tuple[float, ...]
    ) -> None:
        if given.get("grad_scale") is not None or given.get("found_inf") is not None:
            raise _Unsupported(" with a scale")
        if len(given["self"]) != 1 or not all(map(_is_number, constants)):
            raise _Unsupported(" of several")
        of = [self._operand(given[name][0]) for name in ("self", "grads", *state)]
        if of[:2] != [PARAMETER, GRADIENT]:
            raise _Unsupported(" of other tensors")
        first = of[2] if state else PARAMETER
        a, b, c = (*of[2:], first, first, first)[:3]
        self.operations.append(Operation(opcode, PARAMETER, a, b, c, constants))

    def _operand(self, tensor: Any) -> int:
        register = self.register_of(tensor) if isinstance(tensor, Tensor) else None
        if register is None:
            raise _Unsupported(" of another tensor")
        return register

    def _write(
        self, target: Any, opcode: int, registers: Sequence[int], constants: tuple[float, ...] = (), made: bool = False
    ) -> None:
        if made:
            if not isinstance(target, Tensor) or target.dtype is not torch.float32 or target.numel() != self._numel:
                raise _Unsupported(" with another result")
            if self._knows(target) or not target.is_contiguous():
                raise _Unsupported(" with a view")
            out = self._add(target)
        else:
            out = self._operand(target)
            if out == GRADIENT:  # From here on a register of its own has what is in it.
                self.writes_gradient = True
                out = self._places[target.data_ptr()] = self.registers
                self.registers += 1
        a, b, c = (*registers, registers[0], registers[0])[:3]
        if not all(map(_is_number, constants)):
            raise _Unsupported(" with another number")
        self.operations.append(Operation(opcode, out, a, b, c, constants))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float:
    """A number, also of a tensor of shape `()` on the CPU, as torch takes it."""
    if isinstance(value, Tensor):
        if value.dim() or not value.is_cpu or not (value.is_floating_point() or value.dtype is torch.int64):
            raise _Unsupported(" with a tensor")
        return float(value.item())
    if not _is_number(value):
        raise _Unsupported(" with another number")
    return float(value)


def _tensors_in(values: Sequence[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [each for each in value if isinstance(each, Tensor)]
    return found
