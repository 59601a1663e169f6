"""Who this program is: its version, and what a bug report needs."""

#: The version of this source, installed or not; the distribution takes its own from here (``tool.hatch.version``).
VERSION = "0.1.0"


def version() -> str:
    """Version of what is running: a source tree has the same as what is built of it."""
    return VERSION


def bug_hint() -> str:
    """What to tell the user after an unexpected error."""
    return (
        f"this is a bug in inanet {version()}: please report it with the traceback and the file that "
        "'ina report report.tar.gz' makes"
    )
