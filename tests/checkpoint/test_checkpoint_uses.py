"""Checkpoints of models and optimizers of all kinds, and calls where one would not expect them."""

from __future__ import annotations

import copy
import errno
import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CHANGES, Changing, Versioned, whole
from checkpoints import SmallNet as Net
from checkpoints import SmallTraining as Training
from isolation import in_forked_child
from launcher import run_program
from safetensors import safe_open
from small_drives import mounted
from torch import nn
from twins import bits, small_records

import swapper
from swapper.checkpoint.export import export_checkpoint
from swapper.checkpoint.plain_import import import_checkpoint
from swapper.checkpoint.writer import NewCheckpoint
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.io.handle import File
from swapper.storage.store import TensorStore

pytestmark = pytest.mark.timeout(240)


# --- After a failure -------------------------------------------------------------------------------------------------


def damage(directory: Path, pattern: str) -> None:
    """Change the last byte of the tensors of a file."""
    for path in directory.glob(pattern):
        data = bytearray(path.read_bytes())
        length = 8 + int.from_bytes(data[:8], "little")
        data[length + 5] ^= 1
        path.unlink()
        path.write_bytes(data)


@pytest.mark.parametrize("what", ["model-00001*", "model-memory*", "optimizer-0-00000*"])
@pytest.mark.parametrize("swapped", [True, False])
def test_after_a_load_that_failed_no_step_is_made_before_one_succeeds(what: str, swapped: bool, tmp_path: Path) -> None:
    first = Training(tmp_path).steps(2)
    first.save(tmp_path / "good")
    first.save(tmp_path / "bad")
    damage(tmp_path / "bad", what)
    training = Training(tmp_path if swapped else None).steps(1)
    with pytest.raises(SwapError, match="damaged"):
        training.load(tmp_path / "bad")
    for _ in range(2):
        with pytest.raises(SwapError, match="step is refused"):
            training.steps(1)
        training.optimizer.zero_grad()
    training.load(tmp_path / "good").steps(2)
    assert training.everything() == first.steps(2).everything()


def test_after_a_load_that_changed_nothing_training_goes_on(tmp_path: Path) -> None:
    first = Training(tmp_path).steps(2)
    first.save(tmp_path / "saved")
    (tmp_path / "saved" / "values.safetensors").unlink()
    training = Training(tmp_path).steps(1)
    with pytest.raises(SwapIOError):
        training.load(tmp_path / "saved")
    assert training.steps(1).everything() == first.everything()


