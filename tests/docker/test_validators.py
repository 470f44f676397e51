"""What docker/ holds is accepted by its own tools, and by published schemas; a tool that is missing skips its test.

`make launcher-check` installs the tools (docker/validators.txt); Compose is apt's docker-compose.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DOCKER = Path(__file__).resolve().parents[2] / "docker"
SCRIPTS = [DOCKER / "entrypoint.sh", DOCKER / "slurm" / "pretrain.sbatch"]
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu"]
JOBS = [DOCKER / "kubernetes" / "pytorchjob.yaml", DOCKER / "kubernetes" / "jobset.yaml"]


def tool(name: str) -> str:
    """The path of a program beside this Python or on PATH; skips the test where there is none."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def accepts(*command: str | Path) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_accepts_the_dockerfiles(path: Path) -> None:
    accepts(tool("hadolint"), path)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_and_shellcheck_accept_the_scripts(path: Path) -> None:
    accepts("bash", "-n", path)
    accepts(tool("shellcheck"), path)


def test_compose_accepts_its_file() -> None:
    config = ["-f", str(DOCKER / "compose.yaml"), "--profile", "cpu", "config", "--quiet"]
    compose = tool("docker-compose")
    version = subprocess.run([compose, "version", "--short"], capture_output=True, text=True, check=False).stdout
    if not version.strip().removeprefix("v").startswith(("2.", "3.", "4.", "5.")):
        pytest.skip(f"docker-compose {version.strip()} does not know the Compose specification")
    accepts(compose, *config)


def pod_specs(data: Any) -> Iterator[dict[str, Any]]:
    """Every pod's spec in a manifest."""
    if isinstance(data, dict):
        if "containers" in data:
            yield data
        for value in data.values():
            yield from pod_specs(value)
    elif isinstance(data, list):
        for value in data:
            yield from pod_specs(value)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_kubernetes_accepts_the_pods(path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    found = list(pod_specs(yaml.safe_load(path.read_text(encoding="utf-8"))))
    assert found
    for spec in found:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        kubernetes_validate.validate(pod, "1.33", strict=True)
        memory = [volume["emptyDir"]["medium"] for volume in spec["volumes"] if "emptyDir" in volume]
        mounts = {mount["mountPath"] for container in spec["containers"] for mount in container["volumeMounts"]}
        assert (memory, "/dev/shm" in mounts) == (["Memory"], True)


def unknown_keys(data: Any, model: type, name: str = "") -> list[str]:
    """Keys that a class of kubeflow-training does not have, or values of a kind that it does not take."""
    import kubeflow.training.models as models

    wrong = [f"{name}.{key}" for key in data if key not in model.attribute_map.values()]  # type: ignore[attr-defined]
    for attribute, key in model.attribute_map.items():  # type: ignore[attr-defined]
        kind = model.openapi_types[attribute]  # type: ignore[attr-defined]
        if key not in data:
            continue
        inner = kind.removeprefix("dict(str, ").rstrip(")")
        values = data[key] if kind.startswith("dict(str, Kube") else {key: data[key]}
        for place, value in values.items():
            if inner.startswith("Kubeflow"):
                wrong += unknown_keys(value, getattr(models, inner), f"{name}.{place}")
            elif inner in ("str", "int") and type(value).__name__ != inner:
                wrong.append(f"{name}.{place} is no {inner}")
    return wrong


def test_the_training_operator_knows_every_key_of_the_pytorchjob() -> None:
    models = pytest.importorskip("kubeflow.training.models")
    job = yaml.safe_load(JOBS[0].read_text(encoding="utf-8"))
    assert unknown_keys(job, models.KubeflowOrgV1PyTorchJob) == []
    broken = {**job, "spec": {**job["spec"], "nprocPerNode": 8, "podGroup": {}}}
    assert unknown_keys(broken, models.KubeflowOrgV1PyTorchJob) == [".spec.podGroup", ".spec.nprocPerNode is no str"]


def test_jobset_knows_every_key_of_the_jobset() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = yaml.safe_load(JOBS[1].read_text(encoding="utf-8"))
    # What it does not know is left out on the way.
    assert models.JobsetV1alpha2JobSet.from_dict(job).to_dict() == job


def test_both_kinds_of_kubernetes_jobs_start_the_same_pods() -> None:
    (first, *more), (jobset,) = (list(pod_specs(yaml.safe_load(path.read_text(encoding="utf-8")))) for path in JOBS)
    assert more == [first]
    for key in ("securityContext", "volumes", "terminationGracePeriodSeconds"):
        assert first[key] == jobset[key]
    ours, theirs = first["containers"][0], jobset["containers"][0]
    for key in ("image", "env", "resources", "securityContext", "startupProbe", "livenessProbe", "volumeMounts"):
        assert ours[key] == theirs[key]
    grace = first["terminationGracePeriodSeconds"]
    waits = {variable["name"]: variable.get("value") for variable in ours["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert int(waits) < grace
