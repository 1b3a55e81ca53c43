"""A real Docker Swarm of one node: a run touches only what it has made."""

import subprocess

import pytest
from filelock import FileLock

from library.tests.programs import until
from tests import swarm
from tests.conftest import environment
from tests.launching import line_of, samestep

pytestmark = pytest.mark.program

STRANGER = f"version: '3.8'\nservices: {{shop: {{image: '{swarm.IMAGE}'}}}}\n"
KEYS = "version: '3.8'\nsecrets: {key: {file: stranger.yaml}}\n"
ACTIONS = ("submit", "status", "logs", "cancel")


@pytest.fixture(scope="module")
def variables(tmp_path_factory, shared_folder):
    """The variables by which docker finds the swarm."""
    if missing := swarm.missing():
        pytest.skip(f"apt-get install docker.io ({missing})")
    # The path of a socket has at most 108 characters.
    folder = tmp_path_factory.mktemp("swarm")
    # Its ports are fixed: another process of pytest-xdist may have a swarm for the next test.
    with FileLock(shared_folder / "swarm.lock"), swarm.swarm(folder) as found:
        yield found


@pytest.fixture
def docker(variables, tmp_path):
    """Call docker; what it prints."""
    (tmp_path / "stranger.yaml").write_text(STRANGER)
    (tmp_path / "keys.yaml").write_text(KEYS)

    def call(*words):
        done = subprocess.run(
            ["docker", *words], cwd=tmp_path, env=environment(**variables),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield call
    for stack in call("stack", "ls", "--format={{.Name}}").split():
        call("stack", "rm", stack)


@pytest.fixture
def launch(variables, tmp_path):
    words = ["cluster=swarm", f"cluster.image={swarm.IMAGE}", "trainer.accelerator=cpu"]

    def launch(action, run_id, *more):
        line = line_of(action, run_id, *words, *more)
        return samestep(*line, cwd=tmp_path, RUN_ID=run_id, **variables)

    return launch


def wait_for(docker, service):
    """The numbers of a service and of its task, when that runs."""

    def find():
        shown = docker("service", "ps", service, "--format={{.ID}} {{.CurrentState}}", "--no-trunc")
        running = [line.split()[0] for line in shown.splitlines() if " Running " in line]
        return running and docker("service", "inspect", service, "--format={{.ID}}") + running[0]

    return until(find, says=lambda: docker("service", "ps", service), pause_s=0.5)


def test_the_stack_of_a_stranger_stays(docker, launch):
    docker("stack", "deploy", "--compose-file=stranger.yaml", "web")
    before = wait_for(docker, "web_shop")
    for action in ACTIONS:
        done = launch(action, "web")
        assert (done.returncode, done.stdout) == (2, "")
        assert "web: the cluster has another object web, which is of no run" in done.stderr
        assert done.stderr.count("\n") == 1
    assert docker("stack", "services", "web", "--format={{.Name}}") == "web_shop\n"
    assert wait_for(docker, "web_shop") == before


def test_a_stack_of_secrets_stays(docker, launch):
    docker("stack", "deploy", "--compose-file=keys.yaml", "keys")
    for action in ACTIONS:
        assert launch(action, "keys").returncode == 2
    assert docker("secret", "ls", "--format={{.Name}}") == "keys_key\n"
    docker("secret", "rm", "keys_key")


def test_a_run_is_its_own_whatever_its_overrides(docker, launch):
    assert launch("submit", "mine").returncode == 0
    before = wait_for(docker, "mine_node-0")
    assert launch("submit", "mine", "seed=7").returncode == 0
    # Docker replaces the task, and not the service.
    until(lambda: "seed=7" in docker("service", "inspect", "mine_node-0"))
    assert wait_for(docker, "mine_node-0").split()[0] == before.split()[0]
    assert "mine_node-0.1" in launch("status", "mine").stdout

    # What an earlier version has deployed into the stack of a stranger.
    docker("stack", "deploy", "--compose-file=stranger.yaml", "mine")
    done = launch("cancel", "mine")
    assert done.returncode == 2
    names = docker("stack", "services", "mine", "--format={{.Name}}").split()
    assert sorted(names) == ["mine_data", "mine_node-0", "mine_shop"]

    docker("service", "rm", "mine_shop")
    assert launch("cancel", "mine", "seed=3").returncode == 0
    until(lambda: docker("stack", "ls", "--format={{.Name}}") == "")
