//! Saving a session to a snapshot and restoring it.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use moeflux_base::{Error, SessionError, SnapshotProblem, setters};
use moeflux_compute::{KvFormat, Span, State, StateShape};
use moeflux_model::{
    checkpoint::ModelId,
    seam::{LayerState, StateEntries},
};

use crate::{
    runtime::{contents::ContentDigest, control::StepControl},
    session::{
        engine::Engine,
        mark::{Mark, MarkState},
        model_files::ModelIdentity,
        prefix_key::{PrefixKey, Prompt},
        session::{Session, Synced},
        snapshot::{
            SavedState, Snapshot, SnapshotContents, SnapshotFolder, SnapshotRequirements,
            SnapshotWriter,
        },
        timeline::Timeline,
    },
};

/// Bytes copied at once while a session is saved or restored.
const COPY_BYTES: usize = 4 << 20;

/// Number that no division of experts has: for states that were computed by several, or by an
/// earlier one than the engine's.
const OTHER_DIVISION: &str = "other";

/// Options of a snapshot, besides the tokens, logits and states that it always holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotOptions {
    /// Save the list of experts in memory, so that a restored session starts with a warm cache.
    /// [`Session::restore`] reads them before it returns, up to one per slot. With slots of
    /// gigabytes and a short prompt this delays the first token.
    pub hot_experts: bool,
    /// Element format of the KV cache in the file. Default: that of the session, bit for bit. A
    /// smaller format makes a smaller file that is marked lossy. The saved session does not change;
    /// a session restored from the file is [`Session::is_lossy`]. Recurrent states and logits are
    /// always saved in full precision.
    pub kv_format: Option<KvFormat>,
}

setters!(SnapshotOptions {
    hot_experts: bool,
    kv_format: impl Into<Option<KvFormat>>,
});

impl Session {
    /// Saves the session to a file atomically: a temporary file replaces an older snapshot once all
    /// of it is on disk. Returns its bytes.
    ///
    /// # Errors
    /// The file cannot be written, or the disk is full; an older file stays unchanged. Also if
    /// `options.kv_format` has more bits than the session.
    pub fn snapshot(&self, path: impl AsRef<Path>, options: SnapshotOptions) -> Result<u64, Error> {
        self.mark()?.save(path.as_ref(), options, None, u64::MAX)
    }

