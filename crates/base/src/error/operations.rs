//! Causes that belong to one operation: opening a model, planning memory, sessions, sampling,
//! images, tools.

use std::path::PathBuf;

use crate::kv_format::KvFormat;

/// Options with which a model cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Unknown eviction policy.
    #[error("there is no cache policy {name:?}: choose one of {known}")]
    UnknownPolicy {
        /// The given name.
        name: String,
        /// Names of all policies.
        known: String,
    },
    /// More mirrors than the expert reader can use.
    #[error("a model has at most {most} mirrors")]
    TooManyMirrors {
        /// Maximum number of mirrors.
        most: usize,
    },
    /// Mirrors of a built-in model.
    #[error("the model in the program has no mirrors: give --model")]
    BuiltInHasNoMirrors,
}

/// Budget below the floor, or sizes that no plan can have. Sizes are bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Budget below the floor of a pool.
    #[error(
        "{name} of {} MiB is below the floor of {} MiB{parts}; {advice}",
        budget >> 20, floor.div_ceil(1 << 20)
    )]
    BelowFloor {
        /// The budget: "a budget", "a budget of the device's own memory".
        name: &'static str,
        /// The given or default budget.
        budget: u64,
        /// Smallest budget with which the model runs.
        floor: u64,
        /// The parts of the floor, for users.
        parts: String,
        /// Ways to lower the floor or to raise the budget.
        advice: String,
    },
    /// Experts on the host computed by another device, on the exact path.
    #[error(
        "experts that the host computes are not exact, as the processor rounds differently from the card: \
         give --experts-on-host read, or leave --exact out"
    )]
    HostExpertsExact,
    /// Unknown way to compute experts in host memory.
    #[error("experts on the host are not computed by {name:?}: choose one of {known}")]
    UnknownExpertsOnHost {
        /// The given name.
        name: String,
        /// Names of all ways.
        known: String,
    },
    /// A recorded plan of experts that cannot be read or followed.
    #[error("{}: not a usable plan of experts: {problem}", path.display())]
    Recorded {
        /// Its file.
        path: PathBuf,
        /// The problem with it.
        problem: String,
    },
    /// Budget of a device's own memory above its size.
    #[error(
        "a budget of the device's own memory of {} MiB is more than the {} MiB that it has: give a smaller \
         --gpu-memory, or none for a safe share of it",
        budget >> 20, total >> 20
    )]
    DeviceBudget {
        /// The given budget.
        budget: u64,
        /// Size of the device's memory.
        total: u64,
    },
    /// Number of budgets that is not the number of cards.
    #[error(
        "{given} budgets of cards were given: give --gpu-memory one size, or one for each card, and \
         there are at most {most}"
    )]
    BudgetCount {
        /// Given budgets.
        given: usize,
        /// Number of cards.
        most: usize,
    },
    /// Name of a device that cannot be one of several cards.
    #[error(
        "{name:?} in a list of devices is no card: name graphics adapters as gpu:N, as `moeflux devices` \
         lists them"
    )]
    NotACard {
        /// The name.
        name: String,
    },
    /// Card that is named twice.
    #[error("{name} is named twice: a list of devices has each card once")]
    SameCard {
        /// The name.
        name: String,
    },
    /// Cards with memory of their own beside cards that share the host's.
    #[error(
        "{name} cannot compute with the cards before it: of them and it, some share the host's memory and \
         some have their own"
    )]
    MixedCards {
        /// The name.
        name: String,
    },
    /// Too many cards in a list.
    #[error("{given} cards were named: there are at most {most}")]
    CardCount {
        /// Number of named cards.
        given: usize,
        /// Maximum number.
        most: usize,
    },
    /// More cards than parts that a model can be divided into.
    #[error(
        "the model cannot be divided among {cards} cards, as its layers make at most {parts} parts: name \
         fewer cards with --device"
    )]
    TooManyCards {
        /// Number of cards.
        cards: usize,
        /// Parts of the model: layers, or runs of layers that share positions.
        parts: usize,
    },
    /// Expert too large for a binding of the device.
    #[error(
        "an expert of {} MiB is more than the device's kernels can see at once: give --device cpu",
        bytes.div_ceil(1 << 20)
    )]
    ExpertTooLarge {
        /// Size of a slot.
        bytes: u64,
    },
    /// Chunk, context or number of sessions of zero.
    #[error("a chunk and a context have at least one token, and a plan one session")]
    Empty,
    /// Context beyond the model's positions.
    #[error("a context of {context} was asked for, but the model has {positions} positions")]
    ContextTooLong {
        /// The requested context.
        context: usize,
        /// Positions of the model.
        positions: usize,
    },
    /// Requested slots that are fewer than a layer needs, or more than fit.
    #[error(
        "{asked} slots were asked for: a layer needs {need}, and the budget holds {most} of {all} experts"
    )]
    Slots {
        /// Requested slots.
        asked: usize,
        /// Experts per token of a layer.
        need: usize,
        /// Slots that the budget holds.
        most: usize,
        /// Experts of the model.
        all: usize,
    },
    /// Requested host slots beside a card's own that are none, or more than fit.
    #[error(
        "{asked} slots on the host were asked for: there must be one, and the budget holds {most}"
    )]
    HostSlots {
        /// Requested slots.
        asked: usize,
        /// Slots that the budget holds.
        most: usize,
    },
}

