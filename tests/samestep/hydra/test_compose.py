import json
import math
import re
import subprocess
import sys

import hydra
import pytest
from omegaconf import OmegaConf

from samestep.errors import ConfigError
from samestep.hydra.compose import check, help_text
from samestep.hydra.front_end import name_run
from samestep.hydra.main import flags_of
from samestep.hydra.project import choices_of, config_folders
from samestep.hydra.rules import RULES
from tests.conftest import CONFIGS, ROOT
from tests.samestep.hydra.conftest import write

CHOICES = choices_of(*config_folders())
LOSS = ["callbacks.checkpoints.monitor=val/loss", "callbacks.checkpoints.mode=min"]
OWN_IMAGES = ["data.root=images", "data.num_classes=2"]
LEFT_TO_THE_USER = {
    "data=folder": OWN_IMAGES,
    "data=hf": OWN_IMAGES,
    "data=lance": OWN_IMAGES,
    "data=tokens": ["data.file=books.tokens", "data.vocabulary_size=257"],
    "experiment=finetune": [*OWN_IMAGES, "callbacks.finetuning.weights=null"],
}


def fault(*overrides, **options):
    with pytest.raises(ConfigError) as error:
        check(overrides, **options)
    return str(error.value)


TASKS = {
    "topics": "text",
    "tokens": "text",
    "transformer": "text",
    "skeleton": "skeleton",
}  # others are for images


def runs():
    """Each choice of each group, data and models of one task together; and each experiment.

    Every data set with every model: tests/project/data/test_datamodule.py.
    """
    groups = {g: names for g, names in CHOICES.items() if names and g.split("/")[0] != "experiment"}
    pairs = []
    for task in (None, *dict.fromkeys(TASKS.values())):
        data, models = ([n for n in CHOICES[g] if TASKS.get(n) == task] for g in ("data", "model"))
        most = max(len(data), len(models))
        pairs += [(data[i % len(data)], models[i % len(models)]) for i in range(most)]
    for number in range(max(len(pairs), *map(len, groups.values()))):
        choices = {group: names[number % len(names)] for group, names in groups.items()}
        choices["data"], choices["model"] = pairs[number % len(pairs)]
        if choices["data"] in TASKS and choices["debug"] == "overfit":
            choices["debug"] = "fast"  # overfit switches the augmentation of images off
        if choices["model"] == "skeleton":
            del choices["model/lr_scheduler"], choices["model/optimizer"]  # it has none of these
        yield [f"{group}={name}" for group, name in choices.items()]
    yield from ([f"experiment={name}"] for name in CHOICES.get("experiment", []))


def composed_by_hydra(overrides):
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return OmegaConf.to_container(hydra.compose("train", overrides))


@pytest.mark.parametrize("overrides", list(runs()), ids=" ".join)
def test_every_choice_is_accepted(overrides):
    check(overrides + [text for o in overrides for text in LEFT_TO_THE_USER.get(o, [])])


@pytest.mark.parametrize(
    "overrides",
    [
        ["callbacks=[early_stopping,ema]", "~callbacks.predictions", "debug=[fast,limit]"],
        ["+model.optimizer.amsgrad=true", "~model.optimizer.fused", "data.mean.0=0.5"],
        ["data={crop_padding: 0, flip: true}", "++seed=2", "model.optimizer.lr=1", "~debug"],
        ["model/optimizer=sgd", "trainer.profiler={_target_: some.Profiler, depth: 1}"],
        ["+callbacks.timer={_target_: lightning.pytorch.callbacks.Timer, interval: step}"],
    ],
    ids=" ".join,
)
def test_overrides_are_applied_as_hydra_does(overrides):
    cfg = check(overrides)
    assert OmegaConf.to_container(cfg) == composed_by_hydra(overrides) | {"choices": cfg.choices}
    assert OmegaConf.is_struct(cfg)


def test_the_choices_are_in_the_configuration():
    choices = check(["model=mlp", "experiment=digits_ema", "debug=fast"]).choices
    assert choices == {
        "data": "digits", "model": "mlp", "model/optimizer": "adamw",
        "model/lr_scheduler": "one_cycle", "trainer": "default", "cluster": "local",
        "callbacks": "ema", "logger": "none", "experiment": "digits_ema", "debug": "fast",
    }  # fmt: skip
    assert check(["callbacks=[early_stopping,ema]"]).choices.callbacks == ["early_stopping", "ema"]


def test_groups_may_be_empty():
    cfg = check(["callbacks=null", "~logger", "experiment=null", "debug=null"])
    for group in ("callbacks", "logger"):
        assert cfg[group] == {}
        assert cfg.choices[group] == []
    assert not {"experiment", "debug"} & cfg.keys()
    cfg = check(["data=null", "model=skeleton", *LOSS])  # its model has the loaders
    assert cfg.data == {}
    assert name_run(cfg).startswith("skeleton-")


