"""What a person sees of a run."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """What a person sees."""

    log_every: int = 10
    """Steps between lines where the output is no terminal."""
    record_routing_every: int = 0
    """Steps between recordings of every token's experts in RUN/routing, for `python -m moex.balance simulate`; 0 for none."""
    measure_precision_every: int = 0
    """Steps between measurements of every quantised operand, into RUN/precision.jsonl; 0 for none."""
    eval_every: int = 100
    """Steps between held-out losses; 0 for none, the last step always has one otherwise."""
    eval_rows: int = 128
    """Held-out rows an evaluation reads, at most."""
    sample_tokens: int = 200
    """Tokens generated after the last step; 0 for none."""
    sample_prompt: str = "def "
    """What generation starts from."""
    sample_ids: bool = False
    """Write the numbers of each step's rows into its line of metrics.jsonl."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Where numbers go beside the run folder; tensorboard writes RUN/tb, the others need the extra `track`."""
    profile: str = ""
    """FIRST:STOP, steps to trace into RUN/profiles; also --profile. The first one traced should not be the first of all."""
