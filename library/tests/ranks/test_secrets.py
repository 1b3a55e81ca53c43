"""What is hidden, and what is not. Keys are put together here, so that no scanner reports them."""

import pytest

from samestep.ranks import secrets

KEYS = [
    "ghp_" + "a1" * 18,
    "AKIA" + "ABCDEFGH12345678",
    "hf_" + "Ab1" * 11,
    "sk-" + "a1-b2_" * 5,
    "xoxb-" + "1234567890-abc",
    "eyJ" + "hbGciOiJIUzI1" + ".eyJ" + "zdWIiOiIxMjM0" + ".dozjgNryP4J3",
]


def test_names_of_secrets():
    for name in ("api_key", "WANDB_API_KEY", "hf_token", "db.PASSWORD", "openai-apikey", "secret"):
        assert secrets.is_secret_name(name), name
    for name in ("tokenizer", "max_tokens", "monkey", "key", "passwords_seen", "keys", "seed"):
        assert not secrets.is_secret_name(name), name


def test_values_of_secret_variables_are_hidden(monkeypatch: pytest.MonkeyPatch):
    for name in ("WANDB_API_KEY", "PGPASSWORD", "MYTOKEN", "SSH_PASSPHRASE"):
        monkeypatch.setenv(name, f"{name}-value")
    monkeypatch.setenv("KEYBOARD", "us")
    monkeypatch.setenv("HARMLESS", "something else")
    text = "key WANDB_API_KEY-value, PGPASSWORD-value MYTOKEN-value SSH_PASSPHRASE-value, us, "
    assert secrets.redact(text + "something else") == "key ***, *** *** ***, us, something else"


def test_a_secret_that_holds_another_one_is_hidden_in_full(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_TOKEN", "12345678")
    monkeypatch.setenv("B_TOKEN", "12345678-and-more")
    assert secrets.redact("x 12345678-and-more y") == "x *** y"


def test_what_looks_like_a_key_is_hidden():
    for key in KEYS:
        assert secrets.redact(f"+key = '{key}'\n") == "+key = '***'\n"
        assert secrets.looks_secret(key)


def test_a_private_key_is_hidden_to_its_end():
    begin, end = "-----BEGIN RSA PRIVATE " + "KEY-----", "-----END RSA PRIVATE " + "KEY-----"
    assert secrets.redact(f"a\n{begin}\nMIIE\nabc\n{end}\nb") == "a\n***\nb"
    assert secrets.redact(f"a\n{begin}\nMIIE") == "a\n***"  # cut off


@pytest.mark.parametrize(
    ("address", "hidden"),
    [
        ("http://user:password@host/path", "http://***@host/path"),
        ("ftp://user:p@ss@host/a", "ftp://***@host/a"),
        ("https://token@host", "https://***@host"),
        ("ssh://git@host/a", "ssh://git@host/a"),
        ("s3://bucket/key@v2", "s3://bucket/key@v2"),
        ('"http://a", "b@c"', '"http://a", "b@c"'),
    ],
)
def test_logins_in_addresses_are_hidden(address: str, hidden: str):
    assert secrets.redact(f"cannot read {address}: 404") == f"cannot read {hidden}: 404"
    assert secrets.looks_secret(address) == (address != hidden)


def test_arguments_are_hidden_by_their_name():
    assert secrets.redact_argument("logger.wandb.api_key=abc def") == "logger.wandb.api_key=***"
    assert secrets.redact_argument("--token=abc") == "--token=***"
    assert secrets.redact_argument("model.num_tokens=5") == "model.num_tokens=5"


def test_containers_are_hidden_by_key_and_by_value():
    values = {"aws_secret": ["x"], "url": "ftp://a:b@c", "n": 1, "x": None, "db": {"PASSWORD": "x"}}
    assert secrets.redact_values(values) == {
        "aws_secret": ["***"], "url": "ftp://***@c", "n": 1, "x": None, "db": {"PASSWORD": "***"},
    }  # fmt: skip


def test_an_ordinary_word_is_hidden_as_a_whole_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_TOKEN", "accuracy")
    monkeypatch.setenv("A_PASSWORD", "correct-horse")
    values = {"monitor": "val/accuracy", "a": "accuracy", "b": ["test/accuracy_top5"]}
    assert secrets.redact_values(values) == values | {"a": "***"}
    for text in ("a correct-horse.", "'correct-horse'", "pw=correct-horse,", "correct-horse"):
        assert secrets.redact(text) == text.replace("correct-horse", "***")
    monkeypatch.setenv("A_PASSWORD", "correct-horse-7")
    assert secrets.redact("http://host/xcorrect-horse-7y") == "http://host/x***y"