def test_a_plus_before_a_choice_makes_no_difference():
    """As before a key; in other templates experiments need one."""
    plain = check(["experiment=digits_ema", "debug=fast"])
    assert plain == check(["+experiment=digits_ema", "++debug=fast"])
    assert plain.choices.experiment == "digits_ema"


def test_a_value_may_be_nan_where_its_default_is(configs):
    write(configs, "model/mine", "model: {_target_: project.mine.Net, fill: .nan, lr: 0.1}")
    assert math.isnan(check(["model=mine"]).model.fill)
    assert check(["model=mine", "model.fill=-1"]).model.fill == -1
    assert fault("model=mine", "model.lr=nan") == "model.lr=NaN: must be a number"


def test_a_group_of_the_users_own_can_be_added(configs):
    write(configs, "model/head/linear", "model: {head: {_target_: some.Head}}")
    write(configs, "experiment/head", "defaults: [/model/head: linear]")
    assert check(["experiment=head"]).model.head._target_ == "some.Head"
    for plus in ("+", "++"):
        assert check([f"{plus}model/head=linear"]).choices["model/head"] == "linear"


def test_a_group_may_choose_nothing_by_default(configs):
    write(configs, "model/head/linear", "model: {head: {_target_: some.Head}}")
    train = configs / "train.yaml"
    train.write_text(
        train.read_text().replace("  - experiment:", "  - model/head: null\n  - experiment:")
    )
    assert check([]).choices["model/head"] is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data=mnsit", "data=mnsit: no such choice; did you mean data=mnist? there is cifar10, "),
        ("model/optimizer=sgdd", "model/optimizer=sgdd: no such choice; did you mean model/optim"),
        ("hydra/launcher=nope", "hydra/launcher=nope: no such choice; there is basic"),
        ("seed=1,2", "seed=1,2: is several values; put -m before it"),
        ("data=default", "data: a run needs one of cifar10, digits, "),
        (
            "callbacks=[emma,ema]",
            "callbacks=emma: no such choice; did you mean callbacks=ema? ther",
        ),
        ("choices.data=mnist", "choices.data=mnist: no such key"),
    ],
)
def test_wrong_choices_and_lines_are_rejected(override, message):
    assert fault(override).startswith(message)


def test_errors_of_hydra_are_one_message():
    assert "word: is not an override; write KEY=VALUE" in fault("word")
    assert "data.root=~/images" in fault("data.root=~/images")
    message = "+model/optimizer=sgd: model/optimizer has a choice already; leave out the plus"
    assert fault("+model/optimizer=sgd") == fault("++model/optimizer=sgd") == message
    assert "File name too long" in fault("x" * 5000 + "=1")
    assert "hydra.nope" in fault("hydra.nope=1")
    assert "list index out of range" in fault("data.mean.7=1")
    assert "data@other" in fault("data@other=mnist")


def test_a_home_directory_is_expanded_in_every_value(configs, monkeypatch):
    """What our own message about ``data.root=~/data`` advises to type, and keys of the user."""
    monkeypatch.setenv("HOME", "/home/me")
    (configs / "train.yaml").write_text(
        (configs / "train.yaml").read_text() + "mine: [~/a, a~/b]\n"
    )
    cfg = check(["data.root='~/data'", "run_root='~/runs'", "+notes='~'"])
    assert (cfg.data.root, cfg.notes, cfg.mine) == ("/home/me/data", "~", ["/home/me/a", "a~/b"])
    assert cfg.run_dir.startswith("/home/me/runs/")
    assert "data.root=~nobody-here/x: has no home directory" in fault("data.root='~nobody-here/x'")


def test_needs_the_files(configs, tmp_path):
    (configs / "train.yaml").write_text("defaults: [nope]")
    assert fault() == f"{configs}/nope.yaml: there is no such file"
    (configs / "train.yaml").unlink()
    assert f"{tmp_path}: there is no configs/train.yaml" in fault()


def test_experiments_may_choose_files_and_add_to_open_nodes(configs):
    write(
        configs,
        "experiment/good",
        "defaults: [override /model: resnet18, override /callbacks: [early_stopping, ema]]",
        "model: {net: {width: 8}, optimizer: {dampening: 0.0}}",
        "callbacks: {ema: {decay: 0.9}, timer: {_target_: lightning.pytorch.callbacks.Timer}}",
    )
    cfg = check(["experiment=good", "callbacks.ema.decay=0.8"])
    assert cfg.model.net.width == 8
    assert cfg.callbacks.ema.decay == 0.8


