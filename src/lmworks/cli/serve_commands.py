"""`lmworks chat` and `lmworks serve`: chat with a model, or serve it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    pass

RunOrModel = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run directory, RUN@base, RUN@STEP, a checkpoint, a GGUF file, a Hugging Face folder, or OWNER/MODEL[@REVISION] on the hub.",
    ),
]

BaseOption = Annotated[bool, typer.Option("--base", help="Use the base model even if there is a tuned one.")]

Dtype = Literal["auto", "float32", "bfloat16"]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="Type of weights and activations; auto: bfloat16 on a GPU that multiplies it, else float32.")
]


RopeOption = Annotated[
    str | None,
    typer.Option(
        "--rope", metavar="METHOD:FACTOR", show_default=False,
        help="Extend the trained context by a factor: linear, ntk, yarn or llama3, such as yarn:2.",
    ),
]  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("chat")(chat)
    app.command("serve")(serve)


def chat(
    run: RunOrModel,
    base: BaseOption = False,
    system: Annotated[str, typer.Option("--system", help="System prompt.")] = "",
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, max=2, help="Sampling temperature, by default the model's; 0 is greedy.")
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", min=0, max=1, help="Minimum probability relative to the most likely token, by default the model's."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Maximum length of an answer; by default the rest of the context.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Sampling seed.")] = None,
    dtype: DtypeOption = "auto",
    rope: RopeOption = None,
) -> None:
    """Chat with a run's model in the terminal. If input is a pipe, each line is the next message of one conversation, as if it were typed;
    a line /reset begins a new one. Sampling options are those of the model's generation_config.json, as on the page of lmworks serve."""
    from lmworks.serve.spin import apart, spin

    spin()  # before torch is imported
    from lmworks.recipe.schema.artifacts import RopeExtension
    from lmworks.serve.chat import Conversation
    from lmworks.serve.chat import chat as talk
    from lmworks.serve.models import load_engine
    from lmworks.weights.chat import require_template

    extension = None if rope is None else RopeExtension.parse(rope)
    require_template(run)
    engine = apart(lambda: load_engine(run, base, dtype=dtype, rows=1, rope=extension))
    try:
        talk(Conversation(engine, system, temperature, min_p, max_tokens, seed))
    finally:
        engine.close()


def serve(
    run: RunOrModel,
    base: BaseOption = False,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the model for clients, by default that of the recipe or folder; NAME-base is its base model."),
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="LMWORKS_API_KEY", help="API key that clients must send.")] = None,
    dtype: DtypeOption = "auto",
    rope: RopeOption = None,
) -> None:
    """Serve a run's tuned and base model: a chat page and an OpenAI-compatible API."""
    from rich.text import Text

    from lmworks.serve.spin import apart, spin

    spin()  # before torch is imported
    from lmworks.recipe.schema.artifacts import RopeExtension
    from lmworks.serve.models import load_models
    from lmworks.serve.server import LOOPBACK, ServerOptions, listen, require_extra
    from lmworks.serve.server import serve as answer
    from lmworks.ui.terminal import Terminal

    extension = None if rope is None else RopeExtension.parse(rope)
    require_extra()
    options = ServerOptions(host, port, api_key)
    listener = listen(options)  # before the model is loaded, so that a port in use is reported at once
    models = apart(lambda: load_models(run, base, dtype, name, extension))
    local = f"[{host}]" if ":" in host else host
    address = f"http://{'localhost' if host in ('127.0.0.1', '0.0.0.0', '::', '::1') else local}:{listener.getsockname()[1]}"
    console = Terminal()
    first, *others = models.known
    console.print(Text.assemble("\n", (first, "bold"), " is served", *(f", and {name} from its first request on" for name in others)))
    for what, path in (("chat page", "/"), ("OpenAI API", "/v1"), ("metrics", "/metrics")):
        console.print(f"  {what:<12}{address}{path}")
    console.print(f"  {'precision':<12}{str(models.first.model.compute_dtype).removeprefix('torch.')}")
    if host not in LOOPBACK and not api_key:
        console.print("Anyone who can reach this machine can use it; --api-key KEY requires a key.", style="yellow")
    console.print("Press Ctrl-C to stop.", style="dim")
    try:
        answer(models, listener, options)
    except KeyboardInterrupt:
        console.print("ended", style="dim")
