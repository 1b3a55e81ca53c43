"""Which versions of torch and Lightning have what a run needs."""

PACKAGES = "torch", "lightning", "torchmetrics"


def explain_import(error: ImportError) -> str | None:
    """Why a module of ours cannot be imported; None if it is not a version of these packages."""
    package = str(error.name).partition(".")[0]
    is_there = package in PACKAGES and not isinstance(error, ModuleNotFoundError)
    return explain(package, str(error)) if is_there else None


def explain(package: str, what: str) -> str:
    """The message for a version that lacks something."""
    from importlib.metadata import version  # 20 ms, and only an error needs it

    return (
        f"{package}: version {version(package)} lacks what a run needs ({what}). Install "
        f"{supported()}, or a samestep for your version"
    )


def supported() -> str:
    """The versions that the installed Samestep is tried with, as its metadata have them."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("samestep") or []
    except PackageNotFoundError:  # such as a copy of the folder
        lines = []
    found = [line for line in lines if line.startswith(PACKAGES) and ";" not in line]
    return ", ".join(sorted(found)) or "the versions of its README"
