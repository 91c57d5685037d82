"""Every op that the step calls on weights or activations, with small arguments: see `check.Case`.

Two devices; B rows, S tokens of a row, D model width, N heads, H head width, E experts, k choices, R rows of a device's
expert-sorted buffer, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from mesh import collectives
from mesh.vma import typed, unvary, vary, varying
from moex import dispatch
from moex.config import AttentionConfig, MemoryConfig, ModelConfig, ParallelConfig, RopeConfig, RouterConfig
from moex.dispatch import legs
from moex.layers import blockwise, param
from moex.layers.attention import attend
from moex.layers.blockwise import Places, Rule
from moex.layers.context import Exchange
from moex.layers.experts import Experts
from moex.layers.gqa import GroupedQueryAttention
from moex.layers.mla import LatentAttention
from moex.layers.mlp import MLP
from moex.layers.moe import MoE, Steering
from moex.layers.mtp import Ahead, further
from moex.layers.norm import RMSNorm
from moex.layers.rope import rotate
from moex.layers.router import Router, balance_loss, route, z_loss
from moex.layers.tokens import Tokens
from moex.memory.stash import sink
from moex.models.decoder import embed
from moex.train.loss import cross_entropy_sum
from pallas_kernels import grouped_matmul, vma
from tests.replicated import matmuls, precision, quantised
from tests.replicated.check import Case, part
from tests.replicated.draw import normal, on_each_device, whole

B, S, D, N, H, F, E, K, R, V = 4, 8, 8, 4, 4, 6, 4, 2, 10, 12

SEGMENTS = np.array([[1] * 5 + [2] * 3, [1] * 2 + [2] * 4 + [0] * 2, [1] * 8, [1, 1, 2, 3, 3, 3, 0, 0]], np.int32)
INDEX = np.tile(np.arange(S, dtype=np.int32), (B, 1))
PLACES = dict(segments=SEGMENTS, positions=INDEX % 3, index=INDEX)
tokens_of = lambda inputs: Tokens(inputs["segments"], inputs["positions"], inputs["index"])


def module_case(module, call, inputs, **options):
    """A module's call, (bound module, inputs, fold) -> outputs, on drawn weights."""
    declared = param.declarations(module)
    values = jax.device_get(param.initial_values(declared, 3, 0.3, 1))
    bound = lambda fold, weights, inputs: call(nnx.merge(nnx.graphdef(module), weights), inputs, fold)
    return Case(bound, values, inputs, declared=declared, **options)


# --- the dense layers -------------------------------------------------------------------------------------------------


def attentions():
    gqa = AttentionConfig(num_heads=N, num_kv_heads=2, head_dim=H, qk_norm=True)
    windowed = AttentionConfig(num_heads=N, num_kv_heads=2, head_dim=H, sliding_window=3, rope=RopeConfig(factor=4.0))
    full = dict(bias=True, out_bias=True, sinks=True, soft_cap=2.0, qk_norm=True, qk_norm_joint=True, rope_dim=2)
    every = AttentionConfig(num_heads=N, num_kv_heads=2, head_dim=H, **full)
    mla = AttentionConfig(
        kind="mla", num_heads=N, head_dim=H, rope_dim=2, value_dim=3, q_latent_dim=6, kv_latent_dim=5,
        rope=RopeConfig(interleaved=True),
    )  # fmt: skip
    call = lambda module, inputs, fold: module(inputs["x"], tokens_of(inputs), fold)
    inputs = dict(x=normal(0, B, S, D)) | PLACES
    over_tp = dict(axis="tp", whole=tuple(PLACES), communicates=True)
    over_cp = dict(axis="cp", communicates=True)
    ways = ("gather", "ring", "ulysses")
    for name, config, methods in (("gqa", gqa, ways), ("mla", mla, ways[2:]), ("gqa, all options", every, ways)):
        kind = dict(gqa=GroupedQueryAttention, mla=LatentAttention)[config.kind]
        yield f"{name} on dp", module_case(kind(D, config, 1e-6), call, inputs)
        yield f"{name} on tp", module_case(kind(D, config, 1e-6), call, inputs, **over_tp)
        for method in methods:
            yield (
                f"{name} on cp by {method}",
                module_case(kind(D, config, 1e-6, Exchange(method)), call, inputs, **over_cp),
            )
    module = GroupedQueryAttention(D, windowed, 1e-6, Exchange("ring"))
    yield "windowed gqa on cp by ring", module_case(module, call, inputs, **over_cp)