    /// Replaces the session's state by that of a file. The whole file is verified and read before
    /// the session changes. Saved hot experts are read as far as slots allow. Afterwards
    /// [`Session::is_lossy`] says whether the file had a reduced KV format.
    ///
    /// # Errors
    /// [`Error::Snapshot`] if the file is not from [`Session::snapshot`], has another version, is
    /// truncated or damaged, or belongs to another model or other settings. Also if the file cannot
    /// be read, or if the states do not fit beside the session's current ones, which
    /// [`Session::reset`] frees. The session then stays unchanged.
    pub fn restore(&mut self, path: impl AsRef<Path>) -> Result<(), Error> {
        let snapshot = Snapshot::open(path.as_ref())?;
        let own = self.engine.kv_format();
        // An unknown or wider stored format fails the check below.
        let stored =
            snapshot.header().stored.as_deref().and_then(|name| KvFormat::by_name(name).ok());
        let kv_format = stored.filter(|kv_format| !kv_format.is_wider_than(own)).unwrap_or(own);
        snapshot.fits(&self.engine.expectation(kv_format)?)?;
        let PrefixKey { tokens, contents } = snapshot.key();
        let takes_images = self.engine.blueprint().images.is_some();
        let is_known = |content: &ContentDigest| takes_images && content.grid.is_some();
        if !contents.iter().all(is_known) {
            let problem = match takes_images {
                true => "it has contents other than images, this session can have none",
                false => "it has images, the model of this session takes none",
            };
            let problem = problem.to_owned();
            return Err(Error::snapshot(path.as_ref(), SnapshotProblem::OtherSettings(problem)));
        }
        snapshot.verify()?;
        let logits = snapshot.logits()?.unwrap_or_default();
        let hot = snapshot.hot()?;
        let written = usize::try_from(snapshot.header().written).unwrap_or(usize::MAX);
        let (tokens, contents) = (tokens.to_vec(), contents.to_vec());
        let is_lossy = snapshot.header().lossy && !own.is_lossy();
        let has_other_placement =
            snapshot.header().has_other_placement(self.engine.plan().experts_number().as_deref());
        let loaded =
            Timeline { tokens, contents, logits, written, is_lossy, ..Timeline::default() };
        let saved: Vec<u64> = snapshot.header().states.iter().map(|s| s.entries).collect();
        if saved_states(&self.engine, &loaded, kv_format).iter().map(|s| s.entries).ne(saved) {
            let what = "its states, which do not match its tokens".into();
            return Err(Error::snapshot(path.as_ref(), SnapshotProblem::Damaged { what }));
        }
        let engine = self.engine.clone();
        // An empty session is restored in place: there may be no room for a second set of states.
        let is_empty = self.timeline.tokens.is_empty();
        let mut timeline = match is_empty {
            true => Timeline {
                states: std::mem::take(&mut self.timeline.states),
                corrections: engine.lock().corrections,
                ..Timeline::default()
            },
            false => engine.lock().new_timeline(engine.blueprint(), &engine.plan())?,
        };
        timeline.tokens = loaded.tokens;
        timeline.contents = loaded.contents;
        timeline.logits = loaded.logits;
        timeline.written = written;
        timeline.is_lossy = is_lossy;
        timeline.has_other_placement = has_other_placement;
        let spans = state_spans(&engine, &timeline);
        let (mut room, mut converted) = (vec![0; COPY_BYTES], Vec::new());
        let read =
            for_each_piece(&engine, &timeline, |StatePiece { index, state, shape, entries }| {
                let mut runtime = engine.lock();
                // Reserves for everything that is read, so that the first states leave room for the
                // rest.
                runtime.evict_until(|device| {
                    device
                        .state_need(&mut spans.iter().copied())
                        .map_err(Error::at(|| "reading a session"))
                })?;
                let entry_bytes = shape.entry_bytes(kv_format);
                let room = &mut room[..entries.len() * entry_bytes];
                snapshot.read_state(index, entries.start as u64 * entry_bytes as u64, room)?;
                let bytes = if kv_format == own {
                    room
                } else {
                    converted.resize(entries.len() * shape.entry_bytes(own), 0);
                    shape
                        .convert_entries(kv_format, room, own, &mut converted)
                        .map_err(Error::at(|| "reading a session"))?;
                    &converted[..]
                };
                runtime
                    .device
                    .load_state(state, entries, bytes)
                    .map_err(Error::at(|| "reading a session"))
            });
        let mut runtime = engine.lock();
        if let Err(error) = read {
            if is_empty {
                self.timeline.states = timeline.states;
                runtime.reset(&mut self.timeline)?;
            } else {
                runtime.drop_timeline(timeline);
            }
            return Err(error);
        }
        runtime.replace(&mut self.timeline, timeline);
        // A read error here is reported to the step that needs the expert. The session is complete.
        let _ = runtime.warm(&hot);
        Ok(())
    }

