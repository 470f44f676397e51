"""Adapts a loaded model to EleutherAI's lm-eval: log-probabilities of continuations and texts, and generation.

Every rank runs the harness over the same requests and gets the same answers; the ranks share the forward passes.
Imports lm-eval, which is an optional dependency.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows

from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.errors import BadInputError
from megatron_fp8.evaluate.scoring import Request, Scorer
from megatron_fp8.generate.generation import Limits, Sampling, generate
from megatron_fp8.generate.loaded_model import LoadedModel
from megatron_fp8.parallel.object_collectives import all_gather

_IGNORED_WHEN_GREEDY = {"temperature", "top_k", "top_p"}


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A checkpoint's model as an lm-eval model. Texts follow an end-of-document token, as in training."""

    def __init__(self, model: LoadedModel, tokenizer: Tokenizer, batch_size: int, seed: int = 1234) -> None:
        super().__init__()
        self._loaded = model
        self._text = tokenizer
        self._scorer = Scorer(model)
        self._batch_size = batch_size
        self._seed = seed

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self._text.eod_id

    @property
    def max_length(self) -> int:
        """The longest input in tokens."""
        return self._loaded.num_positions

    @property
    def tokenizer_name(self) -> str:
        """Key of lm-eval's request caches."""
        return str(self._text.path).replace("/", "__")

    def tok_encode(self, string: str, **options: Any) -> list[int]:  # noqa: ARG002
        """Tokens of a text, without special tokens."""
        return self._text.encode(string)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        **options: Any,  # noqa: ARG002
    ) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy) of continuations given contexts, which are truncated on the left."""
        asked = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise BadInputError(
                    f"a continuation has {len(continuation)} tokens, but the model reads at most {self.max_length}: "
                    "leave the task out"
                )
            asked.append(Request((context + continuation)[-(self.max_length + 1) :], len(continuation)))
        answers = [(score.log_probability, score.is_greedy) for score in self._scorer.score(asked)]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], **options: Any) -> list[float]:  # noqa: ARG002
        """Log-probability of whole texts, in windows of the model's length; only the last one overlaps."""
        asked: list[Request] = []
        counts = []
        for request in requests:
            windows = list(
                get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
                )
            )
            # All inputs of a window but the first are also labels, or the context of the last window.
            asked += [Request([*given, predicted[-1]], len(predicted)) for given, predicted in windows]
            counts.append(len(windows))
        scores = iter(self._scorer.score(asked))
        totals = [sum(next(scores).log_probability for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], **options: Any) -> list[str]:  # noqa: ARG002
        """Continuations of the contexts, up to the first stop string; data-parallel ranks share the work."""
        groups = self._loaded.groups
        if groups.pp.size() > 1:
            raise BadInputError("tasks that generate text need --pipeline-model-parallel-size 1")
        order = sorted(range(len(requests)), key=lambda index: (repr(requests[index].args[1]), index))
        mine = order[groups.dp.rank() :: groups.dp.size()]
        written: dict[int, str] = {}
        for _, same in groupby(mine, key=lambda index: repr(requests[index].args[1])):
            indices = list(same)
            for first in range(0, len(indices), self._batch_size):
                chosen = indices[first : first + self._batch_size]
                texts = self._generate([requests[index].args[0] for index in chosen], requests[chosen[0]].args[1])
                written.update(zip(chosen, texts, strict=True))
        every = {index: text for share in all_gather(written) for index, text in share.items()}
        for index, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, every[index])
        return [every[index] for index in range(len(requests))]

    def _generate(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        """Continuations of a batch of contexts with the same settings."""
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(settings))
        until, limit = wanted.pop("until"), wanted.pop("max_gen_toks")
        room = self.max_length - limit
        if room < 1:
            raise BadInputError(
                f"max_gen_toks={limit} leaves no room for a context: the model has {self.max_length} positions. Use "
                f"--gen-kwargs max_gen_toks=N with N below {self.max_length}"
            )
        sampling, stops = sampling_of(wanted), [stop for stop in until if stop]
        prompts = [(self._text.encode(context) or [self.eot_token_id])[-room:] for context in contexts]
        limits = Limits(limit, self.eot_token_id, lambda ids: any(stop in self._text.decode(ids) for stop in stops))
        continuations = generate(self._loaded, prompts, limits, sampling, self._seed)
        texts = [self._text.decode(continuation.tokens) for continuation in continuations]
        return [postprocess_generated_text(text, until, None) for text in texts]


def sampling_of(settings: dict[str, Any]) -> Sampling:
    """The sampling settings. Raises BadInputError for unknown ones."""
    settings = {name: value for name, value in settings.items() if value is not None}
    sampled = bool(settings.pop("do_sample", False))
    unknown = sorted(set(settings) - _IGNORED_WHEN_GREEDY)
    if unknown:
        raise BadInputError(
            f"the task generates with {', '.join(unknown)}, which is not supported; supported are do_sample, "
            f"{', '.join(sorted(_IGNORED_WHEN_GREEDY))}, until and max_gen_toks"
        )
    if not sampled:
        return Sampling(greedy=True)
    return Sampling(
        temperature=float(settings.get("temperature", 1.0)),
        top_k=int(settings.get("top_k", 0)),
        top_p=float(settings.get("top_p", 1.0)),
    )
