"""Plain float64 forms of the layers: loops over tokens, heads and experts, nothing shared with moex."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def attention(q, k, v, segments_q, index_q, segments_k, index_k, scale, window=0, soft_cap=0.0, sinks=None):
    """Loop over rows, heads and queries. q [B,S,N,H], k and v [B,T,K,H]; float64 [B,S,N,Hv]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    share = q.shape[2] // k.shape[2]
    for b, s, n in np.ndindex(q.shape[:3]):
        seen = [
            t
            for t in range(k.shape[1])
            if segments_k[b, t] == segments_q[b, s]
            and index_k[b, t] <= index_q[b, s]
            and (not window or index_q[b, s] - index_k[b, t] < window)
        ]
        scores = np.array([scale * q[b, s, n] @ k[b, t, n // share] for t in seen])
        scores = soft_cap * np.tanh(scores / soft_cap) if soft_cap else scores
        weights = np.exp(scores - scores.max())
        weights /= weights.sum() + (0 if sinks is None else np.exp(sinks[n] - scores.max()))
        out[b, s, n] = sum(w * v[b, t, n // share] for w, t in zip(weights, seen, strict=True))
    return out


def silu(x):
    return x / (1 + jnp.exp(-x))


def mlp(x, gate_up, down):
    """down(silu(gate x) * up x) of one vector; gate_up [D, 2, F]."""
    return (silu(x @ gate_up[:, 0]) * (x @ gate_up[:, 1])) @ down


def moe(params, x_TD, bias_E, real_T, config):
    """Every real token through each of its experts; the router's rules as in the papers, one token at a time.

    Runs in float64 under `jax.enable_x64`, so that autodiff gives float64 gradients too.
    """
    experts, router = params["experts"], config.router
    out = []
    for t in range(x_TD.shape[0]):
        y = jnp.zeros_like(x_TD[t])
        if real_T[t]:
            logits = x_TD[t] @ params["router"]["weight"]
            scores = jax.nn.softmax(logits) if router.score_function == "softmax" else 1 / (1 + jnp.exp(-logits))
            choice = np.asarray(jax.lax.stop_gradient(scores)) + (0 if bias_E is None else np.asarray(bias_E))
            chosen = choose(choice, router)
            weights = scores[jnp.array(chosen)]
            weights = router.scaling_factor * (weights / weights.sum() if router.renormalize else weights)
            for w, e in zip(weights, chosen, strict=True):
                y += w * mlp(x_TD[t], experts["gate_up"][e], experts["down"][e])
        if "shared" in params:
            y += mlp(x_TD[t], params["shared"]["gate_up"], params["shared"]["down"])
        out.append(y)
    return jnp.stack(out)


def choose(choice_E, router):
    groups = choice_E.reshape(router.num_groups, -1)
    size = groups.shape[1]
    if router.num_groups > 1:
        totals = [math.fsum(sorted(group)[-router.group_score_top :]) for group in groups]
        kept = sorted(range(router.num_groups), key=lambda g: -totals[g])[: router.top_groups]
    else:
        kept = [0]
    allowed = [g * size + i for g in kept for i in range(size)]
    return sorted(allowed, key=lambda e: -choice_E[e])[: router.top_k]
