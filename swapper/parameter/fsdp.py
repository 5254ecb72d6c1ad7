"""The groups of parameters of FSDP2, whose shards are swapped.

[Note: FSDP2] `fully_shard` makes an `FSDPParamGroup` of the parameters of some modules, and of each an `FSDPParam`.
This rank has a shard of it: the local tensor of the DTensor that optimizers and state dicts see. FSDP2 keeps the same
memory a second time, as a flat tensor that is padded to the length of the first rank's: `_sharded_param_data`. Nothing
reads that but the all-gather, which copies it. What modules compute with are other parameters, *unsharded*, which FSDP2
allocates and frees itself.

So the shards of a group are one record, and nothing of it is needed but while the group's all-gather copies it, or the
optimizer steps it. The flat tensor is not kept at all: it is made of the shard whenever FSDP2 asks for it, without a
copy where the shard needs no padding. Within `unshard` and `wait_for_unshard` the first such question attaches the
whole record, until the method returns. At any other time, as in a state dict, the shard is an evicted tensor as all
others are, whose values come. `AccessOrder` learns the order of the uses, with all prefetching that FSDP2 is told to
do.

[Note: what cannot be read for an all-gather] The other ranks are in that all-gather, or on their way to it, and would
wait for a rank that raises. So it goes on, with NaN for its shards, and raises where all ranks meet next: at the end of
the outermost forward of FSDP2, before anybody has what it returns, or of the backward, as `raised_by_all` does. There
the ranks tell each other how it went, on the host, and FSDP2 lets go of what it has gathered. If the model raises of
the NaN itself, that has the failure as its cause on the rank that had it. Where they cannot (NCCL without gloo), or not
all of them have the model, a rank raises at once and alone. In a pass that gathers nothing nobody waits for others.

These are private names of torch. Both classes are replaced on the objects, by subclasses of theirs, and `check_names`
compares what is used here, and who else uses it, with what this was written for.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._compile import _disable_dynamo

from swapper.errors import ConfigError, SwapError
from swapper.storage.agreement import agreed, tells_on_host
from swapper.storage.backward_agreement import have_all_ranks, raised_by_all
from swapper.tensors.evicted_views import viewed_by
from swapper.tensors.hollow import answers_for
from swapper.tensors.homes import home_of
from swapper.tensors.sharded import Box, box_of, is_sharded, local_of

if TYPE_CHECKING:
    from swapper.parameter.owner import ParameterOwner, ParameterUse

__all__ = ["Shard", "SwappedGroups", "check_groups", "prepare_groups", "sharded_parameters", "shards_of"]

log = logging.getLogger(__name__)

_PACKAGE = "torch.distributed.fsdp._fully_shard"
_MODULES = ("_fsdp_param", "_fsdp_param_group", "_fsdp_state", "_fsdp_collectives", "_fully_shard")

_GROUPS, _GROUP = "_fsdp_param_groups", "_fsdp_param_group"
"""Names of the attribute of an `FSDPState` with its groups: of one or none in an older torch."""

_FLAT = "_sharded_param_data"
"""Name of the attribute of an `FSDPParam` that has the flat tensor."""

_READS = "_swapper_reads"
"""Name of the attribute of a group that is swapped, and of its parameters, with its `_Reads`."""

_SHARD = "_swapper_shard"
"""Name of the attribute of an `FSDPParam` with the local tensor that was swapped."""

_AGREES, _GATHERS, _FAILURE = "_swapper_agrees", "_swapper_gathers", "_swapper_failure"
"""Names of attributes of an `FSDPState`: all ranks agree when it ends a forward; all have gathered in that, and have
not agreed yet; what has failed in it so far."""

_GATHERED = ("_unsharded_param", "_sharded_post_forward_param")
"""Names of the attributes of an `FSDPParam` with what modules may have instead of the shard."""

_USERS = {
    _FLAT: {
        "FSDPParam._init_sharded_param",
        "FSDPParam.all_gather_inputs",
        "FSDPParam.reset_sharded_param",
        "_get_param_all_gather_inputs",
    },
    "all_gather_inputs": {"FSDPParamGroup.wait_for_unshard", "_get_param_all_gather_inputs"},
    "_get_param_all_gather_inputs": {"foreach_all_gather"},
    "foreach_all_gather": {"FSDPParamGroup.unshard"},
    "reset_sharded_param": {"FSDPParam.__init__", "FSDPModule._apply", "FSDPParamGroup.lazy_init"},
}
"""The functions of FSDP2 that use a name, in this or that version of torch."""


class Shard(NamedTuple):
    """The shard of a parameter that FSDP2 has.

    Attributes:
        group: number of its group, in the order of modules.
        views: the tensors that FSDP2 has of the same memory.
        box: what it is of the parameter.
    """

    group: int
    views: tuple[torch.Tensor, ...]
    box: Box


def check_groups(model: torch.nn.Module) -> None:
    """Refuse a model with DTensors that cannot be swapped. Changes nothing.

    Raises:
        ConfigError: a parameter is a DTensor that FSDP2 does not have, or on a device whose tensors torch lets have no
            keys of ours; FSDP2 itself moves it to the CPU, or gathers what a tensor subclass makes of it; or this torch
            has another FSDP2.
    """
    sharded = {name: p for name, p in model.named_parameters() if is_sharded(p)}
    groups = _groups_of(model)
    if not sharded and not groups:
        return
    if groups:
        check_names()
    known: set[int] = set()
    for param in _params_of(groups):
        known |= {id(param.sharded_param), *(id(vars(param).get(name)) for name in _GATHERED)}
    for name, p in sharded.items():
        if id(p) not in known:
            raise ConfigError(
                f"offload_param.device: nvme cannot work for parameter {name}, a DTensor that FSDP2 does not have, in "
                "this version of swapper: call fully_shard first, or use offload_param.device: none"
            )
    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        for param in group.fsdp_params:
            why = _why_not(group, param)
            if why:
                name = names.get(id(param.sharded_param)) or param._module_info.param_name
                raise ConfigError(f"offload_param: swapping cannot work for parameter {name} of FSDP2: {why}")


def _why_not(group: Any, param: Any) -> str:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    none = "use offload_param.device: none"
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        return "its CPUOffloadPolicy keeps all shards in memory; call fully_shard without it"
    if type(group.offload_policy) is not OffloadPolicy or not isinstance(group.mesh_info, FSDPMeshInfo):
        return f"it is not sharded, or kept by a {type(group.offload_policy).__name__}; {none}"
    local = local_of(param.sharded_param)
    if local.device.type == "meta":
        return "it is on the meta device and has no values; give the model memory first"
    if not answers_for(local.device):  # The operators of a DTensor find the tensor inside by its dispatch keys alone.
        return f"it is on {local.device}, and torch lets no tensor of that kind have other dispatch keys; {none}"
    if home_of(local) is None and type(local) is not torch.Tensor:
        return f"its shard is a {type(local).__name__}; {none}"
    return ""


def prepare_groups(model: torch.nn.Module) -> None:
    """Have the shards of `model` where they stay, each in a tensor that is no view. The model works as before.

    FSDP2 looks at its shards a last time before the first forward, and may replace them. So it does that now. All else
    that it does then, as to find the root and the dtypes, it does then: until then a user may change the model.

    Raises:
        ConfigError: FSDP2 refuses the model; or as `check_groups`.
    """
    check_groups(model)
    groups = _groups_of(model)
    for group in groups:
        group._to_sharded()
    try:
        for state in _states_of(model):
            for group in _groups_of_state(state) if state._is_root is None else ():
                group.lazy_init()
                group._reset_sharded_params = False
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ConfigError(f"offload_param: FSDP2 refuses this model: {error}") from error
    for param in _params_of(groups):
        local = param.sharded_param._local_tensor
        if home_of(local) is None and local._is_view():
            # A view keeps the tensor that it is of, and so its memory, whatever `data` it is given.
            param.sharded_param._local_tensor = local.data


def sharded_parameters(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The DTensors that FSDP2 has of `model`, also while modules have what it gathered."""
    for state in _states_of(model):
        for param in _params_of(_groups_of_state(state)):
            yield param.sharded_param


