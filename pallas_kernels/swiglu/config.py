"""The activation between an expert's two products."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activation:
    """g sigmoid(alpha g) (u + offset), of g = min(gate, limit) and u = up, clipped to +-limit.

    The plain one is SwiGLU (arXiv 2002.05202); GPT-OSS has limit 7, alpha 1.702, offset 1 (openai/gpt-oss, `swiglu`).
    """

    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0

    def __post_init__(self):
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"Activation.limit={self.limit} must be positive, or None")

    def __call__(self, gate, up):
        """float32 in and out, any shape; plain `jnp` code that runs inside kernels, too."""
        gate, up = self.clipped(gate, up)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + self.offset)

    def clipped(self, gate, up):
        """gate and up as the formula takes them."""
        if self.limit is None:
            return gate, up
        return jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)

    def backward(self, gate, up, grad):
        """(result, gradient in gate, gradient in up) for the result's gradient, all float32.

        Beyond a limit the gradient is zero; exactly on it, it passes.
        """
        clipped_gate, clipped_up = self.clipped(gate, up)
        sigmoid, raised = jax.nn.sigmoid(self.alpha * clipped_gate), clipped_up + self.offset
        swish = clipped_gate * sigmoid
        dgate = grad * raised * (sigmoid + self.alpha * swish * (1.0 - sigmoid))
        dup = grad * swish
        if self.limit is not None:
            dgate = jnp.where(gate <= self.limit, dgate, 0.0)
            dup = jnp.where(jnp.abs(up) <= self.limit, dup, 0.0)
        return swish * raised, dgate, dup


SWIGLU = Activation()
GPT_OSS = Activation(limit=7.0, alpha=1.702, offset=1.0)
