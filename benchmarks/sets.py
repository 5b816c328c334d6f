"""The sets of tensors that the benchmark steps: the shapes of real models, and two extremes."""

import math


def bert(layers, width, vocabulary=30522, positions=512):
    """The shapes of a BERT encoder with its pooler, in the order of its layers."""
    norm = [(width,), (width,)]
    dense = [(width, width), (width,)]
    embeddings = [(vocabulary, width), (positions, width), (2, width)] + norm
    attention = 4 * dense + norm
    feed_forward = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)] + norm
    return embeddings + layers * (attention + feed_forward) + dense


SETS = {
    "bert-base": lambda: bert(layers=12, width=768),
    "bert-large": lambda: bert(layers=24, width=1024),
    "many-small": lambda: 2000 * [(1000,)],
    "one-big": lambda: [(64 * 2**20,)],
}


def shapes(name):
    """The list of shapes of the set `name`."""
    return SETS[name]()


def elements(shapes):
    """How many numbers tensors of these shapes hold together."""
    return sum(math.prod(shape) for shape in shapes)
