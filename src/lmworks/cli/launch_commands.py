"""`lmworks launch`: start the ranks of a run on this machine, on hosts, or as a Slurm job."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from lmworks.cli.options import (
    AllowOption,
    RecipeArgument,
    RunArgument,
    SetOption,
    SizeOption,
    TimeOption,
    console,
    spread,
    within,
)
from lmworks.errors import UserError
from lmworks.io.masking import mask
from lmworks.launch.launch_dir import COMMAND
from lmworks.ui.terminal import plain


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    noun = typer.Typer(no_args_is_help=True, help="Start the ranks of a run, and restart them after failures.")
    for way in (local, hosts, slurm):
        noun.command()(spread(way))
    noun.command()(readmit)
    noun.command(hidden=True)(spread(nodes))
    noun.command(hidden=True)(job)
    app.add_typer(noun, name="launch")


@dataclass
class _Asked:
    """Options shared by all launchers."""

    recipe: RecipeArgument
    overrides: SetOption
    allow: AllowOption
    size: SizeOption = None
    time: TimeOption = None
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="C", help="A cluster file or name, for the number of ranks and the mesh layout.")
    ] = None
    to: Annotated[
        str | None, typer.Option("--to", metavar="STAGE", help="Last stage to run, such as pretrain; or preflight or profile.")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script, and start nothing.")] = False


class _Run:
    """The run to launch, and the command that every rank runs."""

    def __init__(self, asked: _Asked, resume: str | None = None) -> None:
        from lmworks.recipe.load import load_cluster, load_recipe
        from lmworks.run.stages import stages_for

        overrides, to, size = within(asked.time, asked.overrides), asked.to, asked.size
        self._asked = asked
        self.cluster = load_cluster(asked.cluster, load_recipe(asked.recipe, overrides, size).path.parent) if asked.cluster else None
        if self.cluster and self.cluster.layout:
            overrides += self.cluster.layout.overrides()
        if self.cluster:  # what a device costs is said on the run page
            own = load_recipe(asked.recipe, overrides, size).recipe.metrics
            prices = {"dollars_per_device_hour": self.cluster.dollars_per_device_hour, "watts_per_device": self.cluster.watts_per_device}
            overrides += [f"metrics.{key}={value:g}" for key, value in prices.items() if value and not getattr(own, key)]
        self._overrides = overrides
        self.recipe = load_recipe(asked.recipe, overrides, size).recipe
        assert self.recipe.run_dir
        self.run_dir = Path(self.recipe.run_dir)
        if to not in ("preflight", "profile"):
            stages_for(self.recipe, to)
        # The command that the ranks print for resuming: this one, or `resume`.
        os.environ[COMMAND] = resume or shlex.join(["lmworks", *(word for word in sys.argv[1:] if word != "--dry-run")])

    def override(self, *more: str) -> None:
        """Give the recipe further overrides, and the ranks too."""
        from lmworks.recipe.load import load_recipe

        self._overrides = [*self._overrides, *more]
        self.recipe = load_recipe(self._asked.recipe, self._overrides, self._asked.size).recipe

    def settle(self, ranks: int, per_host: int) -> None:
        """Choose the mesh layout of `layout: auto`, now that the number of ranks is known."""
        from lmworks.recipe.load import load_recipe
        from lmworks.run.start import choose_mesh

        self.override(
            *choose_mesh(load_recipe(self._asked.recipe, self._overrides, self._asked.size), self.cluster, ranks, per_host)[1]
        )

    @property
    def work(self) -> list[str]:
        """The command of a rank."""
        to = self._asked.to
        command = {None: ["run"], "corpus": ["corpus", "prepare"], "tokenizer": ["tokenizer", "train"], "shards": ["shards", "build"]}
        return [*command.get(to, [str(to)]), *self._words]

    @property
    def again(self) -> list[str]:
        """The recipe and the options of the same launch."""
        return [*self._words, *(["--to", self._asked.to] if self._asked.to else [])]

    @property
    def _words(self) -> list[str]:
        options = [("--set", one) for one in self._overrides] + [("--allow", one) for one in self._asked.allow]
        options += [("--size", self._asked.size)] if self._asked.size else []
        return [self._asked.recipe, *(word for option in options for word in option)]


def local(
    asked: _Asked,
    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks", metavar="N", help="Number of ranks, or a range such as 2:4; auto: one on each GPU, or on each core if there is none."
        ),
    ] = None,
) -> None:
    """Run with several ranks on this machine; ranks that die or hang are restarted."""
    from lmworks.launch import launcher
    from lmworks.launch.torchrun import CountRange
    from lmworks.recipe.schema.layout import Layout, world_size

    run = _Run(asked)
    if ranks == "auto":
        if run.recipe.layout == Layout():
            run.override("layout=auto")
        if not run.recipe.layout.auto:
            raise UserError("--ranks auto chooses the layout too, and the recipe has one; write layout: auto, or leave --ranks out")
        from lmworks.plan.automatic import ranks_here

        count, why = ranks_here(run.recipe)
        ranks = str(count)
        print(plain(f"ranks: {why}"), file=sys.stderr)
    of_cluster = run.cluster is not None and (run.recipe.layout.auto or not run.cluster.layout)
    if ranks is None and run.recipe.layout.auto and not of_cluster:
        raise UserError("layout: auto needs the number of ranks: add --ranks N, or a cluster (--cluster C)")
    usual = run.cluster.devices_per_node if run.cluster and of_cluster else world_size(run.recipe.layout)
    sizes = CountRange.parse(ranks or str(usual))
    run.settle(sizes.maximum, sizes.maximum)
    _start(launcher.launch_local(run.recipe, run.run_dir, sizes, run.work), asked.dry_run)


def launch_again(recipe: str, overrides: Sequence[str], size: str | None, allow: Sequence[str], last: str | None, ranks: int) -> NoReturn:
    """Go on with a run on this machine on as many ranks as it began with; ends this process with the code of the launch."""
    print(plain(f"ranks: {ranks}, as the run began"), file=sys.stderr)
    local(_Asked(recipe, [*overrides, "layout=auto"], list(allow), size, to=last), str(ranks))
    raise AssertionError("the launch ends the process")


def hosts(
    asked: _Asked,
    file: Annotated[Path, typer.Option("--hosts", metavar="FILE", help="Host file, one host per line: NAME slots=N.")],
    least: Annotated[
        int | None, typer.Option("--least", metavar="N", help="Minimum number of hosts; by default all that are no spares.")
    ] = None,
    spares: Annotated[
        int, typer.Option("--spares", metavar="N", min=0, help="Hosts at the end of the file that only replace others that fail.")
    ] = 0,
    address: Annotated[
        str | None, typer.Option("--address", metavar="A", help="Address at which the hosts reach this machine; by default its host name.")
    ] = None,
) -> None:
    """Run on the hosts of a file through ssh; failing hosts are excluded and replaced, and can be readmitted."""
    from lmworks.launch import launcher
    from lmworks.launch.torchrun import read_hosts

    run, found = _Run(asked), read_hosts(file)
    used = found[: max(1, len(found) - spares)]
    run.settle(sum(host.slots for host in used), min(host.slots for host in used))
    _start(launcher.launch_on_hosts(run.recipe, run.run_dir, found, least, run.work, address, spares), asked.dry_run)


def slurm(
    asked: _Asked,
    nodes: Annotated[
        str | None, typer.Option("--nodes", metavar="N", help="Number of nodes, or a range such as 6:8 to continue on at least 6.")
    ] = None,
    ranks_per_node: Annotated[int | None, typer.Option("--ranks-per-node", metavar="M", min=1, help="Ranks per node.")] = None,
    spares: Annotated[int, typer.Option("--spares", metavar="N", min=0, help="Further nodes, which only replace others that fail.")] = 0,
) -> None:
    """Submit a Slurm job that saves a checkpoint when it is preempted, and requeues itself."""
    from lmworks.launch.slurm import job_for
    from lmworks.launch.torchrun import CountRange

    run = _Run(asked)
    count = nodes or (str(run.cluster.nodes) if run.cluster else None)
    each = ranks_per_node or (run.cluster.devices_per_node if run.cluster else None)
    if count is None or each is None:
        raise UserError("the number of ranks is missing: add --nodes N --ranks-per-node M, or a cluster (--cluster C)")
    sizes = CountRange.parse(count)
    run.settle(sizes.maximum * each, each)
    gpus = each if run.cluster and not run.cluster.on_cpu else None
    made = job_for(run.recipe, run.run_dir, sizes, each, run.work, gpus, spares, run.again)
    if asked.dry_run:
        print(plain(mask(made.script())))
    else:
        console().out(f"submitted job {made.submit()}; its output is in {run.run_dir}/launch")


def nodes(
    asked: _Asked,
    file: Annotated[Path, typer.Option("--hosts", metavar="FILE")],
    least: Annotated[int, typer.Option("--least", metavar="N")],
    spares: Annotated[int, typer.Option("--spares", metavar="N")],
    address: Annotated[str, typer.Option("--address", metavar="A")],
) -> None:
    """Runs within a Slurm job that has spares: starts the ranks on its nodes, and replaces nodes that fail."""
    from lmworks.launch.slurm import launch_on_nodes
    from lmworks.launch.torchrun import read_hosts

    run = _Run(asked, os.environ.get(COMMAND))  # the command that submitted the job
    launch = launch_on_nodes(run.recipe, run.run_dir, read_hosts(file), least, run.work, address, spares)
    raise typer.Exit(launch.supervise())


def readmit(run: RunArgument, host: Annotated[str, typer.Argument(metavar="HOST", help="Host name as in RUN/launch/hosts.json.")]) -> None:
    """Readmit a host that was excluded."""
    from lmworks.launch import launcher

    launcher.readmit(Path(run), host)
    console().print(f"{host} is readmitted; a running launch uses it at once")


def job(
    run: RunArgument,
    what: Annotated[Literal["begin", "end"], typer.Argument(metavar="WHAT")],
    code: Annotated[int, typer.Option("--code", metavar="N", help="Exit code of the ranks.")] = 0,
    to: Annotated[str | None, typer.Option("--to", metavar="STAGE", help="Last stage that they run.")] = None,
) -> None:
    """Runs before and after the ranks of a Slurm job: prints the nodes to exclude; exit code 75 if the job is to be requeued."""
    from lmworks.launch import slurm
    from lmworks.run.run_dir import require_run

    if what == "begin":
        slurm.begin(Path(run), sys.stdin.fileno())
        return
    decided = slurm.finish_job(require_run(Path(run)), Path(run), code, to)
    print(plain(decided.reason), file=sys.stderr)
    print(plain(",".join(decided.excluded)))
    raise typer.Exit(decided.code)


def _start(launch: object, dry_run: bool) -> None:
    from lmworks.launch.launcher import Launch

    assert isinstance(launch, Launch)
    if dry_run:
        for host in launch.hosts:
            script = launch.script(host, 0)
            print(plain(f"# {host.name}, {host.slots} ranks; the port is chosen at start"))
            print(plain(mask(script if launch.ssh is None else shlex.join(launch.command(script, host)))))
        return
    raise typer.Exit(launch.run())
