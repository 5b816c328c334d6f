"""Optimizers for TensorFlow and Keras 3 whose `minimize` goes in steps that can each be replaced.

    pipeline.py       OptimizerWrapper: the steps, their contracts, and the ways through them
    gradients.py      GradsAndVars: what goes from step to step
    loss_scaling.py   LossScaling
    clipping.py       ClipByGlobalNorm, ClipByNorm, ClipByValue
    accumulation.py   GradientAccumulation
    weight_decay.py   DecoupledWeightDecay
    averaging.py      MovingAverage, StochasticWeightAveraging, Lookahead, and the callback AveragedWeights
    privacy.py        DifferentialPrivacy
    model.py          Model, whose fit goes through minimize

The steps are those of "Easily Customizable Optimizer.minimize" (tensorflow/community, 2020).
"""

from xla_lamb.minimize.accumulation import GradientAccumulation
from xla_lamb.minimize.averaging import AveragedWeights, Averaging, Lookahead, MovingAverage, StochasticWeightAveraging
from xla_lamb.minimize.clipping import ClipByGlobalNorm, ClipByNorm, ClipByValue
from xla_lamb.minimize.gradients import GradsAndVars
from xla_lamb.minimize.loss_scaling import LossScaling
from xla_lamb.minimize.model import Model
from xla_lamb.minimize.pipeline import OptimizerWrapper
from xla_lamb.minimize.privacy import DifferentialPrivacy
from xla_lamb.minimize.weight_decay import DecoupledWeightDecay

__all__ = [
    "AveragedWeights",
    "Averaging",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "DecoupledWeightDecay",
    "DifferentialPrivacy",
    "GradientAccumulation",
    "GradsAndVars",
    "Lookahead",
    "LossScaling",
    "Model",
    "MovingAverage",
    "OptimizerWrapper",
    "StochasticWeightAveraging",
]
