"""One training step: state, loss, optimizer, and the jitted program that joins them."""
