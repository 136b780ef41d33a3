//! `inspect`: contents of a checkpoint, and its memory plan.

use std::{collections::BTreeMap, process::ExitCode, time::Instant};

use anyhow::bail;
use moeflux::{
    Checkpoint, Error, MemoryPlan,
    base::PlanError,
    checkpoint::{GgufPart, GgufSummary, MatrixSource},
    experts::PageCache,
    model::blueprint::{
        Blueprint, BodyBlueprint, DrafterBlueprint, FeedForwardBlueprint, LayerBlueprint,
        MixerBlueprint, VisionBlueprint,
    },
    runtime::{BankPlace, ChosenDevice, LineName, PoolLine},
};
use moeflux_bench::{table::Table, units};
use serde::Serialize;

use crate::{
    args::{HostExpertsArg, InspectArgs},
    load, out,
    progress::Ui,
};

/// Report of a checkpoint. Sizes are bytes.
#[derive(Serialize)]
struct InspectReport {
    model: String,
    architecture: String,
    files: usize,
    /// Whether the checkpoint is a packed copy.
    packed: bool,
    gguf: Option<GgufReport>,
    open_seconds: f64,
    parameters: ParameterCounts,
    hidden: usize,
    vocab: usize,
    max_positions: usize,
    layers: LayerCounts,
    experts: Option<ExpertCounts>,
    tensors: Vec<TensorKind>,
    skipped: Vec<SkippedTensors>,
    /// Bytes of the head for multi-token prediction in the files, if it is read.
    drafter: Option<u64>,
    /// Vision tower, if it is read.
    #[serde(skip_serializing_if = "Option::is_none")]
    tower: Option<TowerSize>,
    sizes: ByteSizes,
    token_reads: TokenReads,
    device: Option<String>,
    device_choice: Option<String>,
    plan: Option<MemoryPlan>,
    plan_error: Option<String>,
    /// Part of the expert reads that goes through the page cache; all of it on file systems without
    /// direct I/O.
    page_cache: Option<PageCache>,
}

/// Report of a model in GGUF.
#[derive(Serialize)]
struct GgufReport {
    name: Option<String>,
    /// Name of the recipe: tensors may have other types.
    recipe: Option<String>,
    /// Number of keys of the metadata.
    keys: usize,
    parts: Vec<PartReport>,
}

/// Report of a GGUF file.
#[derive(Serialize)]
struct PartReport {
    file: String,
    /// Number of tensors by type.
    types: BTreeMap<String, usize>,
}

impl GgufReport {
    fn new(summary: &GgufSummary) -> Self {
        let part =
            |part: &GgufPart| PartReport { file: part.file.clone(), types: part.types.clone() };
        Self {
            name: summary.name.clone(),
            recipe: summary.recipe.clone(),
            keys: summary.keys,
            parts: summary.parts.iter().map(part).collect(),
        }
    }

    fn rows(&self, table: &mut Table) {
        let name = self.name.as_deref().unwrap_or("without a name");
        let recipe = self.recipe.as_deref().unwrap_or("unknown");
        let keys = units::plural(self.keys as u64, "key");
        table.row(["GGUF", &format!("{name}, recipe {recipe}, {keys} of metadata")]);
        for PartReport { file, types } in &self.parts {
            let types: Vec<_> = types.iter().map(|(name, n)| format!("{n} {name}")).collect();
            table.row(["", &format!("{file}: {}", types.join(", "))]);
        }
    }
}

#[derive(Serialize)]
struct ParameterCounts {
    total: u64,
    /// Parameters used per token.
    active: u64,
    /// Parameters in tables of rows, which do not count elsewhere.
    row_tables: u64,
}

/// Numbers of decoder layers by kind.
#[derive(Default, Serialize)]
struct LayerCounts {
    total: usize,
    attention: usize,
    sliding: usize,
    sparse: usize,
    latent: usize,
    sparse_latent: usize,
    delta_net: usize,
    mamba2: usize,
    short_conv: usize,
    compressed: usize,
    moe: usize,
    dense: usize,
}

#[derive(Serialize)]
struct ExpertCounts {
    /// Experts per layer; the maximum if layers differ.
    per_layer: usize,
    /// The minimum if layers differ, as those of pruned models may.
    fewest_per_layer: usize,
    total: usize,
    top_k: usize,
    shared: bool,
}

