"""What completing prompts takes by ragged passes of one model, under one plan, on one machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from zinfer.errors import ConfigError
from zinfer.planning.kv_budget import BatchingBudget
from zinfer.planning.simulation import JobPrediction, PassTimeOf, predict_job, simulate
from zinfer.scheduling.schedule import PassSize


@dataclass(frozen=True)
class JobEstimator:
    """Seconds of passes, whether they are rehearsed or were computed.

    Attributes:
        budget: of pages and tokens.
        window: tokens that every layer of the model sees at most; None where one sees all.
        token_bytes: of one token's keys and values in all layers.
        pass_time: of a pass.
    """

    budget: BatchingBudget
    window: int | None
    token_bytes: int
    pass_time: PassTimeOf

    def of_texts(self, prompt_lens: Sequence[int], new_tokens: int | Sequence[int]) -> JobPrediction:
        """What texts will take, none of which begin alike; arguments as for `LLM.predict`.

        Raises:
            ConfigError: there are none.
            PlanError: one does not fit the cache even alone.
        """
        if not prompt_lens:
            raise ConfigError("there are no prompts to predict anything of; give the tokens of one at least")
        each = [new_tokens] * len(prompt_lens) if isinstance(new_tokens, int) else new_tokens
        return self.of_passes(simulate(prompt_lens, each, self.budget, self.window))

    def of_passes(self, sizes: Sequence[PassSize]) -> JobPrediction:
        """What passes of these sizes ought to take.

        Raises:
            ConfigError: there are none.
        """
        if not sizes:
            raise ConfigError("no pass was computed yet, so that none can be predicted")
        return predict_job(sizes, self.token_bytes, self.budget, self.pass_time)
