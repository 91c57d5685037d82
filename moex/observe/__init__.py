"""Watching a run: its log on disk (metrics), its progress in a terminal (progress), its report as a page (report).

N steps, L MoE layers, E experts. Losses are in nats a token, durations in seconds, times in seconds since the epoch.
"""
