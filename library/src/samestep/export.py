"""Write the model of a run in forms that other programs read, each checked against the original.

runs/<run_id>/export/
    model.safetensors, config.yaml  the weights, and what rebuilds the model
    model.pt2, model.onnx           torch.export, and ONNX with --onnx; batches of any size
    README.md                       a model card: metrics, data, command, commit, licence

The model sets example_input_array, a batch as its forward takes it.

`huggingface_hub.upload_folder` takes the folder as it is. Read the card before you publish it.

samestep export runs/mine
"""

import tomllib
from collections.abc import Sequence

from samestep.command_line import Parser
from samestep.hydra.project import project_folder


def main(argv: Sequence[str]) -> int:
    """Write the files, and print how close to the original each one computes. Returns 0."""
    parser = Parser("samestep export", __doc__)
    parser.add_run_dir()
    parser.add_ckpt()
    text = "licence of the weights, such as MIT; default: that of the project"
    parser.add_argument("--licence", metavar="SPDX", help=text)
    parser.add_argument("--onnx", action="store_true", help="write model.onnx, too")
    parser.add_data()
    arguments = parser.parse(argv)
    # These imports take seconds: invalid arguments are reported before.
    from samestep.loading import load_chosen
    from samestep.model_files import export_run

    model, data = load_chosen(arguments)
    run_dir, ckpt = arguments.run_dir, arguments.ckpt
    licence = arguments.licence or licence_of_project()
    differences = export_run(run_dir, model, data, ckpt, licence, onnx=arguments.onnx)
    print(f"Written to {run_dir / 'export'}; the outputs differ at most by")
    for file, difference in differences.items():
        print(f"  {file:<17}  {difference:.1e}")
    return 0


def licence_of_project() -> str | None:
    """The licence in pyproject.toml; None in a container, which has no such file."""
    path = project_folder() / "pyproject.toml"
    if not path.is_file():
        return None
    # A file that only configures tools has no [project].
    project = tomllib.loads(path.read_text("utf-8")).get("project", {})
    licence = project.get("license")
    return licence if isinstance(licence, str) else None
