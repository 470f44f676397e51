"""Rules for the data keys: which a run needs, and which exclude one another. Files are checked elsewhere.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.facts import Alternative, Facts, Finding, multiples

TOKENIZER = "data.tokenizer_model"
NO_FILE_TYPE = "ByteLevelTokenizer"
BOTH = "data.data_path"
PREFIXES = "the prefix of a token file (its path without .bin), or weight, prefix, weight, prefix, ..."


def check_data_keys(facts: Facts) -> Iterator[Finding]:
    """Every key without which no batch can be made, and every two that contradict each other."""
    data, training = facts.config.data, facts.config.training
    if not data.train_data_path and not data.data_path:
        yield Finding("training text", "data.train_data_path", "no training data", (), PREFIXES)
    if not data.valid_data_path and not data.data_path and training.eval_iters > 0:
        yield Finding(
            "validation text",
            "data.valid_data_path",
            f"training.eval_iters={training.eval_iters} needs validation data",
            (Alternative("training.eval_iters", [0]),),
            PREFIXES,
        )
    if data.tokenizer_model is None and data.tokenizer_type != NO_FILE_TYPE:
        reason = "the vocabulary and the end-of-document token come from it"
        use = f"the path of a tokenizer.json or another tokenizer's file, or data.tokenizer_type={NO_FILE_TYPE}"
        yield Finding("tokenizer", TOKENIZER, reason, (), use)
    yield from _data_path(facts)
    yield from _documents(facts)


def _data_path(facts: Facts) -> Iterator[Finding]:
    data = facts.config.data
    if not data.data_path:
        return
    for key, paths in (("data.train_data_path", data.train_data_path), ("data.valid_data_path", data.valid_data_path)):
        if paths:
            reason = f"conflicts with {BOTH}, which data.split splits into training and validation"
            yield Finding(f"{key} and {BOTH}", key, reason, (Alternative(key, [[]]), Alternative(BOTH, [[]])))


def _documents(facts: Facts) -> Iterator[Finding]:
    """With RoPE a position is a place in what attention sees, and has no meaning by itself."""
    data = facts.config.data
    if not data.reset_position_ids or data.reset_attention_mask:
        return
    if facts.config.model.position_embedding_type == "rope":
        key, attention = "data.reset_position_ids", "data.reset_attention_mask"
        yield Finding(
            "positions of RoPE",
            key,
            "RoPE positions count from the first token that attention sees, which is the first of the sample: they "
            f"restart only with {attention}, and then always",
            (
                Alternative(attention, [True]),
                Alternative(key, [False]),
                Alternative("model.position_embedding_type", ["learned_absolute"]),
            ),
        )


def check_length(facts: Facts) -> Iterator[Finding]:
    """The keys that say how long a run is: one of them, in whole steps."""
    training = facts.config.training
    samples, batch = training.train_samples, training.global_batch_size
    if training.train_iters == 0 and samples is None and training.train_epochs is None:
        reason = "the length of the run is not set"
        other = "training.train_iters=N, training.train_samples=N or training.train_epochs=N"
        yield Finding("length", "training.train_iters", reason, (), other)
    if samples is not None and training.train_epochs is not None:
        reason = f"training.train_samples={samples} already sets the length of the run"
        nothing = Alternative("training.train_epochs", [None]), Alternative("training.train_samples", [None])
        yield Finding("two lengths", "training.train_epochs", reason, nothing)
    consumed = facts.position.trained_samples
    if samples is not None and samples > consumed and (samples - consumed) % batch:
        what = f"the {samples - consumed:,} samples after the {consumed:,} consumed are " if consumed else ""
        reason = f"{what}not divisible by training.global_batch_size={batch}"
        lengths = [consumed + rest for rest in multiples(samples - consumed, batch, batch)]
        near = Alternative("training.train_samples", lengths)
        yield Finding("samples", "training.train_samples", reason, (near,))
