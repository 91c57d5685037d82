"""A trained model as lm-evaluation-harness wants it (extra `eval`): `python -m moex.evaluate RUN --tasks ...`."""

import importlib
from collections.abc import Sequence
from typing import Any

from moex.data import Tokenizer
from moex.evaluate.score import score
from moex.generate import generate
from moex.train.program import Program
from moex.train.state import TrainState

MAX_NEW_TOKENS = 256
"""Where a task doesn't say how long an answer may be."""


def harness_model(program: Program, state: TrainState, tokenizer: Tokenizer) -> Any:
    """A `lm_eval.api.model.LM` that scores and continues text on the program's mesh.

    Raises ValueError when lm-eval isn't installed, or the tokenizer ends documents by no token, since an empty context is
    one such token.
    """
    try:
        api, utils = (importlib.import_module(f"lm_eval.{name}") for name in ("api.model", "utils"))
    except ImportError as error:
        raise ValueError("--tasks needs lm-eval: install moex-jax[eval]") from error
    if (end := tokenizer.end) is None:
        raise ValueError("the corpus was tokenised without an end of documents, which stands for an empty context")

    class HarnessModel(api.TemplateLM):
        """Scores and continues text on the program's mesh."""

        @property
        def eot_token_id(self) -> int:
            return end

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return tokenizer.encode([string])[0].tolist()

        def _loglikelihood_tokens(self, requests: Sequence, **kwargs: Any) -> list[tuple[float, bool]]:
            return [tuple(one) for one in score(program, state, [(r[1], r[2]) for r in requests])]

        def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
            """Of whole texts, in windows of a sequence, the first of which begins with an end of document."""
            seq_len, totals = program.config.train.seq_len, []
            for request in requests:
                ids = self.tok_encode(request.args[0])
                options = dict(prefix_token=end, max_seq_len=seq_len, context_len=1)
                windows = [utils.make_disjoint_window(w) for w in utils.get_rolling_token_windows(ids, **options)]
                totals.append(sum(one.logp for one in score(program, state, windows)))
            return totals

        def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
            """The likeliest continuation of each, cut at the first of the task's stop texts or at an end of document."""
            texts = []
            for request in requests:
                prompt, options = request.args
                length = int(options.get("max_gen_toks", MAX_NEW_TOKENS))
                ids = (self.tok_encode(prompt) or [end])[-program.config.train.seq_len :]
                (found,) = generate(program, state, [ids], length, temperature=0)
                found = found[: found.index(end)] if end in found else found
                text, until = tokenizer.decode(found), options.get("until") or []
                for stop in [until] if isinstance(until, str) else until:
                    text = text.partition(stop)[0] if stop else text
                texts.append(text)
            return texts

    return HarnessModel()
