#!/usr/bin/env python3
"""Makes the golden checkpoints of crates/moeflux/tests/data/goldens: weights from seeds, logits by a reference.

usage: scripts/make-golden.py [CASE ...] [--out DIR]      cases of cases.py (none: all), by mlx-lm
       scripts/make-golden.py --like FOLDER [--out DIR]   the tensors of a checkpoint from elsewhere, with the prompt
                                                          of its golden.json, by the reference that this names
       scripts/make-golden.py --again CASE ...            keep recipes and prompts, recompute the logits
       scripts/make-golden.py --weights CASE ... --out DIR   whole checkpoints, for the program
       scripts/make-golden.py --list

Needs `pip install "mlx[cpu]" mlx-lm`; goldens of transformers also `pip install torch transformers`.
Each folder holds config.json, and

  weights.json         the recipe of the weights: seeded.py describes it
  golden.json          the seed, versions, and two margins: `router_gap`, the smallest distance
                       between a chosen expert and a rejected one, in router logits (or between
                       positions of an indexer); `noise`, the change of a logit by a relative change
                       of 1e-6 in the norms, over the rms of all; `ties`, the rows in which an
                       indexer's last chosen position and first rejected one have the same score, as
                       ReLU makes it 0
  golden.safetensors   prompt_ids i32 [P]                 gen_ids_f32 i32 [N]
                       prefill_logits_f32 f32 [R, vocab]  last R rows of the prompt; mostly R = P
                       decode_logits_f32 f32 [N, vocab]   row i: after gen_ids_f32[i]
                       hidden_f32.L f32 [H, hidden]       output of decoder layer L on the last H
                                                          rows; mostly H = R
                       experts_f32.L u8 [R + N, k]        chosen experts of a MoE layer, as a set

All in f32, with the weights upcast exactly. Random weights amplify rounding, so the seed is the
first one whose margins are wide enough that every correct f32 implementation chooses the same
experts.
"""
import argparse
import copy
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

import seeded
from cases import CASES
from golden import Reference, make_checkpoint, read_safetensors, rms, versions

GOLDENS = Path(__file__).resolve().parent.parent / "crates/moeflux/tests/data/goldens"
# More rows give smaller gaps and larger differences, so the limits are looser from LONG tokens on.
SAME, LEAST_ROUTER_GAP, MOST_NOISE, NUDGE, LONG, VERY_LONG = 1e-4, 2e-3, 5e-5, 1e-6, 40, 1000
# Models of which mlx-lm is a second opinion on goldens of transformers.
SECOND = ("bailing_hybrid", "dots1", "exaone_moe", "glm4_moe_lite", "kimi_linear", "mellum", "mixtral", "olmoe", "qwen2_moe",
          "solar_open")
# Seed of the checkpoint on which a case's recipe is measured, and the seeds of its weights.
TEMPLATE, SEEDS = 7, range(7, 107)


@dataclass
class Run:
    """What a golden computes and stores."""

    prompt: list
    steps: int
    # Last rows of the prompt whose logits and experts are stored, and whose hidden states are.
    rows: int
    hidden_rows: int
    # If transformers is the reference: changes of the config for it.
    transformers: dict | None = None
    # Whether the first seed is used, regardless of its margins.
    any_seed: bool = False
    # Whether positions of an indexer are to have equal scores where it chooses, or must not.
    ties: bool = False

    @staticmethod
    def stored(folder):
        """The run of a golden."""
        golden, rows = json.loads((folder / "golden.json").read_text()), outputs(folder)
        # Of a checkpoint without results, golden.json has what they are to be of.
        prompt, steps = (rows[k].tolist() if k in rows else golden[k] for k in ("prompt_ids", "gen_ids_f32"))
        stored = lambda start: next((len(v) for k, v in rows.items() if k.startswith(start)), len(prompt))
        changes = golden.get("transformers_config", {}) if "transformers" in golden else None
        return Run(prompt, len(steps), stored("prefill_logits_f32"), stored("hidden_f32."), changes,
                   any_seed=len(prompt) >= VERY_LONG, ties=golden.get("ties", 0) > 0)

    def reference(self, folder):
        """(the reference with the checkpoint in `folder`, its versions)"""
        if self.transformers is None:
            return Reference(folder), versions()
        import by_transformers
        return by_transformers.Reference(folder, self.transformers), by_transformers.versions()


def outputs(folder):
    """The tensors of a golden, if there are any."""
    file = folder / "golden.safetensors"
    return read_safetensors(file) if file.exists() else {}