def dense_layers():
    norm = lambda module, inputs, fold: module(inputs["x"])
    yield "rms norm", module_case(RMSNorm(D, 1e-6), norm, dict(x=normal(0, B, S, D)))
    turned = lambda fold, weights, inputs: rotate(inputs["x"] * weights, inputs["positions"], RopeConfig())
    yield "rope", Case(turned, normal(1, 1, 1, N, H), dict(x=normal(0, B, S, N, H), positions=INDEX))

    def mixed(fold, weights, inputs, *, blocks):
        q, k, v = (inputs[name] * weights[name] for name in "qkv")
        if not blocks:
            return attend(q, k, v, tokens_of(inputs), tokens_of(inputs), scale=0.5, window=5, ordered=True)
        places, sinks = Places(inputs["segments"], inputs["index"]), weights["q"][0, 0, 0]
        rule, meter = Rule(scale=0.5, soft_cap=2.0), vary(jnp.zeros((N,)), varying(q))
        sinks_and_meter = dict(sinks_N=sinks, meter_N=meter)
        return blockwise.attention(q, k, v, places, places, rule, **sinks_and_meter, ordered=True, block_size=3)

    weights = {name: normal(i, 1, 1, 1, H) for i, name in enumerate("qkv")}
    inputs = {name: normal(i, B, S, n, H) for i, (name, n) in enumerate(zip("qkv", (N, 2, 2), strict=True))} | PLACES
    yield "attend", Case(functools.partial(mixed, blocks=False), weights, inputs)
    yield "attention by blocks", Case(functools.partial(mixed, blocks=True), weights, inputs)

    mlp = lambda module, inputs, fold: module(inputs["x"], fold)
    yield "mlp on dp", module_case(MLP(D, F), mlp, dict(x=normal(0, B, S, D)))
    yield "mlp on tp", module_case(MLP(D, F), mlp, dict(x=normal(0, B, S, D)), axis="tp", communicates=True)

    def ahead(module, inputs, fold):
        """Where a token has one further on in its document."""
        ids, real = inputs["segments"], inputs["segments"] > 0
        one = further(ids, ids, real, tokens_of(inputs), 1, fold)
        return module.norm(module(inputs["x"], inputs["y"])) * one.mask[..., None]

    inputs = dict(x=normal(0, B, S, D), y=normal(1, B, S, D)) | PLACES
    yield "ahead", module_case(Ahead(D, 1e-6), ahead, inputs)


def ends():
    ids = np.random.default_rng(2).integers(0, V, (B, S)).astype(np.int32)
    head = dict(w=param.Declaration(shape=(V, D), axes=("tp", None)))
    embedded = lambda fold, weights, inputs: embed(inputs["ids"], weights["w"], fold)
    for axis, options in dict(dp={}, tp=dict(whole=("ids",), communicates=True)).items():
        given = dict(axis=axis, declared=head, exact=True) | options
        yield f"embed on {axis}", Case(embedded, dict(w=whole(0, V, D)), dict(ids=ids), **given)

    def cross_entropy(fold, weights, inputs):
        nll = cross_entropy_sum(
            inputs["x"], weights["w"], inputs["labels"], inputs["mask"], fold, vocab_size=V - 1, chunk_tokens=5
        )
        return collectives.psum(nll, fold.dense.dp)

    inputs = dict(x=normal(0, B, S, D), labels=ids % (V - 1), mask=ids % 4 > 0)
    for axis, options in dict(dp={}, tp=dict(whole=("labels", "mask"))).items():
        given = dict(axis=axis, declared=head, communicates=True) | options
        yield f"cross entropy on {axis}", Case(cross_entropy, dict(w=normal(1, V, D)), inputs, **given)


# --- routing, dispatch, experts ---------------------------------------------------------------------------------------

