"""One subject of the encoding benchmark, as a program: our preprocessing, or the `tokenizers` library alone.

`python -m megatron_fp8.bench.encoding_run ours|METHOD TOKENIZER JSONL OUTPUT_PREFIX PROCESSES`. The library alone does
nothing but `METHOD`, `encode_batch` or `encode_batch_fast`: texts are divided and read before, and what comes out is
thrown away.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path

_BATCH_BYTES = 2**20


def main(arguments: list[str]) -> None:
    """Encode everything once."""
    subject, tokenizer, texts, output_prefix, num_processes = arguments
    if subject == "ours":
        _ours(tokenizer, texts, output_prefix, int(num_processes))
        return
    context = multiprocessing.get_context("spawn")
    shares = range(int(num_processes))
    arguments_of = [(subject, tokenizer, texts, share, len(shares)) for share in shares]
    others = [context.Process(target=encode_share, args=of_share) for of_share in arguments_of[1:]]
    for process in others:
        process.start()
    encode_share(*arguments_of[0])
    for process in others:
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"a process of the library's ended with {process.exitcode}")


def _ours(tokenizer: str, texts: str, output_prefix: str, num_processes: int) -> None:
    from megatron_fp8.data.encode import Settings, TokenizerFile
    from megatron_fp8.data.preprocess import Pace, preprocess
    from megatron_fp8.data.sources.files import find_inputs

    settings = Settings(TokenizerFile(tokenizer), append_eod=True)
    preprocess(find_inputs([texts], "auto", settings.keys), output_prefix, settings, Pace(num_processes))


def encode_share(method: str, tokenizer: str, path: str, share: int, num_shares: int) -> None:
    """Encode every `num_shares`-th batch of about a MiB, from number `share` on."""
    import tokenizers

    batches: list[list[str]] = []
    size_bytes = _BATCH_BYTES
    with Path(path).open("rb") as stream:
        for line in stream:
            if size_bytes >= _BATCH_BYTES:
                batches.append([])
                size_bytes = 0
            size_bytes += len(line)
            batches[-1].append(json.loads(line)["text"] if (len(batches) - 1) % num_shares == share else "")
    encode = getattr(tokenizers.Tokenizer.from_file(tokenizer), method)
    for batch in batches[share::num_shares]:
        encode(batch, add_special_tokens=False)


if __name__ == "__main__":
    main(sys.argv[1:])
