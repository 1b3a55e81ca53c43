"""What Kubeflow's SDK cannot do without a cluster: these tests tell when it can."""

import pytest

from tests.conftest import run

pytest.importorskip("kubeflow", reason="pip install project[kubeflow]")
from kubeflow.trainer import CustomTrainerContainer, LocalProcessBackendConfig, TrainerClient


def test_the_local_backend_takes_no_image():
    client = TrainerClient(LocalProcessBackendConfig())
    container = CustomTrainerContainer(image="ghcr.io/me/project:1.2.3", num_nodes=1)
    with pytest.raises(ValueError, match="CustomTrainer must be set with LocalProcessBackend"):
        client.train(runtime="torch-distributed", trainer=container)


@pytest.mark.program
def test_the_image_refuses_the_command_of_the_container_backend():
    """That backend keeps the entry point of the image."""
    command = ["bash", "-lc", "torchrun --nproc_per_node=1 --nnodes=1 /tmp/train.py"]
    result = run("-m", "samestep.launch.entrypoint", *command)
    assert result.returncode == 2
    assert "-lc: options of torchrun come before the overrides" in result.stderr