def test_a_drive_that_does_not_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written may be lost then: training stops, and goes on from the checkpoint before."""
    training = Training(tmp_path).steps(2)
    training.save(tmp_path / "saved")

    def fail(file: File) -> None:
        raise SwapIOError(errno.EIO, "sync", file.path)

    with monkeypatch.context() as patch:
        patch.setattr(File, "sync", fail)
        with pytest.raises(SwapIOError, match="sync failed") as caught:
            training.steps(1).save(tmp_path / "saved")
    assert caught.value.filename
    assert whole(tmp_path / "saved")
    training.load(tmp_path / "saved")
    assert training.steps(2).everything() == Training(None).steps(4).everything()


def test_a_parent_that_does_not_sync_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path).steps(2)
    training.save(tmp_path / "a" / "saved")
    before = (tmp_path / "a" / "saved" / "index.json").read_bytes()
    real = os.fsync

    def fail(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path / "a"):
            raise OSError(errno.EIO, "injected")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    for name in ("saved", "other"):
        with pytest.raises(SwapIOError, match="sync failed"):
            training.save(tmp_path / "a" / name)
        assert os.listdir(tmp_path / "a") == ["saved"]
        assert (tmp_path / "a" / "saved" / "index.json").read_bytes() == before
    assert whole(tmp_path / "a" / "saved")


@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk(kind: str, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    options = ["-t", "tmpfs", "-o", "size=400k", "tmpfs"]
    if kind == "ext4":
        with open(tmp_path / "image", "wb") as file:
            file.truncate(1 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(tmp_path / "image")], check=True)
        options = ["-t", "ext4", "-o", "loop", str(tmp_path / "image")]
    training = Training(tmp_path).steps(2)
    with mounted(small, *options):
        for turn in range(20):
            names = sorted(path.name for path in small.iterdir() if path.name != "lost+found")
            try:
                training.save(small / str(turn)).wait()
            except SwapIOError as error:
                assert error.errno == errno.ENOSPC and str(small) in str(error)
                break
        assert turn > 0
        assert sorted(path.name for path in small.iterdir() if path.name != "lost+found") == names
        assert all(whole(small / name) for name in names)
        assert training.steps(2).everything() == Training(None).steps(4).everything()


@pytest.mark.parametrize("where", ["linked", "copied"])
def test_no_file_may_be_so_long(where: str, tmp_path: Path, elsewhere: Path) -> None:
    parent = tmp_path if where == "linked" else elsewhere
    training = Training(tmp_path).steps(2)
    training.save(parent / "saved").wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(SwapIOError) as caught:
            training.save(parent / "saved").wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, former)
    assert caught.value.errno == errno.EFBIG and caught.value.filename
    assert [path.name for path in parent.iterdir() if "saved" in path.name] == ["saved"]
    assert whole(parent / "saved")
    assert training.steps(2).everything() == Training(None).steps(4).everything()


def test_a_full_disk_in_the_background_is_said_in_the_log(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path).steps(2)
    go = threading.Event()

    def fail(self: Any, *_: Any) -> None:
        go.wait()
        raise SwapIOError(errno.ENOSPC, "write", elsewhere / "saved")

    with monkeypatch.context() as patch:
        patch.setattr(NewCheckpoint, "_copy", fail)
        training.save(elsewhere / "saved")  # The handle is dropped.
        training.steps(1)
        go.set()
        with pytest.raises(SwapIOError):  # Only when the first is over.
            training.save(elsewhere / "other").wait()
    assert "nobody waited" in caplog.text
    assert not list(elsewhere.iterdir())


# --- Who differs -----------------------------------------------------------------------------------------------------


def refused(directory: Path, model: nn.Module, optimizer: Any, *names: str) -> None:
    """Loading is refused, names each, and changes nothing."""
    before = bits(dict(model.state_dict()))
    groups = [] if optimizer is None else bits([{**g, "params": len(g["params"])} for g in optimizer.param_groups])
    with pytest.raises(ConfigError) as caught:
        swapper.load_checkpoint(directory, model, optimizer)
    assert all(name in str(caught.value) for name in names), caught.value
    assert "Nothing was loaded" in str(caught.value)
    assert bits(dict(model.state_dict())) == before
    if optimizer is not None:
        assert bits([{**g, "params": len(g["params"])} for g in optimizer.param_groups]) == groups


def net(change: Callable[[Any], Any] = lambda model: None) -> Any:
    torch.manual_seed(3)
    model = Net()
    change(model)
    return model


MODELS: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "missing": (lambda m: delattr(m, "norm"), ["norm.weight", "norm.bias", "norm.running_mean"]),
    "extra": (lambda m: setattr(m, "more", nn.Linear(2, 2)), ["more.weight", "more.bias"]),
    "renamed": (lambda m: (setattr(m, "new", m.one), delattr(m, "one")), ["one.weight", "new.weight"]),
    "shape": (lambda m: setattr(m, "one", nn.Linear(65, 72)), ["one.weight has shape [72, 65]", "[72, 64]"]),
    "dtype": (lambda m: m.two.double(), ["two.weight has dtype float64", "two.bias"]),
    "tied": (lambda m: setattr(m.two, "bias", m.norm.bias), ["two.bias", "norm.bias", "one tensor"]),
    "no tensor": (lambda m: m.norm.register_buffer("running_mean", None), ["norm.running_mean"]),
}


@pytest.mark.parametrize("change, names", MODELS.values(), ids=MODELS)
def test_another_model_is_refused(change: Callable[[Any], Any], names: list[str], tmp_path: Path) -> None:
    Training(tmp_path).steps(1).save(tmp_path / "saved")
    refused(tmp_path / "saved", net(change), None, *names)


@pytest.mark.parametrize("swapped", [True, False])
def test_one_tensor_of_the_checkpoint_that_is_two_in_the_model_is_loaded_into_both(
    swapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swapper.checkpoint.saved_model._PIECE_BYTES", 256)  # Longer ones are read in pieces.
    tied = net(lambda m: (setattr(m, "two", nn.Linear(64, 72)), setattr(m.two, "weight", m.one.weight)))
    swapper.save_checkpoint(tmp_path / "saved", tied)
    model = net(lambda m: setattr(m, "two", nn.Linear(64, 72)))
    if swapped:
        with small_records():
            swapper.offload(
                model, config={"nvme_path": tmp_path, "pool_bytes": "2MiB", "offload_param": {"device": "nvme"}}
            )
    swapper.load_checkpoint(tmp_path / "saved", model)
    assert bits(dict(model.state_dict())) == bits(dict(tied.state_dict()))


def adamw(groups: Any, **options: Any) -> Any:
    return torch.optim.AdamW(groups, **options)


OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "class": (lambda m: torch.optim.Adam(m.parameters()), ["Adam", "AdamW"]),
    "fewer": (lambda m: adamw([*m.one.parameters(), *m.two.parameters()]), ["has 4 parameters, and 6"]),
    "groups": (lambda m: adamw([{"params": [p]} for p in m.parameters()]), ["6 parameter groups, and 1"]),
    "order": (lambda m: adamw(list(m.parameters())[::-1]), ["norm.bias", "one.weight"]),
    "others": (lambda m: adamw([nn.Parameter(p.detach()) for p in m.parameters()]), ["does not have"]),
    "several": (lambda m: [adamw(m.parameters()), adamw(m.parameters())], ["2 optimizers"]),
}


@pytest.mark.parametrize("make, names", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_another_optimizer_is_refused(make: Callable[[Any], Any], names: list[str], tmp_path: Path) -> None:
    Training(tmp_path).steps(1).save(tmp_path / "saved")
    model = net()
    optimizer = make(model)
    if isinstance(optimizer, list):
        with pytest.raises(ConfigError, match=names[0]):
            swapper.load_checkpoint(tmp_path / "saved", model, optimizer)
        return
    refused(tmp_path / "saved", model, optimizer, *names)


def test_masters_without_masters_are_refused_before_anything_changes(tmp_path: Path) -> None:
    Training(tmp_path, masters=True).steps(1).save(tmp_path / "saved")
    model = Net().bfloat16()
    before = bits(dict(model.state_dict()))
    with pytest.raises(ConfigError, match="master_weights"):
        swapper.load_checkpoint(tmp_path / "saved", model, torch.optim.AdamW(model.parameters()))
    assert bits(dict(model.state_dict())) == before


# --- What a class adds to its state dict -----------------------------------------------------------------------------


class Counting(torch.optim.AdamW):
    """Adds to its state dict, and asks for that."""

    turns = 0
    average = torch.zeros(3)

    def step(self, closure: Any = None) -> Any:
        self.turns += 1
        self.average = self.average + 0.5
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "turns": self.turns, "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        given = dict(state_dict)
        self.turns, self.average = given.pop("turns"), given.pop("average").clone()
        super().load_state_dict(given)


class OfNoParameter(torch.optim.AdamW):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        self.state["all"] = {"turns": (self.state.get("all") or {"turns": 0})["turns"] + 1}  # type: ignore[index]
        return out


class Hooked(torch.optim.AdamW):
    """Something of the user's adds to its state dict, and reads that."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.users = [0]
        self.register_state_dict_post_hook(lambda _, found: {**found, "users": self.users[0]})
        self.register_load_state_dict_pre_hook(lambda _, given: self.users.__setitem__(0, given["users"]))


ADDING: list[Any] = [Counting, OfNoParameter, Hooked]