def shards_of(model: torch.nn.Module) -> dict[int, Shard]:
    """The shards of `model` by the `id` of the local tensor, which is not to be kept."""
    found: dict[int, Shard] = {}
    for number, group in enumerate(_groups_of(model)):
        for param in group.fsdp_params:
            flat = vars(param).get(_FLAT)
            in_memory = () if flat is None else (flat,) if flat._base is None else (flat, flat._base)
            found[id(local_of(param.sharded_param))] = Shard(number, in_memory, box_of(param.sharded_param))
    return found


class _Reads:
    """The use of a group's record while FSDP2 reads it."""

    def __init__(self, owner: ParameterOwner, groups: SwappedGroups, group: Any, state: Any) -> None:
        self._owner = owner
        self._groups = groups
        self._group = weakref.ref(group)
        self._state = weakref.ref(state)
        self._running = self._is_lost = False
        self._use: ParameterUse | None = None
        self.failure: Exception | None = None
        """The reason why FSDP2 has gathered NaN, until it gathers again, or all ranks have raised it."""

    def __enter__(self) -> None:
        self._end()  # What Ctrl-C has left.
        self._running, self._is_lost = True, False

    def __exit__(self, kind: object, *exception: object) -> None:
        self._running = False
        try:
            self._end()
        except Exception as error:
            if kind is not None:
                raise
            self._postpone(error)

    def _end(self) -> None:
        if (use := self._use) is None:
            return
        try:
            self._owner.end(use)
        except Exception:
            self._use = None
            raise
        self._use = None  # Last: to end it again changes nothing.

    def note_gathered(self) -> None:
        """Have the ranks agree when this pass ends. Called on all of them, as all gather, whatever has failed."""
        if _is_in_backward() and self._groups.have_all_ranks():
            with raised_by_all(self._groups.widest()):
                pass
        elif (root := _outermost(self._state())) is not None:
            vars(root)[_GATHERS] = True

    def attach(self) -> bool:
        """Have the shards in memory until the method of FSDP2 that is running returns, if one is.

        Returns:
            False if they cannot be read, which all ranks raise later: [Note: what cannot be read for an all-gather].
        """
        if self._running and self._use is None and (group := self._group()) is not None:
            self._use = self._owner.use_of(param.sharded_param for param in group.fsdp_params)
            try:
                self._owner.begin(self._use)
            except Exception as error:
                self._postpone(error)
                self._is_lost, self.failure = True, None if _is_in_backward() else error
            else:
                self.failure = None
        return not self._is_lost

    def _postpone(self, error: Exception) -> None:
        """Have `error` raised where all ranks meet next. If they do not, or it is a mistake of all, raise it now."""
        if isinstance(error, ConfigError) or not self._groups.have_all_ranks():
            raise error
        if _is_in_backward():
            with raised_by_all(self._groups.widest()):
                raise error
            _drop_frames(error)
        elif (root := _outermost(self._state())) is not None and vars(root)[_AGREES]():
            vars(root).setdefault(_FAILURE, error)
            _drop_frames(error)
        else:
            raise error
        log.warning("what FSDP2 gathers is lost on this rank, and all ranks raise when they meet: %s", repr(error))


