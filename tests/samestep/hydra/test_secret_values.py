"""What an error about a key may repeat."""

import pytest

from samestep.errors import ConfigError
from samestep.hydra.compose import check


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("logger.wandb.api_key=hunter2", "logger.wandb.api_key=***: no such key; its file"),
        ("logger={wandb: {api_key: hunter2}}", "logger.wandb.api_key=***: no such key; its file"),
        ("model.password={a: [hunter2]}", "model.password.a=***: no such key; model has"),
        ("api_key=hunter2'", "api_key=***"),  # Hydra cannot read it
    ],
)
def test_the_value_of_an_unknown_key_with_a_secret_name_is_not_repeated(typed, said):
    with pytest.raises(ConfigError) as error:
        check([typed])
    message = str(error.value)
    assert said in message
    assert "hunter2" not in message


def test_other_values_are_repeated():
    with pytest.raises(ConfigError, match=r"model.num_tokens=hunter2: no such key"):
        check(["model.num_tokens=hunter2"])
