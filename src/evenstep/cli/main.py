"""The `evenstep` command: its verbs, and the one place where errors become exit codes."""

from __future__ import annotations

import errno
import importlib
import resource
import sys
from collections.abc import Sequence

import click

from evenstep import __version__
from evenstep.cli import exits
from evenstep.errors import EvenstepError

# Each is a module of this package, loaded when it is asked for, and begins its help with these words.
_VERBS = {
    "run": "Run SCRIPT with its own ARGUMENTS as several processes, of this host or (--nodes) of several.",
    "prove": "Show that SCRIPT trains the same model on every layout, or say what differs first, and why.",
    "doctor": "Examine the hosts of a launch: what `evenstep run` with the same options would meet.",
}
_HIDDEN = ("node",)


class _Verbs(click.Group):
    """Verbs that do not pay for each other's imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in (*_VERBS, *_HIDDEN):
            return None
        command: click.Command = getattr(importlib.import_module(f"evenstep.cli.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", message="evenstep %(version)s")
def evenstep() -> None:
    """Exact distributed PyTorch training: one script, one global batch, any number of processes, one result."""


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
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        click.echo(f"evenstep: {limit} open files are allowed, too few\n  what to do: raise `ulimit -n`", err=True)
        return exits.MACHINE_FAILED
    return code if isinstance(code, int) else exits.DONE