@pytest.mark.parametrize("group", ["experiment", "local"])
def test_files_are_checked_and_named(configs, group):
    write(configs, f"{group}/default", "trainer: {max_epoch: 3}", "seed: one")
    overrides = [] if group == "local" else [f"{group}=default"]
    file = f"(configs/{group}/default.yaml)"
    assert fault(*overrides).splitlines() == [
        f"trainer.max_epoch=3: no such key; did you mean trainer.max_epochs=3? {file}",
        f"seed=one: must be a whole number from 0 to 4294967295 {file}",
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["defaults: [override /data: mnsit]"], "data=mnsit: no such choice; did you mean"),
        (["trainer: [3"], 'experiment/bad.yaml", line 2'),
        (["- seed"], "experiment/bad.yaml: must hold keys, not a list"),
        (["seed: ${nothing}"], "seed=${nothing}: Interpolation key 'nothing' not found (configs/"),
        (None, "experiment.seed=3: no such key; its file must begin with # @package"),
    ],
)
def test_bad_files_are_rejected(configs, lines, message):
    write(configs, "experiment/bad", *(lines or ()))
    if lines is None:
        (configs / "experiment/bad.yaml").write_text("seed: 3\n")
    assert message in fault("experiment=bad")


def test_values_from_the_environment_are_not_shown(configs, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    write(configs, "experiment/secret", "seed: ${oc.env:MY_TOKEN}")
    message = fault("experiment=secret")
    assert message.startswith("seed=${oc.env:MY_TOKEN}: must be a whole number")
    assert "hunter2" not in message


def test_flags_and_overrides():
    flags = flags_of(["-m", "seed=1,2", "~debug"])
    assert flags.multirun
    assert flags.overrides == ["seed=1,2", "~debug"]
    assert flags_of(["seed=1", "-m", "data=mnist"]).overrides == ["seed=1", "data=mnist"]
    assert flags_of(["data=mnist", "--cfg", "job", "--resolve"]).cfg == "job"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data=mnist"], "--data=mnist: no such option; did you mean data=mnist?"),
        (["--multi-run"], "--multi-run: no such option; did you mean --multirun?"),
        (["--cfg", "nope"], "invalid choice: 'nope'"),
        (["-m", "--cfg", "job"], "--cfg/-c: not allowed with argument --multirun/-m"),
        (["--shell-completion"], "--shell-completion: add install=bash"),
        (["--resolve"], "--resolve: only together with --cfg"),
        (["--config-dir", "elsewhere"], "--config-dir: no such option"),
        (["--resume", "runs/mine"], "--resume: no such option; a run continues by its name: "),
        (["--ckpt-path=a"], "a run continues by its name: repeat the command with RUN_ID=NAME"),
    ],
)
def test_wrong_flags_are_rejected(argv, message):
    with pytest.raises(ConfigError) as error:
        flags_of(argv)
    assert message in str(error.value)


PROGRAM = """
import json, sys
import hydra
from samestep.hydra.compose import check
from samestep.hydra.overrides import rewrite_overrides
from samestep.hydra.project import configs_folder
from samestep.hydra.main import flags_of
flags = flags_of(sys.argv[1:])
check(flags.overrides, multirun=flags.multirun)
sys.argv[1:] = ["-m", *rewrite_overrides(flags.overrides)]
main = hydra.main(version_base="1.3", config_path=str(configs_folder()), config_name="train")
main(lambda cfg: print(cfg.seed))()
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
"""What train.py does with its command line, and the modules that this took."""


@pytest.mark.program
def test_a_command_line_is_read_without_torch(tmp_path):
    """A wrong one too: tests/samestep/with_template/test_cli.py."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, "-m", "seed=1,2"],
        capture_output=True, text=True, cwd=tmp_path, check=True,
        env={"PYTHONPATH": f"{ROOT}/library/src:{ROOT}/src:{ROOT}", "SAMESTEP_PROJECT": str(ROOT)},
    )  # fmt: skip
    assert "1\n2\n" in done.stdout
    assert not {"torch", "lightning", "PIL", "matplotlib"} & set(json.loads(done.stderr))


def test_help_names_every_choice():
    shown = help_text()
    one_line_each = re.sub(r"\n {22}", " ", shown)
    for group, names in CHOICES.items():
        if names:
            assert f"\n  {group:20}{', '.join(names)}\n" in one_line_each
    assert "hydra/" not in shown
    assert "$" not in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert shown.count("python train.py") == 5  # usage and four examples


def test_every_flag_of_the_trainer_is_in_the_file_or_has_a_rule():
    import inspect

    import lightning

    listed = OmegaConf.load(CONFIGS / "trainer" / "default.yaml").keys() - {"_target_"}
    ruled = {key.removeprefix("trainer.") for key in RULES if key.startswith("trainer.")}
    ours = {"split_batches", "virtual_ranks", "allow", "notice"}
    assert listed | ruled == inspect.signature(lightning.Trainer).parameters.keys() | ours