/// Tokens or sessions that a step or another call on a session cannot take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// No tokens.
    #[error("there are no tokens: the prompt is empty")]
    NoTokens,
    /// A state to save, of weights whose digests are not known to be right.
    #[error(
        "the model is still being downloaded, and its states are saved once all weights have \
         their digests: save it later"
    )]
    Arriving,
    /// Token id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab}")]
    TokenId {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// More tokens than the context.
    #[error("{tokens} tokens do not fit the context of {context}: {advice}")]
    ContextFull {
        /// Tokens of the session, with the new ones.
        tokens: usize,
        /// Positions per session.
        context: usize,
        /// Ways out.
        advice: String,
    },
    /// A text of more tokens than the context, refused before all of it became tokens.
    #[error(
        "the text has at least {tokens} tokens, more than the context of {context}: shorten it, or \
         give a larger --ctx if model and memory allow"
    )]
    PromptTooLong {
        /// Tokens up to which the text was read.
        tokens: usize,
        /// Positions per session.
        context: usize,
    },
    /// More tokens than a step of the memory plan has room for.
    #[error("a step of {rows} tokens, where the plan has room for {chunk}: give --chunk")]
    StepTooLarge {
        /// Tokens of all sessions.
        rows: usize,
        /// Tokens per step.
        chunk: usize,
    },
    /// Session of another engine in a step.
    #[error("a session of another engine in a step: give each engine its own")]
    OtherEngineInStep,
    /// Session of another engine in a scheduler.
    #[error("a session of another engine in a batch: use one scheduler per engine")]
    OtherEngineInBatch,
    /// Mark of another engine.
    #[error("the mark belongs to another engine: use one of this session's engine")]
    OtherEngineOfMark,
    /// Truncation to more tokens than there are.
    #[error("a session of {had} tokens cannot be truncated to {len}")]
    TruncatedToMore {
        /// Tokens of the session.
        had: usize,
        /// Requested tokens.
        len: usize,
    },
    /// Images for a model of text alone.
    #[error("expected text, got images: the model takes none, or its checkpoint lacks the tower")]
    NoImages,
    /// Image that does not fit the model or the prompt.
    #[error("image at token {place}: {problem}")]
    WrongImage {
        /// Index of its first token.
        place: usize,
        /// Expected and found values.
        problem: String,
    },
    /// Images whose rows take more memory than the plan has for them.
    #[error(
        "the images of the prompt take {} MiB, the memory plan has {} MiB for them: show fewer or \
         smaller ones, or give --image-memory",
        bytes.div_ceil(1 << 20), room >> 20
    )]
    ImageRows {
        /// Bytes of their rows.
        bytes: u64,
        /// Bytes of the plan for rows of images.
        room: u64,
    },
    /// Images before the tokens of a step that are not the session's own.
    #[error("the images before token {position} are not the session's: give all of its images")]
    OtherImages {
        /// Index of the first token of the step.
        position: usize,
    },
    /// Truncation of a recurrent state that would have to compute images again.
    #[error("truncating to {len} tokens computes images again: use sync with the images")]
    TruncatedImages {
        /// Requested tokens.
        len: usize,
    },
    /// Session whose states do not match its tokens, because resetting it failed.
    #[error("a session whose reset failed cannot be marked, forked or saved: reset it first")]
    FailedReset,
    /// More sessions than planned.
    #[error(
        "the memory plan has room for {planned} session(s) at a time: drop one, or plan for more"
    )]
    TooManySessions {
        /// Planned sessions.
        planned: usize,
    },
    /// Routing that leaves no slot for an expert.
    #[error("layer {layer}: no slot is free for an expert")]
    NoFreeSlot {
        /// The layer.
        layer: usize,
    },
    /// Format for a snapshot that is wider than the session's.
    #[error(
        "a KV cache in {} cannot be saved in {}, which has more bits: leave the format out",
        own.name(), wanted.name()
    )]
    WiderKvFormat {
        /// Format of the session.
        own: KvFormat,
        /// Requested format.
        wanted: KvFormat,
    },
}