ROUTERS = {
    "softmax": RouterConfig(num_experts=E, top_k=K),
    "sigmoid": RouterConfig(
        num_experts=E, top_k=K, score_function="sigmoid", num_groups=2, top_groups=1, group_score_top=2
    ),
}
EXPERT_VIEWS = {  # transport, expert view of the two devices
    "local": dict(edp=2),
    "local, width split": dict(etp=2),
    "allgather": dict(ep=2),
    "alltoall": dict(ep=2),
    "ragged": dict(ep=2),
}
TRAINED = dict(
    dropping=RouterConfig(num_experts=E, top_k=2, capacity_factor=1.0, jitter=0.1, sequence_coefficient=1.0),
    forced=RouterConfig(num_experts=E, top_k=2, forced="skew", global_coefficient=1.0),
    sinkhorn=RouterConfig(num_experts=E, top_k=2, selection="sinkhorn", aux_coefficient=0),
    quantile=RouterConfig(
        num_experts=E, top_k=2, selection="quantile", aux_coefficient=0, score_function="sqrtsoftplus"
    ),
)
MOE_VIEWS = {name: EXPERT_VIEWS[name] for name in ("local", "allgather", "alltoall")}
MOE_VIEWS["alltoall, clones"] = dict(ep=2)
SIZES = np.array([[3, 0, 4, 1], [0, 5, 0, 5]], np.int32)  # rows of each expert on each device; two rows past the last


def experts():
    for name, reason in grouped_matmul.implementations().items():
        if reason:
            continue  # the table's own test says which implementations run here
        product = functools.partial(grouped_matmul.grouped_matmul, implementation=name)
        call = lambda fold, w, inputs, product=product: on_each_device(lambda i: product(i["x"], w, i["sizes"]), inputs)
        inputs = dict(x=whole(0, 2, R, D), sizes=SIZES)
        yield f"grouped matmul by {name}", Case(call, whole(1, E, D, F), inputs, exact=True)
    yield from matmuls.by_hopper()
    yield from matmuls.of_float8()
    yield from matmuls.experts_of_float8()
    yield from quantised.row_moves()
    yield from quantised.products()
    call = lambda module, inputs, fold: on_each_device(lambda i: module(i["x"], i["weights"], i["sizes"]), inputs)
    inputs = dict(x=normal(0, 2, R, D), weights=normal(1, 2, R), sizes=SIZES)
    config = ModelConfig(d_model=D, expert_width=F, router=RouterConfig(num_experts=E))
    yield "experts", module_case(Experts(config), call, inputs)
    clamped = dataclasses.replace(config, expert_bias=True, swiglu_limit=1.0)
    yield "experts with biases", module_case(Experts(clamped), call, inputs)

    chosen = np.stack([np.random.default_rng(t).permutation(E + 1)[:K] for t in range(B * S)]).astype(np.int32)
    inputs = dict(x=whole(0, B * S, D), w=whole(1, B * S, K), experts=chosen)
    for name, view in EXPERT_VIEWS.items():
        yield (
            f"dispatch by {name}",
            Case(
                functools.partial(moved, name.split(",")[0]),
                whole(2, 1, D),
                inputs,
                expert=view,
                exact=True,
                communicates=True,
            ),
        )

    for name in legs.IN_LEGS:
        view = EXPERT_VIEWS[name]
        yield (
            f"legs of {name}",
            Case(
                functools.partial(moved_in_legs, name),
                whole(2, 1, D),
                inputs,
                expert=view,
                exact=True,
                communicates=True,
            ),
        )


def moved(transport, fold, weights, inputs):
    """Rows to their experts, which multiply by the router's weight and one of their own, and back."""
    transport = transport if fold.names else "local"
    plan = dispatch.plan(transport, inputs["experts"], E, fold, align=2)
    rows = dispatch.send(transport, inputs["x"] * weights, plan, fold)
    pairs = dispatch.send_pairs(transport, inputs["w"], plan, fold)
    # Each rank of a width split computes a part of the sum; a power of two keeps values exact.
    return dispatch.combine(transport, rows * pairs[:, None] / fold.size(fold.expert.etp), plan, fold)


def moved_in_legs(transport, fold, weights, inputs):
    """The same, part by part."""
    if not fold.names:
        return moved("local", fold, weights, inputs)
    plan = dispatch.plan(transport, inputs["experts"], E, fold, align=2)
    rows = legs.arrive(legs.travel(legs.depart(inputs["x"] * weights, plan, fold), plan, fold), plan)
    pairs = dispatch.send_pairs(transport, inputs["w"], plan, fold)
    back = legs.travel_home(legs.leave(rows * pairs[:, None], plan), plan, fold)
    return legs.land(back, plan, fold)


