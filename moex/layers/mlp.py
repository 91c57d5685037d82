"""The gated MLP that every token passes: of dense layers and shared experts.  D model width, F its own, over tp."""

import jax
import jax.numpy as jnp
from flax import nnx

from mesh import collectives
from mesh.fold import Fold
from moex.layers.param import declare
from moex.memory.residuals import named
from moex.precision.linear import linear


def swiglu(gate_up):
    """silu(gate) * up of [..., 2, F] (arXiv 2002.05202), computed in float32, in the input's dtype."""
    gate, up = gate_up[..., 0, :].astype(jnp.float32), gate_up[..., 1, :].astype(jnp.float32)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


class MLP(nnx.Module):
    """down(silu(gate x) * up x).  In and out: activations [B, S / (cp tp), D]."""

    def __init__(self, d_model: int, width: int, product: str = "mlp"):
        self.dense = product == "mlp"
        self.gate_up = declare(d_model, 2, width, axes=(None, None, "tp"), product=product)
        self.down = declare(width, d_model, axes=("tp", None), init="output", product=product)

    def __call__(self, x_BSD, fold: Fold):
        x_BSD = collectives.all_gather(x_BSD, fold.dense.tp, dim=1)
        if self.dense or fold.dense.tp:  # else a shared expert's are those of the router, which have the name
            x_BSD = named("mlp_norm", x_BSD)
        gate_up = linear(x_BSD, self.gate_up[...], name="mlp_norm" if self.dense else None)
        hidden = swiglu(named("mlp_fc1" if self.dense else "shared_experts", gate_up))
        return collectives.psum_scatter(linear(hidden, self.down[...]), fold.dense.tp, dim=1)