/// Sampling parameters, stop strings or logits that cannot be sampled from.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// Parameter out of range.
    #[error("{name} is {value}: it {rule}")]
    Parameter {
        /// The parameter.
        name: &'static str,
        /// Its value.
        value: f32,
        /// Its range: "must be 0 or more".
        rule: &'static str,
    },
    /// Empty stop string.
    #[error("a stop string is empty: omit it, or give it some text")]
    EmptyStopString,
    /// Vocabulary that is empty or too large.
    #[error("cannot sample from a vocabulary of {vocab} tokens")]
    Vocabulary {
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// Wrong number of logits.
    #[error("{given} logits for a vocabulary of {vocab} tokens")]
    LogitCount {
        /// Given logits.
        given: usize,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// Logit that is NaN or plus infinity.
    #[error("the logit of token {id} is {logit}; the model's weights may be damaged")]
    InvalidLogit {
        /// The token.
        id: usize,
        /// Its logit.
        logit: f32,
    },
    /// Logits that are all minus infinity.
    #[error("all tokens are banned: every logit is minus infinity")]
    AllBanned,
    /// Token of a script that another mask forbids.
    #[error(
        "turn {turn} of the script: token {position}, id {token}, is forbidden by another mask"
    )]
    ForcedTokenForbidden {
        /// Number of the answer, from 1.
        turn: usize,
        /// Index of the token in the answer.
        position: usize,
        /// Id of the token.
        token: u32,
    },
}

/// Constraints of answers that cannot be compiled or followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// Memory plan without a line for grammars.
    #[error("the memory plan has no room for grammars: raise the memory budget")]
    NoRoom,
    /// Constraint that is not valid, or that cannot be enforced.
    #[error("{}{problem}", at(path))]
    Invalid {
        /// Path of the keyword in the schema; empty for the whole constraint.
        path: String,
        /// The problem and its remedy.
        problem: String,
    },
    /// Constraint that takes too long to compile.
    #[error("the grammar takes more than {milliseconds} ms to compile: simplify it")]
    TooSlow {
        /// Time limit.
        milliseconds: u128,
    },
    /// Too many constraints that are being compiled.
    #[error("other grammars are being compiled: try again later")]
    Busy,
    /// Answer that the grammar cannot follow any more.
    #[error("the answer cannot follow its grammar: {problem}")]
    Stopped {
        /// The problem.
        problem: String,
    },
}

/// A path before a problem.
fn at(path: &str) -> String {
    if path.is_empty() { String::new() } else { format!("{path}: ") }
}