def routers():
    for name, config in ROUTERS.items():

        def call(module, inputs, fold, config=config):
            logits, axes = module(inputs["x"]), fold.dense.tokens
            routing = route(logits, None, config, mask_T=inputs["real"])
            return (
                routing.weights_Tk,
                balance_loss(logits, inputs["real"], config, axes=axes),
                z_loss(logits, inputs["real"], axes=axes),
            )

        inputs = dict(x=normal(0, B * S, D), real=SEGMENTS.reshape(-1) > 0)
        yield f"{name} router", module_case(Router(D, config), call, inputs, communicates=True)

    for name, view in MOE_VIEWS.items():
        config = ModelConfig(d_model=D, expert_width=F, shared_width=F, router=ROUTERS["sigmoid"])
        clones = dict(echo_slots=1, echo_cap=1.0) if "clones" in name else {}
        module = MoE(config, ParallelConfig(transport=name.split(",")[0], **clones))
        yield f"moe by {name}", module_case(module, moe, dict(x=normal(0, B, S, D), real=SEGMENTS > 0), **over(view))

    latent = ModelConfig(
        d_model=D, expert_width=F, shared_width=F, shared_gate=True, latent_width=4, expert_bias=True, swiglu_limit=1.0,
        router=dataclasses.replace(ROUTERS["softmax"], logit_bias=True),
    )  # fmt: skip
    module = MoE(latent, ParallelConfig(transport="alltoall"))
    inputs = dict(x=normal(0, B, S, D), real=SEGMENTS > 0)
    yield "moe, all options", module_case(module, moe, inputs, **over(MOE_VIEWS["alltoall"]))

    for name in ("local", "alltoall"):
        config = ModelConfig(d_model=D, expert_width=F, num_layers=2, router=ROUTERS["sigmoid"])
        module = MoE(config, ParallelConfig(transport=name), MemoryConfig(stash=("experts",)))
        case = module_case(module, twice_with_stash, dict(x=normal(0, B, S, D)), **over(MOE_VIEWS[name]))
        yield f"moe twice with a stash by {name}", case

    inputs = dict(x=normal(0, B, S, D), segments=SEGMENTS, index=INDEX)
    yield (
        "moe in parts",
        module_case(MoE(latent, ParallelConfig(transport="alltoall")), in_parts, inputs, **over(MOE_VIEWS["alltoall"])),
    )

    for name, router in TRAINED.items():
        config = ModelConfig(d_model=D, expert_width=F, router=router)
        module = MoE(config, ParallelConfig(transport="alltoall"))
        inputs = dict(x=normal(0, B, S, D), segments=SEGMENTS)
        yield f"moe in training, {name}", module_case(module, trained_moe, inputs, **over(MOE_VIEWS["alltoall"]))


def in_parts(module, inputs, fold):
    """The block cut where rows travel."""
    if not fold.names:
        module.parallel = ParallelConfig()
        y, stats = module(inputs["x"], None, inputs["segments"], fold, training=True)
        return y, stats.balance_loss
    departed, stats = module.depart(inputs["x"], None, inputs["segments"], inputs["index"], fold)
    back = module.at_experts(legs.travel(departed.rows, departed.plan, fold), departed.weights_R, departed.plan)
    y = module.land(legs.travel_home(back, departed.plan, fold), departed.plan, inputs["x"].shape, fold)
    return module.with_shared(y, module.shared_result(inputs["x"], fold)), stats.balance_loss


def twice_with_stash(module, inputs, fold):
    if not fold.names:
        module.parallel = ParallelConfig()
    x, real = inputs["x"], np.ones(inputs["x"].shape[:2], bool)
    stash = module.empty_stash(module.experts.matrices(), x.shape, x.dtype, fold)
    for _ in range(2):
        y, _, stash = module.run(x, stash, None, real, fold)
        x += y
    return sink(x, stash)


def trained_moe(module, inputs, fold):
    if not fold.names:
        module.parallel = ParallelConfig()
    steering = Steering(np.zeros(E, np.float32), np.arange(E, dtype=np.int32), jax.random.key(1))
    y, stats = module(inputs["x"], steering, inputs["segments"], fold, training=True)
    return y, stats.balance_loss, stats.sequence_loss, stats.global_loss, stats.z_loss


def over(view):
    return dict(expert=view, communicates=True)