def compute(folder, run, seed):
    """Computes the golden of the checkpoint in `folder`; returns its margins."""
    (reference, made_by), prompt = run.reference(folder), run.prompt
    reference.start()
    last, generated = reference.feed(prompt)[-1], []
    for _ in range(run.steps):
        generated.append(int(last.argmax()))
        last = reference.feed([generated[-1]])[-1]
    (prefill, *decode), hidden, experts, gap = reference.trace([prompt, *([t] for t in generated)])
    reference.perturb(seed, NUDGE)
    reference.start()
    noise = float(np.abs(reference.feed(prompt) - prefill).max()) / rms(prefill)

    first = len(prompt) - run.rows
    tensors = {"prompt_ids": np.array(prompt, np.int32), "gen_ids_f32": np.array(generated, np.int32),
               "prefill_logits_f32": prefill[first:], "decode_logits_f32": np.concatenate(decode)}
    tensors |= {f"hidden_f32.{i}": h[len(prompt) - run.hidden_rows : len(prompt)] for i, h in hidden.items()}
    tensors |= {f"experts_f32.{i}": e[first:].astype(np.uint8) for i, e in experts.items()}
    mx.save_safetensors(str(folder / "golden.safetensors"), {k: mx.array(v) for k, v in tensors.items()}, made_by)
    golden = dict(arch=reference.config["model_type"], seed=seed, **made_by, logits_rms=rms(prefill),
                  router_gap=gap if np.isfinite(gap) else None, noise=noise)
    ties = getattr(reference, "ties", 0)
    if ties:
        golden["ties"] = ties
    if run.transformers:
        golden["transformers_config"] = run.transformers
    if run.transformers is not None and reference.config["model_type"] in SECOND:
        other = Reference(folder)
        other.start()
        golden["second_oracle"] = versions() | dict(
            difference=float(np.abs(other.feed(prompt) - prefill).max()) / rms(prefill))
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    return gap if (ties > 0) == run.ties else 0.0, noise


def compute_again(folder):
    """Recomputes the golden of a folder from its weights and prompt."""
    with tempfile.TemporaryDirectory() as temp:
        work = seeded.whole(folder, Path(temp) / folder.name)
        seed = json.loads((folder / "golden.json").read_text())["seed"]
        gap, noise = compute(work, Run.stored(folder), seed)
        for file in work.glob("golden.*"):
            shutil.copy(file, folder)
    print(f"{folder.name:26} router gap {gap:.1e}  noise {noise:.1e}", flush=True)


def make(folder, work, run_of):
    """Makes a golden of the tensors of the checkpoint in `work`, with the first seed whose margins are wide enough.
    `run_of` gives the run of a seed. If there is none, the widest may have half of them."""
    template, tried = seeded.measure(work), []

    def attempt(seed):
        """(recipe, margins over the least ones, text of the margins)"""
        recipe, run = copy.deepcopy(template) | dict(seed=seed), run_of(seed)
        # No seed avoids small gaps over thousands of rows. The last rows, which are stored, are
        # affected by few of them.
        ease = 1 if len(run.prompt) < LONG else 4 if len(run.prompt) < VERY_LONG else 100
        seeded.write(recipe, work)
        gap, noise = compute(work, run, seed)
        wide = np.inf if run.any_seed else min(gap / LEAST_ROUTER_GAP * ease, MOST_NOISE * min(ease, 4) / noise)
        return recipe, wide, f"seed {seed:3}  router gap {gap:.1e}  noise {noise:.1e}"

    for seed in SEEDS:
        recipe, wide, text = attempt(seed)
        if wide >= 1:
            break
        tried.append((wide, seed))
    else:
        recipe, wide, text = attempt(max(tried)[1])
        if wide < 0.5:
            raise SystemExit(f"{folder.name}: no seed below {SEEDS.stop} is wide enough: {text}")
    seeded.store(work, folder, recipe)
    kb = sum(f.stat().st_size for f in folder.iterdir()) / 1e3
    print(f"{folder.name:26} {kb:5.0f} kB  {text}", flush=True)


def make_case(folder, case):
    """Makes a case of cases.py."""
    vocab = case.config.get("text_config", case.config)["vocab_size"]

    def run_of(seed):
        prompt = np.random.default_rng(seed + 1).integers(2, min(vocab, 258), case.prompt).tolist()
        rows = case.keep or len(prompt)
        return Run(prompt, case.steps, rows, rows, any_seed=case.any_seed)

    with tempfile.TemporaryDirectory() as temp:
        work = Path(temp) / folder.name
        make_checkpoint(work, case, TEMPLATE)
        make(folder, work, run_of)


def make_like(folder, source):
    """Makes a golden of the tensors of a checkpoint from elsewhere, with the prompt of its golden. The reference must
    compute what is stored there, on the same weights."""
    run, before = Run.stored(source), outputs(source)
    with tempfile.TemporaryDirectory() as temp:
        work = seeded.whole(source, Path(temp) / folder.name)
        (work / seeded.RECIPE).unlink(missing_ok=True)
        if before:
            compute(work, run, seed=0)
            for name, now in outputs(work).items():
                was = before.get(name)
                if was is not None and now.dtype == np.float32 and np.abs(now - was).max() > SAME * rms(was):
                    raise SystemExit(f"{folder.name}: the reference computes another {name}")
        make(folder, work, lambda seed: run)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("cases", nargs="*", metavar="CASE")
    args.add_argument("--out", type=Path, default=GOLDENS)
    args.add_argument("--like", type=Path, metavar="FOLDER", help="make a golden of a checkpoint from elsewhere")
    args.add_argument("--again", action="store_true", help="keep the recipes and prompts, recompute the logits")
    args.add_argument("--weights", action="store_true", help="write goldens with their weights to --out")
    args.add_argument("--list", action="store_true", help="print the names of the cases")
    args = args.parse_args()
    if args.like:
        make_like(args.out / args.like.resolve().name, args.like.resolve())
        return
    if args.weights and args.out == GOLDENS:
        raise SystemExit("--weights needs --out: goldens are stored without them")
    if args.again or args.weights:
        for name in args.cases:
            seeded.whole(GOLDENS / name, args.out / name) if args.weights else compute_again(args.out / name)
        return
    if unknown := set(args.cases) - set(CASES):
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))} (see --list)")
    for name in args.cases or CASES:
        print(name) if args.list else make_case(args.out / name, CASES[name])


if __name__ == "__main__":
    main()