    /// Like [`Session::sync`], but restores from a snapshot in `folder` if it shares a longer
    /// prefix with `tokens` than the session and the prefix cache do.
    ///
    /// # Errors
    /// As [`Session::sync`]. A snapshot that cannot be used is skipped.
    pub fn sync_from<'a>(
        &mut self,
        folder: &SnapshotFolder,
        prompt: impl Into<Prompt<'a>>,
        control: &mut StepControl<'_>,
    ) -> Result<Synced, Error> {
        let prompt = prompt.into();
        self.check_prompt(prompt)?;
        let had = self.timeline.tokens.len();
        let same = self.timeline.key().common_len(prompt.key());
        let is_restored = self.restore_longer(folder, prompt.key(), 1);
        let synced = self.sync(prompt, control)?;
        match is_restored {
            true => Ok(Synced { restored: synced.reused, rewound: had - same, ..synced }),
            false => Ok(synced),
        }
    }

    /// Restores the snapshot in `folder` with the longest prefix of `key`, if that has at least
    /// `gain` tokens more than the session and the prefix cache have. Returns whether it did.
    fn restore_longer(&mut self, folder: &SnapshotFolder, key: PrefixKey<'_>, gain: usize) -> bool {
        if key.len() < self.len_in_memory(key) + gain {
            return false;
        }
        let truncatable = self.engine.lock().rewind.any_length();
        let Ok(expected) = self.engine.expectation(self.engine.kv_format()) else { return false };
        let Some((path, len)) = folder.find(&expected, key, truncatable) else { return false };
        let is_restored = self.restore_found(&path, key, len, gain);
        if is_restored {
            folder.touch(&path);
        }
        is_restored
    }

    /// Restores a snapshot that has the first `len` tokens of `key`, if those are at least `gain`
    /// more than the session and the prefix cache have. Returns whether it did.
    pub(crate) fn restore_found(
        &mut self,
        path: &Path,
        key: PrefixKey<'_>,
        len: usize,
        gain: usize,
    ) -> bool {
        len >= self.len_in_memory(key) + gain && self.restore(path).is_ok()
    }

    /// Length of the prefix of `key` that the session or the prefix cache has.
    fn len_in_memory(&self, key: PrefixKey<'_>) -> usize {
        self.usable_prefix_len(key).max(self.engine.cached_prefix_len(key))
    }

    /// Saves the session to a snapshot folder for [`Session::sync_from`] and keeps the folder
    /// within its limit. Returns the file. Returns `None` if the file alone would exceed the limit,
    /// or if the session [is lossy](Session::is_lossy).
    ///
    /// # Errors
    /// As [`Session::snapshot`].
    pub fn snapshot_to(&self, folder: &SnapshotFolder) -> Result<Option<PathBuf>, Error> {
        self.mark()?.save_to(folder)
    }
}

impl Mark {
    /// Saves a file of at most `limit` bytes. Returns the bytes that the file has or would have.
    /// The mark does not change, so sessions can advance meanwhile.
    /// An entry of a prefix cache has the identity of the model's `files`.
    fn save(
        &self,
        path: &Path,
        options: SnapshotOptions,
        files: Option<ModelId>,
        limit: u64,
    ) -> Result<u64, Error> {
        let MarkState { engine, timeline } = &*self.state;
        let (own, kv_format) =
            (engine.kv_format(), options.kv_format.unwrap_or(engine.kv_format()));
        if kv_format.is_wider_than(own) {
            return Err(SessionError::WiderKvFormat { own, wanted: kv_format }.into());
        }
        let hot =
            if options.hot_experts { engine.lock().cache.experts_in_memory() } else { Vec::new() };
        if !engine.check_files()? {
            return Err(SessionError::Arriving.into());
        }
        let expected = engine.expectation(kv_format)?;
        let name = engine
            .folder()
            .file_name()
            .map_or_else(Default::default, |name| name.to_string_lossy());
        let contents = SnapshotContents {
            model: expected.model,
            files,
            name: &name,
            kv_format: &expected.kv_format,
            stored: expected.stored.as_deref(),
            lossy: own.is_lossy() || kv_format != own || timeline.is_lossy,
            exact: expected.exact,
            experts: engine.division_of(timeline),
            vocab: expected.vocab,
            written: timeline.written as u64,
            key: timeline.key(),
            logits: Some(&timeline.logits[..]).filter(|logits| !logits.is_empty()),
            hot: &hot,
            states: saved_states(engine, timeline, kv_format),
        };
        let bytes = contents.bytes()?;
        if bytes > limit {
            return Ok(bytes);
        }
        let mut writer = SnapshotWriter::create(path, &contents)?;
        let (mut room, mut converted) = (vec![0; COPY_BYTES], Vec::new());
        for_each_piece(engine, timeline, |StatePiece { state, shape, entries, .. }| {
            let count = entries.len();
            let room = &mut room[..count * shape.entry_bytes(own)];
            let saved = engine.lock().device.save_state(state, entries, room);
            saved.map_err(Error::at(|| "saving a session"))?;
            if kv_format == own {
                return writer.write(room);
            }
            converted.resize(count * shape.entry_bytes(kv_format), 0);
            shape
                .convert_entries(own, room, kv_format, &mut converted)
                .map_err(Error::at(|| "saving a session"))?;
            writer.write(&converted)
        })?;
        writer.finish().map(|()| bytes)
    }

