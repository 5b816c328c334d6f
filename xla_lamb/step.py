"""The step as used: on each platform the fused custom call or the reference, decided when a program is lowered.

Two primitives take any number of tensors at once:

    lamb       one of the three parts of LAMB. Operands and results, for N tensors that share their types:
                 step     scalars, N p, N g, N m, N v  ->  N outputs, N new m, N new v, trust
                 moments  scalars, N p, N g, N m, N v  ->  N new m, N new v, sums
                 apply    scalars, sums, N p, N m, N v ->  N outputs, trust
               scalars: reference.SCALARS, float32, or float64 with float64 parameters; with leading batch axes under vmap.
               sums [..., L, 2] and trust [..., L, 3]: for each layer of each tensor, in order, the sums of squares of p and u,
               and |p|, |u| and the ratio; L counts the layers of one element of the batch.
    grad_norm  N gradients -> [..., 2]: the sum of their squares, and 1 if all is finite, else 0.

Where the kernel is used, a primitive becomes one custom call for each group of tensors, in place where XLA lets it: new
moments take the buffers of the moments, new parameters those of the parameters, updates those of the gradients. On CUDA a call has one more
result, scratch memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from xla_lamb import config, library, reference
from xla_lamb.reference import Spec

# Tensors of one custom call, for each platform. XLA's CPU compiler takes time with the cube of the aliased operands of a call
# (400 tensors in one call: 2.3 s, 800: 17 s); 64 compiles fast, and lets a group start when its own gradients are there. The CUDA kernel
# takes 400 in one launch.
GROUP_SIZE = {"cpu": 64, "cuda": 400}
PLATFORMS = tuple(GROUP_SIZE)
# Elements of one call: beyond that the CUDA kernel would work in larger chunks, which do not stay on the chip between the passes.
GROUP_ELEMENTS = {"cpu": None, "cuda": 500_000_000}

FLOATS = ("float32", "bfloat16", "float16", "float64")


# What the audience modules call.


@dataclasses.dataclass(frozen=True)
class Options:
    """How to lower: `implementation` as in config.IMPLEMENTATIONS, `framework` that runs the program: "jax" or "tensorflow"."""

    implementation: str = "auto"
    framework: str = "jax"


def step(scalars: dict[str, Any], params, grads, first, second, spec: Spec, options: Options = Options(), trust: bool = True):
    """One LAMB step over lists of N tensors of any types.

    Args:
      scalars: by name, from reference.scalars.
      params, grads, first, second: lists of N arrays; the i-th of each have one shape.
      spec: for these N tensors.
      trust: whether to return the trust ratios; thousands of slices cost time to trace and compile.

    Returns:
      (outputs, new first moments, new second moments, trust), lists of N; trust[i] is [*layer_shape, 3]: |p|, |u| and the ratio, or None.
    """
    outputs, new_first, new_second, ratios = ([None] * len(params) for _ in range(4))
    for indices in _by_types(params, grads, first, second):
        pick = lambda values: [values[i] for i in indices]
        part = spec.select(indices)
        n = len(indices)
        vector = reference.pack(scalars, reference.arithmetic_dtype(params[indices[0]].dtype))
        results = lamb_p.bind(
            vector, *pick(params), *pick(grads), *pick(first), *pick(second), part="step", spec=part, dtype=None, options=options
        )
        tables = _split(results[-1], [p.shape for p in pick(params)], part) if trust else [None] * n
        for k, i in enumerate(indices):
            outputs[i], new_first[i], new_second[i], ratios[i] = results[k], results[n + k], results[2 * n + k], tables[k]
    return outputs, new_first, new_second, ratios


def grad_norm(grads, options: Options = Options()) -> tuple[jax.Array, jax.Array]:
    """The global norm of a list of gradients of any float types, and whether all of them are finite; both scalars."""
    square, finite = jnp.zeros((), jnp.float32), jnp.ones((), bool)
    for indices in _by_types(grads):
        result = grad_norm_p.bind(*[grads[i] for i in indices], batch_axes=0, options=options)
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


def gradient_scale(gradients, grad_scale, skip, max_grad_norm, nonfinite: str, options: Options):
    """(scale, skip, norm): what the step multiplies the gradients by, whether it changes nothing, and the norm if it was needed."""
    scale = 1.0 if grad_scale is None else grad_scale
    skipped = False if skip is None else jnp.asarray(skip, bool)
    if max_grad_norm is None and nonfinite == "propagate":
        return scale, skipped, None
    norm, finite = grad_norm(gradients, options)
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


def _split(table, shapes, spec: Spec) -> list:
    """The rows of each tensor, shaped [*layer_shape, columns]."""
    batch = spec.batch_axes
    parts, start = [], 0
    for shape, axes in zip(shapes, spec.layer_axes):
        count = math.prod(shape[batch:axes])
        parts.append(table[..., start : start + count, :].reshape(*shape[:axes], table.shape[-1]))
        start += count
    return parts


def _join(parts, spec: Spec):
    """The inverse of _split: [*batch_shape, L, columns]."""
    batch = spec.batch_axes
    return jnp.concatenate([x.reshape(*x.shape[:batch], math.prod(x.shape[batch:-1]), x.shape[-1]) for x in parts], axis=batch)


# The primitives.

lamb_p = Primitive("xla_lamb")
lamb_p.multiple_results = True
grad_norm_p = Primitive("xla_lamb_grad_norm")


def _unpack(operands: Sequence, part: str, n: int):
    """(scalars, sums or None, p, g or None, m, v) of the operands of a part."""
    tensors = list(operands[2:] if part == "apply" else operands[1:])
    lists = [tensors[k * n : (k + 1) * n] for k in range(len(tensors) // n)]
    if part == "apply":
        p, m, v = lists
        return operands[0], operands[1], p, None, m, v
    p, g, m, v = lists
    return operands[0], None, p, g, m, v


def _output_dtype(p, g, spec: Spec, dtype):
    return np.dtype(dtype) if dtype is not None else reference.output_dtype(p.dtype, g.dtype, spec.emit_updates)


def _lamb_shapes(*operands, part: str, spec: Spec, dtype, options):
    n = len(spec.decays)
    scalars, _, p, g, m, v = _unpack(operands, part, n)
    batch = scalars.shape[:-1]
    layers = sum(math.prod(x.shape[spec.batch_axes : axes]) for x, axes in zip(p, spec.layer_axes))
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
    results = []
    if part != "moments":
        output = _output_dtype(p[0], g[0] if g else None, spec, dtype)
        results += [struct(x.shape, output) for x in p]
    if part != "apply":
        results += [struct(x.shape, x.dtype) for x in [*m, *v]]
    return [*results, struct((*batch, layers, 2 if part == "moments" else 3), scalars.dtype)]


def _lamb_reference(*operands, part: str, spec: Spec, dtype, options):
    n = len(spec.decays)
    scalars, sums, p, g, m, v = _unpack(operands, part, n)
    # One trace for each kind of tensor, not for each tensor: a tree of thousands has few kinds.
    if part == "apply":
        tables = _split(sums, [x.shape for x in p], spec)
    else:
        halves = [_moments_jit(scalars, p[i], g[i], m[i], v[i], spec.select([i])) for i in range(n)]
        m, v, tables = (list(x) for x in zip(*halves))
    if part == "moments":
        return [*m, *v, _join(tables, spec)]
    output = _output_dtype(p[0], g[0] if g else None, spec, dtype)
    seconds = [_apply_jit(scalars, tables[i], p[i], m[i], v[i], spec.select([i]), output) for i in range(n)]
    outputs, trust = (list(x) for x in zip(*seconds))
    results = outputs + (m + v if part == "step" else [])
    return [*results, _join(trust, spec)]


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


def _lamb_fused(platform: str, *operands, part: str, spec: Spec, dtype, options):
    n = len(spec.decays)
    scalars, sums, p, g, m, v = _unpack(operands, part, n)
    avals = _lamb_shapes(*operands, part=part, spec=spec, dtype=dtype, options=options)
    shapes = [x.shape for x in p]
    sums = _split(sums, shapes, spec) if sums is not None else None
    columns = avals[-1].shape[-1]
    results: list[list] = [[] for _ in range((len(avals) - 1) // n)]
    tables = []
    groups = _groups(platform, shapes)
    vectors = [scalars] * len(groups) if part != "step" or spec.emit_updates else _paced(scalars, [[g[i] for i in group] for group in groups])
    for indices, vector in zip(groups, vectors):
        k = len(indices)
        pick = lambda values: [values[i] for i in indices]
        group = spec.select(indices)
        rows = [math.prod(shapes[i][: spec.layer_axes[i]]) for i in indices]
        flat = lambda parts, width: jnp.concatenate([x.reshape(-1, width) for x in parts])
        inputs = [vector, *([flat(pick(sums), 2)] if part == "apply" else []), *pick(p), *(pick(g) if g else []), *pick(m), *pick(v)]
        kinds = [avals[j * n : (j + 1) * n] for j in range(len(results))]
        outs = [*(x for kind in kinds for x in pick(kind)), jax.ShapeDtypeStruct((sum(rows), columns), scalars.dtype)]
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
        if spec.batch_axes:
            ends = np.cumsum(rows)
            tables += [
                values[last][end - count : end].reshape(*shapes[i][: spec.layer_axes[i]], columns)
                for i, count, end in zip(indices, rows, ends)
            ]
        else:
            tables.append(values[last])
    return [*(x for kind in results for x in kind), _join(tables, spec)]


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


def _grad_norm_shape(*grads, batch_axes: int, options):
    batch = grads[0].shape[:batch_axes]
    return jax.ShapeDtypeStruct((*batch, 2), reference.arithmetic_dtype(grads[0].dtype))


def _combine_norms(parts):
    return jnp.stack([sum(x[..., 0] for x in parts), jnp.min(jnp.stack([x[..., 1] for x in parts]), axis=0)], axis=-1)


def _grad_norm_reference(*grads, batch_axes: int, options):
    return _combine_norms([reference.grad_norm_of(g, batch_axes) for g in grads])


def _grad_norm_fused(platform: str, *grads, batch_axes: int, options):
    out = _grad_norm_shape(*grads, batch_axes=batch_axes, options=options)
    flat = jax.ShapeDtypeStruct((math.prod(out.shape[:-1]), 2), out.dtype)
    call = jax.ffi.ffi_call("xla_lamb_grad_norm", [flat, *_scratch(platform)])
    parts = [call(*(grads[i] for i in group))[0] for group in _groups(platform, [g.shape for g in grads])]
    return _combine_norms(parts).reshape(out.shape)


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


def _lowering(fused, plain, multiple_results: bool):
    """The rule for all platforms: each gets its kernel or the reference, which is traced once however many take it."""

    def rule(ctx, *operands, **params):
        options = params["options"]
        if params.get("part") is None:
            dtypes = [ctx.avals_in[0].dtype]
        else:
            _, _, p, g, m, v = _unpack(ctx.avals_in, params["part"], len(params["spec"].decays))
            dtypes = [p[0].dtype, (g or p)[0].dtype, m[0].dtype, v[0].dtype]
        platforms = getattr(ctx, "platforms", None) or ctx.module_context.platforms
        kernels = {}
        for platform in platforms:
            why = why_not_fused(platform, options, dtypes)
            if why is None:
                kernels[platform] = functools.partial(fused, platform, **params)
            elif options.implementation == "fused":
                raise NotImplementedError(f'implementation="fused" cannot be had on {platform}: {why}')
            elif options.implementation == "auto" and platform in PLATFORMS:
                library.warn_once(options.framework, platform)
        by_reference = functools.partial(plain, **params)
        if not kernels:
            function = by_reference
        elif len(platforms) == 1:
            (function,) = kernels.values()
        elif len(kernels) == len(platforms):
            function = lambda *arrays: jax.lax.platform_dependent(*arrays, **kernels)
        else:
            function = lambda *arrays: jax.lax.platform_dependent(*arrays, **kernels, default=by_reference)
        return mlir.lower_fun(function, multiple_results=multiple_results)(ctx, *operands)

    return rule


def _to_front(operands, axes):
    """All operands with the batch as their first axis; those without one are repeated."""
    size = next(x.shape[a] for x, a in zip(operands, axes) if a is not None)
    return [jnp.broadcast_to(x, (size, *x.shape)) if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(operands, axes)]


def _batch_lamb(operands, axes, *, part, spec, dtype, options):
    spec = dataclasses.replace(spec, batch_axes=spec.batch_axes + 1, layer_axes=tuple(a + 1 for a in spec.layer_axes))
    results = lamb_p.bind(*_to_front(operands, axes), part=part, spec=spec, dtype=dtype, options=options)
    return results, [0] * len(results)


def _batch_grad_norm(operands, axes, *, batch_axes, options):
    return grad_norm_p.bind(*_to_front(operands, axes), batch_axes=batch_axes + 1, options=options), 0


def _define(primitive, shapes, fused, plain, batch):
    multiple = primitive.multiple_results
    as_avals = lambda x: [_aval(s) for s in x] if multiple else _aval(x)
    primitive.def_abstract_eval(lambda *operands, **params: as_avals(shapes(*operands, **params)))

    @functools.lru_cache(maxsize=256)
    def compiled(items):
        return jax.jit(functools.partial(primitive.bind, **dict(items)))

    primitive.def_impl(lambda *operands, **params: compiled(tuple(sorted(params.items())))(*operands))
    batching.primitive_batchers[primitive] = batch
    # Derivatives are those of the specification.
    ad.primitive_jvps[primitive] = lambda primals, tangents, **params: jax.jvp(
        functools.partial(plain, **params), tuple(primals), tuple(map(ad.instantiate_zeros, tangents))
    )
    mlir.register_lowering(primitive, _lowering(fused, plain, multiple))


def _aval(struct):
    return jax.core.ShapedArray(struct.shape, struct.dtype)


_define(lamb_p, _lamb_shapes, _lamb_fused, _lamb_reference, _batch_lamb)
_define(grad_norm_p, _grad_norm_shape, _grad_norm_fused, _grad_norm_reference, _batch_grad_norm)
