"""Nothing in the project unpickles or runs what it reads, but for the reviewed places below."""

from __future__ import annotations

from pathlib import Path

import pytest
from forbidden_calls import forbidden_calls

ROOT = Path(__file__).resolve().parents[2]
# (file, function, call): why it is safe.
REVIEWED = {
    ("megatron_fp8/checkpoint/plain_index.py", "_Reader", "pickle.Unpickler"): "its find_class imports nothing",
    ("megatron_fp8/cpu/__main__.py", "main", "runpy.run_module"): "the program that a person names",
    ("megatron_fp8/cpu/__main__.py", "main", "runpy.run_path"): "the program that a person names",
}
# Pickles between the ranks of one job, which run the same program as the same user (docs/security.md).
OBJECTS_BETWEEN_RANKS = ("torch.distributed.broadcast_object_list", "torch.distributed.all_gather_object")


def sources() -> list[Path]:
    paths = [*ROOT.glob("megatron_fp8/**/*.py"), *ROOT.glob("tools/**/*.py"), ROOT / "pretrain.py"]
    assert len(paths) > 200
    return sorted(paths)


def found() -> dict[tuple[str, str, str], int]:
    return {
        (str(path.relative_to(ROOT)), call.function, call.name): call.line
        for path in sources()
        for call in forbidden_calls(path.read_text(encoding="utf-8"))
        if call.name not in OBJECTS_BETWEEN_RANKS
    }


def test_every_such_call_was_reviewed_and_every_review_has_its_call() -> None:
    here = found()
    new = [
        f"{path}:{here[path, function, name]}: {name} in {function}"
        for path, function, name in here.keys() - REVIEWED.keys()
    ]
    assert new == [], "read files with something that runs nothing; docs/security.md says what there is"
    assert sorted(REVIEWED.keys() - here.keys()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.load(file)",
        "from pickle import loads as read\nread(content)",
        "import pickle as p\nclass Reader(p.Unpickler): pass",
        "import pickle\nmap(pickle.loads, contents)",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch\ntorch.load(path, weights_only=flag)",
        "from torch import load\nload(path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import numpy as np\nnp.load(path, None, True)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "import yaml\nyaml.unsafe_load(text)",
        "import yaml\nyaml.compose(text, Loader=yaml.UnsafeLoader)",
        "from yaml import FullLoader",
        "eval(text)",
        "def f():\n    exec(text)",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "import subprocess\nsubprocess.Popen(text, shell=flag)",
        "import os\nos.system(text)",
        "import joblib\njoblib.load(path)",
        "import marshal\nmarshal.loads(content)",
        "import torch.distributed.checkpoint as dcp\ndcp.load(state)",
        "from megatron.core import dist_checkpointing\ndist_checkpointing.load(state, path)",
        "from transformers import AutoModel\nAutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_each_kind_is_found(source: str) -> None:
    if source == "from yaml import FullLoader":
        source += "\nFullLoader(text)"
    assert list(forbidden_calls(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path, mmap_mode='r')",
        "import yaml\nyaml.safe_load(text)\nyaml.compose(text, Loader=yaml.SafeLoader)",
        "model.eval()",
        "import re\nre.compile(pattern)",
        "import json\njson.load(file)",
        "import subprocess\nsubprocess.run(['ls'], check=True)",
        "import pickle\npickle.dumps(value)",
    ],
)
def test_what_runs_nothing_is_not_found(source: str) -> None:
    assert list(forbidden_calls(source)) == []
