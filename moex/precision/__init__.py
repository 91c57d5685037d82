"""Number formats of training: which products run in fewer bits, and their gradients."""
