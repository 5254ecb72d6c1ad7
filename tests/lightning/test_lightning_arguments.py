"""How a strategy is named and configured: names, configs, DeepSpeed's arguments, LightningCLI, both packages."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from launcher import run_program
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning_runs import IGNORED_WARNINGS, Net, config_of, facts, fit, loader, trainer_of

import swapper
import swapper.fabric
import swapper.lightning
from swapper.config import OffloadConfig
from swapper.errors import ConfigError
from swapper.lightning import SwapDDPStrategy, SwapStrategy
from swapper.strategy.arguments import MEANINGLESS

LIGHTNINGS_OWN = "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
pytestmark = [pytest.mark.filterwarnings(text) for text in [*IGNORED_WARNINGS, LIGHTNINGS_OWN]]

DEVICES = {
    "swapper_cpu": ("cpu", "none", "none"),
    "swapper_nvme": ("nvme", "none", "none"),
    "swapper_nvme_all": ("nvme", "nvme", "nvme"),
    "swapper_ddp_nvme": ("nvme", "none", "none"),
}


def devices(config: OffloadConfig) -> tuple[str, str, str]:
    return config.offload_optimizer.device, config.offload_gradient.device, config.offload_param.device


@pytest.mark.parametrize("name", DEVICES)
def test_a_name_is_a_strategy(name: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAPPER_NVME_PATH", str(nvme_path))
    trainer = trainer_of(name)
    assert type(trainer.strategy) is (SwapDDPStrategy if "ddp" in name else SwapStrategy)
    assert devices(trainer.strategy.offload_config) == DEVICES[name]
    if name != "swapper_cpu":
        assert trainer.strategy.offload_config.nvme_path == nvme_path


def test_a_named_strategy_trains(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAPPER_NVME_PATH", str(nvme_path))
    trainer = fit("swapper_nvme")
    assert swapper.of(trainer.optimizers[0]).stats().bytes_written > 0
    assert facts(trainer) == facts(fit())


def test_files_go_to_several_drives_or_to_a_directory_that_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SWAPPER_NVME_PATH", raising=False)
    assert SwapStrategy().offload_config.nvme_path == Path(".swapper")
    assert (tmp_path / ".swapper").is_dir()
    monkeypatch.setenv("SWAPPER_NVME_PATH", f"one{os.pathsep}two")
    assert SwapStrategy().offload_config.nvme_path == (Path("one"), Path("two"))
    assert SwapStrategy(offload_optimizer=True, offload_optimizer_device="nvme", nvme_path="three").offload_config == (
        OffloadConfig(nvme_path="three", offload_optimizer={"device": "nvme"})
    )


def test_a_strategy_is_one_of_lightnings_and_takes_the_trainers_device() -> None:
    assert issubclass(SwapStrategy, SingleDeviceStrategy)
    assert issubclass(SwapDDPStrategy, DDPStrategy)
    named = L.pytorch.strategies.StrategyRegistry.get("swapper_cpu")
    assert named.parallel_devices is None
    named.parallel_devices = [torch.device("cuda", 1)]
    assert named.root_device == torch.device("cuda", 1)
    assert SwapStrategy(device="cuda:2", offload_optimizer=True).root_device == torch.device("cuda", 2)


def test_more_than_one_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="set devices=1, or use SwapDDPStrategy"):
        trainer_of("swapper_cpu", devices=2)


def test_a_config_is_an_object_a_mapping_or_a_file(nvme_path: Path, tmp_path: Path) -> None:
    config = OffloadConfig(**config_of(nvme_path))
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert SwapStrategy(config).offload_config is config
    for given in (config_of(nvme_path), file, str(file)):
        assert SwapStrategy(given).offload_config == config
        assert SwapDDPStrategy(given).offload_config == config
    with pytest.raises(ConfigError, match="pool_bytse: unknown key"):
        SwapStrategy({"pool_bytse": 1})


@pytest.mark.parametrize("more", [{"offload_optimizer": False}, {"queue_depth": 4}, {"stage": 3}])
def test_a_config_and_arguments_together_are_refused(more: dict[str, Any]) -> None:
    for strategy in (SwapStrategy, SwapDDPStrategy):
        with pytest.raises(ConfigError, match=f"was given a config and {next(iter(more))} too"):
            strategy({}, **more)


def test_deepspeeds_arguments_mean_the_same(nvme_path: Path) -> None:
    given: dict[str, Any] = {
        "offload_optimizer": True,
        "offload_optimizer_device": "nvme",
        "offload_parameters": True,
        "offload_params_device": "nvme",
        "nvme_path": str(nvme_path),
        "block_size": 65536,
        "queue_depth": 16,
        "single_submit": True,
        "overlap_events": False,
        "thread_count": 2,
    }
    wanted = OffloadConfig(
        nvme_path=nvme_path,
        offload_optimizer={"device": "nvme"},
        offload_gradient={"device": "nvme"},
        offload_param={"device": "nvme"},
        aio={
            "block_size": 65536,
            "queue_depth": 16,
            "single_submit": True,
            "overlap_events": False,
            "intra_op_parallelism": 2,
        },
    )
    assert SwapStrategy(**given).offload_config == wanted
    assert SwapDDPStrategy(**given).offload_config == wanted
    assert devices(SwapStrategy(offload_optimizer=True).offload_config) == ("cpu", "none", "none")


def test_deepspeeds_config_is_read(nvme_path: Path, tmp_path: Path) -> None:
    section = {"device": "nvme", "nvme_path": str(nvme_path)}
    document = {"zero_optimization": {"stage": 3, "offload_optimizer": section, "offload_param": section}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(document))
    for config in (document, file, str(file)):
        with pytest.warns(UserWarning, match="otherwise than DeepSpeed"):
            strategy = swapper.lightning.SwapStrategy(config)
        found = strategy.offload_config
        assert found.offload_optimizer.device == found.offload_param.device == found.offload_gradient.device == "nvme"
        fit(strategy, accumulate_grad_batches=2)  # Of which nothing was said.


def test_every_argument_of_deepspeeds_strategy_is_taken_or_named(nvme_path: Path) -> None:
    signature = inspect.signature(DeepSpeedStrategy.__init__)
    ours = inspect.signature(SwapStrategy.__init__).parameters.keys() | MEANINGLESS.keys()
    lightnings = {"parallel_devices", "cluster_environment", "process_group_backend", "timeout"}
    assert signature.parameters.keys() - ours == lightnings
    assert MEANINGLESS.keys() < signature.parameters.keys()
    ddp = inspect.signature(SwapDDPStrategy.__init__).parameters.keys()
    assert lightnings <= ddp | inspect.signature(DDPStrategy.__init__).parameters.keys()


@pytest.mark.parametrize("strategy", [SwapStrategy, SwapDDPStrategy])
def test_arguments_without_a_meaning_are_named_in_one_warning(strategy: Any, nvme_path: Path) -> None:
    with pytest.warns(UserWarning, match="no meaning for") as caught:
        strategy(offload_optimizer=True, stage=3, pin_memory=True, sub_group_size=10**9)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    text = str(caught[0].message)
    assert all(name in text for name in ("stage", "pin_memory", "sub_group_size"))


def test_arguments_that_offload_nothing_are_warned_about() -> None:
    with pytest.warns(UserWarning, match="nothing is offloaded"):
        assert devices(SwapStrategy(queue_depth=4).offload_config) == ("none", "none", "none")


@pytest.mark.parametrize(
    ("given", "unused"),
    [
        ({"offload_optimizer": True, "nvme_path": "/drive", "queue_depth": 4}, {"nvme_path", "queue_depth"}),
        ({"offload_parameters": True, "offload_optimizer_device": "nvme"}, {"offload_optimizer_device"}),
        ({"offload_optimizer": True, "offload_params_device": "nvme"}, {"offload_params_device"}),
    ],
)
def test_arguments_without_effect_are_warned_about(given: dict[str, Any], unused: set[str]) -> None:
    with pytest.warns(UserWarning, match="without effect") as caught:
        SwapStrategy(**given)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert {line.split(":")[0].strip() for line in str(caught[0].message).splitlines()[1:]} == unused


def test_a_wrong_argument_for_ddp_is_named_at_once() -> None:
    with pytest.raises(
        ConfigError, match="offload_optimiser: SwapDDPStrategy has no such argument; did you mean offload"
    ):
        SwapDDPStrategy(offload_optimiser=True)
    found = SwapDDPStrategy({}, find_unused_parameters=True, process_group_backend="gloo")
    assert found._ddp_kwargs == {"find_unused_parameters": True}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"offload_optimiser": True}, "offload_optimiser: SwapStrategy has no such argument; did you mean offload_opt"),
        ({"offload_optimizer": "nvme"}, "offload_optimizer: 'nvme' is not a switch"),
        ({"offload_optimizer": True, "offload_optimizer_device": "disk"}, "'disk' is not one of cpu, nvme"),
        ({"offload_optimizer": True, "queue_depth": -1}, "aio.queue_depth: -1"),
    ],
)
def test_a_wrong_argument_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SwapStrategy(**given)


def test_a_strategy_can_be_pickled_as_launchers_do(nvme_path: Path) -> None:
    trainer = trainer_of(SwapStrategy(config_of(nvme_path)))
    copy = pickle.loads(pickle.dumps(trainer.strategy))
    assert type(copy) is SwapStrategy
    assert copy.offload_config == trainer.strategy.offload_config


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns if there are some beside those it is given."""
    monkeypatch.setattr(sys, "argv", ["program"])