def moe(module, inputs, fold):
    if not fold.names:
        module.parallel = ParallelConfig()
    y, stats = module(inputs["x"], np.linspace(-0.2, 0.2, E, dtype=np.float32), inputs["real"], fold)
    return y, stats.balance_loss, stats.z_loss


# --- collectives, each followed by what makes other devices' rows count -----------------------------------------------


def collective_cases():
    x, mixing = whole(0, B, 6), whole(1, B, 2 * B)
    own = lambda x, fold, dim=0: part(x, fold.dense.dp, dim)
    products = lambda w, i: jnp.einsum("rn,rd->nd", i["mixing"], i["x"] * w)
    shift = lambda x: jnp.roll(x, 3, axis=0) * jnp.arange(1.0, x.shape[0] + 1)[:, None]

    def all_gather(fold, w, i):
        return own(shift(collectives.all_gather(i["x"] * w, fold.dense.dp, dim=0)), fold)

    def psum(fold, w, i):
        return collectives.psum((i["x"] * w).sum(axis=0), fold.dense.dp)[None] * i["x"]

    def pmax(fold, w, i):
        return collectives.pmax(lax.stop_gradient(i["x"] * w).max(axis=0), fold.dense.dp)[None] * i["x"] * w

    def of_last(fold, w, i):
        return own(
            shift(collectives.of_last(collectives.all_gather(i["x"] * w, fold.dense.dp, dim=0), fold.dense.dp)), fold
        )

    def psum_scatter(fold, w, i):
        return collectives.psum_scatter(products(w, i), fold.dense.dp, dim=0)

    def all_to_all(fold, w, i):
        columns = collectives.all_to_all(i["x"] * w, fold.dense.dp, split_dim=1, concat_dim=0)
        return collectives.all_to_all(shift(columns), fold.dense.dp, split_dim=0, concat_dim=1)

    def gather_whole(fold, w, i):
        return i["x"] * collectives.gather(w, (), fold.dense.dp, 0, jnp.float32)

    def gather_shards(fold, w, i):
        return i["x"] * collectives.gather(own(w, fold, 1), fold.dense.dp, (), 1, jnp.float32)

    def reduce_gradient(fold, w, i):
        return collectives.reduce_gradient(products(w, i), fold.dense.dp, (), 0)

    def reduce_replicated(fold, w, i):
        return collectives.reduce_gradient((i["x"] * w).sum(axis=0), (), fold.dense.dp, 0)[None] * i["x"]

    for call in (all_gather, psum, pmax, of_last, all_to_all, gather_whole, gather_shards, reduce_replicated):
        yield f"collective {call.__name__}", Case(call, whole(2, 1, 6), dict(x=x), exact=True, communicates=True)
    for call in (psum_scatter, reduce_gradient):
        inputs = dict(x=x, mixing=mixing)
        yield f"collective {call.__name__}", Case(call, whole(2, 1, 6), inputs, exact=True, communicates=True)


# --- kernels that lose types ------------------------------------------------------------------------------------------


def host_matmul(a, b):
    """Stands for a kernel: what comes back is typed as equal on all devices, whatever went in."""
    shape = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype)
    return jax.pure_callback(lambda a, b: np.asarray(a) @ np.asarray(b), shape, a, b)


def kernel_case(forward, backward, end) -> Case:
    """A matmul by a kernel, forward and backward; `end` (cotangent, argument) ends each backward rule."""
    op = jax.custom_vjp(forward)
    op.defvjp(
        lambda x, w: (forward(x, w), (x, w)),
        lambda kept, g: (end(backward(g, kept[1].T), kept[0]), end(backward(kept[0].T, g), kept[1])),
    )
    call = lambda fold, w, inputs: jnp.square(op(inputs["x"], w["w"]) + w["bias"])
    weights = dict(w=whole(1, D, F), bias=whole(2, 1, F))
    return Case(call, weights, dict(x=whole(0, B, D)), exact=True)


def kernels():
    yield "kernel made to keep types", kernel_case(typed(host_matmul), typed(host_matmul), unvary)

    def aligned(fold, w, inputs):
        x, w = vma.align(inputs["x"], w)
        return x * w

    yield "align", Case(aligned, whole(0, 1, D), dict(x=whole(1, B, D)), exact=True)


CASES: dict[str, Case] = dict(
    case
    for cases in (attentions, dense_layers, ends, experts, routers, collective_cases, kernels, precision.cases)
    for case in cases()
)
