"""GPT-2's two tokenizer files as options of `preprocess`: what is wrong with them, and their conversion."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_fp8.data.tokenizer import HUGGING_FACE, TokenizerError
from megatron_fp8.prepare.train_tokenizer import convert_gpt2_files

GPT2_TYPE = "GPT2BPETokenizer"


def wrong_gpt2_options(options: argparse.Namespace) -> list[str]:
    """What is wrong with --vocab-file and --merge-file."""
    given = options.vocab_file, options.merge_file
    if None in given:
        is_meant = options.tokenizer_type == GPT2_TYPE or given != (None, None)
        return (
            ["--vocab-file, --merge-file: give both, the tokenizer of GPT-2 consists of two files"] if is_meant else []
        )
    if options.train_bpe is not None or options.tokenizer_type not in ("auto", GPT2_TYPE):
        return ["--vocab-file, --merge-file: they are the tokenizer; omit --train-bpe and --tokenizer-type"]
    path = _gpt2_path(options)
    if path.is_dir() or not path.parent.is_dir():
        return [f"--tokenizer-model {path}: name a file to write the tokenizer to, in an existing directory"]
    return []


def convert_given_files(options: argparse.Namespace) -> list[str]:
    """Convert GPT-2's two files to --tokenizer-model, or say what is wrong with them."""
    path = _gpt2_path(options)
    try:
        convert_gpt2_files(Path(options.vocab_file), Path(options.merge_file), options.eod_token, path)
    except TokenizerError as error:
        return [f"--vocab-file {options.vocab_file} --merge-file {options.merge_file}: {error}"]
    if options.tokenizer_model is None:
        print(f"converted --vocab-file and --merge-file to {path}: name it in a config's data.tokenizer_model")
    options.tokenizer_model, options.tokenizer_type = str(path), HUGGING_FACE
    return []


def _gpt2_path(options: argparse.Namespace) -> Path:
    return Path(options.tokenizer_model or f"{options.output_prefix}_tokenizer.json")
