//! Recording of a whole step, to be submitted later.

use moeflux_ops::Error;

use super::{
    super::{
        card::{PartEnd, PartEndKind},
        store::states::KvEnd,
    },
    encode_threads::{EncodedStep, PartsOfStep, PendingCommands},
    hand_over::HandOverSize,
    recorder::Recorder,
    upload::UploadOffset,
};

/// Tokens of a lookup in a recorded step.
pub(crate) struct RecordedLookup {
    /// Offset in the upload buffer.
    pub(crate) offset: UploadOffset,
    /// Places in the list of tokens that is given at submission.
    pub(crate) places: Vec<usize>,
}

/// Step that is being recorded.
pub(super) struct StepRecording {
    lookups: Vec<RecordedLookup>,
    /// Number of tokens.
    tokens: usize,
    kv_ends: Vec<KvEnd>,
    /// Ends of its parts.
    pub(super) ends: Vec<PartEnd>,
    pub(super) hand_overs: Vec<HandOverSize>,
    /// Whether it needed something that cannot wait for the step's start.
    pub(super) spoiled: bool,
    /// Count of dispatches before the recording.
    dispatches_before: u64,
}

/// Commands of a recorded step.
pub(crate) struct RecordedCommands {
    commands: PendingCommands,
    pub(crate) lookups: Vec<RecordedLookup>,
    /// Ends of the positions of KV caches that it writes.
    pub(crate) kv_ends: Vec<KvEnd>,
    hand_overs: Vec<HandOverSize>,
    dispatches: u64,
}

impl Recorder {
    /// Starts the recording of a step with a number of tokens. Nothing is submitted until it stops.
    pub(crate) fn start_recording(&mut self, tokens: usize) {
        self.recording = Some(StepRecording {
            lookups: Vec::new(),
            tokens,
            kv_ends: Vec::new(),
            ends: Vec::new(),
            hand_overs: Vec::new(),
            spoiled: false,
            dispatches_before: self.counters.dispatches,
        });
    }

    /// Stops the recording. `None` unless it is `complete`, not spoiled and has tokens. Its
    /// dispatches count once they are submitted.
    pub(crate) fn stop_recording(&mut self, complete: bool) -> Option<RecordedCommands> {
        let recording = self.recording.take()?;
        let dispatches = self.counters.dispatches - recording.dispatches_before;
        self.counters.dispatches = recording.dispatches_before;
        self.recorded = 0;
        let queued = self.take_queued();
        self.close_pass();
        let encoder = self.encoder.take();
        let order = [PartEndKind::Signal, PartEndKind::Wait].into_iter().cycle();
        let alternate = recording.ends.len().is_multiple_of(2)
            && recording.ends.iter().zip(order).all(|(end, kind)| end.kind == kind);
        if !complete || recording.spoiled || recording.lookups.is_empty() || !alternate {
            return None;
        }
        let StepRecording { lookups, kv_ends, ends, hand_overs, .. } = recording;
        let parts = match (ends.is_empty(), &self.hand_overs) {
            (true, _) => None,
            (false, Some(hand_overs)) => Some(PartsOfStep { encoder: hand_overs.encoder(), ends }),
            (false, None) => return None,
        };
        let commands = self.encode_threads.encode(&self.device, encoder, queued, parts);
        Some(RecordedCommands { commands, lookups, kv_ends, hand_overs, dispatches })
    }

    /// Submits a recorded step after everything recorded since.
    pub(crate) fn submit_recorded(&mut self, step: RecordedCommands) {
        self.submit();
        match (step.commands.wait(), &mut self.hand_overs) {
            (Some(EncodedStep::Whole(commands)), _) => self.submit_commands(commands),
            (Some(EncodedStep::Parts(parts)), Some(hand_overs)) => {
                let submission = hand_overs.submit(parts, step.hand_overs);
                self.note_submission(submission);
            }
            _ => self.fault.set("a recorded step could not be encoded".into()),
        }
        self.counters.dispatches += step.dispatches;
    }

    /// Ends of the positions of KV caches that the step that is being recorded writes.
    pub(crate) fn recorded_kv_ends(&mut self) -> Option<&mut Vec<KvEnd>> {
        self.recording.as_mut().map(|recording| &mut recording.kv_ends)
    }

    /// Whether a step is being recorded.
    pub(crate) const fn is_recording(&self) -> bool {
        self.recording.is_some()
    }

    /// Whether dispatches only compile their kernels, from now on.
    pub(crate) const fn set_compile_only(&mut self, on: bool) {
        self.compile_only = on;
    }

    /// Fails with `message` while a step is being recorded, and spoils the step.
    pub(crate) fn refuse_while_recording(&mut self, message: &str) -> Result<(), Error> {
        match &mut self.recording {
            Some(recording) => {
                recording.spoiled = true;
                Err(Error::Device(message.into()))
            }
            None => Ok(()),
        }
    }

    /// Notes where the tokens of a lookup are uploaded. While a step is being recorded they are
    /// places in its list of tokens; others spoil the step.
    pub(crate) fn note_lookup(&mut self, offset: UploadOffset, tokens: &[u32]) {
        if let Some(recording) = &mut self.recording {
            let places: Vec<usize> = tokens.iter().map(|place| *place as usize).collect();
            recording.spoiled |= places.iter().any(|place| *place >= recording.tokens);
            recording.lookups.push(RecordedLookup { offset, places });
        }
    }
}