def trained_by(kind: Any, path: Path | None, steps: int) -> Training:
    training = Training(None)
    training.optimizer = kind(training.model.parameters(), lr=1e-2)
    if path is not None:
        settings: dict[str, Any] = {"nvme_path": path, "pool_bytes": "2MiB", "bucket_bytes": "128KiB"}
        with small_records():
            swapper.wrap_optimizer(
                training.optimizer, swapper.OffloadConfig(**settings, offload_optimizer={"device": "nvme"})
            )
    if kind is Hooked:
        training.optimizer.users[0] = steps
    return training.steps(steps)


def whole_state(training: Training) -> Any:
    return bits([dict(training.model.state_dict()), training.optimizer.state_dict()])


def test_state_of_no_parameter_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """A plain optimizer keeps what it was given, and gives it to a checkpoint; a swapped one cannot."""
    first, plain, swapped = (Training(path).steps(steps) for path, steps in [(None, 2), (None, 1), (tmp_path, 1)])
    given = first.optimizer.state_dict()
    given["state"][77] = {"exp_avg": torch.ones(3)}
    first.optimizer.load_state_dict(given)
    swapper.save_checkpoint(tmp_path / "saved", first.model, first.optimizer)
    swapper.load_checkpoint(tmp_path / "saved", plain.model, plain.optimizer)
    assert bits(plain.optimizer.state_dict()["state"]) == bits(first.optimizer.state_dict()["state"])
    before = whole_state(swapped)
    with pytest.raises(ConfigError, match=r"belongs to no parameter \(77\)"):
        swapper.load_checkpoint(tmp_path / "saved", swapped.model, swapped.optimizer)
    assert whole_state(swapped) == before
    swapped.steps(1)


class SetsItsState(torch.optim.AdamW):
    """Has a `load_state_dict` that knows nothing of torch's hooks, as those of bitsandbytes."""

    def load_state_dict(self, state_dict: Any, move_to_device: bool = True) -> None:
        given = copy.deepcopy(state_dict)
        ids = [i for group in given["param_groups"] for i in group["params"]]
        known = dict(zip(ids, (p for group in self.param_groups for p in group["params"]), strict=True))
        state: Any = defaultdict(dict, {known.get(key, key): value for key, value in given["state"].items()})
        groups = [
            {**new, "params": old["params"]} for old, new in zip(self.param_groups, given["param_groups"], strict=True)
        ]
        self.__setstate__({"state": state, "param_groups": groups})


@pytest.mark.filterwarnings("ignore")
def test_state_of_a_class_of_somebodys_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    model = nn.Linear(64, 64)
    optimizer = importlib.import_module("torchao.optim").AdamW8bit(model.parameters())
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    with pytest.raises(SwapError, match=r"state 'exp_avg' of weight is a OptimState8bit.*with torch.save"):
        swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    assert not (tmp_path / "saved").exists()


def bitsandbytes(name: str) -> Any:
    pytest.importorskip("bitsandbytes")
    made = getattr(importlib.import_module("bitsandbytes.optim"), name)
    return lambda parameters, lr: made(parameters, lr=lr)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["SetsItsState", "AdamW", "AdamW8bit", "Lion8bit"])
@pytest.mark.parametrize("before", [None, "nvme"])
@pytest.mark.parametrize("after", [None, "nvme"])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_class_that_loads_without_hooks_has_its_state(
    kind: str, before: Any, after: Any, steps: int, tmp_path: Path
) -> None:
    make = SetsItsState if kind == "SetsItsState" else bitsandbytes(kind)
    first = trained_by(make, tmp_path if before else None, 3)
    swapper.save_checkpoint(tmp_path / "saved", first.model, first.optimizer)
    second = trained_by(make, tmp_path if after else None, steps)
    swapper.load_checkpoint(tmp_path / "saved", second.model, second.optimizer)
    second.turn = first.turn
    assert whole_state(second) == whole_state(first) and second.optimizer.state_dict()["state"]
    assert whole_state(second.steps(2)) == whole_state(first.steps(2))


@pytest.mark.parametrize("kind", ADDING)
@pytest.mark.parametrize("before", [None, "nvme"])
@pytest.mark.parametrize("after", [None, "nvme"])
def test_what_a_class_adds_to_its_state_dict(kind: Any, before: Any, after: Any, tmp_path: Path) -> None:
    """Only of one whose step does not change attributes state can be swapped."""
    if kind is not Hooked and (before or after):
        with pytest.raises(ConfigError, match=r"changes its attribute|belongs to no parameter"):
            trained_by(kind, tmp_path, 2)
        return
    first = trained_by(kind, tmp_path if before else None, 3)
    swapper.save_checkpoint(tmp_path / "saved", first.model, first.optimizer)
    second = trained_by(kind, tmp_path if after else None, 1)
    swapper.load_checkpoint(tmp_path / "saved", second.model, second.optimizer)
    second.turn = first.turn
    assert whole_state(second) == whole_state(first)
    assert whole_state(second.steps(2)) == whole_state(first.steps(2))


@pytest.mark.parametrize("kind", ADDING)
def test_it_is_exported_and_imported(kind: Any, tmp_path: Path) -> None:
    first, other = trained_by(kind, None, 3), trained_by(kind, None, 1)
    swapper.save_checkpoint(tmp_path / "saved", first.model, first.optimizer)
    export_checkpoint(tmp_path / "saved", "torch", tmp_path / "out.pt")
    import_checkpoint(tmp_path / "out.pt", tmp_path / "again", optimizer=f"{kind.__module__}.{kind.__name__}")
    exported = torch.load(tmp_path / "out.pt")["optimizer"]
    assert bits(exported) == bits(first.optimizer.state_dict())
    swapper.load_checkpoint(tmp_path / "again", other.model, other.optimizer)
    assert whole_state(other) == whole_state(first)
    export_checkpoint(tmp_path / "saved", "safetensors", tmp_path / "files")
    assert json.loads((tmp_path / "files" / "optimizer.json").read_text())["rest"]
    with pytest.raises(SwapError, match=r"also has .*, which torch.distributed.checkpoint leaves out"):
        export_checkpoint(tmp_path / "saved", "dcp", tmp_path / "dcp")


