"""Compiles a product and its gradients for a GPU that need not be here: `compile_products.py RECIPE TARGET_FILE`.

Prints the optimised module. Runs in the environment with the compile-only CUDA packages.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from moex.precision.linear import linear
from moex.precision.recipes import RECIPES
from moex.precision.weight import quantise_here

T, K, N = 1024, 512, 768


def main(recipe: str, target: str) -> None:
    topology = topologies.get_topology_desc(platform="cuda", target_config=Path(target).read_text(), topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))

    def products(x, w, g):
        call = lambda x, w: linear(x, quantise_here(w, RECIPES[recipe]) if recipe in RECIPES else w)
        y, pull = jax.vjp(call, x, w)
        return y, *pull(g)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        print(jax.jit(products).lower(shape(T, K), shape(K, N), shape(T, N)).compile().as_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
