"""Who this program is: its version, and what a bug report needs."""


def version() -> str:
    """Version of the installed distribution; ``"unknown"`` when run from a source tree."""
    # imported here because every command imports this module and few ask for the version
    from importlib import metadata

    try:
        return metadata.version("inanet")
    except metadata.PackageNotFoundError:
        return "unknown"


def bug_hint() -> str:
    """What to tell the user after an unexpected error."""
    return (
        f"this is a bug in inanet {version()}: please report it with the traceback, the configuration and "
        "the output of 'ina doctor --json'"
    )
