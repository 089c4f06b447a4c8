"""The `evenstep` command: its verbs, and the one place where errors become exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from evenstep import __version__
from evenstep.cli import exits
from evenstep.cli.doctor import doctor
from evenstep.cli.node import node
from evenstep.cli.prove import prove
from evenstep.cli.run import run
from evenstep.errors import EvenstepError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", message="evenstep %(version)s")
def evenstep() -> None:
    """Exact distributed PyTorch training: one script, one global batch, any number of processes, one result."""


evenstep.add_command(run)
evenstep.add_command(prove)
evenstep.add_command(doctor)
evenstep.add_command(node)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` by default) and return its exit code; see `exits`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = evenstep.main(words, prog_name="evenstep", standalone_mode=False, obj=words)
    except click.ClickException as error:  # an unknown option, a value of the wrong kind
        error.show()
        return exits.WRONG_USAGE
    except (click.Abort, KeyboardInterrupt):
        return exits.by_signal(2)
    except EvenstepError as error:
        click.echo(f"evenstep: {error}", err=True)
        return error.exit_code
    return code if isinstance(code, int) else exits.DONE
