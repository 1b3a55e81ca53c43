"""The workflow of Flyte: run here with Flyte's own command, and as a cluster would get it."""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import lightning as L
import pytest
from omegaconf import OmegaConf

from samestep import load_run
from samestep.errors import RunError
from samestep.hydra.compose import check
from samestep.launch import render
from samestep.run.metrics import read_history
from tests.conftest import QUICK, ROOT, run
from tests.launching import samestep

WORKFLOW = ROOT / "scripts" / "flyte_workflow.py"
SPECIFICATIONS = """
import json, sys
from collections import OrderedDict
sys.path.insert(0, "scripts")
import flyte_workflow as flow
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.tools.translator import get_serializable
from google.protobuf.json_format import MessageToDict
settings = SerializationSettings(ImageConfig(Image("default", "project", "1")), "p", "d", "1", {})
for task in (flow.prepare, flow.fit):
    spec = get_serializable(OrderedDict(), settings, task)
    print(json.dumps(MessageToDict(spec.template.to_flyte_idl())))
"""

# To import it here would cost each process of pytest-xdist a second.
pytestmark = pytest.mark.skipif(
    find_spec("flytekitplugins") is None, reason="needs the extra flyte"
)


COMMAND = """
import functools, sys
from importlib.machinery import PathFinder
import flytekitplugins.kfpytorch as plugin
from flytekit.clis.sdk_in_container.pyflyte import main
plugin.Elastic = functools.partial(plugin.Elastic, start_method="fork")
try:
    main()
finally:
    print("found by its name:", PathFinder.find_spec("flyte_workflow", sys.path) is not None)
"""
"""The program ``pyflyte``, but the processes that train are forked.

Flyte spawns them, which imports all libraries again in each. They then import the workflow by its
name, with the path of this process.
"""


def pyflyte(tmp_path, words, hyperparameters):
    """``pyflyte run``, with everything it writes in ``tmp_path``."""
    command = tmp_path / "pyflyte.py"
    command.write_text(COMMAND)
    words = [f"run_root={tmp_path}", *words]
    return run(
        str(command), "run", str(WORKFLOW), "training",
        "--hyperparameters", json.dumps(hyperparameters),
        cwd=tmp_path, FLYTE_OVERRIDES=json.dumps(["cluster=flyte", *words]), TMPDIR=str(tmp_path),
        NO_COLOR="1",
    )  # fmt: skip


