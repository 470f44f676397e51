"""One subject of the encoding benchmark, as a program: our preprocessing, or the `tokenizers` library alone.

`python -m megatron_fp8.bench.encoding_run ours|library TOKENIZER JSONL OUTPUT_PREFIX PROCESSES`. The library alone does
nothing but `encode_batch`: texts are divided and read before, and what comes out is thrown away.
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
    others = [context.Process(target=encode_share, args=(tokenizer, texts, share, len(shares))) for share in shares[1:]]
    for process in others:
        process.start()
    encode_share(tokenizer, texts, 0, len(shares))
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


def encode_share(tokenizer: str, path: str, share: int, num_shares: int) -> None:
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
    library = tokenizers.Tokenizer.from_file(tokenizer)
    for batch in batches[share::num_shares]:
        library.encode_batch(batch, add_special_tokens=False)


if __name__ == "__main__":
    main(sys.argv[1:])
