"""Keys of dashboards: what wandb would refuse, and a missing login, are mistakes before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.config.facts import Facts
from megatron_fp8.config.rules_run import check_logging, login_problem
from tests.small_run import small_config

KEY = "0" * 40


def wandb_config(**logging: Any) -> Any:
    return small_config(logging={"wandb_project": "tests", **logging})


@pytest.mark.parametrize(
    ("logging", "reason"),
    [
        ({"wandb_project": "team/gpt"}, "wandb does not allow /"),
        ({"wandb_project": " "}, "must not be empty"),
        ({"wandb_project": "p" * 129}, "wandb allows at most 128"),
        ({"wandb_tags": ["ok", "t" * 65]}, "is 65 characters long; wandb allows 1 to 64"),
    ],
)
def test_names_that_wandb_refuses(logging: dict[str, Any], reason: str) -> None:
    (finding,) = check_logging(Facts(wandb_config(**logging), None, None))
    assert reason in finding.reason


def test_names_are_those_that_the_client_itself_refuses() -> None:
    import wandb

    for name in ("team/gpt", "p" * 129, "a:b", "what?"):
        with pytest.raises(wandb.errors.UsageError, match="project name"):
            wandb.Settings(project=name)
    wandb.Settings(project="p" * 128)


def test_online_needs_a_login(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    problem = login_problem(wandb_config(), home)
    assert problem is not None
    assert "no login for api.wandb.ai" in problem.reason
    assert "wandb_mode=offline" in problem.use_instead
    assert login_problem(wandb_config(), {**home, "WANDB_API_KEY": KEY}) is None
    # Only rank 0 speaks to wandb.
    assert login_problem(wandb_config(), {**home, "RANK": "1"}) is None
    assert login_problem(wandb_config(wandb_mode="offline"), home) is None
    assert login_problem(small_config(), home) is None

    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    assert login_problem(wandb_config(), home) is None
    own = {**home, "WANDB_BASE_URL": "https://wandb.example.org"}
    problem = login_problem(wandb_config(), own)
    assert problem is not None
    assert "no login for wandb.example.org" in problem.reason
    settings = tmp_path / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.org\n")
    assert login_problem(wandb_config(), home) is not None