class SwappedGroups:
    """The groups of a model, which keep the owner of their records. It has this, which has them weakly."""

    def __init__(self) -> None:
        self._groups: list[weakref.ref[Any]] = []
        self._states: list[weakref.ref[Any]] = []
        self._hooks: list[Any] = []
        self._widest: Callable[[], Any] = lambda: None

    def take(self, model: torch.nn.Module, owner: ParameterOwner) -> None:
        """Have FSDP2 ask `owner`, which may not have the records yet."""
        states = _states_of(model)
        found = [(state, group) for state in states for group in _groups_of_state(state)]
        for state, group in found:
            if _READS in vars(group):  # Another owner's, of a part of the model.
                continue
            self._groups.append(weakref.ref(group))
            reads = vars(group)[_READS] = _Reads(owner, self, group, state)
            for param in group.fsdp_params:
                vars(param)[_READS] = reads
                vars(param)[_SHARD] = local_of(param.sharded_param)
                param.__class__ = _param_class()
            group.__class__ = _group_class()
        params = list(_params_of(self._living()))
        if params:  # Of a group some may be on a part of the mesh, as beside those of tensor parallelism.
            self._widest = weakref.ref(max(params, key=lambda param: int(param.sharded_param.device_mesh.size())))
        for state in states if params else ():
            if _AGREES not in vars(state) and len(state._modules) == 1:  # FSDP2 takes no other as the outermost.
                vars(state)[_AGREES] = self.have_all_ranks
                self._states.append(weakref.ref(state))
                after = functools.partial(self._after_forward, weakref.ref(state))
                self._hooks.append(state._modules[0].register_forward_hook(after, always_call=True))

    @_disable_dynamo
    def _after_forward(self, reference: weakref.ref[Any], *_: object) -> None:
        """A forward hook, after that of FSDP2: have all ranks raise what has failed on one in the outermost forward."""
        state = reference()
        root = None if state is None else state._state_ctx.iter_forward_root
        # A forward within one of FSDP2 has an outermost one; what is computed again in a backward is part of that.
        if state is None or _is_in_backward() or root not in (None, state):
            return
        failure = vars(state).pop(_FAILURE, None)
        for group in self._living():
            failure = failure or vars(group)[_READS].failure
        try:
            if root is state:  # The model has raised, of NaN perhaps, and other ranks may never come here.
                if failure is not None and (error := sys.exc_info()[1]) is not None:
                    error.__cause__ = error.__cause__ or failure
                return
            with agreed(vars(state).pop(_GATHERS, False) and vars(state)[_AGREES]()):
                if failure is not None:
                    raise failure
        except Exception:
            for group in self._living():  # On all ranks: what was gathered may be NaN.
                group.reshard()
                vars(group)[_READS].failure = None
            raise
        finally:
            failure = None  # Its traceback has this frame, and so what the forward has made.

    def widest(self) -> torch.Tensor:
        """One of the parameters that the most ranks have parts of."""
        param = self._widest()
        assert param is not None
        widest: torch.Tensor = param.sharded_param
        return widest

    def have_all_ranks(self) -> bool:
        """True if all ranks run the model, and can tell each other how it went on the host."""
        return self._widest() is not None and tells_on_host() and have_all_ranks([self.widest()])

    def drop_flat(self) -> None:
        """Free the memory of shards that are evicted."""
        for group in self._living():
            for param in group.fsdp_params:
                if home_of(local_of(param.sharded_param)) is not None:
                    vars(param).pop(_FLAT, None)

    def restore(self) -> None:
        """Undo what was done to groups whose values are all in memory; those of others raise when they are used."""
        for hook in self._hooks:
            hook.remove()
        for state in filter(None, (reference() for reference in self._states)):
            vars(state).pop(_AGREES, None)
        for group in self._living():
            group.__class__ = _fsdp("_fsdp_param_group").FSDPParamGroup
            del vars(group)[_READS]
            for param in group.fsdp_params:
                local = _shard_of(param)
                if home_of(local) is not None:
                    continue
                param.__class__ = _fsdp("_fsdp_param").FSDPParam
                vars(param).pop(_READS, None)
                vars(param).pop(_SHARD, None)
                if _FLAT not in vars(param):
                    flat = vars(param)[_FLAT] = _flat_of(param, local)
                    if local.shape != param.padded_sharded_param_size:
                        dim, size = param.fsdp_placement.dim, param.padded_sharded_param_size
                        length = local.size(dim) if local.numel() else 0
                        local.data = flat.view(size).narrow(dim, 0, length)  # The same: state dicts have views of it.
        self._groups, self._states, self._hooks = [], [], []

    def _living(self) -> Iterator[Any]:
        for reference in self._groups:
            if (group := reference()) is not None and _READS in vars(group):
                yield group


