"""What a run says of itself before its first step: corpora, derived numbers, environment, and whether it may continue a
folder.
"""

from moex.startup.derived import derive, table
from moex.startup.folder import check_existing, write_inputs
from moex.startup.inputs import Data, load_data
from moex.startup.rules import balance_rules, memory_rules, pipeline_rules, routing_rules, transport_rules

__all__ = [
    "Data",
    "balance_rules",
    "check_existing",
    "derive",
    "load_data",
    "memory_rules",
    "pipeline_rules",
    "routing_rules",
    "table",
    "transport_rules",
    "write_inputs",
]