    /// Saves the mark to a snapshot folder, as [`Session::snapshot_to`] does.
    ///
    /// # Errors
    /// As [`Session::snapshot`].
    pub(crate) fn save_to(&self, folder: &SnapshotFolder) -> Result<Option<PathBuf>, Error> {
        let MarkState { engine, timeline } = &*self.state;
        // Weights that are still arriving may be found to be wrong.
        if timeline.is_lossy || !engine.check_files()? {
            return Ok(None);
        }
        let expected = engine.expectation(engine.kv_format())?;
        let path = folder.path_for(&expected, timeline.key());
        folder.make_anew();
        let bytes = match self.equivalent_file_bytes(&path, &expected) {
            Some(bytes) => bytes,
            None => self.save(&path, SnapshotOptions::default(), expected.files, folder.limit())?,
        };
        if bytes > folder.limit() {
            return Ok(None);
        }
        folder.touch(&path);
        folder.shrink()?;
        Ok(Some(path))
    }

    /// Bytes of an equivalent snapshot at `path`: complete, matching, and with logits if the
    /// mark has them.
    fn equivalent_file_bytes(&self, path: &Path, expected: &SnapshotRequirements) -> Option<u64> {
        let snapshot = Snapshot::open(path).ok()?;
        let has_logits = snapshot.header().logits || self.state.timeline.logits.is_empty();
        let is_equivalent = has_logits
            && snapshot.key() == self.state.timeline.key()
            && snapshot.fits(expected).is_ok();
        (is_equivalent && snapshot.verify().is_ok()).then(|| snapshot.bytes())
    }
}

/// Filled entries of all states of a timeline, as spans.
fn state_spans(engine: &Engine, timeline: &Timeline) -> Vec<Span> {
    let filled = |state: &LayerState| state.filled(timeline.tokens.len(), timeline.written);
    let runtime = engine.lock();
    let states = timeline.states.iter().take(runtime.draft_limits.own_layers).flatten().flatten();
    let filled_states = states.zip(runtime.layer_states.iter().flatten());
    filled_states.map(|(state, layout)| Span::new(*state, 0, filled(layout))).collect()
}

/// A range of entries of a state.
struct StatePiece {
    /// Index among the timeline's states.
    index: usize,
    state: State,
    shape: StateShape,
    entries: Range<usize>,
}

/// Calls `f` with the filled entries of each state, in order and in pieces of at most
/// [`COPY_BYTES`].
fn for_each_piece(
    engine: &Engine,
    timeline: &Timeline,
    mut f: impl FnMut(StatePiece) -> Result<(), Error>,
) -> Result<(), Error> {
    let (layouts, sizes): (Vec<_>, Vec<_>) = {
        let runtime = engine.lock();
        let states = runtime.layer_states.iter().take(runtime.draft_limits.own_layers).flatten();
        states.map(|state| (*state, runtime.device.entry_bytes(state.shape))).unzip()
    };
    let states = timeline.states.iter().flatten().flatten();
    for (index, ((state, layout), bytes)) in states.zip(layouts).zip(sizes).enumerate() {
        let (shape, count) = (layout.shape, layout.filled(timeline.tokens.len(), timeline.written));
        let step = (COPY_BYTES / bytes.max(1)).max(1);
        for first in (0..count).step_by(step) {
            let entries = first..count.min(first + step);
            f(StatePiece { index, state: *state, shape, entries })?;
        }
    }
    Ok(())
}

