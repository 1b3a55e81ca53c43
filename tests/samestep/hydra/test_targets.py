"""What the configuration of somebody else's run may call."""

import pytest
from omegaconf import OmegaConf

from samestep.errors import ConfigError
from samestep.hydra.targets import check_targets

WRITES = [
    "builtins.open", "builtins.eval", "os.system", "subprocess.Popen", "functools.partial",
    "pathlib.Path.write_text", "hydra.utils.instantiate", "torch.load", "torch.hub.load",
    "torch.utils.cpp_extension.load_inline", "numpy.load", "pickle.loads",
    "torchvision.datasets.KMNIST", "samestep.run.files.write_text", "lightning.Trainer",
    # What the project imports is not of the project.
    "project.data.torch.load", "project.model.torch.load",
    "samestep.callbacks.predictions.Predictions", "project.train",
    "torch.nn.modules.module.torch.load",
    # Importing these does something already.
    "antigravity.webbrowser", "this.s",
]  # fmt: skip


@pytest.mark.parametrize("partial", [False, True])
def test_what_writes_loads_or_runs_is_not_called(partial: bool) -> None:
    for target in WRITES:
        inner = {"_target_": target, "_partial_": partial, "_args_": ["x"]}
        model = {"_target_": "project.model.Classifier", "lr": [{"deep": inner}]}
        with pytest.raises(ConfigError, match=r"model\.lr\[0\]\.deep\._target_=.*add --trust"):
            check_targets(OmegaConf.create(model), "model", "LightningModule", ["project"])


@pytest.mark.parametrize(
    "target",
    [
        "project.nets.mlp.MLP", "project.model.Classifier",
        "torch.optim.AdamW", "torchvision.models.resnet18", "torchvision.transforms.v2.RandomCrop",
        "torchmetrics.classification.MulticlassF1Score", "tests.slow_rank.SlowNet",
    ],
)  # fmt: skip
def test_what_builds_models_and_data_is_called(target: str) -> None:
    package = target.partition(".")[0] if target.startswith("tests") else "project"
    top = "project.model.Classifier" if package == "project" else target
    kind = "LightningModule" if package == "project" else "SlowNet"
    node = OmegaConf.create({"_target_": top, "part": {"_target_": target, "_partial_": True}})
    check_targets(node, "model", kind, [package])


def test_the_model_must_be_a_model_and_the_data_must_be_data() -> None:
    for key, kind, target in (
        ("model", "LightningModule", "project.nets.mlp.MLP"),
        ("data", "LightningDataModule", "project.model.Classifier"),
    ):
        with pytest.raises(ConfigError, match=rf"{key}\._target_={target}: must be a {kind}"):
            check_targets(OmegaConf.create({"_target_": target}), key, kind, ["project"])


def test_a_function_of_a_library_is_called_once_a_file_of_configs_names_it(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("samestep.hydra.targets.config_folders", lambda: [tmp_path])
    node = {"_target_": "project.model.Classifier", "net": {"_target_": "operator.neg"}}

    def check() -> None:
        check_targets(OmegaConf.create(node), "model", "LightningModule", ["project"])

    for folder in ("model", "logger", "experiment"):
        (tmp_path / folder).mkdir()
    # A logger may be named there, but it is no part of a model.
    (tmp_path / "logger" / "mine.yaml").write_text("mine: {_target_: operator.neg}")
    (tmp_path / "experiment" / "mine.yaml").write_text("callbacks: {x: {_target_: operator.neg}}")
    (tmp_path / "experiment" / "cut.yaml").write_text("model: {net: [")
    with pytest.raises(ConfigError, match=r"model\.net\._target_=operator\.neg"):
        check()
    (tmp_path / "experiment" / "mine.yaml").write_text("model: {net: {_target_: operator.neg}}")
    check()
    (tmp_path / "experiment" / "mine.yaml").unlink()
    (tmp_path / "model" / "mine.yaml").write_text("net: [{_target_: operator.neg}]")
    check()


def test_far_from_its_project_only_what_configs_name_is_rejected(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("SAMESTEP_PROJECT", raising=False)
    monkeypatch.chdir(tmp_path)
    node = OmegaConf.create({"_target_": "project.model.Classifier"})
    check_targets(node, "model", "LightningModule", ["project"])
    node.net = {"_target_": "operator.neg"}
    with pytest.raises(ConfigError, match=r"model\.net\._target_=operator\.neg"):
        check_targets(node, "model", "LightningModule", ["project"])
