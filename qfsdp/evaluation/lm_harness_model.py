"""A decoder as a model of lm-eval. Imports lm-eval; recipes import `lm_harness` instead."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from qfsdp.common.errors import UserError
from qfsdp.data.tokenizer import HFTokenizer
from qfsdp.distributed.world import World
from qfsdp.evaluation.generation import SamplingConfig, generate_all
from qfsdp.evaluation.log_likelihood import log_likelihoods
from qfsdp.evaluation.prompts import special_stops
from qfsdp.modules.hub_models.decoder import AnyDecoder

DEFAULT_NEW_TOKENS = 256  # lm-eval's default
LAST = "(the last message ends here) "  # without its space: the template trims messages


class HarnessModel(TemplateLM):
    """Answers lm-eval's three kinds of requests, with the tokens that its `hf` model would use.

    lm-eval runs on every rank with all requests. The functions that it calls here split the work
    over the ranks, so every rank runs the same number of forward passes and gets all answers.

    Args:
        tokenizer: `hf_tokenizer(...)` or one of torchtune's.
        stops: tokens that end an answer.
        batch_size: contexts or prompts per forward pass.
    """

    def __init__(
        self, model: AnyDecoder, tokenizer: Any, stops: set[int], world: World, batch_size: int
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._model, self._stops, self._world = model, stops, world
        self._batch_size = batch_size
        self._prefix_text = tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        bos_id = self.tokenizer.bos_id
        return self.eot_token_id if bos_id is None else int(bos_id)

    @property
    def max_length(self) -> int:
        return self._model.config.max_position_embeddings

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Tokens of a text.

        By default with the special tokens that the tokenizer adds, unless the text begins with the
        prefix token.
        """
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._prefix_text)
        if add_special_tokens and isinstance(self.tokenizer, HFTokenizer):
            return self.tokenizer.encode_as_stored(string)
        tokens = self.tokenizer.encode(string, add_bos=add_special_tokens, add_eos=False)
        return list(tokens)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)  # avoids a bar per rank

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return log_likelihoods(self._model, pairs, self._world, self._batch_size)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Summed log-probability of each text, in windows of all of the model's positions."""
        pairs, owners = [], []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in windows:
                pairs.append(make_disjoint_window(window))
                owners.append(number)
        totals = [0.0] * len(requests)
        scores = log_likelihoods(self._model, pairs, self._world, self._batch_size)
        for owner, (value, _) in zip(owners, scores, strict=True):
            totals[owner] += value
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Answers to prompts. A prompt loses its beginning if it leaves no room for the answer.

        Stop strings do not end generation early: the answer is cut at the first one afterwards.
        """
        kinds: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            kinds.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        answers = [""] * len(requests)
        for key, numbers in kinds.items():
            contexts = [requests[number].args[0] for number in numbers]
            for number, text in zip(numbers, self._answers(contexts, json.loads(key)), strict=True):
                answers[number] = text
        return answers

    def _answers(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        """Answers to contexts with the same options, a task's `generation_kwargs`."""
        given = normalize_gen_kwargs(options, DEFAULT_NEW_TOKENS)
        end = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        until = handle_stop_sequences(given.get("until"), eos=end)
        sampling = SamplingConfig(
            max_new_tokens=int(given["max_gen_toks"]),
            temperature=float(given.get("temperature", 0.0)) if given["do_sample"] else 0.0,
            top_p=float(given.get("top_p", 1.0)),
        )
        room = self.max_length - sampling.max_new_tokens
        if room < 1:
            raise UserError(
                f"lm_eval.tasks: a task asks for {sampling.max_new_tokens} new tokens; expected "
                f"fewer than the model's {self.max_length} positions"
            )
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        # A task with `repeats` asks the same again, for another answer.
        asked, draws = Counter[str](), []
        for context in contexts:
            draws.append(asked[context])
            asked[context] += 1
        answers = generate_all(
            self._model,
            prompts,
            sampling,
            self._stops | special_stops(self.tokenizer, until),
            self._world,
            self._batch_size,
            "answering",
            draws,
        )
        texts = (self.tokenizer.decode(tokens) for tokens in answers)
        return [postprocess_generated_text(text, until, None) for text in texts]

    @property
    def tokenizer_name(self) -> str:
        return type(self.tokenizer).__name__

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text.

        Without the generation prompt it ends with the text of the last message, for the model to
        continue.
        """
        if add_generation_prompt:
            return str(self.tokenizer.render(chat_history, True))
        *before, last = chat_history
        marked = last | {"content": last["content"] + LAST}
        text: str = self.tokenizer.render([*before, marked])
        at = text.rindex(LAST.strip())
        return text[:at] if text.startswith(LAST, at) else text[:at].rstrip()
