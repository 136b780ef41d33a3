//! `bench`: speed.

use std::{process::ExitCode, time::Instant};

use moeflux::{Engine, MemoryPlan, Sampler, Sampling, Stats, SystemMemory, Watch};
use serde::Serialize;

use crate::{
    WrongUse,
    args::BenchArgs,
    interrupt, load,
    out::{self, Table},
    progress::Ui,
    units,
};

/// One stretch of one repeat.
#[derive(Serialize)]
struct Measured {
    tokens: u64,
    seconds: f64,
    tokens_per_second: f64,
    bytes_per_token: f64,
    hit_rate: f64,
    stats: Stats,
}

#[derive(Serialize)]
struct Repeat {
    prefill: Option<Measured>,
    decode: Option<Measured>,
}

/// Of all repeats.
#[derive(Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

/// One stretch over all repeats.
#[derive(Serialize)]
struct Summary {
    tokens: usize,
    tokens_per_second: Spread,
    bytes_per_token: f64,
    hit_rate: f64,
    /// Share of the time in which computing waited for reads.
    stalled: f64,
    dispatches_per_token: f64,
    waits_per_token: f64,
    /// Share of the time in which the host waited for a GPU.
    waited: f64,
}

#[derive(Serialize)]
struct Report<'a> {
    model: String,
    device: &'a str,
    device_choice: &'a str,
    /// Kernels that the adapter was given by all repeats together.
    dispatches: u64,
    #[serde(skip)]
    on: String,
    load_seconds: f64,
    prefill: Option<Summary>,
    decode: Option<Summary>,
    peak_memory: u64,
    plan: &'a MemoryPlan,
    repeats: Vec<Repeat>,
    kernels: Vec<KernelShare>,
}

/// What one kernel of a GPU takes.
#[derive(Serialize)]
struct KernelShare {
    phase: &'static str,
    kernel: &'static str,
    dispatches_per_token: f64,
    microseconds_per_token: f64,
    microseconds_each: f64,
}

/// Runs `moeflux bench`.
///
/// # Errors
/// The model cannot be loaded or run.
pub(crate) fn run(args: &BenchArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let needed = args.prompt.saturating_add(args.tokens);
    if needed == 0 {
        return Err(WrongUse("--prompt 0 and --tokens 0 leave nothing to measure".into()).into());
    }
    let since = Instant::now();
    let at_least = (needed > moeflux::DEFAULT_CONTEXT).then_some(needed);
    let engine = load::engine(&args.engine, at_least, ui)?;
    engine.record_routing(args.trace.trace.as_deref())?;
    let load_seconds = since.elapsed().as_secs_f64();
    if engine.device().graphics {
        // Kernels are compiled when they are first needed.
        let _bar = ui.share("warming up");
        repeat((args.prompt, args.tokens.min(4)), &engine, 0, &mut |_| {})?;
    }
    let repeats = {
        let bar = ui.share("measuring");
        let n = args.repeat.get();
        (0..n)
            .map(|i| {
                repeat((args.prompt, args.tokens), &engine, i as u64, &mut |share| {
                    bar.share((i as f64 + share) / n as f64)
                })
            })
            .collect::<anyhow::Result<Vec<_>>>()?
    };
    let kernels = match args.profile {
        true => kernels(args, &engine)?,
        false => Vec::new(),
    };
    let model = match &args.engine.model.model {
        Some(folder) => folder.display().to_string(),
        None => "built-in tales-18m".to_owned(),
    };
    let device = engine.device();
    let measured = || repeats.iter().flat_map(|r| [&r.prefill, &r.decode]).flatten();
    let report = Report {
        model,
        device: &device.name,
        device_choice: &device.reason,
        dispatches: measured().map(|m| m.stats.dispatches).sum(),
        on: load::on(device, measured().map(|m| m.stats.dispatches).sum()),
        load_seconds,
        prefill: summary(repeats.iter().filter_map(|r| r.prefill.as_ref())),
        decode: summary(repeats.iter().filter_map(|r| r.decode.as_ref())),
        peak_memory: SystemMemory::now().peak,
        plan: engine.plan(),
        repeats,
        kernels,
    };
    match args.json {
        true => out::json(&report)?,
        false => out::write(report)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Times of a GPU's kernels, from one more run.
fn kernels(args: &BenchArgs, engine: &Engine) -> anyhow::Result<Vec<KernelShare>> {
    let mut all = Vec::new();
    for (phase, prompt, tokens) in [("prefill", args.prompt, 0), ("decode", 0, args.tokens)] {
        if prompt + tokens == 0 {
            continue;
        }
        engine.profile(true)?;
        repeat((prompt, tokens), engine, 0, &mut |_| {})?;
        let n = (prompt + tokens) as f64;
        all.extend(engine.profile(false)?.into_iter().map(|k| KernelShare {
            phase,
            kernel: k.kernel,
            dispatches_per_token: k.dispatches as f64 / n,
            microseconds_per_token: k.seconds * 1e6 / n,
            microseconds_each: k.seconds * 1e6 / k.dispatches as f64,
        }));
    }
    Ok(all)
}

fn repeat(
    (prompt, answer): (usize, usize),
    engine: &Engine,
    which: u64,
    progress: &mut dyn FnMut(f64),
) -> anyhow::Result<Repeat> {
    let armed = interrupt::arm();
    let mut random = Random(which);
    let vocab = engine.blueprint().vocab as u64;
    let mut tokens = |n: usize| -> Vec<u32> { (0..n).map(|_| (random.next() % vocab) as u32).collect() };
    let (prompt, answer) = (tokens(prompt), tokens(answer));
    let mut session = engine.session()?;
    let all = (prompt.len() + answer.len()) as f64;
    let mut sampler = Sampler::new(Sampling::greedy(), engine.blueprint().vocab)?;
    let mut measure =
        |steps: &mut dyn Iterator<Item = &[u32]>, done: usize| -> anyhow::Result<Option<Measured>> {
            let (before, since) = (session.stats(), Instant::now());
            let mut fed = done;
            for step in steps.filter(|s| !s.is_empty()) {
                let mut within = |share: f64| progress((fed as f64 + share * step.len() as f64) / all);
                let mut watch =
                    Watch { cancel: Some(armed.flag()), progress: Some(&mut within), ..Watch::default() };
                // What users wait for: the choice of the next token is part of it, whichever is fed next.
                session.next(step, &mut sampler, &mut watch)?;
                fed += step.len();
            }
            let (seconds, stats) = (since.elapsed().as_secs_f64(), session.stats().since(&before));
            Ok((stats.tokens > 0).then(|| Measured {
                tokens: stats.tokens,
                seconds,
                tokens_per_second: stats.tokens as f64 / seconds,
                bytes_per_token: stats.bytes_read as f64 / stats.tokens as f64,
                hit_rate: stats.hit_rate(),
                stats,
            }))
        };
    Ok(Repeat {
        prefill: measure(&mut [&prompt[..]].into_iter(), 0)?,
        decode: measure(&mut answer.chunks(1), prompt.len())?,
    })
}

/// Medians and spread; `None` when nothing was measured.
fn summary<'a>(measured: impl Iterator<Item = &'a Measured>) -> Option<Summary> {
    let all: Vec<&Measured> = measured.collect();
    let spread = |of: &dyn Fn(&Measured) -> f64| {
        let mut sorted: Vec<f64> = all.iter().map(|m| of(m)).collect();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            0 => (sorted[middle - 1] + sorted[middle]) / 2.0,
            _ => sorted[middle],
        };
        Some(Spread { median, min, max })
    };
    Some(Summary {
        tokens: all.first()?.tokens as usize,
        tokens_per_second: spread(&|m| m.tokens_per_second)?,
        bytes_per_token: spread(&|m| m.bytes_per_token)?.median,
        hit_rate: spread(&|m| m.hit_rate)?.median,
        stalled: spread(&|m| m.stats.stalled_ns as f64 / 1e9 / m.seconds)?.median,
        dispatches_per_token: spread(&|m| m.stats.dispatches as f64 / m.tokens as f64)?.median,
        waits_per_token: spread(&|m| m.stats.waits as f64 / m.tokens as f64)?.median,
        waited: spread(&|m| m.stats.waited_ns as f64 / 1e9 / m.seconds)?.median,
    })
}

