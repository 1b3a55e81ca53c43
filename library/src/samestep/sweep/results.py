"""What a search leaves: a table, Optuna's plots in one HTML file, and the best trial to use."""

import io
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.hydra.folder import configs_folder
from samestep.hydra.schema import LAID_OVER, choices_of
from samestep.ranks.secrets import redact
from samestep.report.page import render
from samestep.run import record as run_record
from samestep.run.files import write_text
from samestep.sweep.search import REASON, SECONDS
from samestep.sweep.settings import Settings
from samestep.sweep.study import FINISHED, Record

MAX_ROWS = 20  # of the table in a terminal
OF_ONE_TRIAL = ("run_id", "run_root", "run_dir")
PLACE = ("run_root=here", "run_id=one")  # so that two configurations differ in other values only


def leave(settings: Settings, record: Record) -> int:
    """Print the table, write ``search.html`` and ``best.yaml``, and say what to type next.

    Returns:
        0, or 1 if no trial was completed.
    """
    trials = sort_trials(record.trials(*FINISHED), settings.direction)
    print_table(settings, trials)
    page = settings.folder / "search.html"
    write_text(page, redact(write_page(settings, record, trials)))
    completed = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    if not completed:
        print("No trial was completed. The output of each is in")
        print(f"  {settings.folder}/logs/", flush=True)
        return 1
    best = completed[0]
    print("Look at")
    print(f"  {page}     the plots of Optuna, and all trials")
    print(f"  {settings.folder / run_id_of(settings, best)}     the best trial")
    print("Next")
    for command in next_commands(settings, best):
        print(f"  {command}", flush=True)
    return 0


def sort_trials(trials: Sequence[FrozenTrial], direction: str) -> list[FrozenTrial]:
    """The completed trials, the best first; then those that were pruned, and those that failed."""
    sign = -1 if direction == "maximize" else 1

    def order(trial: FrozenTrial) -> tuple[int, float, int]:
        value = sign * trial.value if trial.state is TrialState.COMPLETE and trial.value else 0.0
        return FINISHED.index(trial.state), value, trial.number

    return sorted(trials, key=order)


def run_id_of(settings: Settings, trial: FrozenTrial) -> str:
    """The name of the run of a trial."""
    return f"{settings.name}-{trial.number}"


def count_devices(settings: Settings) -> int:
    """How many processes a trial has on this machine."""
    devices = settings.cfg.trainer.devices
    return devices if isinstance(devices, int) and not settings.on_cluster else 1


def rows_of(settings: Settings, trials: Sequence[FrozenTrial]) -> Iterator[list[str]]:
    """The cells of the table, one row for each trial."""
    for trial in trials:
        seconds = timedelta(seconds=round(trial.user_attrs.get(SECONDS, 0)))
        values = [format_value(trial.params.get(p.key)) for p in settings.parameters]
        state = trial.state.name.lower()
        yield [
            run_id_of(settings, trial),
            "-" if trial.value is None else f"{trial.value:.4f}",
            state if state == "complete" else f"{state}: {trial.user_attrs.get(REASON, '')}",
            str(len(trial.intermediate_values)),
            str(seconds),
            *values,
        ]


def titles_of(settings: Settings) -> list[str]:
    """The titles of the columns of the table."""
    keys = [parameter.key for parameter in settings.parameters]
    return ["trial", settings.monitor, "state", "validations", "time", *keys]


