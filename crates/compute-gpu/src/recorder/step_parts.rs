//! Ends of the parts of a step that is being recorded.

use moeflux_ops::{Error, HandOverShape};

use super::{
    super::card::{PartEnd, PartEndKind},
    hand_over::{Exchange, HandOverSize, unsupported},
    recorder::Recorder,
};

impl Recorder {
    /// Memory for a hand-over of this size.
    pub(crate) fn exchange(&self, size: HandOverSize) -> Result<Exchange, Error> {
        let hand_overs = self.hand_overs.as_ref().ok_or_else(unsupported)?;
        let HandOverShape { ids, input, results } = hand_overs.shape;
        if size.ids > ids || size.input > input || size.results > results {
            return Err(Error::Shape(format!(
                "a hand-over of {size:?}, more than the reserved {:?}",
                hand_overs.shape
            )));
        }
        Ok(hand_overs.exchange.clone())
    }

    /// Ends the part of the recorded step that the host waits for.
    pub(crate) fn end_part_for_host(&mut self, size: HandOverSize) -> Result<(), Error> {
        self.end_part(PartEndKind::Signal, |sizes| {
            sizes.push(size);
            true
        })
    }

    /// Starts the part of the recorded step that waits for the host: for `rows` results of `width`
    /// values.
    pub(crate) fn start_part_after_host(&mut self, rows: usize, width: usize) -> Result<(), Error> {
        self.end_part(PartEndKind::Wait, |sizes| match sizes.last_mut() {
            Some(size) if size.results == 0 => {
                (size.results, size.width) = (rows * width, width);
                true
            }
            _ => false,
        })
    }

    fn end_part(
        &mut self,
        kind: PartEndKind,
        note: impl FnOnce(&mut Vec<HandOverSize>) -> bool,
    ) -> Result<(), Error> {
        if self.compile_only {
            return Ok(());
        }
        let dispatches = self.queued.len();
        let Some(recording) = &mut self.recording else {
            return Err(Error::Device("work is handed to the host in recorded steps only".into()));
        };
        if !note(&mut recording.hand_overs) {
            return Err(Error::Device("a hand-over whose results were taken before".into()));
        }
        recording.ends.push(PartEnd { dispatches, kind });
        Ok(())
    }

    /// Lets the submitted step run to its end without the host, and forgets the reports of its
    /// kernels.
    pub(crate) fn abandon_hand_overs(&mut self) {
        let Some(hand_overs) = &self.hand_overs else { return };
        hand_overs.abandon();
        self.end_pass();
        let report = self.report.raw.clone();
        self.encoder().clear_buffer(&report, 0, None);
    }
}
