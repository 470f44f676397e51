"""The error that every user mistake raises: config, data or path. Imports nothing."""


class BadInputError(Exception):
    """What the user gave is wrong. The message is complete as it stands: programs print it and exit with code 2."""