def format_value(value: Any) -> str:
    """A value that was tried, rounded for a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_table(settings: Settings, trials: Sequence[FrozenTrial]) -> None:
    """Print a row for each trial, the best first."""
    table = Table(*titles_of(settings), box=None, pad_edge=False)
    for row in rows_of(settings, trials[:MAX_ROWS]):
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 1000  # a log or another program wants whole lines
    console.print(table)
    if len(trials) > MAX_ROWS:
        print(f"... and {len(trials) - MAX_ROWS} more in {settings.folder}/search.html")


def write_page(settings: Settings, record: Record, trials: Sequence[FrozenTrial]) -> str:
    """An HTML page that needs no other file: the plots that the trials allow, and a table."""
    return render(
        "search.html",
        title=f"Search {settings.name}",
        monitor=settings.monitor,
        direction=settings.direction,
        overrides=shlex.join(settings.overrides),
        trials=[titles_of(settings), *rows_of(settings, trials)],
        plots=list(draw_plots(record, trials)),
    )


def draw_plots(record: Record, trials: Sequence[FrozenTrial]) -> Iterator[tuple[str, str]]:
    """Optuna's plots as SVG, with their titles. A plot that needs more trials is left out."""
    import matplotlib as mpl
    from matplotlib import pyplot
    from optuna.visualization import matplotlib as plots

    from samestep.report.charts import for_page

    num_completed = sum(trial.state is TrialState.COMPLETE for trial in trials)
    wanted: list[tuple[str, int, Callable[..., Any]]] = [
        ("History", 1, plots.plot_optimization_history),
        ("Values within each trial", 1, plots.plot_intermediate_values),
        ("Importance of each key", 4, plots.plot_param_importances),
        ("Each key and the result", 1, plots.plot_slice),
        ("Trials as lines", 2, plots.plot_parallel_coordinate),
        ("When the trials ran", 1, plots.plot_timeline),
    ]
    for title, needed, plot in wanted:
        if num_completed < needed:
            continue
        # Text stays text, so that it can be searched.
        style: Any = {"svg.fonttype": "none", "svg.hashsalt": title, "figure.figsize": (9, 4.5)}
        with mpl.rc_context(style), warnings.catch_warnings(), io.StringIO() as file:
            warnings.simplefilter("ignore")  # they are meant for the developers of libraries
            try:
                plot(record.study)
                pyplot.gcf().savefig(file, format="svg", bbox_inches="tight")
            except (ValueError, RuntimeError, ZeroDivisionError):
                continue  # such as the importance of keys when all trials are equally good
            finally:
                pyplot.close("all")
            yield title, for_page(file.getvalue())


def next_commands(settings: Settings, best: FrozenTrial) -> list[str]:
    """What to type to train with the best values, and several times."""
    words = [*settings.overrides, *overrides_of(settings, best)]
    path = settings.folder / "best.yaml"
    name = f"{settings.name.replace('-', '_')}_best"
    write_text(path, redact(write_experiment(settings, best, name)))
    if is_same_run(path, name, words):
        return [
            f"cp {shlex.quote(str(path))} configs/experiment/{name}.yaml",
            f"python train.py -m experiment={name} seed=0,1,2",
        ]
    # An experiment cannot say everything, such as a key that was added with a plus.
    path.unlink()
    return [shlex.join(["python", "train.py", *words])]


def overrides_of(settings: Settings, trial: FrozenTrial) -> list[str]:
    """The overrides that the search has chosen for a trial."""
    return [p.override(trial.params[p.key]) for p in settings.parameters]


def write_experiment(settings: Settings, best: FrozenTrial, name: str) -> str:
    """The text of an experiment file with the overrides of the best trial."""
    run_id = run_id_of(settings, best)
    machine = run_record.read(settings.folder / run_id).start
    where = ", ".join(machine.get("gpus") or [machine.get("cpu", "an unknown processor")])
    groups = choices_of(configs_folder())
    defaults: list[Any] = []
    values = OmegaConf.create({})
    parsed = OverridesParser.create().parse_overrides(
        [*settings.overrides, *overrides_of(settings, best)]
    )
    for override in parsed:
        group, value = override.key_or_group, override.value()
        if group == "experiment" and value:
            defaults.insert(0, value)
        elif group in groups and group not in ("local", "cluster"):
            defaults.append({f"override /{group}": value})
        elif group.split(".")[0] not in (*OF_ONE_TRIAL, *LAID_OVER, "cluster"):
            OmegaConf.update(values, group, value)
    header = [
        "# @package _global_",
        f"# The best trial of the search {settings.name}: {run_id}.",
        "#",
        f"#   python train.py experiment={name} seed=0",
        "#",
        f"# {settings.monitor} {best.value:.4f}, one seed. On {where}.",
        "# The best of many trials is partly luck: train it with several seeds, and write here",
        "# what you have measured.",
    ]
    content = {"defaults": defaults} if defaults else {}
    body = yaml.safe_dump(content, sort_keys=False) if content else ""
    plain = OmegaConf.to_container(values)
    body += yaml.safe_dump(plain, sort_keys=False) if plain else ""
    return "\n".join(header) + "\n" + body


def is_same_run(path: Path, name: str, words: Sequence[str]) -> bool:
    """Whether the experiment in ``path`` gives the same configuration as the overrides."""
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        configs = Path(folder, "configs")
        shutil.copytree(configs_folder(), configs)
        shutil.copyfile(path, configs / "experiment" / f"{name}.yaml")
        where = [word for word in words if word.lstrip("+~").startswith(("cluster", "local"))]
        try:
            cfg = check([f"experiment={name}", *where, *PLACE], configs=configs)
        except ConfigError:
            return False
    return bool(values_of(cfg) == values_of(check([*words, *PLACE])))


def values_of(cfg: DictConfig) -> Any:
    """All values of a run, resolved."""
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    plain.pop("choices")  # they only say where the values come from
    return plain