/// All matrices of one kind and format.
#[derive(Serialize)]
struct TensorKind {
    kind: &'static str,
    format: String,
    /// Bits per weight, including scales and biases.
    bits: f64,
    matrices: usize,
    parameters: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct SkippedTensors {
    what: String,
    bytes: u64,
}

/// Vision tower.
#[derive(Clone, Copy, Serialize)]
struct TowerSize {
    blocks: usize,
    /// Bytes of its matrices.
    bytes: u64,
}

impl TowerSize {
    /// The tower of a model that takes images.
    fn of(checkpoint: &Checkpoint, blueprint: &Blueprint) -> Option<Self> {
        blueprint.images?;
        let tower = VisionBlueprint::for_checkpoint(checkpoint).ok().flatten()?;
        let bytes = tower.matrices().map(|matrix| matrix.file_bytes() as u64).sum();
        Some(Self { blocks: tower.blocks.len(), bytes })
    }
}

#[derive(Serialize)]
struct ByteSizes {
    files: u64,
    dense: u64,
    /// Size of the largest expert.
    per_expert: u64,
    all_experts: u64,
    /// Tables of rows, which stay on disk.
    row_tables: u64,
}

/// Bytes read per token.
#[derive(Serialize)]
struct TokenReads {
    /// From memory.
    dense: u64,
    /// From slots, or from disk for misses.
    experts: u64,
    experts_count: usize,
}

/// Runs `moeflux inspect`.
///
/// # Errors
/// The checkpoint cannot be opened, or, after the report, the device does not exist.
pub(crate) fn run(args: &InspectArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let since = Instant::now();
    let checkpoint = match &args.preset {
        Some(preset) => load::preset(preset)?,
        None => load::checkpoint(&args.engine.model, &args.engine.reads.mirror, ui)?,
    };
    let blueprint = Blueprint::for_checkpoint(&checkpoint)?;
    let open_seconds = since.elapsed().as_secs_f64();
    let request = args.engine.request(&checkpoint, &blueprint);
    let plan = MemoryPlan::for_checkpoint(
        &checkpoint,
        &blueprint,
        &request,
        &args.engine.compute.options(),
        &HostExpertsArg::placement(args.engine.memory.experts_on_host.as_ref())?,
    );
    // A model that is too large for the machine is inspected all the same.
    let is_too_large = matches!(
        plan,
        Err(Error::Plan(
            PlanError::BelowFloor { .. }
                | PlanError::DeviceBudget { .. }
                | PlanError::ExpertTooLarge { .. }
        ))
    );
    let planned = plan.is_ok() || is_too_large;
    let model = match (&args.preset, &args.engine.model.model) {
        (Some(preset), _) => format!("{preset}, as synth would write it"),
        (None, Some(_)) => checkpoint.folder().display().to_string(),
        (None, None) => format!("built-in tales-18m, {}", checkpoint.folder().display()),
    };
    let mut report = InspectReport::new(model, &blueprint, &checkpoint, open_seconds, plan);
    let access = args.engine.reads.options().access;
    report.page_cache =
        report.plan.as_ref().map(|plan| plan.page_cache(access, &checkpoint, &blueprint));
    if args.json {
        out::json(&report)?;
    } else {
        out::write(&report)?;
        for note in report.plan.iter().flat_map(|plan| load::plan_notes(plan, &args.engine.memory))
        {
            out::line(format_args!("note: {note}"))?;
        }
    }
    match report.plan_error.filter(|_| !planned) {
        Some(error) => bail!("{error}"),
        None => Ok(ExitCode::SUCCESS),
    }
}

impl InspectReport {
    fn new(
        model: String,
        blueprint: &Blueprint,
        checkpoint: &Checkpoint,
        open_seconds: f64,
        planned: Result<(MemoryPlan, ChosenDevice), moeflux::Error>,
    ) -> Self {
        let tensors = kinds(blueprint);
        let vectors: u64 = blueprint.vectors().map(|v| v.len as u64).sum();
        let total = vectors + tensors.iter().map(|k| k.parameters).sum::<u64>();
        let idle: u64 = blueprint
            .moe_layers()
            .map(|(_, m)| {
                (m.experts.count - m.router.top_k.min(m.experts.count)) as u64
                    * expert_parameters(m)
            })
            .sum();
        let dense = dense_bytes(blueprint);
        let (planned, plan_error) = match planned {
            Ok(planned) => (Some(planned), None),
            Err(error) => (None, Some(error.to_string())),
        };
        let (plan, device) = planned.unzip();
        let (device, device_choice) = device.map(|d| (d.name, d.reason)).unzip();
        let counts = || blueprint.moe_layers().map(|(_, m)| m.experts.count);
        let experts =
            counts().min().zip(counts().max()).map(|(fewest_per_layer, per_layer)| ExpertCounts {
                per_layer,
                fewest_per_layer,
                total: blueprint.experts(),
                top_k: blueprint.max_top_k(),
                shared: blueprint.moe_layers().any(|(_, m)| m.shared.is_some()),
            });
        Self {
            model,
            architecture: blueprint.model_type.clone(),
            files: checkpoint.shards(),
            packed: checkpoint.is_packed(),
            gguf: checkpoint.gguf().map(GgufReport::new),
            open_seconds,
            parameters: ParameterCounts {
                total,
                active: total - idle,
                row_tables: blueprint.memories().map(|(_, m)| m.table.parameters()).sum(),
            },
            hidden: blueprint.hidden,
            vocab: blueprint.vocab,
            max_positions: blueprint.max_positions,
            layers: LayerCounts::new(&blueprint.layers),
            experts,
            tensors,
            drafter: blueprint.drafter.as_ref().map(DrafterBlueprint::file_bytes),
            tower: TowerSize::of(checkpoint, blueprint),
            skipped: blueprint
                .skipped
                .iter()
                .map(|(what, bytes)| SkippedTensors { what: what.clone(), bytes: *bytes })
                .collect(),
            sizes: ByteSizes {
                files: checkpoint.total_bytes(),
                dense,
                per_expert: blueprint.slot_bytes() as u64,
                all_experts: blueprint.experts_bytes(),
                row_tables: blueprint.row_tables_bytes(),
            },
            token_reads: TokenReads {
                dense: dense - embedding_bytes(blueprint),
                experts: blueprint.experts_per_token_bytes(),
                experts_count: blueprint.experts_per_token(),
            },
            device,
            device_choice,
            plan,
            plan_error,
            page_cache: None,
        }
    }
}

impl LayerCounts {
    fn new(layers: &[LayerBlueprint]) -> Self {
        let mut counts = Self { total: layers.len(), ..Self::default() };
        for sub_block in layers.iter().flat_map(|layer| &layer.sub_blocks) {
            let count = match &sub_block.body {
                BodyBlueprint::Mixer(MixerBlueprint::Gqa(g)) if g.shape.window.is_some() => {
                    &mut counts.sliding
                }
                BodyBlueprint::Mixer(MixerBlueprint::Gqa(g)) if g.indexer.is_some() => {
                    &mut counts.sparse
                }
                BodyBlueprint::Mixer(MixerBlueprint::Gqa(_)) => &mut counts.attention,
                BodyBlueprint::Mixer(MixerBlueprint::Mla(m)) if m.sparse.is_some() => {
                    &mut counts.sparse_latent
                }
                BodyBlueprint::Mixer(MixerBlueprint::Mla(_)) => &mut counts.latent,
                BodyBlueprint::Mixer(MixerBlueprint::Compressed(c)) => match c.compressor {
                    Some(_) => &mut counts.compressed,
                    None => &mut counts.sliding,
                },
                BodyBlueprint::Mixer(MixerBlueprint::DeltaNet(_)) => &mut counts.delta_net,
                BodyBlueprint::Mixer(MixerBlueprint::Mamba2(_)) => &mut counts.mamba2,
                BodyBlueprint::Mixer(MixerBlueprint::ShortConv(_)) => &mut counts.short_conv,
                BodyBlueprint::FeedForward(FeedForwardBlueprint::Moe(_)) => &mut counts.moe,
                BodyBlueprint::FeedForward(FeedForwardBlueprint::Dense(_)) => &mut counts.dense,
            };
            *count += 1;
        }
        counts
    }
}

fn dense_bytes(blueprint: &Blueprint) -> u64 {
    let matrices = blueprint.matrices().map(bytes).sum::<u64>();
    let segments = blueprint.vectors().map(|v| &v.segment).chain(blueprint.integers());
    matrices + segments.map(|s| s.bytes as u64).sum::<u64>()
}

/// Bytes of an untied embedding: a token reads only one row of it.
fn embedding_bytes(blueprint: &Blueprint) -> u64 {
    if blueprint.head.is_some() { bytes(&blueprint.embed) } else { 0 }
}

fn bytes(matrix: &MatrixSource) -> u64 {
    matrix.file_bytes() as u64
}

fn expert_parameters(moe: &moeflux::model::blueprint::MoeBlueprint) -> u64 {
    let shape = &moe.experts.shape;
    let biases =
        if shape.output_bias.is_some() { shape.matrices().map(|m| m.rows).sum() } else { 0 };
    biases as u64 + shape.matrices().map(|m| m.rows as u64 * m.cols as u64).sum::<u64>()
}

/// All matrices by kind and format.
fn kinds(blueprint: &Blueprint) -> Vec<TensorKind> {
    let mut kinds = TensorKinds::default();
    kinds.add("embedding", &[&blueprint.embed]);
    for (_, memory) in blueprint.memories() {
        kinds.add("n-gram memory", &[&memory.key_proj, &memory.value_proj]);
    }
    for sub_block in blueprint.layers.iter().flat_map(|layer| &layer.sub_blocks) {
        kinds.add("hyper-connections", &sub_block.input.matrices());
        match &sub_block.body {
            BodyBlueprint::Mixer(mixer) => {
                let kind = match mixer {
                    MixerBlueprint::Gqa(_) => "attention",
                    MixerBlueprint::Mla(_) => "latent attention",
                    MixerBlueprint::Compressed(_) => "compressed attention",
                    MixerBlueprint::DeltaNet(_) => "delta-net",
                    MixerBlueprint::Mamba2(_) => "Mamba-2",
                    MixerBlueprint::ShortConv(_) => "short convolution",
                };
                kinds.add(kind, &mixer.matrices());
            }
            BodyBlueprint::FeedForward(FeedForwardBlueprint::Dense(m)) => {
                kinds.add("dense MLP", &m.matrices().collect::<Vec<_>>());
            }
            BodyBlueprint::FeedForward(FeedForwardBlueprint::Moe(moe)) => {
                kinds.add("router", &[&moe.router.weight.weight]);
                if let Some(latent) = &moe.latent {
                    kinds.add("latent of experts", &[&latent.down_proj, &latent.up_proj]);
                }
                if let Some(shared) = &moe.shared {
                    kinds.add("shared expert", &shared.mlp.matrices().collect::<Vec<_>>());
                    kinds.add("shared expert's gate", &shared.gate.iter().collect::<Vec<_>>());
                }
                let shape = &moe.experts.shape;
                for matrix in shape.matrices() {
                    let expert_bytes = matrix.plane_bytes().map_or(0, |p| p.total()) as u64;
                    let count = moe.experts.count;
                    let parameters = matrix.rows as u64 * matrix.cols as u64 * count as u64;
                    kinds.count(
                        "experts",
                        matrix.format.to_string(),
                        MatrixCounts {
                            matrices: count as u64,
                            parameters,
                            bytes: expert_bytes * count as u64,
                        },
                    );
                }
            }
        }
    }
    kinds.add("hyper-connections", &blueprint.output.matrices());
    kinds.add("head", &blueprint.head.iter().collect::<Vec<_>>());
    kinds.finish()
}

/// Counts by kind, in order of appearance, and format name.
#[derive(Default)]
struct TensorKinds(Vec<(&'static str, BTreeMap<String, MatrixCounts>)>);

#[derive(Clone, Copy, Default)]
struct MatrixCounts {
    matrices: u64,
    parameters: u64,
    bytes: u64,
}

impl TensorKinds {
    fn add(&mut self, kind: &'static str, matrices: &[&MatrixSource]) {
        for m in matrices {
            let parameters = m.shape.rows as u64 * m.shape.cols as u64;
            let counts = MatrixCounts { matrices: 1, parameters, bytes: bytes(m) };
            self.count(kind, m.shape.format.to_string(), counts);
        }
    }

    fn count(&mut self, kind: &'static str, format: String, more: MatrixCounts) {
        let index = self.0.iter().position(|(k, _)| *k == kind).unwrap_or_else(|| {
            self.0.push((kind, BTreeMap::new()));
            self.0.len() - 1
        });
        let counts = self.0[index].1.entry(format).or_default();
        counts.matrices += more.matrices;
        counts.parameters += more.parameters;
        counts.bytes += more.bytes;
    }

    fn finish(self) -> Vec<TensorKind> {
        let kind = |(kind, formats): (&'static str, BTreeMap<String, MatrixCounts>)| {
            formats.into_iter().map(
                move |(format, MatrixCounts { matrices, parameters, bytes })| TensorKind {
                    kind,
                    format,
                    bits: bytes as f64 * 8.0 / parameters.max(1) as f64,
                    matrices: matrices as usize,
                    parameters,
                    bytes,
                },
            )
        };
        self.0.into_iter().flat_map(kind).collect()
    }
}

impl std::fmt::Display for InspectReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let disk = |bytes: u64| units::disk(bytes as f64);
        let mut head = Table::new(2);
        head.row(["model", &self.model]);
        head.row(["architecture", &self.architecture]);
        let (total, active) =
            (units::count(self.parameters.total), units::count(self.parameters.active));
        let tables = match self.parameters.row_tables {
            0 => String::new(),
            tables => format!(", plus {} in tables of rows", units::count(tables)),
        };
        head.row(["parameters", &format!("{total}, {active} active per token{tables}")]);
        let files = units::plural(self.files as u64, "file");
        head.row([
            "weights",
            &format!(
                "{files}, {}, opened in {}",
                disk(self.sizes.files),
                units::time(self.open_seconds)
            ),
        ]);
        if let Some(gguf) = &self.gguf {
            gguf.rows(&mut head);
        }
        if self.packed {
            head.row(["packed", "one aligned record per expert, with its digest"]);
        }
        let l = &self.layers;
        let parts = [
            (l.attention, "attention"),
            (l.sliding, "sliding attention"),
            (l.sparse, "sparse attention"),
            (l.latent, "latent attention"),
            (l.sparse_latent, "sparse latent attention"),
            (l.delta_net, "gated delta-net"),
            (l.mamba2, "Mamba-2"),
            (l.short_conv, "short convolution"),
            (l.compressed, "compressed attention"),
            (l.moe, "with experts"),
            (l.dense, "with a dense MLP"),
        ];
        let parts: Vec<String> =
            parts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
        head.row(["layers", &format!("{}: {}", l.total, parts.join(", "))]);
        if let Some(e) = &self.experts {
            let shared = if e.shared { ", and a shared one" } else { "" };
            let fewest = match e.fewest_per_layer < e.per_layer {
                true => format!("{} to ", e.fewest_per_layer),
                false => String::new(),
            };
            head.row([
                "experts",
                &format!("{fewest}{} per layer, {} per token{shared}", e.per_layer, e.top_k),
            ]);
        }
        head.row([
            "width",
            &format!("{} hidden, {} tokens in the vocabulary", self.hidden, self.vocab),
        ]);
        head.row(["positions", &self.max_positions.to_string()]);
        if let Some(bytes) = self.drafter {
            let what = format!("head for multi-token prediction, {}", disk(bytes));
            head.row(["drafts", &what]);
        }
        if let Some(TowerSize { blocks, bytes }) = self.tower {
            head.row(["images", &format!("tower of {blocks} blocks, {}", disk(bytes))]);
        }
        for s in &self.skipped {
            head.row(["skipped", &format!("{}, {}", s.what, disk(s.bytes))]);
        }
        writeln!(f, "{head}")?;

        let mut tensors = Table::new(2);
        tensors.head(["tensors", "format", "bits per weight", "parameters", "size"]);
        for k in &self.tensors {
            let bits = format!("{:.2}", k.bits);
            tensors.row([k.kind, &k.format, &bits, &units::count(k.parameters), &disk(k.bytes)]);
        }
        writeln!(f, "{tensors}")?;

        let mut sizes = Table::new(1);
        sizes.row(["dense weights", &disk(self.sizes.dense)]);
        if let Some(e) = &self.experts {
            sizes.row(["one expert", &disk(self.sizes.per_expert)]);
            sizes.row([format!("all {} experts", e.total), disk(self.sizes.all_experts)]);
        }
        let t = &self.token_reads;
        if self.sizes.row_tables > 0 {
            sizes.row(["tables of rows, on disk", &disk(self.sizes.row_tables)]);
        }
        sizes.row([format!("one token reads: {} experts", t.experts_count), disk(t.experts)]);
        sizes.row(["one token reads: dense weights", &disk(t.dense)]);
        writeln!(f, "{sizes}")?;

        match (&self.plan, &self.plan_error) {
            (Some(plan), _) => {
                if let (Some(device), Some(why)) = (&self.device, &self.device_choice) {
                    writeln!(f, "computed on {device} ({why})")?;
                }
                write_plan(f, plan, self.experts.as_ref().map_or(0, |e| e.total))?;
                let way = match self.page_cache {
                    Some(PageCache::Nothing) => "past the system's page cache",
                    Some(PageCache::ReadAgain) => {
                        "past the system's page cache the first time, and through it when they are read again"
                    }
                    Some(PageCache::Everything) | None => "through the system's page cache",
                };
                writeln!(f, "experts are read {way}")
            }
            (None, error) => {
                writeln!(f, "memory plan: there is none: {}", error.as_deref().unwrap_or(""))
            }
        }
    }
}

fn write_plan(
    f: &mut std::fmt::Formatter<'_>,
    plan: &MemoryPlan,
    experts: usize,
) -> std::fmt::Result {
    let mut table = Table::new(1);
    // The host first, as every plan has it.
    let several = plan.cards().len() > 1;
    let of_cards = plan.cards().iter().enumerate();
    for (card, pool) in std::iter::once((0, plan.host())).chain(of_cards) {
        let budget = units::memory(pool.budget);
        let title = match pool.place {
            BankPlace::Host => format!("memory plan for {budget}"),
            BankPlace::Card if several => {
                let layers = plan.card_of_layer().iter().filter(|of_layer| **of_layer == card);
                let layers = units::plural(layers.count() as u64, "layer");
                format!("and for {budget} of card {card}, with {layers}")
            }
            BankPlace::Card => format!("and for {budget} of the card's own"),
        };
        table.row([title, String::new()]);
        // Slots of the sizes of other cards.
        let is_used = |line: &&PoolLine| {
            !several || line.name != LineName::Slots || line.count > 0 || pool.slots() == 0
        };
        let lines = pool.lines.iter().filter(is_used);
        for line in lines.filter(|line| line.name != LineName::Marks || line.bytes() > 0) {
            let label = match line.name {
                LineName::Process => "program".to_owned(),
                LineName::Staging => "logits, reads in flight".to_owned(),
                LineName::Reserved => "server".to_owned(),
                LineName::Rows => "rows of tables, of tokens in a step".to_owned(),
                LineName::Images => "images, at --image-max-tokens".to_owned(),
                LineName::Grammars => "grammars".to_owned(),
                LineName::Dense => "dense weights".to_owned(),
                LineName::State => format!("state of {} positions", plan.context),
                LineName::Scratch if pool.place == BankPlace::Host && plan.card().is_some() => {
                    format!("{} experts that it computes", plan.computed_on_host())
                }
                LineName::Scratch => format!("scratch for {} rows", plan.chunk),
                LineName::Slots if pool.slots_by_size().len() > 1 => {
                    format!("{} slots of {}", line.count, units::memory(line.each))
                }
                LineName::Slots => format!("{} slots, of {experts} experts", line.count),
                LineName::Marks => "prefix cache".to_owned(),
                LineName::PrefixIndex => "tokens of the prefix cache".to_owned(),
            };
            table.row([format!("  {label}"), units::memory(line.bytes())]);
        }
        table.row(["  together", &units::memory(pool.total())]);
    }
    write!(f, "{table}")
}
