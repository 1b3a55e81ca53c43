"""A few faults of the laboratory, for every change; ``python -m labs.faults`` does them all."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from labs.faults import __main__ as command
from labs.faults.experiments import EXPERIMENTS
from labs.faults.lab import BASE, ETCD, PODS, Experiment, Laboratory, Outcome
from library.tests import etcd_server, pods
from tests.conftest import REFERENCE, run_ranks
from tests.project.test_train import history, recorded

QUICK = {  # and how many steps are repeated: since the last save, at the end of an epoch of 20
    "SIGTERM while the loader is blocked [1 process]": 0,
    "SIGTERM to one rank during validation [2 processes]": 0,
    "SIGSTOP in another pod [pods 1+1, restarts]": 8,  # in step 27
    "SIGKILL of rank 0, restarted in place [torchrun 2, restarts]": 12,  # in step 31
    "node 0's folder lost, no store [nodes without a shared folder]": 8,  # SIGKILL in step 47
    "etcd restarted empty [etcd 1+1]": 40,  # at most: where etcd is slow the nodes may meet twice
}
WAITS_FOR_SAVES = "+callbacks.waits._target_=labs.faults.saboteur.WaitsForSaves"
CHOSEN = [e for e in EXPERIMENTS if f"{e.name} [{e.topology}]" in QUICK]


@pytest.fixture(scope="module")
def laboratory(shared_folder: Path) -> Laboratory:
    folder = shared_folder / "lab"
    folder.mkdir(exist_ok=True)
    return Laboratory(folder, [*BASE, "report=false", WAITS_FOR_SAVES])


@pytest.mark.program
@pytest.mark.parametrize("experiment", CHOSEN, ids=lambda e: f"{e.name} [{e.topology}]")
def test_a_harmed_run_ends_as_an_unharmed_one(laboratory: Laboratory, experiment: Experiment):
    if experiment.topology.startswith(PODS) and (why := pods.why_not()):
        pytest.skip(why)
    if experiment.topology == ETCD and (why := etcd_server.why_not()):
        pytest.skip(why)
    outcome = laboratory.run(experiment)
    assert outcome.survived, outcome.why
    expected = QUICK[f"{experiment.name} [{experiment.topology}]"]
    if experiment.topology == ETCD:
        assert outcome.steps_repeated <= expected
    else:
        assert outcome.steps_repeated == expected


@pytest.mark.program
def test_a_run_whose_images_other_processes_read(laboratory: Laboratory):
    """Two ranks with such processes: tests/test_contract.py."""
    root = laboratory.directory / "pets"
    for number, (split, kind) in enumerate(itertools.product(("train", "test"), ("cat", "dog"))):
        folder = root / split / kind
        folder.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (140, 8, 8), generator=torch.Generator().manual_seed(number))
        for index, image in enumerate(pixels.to(torch.uint8).numpy()):
            Image.fromarray(image).save(folder / f"{index}.png")
    data = {"root": root, "num_classes": 2, "num_val": 40, "image_size": 8, "num_workers": 1}
    overrides = ["data=folder", *(f"data.{key}={value}" for key, value in data.items())]
    experiment = Experiment(
        "SIGTERM", "1 process", ["term_group backward 5 0"], overrides, exit_codes=(143,)
    )
    outcome = laboratory.run(experiment)
    assert (outcome.survived, outcome.steps_repeated) == (True, 0), outcome.why


@pytest.mark.program
def test_another_number_of_ranks_continues_the_same_global_batches(
    reference_run: Path, tmp_path: Path
):
    """Of 32 images, which three ranks cannot share equally."""
    laboratory = Laboratory(tmp_path, REFERENCE)
    run_dir, reference = tmp_path / "changing", reference_run.parent / "records"
    faults = laboratory.saboteur("changing", ["term step 13 0", "term step 30 1"])  # of 39 an epoch
    command = ["train.py", *REFERENCE, *faults, f"run_root={tmp_path}"]
    for nodes in ((), (1, 2), (2,)):
        done = run_ranks(*command, nodes=nodes, RUN_ID="changing")
    assert done.returncode == 0, done.stderr

    whole: dict[tuple[int, int], list[int]] = {}
    paths = sorted((tmp_path / "records-changing").glob("rank-*.jsonl"))
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    for line in lines:
        key = (line["epoch"], line["batch"])
        peers = [other for other in lines if (other["epoch"], other["batch"]) == key]
        assert len(peers) == line["world_size"]  # nothing was repeated
        whole[key] = whole.get(key, []) + line["ids"]
    assert {line["world_size"] for line in lines} == {1, 2, 3}
    assert [whole[key] for key in sorted(whole)] == recorded(reference, "train")

    ours, theirs = (
        [{name: float(value) for name, value in row.items() if value} for row in history(path)]
        for path in (run_dir, reference_run)
    )
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for row, expected in zip(ours, theirs, strict=True):
        assert row == pytest.approx(expected, abs=1e-4)
    weights = torch.load(tmp_path / "records-changing/weights-0.pt")
    expected_weights = torch.load(reference / "weights-0.pt")
    assert all(torch.allclose(weights[k], expected_weights[k], atol=1e-4) for k in expected_weights)


def test_the_command_of_the_laboratory_does_only_what_it_is_told(monkeypatch: pytest.MonkeyPatch):
    done = []

    def run(_: Laboratory, experiment: Experiment) -> Outcome:
        done.append(experiment.name)
        return Outcome(survived=True, why="", resume_s=0.0, steps_repeated=0, attempts=1)

    monkeypatch.setattr(Laboratory, "run", run)
    monkeypatch.setattr(command, "note", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["faults", "--from", "59", "agents"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert (end.value.code, done) == (0, ["20 x SIGTERM to one of two agents"])


def test_the_quick_faults_are_in_the_laboratory():
    assert len(CHOSEN) == len(QUICK)
    assert len({f"{e.name} [{e.topology}]" for e in EXPERIMENTS}) == len(EXPERIMENTS) >= 40