def hooked(path: Path | None, hook: Any, given: list[Any] | None = None) -> Training:
    """Two steps of AdamW with a hook on its state dict, and one that notes in `given` what is loaded."""
    training = trained_by(torch.optim.AdamW, path, 2)
    training.optimizer.register_state_dict_post_hook(hook)
    if given is not None:
        training.optimizer.register_load_state_dict_pre_hook(lambda _, state: given.append(dict(state)))
    return training


def of_state(_: Any, found: dict[str, Any]) -> dict[str, Any]:
    norms = [float(entry["exp_avg"].norm()) for entry in found["state"].values()]
    return {**found, "norms": norms, "steps": float(found["state"][3]["step"])}


def groups_too(_: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "param_groups": [{**group, "mine": 7} for group in found["param_groups"]]}


def in_place(_: Any, found: dict[str, Any]) -> None:
    found["names"] = {"alpha", "beta", "gamma", "delta"}


@pytest.mark.parametrize("hook", [of_state, groups_too, in_place])
@pytest.mark.parametrize("where", [None, "nvme"])
def test_hooks_see_the_state_and_what_they_add_is_loaded(hook: Any, where: Any, tmp_path: Path) -> None:
    given: list[Any] = []
    training = hooked(tmp_path if where else None, hook, given)
    plain = hooked(None, hook).optimizer.state_dict()
    swapper.save_checkpoint(tmp_path / "saved", training.model, training.optimizer)
    swapper.load_checkpoint(tmp_path / "saved", training.model, training.optimizer)
    (loaded,) = given
    plain.pop("state"), loaded.pop("state")
    assert loaded == plain


@pytest.mark.parametrize("where", [None, "nvme"])
def test_a_hook_that_names_state_has_it_saved_once(where: Any, tmp_path: Path) -> None:
    def named(_: Any, found: dict[str, Any]) -> dict[str, Any]:
        return {**found, "state": {f"p{number}": entry for number, entry in found["state"].items()}}

    training = hooked(tmp_path if where else None, named)
    swapper.save_checkpoint(tmp_path / "saved", training.model, training.optimizer)
    export_checkpoint(tmp_path / "saved", "torch", tmp_path / "out.pt")
    assert [*torch.load(tmp_path / "out.pt")["optimizer"]["state"]] == [*range(6)]
    if where:
        with pytest.raises(ConfigError, match=r"belongs to no parameter .'p"):
            training.optimizer.load_state_dict(training.optimizer.state_dict())


@pytest.mark.parametrize("where", [None, "nvme"])
def test_state_in_another_form_is_saved_as_it_is(where: Any, tmp_path: Path) -> None:
    """As bitsandbytes wraps what is quantised, and others dequantise it."""

    def converted(_: Any, found: dict[str, Any]) -> dict[str, Any]:
        state = {
            number: {key.replace("exp", "e"): value for key, value in entry.items()}
            for number, entry in found["state"].items()
        }
        return {**found, "state": state}

    training = hooked(tmp_path if where else None, converted)
    swapper.save_checkpoint(tmp_path / "saved", training.model, training.optimizer)
    plain = trained_by(torch.optim.AdamW, None, 1)
    swapper.load_checkpoint(tmp_path / "saved", plain.model, plain.optimizer)
    assert whole_state(plain) == whole_state(trained_by(torch.optim.AdamW, None, 2))


@pytest.mark.parametrize("where", [None, "nvme"])
def test_what_a_checkpoint_cannot_have_of_a_state_dict_is_refused(where: Any, tmp_path: Path) -> None:
    def fails(_: Any, found: dict[str, Any]) -> None:
        raise ValueError("the user's")

    def entries_too(_: Any, found: dict[str, Any]) -> dict[str, Any]:
        return {**found, "state": {number: {**entry, "mine": 1} for number, entry in found["state"].items()}}

    for hook, message in (
        (fails, r"failed: ValueError..the user's"),
        (entries_too, "adds 'mine' to the state of parameter"),
        (lambda *_: [], "is no dictionary"),
        (lambda _, found: {**found, "mine": object()}, r"state_dict\['mine'\] is of type object"),
    ):
        training = hooked(tmp_path if where else None, hook)
        with pytest.raises(SwapError, match=message):
            swapper.save_checkpoint(tmp_path / "saved", training.model, training.optimizer)
        assert not (tmp_path / "saved").exists()
        training.steps(1)


