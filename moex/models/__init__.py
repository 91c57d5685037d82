"""The decoder, model families as configurations, and their FLOPs."""
