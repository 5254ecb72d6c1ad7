"""Lets transformers make a model from its files without reading them.

[Note: how transformers loads] `from_pretrained` makes the model on the meta device, opens each safetensors file with
`safe_open`, renames, casts, stacks and splits its tensors by rules of its own, sets the results as parameters, ties
them, and makes what is in no file. Here it does all that itself, but `safe_open` is ours: it gives `Unread` tensors.
So what it knows of models and checkpoints is used, and not written again. Where it has the name `safe_open` from
elsewhere in a later version, the parameters are found to be ordinary tensors, and refused. What it says of tensors that
it cannot convert is in a report that it logs, and is put into an error of ours.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from swapper.errors import ConfigError, SwapError
from swapper.files.dequantised import DEQUANTISES, dequantised
from swapper.files.model_weights import ModelWeights
from swapper.files.packed_tensors import PackedTensor, read_tensors, recipe_of
from swapper.files.prequantised import Unfilled, prequantised, untouched
from swapper.files.recipe_parts import moved_by, pieces_of
from swapper.files.tensor_files import StoredTensor
from swapper.files.unread import Recipe, Step, Unread
from swapper.tensors.dtypes import NAMES
from swapper.tensors.inner import inner_tensors, is_wrapper

__all__ = ["FilesRead", "import_transformers", "make_hollow", "unread_files"]

_patching = threading.Lock()
_here = threading.local()


def import_transformers() -> Any:
    """Import transformers.

    Raises:
        ConfigError: it is not installed, or older than version 5.
    """
    try:
        found = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"transformers cannot be imported ({error}); install it (pip install transformers), or make the model "
            "yourself and call swapper.offload with weights"
        ) from error
    if int(found.__version__.partition(".")[0]) < 5:
        raise ConfigError(f"transformers {found.__version__} is too old: swapper.from_pretrained needs version 5")
    return found


class FilesRead:
    """The safetensors files that were opened within `unread_files`, and their headers.

    Attributes:
        device: that the model is to compute on.
        unfilled: what stands for tensors of them that bitsandbytes has quantised.
    """

    def __init__(self, device: torch.device) -> None:
        self._headers: dict[Path, list[StoredTensor | PackedTensor]] = {}
        self.device = device
        self.unfilled = Unfilled(device)

    def header(self, path: Path) -> list[StoredTensor | PackedTensor]:
        """Give the tensors of a file, whose header is read once.

        Raises:
            SwapError, SwapIOError: as `read_tensors`.
        """
        if path not in self._headers:
            self._headers[path] = read_tensors(path)
        return self._headers[path]

    def paths(self) -> list[Path]:
        """Give the files."""
        return list(self._headers)

    def same(self) -> bool:
        """Return True if the files have the headers that they had."""
        return all(read_tensors(path) == header for path, header in self._headers.items())

    def __str__(self) -> str:
        return ", ".join(map(str, self._headers))


class _Slice:
    """As safetensors' `PySafeSlice`: a tensor that is read when it is indexed."""

    def __init__(self, stored: StoredTensor | PackedTensor) -> None:
        self._stored = stored

    def get_shape(self) -> list[int]:
        return list(self._stored.shape)

    def get_dtype(self) -> str:
        return NAMES[self._stored.dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = Unread.of_file(recipe_of(self._stored))
        return tensor if index is Ellipsis else tensor[index]


class _UnreadFile:
    """As safetensors' `safe_open`."""

    def __init__(self, header: Sequence[StoredTensor | PackedTensor]) -> None:
        self._tensors = {tensor.name: tensor for tensor in header}

    def keys(self) -> list[str]:
        return list(self._tensors)

    offset_keys = keys

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._tensors[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        return Unread.of_file(recipe_of(self._tensors[name]))

    def __enter__(self) -> _UnreadFile:
        return self

    def __exit__(self, *args: object) -> None:
        pass


@contextmanager
def unread_files(device: torch.device, quantised_by: str = "") -> Iterator[FilesRead]:
    """Within it, in this thread, what transformers loads from safetensors files is `Unread`.

    Other threads that load a model meanwhile wait, or are not concerned.

    Args:
        device: that the model is to compute on.
        quantised_by: what has quantised the model, as transformers names it; "" for none.

    Raises:
        ConfigError: this version of transformers does not load as it is known.
        SwapError: a quantised weight is not complete, or does not fit the model.
    """
    module = importlib.import_module("transformers.modeling_utils")
    found = FilesRead(device)
    with _patching:
        plain: Callable[..., Any] | None = vars(module).get("safe_open")
        if plain is None:
            raise ConfigError(
                "this version of transformers opens files in a way that swapper does not know; make the model on the "
                "meta device and call swapper.offload with weights"
            )

        def is_here() -> bool:
            return getattr(_here, "files", None) is found

        def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_here():
                return plain(path, *args, **kwargs)
            return _UnreadFile(found.header(Path(path)))

        def reported(*args: Any, **kwargs: Any) -> None:
            try:
                before["log_state_dict_report"](*args, **kwargs)
            except RuntimeError as error:
                failed = getattr(kwargs.get("loading_info"), "conversion_errors", None)
                if not is_here() or not failed:
                    raise
                raise _not_converted(found, failed) from error

        ours = {"safe_open": opened, "log_state_dict_report": reported}
        before: dict[str, Callable[..., Any]] = {name: vars(module)[name] for name in ours if name in vars(module)}
        vars(module).update({name: ours[name] for name in before})
        _here.files = found
        try:
            with contextlib.ExitStack() as stack:
                wrong: Sequence[Exception] = ()
                if quantised_by == "bitsandbytes":  # Whose import takes much memory.
                    wrong = stack.enter_context(prequantised(found.unfilled, is_here))
                elif quantised_by in DEQUANTISES:
                    wrong = stack.enter_context(dequantised(quantised_by, is_here))
                try:
                    yield found
                except Exception:
                    if wrong:
                        raise wrong[0] from None
                    raise
                if wrong:
                    raise wrong[0]
        finally:
            _here.files = None
            vars(module).update(before)


def _not_converted(files: FilesRead, failed: dict[str, str]) -> SwapError:
    """Make the error of transformers that it could not stack or join tensors, or convert them in another way.

    Args:
        files: where they are.
        failed: by the name of what would be made of them, a traceback and what it says, in lines.
    """
    name, said = next(iter(failed.items()))
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    more = f", nor {len(failed) - 1} more" if len(failed) > 1 else ""
    return SwapError(
        f"{files} does not fit the model: {name} cannot be made of the tensors there{more} ({'; '.join(lines[-2:])}); "
        "copy or download the model again"
    )


def make_hollow(model: torch.nn.Module, files: FilesRead) -> ModelWeights:
    """Replace the `Unread` tensors of `model` by ones on the meta device, with their attributes.

    Those inside of tensors that are made of others, as torchao's, are replaced by `untouched` ones on the device where
    the model is to compute, and on an accelerator the tensors around them too: these know their device. Those of
    bitsandbytes are such tensors already.

    Returns:
        What these are in the files.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    recipes: dict[torch.Tensor, Recipe] = {}
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and is_wrapper(tensor):
                setattr(module, name, _make_hollow_inside(tensor, files.device, made))
            elif tensor is not None and not isinstance(tensor, Unread):
                for inner in inner_tensors(name, tensor, module):
                    if (recipe := files.unfilled.recipe_of(inner.tensor)) is not None:
                        recipes[inner.tensor] = recipe
            if not isinstance(tensor, Unread):
                continue
            if tensor not in made:
                like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                new = torch.nn.Parameter(like, tensor.requires_grad) if is_parameter else like
                own = ("_recipe", "like", "view_of", "_is_param")
                vars(new).update({key: value for key, value in vars(tensor).items() if key not in own})
                made[tensor] = new
            setattr(module, name, made[tensor])
    files.unfilled.clear()
    recipes.update((new, tensor.recipe) for tensor, new in made.items() if isinstance(tensor, Unread))
    for new, recipe in recipes.items():
        _check_dtype(new, recipe)
    stored = {new: pieces_of(recipe, new) for new, recipe in recipes.items()}
    steps = {new: recipe for new, recipe in recipes.items() if isinstance(recipe, Step) and stored[new] is None}
    return ModelWeights({new: pieces for new, pieces in stored.items() if pieces is not None}, steps, files.same)


def _check_dtype(tensor: torch.Tensor, recipe: Recipe) -> None:
    """Refuse integers or booleans that transformers would cast to weights: they are codes, or the file is damaged.

    Raises:
        SwapError: see above. Integers that weights are computed from are not looked at.
    """
    for source in moved_by(recipe) if tensor.dtype.is_floating_point else ():
        if not (source.dtype.is_floating_point or source.dtype.is_complex):
            raise SwapError(
                f"{source.path} does not fit the model: tensor {source.name} is {source.dtype}, and in the model "
                f"{tensor.dtype}; copy or download it again, or load weights of this model"
            )


def _make_hollow_inside(
    wrapper: torch.Tensor, device: torch.device, made: dict[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return `wrapper` with `untouched` tensors inside; if it is for another device a new one, with its attributes."""
    if wrapper in made:
        return made[wrapper]
    keys, context = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    inside = {}
    for key in keys:
        tensor = getattr(wrapper, key)
        if is_wrapper(tensor) and not isinstance(tensor, Unread):
            inside[key] = _make_hollow_inside(tensor, device, made)
        elif isinstance(tensor, Unread):
            if tensor not in made:
                made[tensor] = untouched(tensor.like, device)
            inside[key] = made[tensor]
        else:
            inside[key] = tensor.to(device)
        setattr(wrapper, key, inside[key])
    if wrapper.device == device:
        return wrapper
    own_class: Any = type(wrapper)
    new: torch.Tensor = own_class.__tensor_unflatten__(inside, context, wrapper.shape, wrapper.stride())
    for key, value in vars(wrapper).items():  # `_is_param` too, by which it is a parameter.
        vars(new).setdefault(key, value)
    made[wrapper] = new.requires_grad_(wrapper.requires_grad)
    return new