/// Descriptions of a timeline's states for the file, with the KV cache in format `kv_format`.
fn saved_states(engine: &Engine, timeline: &Timeline, kv_format: KvFormat) -> Vec<SavedState> {
    let filled = |state: LayerState| state.filled(timeline.tokens.len(), timeline.written);
    describe_states(engine, kv_format, |state| filled(state) as u64)
}

fn describe_states(
    engine: &Engine,
    kv_format: KvFormat,
    entries: impl Fn(LayerState) -> u64,
) -> Vec<SavedState> {
    let context = engine.plan().context;
    // The drafter's are computed anew.
    let layers = engine.blueprint().layers.iter().take(engine.blueprint().own_layers());
    let layers = layers.enumerate();
    let states = layers.flat_map(|(layer, blueprint)| {
        let states = blueprint.layer_states(context, engine.plan().chunk).into_iter().enumerate();
        states.map(move |(index, state)| (layer, index, state))
    });
    states
        .map(|(layer, index, state)| SavedState {
            layer,
            index: index as u8,
            entries: entries(state),
            entry_bytes: state.shape.entry_bytes(kv_format) as u64,
            shape: match state.shape {
                StateShape::Recurrent { len } => format!("recurrent, {len}"),
                StateShape::KeyValue { kv_heads, key_width, value_width, positions } => {
                    let which = match state.entries {
                        StateEntries::Recurrent | StateEntries::Positions => String::new(),
                        StateEntries::Ring => format!(", the last {positions}"),
                        StateEntries::Blocks { ratio } => format!(", one of {ratio}"),
                        StateEntries::RingAndBlocks { ring, ratio } => {
                            format!(", the last {ring}, then one of {ratio}")
                        }
                    };
                    format!("{kv_heads} heads of {key_width} and {value_width}{which}")
                }
            },
        })
        .collect()
}

impl Engine {
    /// Length of the longest prefix of `key` that the prefix cache has.
    pub(crate) fn cached_prefix_len(&self, key: PrefixKey<'_>) -> usize {
        let runtime = self.lock();
        let truncatable = runtime.rewind.any_length();
        runtime.prefix_cache.longest(key, truncatable).map_or(0, |found| found.len)
    }

    /// Bytes of all states: of sessions and of the prefix cache. Memory that they share counts
    /// once.
    pub(crate) fn states_held(&self) -> u64 {
        self.lock().device.states_held()
    }

    /// A mark of exactly these contents, if the prefix cache has their state.
    pub(crate) fn cached_mark(&self, key: PrefixKey<'_>) -> Option<Mark> {
        let mut runtime = self.lock();
        let id = runtime.prefix_cache.find_whole(key)?;
        let cached = runtime.prefix_cache.take(id)?;
        let forked = runtime.fork(&cached, key.len());
        runtime.prefix_cache.give_back(id, cached);
        drop(runtime);
        Some(Mark::new(self.clone(), forked.ok()?))
    }

    /// Number of the division of experts by which all rows of a timeline were computed, or
    /// [`OTHER_DIVISION`].
    fn division_of(&self, timeline: &Timeline) -> Option<String> {
        let is_other =
            timeline.has_other_placement || timeline.corrections != self.lock().corrections;
        if is_other { Some(OTHER_DIVISION.into()) } else { self.plan().experts_number() }
    }

    /// Requirements on a snapshot that this engine can restore, with the KV cache stored in format
    /// `kv_format`.
    ///
    /// # Errors
    /// The weights that identify the model cannot be read.
    pub(crate) fn expectation(&self, kv_format: KvFormat) -> Result<SnapshotRequirements, Error> {
        let ModelIdentity { model, files } = self.identity()?;
        Ok(SnapshotRequirements {
            model,
            files: Some(files),
            kv_format: self.kv_format().name().into(),
            stored: (kv_format != self.kv_format()).then(|| kv_format.name().into()),
            exact: self.is_exact(),
            experts: self.plan().experts_number(),
            needs_division: self.plan().follows_recorded(),
            vocab: self.blueprint().vocab,
            context: self.plan().context,
            states: describe_states(self, kv_format, |state| state.shape.entries() as u64),
        })
    }
}
