"""What the commands share: how the command line is read, and where passwords come from."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

PASSWORD_VARIABLE = "DCP_RS_PASSWORD"  # noqa: S105 - the name of a variable


class Parser(argparse.ArgumentParser):
    """Takes options by their full names only, and repeats nothing that may be a secret."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_args(  # type: ignore[override]  # without the overloads for a namespace of one's own
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parses the command line; ends the process if it is wrong."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return options

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As that of the base class, for which a password might be a command or a file."""
        for word in args or ():
            if word.partition("=")[0] in {"--password", "--passwd", "--pass", "-p"}:
                self._refuse([word])
        return super().parse_known_args(args, namespace)

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        # An option's value is not shown, nor is any word that may be one.
        names = [_name(word) for word in unknown if word.startswith("-") and word != "-"]
        if any(name.startswith(("--pass", "-p")) for name in names):
            self.error(
                "a password is not taken from the command line, which others can see: set"
                f" {PASSWORD_VARIABLE} for cat, or use --password-env or --password-file"
            )
        if names:
            self.error(f"no such option: {', '.join(names)}")
        self.error("there are more arguments than the command takes")


def _name(word: str) -> str:
    return word.partition("=")[0] if word.startswith("--") else word[:2]


def add_password(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """Adds the options for a password."""
    password = parser.add_mutually_exclusive_group()
    password.add_argument(
        "--password-env",
        metavar="NAME",
        help=f"environment variable with the password; {otherwise} if not given",
    )
    password.add_argument(
        "--password-file", metavar="FILE", type=Path, help="file with the password in a line"
    )


def password(options: argparse.Namespace) -> str | None:
    """Gives the password that the options name; `None` if they name none.

    Names of variables and files are not shown: they may be the password itself, given by mistake.

    Raises:
        ConfigError: It is not there.
    """
    if options.password_file is not None:
        try:
            text: str = options.password_file.read_text()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"the file of --password-file cannot be read: {why}") from None
        return text.rstrip("\r\n")
    if options.password_env is not None:
        value = os.environ.get(options.password_env)
        if value is None:
            raise ConfigError(
                "the variable that --password-env names is not set: set it, or check its name"
            )
        return value
    return None