def run_cli(arguments: list[str]) -> LightningCLI:
    defaults = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    options: dict[str, Any] = {"save_config_callback": None, "seed_everything_default": False}
    return LightningCLI(Net, run=False, args=arguments, trainer_defaults=defaults, **options)


def test_the_command_line_takes_class_path_and_nested_settings(nvme_path: Path, tmp_path: Path) -> None:
    config = {"class_path": "swapper.lightning.SwapStrategy", "init_args": {"config": config_of(nvme_path)}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"strategy": config}}))
    assert run_cli(["--config", str(file)]).trainer.strategy.offload_config == OffloadConfig(**config_of(nvme_path))
    prefix = "--trainer.strategy"
    cli = run_cli([f"{prefix}=swapper.lightning.SwapStrategy", f"{prefix}.offload_optimizer=true"])
    assert devices(cli.trainer.strategy.offload_config) == ("cpu", "none", "none")
    file.write_text(OffloadConfig(**config_of(nvme_path)).to_yaml())
    cli = run_cli([f"{prefix}=swapper.lightning.SwapStrategy", f"{prefix}.config={file}"])
    assert cli.trainer.strategy.offload_config == OffloadConfig(**config_of(nvme_path))


def test_the_command_line_gives_all_defaults_and_the_accumulation_is_the_trainers(
    nvme_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config_of(nvme_path)))
    prefix = "--trainer.strategy"
    strategy = [f"{prefix}=swapper.lightning.SwapStrategy", f"{prefix}.config={file}"]
    cli = run_cli([*strategy, "--trainer.accumulate_grad_batches=2", "--trainer.max_steps=1"])
    assert "gradient_accumulation_steps" in cli.trainer.strategy.offload_config.model_fields_set
    cli.trainer.fit(cli.model, loader())
    assert cli.trainer.strategy._settings.gradient_accumulation_steps == 2