def test_a_state_dict_of_another_kind_is_saved_and_loaded(tmp_path: Path) -> None:
    class Around(torch.optim.Optimizer):
        """Without torch's `__init__`."""

        def __init__(self, parameters: Any, **options: Any) -> None:
            self.inner = torch.optim.AdamW(parameters, **options)
            self.param_groups, self.state = self.inner.param_groups, self.inner.state

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.inner.zero_grad(set_to_none)

        def state_dict(self) -> dict[str, Any]:
            return {"inner": self.inner.state_dict(), "version": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.inner.load_state_dict(state_dict["inner"])
            self.param_groups, self.state = self.inner.param_groups, self.inner.state

    first, second = trained_by(Around, None, 3), trained_by(Around, None, 1)
    swapper.save_checkpoint(tmp_path / "saved", first.model, first.optimizer)
    swapper.load_checkpoint(tmp_path / "saved", second.model, second.optimizer)
    second.turn = first.turn
    assert whole_state(second.steps(2)) == whole_state(first.steps(2))


@pytest.mark.parametrize("where", [None, "nvme"])
def test_state_of_a_parameter_that_is_in_no_group_any_more(where: Any, tmp_path: Path) -> None:
    training = trained_by(torch.optim.AdamW, tmp_path if where else None, 2)
    del training.optimizer.param_groups[0]["params"][-1]
    training.steps(1)
    swapper.save_checkpoint(tmp_path / "saved", training.model, training.optimizer)
    swapper.load_checkpoint(tmp_path / "saved", training.model, training.optimizer)


def test_tensors_of_no_parameter_are_exported_and_imported(tmp_path: Path) -> None:
    training, other = trained_by(torch.optim.AdamW, None, 2), trained_by(torch.optim.AdamW, None, 1)
    training.optimizer.state["k"] = torch.tensor([3])
    swapper.save_checkpoint(tmp_path / "saved", training.model, training.optimizer)
    export_checkpoint(tmp_path / "saved", "torch", tmp_path / "out.pt")
    import_checkpoint(tmp_path / "out.pt", tmp_path / "again", optimizer="torch.optim.AdamW")
    for path in ("saved", "again"):
        swapper.load_checkpoint(tmp_path / path, other.model, other.optimizer)
        assert bits(other.optimizer.state_dict()) == bits(training.optimizer.state_dict())
        other.steps(1)


def test_state_that_is_not_where_torch_has_it(tmp_path: Path) -> None:
    class Around(torch.optim.AdamW):
        def state_dict(self) -> dict[str, Any]:
            return inner.state_dict()

    training = Training(None).steps(1)
    inner, around = training.optimizer, Around(training.model.parameters())
    with pytest.raises(
        SwapError, match=r"state of parameters in its state_dict.. that is not in its attribute `state`"
    ):
        swapper.save_checkpoint(tmp_path / "saved", training.model, around)
    assert not (tmp_path / "saved").exists()


# --- Where one would not expect it ------------------------------------------------------------------------------------


class Extra(nn.Module):
    """Extra state of both kinds; it keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.state: Any = torch.arange(5)

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("state", [torch.arange(7.0), {"a": torch.ones(2), "b": (1, None)}, 3])
def test_extra_state_of_modules(state: Any, tmp_path: Path) -> None:
    model = Extra()
    model.state = state
    swapper.save_checkpoint(tmp_path / "saved", model)
    other = Extra()
    swapper.load_checkpoint(tmp_path / "saved", other)
    assert bits(other.state) == bits(state) and type(other.state) is type(state)
    assert bits(other.weight) == bits(model.weight)


@pytest.mark.parametrize("way", ["saved", "exported", "imported"])
def test_versions_of_modules(way: str, tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 3), Versioned(3, 3), nn.BatchNorm1d(3))
            self.outer = Versioned(3, 1)

    model, other = Model(), Model()
    path = tmp_path / "it"
    if way == "imported":
        torch.save(model.state_dict(), tmp_path / "it.pt")
        import_checkpoint(tmp_path / "it.pt", path)
    else:
        swapper.save_checkpoint(path, model)
    if way == "exported":
        export_checkpoint(path, "torch", tmp_path / "it.pt")
        found = torch.load(tmp_path / "it.pt")["model"]
        assert found._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
        other.load_state_dict(found)
    else:
        swapper.load_checkpoint(path, other)
    assert bits(other.state_dict()) == bits(model.state_dict())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("width", [16, 2100])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_module_changes_in_the_state_dict_is_loaded(change: str, width: int, mode: Any, tmp_path: Path) -> None:
    if width > 16 and (change not in ("in place", "of a view") or mode is torch.inference_mode):
        return
    torch.manual_seed(0)
    saved, plain, ours = nn.Linear(width, width), Changing(change, width), Changing(change, width)
    plain.load_state_dict({name: value.clone() for name, value in saved.state_dict().items()})
    swapper.save_checkpoint(tmp_path / "it", saved)
    with mode():
        swapper.load_checkpoint(tmp_path / "it", ours)
    assert bits(ours.state_dict()) == bits(plain.state_dict())


def test_a_state_dict_that_was_loaded_by_assignment_is_imported(tmp_path: Path) -> None:
    """torch leaves in its metadata that it was."""
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    state = model.state_dict()
    nn.Linear(3, 3).load_state_dict(state, assign=True)
    torch.save(state, tmp_path / "it.pt")
    import_checkpoint(tmp_path / "it.pt", tmp_path / "it")
    swapper.load_checkpoint(tmp_path / "it", other)
    assert bits(other.state_dict()) == bits(model.state_dict())


def test_what_the_metadata_of_a_state_dict_share_with_it(tmp_path: Path) -> None:
    shared = [1]
    state: Any = nn.Linear(3, 3).state_dict()
    state._metadata["mine"] = {"shared": shared}
    state["shared"] = shared
    swapper.save_checkpoint(tmp_path / "it", nn.Linear(3, 3), extra=[state, state])
    first, second = swapper.load_checkpoint(tmp_path / "it", nn.Linear(3, 3))
    assert first is second and first["shared"] is first._metadata["mine"]["shared"] and first["shared"] == shared


def test_a_state_dict_without_versions_is_loaded_without(tmp_path: Path) -> None:
    model, other = Versioned(3, 3), Versioned(3, 3)
    model.register_state_dict_post_hook(lambda module, state, prefix, metadata: delattr(state, "_metadata"))
    swapper.save_checkpoint(tmp_path / "it", model)
    swapper.load_checkpoint(tmp_path / "it", other)
    assert bits(other.weight) == bits(model.weight.exp()) and bits(other.bias) == bits(model.bias)


def test_models_of_all_kinds(tmp_path: Path) -> None:
    nothing = nn.Module()
    buffers = nn.Module()
    buffers.register_buffer("b", torch.randn(3))
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    frozen = nn.Linear(3, 4).requires_grad_(False)
    for i, model in enumerate([nothing, buffers, parametrized, frozen]):
        swapper.save_checkpoint(tmp_path / str(i), model, [])
        saved = bits(dict(model.state_dict()))
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
        swapper.load_checkpoint(tmp_path / str(i), model, [])
        assert bits(dict(model.state_dict())) == saved
    with pytest.raises(SwapError, match="weight"):
        swapper.save_checkpoint(tmp_path / "lazy", nn.LazyLinear(3))
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3"]


class Late:
    """A write that begins when it is told to, or waited for."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self.begin: Callable[[], Any] | None = begin
        self.transfer: Any = None

    def go(self) -> Late:
        begin, self.begin = self.begin, None
        if begin is not None:
            self.transfer = begin()
        return self

    def done(self) -> bool:
        return self.begin is None and bool(self.transfer.done())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.go().transfer, name)


