"""Build the image of this working tree, and publish it or load it into a cluster on this machine.

python scripts/image.py ghcr.io/me/project --push
python scripts/image.py localhost/project --load kind
python scripts/image.py ghcr.io/me/project -- --secret id=pip.conf,src=pip.conf

The tag is the commit, with -dirty if the working tree differs from it. Only the full name of the
image is printed on stdout, for cluster.image=. Arguments after -- are those of the builder.
Exit codes: 0 done, 1 error, 2 wrong usage.
"""

import argparse
import sys

import options as _  # noqa: F401 (puts src on the path)

from samestep.errors import ConfigError, RunError
from samestep.launch import image
from samestep.ranks import failure, process


def main() -> int:
    """Build, then push or load, and print the name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", metavar="NAME", help="without a tag, such as ghcr.io/me/project")
    parser.add_argument("--push", action="store_true", help="push it to its registry")
    parser.add_argument(
        "--load", choices=image.LOADERS, help="load it into the cluster of this machine"
    )
    parser.add_argument(
        "--builder", choices=image.BUILDERS, help="default: the first one that works"
    )
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, arguments = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    try:
        image.check_name(options.name)
        builder = image.find_builder([options.builder] if options.builder else list(image.BUILDERS))
        commit, dirty = image.describe_commit()
        name = f"{options.name}:{commit[:12]}{dirty}"
        image.build(builder, name, commit + dirty, arguments)
        if options.push:
            image.execute([builder, "push", name])
        if options.load:
            image.load(builder, name, options.load)
    except (ConfigError, RunError) as error:
        return failure.report(error)
    print(name)
    return 0


if __name__ == "__main__":
    process.run(main)
