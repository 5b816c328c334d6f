"""What is trained: the sizes of the models, the schedule, and the start that all trainings share."""

import dataclasses

import numpy as np

VOCABULARY = 257  # the bytes, and the mask
MASK = 256


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of an encoder."""

    layers: int
    width: int
    heads: int


SIZES = {
    "small": Size(layers=2, width=256, heads=4),
    "bert-base": Size(layers=12, width=768, heads=12),
    "bert-large": Size(layers=24, width=1024, heads=16),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides how a training goes. Two trainings with equal settings have equal curves."""

    model: str
    steps: int
    batch: int
    length: int
    text: str  # digest of the text
    learning_rate: float
    weight_decay: float = 0.01
    seed: int = 0

    @property
    def size(self):
        return SIZES[self.model]

    @property
    def warmup(self):
        """Steps of rising learning rate: a tenth of all."""
        return max(1, self.steps // 10)

    @property
    def masked(self):
        """Bytes of each sequence that are to be guessed: 15 %, as in BERT."""
        return max(1, round(0.15 * self.length))


def learning_rate(settings, count, minimum):
    """The schedule at step `count` (from 0), for any array library, given its `minimum`: up, then down to 0, in lines."""
    rising = (count + 1.0) / settings.warmup
    falling = (settings.steps - count) / (settings.steps - settings.warmup + 1.0)
    return settings.learning_rate * minimum(rising, falling)


def decays(name):
    """Whether weight decay touches the parameter: not biases and not LayerNorm, as in BERT."""
    return name.endswith(("kernel", "embedding"))


def shapes(settings):
    """The parameters of BERT for masked bytes, {name: shape}. The last layer shares the embedding of the bytes."""
    size, width = settings.size, settings.size.width
    found = {}

    def dense(name, rows, columns):
        found[f"{name}/kernel"], found[f"{name}/bias"] = (rows, columns), (columns,)

    def norm(name):
        found[f"{name}/scale"], found[f"{name}/shift"] = (width,), (width,)

    found["bytes/embedding"] = (VOCABULARY, width)
    found["positions/embedding"] = (settings.length, width)
    norm("embeddings/norm")
    for layer in range(size.layers):
        for part in ("query", "key", "value", "output"):
            dense(f"layer{layer:02}/attention/{part}", width, width)
        norm(f"layer{layer:02}/attention/norm")
        dense(f"layer{layer:02}/feed_forward/inner", width, 4 * width)
        dense(f"layer{layer:02}/feed_forward/outer", 4 * width, width)
        norm(f"layer{layer:02}/feed_forward/norm")
    dense("head/dense", width, width)
    norm("head/norm")
    found["head/bytes/bias"] = (VOCABULARY,)
    return found


def _waves(rows, columns):
    """Sines and cosines of ever longer waves along the rows."""
    phase = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(0, columns, 2) / columns)
    return np.concatenate([np.sin(phase), np.cos(phase)], axis=1)[:, :columns]


def start(settings):
    """The parameters before the first step, {name: array}, the same for every framework.

    Positions are learned from waves on: from noise, so short a training would learn how frequent bytes are, and no more.
    """
    random = np.random.default_rng(settings.seed)
    params = {}
    for name, shape in shapes(settings).items():
        if name == "positions/embedding":
            params[name] = (0.02 * 2**0.5 * _waves(*shape)).astype(np.float32)
        elif decays(name):
            params[name] = 0.02 * random.standard_normal(shape, np.float32)
        else:
            params[name] = np.full(shape, name.endswith("scale"), np.float32)
    return params
