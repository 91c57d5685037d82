"""Trains a Mixture-of-Experts language model: python train.py [PRESET] [--section.field VALUE ...].

Exit codes: 0 finished, 1 failed, 2 wrong configuration or data, 75 preempted after saving.
"""

import sys
from collections.abc import Sequence

from moex.cli import dump, fail, parse
from moex.validate import ConfigError, check


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        command = parse(sys.argv[1:] if arguments is None else arguments)
        if command.print_config:
            print(dump(command.config), end="")
            return 0
        check(command.config)
        if command.inspect_batch is not None:
            from moex.startup.inputs import show_batch

            show_batch(command.config, command.inspect_batch)
            return 0

        from mesh import distributed  # only now: a wrong flag is told before any device is looked for

        try:
            start = distributed.initialise()
        except ValueError as error:  # variables, processes or GPUs that don't make up a run
            return fail(error)
        from moex import trainer

        return trainer.run(command.config, start)
    except ConfigError as error:
        return fail(error)


if __name__ == "__main__":
    sys.exit(main())
