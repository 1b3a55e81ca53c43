"""All checks together: they find each planted mistake, and nothing in what is rendered."""

import shlex
from copy import deepcopy

import pytest

from samestep.errors import ConfigError
from samestep.launch import check
from tests.conftest import ROOT, run
from tests.samestep.launch.check.planting import CONTAINER, TARGETS, composed, found


@pytest.mark.parametrize("target", TARGETS)
def test_rendered_documents_have_no_faults(target):
    assert found(target) == []
    assert (
        found(target, "trainer.accelerator=cpu", "cluster.volume=null", "cluster.user=null") == []
    )
    assert found(target, "cluster.namespace=ml", "cluster.queue=team-a") == []


def test_mistakes_of_the_configuration_are_not_repeated_for_the_documents():
    cfg, documents = composed("k8s", "cluster.image=me/project")
    assert documents[-1]["spec"]["template"]["spec"]["containers"][0]["image"] == "me/project"
    (fault,) = check.faults(cfg, documents)
    assert fault.startswith("cluster.image=me/project: ")


def test_a_fault_names_the_object_and_the_place():
    (fault,) = found(**{f"Job:{CONTAINER}.image": "project"})
    assert fault.startswith(f"Job mine: {CONTAINER}.image=project: may name another image")


def test_refuse_says_each_fault_once_and_nothing_without_one():
    with pytest.raises(ConfigError, match=r"^a\nb$"):
        check.refuse(["a", "b", "a"])
    check.refuse([])


def test_the_doorway_refuses_with_exit_code_2_and_no_traceback():
    result = run(
        "-m", "samestep", "launch", "cluster=k8s", "cluster.shm=20Gi", "action=check", RUN_ID="mine"
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: cluster.shm=20Gi: counts as memory, so it must be at most cluster.memory=16Gi\n"
    )


def test_a_document_of_an_unknown_kind_is_refused():
    cfg, documents = composed()
    faults = "".join(check.faults(cfg, [*documents, {"services": {}}]))
    assert "no schema is known for this kind" in faults


def test_checks_do_not_change_the_documents():
    cfg, documents = composed()
    before = deepcopy(documents)
    assert list(check.faults(cfg, documents)) == []
    assert documents == before


def test_checks_need_no_torch():
    code = (
        "import sys; from samestep.launch import check, kubernetes; print('torch' in sys.modules)"
    )
    result = run("-c", code, PYTHONPATH=shlex.join([f"{ROOT}/src"]) + f":{ROOT}/scripts")
    assert result.stdout == "False\n", result.stderr
