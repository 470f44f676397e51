"""Megatron Core's datasets read our token files: the right number of samples, cut out of the real text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_file_reference import decode_token_file

from megatron_fp8.config.schema import Config
from megatron_fp8.data import index_cache
from megatron_fp8.data.token_file import TokenFileError
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.device import prepare
from megatron_fp8.errors import BadInputError
from megatron_fp8.prepare.token_file_writer import TokenFileWriter
from tests.ranks import run_on_ranks

prepare()  # Megatron Core is imported below

import torch  # noqa: E402

from megatron_fp8.data.dataset import DataError, Datasets, build_datasets  # noqa: E402
from megatron_fp8.data.loader import BatchLoader, BatchSampler  # noqa: E402

SEQ_LENGTH = 16
EOD = 0
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


def write(prefix: Path, first_id: int, num_documents: int = 30, eod_id: int = EOD) -> str:
    """Documents of 1 to 39 tokens in [first_id, first_id + 100), each ended; returns the prefix."""
    generator = np.random.default_rng(first_id)
    with TokenFileWriter(prefix, vocab_size=300) as writer:
        for _ in range(num_documents):
            tokens = generator.integers(first_id, first_id + 100, size=generator.integers(1, 40))
            writer.add_documents(np.append(tokens, eod_id).astype(writer.dtype), [len(tokens) + 1])
    return str(prefix)


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """A config over `train` (ids 1 to 100) and `valid` (ids 101 to 200); changes by section."""
    paths = {
        "train_data_path": [write(tmp_path / "train", 1)],
        "valid_data_path": [write(tmp_path / "valid", 101)],
    }

    def make(training: dict[str, Any] | None = None, **data: Any) -> Config:
        model = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": SEQ_LENGTH}
        sizes = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 5, "eval_iters": 2}
        return Config.model_validate(
            {
                "run": {"name": "test"},
                "model": model,
                "training": sizes | (training or {}),
                "optimizer": {"lr": 1e-3},
                "data": paths | data,
            }
        )

    return make


MakeConfig = Callable[..., Config]


def tokens_of(dataset: Any, number: int) -> list[list[int]]:
    """Tokens and the last label of the first samples: seq_length + 1 ids each."""
    samples = [dataset[i] for i in range(number)]
    return [[*sample["tokens"].tolist(), int(sample["labels"][-1])] for sample in samples]


def test_numbers_and_shapes_of_samples(make_config: MakeConfig, tokenizer: Tokenizer) -> None:
    datasets = build_datasets(make_config(), tokenizer)
    (valid,) = datasets.valid
    assert (datasets.num_train_samples, valid.num_samples) == (20, 8)
    assert len(datasets.train) >= 20
    assert len(valid.dataset) >= 8
    sample = datasets.train[19]
    assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert all(value.shape == (SEQ_LENGTH,) for value in sample.values())
    assert sample["tokens"].dtype == sample["labels"].dtype == torch.int64
    assert torch.equal(sample["labels"][:-1], sample["tokens"][1:])
    assert sample["position_ids"].tolist() == list(range(SEQ_LENGTH))
    assert sample["loss_mask"].tolist() == [1.0] * SEQ_LENGTH


def test_an_epoch_is_the_files_tokens_each_once(make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Samples are documents in shuffled order, cut; those of an epoch hold every id as often as the file does."""
    documents = decode_token_file(tmp_path / "train")
    num_samples = (sum(map(len, documents)) - 1) // SEQ_LENGTH
    config = make_config({"train_iters": num_samples // 4})
    datasets = build_datasets(config, tokenizer)
    seen = Counter(token for sample in tokens_of(datasets.train, num_samples) for token in sample[:-1])
    available = Counter(token for document in documents for token in document)
    assert not seen - available
    assert sum(seen.values()) == num_samples * SEQ_LENGTH
    # Every run of ids between two ends of documents is a part of one document.
    for sample in tokens_of(datasets.train, num_samples):
        first_part = sample[: sample.index(EOD) + 1] if EOD in sample else sample
        texts = [",".join(map(str, [*document, ""])) for document in documents]
        assert any(",".join(map(str, [*first_part, ""])) in text for text in texts)


def test_train_and_valid_come_from_their_own_files(make_config: MakeConfig, tokenizer: Tokenizer) -> None:
    datasets = build_datasets(make_config(), tokenizer)
    train = {token for sample in tokens_of(datasets.train, 20) for token in sample}
    valid = {token for sample in tokens_of(datasets.valid[0].dataset, 8) for token in sample}
    assert train <= {EOD, *range(1, 101)}
    assert valid <= {EOD, *range(101, 201)}


def test_the_order_is_the_seeds(make_config: MakeConfig, tokenizer: Tokenizer) -> None:
    orders = [tokens_of(build_datasets(make_config({"seed": seed}), tokenizer).train, 20) for seed in (1, 1, 2)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_more_samples_than_the_file_has_are_more_epochs(make_config: MakeConfig, tokenizer: Tokenizer) -> None:
    datasets = build_datasets(make_config({"train_iters": 100, "eval_iters": 50}), tokenizer)
    assert len(datasets.train) >= 400
    assert len(datasets.valid[0].dataset) >= 200
    assert len(tokens_of(datasets.train, 400)) == 400


def test_end_of_document_tokens_can_be_left_out_of_the_loss(
    make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prefix = write(tmp_path / "ended", 101, eod_id=tokenizer.eod_id)
    config = make_config(train_data_path=[prefix], eod_mask_loss=True)
    train = build_datasets(config, tokenizer).train
    masked = 0
    for index in range(20):
        sample = train[index]
        ends = sample["tokens"] == tokenizer.eod_id
        assert torch.equal(sample["loss_mask"], (~ends).float())
        masked += int(ends.sum())
    assert masked > 0


def test_without_evaluation_there_is_no_validation_set(make_config: MakeConfig, tokenizer: Tokenizer) -> None:
    datasets = build_datasets(make_config({"eval_iters": 0}, valid_data_path=[]), tokenizer)
    assert datasets.valid == ()


@pytest.mark.parametrize("weights", [(0.75, 0.25), (3, 97), (1e-6, 1)])
def test_blends_honour_their_weights(
    weights: tuple[float, float], make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", 101)
    blend = [str(weights[0]), str(tmp_path / "train"), str(weights[1]), other]
    train = build_datasets(make_config({"train_iters": 100}, train_data_path=blend), tokenizer).train
    assert len(train) >= 400
    num_first = sum(min(set(sample) - {EOD}) <= 100 for sample in tokens_of(train, 400))
    assert abs(num_first - 400 * weights[0] / sum(weights)) <= 1


def test_a_blend_of_many_small_shares_is_not_overdrawn(
    make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Weights 22 and ten times 1, 36 samples: the large dataset is drawn 30 times where ceil(36 x 0.6875) is 25.

    Its epoch has exactly the 26 samples that Megatron Core's own datasets would ask it for.
    """
    with TokenFileWriter(tmp_path / "large", vocab_size=300) as writer:
        tokens = np.full(26 * SEQ_LENGTH + 1, 7, dtype=writer.dtype)
        writer.add_documents(tokens, [len(tokens)])
    blend = ["22", str(tmp_path / "large")]
    for number in range(10):
        blend += ["1", write(tmp_path / f"small{number}", 101)]
    blend = blend[2:] + blend[:2]
    train = build_datasets(make_config({"train_iters": 9}, train_data_path=blend), tokenizer).train
    assert len(train) >= 36
    assert sum(set(sample) == {7} for sample in tokens_of(train, 36)) >= 24


def test_prefixes_without_weights_are_blended_by_their_tokens(
    make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", 101, num_documents=120)
    sizes = [Path(f"{prefix}.bin").stat().st_size for prefix in (tmp_path / "train", other)]
    paths = [str(tmp_path / "train"), other]
    # More samples than both files have: several epochs, as with one file.
    train = build_datasets(make_config({"train_iters": 200}, train_data_path=paths), tokenizer).train
    assert len(train) >= 800
    num_first = sum(min(set(sample) - {EOD}) <= 100 for sample in tokens_of(train, 800))
    assert abs(num_first - 800 * sizes[0] / sum(sizes)) <= 1


def test_indices_are_built_once_and_loaded_after(make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    first = tokens_of(build_datasets(make_config(), tokenizer).train, 20)
    (directory,) = (tmp_path / "cache").iterdir()
    files = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert len(files) == 6
    assert tokens_of(build_datasets(make_config(), tokenizer).train, 20) == first
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == files
    assert list((tmp_path / "cache").iterdir()) == [directory]


def test_the_cache_can_be_elsewhere(make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    build_datasets(make_config(data_cache_path=str(tmp_path / "indices" / "deep")), tokenizer)
    assert not (tmp_path / "cache").exists()
    assert len(list((tmp_path / "indices" / "deep").iterdir())) == 1


def test_a_replaced_token_file_gets_new_indices(make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Megatron's own cache goes by the path alone and would cut the new file at the old file's places."""
    build_datasets(make_config(), tokenizer)
    write(tmp_path / "train", 101, num_documents=60)
    train = build_datasets(make_config(), tokenizer).train
    assert {token for sample in tokens_of(train, 20) for token in sample} <= {EOD, *range(101, 201)}
    assert len(train) > 30 * 20 // SEQ_LENGTH
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_an_interrupted_build_is_never_loaded(
    make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(build_datasets(make_config(data_cache_path=str(tmp_path / "a")), tokenizer).train, 20)

    def save_half(path: str, *args: object, **kwargs: object) -> None:
        Path(path).write_bytes(b"\x93NUMPY")
        raise KeyboardInterrupt

    config = make_config(data_cache_path=str(tmp_path / "b"))
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", save_half)
        with pytest.raises(KeyboardInterrupt):
            build_datasets(config, tokenizer)
    assert list((tmp_path / "b").iterdir()) == []
    # A kill leaves the half-written directory itself.
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", save_half)
        patch.setattr(index_cache.shutil, "rmtree", lambda *args, **kwargs: None)
        with pytest.raises(KeyboardInterrupt):
            build_datasets(config, tokenizer)
    assert len(list((tmp_path / "b").iterdir())) == 1
    assert tokens_of(build_datasets(config, tokenizer).train, 20) == expected


def test_a_cache_that_cannot_be_written_is_named(make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = make_config(data_cache_path=str(tmp_path / "file" / "cache"))
    with pytest.raises(index_cache.IndexCacheError, match=r"data\.data_cache_path"):
        build_datasets(config, tokenizer)


@pytest.mark.parametrize("key", ["train_data_path", "valid_data_path"])
def test_a_missing_path_names_its_key(key: str, make_config: MakeConfig, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=rf"data\.{key} = \[\]"):
        build_datasets(make_config(**{key: []}), tokenizer)


def test_a_corrupt_index_names_its_file(make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "train.idx").write_bytes(b"not an index")
    with pytest.raises(TokenFileError, match=r"train\.idx is not a Megatron index"):
        build_datasets(make_config(), tokenizer)


def drawn(
    dataset: Any, micro_batch_size: int, dp_size: int, first_step: int = 0, num_steps: int = 5
) -> list[list[list[int]]]:
    """The global batches of some steps as the real loaders of `dp_size` ranks give them, sample by sample in order."""
    batches = [[[0]] * 8 for _ in range(num_steps)]
    for dp_rank in range(dp_size):
        sampler = BatchSampler(micro_batch_size, 8, dp_rank, dp_size)
        with BatchLoader(
            dataset, sampler, SEQ_LENGTH, 8 * (first_step + num_steps), torch.device("cuda"), None, True, 8 * first_step
        ) as loader:
            (iterator,) = loader.iterators()
            for step in range(num_steps):
                for number in range(sampler.num_micro_batches):
                    place = (number * dp_size + dp_rank) * micro_batch_size
                    batches[step][place : place + micro_batch_size] = next(iterator).tokens.tolist()
    return batches


def test_the_order_depends_on_the_seed_and_consumed_samples_alone(
    make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A blend read for several epochs: any division over ranks, any resume, a run that was lengthened."""
    blend = ["2", str(tmp_path / "train"), "1", write(tmp_path / "other", 101, num_documents=9)]
    sizes = {"global_batch_size": 8, "train_iters": 20, "eval_iters": 0}
    train = build_datasets(make_config(sizes, train_data_path=blend), tokenizer).train
    whole = drawn(train, 8, 1, num_steps=20)
    assert len({str(sample) for batch in whole for sample in batch}) > 100
    for micro_batch_size, dp_size in [(1, 1), (4, 2), (2, 4), (1, 8)]:
        assert drawn(train, micro_batch_size, dp_size) == whole[:5]
    # Resumed at step 7 on 4 ranks, in a run that is three times as long as planned.
    longer = build_datasets(make_config(sizes | {"train_iters": 60}, train_data_path=blend), tokenizer).train
    assert drawn(longer, 1, 4, first_step=7, num_steps=13) == whole[7:]


def test_a_split_divides_one_file_between_training_and_validation(
    make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Ids say from which document they come; of the ten documents the last two are validation's."""
    with TokenFileWriter(tmp_path / "one", vocab_size=300) as writer:
        for document in range(10):
            writer.add_documents(np.full(40, document, dtype=writer.dtype), [40])
    prefix = str(tmp_path / "one")
    paths = {"train_data_path": [], "valid_data_path": [], "data_path": [prefix], "split": "7,2,1"}
    datasets = build_datasets(make_config({"train_iters": 30}, **paths), tokenizer)
    assert {token for sample in tokens_of(datasets.train, 120) for token in sample} == set(range(7))
    assert {token for sample in tokens_of(datasets.valid[0].dataset, 8) for token in sample} == {7, 8}


def test_an_id_outside_the_vocabulary_is_named_when_it_is_read(
    make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with TokenFileWriter(tmp_path / "bad", vocab_size=300) as writer:
        writer.add_documents(np.full(100, tokenizer.vocab_size, dtype=writer.dtype), [100])
    train = build_datasets(make_config(train_data_path=[str(tmp_path / "bad")]), tokenizer).train
    with pytest.raises(DataError, match=rf"bad\.bin holds token id {tokenizer.vocab_size} "):
        train[0]
    with TokenFileWriter(tmp_path / "bad", dtype=np.dtype("<i4")) as writer:
        writer.add_documents(np.full(100, -2, dtype=writer.dtype), [100])
    train = build_datasets(make_config(train_data_path=[str(tmp_path / "bad")]), tokenizer).train
    with pytest.raises(DataError, match=r"bad\.bin holds token id -2 "):
        train[0]


def test_a_corrupt_index_is_named_with_what_to_remove(
    make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = make_config(data_cache_path=str(tmp_path / "indices"))
    build_datasets(config, tokenizer)
    (path,) = (tmp_path / "indices").glob("*/train-0-samples.npy")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BadInputError, match=f"Remove the directory {path.parent}"):
        build_datasets(config, tokenizer)


def build_on_rank(config: Config, tokenizer_path: str) -> list[list[list[int]]]:
    """First samples of the run; in this two-rank world only rank 0 reads the first time, both the second."""
    tokenizer, rank = Tokenizer.load(tokenizer_path), torch.distributed.get_rank()
    alone = build_datasets(config, tokenizer, reads_data=rank == 0)
    assert (alone.train is None) == (rank != 0)
    assert alone.num_train_samples == 20
    both: Datasets = build_datasets(config, tokenizer)
    other = build_datasets(config.model_copy(update={"training": other_training(config)}), tokenizer)
    return [tokens_of(both.train, 20), tokens_of(both.valid[0].dataset, 8), tokens_of(other.train, 20)]


def other_training(config: Config) -> Any:
    return config.training.model_copy(update={"seed": 77})


def test_ranks_build_once_and_agree(make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    other = write(tmp_path / "other", 101)
    blend = ["0.5", str(tmp_path / "train"), "0.5", other]
    config = make_config(train_data_path=blend)
    first, second = run_on_ranks(2, build_on_rank, config, tokenizer.path)
    assert first == second
    assert len(list((tmp_path / "cache").iterdir())) == 2
    # Without a process group the samples are the same.
    datasets = build_datasets(config, tokenizer)
    assert first[:2] == [tokens_of(datasets.train, 20), tokens_of(datasets.valid[0].dataset, 8)]
