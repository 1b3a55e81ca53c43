from samestep.ranks.secrets import is_secret_name


def test_names_of_secrets():
    for name in ("api_key", "WANDB_API_KEY", "hf_token", "db.PASSWORD", "openai-apikey", "secret"):
        assert is_secret_name(name), name
    for name in ("tokenizer", "max_tokens", "monkey", "key", "passwords_seen", "keys", "seed"):
        assert not is_secret_name(name), name
