"""The step as used: on each platform the fused custom call or the reference, decided when a program is lowered.

Two primitives take any number of tensors at once:

    lamb       one of the three parts of LAMB. Operands and results, for N tensors that share their types:
                 step     scalars, N p, N g, N m, N v     ->  N outputs, N new m, N new v, N trust
                 moments  scalars, N p, N g, N m, N v     ->  N new m, N new v, sums
                 apply    scalars, N p, N m, N v, sums    ->  N outputs, N trust
               scalars: reference.SCALARS, float32, or float64 with float64 parameters; with leading batch axes under vmap.
               sums [..., L, 2]: for each layer of each tensor, in order, the sums of squares of p and u; L counts the layers of one element of the
               batch. trust [*layer_shape, 3]: |p|, |u| and the ratio, if it was asked for: thousands of slices cost time to trace and compile.
    grad_norm  N gradients -> [..., 2]: the sum of their squares, and 1 if all is finite, else 0.

Where the kernel is used, a primitive becomes one custom call for each group of tensors, in place where XLA lets it: new
moments take the buffers of the moments, new parameters those of the parameters, updates those of the gradients. On CUDA a call has one more
result, scratch memory.

Where a mesh splits a tensor, each device takes the two halves of a step on its shard, and the sums of squares travel in between
(sharding.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from xla_lamb import config, library, reference, sharding
from xla_lamb.reference import Spec

# Tensors of one custom call, for each platform. XLA's CPU compiler takes time with the cube of the aliased operands of a call
# (400 tensors in one call: 2.3 s, 800: 17 s); 64 compiles fast, and lets a group start when its own gradients are there. The CUDA kernel
# takes 400 in one launch.
GROUP_SIZE = {"cpu": 64, "cuda": 400}
PLATFORMS = tuple(GROUP_SIZE)
# Elements of one call: beyond that the CUDA kernel would work in larger chunks, which do not stay on the chip between the passes.
GROUP_ELEMENTS = {"cpu": None, "cuda": 500_000_000}

# For each tensor the names of mesh axes; None where there are none.
Axes = Sequence[tuple[str, ...]] | None

FLOATS = ("float32", "bfloat16", "float16", "float64")


# What the audience modules call.


@dataclasses.dataclass(frozen=True)
class Options:
    """How to lower: `implementation` as in config.IMPLEMENTATIONS, `framework` that runs the program: "jax" or "tensorflow"."""

    implementation: str = "auto"
    framework: str = "jax"


class Taken(NamedTuple):
    """What a step gives: lists of N tensors, and what it can tell.

    Attributes:
      outputs: the new parameters, or the updates.
      first, second: the new moments.
      trust: for each tensor [*layer_shape, 3], |p|, |u| and the ratio; or None.
      grad_norm: the global norm of the scaled gradients before clipping, or None if nothing asked for it.
      skipped: whether nothing changed, boolean scalar.
    """

    outputs: list
    first: list
    second: list
    trust: list
    grad_norm: Any
    skipped: Any


def take(
    hyperparameters: dict[str, Any], count, params, grads, first, second, spec: Spec, variant: config.Variant, *, skip=None,
    nonfinite: str = "propagate", options: Options = Options(), trust: bool = True, axes: tuple[Axes, Axes] = (None, None),
) -> Taken:  # fmt: skip
    """One LAMB step as users have it: the gradients' norm where it is needed, the scalars, and the step.

    Args:
      hyperparameters: learning_rate, b1, b2, eps, eps_root, weight_decay, and, each or None, grad_scale and max_grad_norm; numbers or traced scalars.
      count: which step this is, from 1.
      params, grads, first, second, spec, options, trust: as for `step`.
      skip, nonfinite: as for `gradient_scale`.
      axes: inside jax.shard_map and jax.pmap; those that split a tensor within a layer, as for `step`, and all, as for `grad_norm`.
    """
    within, every = axes
    hyper = dict(hyperparameters)
    clip, scale = hyper.pop("max_grad_norm"), hyper.pop("grad_scale")
    scale, skipped, norm = gradient_scale(grads, scale, skip, clip, nonfinite, options, every)
    scalars = reference.scalars(
        **hyper, count=count, grad_scale=scale, skip=skipped, decay=variant.decay, bias_correction=variant.bias_correction
    )
    return Taken(*step(scalars, params, grads, first, second, spec, options, trust, within), norm, jnp.asarray(skipped, bool))


def step(
    scalars: dict[str, Any], params, grads, first, second, spec: Spec, options: Options = Options(), trust: bool = True, axes: Axes = None
):
    """One LAMB step over lists of N tensors of any types.

    Args:
      scalars: by name, from reference.scalars.
      params, grads, first, second: lists of N arrays; the i-th of each have one shape.
      spec: for these N tensors.
      trust: whether to return the trust ratios; thousands of slices cost time to trace and compile.
      axes: inside jax.shard_map and jax.pmap; for each tensor the names of the mesh axes that split it within a layer.

    Returns:
      (outputs, new first moments, new second moments, trust), lists of N; trust[i] is [*layer_shape, 3]: |p|, |u| and the ratio, or None.
    """
    outputs, new_first, new_second, ratios = ([None] * len(params) for _ in range(4))
    for indices in _by_types(params, grads, first, second):
        pick = lambda values: [values[i] for i in indices]
        vector = reference.pack(scalars, reference.arithmetic_dtype(params[indices[0]].dtype))
        tensors = sharding.vary_alike(*map(pick, (params, grads, first, second)), also=sharding.varying(vector))
        results = _step_of_shards(vector, *tensors, spec.select(indices), None, options, trust, pick(axes or [()] * len(params)))
        for k, i in enumerate(indices):
            outputs[i], new_first[i], new_second[i], ratios[i] = (x[k] for x in results)
    return outputs, new_first, new_second, ratios


def grad_norm(grads, options: Options = Options(), axes: Axes = None) -> tuple[jax.Array, jax.Array]:
    """The global norm of a list of gradients of any float types, and whether all of them are finite; both scalars.

    `axes`: inside jax.shard_map and jax.pmap; for each gradient the names of all mesh axes that split it.
    """
    square, finite = jnp.zeros((), jnp.float32), jnp.ones((), bool)
    for indices in _by_types(grads):
        pick = lambda values: [values[i] for i in indices]
        result = _norm_of_shards(pick(grads), 0, options, pick(axes or [()] * len(grads)))
        square, finite = square + result[0], finite & (result[1] != 0)
    return jnp.sqrt(square), finite


def spec_of(variant: config.Variant, decays, adapts, layer_axes, emit_updates: bool = False) -> Spec:
    """The spec of a variant for N tensors; `adapts` holds a bool for each, or None where the user said nothing."""
    default = {
        "all": lambda decay: reference.ALWAYS,
        "decay_mask": lambda decay: reference.ALWAYS if decay else reference.NEVER,
        "decayed": lambda decay: reference.WHERE_DECAYED if decay else reference.NEVER,
    }[variant.adapt]
    said = {True: reference.ALWAYS, False: reference.NEVER}
    return Spec(
        decays=decays,
        adapts=tuple(default(decay) if adapt is None else said[adapt] for decay, adapt in zip(decays, adapts)),
        layer_axes=layer_axes,
        decay=variant.decay,
        norm_bounds=variant.norm_bounds,
        ratio_bounds=variant.ratio_bounds,
        emit_updates=emit_updates,
    )


def gradient_scale(gradients, grad_scale, skip, max_grad_norm, nonfinite: str, options: Options, axes: Axes = None):
    """(scale, skip, norm): what the step multiplies the gradients by, whether it changes nothing, and the norm if it was needed.

    `axes`: as for `grad_norm`.
    """
    scale = 1.0 if grad_scale is None else grad_scale
    skipped = False if skip is None else jnp.asarray(skip, bool)
    if max_grad_norm is None and nonfinite == "propagate":
        return scale, skipped, None
    norm, finite = grad_norm(gradients, options, axes)
    # Squares of finite gradients overflow from 1e19 on, in the second moment too.
    finite = finite & jnp.isfinite(norm)
    norm = norm * jnp.abs(jnp.asarray(scale, norm.dtype))
    if max_grad_norm is not None:
        clip = jnp.where(norm > max_grad_norm, max_grad_norm / norm, 1.0)
        # An infinite norm must not make zeros of finite gradients: the whole step shows it.
        scale = scale * jnp.where(finite, clip, jnp.nan)
    if nonfinite == "skip":
        skipped = skipped | ~finite
    return scale, skipped, norm


def _by_types(*lists) -> list[list[int]]:
    """The indices of the tensors with each combination of types, in order."""
    groups: dict[tuple, list[int]] = {}
    for i, tensors in enumerate(zip(*lists)):
        groups.setdefault(tuple(np.dtype(t.dtype).name for t in tensors), []).append(i)
    return list(groups.values())


# Shards: what is done where a mesh splits the tensors, in a program of one device among several.


def _step_of_shards(vector, p, g, m, v, spec: Spec, dtype, options: Options, trust: bool, axes) -> list[list]:
    """[outputs, new m, new v, trust] of shards; `axes`: for each the names of the bound mesh axes over which the sums of squares are added up.

    What no axis splits takes the step in one pass.
    """
    n = len(p)
    axes = [tuple(sorted(names)) for names in axes]
    dtype = _output_dtype(p[0], g[0], spec, dtype)
    results: list[list] = [[None] * n for _ in range(4)]

    def bind(part, indices, *lists, sums=(), trust=False, into):
        """Puts the results like tensors `into` those kinds of results, and returns what is left."""
        flat = [x[i] for x in lists for i in indices]
        values = iter(lamb_p.bind(vector, *flat, *sums, part=part, spec=spec.select(indices), dtype=dtype, options=options, trust=trust))
        for kind in into:
            for i in indices:
                results[kind][i] = next(values)
        return list(values)

    groups: dict[tuple, list[int]] = {}
    for i, names in enumerate(axes):
        # Where JAX keeps account of what varies, tensors that vary differently share no sums, which would all vary with any of them.
        over = sharding.varying(p[i])
        groups.setdefault((bool(names), over, names if over else ()), []).append(i)
    for (split, *_), indices in groups.items():
        if not split:
            bind("step", indices, p, g, m, v, trust=trust, into=range(3 + trust))
            continue
        indices.sort(key=lambda i: axes[i])  # what is added up over the same axes lies together
        (sums,) = bind("moments", indices, p, g, m, v, into=(1, 2))
        sums = _reduced(sums, [p[i] for i in indices], spec.select(indices), [axes[i] for i in indices])
        bind("apply", indices, p, *results[1:3], sums=[sums], trust=trust, into=(0, 3)[: 1 + trust])
    return results


def _reduced(sums, tensors, spec: Spec, axes):
    """The sums of shards, added up over the axes named for each tensor; those with the same names follow each other."""
    parts, start = [], 0
    for names, group in itertools.groupby(zip(axes, tensors, spec.layer_axes), key=lambda x: x[0]):
        rows = sum(math.prod(x.shape[spec.batch_axes : layers]) for _, x, layers in group)
        parts.append((sums[..., start : start + rows, :], names))
        start += rows
    return jnp.concatenate(sharding.reduce_over(*zip(*parts)), axis=-2)


def _norm_of_shards(grads, batch_axes: int, options: Options, axes):
    """[..., 2] of shards, as grad_norm_p has it of whole gradients; `axes`: for each the names of the bound mesh axes that split it."""
    groups: dict[tuple, list[int]] = {}
    for i, names in enumerate(axes):
        groups.setdefault((tuple(sorted(names)), sharding.varying(grads[i])), []).append(i)
    parts = [grad_norm_p.bind(*(grads[i] for i in indices), batch_axes=batch_axes, options=options) for indices in groups.values()]
    # How many are not finite can be added up.
    counted = [jnp.stack([x[..., 0], 1 - x[..., 1]], axis=-1) for x in parts]
    total = sum(sharding.reduce_over(counted, [names for names, _ in groups]))
    return jnp.stack([total[..., 0], (total[..., 1] == 0).astype(total.dtype)], axis=-1)


# The primitives.

lamb_p = Primitive("xla_lamb")
lamb_p.multiple_results = True
grad_norm_p = Primitive("xla_lamb_grad_norm")


def _unpack(operands: Sequence, part: str, n: int):
    """(scalars, p, g or None, m, v, sums or None) of the operands of a part."""
    scalars, *tensors = operands
    sums = tensors.pop() if part == "apply" else None
    lists = [tensors[k * n : (k + 1) * n] for k in range(len(tensors) // n)]
    if part == "apply":
        lists.insert(1, None)
    return scalars, *lists, sums


def _output_dtype(p, g, spec: Spec, dtype):
    return np.dtype(dtype) if dtype is not None else reference.output_dtype(p.dtype, g.dtype, spec.emit_updates)


def _lamb_avals(*operands, part: str, spec: Spec, dtype, options, trust: bool):
    scalars, p, g, m, v, sums = _unpack(operands, part, len(spec.decays))
    results = []
    if part != "moments":
        output = _output_dtype(p[0], g[0] if g else None, spec, dtype)
        results += [_like(x, x.shape, output) for x in p]
    if part != "apply":
        results += [_like(x, x.shape, x.dtype) for x in [*m, *v]]
    if part == "moments":
        batch = p[0].shape[: spec.batch_axes]
        return [*results, _like(p[0], (*batch, sum(_layers(p, spec)), 2), scalars.dtype, len(batch))]
    for x, axes in zip(p, spec.layer_axes if trust else ()):
        # Added up over shards, sums no longer vary over all that p varies over.
        like, shared = (x, axes) if sums is None else (sums, spec.batch_axes)
        results.append(_like(like, (*x.shape[:axes], 3), scalars.dtype, shared))
    return results


def _layers(tensors, spec: Spec) -> list[int]:
    """How many layers each tensor has, in one element of the batch."""
    return [math.prod(x.shape[spec.batch_axes : axes]) for x, axes in zip(tensors, spec.layer_axes)]


def _lamb_reference(*operands, part: str, spec: Spec, dtype, options, trust: bool):
    n = len(spec.decays)
    scalars, p, g, m, v, sums = _unpack(operands, part, n)
    # One trace for each kind of tensor, not for each tensor: a tree of thousands has few kinds.
    if part != "apply":
        halves = [_moments_jit(scalars, p[i], g[i], m[i], v[i], spec.select([i])) for i in range(n)]
        m, v, tables = (list(x) for x in zip(*halves))
    if part == "moments":
        return [*m, *v, _join(tables, spec)]
    if part == "apply":
        tables = _split(sums, p, spec)
    output = _output_dtype(p[0], g[0] if g else None, spec, dtype)
    seconds = [_apply_jit(scalars, tables[i], p[i], m[i], v[i], spec.select([i]), output) for i in range(n)]
    outputs, ratios = (list(x) for x in zip(*seconds))
    return outputs + (m + v if part == "step" else []) + (ratios if trust else [])


def _split(table, tensors, spec: Spec) -> list:
    """The rows of each tensor, shaped [*layer_shape, columns]."""
    ends = np.cumsum([0, *_layers(tensors, spec)])
    rows = [table[..., start:end, :] for start, end in itertools.pairwise(ends)]
    return [x.reshape(*tensor.shape[:axes], x.shape[-1]) for x, tensor, axes in zip(rows, tensors, spec.layer_axes)]


def _join(tables, spec: Spec):
    """The inverse of _split: [*batch_shape, L, columns]."""
    batch = spec.batch_axes
    flat = [x.reshape(*x.shape[:batch], math.prod(x.shape[batch:-1]), x.shape[-1]) for x in tables]
    return jnp.concatenate(flat, axis=batch)


@functools.partial(jax.jit, static_argnums=5)
def _moments_jit(scalars, p, g, m, v, spec):
    return reference.moments_of(scalars, p, g, m, v, spec, 0)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _apply_jit(scalars, sums, p, m, v, spec, dtype):
    return reference.apply_of(scalars, sums, p, m, v, spec, 0, dtype)


def _groups(platform: str, shapes) -> list[list[int]]:
    """The indices of the tensors of each call, in order."""
    limit = GROUP_ELEMENTS[platform] or math.inf
    groups: list[list[int]] = []
    elements = 0
    for i, size in enumerate(map(math.prod, shapes)):
        if not groups or len(groups[-1]) == GROUP_SIZE[platform] or elements + size > limit:
            groups.append([])
            elements = 0
        groups[-1].append(i)
        elements += size
    return groups


def _scratch(platform: str) -> list[jax.ShapeDtypeStruct]:
    """The last result of each call on CUDA: memory for the kernel's own use.

    It is a result, and not of XLA's scratch allocator, since a CUDA graph that recorded the call replays with the same address: a result's
    memory is the executable's, scratch memory is free again when the handler returns.
    """
    return [jax.ShapeDtypeStruct((library.load().cuda.scratch_bytes,), np.uint8)] if platform == "cuda" else []


def _lamb_fused(platform: str, *operands, part: str, spec: Spec, dtype, options, trust: bool):
    n = len(spec.decays)
    scalars, p, g, m, v, sums = _unpack(operands, part, n)
    kinds = [] if part == "moments" else [(p, _output_dtype(p[0], g[0] if g else None, spec, dtype))]
    kinds += [] if part == "apply" else [(m, m[0].dtype), (v, v[0].dtype)]
    columns = 2 if part == "moments" else 3
    results: list[list] = [[] for _ in kinds]
    tables: list = []
    groups = _groups(platform, [x.shape for x in p])
    vectors = [scalars] * len(groups) if part != "step" or spec.emit_updates else _paced(scalars, [[g[i] for i in group] for group in groups])
    for indices, vector in zip(groups, vectors):
        k = len(indices)
        pick = lambda values: [values[i] for i in indices]
        group = spec.select(indices)
        # The kernel's rows: all of one tensor, whose batch is among its layers, before those of the next.
        rows = [math.prod(x.shape[:axes]) for x, axes in zip(pick(p), group.layer_axes)]
        table = [_rows_of(sums, p, spec, indices)] if part == "apply" else []
        inputs = [vector, *table, *pick(p), *(pick(g) if g else []), *pick(m), *pick(v)]
        outs = [jax.ShapeDtypeStruct(x.shape, kind) for like, kind in kinds for x in pick(like)]
        outs += [jax.ShapeDtypeStruct((sum(rows), columns), scalars.dtype)]
        last = len(outs) - 1
        outs += _scratch(platform)
        call = jax.ffi.ffi_call(f"xla_lamb_{part}", outs, input_output_aliases=_aliases(part, group, k, inputs, outs))
        values = call(
            *inputs,
            decays=np.array(group.decays, np.int32),
            adapts=np.array(group.adapts, np.int32),
            layer_axes=np.array(group.layer_axes, np.int32),
            decay=np.int32(reference.DECAYS.index(spec.decay)),
            norm_low=np.float64(spec.norm_bounds[0]),
            norm_high=np.float64(spec.norm_bounds[1]),
            ratio_low=np.float64(spec.ratio_bounds[0]),
            ratio_high=np.float64(spec.ratio_bounds[1]),
            emit_updates=np.bool_(spec.emit_updates),
        )
        for j, kind in enumerate(results):
            kind += values[j * k : (j + 1) * k]
        if part == "moments" and not spec.batch_axes:
            tables.append(values[last])
        elif part == "moments" or trust:
            parts = [values[last][start:end] for start, end in itertools.pairwise(np.cumsum([0, *rows]))]
            tables += [x.reshape(*p[i].shape[: spec.layer_axes[i]], columns) for x, i in zip(parts, indices)]
    if part == "moments":
        tables = [_join(tables, spec) if spec.batch_axes else jnp.concatenate(tables)]
    return [*(x for kind in results for x in kind), *tables]


def _rows_of(sums, tensors, spec: Spec, indices):
    """The rows of some tensors that follow each other, as the kernel has them: [rows, 2]."""
    if spec.batch_axes:
        return jnp.concatenate([x.reshape(-1, 2) for x in _split(sums, tensors, spec)[indices[0] : indices[-1] + 1]])
    ends = np.cumsum([0, *_layers(tensors, spec)])
    return sums[ends[indices[0]] : ends[indices[-1] + 1]]


def _paced(scalars, gradients) -> list:
    """For each group the scalars, but not before the gradients of its neighbours are there.

    A group may start when its own gradients are there, which frees them early; but the backward pass reads some of its parameters once more, for
    the gradients of the layer before, and XLA would copy those that the call may overwrite first. One group later they have all been read.
    """
    if len(gradients) == 1:
        return [scalars]

    def there(group):
        # Layers come in order or in reversed order: the gradients of a group's ends are its last ones.
        ends = [x for x in (group[0], group[len(group) // 2], group[-1]) if x.size]
        return jnp.count_nonzero(jnp.stack([x.ravel()[0].astype(scalars.dtype) for x in ends])) if ends else 0

    counts = [there(group) for group in gradients]
    # A condition that always holds, and that XLA cannot know to hold.
    return [jnp.where(sum(counts[max(k - 1, 0) : k + 2]) >= 0, scalars, jnp.nan) for k in range(len(counts))]


def _aliases(part: str, spec: Spec, n: int, inputs, outs) -> dict[int, int]:
    """Operand -> result that takes its buffer."""
    first = 2 if part == "apply" else 1
    p, g = first, first + n
    m = g if part == "apply" else g + n
    sources = []
    if part != "moments":
        sources += range(g, g + n) if spec.emit_updates and part == "step" else range(p, p + n)
    if part != "apply":
        sources += range(m, m + 2 * n)
    if part == "apply" and spec.emit_updates:
        sources = []
    # An update that is wider than its gradient has no buffer to take.
    return {source: result for result, source in enumerate(sources) if inputs[source].dtype == outs[result].dtype}


def _grad_norm_aval(*grads, batch_axes: int, options):
    return _like(grads[0], (*grads[0].shape[:batch_axes], 2), reference.arithmetic_dtype(grads[0].dtype), batch_axes)


def _combine_norms(parts):
    return jnp.stack([sum(x[..., 0] for x in parts), jnp.min(jnp.stack([x[..., 1] for x in parts]), axis=0)], axis=-1)


def _grad_norm_reference(*grads, batch_axes: int, options):
    return _combine_norms([reference.grad_norm_of(g, batch_axes) for g in grads])


def _grad_norm_fused(platform: str, *grads, batch_axes: int, options):
    batch = grads[0].shape[:batch_axes]
    flat = jax.ShapeDtypeStruct((math.prod(batch), 2), reference.arithmetic_dtype(grads[0].dtype))
    call = jax.ffi.ffi_call("xla_lamb_grad_norm", [flat, *_scratch(platform)])
    parts = [call(*(grads[i] for i in group))[0] for group in _groups(platform, [g.shape for g in grads])]
    return _combine_norms(parts).reshape(*batch, 2)


# Platforms: which of the two a program gets.


def why_not_fused(platform: str, options: Options, dtypes: Sequence[Any] = ()) -> str | None:
    """Why the kernel cannot be used, in one sentence; None if it can. `dtypes`: p, g, m, v, or those of the gradients alone."""
    if options.implementation == "reference":
        return "the reference was asked for"
    if platform not in PLATFORMS:
        return f"xla_lamb has no kernel for the platform {platform!r}"
    names = [np.dtype(d).name for d in dtypes]
    for name in names:
        if name not in FLOATS:
            return f"the kernel does not take {name}"
    if len(names) == 4:
        p, _, m, v = names
        moments = ("float64",) if p == "float64" else ("float32", "bfloat16")
        if m != v or m not in moments:
            return f"with {p} parameters the kernel takes moments of {' or '.join(moments)}, both alike, not {m} and {v}"
    return library.why_not(options.framework, platform)


def _lowering(fused, plain, partition, multiple_results: bool):
    """The rule for all platforms: each gets its kernel or the reference, which is traced once however many take it."""

    def rule(ctx, *operands, **params):
        options = params["options"]
        if params.get("part") is None:
            dtypes = [ctx.avals_in[0].dtype]
        else:
            _, p, g, m, v, _ = _unpack(ctx.avals_in, params["part"], len(params["spec"].decays))
            dtypes = [p[0].dtype, (g or p)[0].dtype, m[0].dtype, v[0].dtype]
        platforms = getattr(ctx, "platforms", None) or ctx.module_context.platforms
        by_reference = functools.partial(plain, **params)
        partitioned = sharding.is_partitioned(ctx.module_context)
        unpartitionable = sharding.why_not(ctx.module_context) if partitioned else None
        kernels = {}
        for platform in platforms:
            why = why_not_fused(platform, options, dtypes) or unpartitionable
            if why is None:
                kernels[platform] = functools.partial(fused, platform, **params)
            elif options.implementation == "fused":
                raise NotImplementedError(f'implementation="fused" cannot be had on {platform}: {why}')
            elif options.implementation == "auto" and platform in PLATFORMS:
                library.warn_once(options.framework, platform, why if why is unpartitionable else None)
        if not kernels:
            function = by_reference
        elif partitioned:
            function = partition(ctx.avals_in, **params)
        elif len(platforms) == 1:
            (function,) = kernels.values()
        elif len(kernels) == len(platforms):
            function = lambda *arrays: jax.lax.platform_dependent(*arrays, **kernels)
        else:
            function = lambda *arrays: jax.lax.platform_dependent(*arrays, **kernels, default=by_reference)
        # A lowered program has no types that tell how a mesh splits arrays or over what they vary.
        with sharding.one_device(ctx.avals_in):
            ctx = ctx.replace(avals_in=[jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in])
            return mlir.lower_fun(function, multiple_results=multiple_results)(ctx, *operands)

    return rule


def _partition_lamb(avals, *, part: str, spec: Spec, dtype, options, trust: bool):
    n, batch = len(spec.decays), spec.batch_axes
    scalars, p, g, m, v, _ = _unpack(avals, part, n)
    tensors = [tuple((sharding.BATCH if k < batch else i, k) for k in range(len(x.shape))) for i, x in enumerate(p)]
    tables = [(*labels[:axes], None) for labels, axes in zip(tensors, spec.layer_axes)]
    vector = (*((sharding.BATCH, k) for k in range(batch)), None)

    def local(splits, *shards):
        scalars, p, g, m, v, _ = _unpack(shards, part, n)
        fill = lambda values, by: [sharding.filled(x, labels, splits, by) for x, labels in zip(values, tensors)]
        # What fills a shard up must not count: with these values u is 0.
        p, g, m, v = fill(p, 0), fill(g, 0), fill(m, 0), fill(v, 1)
        axes = [sum((splits[label].names for label in labels[layers:]), ()) for labels, layers in zip(tensors, spec.layer_axes)]
        return sum(_step_of_shards(scalars, p, g, m, v, spec, dtype, options, trust, axes)[: 3 + trust], [])

    whole = functools.partial(lamb_p.bind, part=part, spec=spec, dtype=dtype, options=options, trust=trust)
    # Gradients do not decide: one of them is moved at less cost than the three others.
    deciding = [1 + k * n + i for k in (0, 2, 3) for i in range(n)]
    # Parameters keep their sharding, and moments theirs: with ZeRO they differ, and how gradients come out of the backward pass is no matter.
    like_p, like_g, like_m = ("p", tensors), ("g", tensors), ("m", tensors)
    return sharding.partitioned(
        whole, local, [("m", [vector]), like_p, like_g, like_m, like_m], [like_p, like_m, like_m, ("m", tables if trust else [])], deciding
    )


def _partition_grad_norm(avals, *, batch_axes: int, options):
    tensors = [tuple((sharding.BATCH if k < batch_axes else i, k) for k in range(len(x.shape))) for i, x in enumerate(avals)]
    result = (*((sharding.BATCH, k) for k in range(batch_axes)), None)

    def local(splits, *shards):
        shards = [sharding.filled(x, labels, splits, 0) for x, labels in zip(shards, tensors)]
        axes = [sum((splits[label].names for label in labels[batch_axes:]), ()) for labels in tensors]
        return [_norm_of_shards(shards, batch_axes, options, axes)]

    whole = lambda *grads: [grad_norm_p.bind(*grads, batch_axes=batch_axes, options=options)]
    operation = sharding.partitioned(whole, local, [("g", tensors)], [("g", [result])], range(len(tensors)))
    return lambda *grads: operation(*grads)[0]


def _to_front(operands, axes):
    """All operands with the batch as their first axis; those without one are repeated."""
    size = next(x.shape[a] for x, a in zip(operands, axes) if a is not None)
    return [jnp.broadcast_to(x, (size, *x.shape)) if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(operands, axes)]


def _batch_lamb(operands, axes, *, spec, **params):
    spec = dataclasses.replace(spec, batch_axes=spec.batch_axes + 1, layer_axes=tuple(a + 1 for a in spec.layer_axes))
    results = lamb_p.bind(*_to_front(operands, axes), spec=spec, **params)
    return results, [0] * len(results)


def _batch_grad_norm(operands, axes, *, batch_axes, options):
    return grad_norm_p.bind(*_to_front(operands, axes), batch_axes=batch_axes + 1, options=options), 0


def _like(aval, shape, dtype, shared: int | None = None):
    """The type of an array that has its first `shared` axes (None: all) from `aval`, and what splits them."""
    kept = aval.sharding
    if shared is not None:
        kept = NamedSharding(kept.mesh, PartitionSpec(*kept.spec[:shared], *[None] * (len(shape) - shared)))
    return aval.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=kept)


def _define(primitive, avals, fused, plain, partition, batch):
    multiple = primitive.multiple_results
    primitive.def_abstract_eval(avals)

    @functools.lru_cache(maxsize=256)
    def compiled(items):
        return jax.jit(functools.partial(primitive.bind, **dict(items)))

    primitive.def_impl(lambda *operands, **params: compiled(tuple(sorted(params.items())))(*operands))
    batching.primitive_batchers[primitive] = batch
    # Derivatives are those of the specification.
    ad.primitive_jvps[primitive] = lambda primals, tangents, **params: jax.jvp(
        functools.partial(plain, **params), tuple(primals), tuple(map(ad.instantiate_zeros, tangents))
    )
    mlir.register_lowering(primitive, _lowering(fused, plain, partition, multiple))
    sharding.needs_devices(primitive)


_define(lamb_p, _lamb_avals, _lamb_fused, _lamb_reference, _partition_lamb, _batch_lamb)
_define(grad_norm_p, _grad_norm_aval, _grad_norm_fused, _grad_norm_reference, _partition_grad_norm, _batch_grad_norm)