def late_writes(patch: pytest.MonkeyPatch) -> list[Late]:
    """Have writes of records begin late, and add them to what this returns."""
    writes: list[Late] = []
    write = TensorStore.write

    def late(*arguments: Any) -> Any:
        writes.append(Late(lambda: write(*arguments)))
        return writes[-1]

    patch.setattr(TensorStore, "write", late)
    return writes


def test_values_that_are_changed_and_changed_back_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path).steps(1)
    with monkeypatch.context() as patch:
        writes = late_writes(patch)
        training.steps(1)
        with torch.no_grad():
            for sign in (-1, -1):
                for parameter in training.model.parameters():
                    parameter.data.mul_(sign)
                for each in writes:
                    each.go()
    training.save(tmp_path / "saved")
    assert training.everything() == Training(tmp_path).load(tmp_path / "saved").everything()


class Flipping(nn.Linear):
    """Its forward changes the weights and changes them back."""

    between: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.data.neg_()
            self.between()
            self.weight.data.neg_()
        return super().forward(x)


def test_values_that_a_forward_changes_and_changes_back_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(Flipping(96, 96), Flipping(96, 96))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    devices = {f"offload_{what}": {"device": "nvme"} for what in ("optimizer", "param")}
    (tmp_path / "nvme").mkdir()
    config = swapper.OffloadConfig(nvme_path=tmp_path / "nvme", pool_bytes="8MiB", bucket_bytes="1MiB", **devices)
    swapper.offload(model, optimizer, config)
    with monkeypatch.context() as patch:
        writes = late_writes(patch)
        model(torch.ones(1, 96)).sum().backward()
        optimizer.step()
        assert any(each.begin is not None for each in writes)
        patch.setattr(Flipping, "between", staticmethod(lambda: [each.go() for each in writes] and None))
        with torch.no_grad():
            model(torch.ones(1, 96))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    swapper.save_checkpoint(tmp_path / "saved", model)
    again = nn.Sequential(Flipping(96, 96), Flipping(96, 96))
    swapper.load_checkpoint(tmp_path / "saved", again)
    assert all(torch.equal(value, before[name]) for name, value in again.state_dict().items())


