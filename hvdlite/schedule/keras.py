"""The steps of a Keras optimizer by a schedule; imports no Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.engine.process_sets import is_outside
from hvdlite.gradients.keras_exchange import LABEL, Backend, GradientPath, Synchronizer
from hvdlite.gradients.options import Options
from hvdlite.schedule.local_steps import LocalSteps, check_unweighted


class KerasSteps(GradientPath):
    """A `GradientPath` with local steps: on own or reduced gradients, with exchanges of weights."""

    stepped = True

    def __init__(self, synchronizer: Synchronizer, backend: Backend) -> None:
        self._options = synchronizer.options
        self._local = synchronizer.local
        self._replica = synchronizer.replica
        self._backend = backend
        self.state = synchronizer.state
        self.steps: Any = None
        self._variables: dict[int, Any] = {}  # of all steps, by id

    @staticmethod
    def check(options: Options, accumulates: bool, scales_loss: bool) -> None:
        if accumulates:
            raise ValueError(
                f"{options.schedule!r} with gradient_accumulation_steps: in local steps gradients "
                "cost no exchange; leave gradient_accumulation_steps out, and take larger batches"
            )
        if scales_loss:
            raise ValueError(
                "a LossScaleOptimizer leaves out the step of a rank whose gradients overflow, and "
                f"with {options.schedule!r} the others would wait for it; use mixed_bfloat16, "
                "which needs no loss scaling, or leave out the schedule"
            )

    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        batch_size: Any,
        apply: Callable[[list[Any]], Any],
    ) -> Any:
        check_unweighted(batch_size)
        if is_outside(self._options.process_set):
            return apply(list(gradients))
        # A call may train some of them only; what is due, is due for all.
        for each in (*self._replica.trained(), *variables):
            self._variables.setdefault(id(each), each)
        known = [*self._variables.values()]
        shared = [known[number] for number in self._local.others(known)]
        count, moments = self._count_for(shared), self._replica.moments_of
        averaged = [moments(each) if count.schedule.momentum else {} for each in shared]
        steps = self.steps = self._kind(count, shared, averaged)
        steps.begin()
        chosen = steps.gradients(
            gradients, lambda: self._local.reduce(gradients, variables, None, self._backend)
        )
        result = apply(chosen)
        steps.end()
        return result

    @property
    def _kind(self) -> Any:
        """Return what makes the local steps of the framework's variables."""
        if self._backend.owner == "keras.tensorflow":
            from hvdlite.tensorflow.local_steps import VariableSteps

            return VariableSteps
        from hvdlite.torch.scheduled import tensor_steps

        return tensor_steps

    def _count_for(self, variables: Sequence[Any]) -> LocalSteps:
        """Return the steps of these variables; new variables take over the state of old ones."""
        earlier: LocalSteps | None = self.state.steps
        parameters = list(self._backend.describe(variables))
        if earlier is not None and earlier.parameters == parameters:
            return earlier
        steps = LocalSteps(self._options, LABEL)
        steps.add(parameters)
        if earlier is not None:
            names = {parameter.name for parameter in parameters}
            state = earlier.state_dict()
            state["outer"] = {n: entry for n, entry in state["outer"].items() if n in names}
            steps.load_state_dict(state)
        self.state.follow(steps)
        return steps
