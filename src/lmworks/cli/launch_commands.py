"""`lmworks launch`: the ranks of a run on this machine, on hosts, or as a Slurm job."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from lmworks.cli.layouts import settled
from lmworks.cli.options import AllowOption, RecipeArgument, RunArgument, SetOption, SizeOption, TimeOption, spread, within
from lmworks.cli.output import console
from lmworks.errors import UserError
from lmworks.launch.folder import COMMAND
from lmworks.masking import mask


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    noun = typer.Typer(no_args_is_help=True, help="Start the ranks of a run and keep them going.")
    for way in (local, hosts, slurm):
        noun.command()(spread(way))
    noun.command()(readmit)
    noun.command(hidden=True)(job)
    app.add_typer(noun, name="launch")


@dataclass
class _Asked:
    """What the three ways to launch have in common."""

    recipe: RecipeArgument
    overrides: SetOption
    allow: AllowOption
    size: SizeOption = None
    time: TimeOption = None
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="C", help="A cluster file or name: numbers that are left out, and its layout.")
    ] = None
    to: Annotated[
        str | None, typer.Option("--to", metavar="STAGE", help="Up to this stage only, such as pretrain; or preflight.")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script and start nothing.")] = False


class _Run:
    """The run that was asked for, and the command that every rank of it runs."""

    def __init__(self, asked: _Asked) -> None:
        from lmworks.recipe.load import load_cluster, load_recipe
        from lmworks.run.stages import stages_for

        overrides, to, size = within(asked.time, asked.overrides), asked.to, asked.size
        self._asked = asked
        self.cluster = load_cluster(asked.cluster, load_recipe(asked.recipe, overrides, size).path.parent) if asked.cluster else None
        if self.cluster and self.cluster.layout:
            overrides += self.cluster.layout.overrides()
        if self.cluster:  # what a device costs is said on the run page
            own = load_recipe(asked.recipe, overrides, size).recipe.metrics
            prices = {"dollars_per_hour": self.cluster.dollars_per_hour, "watts": self.cluster.watts}
            overrides += [f"metrics.{key}={value:g}" for key, value in prices.items() if value and not getattr(own, key)]
        self._overrides = overrides
        self.recipe = load_recipe(asked.recipe, overrides, size).recipe
        assert self.recipe.run_dir
        self.run_dir = Path(self.recipe.run_dir)
        if to != "preflight":
            stages_for(self.recipe, to)
        # What the ranks say to go on with.
        os.environ[COMMAND] = shlex.join(["lmworks", *(word for word in sys.argv[1:] if word != "--dry-run")])

    def settle(self, ranks: int, per_host: int) -> None:
        """Under `layout: auto`, choose the layout now that the ranks are known."""
        resolved, more = settled(self._asked.recipe, self._overrides, self._asked.size, self.cluster, ranks, per_host)
        self.recipe, self._overrides = resolved.recipe, [*self._overrides, *more]

    @property
    def work(self) -> list[str]:
        """The command of a rank."""
        to, size = self._asked.to, self._asked.size
        command = {None: ["run"], "corpus": ["corpus", "prepare"], "tokenizer": ["tokenizer", "train"], "shards": ["shards", "build"]}
        options = [("--set", one) for one in self._overrides] + [("--allow", one) for one in self._asked.allow]
        options += [("--size", size)] if size else []
        return [*command.get(to, [str(to)]), self._asked.recipe, *(word for option in options for word in option)]


def local(
    asked: _Asked,
    ranks: Annotated[str | None, typer.Option("--ranks", metavar="N", help="How many, or 2:4 for any number from 2 to 4.")] = None,
) -> None:
    """Run on ranks of this machine; ranks that die or hang are started again."""
    from lmworks.launch import places
    from lmworks.launch.torchrun import Sizes
    from lmworks.recipe.after import world_size

    run = _Run(asked)
    of_cluster = run.cluster is not None and (run.recipe.layout.auto or not run.cluster.layout)
    if ranks is None and run.recipe.layout.auto and not of_cluster:
        raise UserError("layout: auto wants to know how many ranks there are: add --ranks N, or a cluster (--cluster C)")
    usual = run.cluster.devices_per_node if run.cluster and of_cluster else world_size(run.recipe.layout)
    sizes = Sizes.parse(ranks or str(usual))
    run.settle(sizes.most, sizes.most)
    _start(places.local(run.recipe, run.run_dir, sizes, run.work), asked.dry_run)


def hosts(
    asked: _Asked,
    file: Annotated[Path, typer.Option("--hosts", metavar="FILE", help="One host per line: NAME slots=N.")],
    least: Annotated[int | None, typer.Option("--least", metavar="N", help="Hosts that must be left; all when left out.")] = None,
    address: Annotated[str | None, typer.Option("--address", metavar="A", help="Where the hosts reach this machine; its name.")] = None,
) -> None:
    """Run on the hosts of a file, through ssh; hosts that fail are excluded and may be readmitted."""
    from lmworks.launch import places
    from lmworks.launch.hosts import read_hosts

    run, found = _Run(asked), read_hosts(file)
    run.settle(sum(host.slots for host in found), min(host.slots for host in found))
    _start(places.on_hosts(run.recipe, run.run_dir, found, least, run.work, address), asked.dry_run)


def slurm(
    asked: _Asked,
    nodes: Annotated[str | None, typer.Option("--nodes", metavar="N", help="How many, or 6:8 to go on while 6 are left.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option("--ranks-per-node", metavar="M", min=1, help="Ranks on each.")] = None,
) -> None:
    """Submit a Slurm job that saves when it is pre-empted, and queues itself again."""
    from lmworks.launch.slurm import job_for
    from lmworks.launch.torchrun import Sizes

    run = _Run(asked)
    count = nodes or (str(run.cluster.nodes) if run.cluster else None)
    each = ranks_per_node or (run.cluster.devices_per_node if run.cluster else None)
    if count is None or each is None:
        raise UserError("say how many: --nodes N --ranks-per-node M, or a cluster that knows (--cluster C)")
    sizes = Sizes.parse(count)
    run.settle(sizes.most * each, each)
    gpus = each if run.cluster and not run.cluster.on_cpu else None
    made = job_for(run.recipe, run.run_dir, sizes, each, run.work, gpus)
    if asked.dry_run:
        print(mask(made.script()))
    else:
        print(f"submitted job {made.submit()}; its output goes to {run.run_dir}/launch")


def readmit(run: RunArgument, host: Annotated[str, typer.Argument(metavar="HOST", help="As it stands in RUN/launch/hosts.json.")]) -> None:
    """Take a host back that was excluded."""
    from lmworks.launch import places

    places.readmit(Path(run), host)
    console().print(f"{host} takes part again, at once if the run is under way")


def job(
    run: RunArgument,
    what: Annotated[Literal["begin", "end"], typer.Argument(metavar="WHAT")],
    code: Annotated[int, typer.Option("--code", metavar="N", help="Of the ranks.")] = 0,
) -> None:
    """Before and after the ranks of a Slurm job; prints the nodes to leave out, and ends with 75 if the job is to be queued again."""
    from lmworks.launch import slurm
    from lmworks.run.run_dir import require_run

    if what == "begin":
        slurm.begin(Path(run))
        return
    decided = slurm.after(require_run(Path(run)), Path(run), code)
    print(decided.reason, file=sys.stderr)
    print(",".join(decided.excluded))
    raise typer.Exit(decided.code)


def _start(launch: object, dry_run: bool) -> None:
    from lmworks.launch.places import Launch

    assert isinstance(launch, Launch)
    if dry_run:
        for host in launch.hosts:
            script = launch.script(host, 0)
            print(f"# {host.name}, {host.slots} ranks; the port is chosen at the start")
            print(mask(script if launch.ssh is None else shlex.join(launch.command(script, host))))
        return
    raise typer.Exit(launch.run())