class Parts(nn.Module):
    """Layers of which only some are used, each of more than a bucket and of less."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(16, 96), *(nn.Linear(96, 96) for _ in range(count))])

    def train_on(self, used: list[int], optimizer: torch.optim.Optimizer) -> None:
        x = torch.ones(2, 16)
        for number in used:
            x = self.parts[number](x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def parts(path: Path | None, count: int = 4) -> tuple[Parts, Any]:
    torch.manual_seed(0)
    model = Parts(count)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if path is not None:
        settings: Any = {"nvme_path": path, "pool_bytes": "1MiB", "bucket_bytes": "32KiB"}
        swapper.wrap_optimizer(optimizer, swapper.OffloadConfig(offload_optimizer={"device": "nvme"}, **settings))
    return model, optimizer


@pytest.mark.parametrize("used", [[0, 2, 3, 4], [0, 4], [0]], ids=str)
@pytest.mark.parametrize("swapped", [True, False])
def test_parameters_that_never_had_a_gradient_have_no_state(swapped: bool, used: list[int], tmp_path: Path) -> None:
    model, optimizer = parts(tmp_path)
    model.train_on(used, optimizer)
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    again, other = parts(tmp_path if swapped else None)
    swapper.load_checkpoint(tmp_path / "saved", again, other)
    assert bits(other.state_dict()) == bits(optimizer.state_dict())
    for each, its in ((model, optimizer), (again, other)):
        each.train_on([0, 1, 2, 3, 4], its)
    assert bits([dict(again.state_dict()), other.state_dict()]) == bits(
        [dict(model.state_dict()), optimizer.state_dict()]
    )


def test_a_checkpoint_may_have_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    model, optimizer = parts(tmp_path, 30)
    model.train_on(list(range(31)), optimizer)
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    again, other = parts(None, 30)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max(map(int, os.listdir("/proc/self/fd"))) + 60
    assert len(os.listdir(tmp_path / "saved")) > 90
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, limits[1]))
    try:
        swapper.load_checkpoint(tmp_path / "saved", again, other)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert bits(other.state_dict()) == bits(optimizer.state_dict())


@pytest.mark.parametrize("swapped", [True, False])
def test_in_inference_mode_and_others(swapped: bool, tmp_path: Path) -> None:
    training = Training(tmp_path if swapped else None).steps(2)
    modes: list[Callable[[], Any]] = [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu")]
    for i, mode in enumerate(modes):
        with mode():
            training.save(tmp_path / f"saved{i}")
        training.steps(1)
        with mode():
            training.load(tmp_path / f"saved{i}")
    assert training.steps(2).everything() == Training(None).steps(4).everything()


def test_in_the_middle_of_accumulation(tmp_path: Path) -> None:
    training, plain = Training(tmp_path).steps(2), Training(None).steps(2)
    for each in (training, plain):
        each.model.loss(50).backward()
    training.save(tmp_path / "saved")
    assert training.steps(1).everything() == plain.steps(1).everything()


def test_tensors_in_extra_start_where_their_memory_does(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    # Whoever takes them may look at the storage: torch reads a random state that starts later from another place.
    extra = {"scale": torch.ones(()), "random": torch.get_rng_state(), "average": torch.ones(3, 5)}
    swapper.save_checkpoint(tmp_path / "saved", model, None, extra)
    loaded = swapper.load_checkpoint(tmp_path / "saved", model)
    for name, tensor in extra.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].storage_offset() == 0, name
        assert loaded[name].untyped_storage().nbytes() == tensor.nbytes, name
    torch.set_rng_state(loaded["random"])
    assert torch.equal(torch.get_rng_state(), extra["random"])


def test_a_forked_child_does_not_change_what_was_loaded(tmp_path: Path) -> None:
    model = nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer, {"average": torch.ones(5000)})
    extra = swapper.load_checkpoint(tmp_path / "saved", model, optimizer)
    moment = optimizer.state[model.weight]["exp_avg"]
    before = moment.clone()

    def change() -> None:
        for tensor in (moment, extra["average"]):
            tensor.view(-1)[:10] = 7.0

    in_forked_child(change)
    assert torch.equal(moment, before)
    assert torch.equal(extra["average"], torch.ones(5000))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m, o: ([m], o), "model: a list is no torch.nn.Module"),
        (lambda m, o: (m.state_dict(), o), "model: a OrderedDict is no torch.nn.Module"),
        (lambda m, o: (m, o.state_dict()), "optimizer: a dict is no torch.optim.Optimizer.*as extra"),
        (lambda m, o: (m, [o, None]), "optimizer: a NoneType is no torch.optim.Optimizer"),
        (lambda m, o: (m, torch.optim.lr_scheduler.ExponentialLR(o, 0.9)), "optimizer: a ExponentialLR is no"),
    ],
)
def test_what_is_no_model_or_optimizer_is_refused(make: Callable[..., Any], words: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    swapper.save_checkpoint(tmp_path / "good", model, optimizer)
    with pytest.raises(ConfigError, match=words):
        swapper.save_checkpoint(tmp_path / "saved", *make(model, optimizer))
    with pytest.raises(ConfigError, match=words):
        swapper.load_checkpoint(tmp_path / "good", *make(model, optimizer))
    assert os.listdir(tmp_path) == ["good"]


def test_parameters_that_no_model_has_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.Adam([*generator.parameters(), *critic.parameters()])
    swapper.save_checkpoint(tmp_path / "whole", nn.ModuleDict({"g": generator, "c": critic}), optimizer)
    assert not caplog.records
    for name in ("one", "two"):
        swapper.save_checkpoint(tmp_path / name, generator, optimizer)
    (record,) = caplog.records
    assert "2 parameters that the model does not have" in record.getMessage()


@pytest.mark.parametrize(
    "dtype",
    [
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "uint16",
        "uint32",
        "uint64",
        "bool",
        "complex32",
        "complex128",
    ],
)
@pytest.mark.parametrize("length_bytes", [32, 40 << 20])
def test_buffers_of_every_dtype_come_back(dtype: str, length_bytes: int, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    data = torch.randint(0, 2 if dtype == "bool" else 120, (length_bytes,), dtype=torch.uint8)
    model = nn.Module()
    model.register_buffer("b", data.view(kind).view(2, -1))
    saved = data.clone()
    swapper.save_checkpoint(tmp_path / "saved", model)
    data.zero_()
    swapper.load_checkpoint(tmp_path / "saved", model)
    assert torch.equal(data, saved)
    if dtype.startswith(("float8_e4m3fn", "float8_e5m2", "uint")) and not dtype.endswith("fnuz"):
        with safe_open(tmp_path / "saved" / "model-memory.safetensors", "pt") as file:
            assert file.get_tensor("b").dtype == kind


def test_a_save_within_a_save_is_refused(tmp_path: Path) -> None:
    training = Training(tmp_path).steps(1)

    def again(*_: object) -> None:
        training.save(tmp_path / "within")

    hook = training.model.register_state_dict_post_hook(again)
    with pytest.raises(SwapError, match="within save_checkpoint"):
        training.save(tmp_path / "saved")
    hook.remove()
    training.save(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("swapper-")] == ["saved"]


def test_a_closed_or_forked_training_is_refused_before_anything_changes(tmp_path: Path) -> None:
    training = Training(tmp_path).steps(1)
    training.save(tmp_path / "saved")

    def child() -> None:
        for call in (training.save, training.load):
            with pytest.raises(SwapError, match="fork"):
                call(tmp_path / "saved")

    in_forked_child(child)
    assert whole(tmp_path / "saved")
    training.steps(1)
    before = bits(dict(training.model.state_dict()))
    training.optimizer.swapper.close()
    for call in (training.save, training.load):
        with pytest.raises(SwapError, match="closed"):
            call(tmp_path / "saved")
    assert bits(dict(training.model.state_dict())) == before
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("swapper-")) == ["saved"]


AT_THE_END = """
import atexit, sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from checkpoints import SmallTraining as Training
training = Training(Path(sys.argv[1])).steps(2)
training.save(Path(sys.argv[2]) / "dropped")
atexit.register(lambda: training.save(Path(sys.argv[2]) / "late"))
atexit.register(lambda: training.save(Path(sys.argv[1]) / "late").wait())
"""


@pytest.mark.long
def test_the_end_of_the_program(tmp_path: Path, elsewhere: Path) -> None:
    """What goes on in the background is finished, and so is what a handler of the end saves."""
    script = [sys.executable, "-c", AT_THE_END, str(tmp_path), str(elsewhere), *(p for p in sys.path if p)]
    done = run_program(script, capture_output=True, text=True, timeout=240)
    assert whole(elsewhere / "dropped"), done.stderr
    assert whole(tmp_path / "late"), done.stderr
    assert whole(elsewhere / "late"), done.stderr
    assert {path.name for path in elsewhere.iterdir()} == {"dropped", "late"}


def test_parameters_of_two_optimizers(tmp_path: Path) -> None:
    def make(path: Path | None) -> tuple[Any, Any]:
        model = net()
        two = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.optim.SGD(model.one.parameters(), 0.1, momentum=0.9)
        for optimizer in two if path else ():
            config = swapper.OffloadConfig(nvme_path=path, pool_bytes="2MiB", offload_optimizer={"device": "nvme"})
            swapper.wrap_optimizer(optimizer, config)
        return model, two

    def steps(model: Any, two: Any, turns: range) -> None:
        for turn in turns:
            model.zero_grad()
            model.loss(turn).backward()
            for optimizer in two:
                optimizer.step()

    first = make(tmp_path)
    steps(*first, range(2))
    swapper.save_checkpoint(tmp_path / "saved", *first)
    reference, second = make(None), make(tmp_path)
    steps(*reference, range(4))
    swapper.load_checkpoint(tmp_path / "saved", *second)
    steps(*second, range(2, 4))
    assert bits(dict(second[0].state_dict())) == bits(dict(reference[0].state_dict()))


def test_while_it_is_stepped_in_backward(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"device": "nvme", "step_in_backward": True}
    config = swapper.OffloadConfig(nvme_path=tmp_path, pool_bytes="2MiB", offload_optimizer=state)
    swapper.wrap_optimizer(optimizer, config)
    model.loss(0).backward()
    with pytest.raises(SwapError, match="stepped in backward"):
        swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    model.loss(1).backward()
    swapper.load_checkpoint(tmp_path / "saved", model, optimizer)
    optimizer.zero_grad()
    model.loss(1).backward()
    optimizer.step()
    plain = net()
    other = torch.optim.AdamW(plain.parameters())
    for turn in range(2):
        other.zero_grad()
        plain.loss(turn).backward()
        other.step()
    assert bits(dict(plain.named_parameters())) == bits(dict(model.named_parameters()))


@pytest.mark.parametrize("step", ["seven", torch.ones(3), -1, float("nan"), None, 2**70])
def test_a_step_that_is_no_count(step: Any, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.one.bias] = {"step": step}
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    del optimizer.state[model.one.bias]
    swapper.load_checkpoint(tmp_path / "saved", model, optimizer)
    found = optimizer.state[model.one.bias]["step"]
    assert bits(found) == bits(step) or found != found


def test_state_of_a_parameter_without_elements_comes_back(tmp_path: Path) -> None:
    def make() -> tuple[nn.ParameterDict, torch.optim.Optimizer]:
        model = nn.ParameterDict({"empty": nn.Parameter(torch.empty(2, 0, 3)), "full": nn.Parameter(torch.ones(4))})
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    (model["empty"].sum() + model["full"].sum()).backward()
    optimizer.step()
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    again, other = make()
    swapper.load_checkpoint(tmp_path / "saved", again, other)
    assert bits([dict(again), other.state_dict()["state"]]) == bits([dict(model), optimizer.state_dict()["state"]])


@pytest.mark.parametrize("below", ["checkpoint", "deep/below/checkpoint", ""])
@pytest.mark.parametrize("linked", [False, True])
def test_a_checkpoint_within_a_run_directory_is_refused(below: str, linked: bool, tmp_path: Path) -> None:
    """It would be deleted with the run."""
    drive = tmp_path / "drive"
    drive.mkdir()
    model = nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    swapper.wrap_optimizer(
        optimizer, {"nvme_path": drive, "pool_bytes": "8MiB", "offload_optimizer": {"device": "nvme"}}
    )
    (run,) = drive.iterdir()
    before = sorted(run.rglob("*"))
    where = run
    if linked:
        where = tmp_path / "link"
        where.symlink_to(run)
    with pytest.raises(SwapError, match="is deleted with its run; name another directory"):
        swapper.save_checkpoint(where / below, model, optimizer)
    assert sorted(run.rglob("*")) == before
    swapper.save_checkpoint(drive / "checkpoint", model, optimizer).wait()
    swapper.of(optimizer).close()
    assert [path.name for path in drive.iterdir()] == ["checkpoint"]


def test_a_checkpoint_that_is_still_copied_may_not_be_loaded_yet_which_is_said(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    copy = NewCheckpoint._copy

    def copy_late(*args: Any) -> None:
        assert told.wait(60)
        copy(*args)

    monkeypatch.setattr(NewCheckpoint, "_copy", copy_late)
    paths = [nvme_path / "a", nvme_path / "b"]  # Of two drives files are copied, and not linked.
    for path in paths:
        path.mkdir()
    model = nn.Linear(1024, 1024)
    config = {"nvme_path": paths, "pool_bytes": "32MiB", "offload_param": {"device": "nvme"}}
    swapper.offload(model, config=config)
    saving = swapper.save_checkpoint(nvme_path / "checkpoint", model)
    assert not saving.done()
    with pytest.raises(swapper.SwapIOError, match="it is being saved, and appears when its files are copied"):
        swapper.load_checkpoint(nvme_path / "checkpoint", model)
    for name in ("check", "heckpoint", "none"):  # Others are only not there.
        with pytest.raises(swapper.SwapIOError, match="a checkpoint is a directory with this file"):
            swapper.load_checkpoint(nvme_path / name, model)
    told.set()
    saving.wait()
    swapper.load_checkpoint(nvme_path / "checkpoint", model)
    model.swapper.close()


def test_a_model_may_go_while_its_checkpoint_is_copied(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = threading.Event()
    copy = NewCheckpoint._copy

    def copy_late(*args: Any) -> None:
        assert gone.wait(60)
        copy(*args)

    monkeypatch.setattr(NewCheckpoint, "_copy", copy_late)
    paths = [nvme_path / "a", nvme_path / "b"]
    for path in paths:
        path.mkdir()
    everything = {f"offload_{each}": {"device": "nvme"} for each in ("optimizer", "gradient", "param")}
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)), nn.Linear(1024, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"nvme_path": paths, "pool_bytes": "32MiB", "bucket_bytes": "512KiB", **everything}
    swapper.offload(model, optimizer, config)
    model(torch.ones(4, 1024)).square().mean().backward()
    optimizer.step()
    expected = [p.detach().clone() for p in model.parameters()]
    saving = swapper.save_checkpoint(nvme_path / "checkpoint", model, optimizer)
    assert not saving.done()
    del model, optimizer
    gc.collect()
    gone.set()
    saving.wait()
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)), nn.Linear(1024, 16))
    swapper.load_checkpoint(nvme_path / "checkpoint", model)
    assert all(torch.equal(*each) for each in zip(model.parameters(), expected, strict=True))