@pytest.mark.program
def test_a_run_of_two_processes_returns_accuracies_and_the_model(tmp_path):
    words = ["trainer.devices=2", "trainer.accelerator=cpu"]
    chosen = {"epochs": 2, "batch_size": 60, "lr": 0.002, "seed": 7, "overrides": ["model=mlp"]}
    done = pyflyte(tmp_path, words, chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.sub(r"\s+", " ", done.stdout)
    assert "found by its name: True" in said
    accuracies, model, folder = re.search(
        r"Result\(epoch_accuracies=(\[.*?\]), model=(\S+), run=(\S+)\)", said
    ).groups()
    run_dir = Path(folder)
    rows = [row for row in read_history(run_dir) if "val/accuracy" in row]
    assert json.loads(accuracies) == [row["val/accuracy"] for row in rows]
    assert len(rows) == 2
    assert Path(model) == run_dir / "checkpoints" / "best.ckpt"
    assert run_dir.name.startswith("digits-mlp-")  # a new name for each execution
    assert (run_dir / "logs" / "rank-1.log").exists()
    module, _ = load_run(run_dir)
    assert type(module.net).__name__ == "MLP"
    cfg = OmegaConf.load(run_dir / "config.yaml")
    assert (cfg.seed, cfg.model.optimizer.lr, cfg.data.global_batch_size) == (7, 0.002, 60)
    assert cfg.data.download is False


@pytest.mark.program
def test_wrong_values_are_refused_before_any_process_starts(tmp_path):
    wrong = pyflyte(tmp_path, QUICK, {"batch_size": 0})
    assert wrong.returncode != 0
    said = "data.global_batch_size=0: must be a whole number at least 1"
    assert said in re.sub(r"\s+", " ", wrong.stdout + wrong.stderr)


def specifications(tmp_path, *words):
    """What a cluster gets of the two tasks."""
    overrides = json.dumps(["cluster=flyte", *words])
    script = tmp_path / "script.py"
    script.write_text(SPECIFICATIONS)
    result = run(str(script), FLYTE_OVERRIDES=overrides, WANDB_API_KEY="0123456789abcdef")
    assert result.returncode == 0, result.stderr
    assert "0123456789abcdef" not in result.stdout
    return [json.loads(line) for line in result.stdout.splitlines()[-2:]]


@pytest.mark.program
def test_a_cluster_is_asked_for_what_the_configuration_says(tmp_path):
    words = ["trainer.devices=4", "cluster.memory=64Gi", "cluster.interruptible=true"]
    words += ["cluster.secret={group: wandb, key: api_key, env_var: WANDB_API_KEY}"]
    prepare, fit = specifications(tmp_path, *words)
    assert fit["metadata"]["retries"] == {"retries": 2}
    assert fit["metadata"]["interruptible"] is True
    (secret,) = fit["securityContext"]["secrets"]
    assert (secret["group"], secret["key"], secret["envVar"]) == (
        "wandb",
        "api_key",
        "WANDB_API_KEY",
    )
    limits = {item["name"]: item["value"] for item in fit["container"]["resources"]["limits"]}
    requests = {item["name"]: item["value"] for item in fit["container"]["resources"]["requests"]}
    assert limits == {"GPU": "4", "MEMORY": "64Gi"}
    wanted = {"GPU": "4", "MEMORY": "64Gi", "CPU": "4", "EPHEMERAL_STORAGE": "20Gi"}
    assert requests == wanted
    assert fit["extendedResources"]["sharedMemory"]["sizeLimit"] == "2Gi"
    for task in (prepare, fit):
        (variable,) = task["container"]["env"]
        assert json.loads(variable["value"]) == ["cluster=flyte", *words]
    assert "securityContext" not in prepare
    # A sandbox has little room, so the first task is no larger than the configuration says.
    sizes = prepare["container"]["resources"]
    assert {item["name"]: item["value"] for item in sizes["limits"]} == {"MEMORY": "64Gi"}
    requests = {item["name"]: item["value"] for item in sizes["requests"]}
    assert requests == {"MEMORY": "64Gi", "CPU": "4", "EPHEMERAL_STORAGE": "20Gi"}


def test_the_command_carries_the_overrides_as_typed():
    odd = ["cluster=flyte", "run_root=$HOME/${c} \\${d} 'a' \"b\"\n=é"]
    cfg = check(odd[:1])
    cfg.run_id = "cifar"
    words = render.command(cfg, odd, "submit")
    (variable,) = [word for word in words if word.startswith("FLYTE_OVERRIDES=")]
    assert json.loads(variable.partition("=")[2]) == odd


@pytest.mark.program
def test_the_actions_are_commands_of_flyte(tmp_path):
    for name in ("pyflyte", "flytectl", "kubectl"):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\necho {name} "$FLYTE_OVERRIDES" "$@" >> {tmp_path}/told\n')
        script.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = ["cluster=flyte", "cluster.image=ours:1"]
    for line in (["launch", *words], ["logs", "cifar"], ["status", "cifar"], ["cancel", "cifar"]):
        result = samestep(*line, cwd=tmp_path, RUN_ID="cifar", PATH=path)
        assert result.returncode == 0, result.stderr
    told = (tmp_path / "told").read_text().splitlines()
    # Before each action it is asked whose execution it is.
    assert ["--output=json" in line for line in told] == [True, False] * 4
    submit, logs, status, cancel = told[1::2]
    assert submit.startswith('pyflyte ["cluster=flyte", "cluster.image=ours:1"] run --remote')
    assert submit.endswith(" scripts/flyte_workflow.py training")
    assert "--selector=execution-id=cifar" in logs
    assert status.startswith("flytectl  get execution ")
    assert cancel.startswith("flytectl  delete execution ")


FIT = """
import sys
sys.path.insert(0, "scripts")
import flyte_workflow as flow
if __name__ == "__main__":
    # Flyte starts the process by "spawn" otherwise, which imports all libraries again.
    flow.fit.task_config.start_method = "fork"
    for name in ("RuntimeError", "RunError"):
        word = "+callbacks.bad={_target_: tests.scripts.test_flyte.Raises, error: " + name + "}"
        chosen = flow.Hyperparameters(epochs=1, batch_size=60, overrides=[word])
        try:
            flow.fit(hyperparameters=chosen, data=flow.FlyteDirectory(sys.argv[1]))
        except Exception as error:
            print(type(error).__name__)
    own = ["data=folder", "data.root=mine", "data.num_classes=2"]
    for words in (["data=mnist", "data.mirror=http://127.0.0.1:9"], own):
        try:
            flow.prepare(hyperparameters=flow.Hyperparameters(overrides=words))
        except Exception as error:
            print(type(error).__name__)
"""


class Raises(L.Callback):
    """Ends the training with the error of this name."""

    def __init__(self, error):
        self.error = {"RuntimeError": RuntimeError, "RunError": RunError}[error]

    def on_train_start(self, trainer, pl_module):
        raise self.error("boom")


@pytest.mark.program
def test_only_what_may_go_better_is_tried_again(tmp_path):
    (tmp_path / "fit.py").write_text(FIT)
    words = ["cluster=flyte", "cluster.max_restarts=0", "trainer.accelerator=cpu"]
    overrides = json.dumps([*words, f"run_root={tmp_path}"])
    variables = {"FLYTE_OVERRIDES": overrides, "TMPDIR": str(tmp_path)}
    done = run(str(tmp_path / "fit.py"), str(tmp_path), **variables)
    seen = [line for line in done.stdout.splitlines() if line.startswith(("Flyte", "RunError"))]
    # Of runs, and of data that a server may give at the next try, or that are missing.
    names = ["FlyteRecoverableException", "FlyteUserRuntimeException"]
    assert seen == [*names, names[0], "RunError"]
    assert done.stderr.count("boom") >= 2
