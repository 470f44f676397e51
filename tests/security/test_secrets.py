"""Secrets of the environment and in texts do not reach the config, the record, dashboards or a message."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fp8.config.fields import config_fields
from megatron_fp8.config.problem import HIDDEN, hide, is_secret_key, secret_values
from megatron_fp8.report.record import Recorder
from tests.e2e.conftest import Tiny
from tests.e2e.launch import pretrain

PASSWORD = "correct-horse-battery"
# None of them is a real one; each has the form of its kind.
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "GITHUB_TOKEN": "ghp_" + "a1B2" * 9,
    "MY_SERVICE_PASSWORD": PASSWORD,
}


def test_a_run_leaves_no_secret_of_its_environment_anywhere(tiny: Tiny, tmp_path: Path) -> None:
    """Also not in wandb's own files, which describe the machine and the command."""
    home = tmp_path / "home"
    home.mkdir()
    overrides = [
        *("training.train_iters=2", "training.eval_iters=0", "optimizer.lr_warmup_iters=0", "parallel.environment=[]"),
        *("logging.wandb_project=p", "logging.wandb_mode=offline", "logging.tensorboard_dir=tensorboard"),
    ]
    environment = {**SECRETS, "HOME": str(home), "HTTPS_PROXY": f"http://user:{PASSWORD}@proxy:1"}
    config = tiny.write_config(tmp_path, mode="bf16")
    ended = pretrain(config, *overrides, cwd=tmp_path, environment=environment)
    assert ended.code == 0, ended.output
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.suffix for path in files} | {path.name for path in files}
    assert {".wandb", "report.html", "console.log", "config.yaml", "metrics.jsonl", "manifest.json"} <= names
    for secret in SECRETS.values():
        assert secret not in ended.output
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("override", "secret"),
    [
        (f"logging.wandb_notes=see https://me:{PASSWORD}@example.com/x", PASSWORD),
        (f"logging.wandb_tags=[a,{SECRETS['HF_TOKEN']}]", SECRETS["HF_TOKEN"]),
        (f"data.train_data_path=[s3://me:{PASSWORD}@bucket/text]", PASSWORD),
        (f"logging.wandb_group={SECRETS['WANDB_API_KEY']}", SECRETS["WANDB_API_KEY"]),
        (f"logging.wandb_api_key={PASSWORD}", PASSWORD),
    ],
)
def test_a_config_with_a_secret_is_refused_without_repeating_it(
    tiny: Tiny, tmp_path: Path, override: str, secret: str
) -> None:
    config = tiny.write_config(tmp_path)
    ended = pretrain(config, override, "--check", "--world-size", "1", cwd=tmp_path, environment=SECRETS)
    assert ended.code == 2, ended.output
    assert HIDDEN in ended.stderr
    assert override.partition("=")[0] in ended.stderr
    assert secret not in ended.output


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, record: object) -> None:
        self.texts.append(str(record))

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "text",
    [
        f"cannot push to https://user:{PASSWORD}@git.example.com/x.git",
        f"401 for key {SECRETS['WANDB_API_KEY']}",
        f"Authorization: Bearer {PASSWORD}",
        f"token {SECRETS['GITHUB_TOKEN']} is not valid",
    ],
)
def test_a_record_of_a_failure_hides_them(text: str) -> None:
    kept = Kept()
    Recorder([kept], secret_values(SECRETS)).write("failure", {"kind": "HTTPError", "error": text, "iteration": 3})
    assert HIDDEN in kept.texts[0]
    for secret in SECRETS.values():
        assert secret not in kept.texts[0]


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("https://user:pw@host/path", "https://***@host/path"),
        ("ssh://git@host/path", "ssh://***@host/path"),
        ("https://host/path@v1", "https://host/path@v1"),
        ("https://host/?to=a@b.c", "https://host/?to=a@b.c"),
        ("file:///data/a@b", "file:///data/a@b"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("s3:/user:pw@bucket/key.idx", "s3:/***@bucket/key.idx"),
        ("s3:/bucket/a@b", "s3:/bucket/a@b"),
        ("a@b.c and 12:30", "a@b.c and 12:30"),
        ("checkpoint /runs/x/iter_0000001", "checkpoint /runs/x/iter_0000001"),
    ],
)
def test_only_passwords_of_addresses_are_hidden(text: str, hidden: str) -> None:
    assert hide(text) == hidden


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [
        ("WANDB_API_KEY", "12345678", True),
        ("HF_TOKEN", "12345678", True),
        ("db_password", "12345678", True),
        ("TOKENIZERS_PARALLELISM", "false-or-true", False),
        ("WANDB_IDENTITY_TOKEN_FILE", "12345678", False),
        ("SSH_KEY", "/home/me/.ssh/id", False),
        ("API_KEY", "short", False),
        ("KEYBOARD", "12345678", False),
    ],
)
def test_variables_are_secrets_by_their_names(name: str, value: str, is_secret: bool) -> None:
    assert secret_values({name: value}) == (frozenset({value}) if is_secret else frozenset())


def test_no_key_of_ours_asks_for_a_secret() -> None:
    assert [key for key in config_fields() if is_secret_key(key)] == []
    assert is_secret_key("logging.wandb_api_key")