/// Images that cannot be decoded, or that a model cannot take. Sizes are pixels after rotation by
/// the file's orientation, except in limits of the decoder.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// File above the limit of bytes.
    #[error(
        "expected an image file of at most {most} bytes, got {bytes}: scale the image down, or save it \
         with more compression"
    )]
    TooManyBytes {
        /// Size of the file.
        bytes: usize,
        /// The limit.
        most: usize,
    },
    /// Bytes of a format, or of a kind of it, that is not read.
    #[error(
        "expected a PNG, JPEG, GIF, WebP, BMP or TIFF image, got {found}: convert it, for example to PNG \
         with 8 bits a sample"
    )]
    Format {
        /// The bytes, as far as they are recognised: "an AVIF image".
        found: String,
    },
    /// Size in the file's header above the limit of pixels.
    #[error(
        "expected an image of at most {most_pixels} pixels, and of {most_side} a side, got {width} x \
         {height}: scale it down"
    )]
    TooLarge {
        /// Width in the header.
        width: u32,
        /// Height in the header.
        height: u32,
        /// Maximum width times height.
        most_pixels: u64,
        /// Maximum width, and maximum height.
        most_side: u32,
    },
    /// Image whose decoder would hold more memory than the limit.
    #[error(
        "expected an image that is decoded within {most} bytes, got a {format} image that takes more: \
         scale it down, or save it with 8 bits a sample, JPEG as baseline"
    )]
    Memory {
        /// Name of the format: "PNG".
        format: &'static str,
        /// The limit in bytes.
        most: u64,
    },
    /// Bytes that are cut short or contradict themselves.
    #[error("expected a whole {format} image, got a damaged or cut one ({problem}): save it again")]
    Damaged {
        /// Name of the format: "PNG".
        format: &'static str,
        /// The decoder's complaint.
        problem: String,
    },
    /// Size that the model's processor cannot take.
    #[error("expected {expected}, got an image of {width} x {height}: {remedy}")]
    Size {
        /// The rule of the processor.
        expected: String,
        /// Width of the image.
        width: u32,
        /// Height of the image.
        height: u32,
        /// The remedy.
        remedy: &'static str,
    },
}

/// Options or folders that a tool cannot use: probes, traces, packing, synthetic checkpoints,
/// perplexity.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// Pages in the page cache of a built-in model, which has no files.
    #[error(
        "the model is read from the program itself, so there are no files whose pages could be dropped"
    )]
    NoFiles,
    /// System without a call to drop pages from its page cache.
    #[error("this system has no way to drop a file's pages from its cache: --cold needs Linux")]
    PagesCannotBeDropped,
    /// Model whose routing cannot be recorded.
    #[error("the routing of this model cannot be recorded: {problem}")]
    Routing {
        /// The reason.
        problem: String,
    },
    /// Perplexity of fewer than two tokens.
    #[error("a perplexity needs a text and a context of two tokens at least")]
    TextTooShort,
    /// Folder that cannot take the output.
    #[error("{}: {problem}", path.display())]
    OutputFolder {
        /// The folder.
        path: PathBuf,
        /// The problem and its remedy.
        problem: String,
    },
    /// No memory for a piece of a file.
    #[error("there is no memory for a piece of {bytes} bytes")]
    NoMemory {
        /// Size of the piece.
        bytes: usize,
    },
    /// Unknown preset of a synthetic checkpoint.
    #[error("there is no preset {name:?}; presets are {known}")]
    UnknownPreset {
        /// The given name.
        name: String,
        /// Names of all presets.
        known: String,
    },
    /// Unknown recipe of a synthetic GGUF file.
    #[error("there is no type {name:?}; types are {known}")]
    UnknownRecipe {
        /// The given name.
        name: String,
        /// Names of all recipes.
        known: String,
    },
    /// Skew of a synthetic router out of range.
    #[error("a skew of {skew} is not within 0 and {most}")]
    Skew {
        /// The given skew.
        skew: f64,
        /// The largest one.
        most: f64,
    },
    /// Config of which no synthetic checkpoint can be made.
    #[error("config: {problem}")]
    Config {
        /// The problem.
        problem: String,
    },
    /// Number of layers that the model does not have.
    #[error("{layers} layers requested; the model has {total}, and at least 1 is needed")]
    Layers {
        /// Requested layers.
        layers: usize,
        /// Layers of the model.
        total: u64,
    },
    /// Tensor whose size overflows.
    #[error("tensor {name} of {shape:?} is too large")]
    TensorTooLarge {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
    },
}
