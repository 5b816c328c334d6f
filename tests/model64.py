"""LAMB in float64 NumPy, written from the papers' and the peers' formulas and from nothing of xla_lamb: what the tests compare with.

A tree is a list of arrays here. Everything is computed in float64; State.p, State.m and State.v are rounded to a storage type only on request.
"""

import dataclasses

import numpy as np

INF = float("inf")


@dataclasses.dataclass(frozen=True)
class Rules:
    """One LAMB: the same switches as in the table of peers, spelled independently of the library's own presets."""

    decay: str = "in_ratio"  # in_ratio, decoupled, l2
    correction: str = "update"  # update, learning_rate, none
    adapt: str = "all"  # all, decay_mask, decayed
    ratio_bounds: tuple = (0.0, INF)
    norm_bounds: tuple = (0.0, INF)
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    eps_root: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


PRESETS = {
    "optax": Rules(),
    # An empty exclusion list falls back to the decay list: what does not decay does not adapt.
    "tf_addons": Rules(adapt="decay_mask"),
    "keras": Rules(decay="decoupled", eps=1e-7),
    "apex": Rules(adapt="decayed", weight_decay=0.01, max_grad_norm=1.0),
    "nvlamb": Rules(weight_decay=0.01, max_grad_norm=1.0),
    "timm": Rules(adapt="decayed", weight_decay=0.01, max_grad_norm=1.0),
    "paper": Rules(weight_decay=0.01),
    "deepspeed": Rules(correction="learning_rate", ratio_bounds=(0.01, 10.0), eps=1e-8),
}


@dataclasses.dataclass
class State:
    p: list
    m: list
    v: list
    t: int = 0


@dataclasses.dataclass
class Stats:
    trust: list  # one array [*layers, 3] a tensor: |p|, |u|, ratio
    grad_norm: float
    skipped: bool


def init(params):
    params = [np.asarray(p, np.float64) for p in params]
    return State(params, [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params])


def grad_norm(grads, grad_scale=1.0):
    """The norm over all gradients as one vector, scaled by its largest value so that squares of float64 cannot overflow."""
    flat = np.concatenate([np.asarray(g, np.float64).ravel() for g in grads] + [np.zeros(1)]) * grad_scale
    top = np.max(np.abs(flat))
    if not np.isfinite(top) or top == 0:
        return float(top)
    return float(top * np.linalg.norm(flat / top))


def _norms(x, axes):
    """Norms over all but the first `axes` axes."""
    return np.sqrt(np.sum(np.square(x.reshape(x.shape[:axes] + (-1,))), axis=-1)) if x.size else np.zeros(x.shape[:axes])


def step(
    state,
    grads,
    rules,
    learning_rate,
    decay_mask=None,
    adapt_mask=None,
    layer_axes=None,
    grad_scale=1.0,
    skip=False,
    nonfinite="propagate",
    store_p=None,
    store_m=None,
):
    """One step: (new State, Stats). The masks and layer_axes are lists, one entry a tensor."""
    n = len(state.p)
    decay_mask = [True] * n if decay_mask is None else list(decay_mask)
    layer_axes = [0] * n if layer_axes is None else list(layer_axes)
    if adapt_mask is None:
        decayed = [d and rules.weight_decay != 0 for d in decay_mask]
        adapt_mask = {"all": [True] * n, "decay_mask": decay_mask, "decayed": decayed}[rules.adapt]
    norm = grad_norm(grads, grad_scale)
    if skip or (nonfinite == "skip" and not np.isfinite(norm)):
        return state, Stats([], norm, True)
    clip = 1.0
    if rules.max_grad_norm is not None and norm > rules.max_grad_norm:
        clip = rules.max_grad_norm / norm

    t = state.t + 1
    b1, b2 = rules.b1, rules.b2
    # -expm1(t log b) is 1 - b^t without its cancellation.
    c1 = -np.expm1(t * np.log(b1)) if b1 else 1.0
    c2 = -np.expm1(t * np.log(b2)) if b2 else 1.0
    rate = learning_rate
    if rules.correction == "learning_rate":
        rate = learning_rate * np.sqrt(c2) / c1
    if rules.correction != "update":
        c1 = c2 = 1.0

    out = State([], [], [], t)
    trust = []
    with np.errstate(all="ignore"):
        for p, g, m, v, decays, adapts, axes in zip(
            state.p, grads, state.m, state.v, decay_mask, adapt_mask, layer_axes, strict=True
        ):
            p, m, v = (np.asarray(x, np.float64) for x in (p, m, v))
            wd = rules.weight_decay if decays else 0.0
            g = np.asarray(g, np.float64) * (grad_scale * clip)
            if rules.decay == "decoupled":
                p = p * (1.0 - learning_rate * wd)
            elif rules.decay == "l2":
                g = g + wd * p
            m = b1 * m + (1.0 - b1) * g
            v = b2 * v + (1.0 - b2) * g * g
            u = (m / c1) / (np.sqrt(v / c2 + rules.eps_root) + rules.eps)
            if rules.decay == "in_ratio":
                u = u + wd * p
            p_norm, u_norm = _norms(p, axes), _norms(u, axes)
            phi = np.clip(p_norm, *rules.norm_bounds)
            ratio = np.where((phi == 0) | (u_norm == 0), 1.0, np.clip(phi / u_norm, *rules.ratio_bounds))
            if not adapts:
                ratio = np.ones_like(ratio)
            p = p - rate * ratio.reshape(ratio.shape + (1,) * (p.ndim - axes)) * u
            if store_p is not None:
                p = p.astype(store_p).astype(np.float64)
            if store_m is not None:
                m, v = m.astype(store_m).astype(np.float64), v.astype(store_m).astype(np.float64)
            out.p.append(p), out.m.append(m), out.v.append(v)
            trust.append(np.stack([p_norm, u_norm, ratio], axis=-1))
    return out, Stats(trust, norm, False)