# --- What FSDP2's objects do instead ---------------------------------------------------------------------------------


@functools.cache
def _param_class() -> Any:
    members = {_FLAT: property(_get_flat, _set_flat), "reset_sharded_param": _reset_sharded_param}
    base = _fsdp("_fsdp_param").FSDPParam
    return type(base.__name__, (base,), members)


@functools.cache
def _group_class() -> Any:
    base = _fsdp("_fsdp_param_group").FSDPParamGroup
    members = {"unshard": _unshard, "wait_for_unshard": _wait_for_unshard, "reshard": _reshard}
    return type(base.__name__, (base,), members)


def _shard_of(param: Any) -> torch.Tensor:
    """The local tensor of a parameter.

    Where it is a view of the shard, as `model.float()` of a model that is so already, or `load_state_dict` of the
    model's own with `assign`, make it of `detach()`, it is the shard again.
    """
    local = local_of(param.sharded_param)
    shard: torch.Tensor | None = vars(param).get(_SHARD)
    if shard is not None and viewed_by(local) is shard:
        param.sharded_param._local_tensor = local = shard
    return local


def _get_flat(param: Any) -> torch.Tensor:
    local = _shard_of(param)
    if home_of(local) is not None:
        if not vars(param)[_READS].attach():
            return _lost_flat_of(param, local)
    elif (flat := vars(param).get(_FLAT)) is not None:  # It stays in memory, or was given to FSDP2 later.
        kept: torch.Tensor = flat
        return kept
    return _flat_of(param, local)