impl std::fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let plan = self.plan;
        writeln!(f, "{}; {}; loaded in {:.2} s", self.model, self.on, self.load_seconds)?;
        writeln!(
            f,
            "budget {}, {}{}, chunks of {} tokens; {}\n",
            units::memory(plan.slots_limit()),
            units::plural(plan.slots as u64, "slot"),
            match plan.host_slots {
                0 => String::new(),
                host => format!(" and {host} on the host, of {}", units::memory(plan.budget)),
            },
            plan.chunk,
            units::plural(self.repeats.len() as u64, "repeat")
        )?;
        let mut table = Table::new(1);
        table.row(["", "tokens", "tok/s", "min", "max", "read per token", "hit rate", "stalled"]);
        for (what, summary) in [("prefill", &self.prefill), ("decode", &self.decode)] {
            if let Some(s) = summary {
                let speed = |x: f64| units::rate(x).trim_end_matches(" tok/s").to_owned();
                table.row([
                    what.to_owned(),
                    s.tokens.to_string(),
                    speed(s.tokens_per_second.median),
                    speed(s.tokens_per_second.min),
                    speed(s.tokens_per_second.max),
                    units::disk(s.bytes_per_token),
                    units::percent(s.hit_rate),
                    units::percent(s.stalled),
                ]);
            }
        }
        writeln!(f, "{table}")?;
        if let Some(decode) = self.decode.as_ref().filter(|d| d.dispatches_per_token > 0.0) {
            writeln!(
                f,
                "decode: {:.0} dispatches and {:.0} waits per token; the host waits for the GPU {} of the time\n",
                decode.dispatches_per_token,
                decode.waits_per_token,
                units::percent(decode.waited)
            )?;
        }
        if !self.kernels.is_empty() {
            let mut table = Table::new(2);
            table.row(["", "kernel", "per token", "us per token", "us each"]);
            for k in &self.kernels {
                table.row([
                    k.phase.to_owned(),
                    k.kernel.to_owned(),
                    format!("{:.2}", k.dispatches_per_token),
                    format!("{:.1}", k.microseconds_per_token),
                    format!("{:.1}", k.microseconds_each),
                ]);
            }
            writeln!(f, "{table}")?;
        }
        writeln!(f, "{}", load::peak(plan, self.peak_memory))
    }
}

/// SplitMix64: the same numbers everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}
