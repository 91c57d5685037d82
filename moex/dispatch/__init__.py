"""Ways for rows to reach their experts and come back: one contract (`plan.py`), several transports."""

from moex.dispatch import local

TRANSPORTS = {"local": local}
