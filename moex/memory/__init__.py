"""What the backward pass keeps, computes again or parks elsewhere."""
