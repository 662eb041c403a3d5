"""What a user writes in a typed program: it is checked by mypy with all strict flags, and not run."""

from __future__ import annotations

import lmworks


def losses(run_dir: str) -> list[float | None]:
    run: lmworks.Run = lmworks.open_run(run_dir)
    return run.metrics(names=["train/loss"])["train/loss"]


def sources(run: lmworks.Run, step: int) -> set[str]:
    return {row.source for row in run.batch(step).documents}


def answer(where: str, question: str) -> str:
    model: lmworks.Model = lmworks.load_model(where, device="cpu")
    completion = model.generate([{"role": "user", "content": question}], max_new_tokens=8, temperature=0.7, seed=1)
    score: float = model.log_likelihood("two and two are", " four")
    layers: int = len(model.hidden_states("two"))
    return f"{completion.text} {completion.finish_reason} {score:.2f} {layers}"


def count(where: str, text: str) -> int:
    tokenizer: lmworks.Tokenizer = lmworks.load_tokenizer(where)
    return len(tokenizer.encode(text))


def train(recipe_file: str) -> lmworks.Run | None:
    recipe: lmworks.Recipe = lmworks.load_recipe(recipe_file, {"train.micro_batch_sequences": 2}, seed=7)
    planned = recipe.plan("8xh100", mfu=0.4)
    if planned.refusals or planned.dollars > 100:
        return None
    try:
        return recipe.run(to="pretrain", quiet=True)
    except lmworks.Interrupted:
        return None
    except lmworks.UserError as error:
        print(error)
        return None


def own_loop(recipe: lmworks.Recipe) -> float:
    session: lmworks.TrainingSession = recipe.training_session()
    loss = 0.0
    with session:
        for step in range(session.step, session.steps):
            loss = session.forward_backward(session.batch(step))
            done = session.optim_step(learning_rate=1e-3)
            if done.rollback and not session.stops:
                print(done.bad, session.restore())
        bits: float = session.validate()["validation/bits_per_byte"]
        print(bits, session.save())
    return loss