class Sized(Net):
    """Its hyperparameters are saved."""

    def __init__(self, width: int = 64, rate: float = 1e-2) -> None:
        super().__init__(lambda parameters: torch.optim.SGD(parameters, lr=rate), width=width)
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return loader(4)

    def val_dataloader(self) -> Any:
        return loader(4)


@pytest.mark.long
@pytest.mark.parametrize("checkpoint_format", ["directory", "full"])
def test_the_command_line_takes_hyper_parameters_of_files_and_says_where_those_of_a_directory_differ(
    checkpoint_format: str, nvme_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config_of(nvme_path)))

    def call(name: str, *arguments: str) -> L.LightningModule:
        given = {"config": str(file), "checkpoint_format": checkpoint_format}
        strategy = {"class_path": "swapper.lightning.SwapStrategy", "init_args": given}
        defaults = {"accelerator": "cpu", "devices": 1, "logger": False, "max_epochs": 1, "strategy": strategy}
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(tmp_path)}
        options: dict[str, Any] = {"save_config_callback": None, "trainer_defaults": defaults | quiet}
        caplog.clear()
        with caplog.at_level("WARNING", "swapper"):
            cli = LightningCLI(Sized, args=[name, *arguments], seed_everything_default=False, **options)
        saved.append(cli.trainer.checkpoint_callback.best_model_path)
        return cli.model

    saved: list[str] = []
    call("fit", "--model.width=32", "--model.rate=0.5")
    path = f"--ckpt_path={saved[0]}"
    model = call("validate", path, "--model.width=32")
    if checkpoint_format == "full":
        assert model.hparams["rate"] == 0.5
        assert not caplog.text
    else:
        assert model.hparams["rate"] == 1e-2
        assert "rate 0.5, here 0.01" in caplog.text and "width" not in caplog.text
        call("validate", path, "--model.width=32", "--model.rate=0.5")
        assert not caplog.text


def test_the_command_line_and_a_file_have_ranks_save_together(nvme_path: Path, tmp_path: Path) -> None:
    given = {"config": config_of(nvme_path), "together": True, "annex": "drive"}
    config = {"class_path": "swapper.lightning.SwapDDPStrategy", "init_args": given}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"strategy": config}}))
    made = run_cli(["--config", str(file)]).trainer.strategy
    assert made._saves_together() and made._annex == "drive"
    strategy = ["--trainer.strategy=swapper.lightning.SwapDDPStrategy", "--trainer.strategy.offload_optimizer=true"]
    for value in (False, True):
        cli = run_cli([*strategy, f"--trainer.strategy.together={value}"])
        assert cli.trainer.strategy._together is value