def _set_flat(param: Any, flat: torch.Tensor) -> None:
    vars(param)[_FLAT] = flat


def _flat_of(param: Any, local: torch.Tensor) -> torch.Tensor:
    """Return the flat tensor that an all-gather copies of a shard. Its padding is part of no parameter."""
    with torch.no_grad():
        if local.shape == param.padded_sharded_param_size:
            return local.view(-1)
        flat = local.new_zeros(param.padded_sharded_param_size)
        if local.numel():
            dim = param.fsdp_placement.dim
            flat.narrow(dim, 0, local.size(dim)).copy_(local)
        return flat.view(-1)


def _lost_flat_of(param: Any, local: torch.Tensor) -> torch.Tensor:
    """Return NaN in place of a shard that cannot be read, for an all-gather to copy."""
    lost = float("nan") if local.dtype.is_floating_point or local.dtype.is_complex else 0
    return torch.full(param.padded_sharded_param_size, lost, dtype=local.dtype, device=local.device).view(-1)


def _drop_frames(error: BaseException | None) -> None:
    """Let go of what the frames have in which `error` was raised, and their callers: views of other shards."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


def _outermost(state: Any) -> Any:
    """The state of the outermost module of the forward that is going on, if all ranks agree at its end; else None."""
    root = None if state is None else state._state_ctx.iter_forward_root
    return None if root is None or _AGREES not in vars(root) else root


def _reset_sharded_param(param: Any) -> None:
    """FSDP2 looks for another shard, that was loaded or converted. It has none if the one that it has is swapped."""
    info = param._module_info
    now = getattr(info.module, info.param_name)
    if viewed_by(local_of(now)) is vars(param)[_SHARD]:
        param.sharded_param = now
    if now is param.sharded_param and home_of(_shard_of(param)) is not None:
        param._sharding_spec = now._spec
        return
    _fsdp("_fsdp_param").FSDPParam.reset_sharded_param(param)


def _unshard(group: Any, async_op: bool = False) -> None:
    reads, before = vars(group)[_READS], group._all_gather_result
    with reads:
        _fsdp("_fsdp_param_group").FSDPParamGroup.unshard(group, async_op)
        if group._all_gather_result is not before:
            reads.note_gathered()


def _reshard(group: Any) -> None:
    """Refuse `model.to(...)`, which begins with it, where torch would later, without saying what to do.

    It exchanges the parameters of DTensors for others, but not those that weak references lead to, as a plan's.
    """
    caller = sys._getframe(1).f_back  # That of `FSDPModule.reshard`.
    if caller is not None and caller.f_code is _fsdp("_fully_shard").FSDPModule._apply.__code__:
        for param in group.fsdp_params:
            if home_of(_shard_of(param)) is not None and weakref.getweakrefs(param.sharded_param):
                raise SwapError(
                    "a model of FSDP2 cannot be moved or converted while an optimizer of its parameters is swapped: "
                    "torch would exchange each parameter for another. Move it before fully_shard; or call "
                    "swapper.unwrap_optimizer(optimizer), model.swapper.close(keep_values=True) and gc.collect() before"
                )
    _fsdp("_fsdp_param_group").FSDPParamGroup.reshard(group)


def _wait_for_unshard(group: Any) -> Any:
    with vars(group)[_READS]:
        return _fsdp("_fsdp_param_group").FSDPParamGroup.wait_for_unshard(group)


# --- FSDP2's names ---------------------------------------------------------------------------------------------------


def _fsdp(name: str) -> Any:
    """A module of FSDP2, which was imported as there are objects of it."""
    return sys.modules[f"{_PACKAGE}.{name}"]


def _states_of(model: torch.nn.Module) -> list[Any]:
    """The state that FSDP2 has of modules of `model`, each once, the outer before those within."""
    if f"{_PACKAGE}._fsdp_state" not in sys.modules:
        return []
    state_of = getattr(_fsdp("_fsdp_state"), "_get_module_fsdp_state", lambda module: None)
    return list(dict.fromkeys(state for module in model.modules() if (state := state_of(module)) is not None))


def _groups_of(model: torch.nn.Module) -> list[Any]:
    states = _states_of(model)
    if states and not any(hasattr(states[0], name) for name in (_GROUPS, _GROUP)):
        _refuse_torch(f"FSDPState.{_GROUPS}")
    return [group for state in states for group in _groups_of_state(state)]


def _groups_of_state(state: Any) -> list[Any]:
    """Return the parameter groups of the modules of one call of `fully_shard`; none if torch has other names."""
    # Where parameters of one call have several meshes, a newer torch refuses to give one group.
    several = hasattr(state, _GROUPS)
    groups: list[Any] = getattr(state, _GROUPS, []) if several else [getattr(state, _GROUP, None)]
    return [group for group in groups if group is not None]


def _params_of(groups: Iterable[Any]) -> Iterator[Any]:
    for group in groups:
        yield from group.fsdp_params


@functools.cache
def check_names() -> None:
    """Compare FSDP2's private names, and who uses them, with those that this module was written for.

    Raises:
        ConfigError: this version of torch has others.
    """
    try:
        modules = [_fsdp(name) for name in _MODULES]
        param, group = modules[0].FSDPParam, modules[1].FSDPParamGroup
        plain = group.wait_for_unshard, group._to_sharded, group.reshard, param.reset_sharded_param, group.lazy_init
        signatures = {group.unshard: ["self", "async_op"], **{each: ["self"] for each in plain}}
        if "_all_gather_result" not in _names_in(inspect.unwrap(group.unshard).__code__):
            _refuse_torch("FSDPParamGroup._all_gather_result is gone")
        _ = modules[2].FSDPStateContext().iter_forward_root
    except (KeyError, AttributeError) as error:
        _refuse_torch(str(error))
    for function, expected in signatures.items():
        if list(inspect.signature(function).parameters) != expected:
            _refuse_torch(f"{function.__qualname__}{inspect.signature(function)}")
    users: dict[str, set[str]] = {name: set() for name in _USERS}
    for function in (each for module in modules for each in _functions_of(module)):
        for name in users.keys() & _names_in(function.__code__):
            users[name].add(function.__qualname__)
    for name, known_users in _USERS.items():
        if unknown := users[name] - known_users:
            _refuse_torch(f"{name}, used by {', '.join(sorted(unknown))}")


def _refuse_torch(what: str) -> None:
    raise ConfigError(
        f"offload_param: torch {torch.__version__} keeps the shards of FSDP2 otherwise than swapper knows ({what}); "
        "use another version of torch, or offload_param.device: none"
    )


def _functions_of(module: types.ModuleType) -> Iterator[Callable[..., Any]]:
    """The functions that are defined in `module`, those of its classes too."""
    for each in vars(module).values():
        members = vars(each).values() if inspect.isclass(each) else [each]
        for member in members:
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            function = inspect.unwrap(function) if callable(function) else function
            if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                yield function


def _names_in(code: types.CodeType) -> set[str]:
    """The names of attributes and globals in `code`, and in functions within it."""
    within = (_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*within)
