"""How much instructions scatter from one iteration to the next: alike, or as measured, by kind and stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perseus_solver.calibration.noise import Noise
from perseus_solver.errors import InvalidCalibration, InvalidProblem
from perseus_solver.kinds import Floats, Index
from perseus_solver.model.problem import Problem


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """How much the times of instructions scatter: standard deviations as shares, independent of each other.

    Attributes:
        instruction: float[n], of each instruction by itself.
        iteration: float[n], of all instructions of its group together, from one iteration to the next.
        group: int[n], the group of each instruction: its kind on its stage.
    """

    instruction: Floats
    iteration: Floats
    group: Index

    @classmethod
    def uniform(cls, problem: Problem, share: float) -> Scatter:
        """Return independent scatter, the same for every instruction.

        Args:
            problem: the problem.
            share: standard deviation of an instruction's time, such as 0.01.

        Raises:
            InvalidProblem: ``share`` is not between 0 and 0.5.
        """
        if not 0 <= share <= 0.5:
            raise InvalidProblem(f"scatter must be between 0 and 0.5, not {share}")
        n = problem.instructions
        return cls(np.full(n, share), np.zeros(n), np.zeros(n, dtype=np.intp))

    @classmethod
    def calibrated(cls, problem: Problem, noise: Sequence[Noise]) -> Scatter:
        """Return scatter as measured; kinds of instructions that were not measured get the median of the others.

        Args:
            problem: the problem.
            noise: see `perseus_solver.calibration.Calibration`.

        Raises:
            InvalidCalibration: nothing was measured, because no plan ran twice.
        """
        if not noise:
            raise InvalidCalibration("the calibration has no scatter, because no plan ran twice")
        measured = {
            (one.stage, one.kind): (one.instruction_percent / 100, one.iteration_percent / 100) for one in noise
        }
        usual = tuple(np.median(list(measured.values()), axis=0).tolist())
        each = np.array([measured.get((table.stage, table.kind), usual) for table in problem.options])
        return cls(each[problem.option_of, 0], each[problem.option_of, 1], problem.option_of.astype(np.intp))

    @property
    def typical(self) -> float:
        """Standard deviation of a typical instruction, a share."""
        return float(np.median(np.hypot(self.instruction, self.iteration)))

    def draw(self, iterations: int, random: np.random.Generator) -> Floats:
        """Return by what each instruction takes longer or shorter, float[n, iterations]; log-normal, and 1 in the mean:
        a plan's expected energy does not depend on the scatter.
        """
        n = len(self.instruction)
        if not self.instruction.any() and not self.iteration.any():
            return np.ones((n, iterations))
        alone = random.standard_normal((n, iterations))
        spread = (self.instruction**2 + self.iteration**2)[:, None]
        exponent = self.instruction[:, None] * alone - spread / 2
        if self.iteration.any():
            common = random.standard_normal((int(self.group.max()) + 1, iterations))[self.group]
            exponent += self.iteration[:, None] * common
        share: Floats = np.exp(exponent)
        return share