def test_ranks_do_not_save_a_file_together(nvme_path: Path) -> None:
    config = config_of(nvme_path)
    for strategies in (swapper.lightning, swapper.fabric):
        with pytest.raises(ConfigError, match=r"together: .* saved by rank 0"):
            strategies.SwapDDPStrategy(config, together=True, checkpoint_format="full")
        with pytest.raises(ConfigError, match="together: 'yes' is not a switch"):
            strategies.SwapDDPStrategy(config, together="yes")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="annex: only a checkpoint that is a directory of ours"):
            strategies.SwapDDPStrategy(config, annex="drive", checkpoint_format="full")
        with pytest.raises(ConfigError, match="annex: without together=True rank 0 saves all"):
            strategies.SwapDDPStrategy(config, annex="drive")
        with pytest.raises(ConfigError, match="annex: only a checkpoint that is a directory of ours"):
            strategies.SwapModelParallelStrategy(config, annex="drive")
    with pytest.raises(ConfigError, match="together: SwapStrategy has no such argument"):
        SwapStrategy(together=True)
    options: dict[str, Any] = {"plugins": [TorchCheckpointIO()], "enable_checkpointing": True}
    trainer = trainer_of(SwapDDPStrategy(config, together=True), **options)
    with pytest.raises(ConfigError, match=r"together: .* saved by rank 0"):
        assert trainer.strategy.checkpoint_format


def test_a_wrong_setting_ends_the_command_line(
    nvme_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = config_of(nvme_path, pool_bytse="1MiB")
    config = {"class_path": "swapper.lightning.SwapStrategy", "init_args": {"config": wrong}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"strategy": config}}))
    with pytest.raises(SystemExit) as caught:
        run_cli(["--config", str(file)])
    assert caught.value.code == 2
    assert "pool_bytse" in capsys.readouterr().err


SCRIPT = """
import warnings
warnings.simplefilter("ignore")
{imports}
import torch
torch.set_num_threads(1)
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(96, 96)
    def training_step(self, batch, number):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
quiet = dict(accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
             enable_progress_bar=False, enable_model_summary=False)
def run(strategy):
    torch.manual_seed(0)
    model = Net()
    trainer = pl.Trainer(strategy=strategy, **quiet)
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(4, 96)))
    return model, trainer
stock, _ = run("auto")
{program}
"""

TRAINS = """
model, trainer = run({strategy})
assert trainer.optimizers[0].swapper.stats().bytes_written
assert all(torch.equal(p, q) for p, q in zip(stock.parameters(), model.parameters()))
"""

CLI = """
from {package}.cli import LightningCLI
option = "--trainer.strategy"
arguments = [f"{{option}}=swapper.lightning.SwapStrategy", f"{{option}}.offload_optimizer=true"]
arguments += [f"{{option}}.offload_optimizer_device=nvme"]
cli = LightningCLI(Net, run=False, args=arguments, save_config_callback=None, trainer_defaults=quiet)
assert cli.trainer.strategy.offload_config.offload_optimizer.device == "nvme"
"""

PROGRAMS = {
    "lightning, by name": (
        "import lightning.pytorch as pl, swapper.lightning",
        TRAINS.format(strategy="'swapper_nvme'"),
    ),
    "pytorch_lightning, by name": (
        "import pytorch_lightning as pl, swapper.lightning",
        TRAINS.format(strategy="'swapper_nvme'") + "import sys; assert 'lightning.pytorch' not in sys.modules",
    ),
    "ours first": (
        "import swapper.lightning, lightning.pytorch as pl",
        TRAINS.format(strategy="swapper.lightning.SwapStrategy()"),
    ),
    "both, the first": (
        "import lightning.pytorch as pl, pytorch_lightning, swapper.lightning",
        TRAINS.format(strategy="'swapper_nvme'") + TRAINS.format(strategy="swapper.lightning.SwapStrategy()"),
    ),
    "both, the second": (
        "import lightning.pytorch, pytorch_lightning as pl, swapper.lightning",
        TRAINS.format(strategy="'swapper_nvme'")
        + "from swapper.lightning.in_pytorch_lightning import SwapStrategy"
        + TRAINS.format(strategy="SwapStrategy()"),
    ),
    "command line, without an import": ("import lightning.pytorch as pl", CLI.format(package="lightning.pytorch")),
    "command line, pytorch_lightning": ("import pytorch_lightning as pl", CLI.format(package="pytorch_lightning")),
}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_both_packages_are_served(program: str, nvme_path: Path) -> None:
    imports, rest = PROGRAMS[program]
    environment = {**os.environ, "SWAPPER_NVME_PATH": str(nvme_path)}
    script = SCRIPT.format(imports=imports, program=rest)
    done = run_program([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not list(nvme_path.iterdir())


@pytest.mark.long
def test_without_lightning_the_import_says_what_to_install() -> None:
    script = (
        "import sys\nsys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\nimport swapper.lightning\n"
    )
    done = run_program([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "pip install 'lightning>=2.6'" in done.stderr
